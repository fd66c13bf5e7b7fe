"""Compute parameters: low-precision copies that programs read, while optimizers update float32 masters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from autopar.ir.program import Program
from autopar.runtime.params.zero_gather import ZeroParamGather


class ComputeParams:
    """Low-precision copies of a rank's weights, one for each weight that a program reads so.

    A copy is a leaf of autograd; its gradients are added to its master's main grad (`grad_buffer`). The copies are
    refreshed once a step. Under ZeRO the copy of a trained weight lies in the memory that `ZeroParamGather` fills.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        watch: Callable[[str, nn.Parameter], None],
        shared: ZeroParamGather | None = None,
    ) -> None:
        """Nothing is copied yet.

        Args:
            weights: all weights of the rank, by name.
            watch: called with the name of a weight and its copy, if the copy gets gradients.
            shared: the all-gather of ZeRO, or None.
        """
        self.weights, self.watch, self.zero_gather = weights, watch, shared
        self.copies: dict[str, nn.Parameter] = {}
        self.local_copies: list[str] = []  # weights whose copies this rank makes from its own masters
        self.versions: list[int] = []
        self.masters_read = False  # whether a program reads a master whose copies are gathered

    def copies_for(self, program: Program) -> Mapping[str, nn.Parameter]:
        """Copies that a program reads, by name of the weight."""
        mastered = [weight for weight in program.weights if weight.master]
        for weight in mastered:
            if weight.name not in self.copies:
                self.add(weight.name, getattr(torch, weight.dtype))
        if self.zero_gather is not None:
            self.masters_read |= any(not w.master and w.name in self.zero_gather.copies for w in program.weights)
        return {weight.name: self.copies[weight.name] for weight in mastered}

    def add(self, name: str, dtype: torch.dtype) -> None:
        master = self.weights[name]
        gathered = self.zero_gather.copies.get(name) if self.zero_gather is not None else None
        if gathered is not None:
            assert gathered.dtype == dtype, f"{name}: copies in {gathered.dtype} and {dtype}"
        else:
            self.local_copies.append(name)
        tensor = gathered if gathered is not None else master.detach().to(dtype)
        copy = self.copies[name] = nn.Parameter(tensor, master.requires_grad)
        if master.requires_grad:
            self.watch(name, copy)
        self.versions = []

    def invalidate(self) -> None:
        """Masters have changed without a new version (through ``weight.data``): refresh next time."""
        self.versions = []
        if self.zero_gather is not None:
            self.zero_gather.mark_overwritten()

    def refresh(self, always: bool = False) -> None:
        """Update the copies from their masters, if these have changed.

        Starts the all-gather of copies from other replicas; `waits` wait for them.

        Args:
            always: also without changes, as in a step that will be replayed.
        """
        if self.zero_gather is not None:
            self.zero_gather.gather(always)
            if self.masters_read:
                self.zero_gather.gather_masters(always)
            if any(name in self.zero_gather.bucket_of for name in self.local_copies):
                self.zero_gather.wait()
        if not self.local_copies:
            return
        masters = [self.weights[name].detach() for name in self.local_copies]
        versions = [master._version for master in masters]
        if always or versions != self.versions:
            torch._foreach_copy_([self.copies[name].detach() for name in self.local_copies], masters)
            self.versions = versions

    def free_remote_masters(self) -> None:
        """Before training steps: free the masters that they do not read."""
        if self.zero_gather is not None and not self.masters_read:
            self.zero_gather.free_remote_masters()

    @property
    def waits(self) -> Mapping[str, Callable[[], None]]:
        """Waits for weights that may be under all-gather, by name."""
        return self.zero_gather.waits if self.zero_gather is not None else {}

    def wait(self) -> None:
        """At the end of a step: wait for all-gathers that no program has waited for."""
        if self.zero_gather is not None:
            self.zero_gather.wait()

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies, and of padding between weights."""
        shared = self.zero_gather.num_bytes if self.zero_gather is not None else 0
        return shared + sum(self.copies[name].nbytes for name in self.local_copies)

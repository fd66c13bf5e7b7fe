"""Compute parameters: low-precision copies that programs read, while optimizers update float32 masters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from autopar.ir.program import Program
from autopar.runtime.params.sharded_params import ShardedParams


class ComputeParams:
    """Low-precision copies of a rank's weights, one for each weight that a program reads so.

    A copy is a leaf of autograd; its gradients are added to its master's main grad (`grad_buffer`). The copies are
    refreshed once a step. Copies of sharded weights are gathered (`sharded_params`).
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        watch: Callable[[str, nn.Parameter], None],
        sharded: ShardedParams | None = None,
    ) -> None:
        """Nothing is copied yet.

        Args:
            weights: all weights of the rank, by name.
            watch: called with the name of a weight and its copy, if the copy gets gradients.
            sharded: the sharded weights of ZeRO, or None.
        """
        self.weights, self.watch, self.sharded = weights, watch, sharded
        self.copies: dict[str, nn.Parameter] = {}
        self.local_copies: list[str] = []  # weights whose copies this rank makes from its own masters
        self.versions: list[int] = []

    def copies_for(self, program: Program) -> Mapping[str, nn.Parameter]:
        """Copies that a program reads, by name of the weight."""
        mastered = [weight for weight in program.weights if weight.master]
        for weight in mastered:
            if weight.name not in self.copies:
                self.add(weight.name, getattr(torch, weight.dtype))
        if self.sharded is not None:
            self.sharded.read_masters |= {w.name for w in program.weights if not w.master} & self.sharded.copied
        return {weight.name: self.copies[weight.name] for weight in mastered}

    def add(self, name: str, dtype: torch.dtype) -> None:
        master = self.weights[name]
        if self.sharded is not None and name in self.sharded.copied:
            copy = self.sharded.leaves[name]
            assert copy.dtype == dtype, f"{name}: copies in {copy.dtype} and {dtype}"
        else:
            self.local_copies.append(name)
            copy = nn.Parameter(master.detach().to(dtype), master.requires_grad)
        self.copies[name] = copy
        if master.requires_grad:
            self.watch(name, copy)
        self.versions = []

    def invalidate(self) -> None:
        """Masters have changed without a new version (through ``weight.data``): refresh next time."""
        self.versions = []
        if self.sharded is not None:
            self.sharded.mark_updated()

    def refresh(self, order: Sequence[int] = (), always: bool = False) -> None:
        """Update the copies from their masters, if these have changed.

        Starts the gathers of sharded weights; `wait_for` waits for them.

        Args:
            order: as of `ShardedParams.begin`.
            always: also without changes, as in a step that will be replayed.
        """
        if self.sharded is not None:
            self.sharded.begin(order, always)
            for name in self.local_copies:
                if name in self.sharded.bucket_of:
                    self.sharded.read([self.sharded.bucket_of[name]])
                    self.copies[name].detach().copy_(self.weights[name].detach())
        own = [n for n in self.local_copies if self.sharded is None or n not in self.sharded.bucket_of]
        if not own:
            return
        masters = [self.weights[name].detach() for name in own]
        versions = [master._version for master in masters]
        if always or versions != self.versions:
            torch._foreach_copy_([self.copies[name].detach() for name in own], masters)
            self.versions = versions

    def wait_for(self, names: Collection[str]) -> Callable[[], None] | None:
        """Function that waits for weights before they are read; None if none of them is sharded."""
        return self.sharded.wait_for(names) if self.sharded is not None else None

    def wait(self) -> None:
        """At the end of a step: wait for gathers that no program has waited for."""
        if self.sharded is not None:
            self.sharded.drain()

    @property
    def num_bytes(self) -> int:
        """Bytes of local copies, and of sharded weights."""
        sharded = self.sharded.num_bytes if self.sharded is not None else 0
        return sharded + sum(self.copies[name].nbytes for name in self.local_copies)

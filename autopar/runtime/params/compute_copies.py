"""Low-precision copies of a rank's weights: what programs read while the float32 masters are optimised."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from autopar.ir.program import Program
from autopar.runtime.params.zero1_gather import ZeroParamGather


class ComputeParams:
    """What programs read of a rank's weights: the weights, and the copies that programs have asked for.

    A copy is a leaf of autograd; its gradients are moved to its master's (`autopar.runtime.params.grad_buffer`). Under
    ZeRO-1 a copy of a trained weight lies in the memory that the replicas fill together.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        watch: Callable[[str, nn.Parameter], None],
        shared: ZeroParamGather | None = None,
    ) -> None:
        """Nothing is copied yet.

        Args:
            weights: all of the rank's, by name.
            watch: is told each copy that will get gradients, and the name of its master.
            shared: of the weights that replicas update each in part.
        """
        self.weights, self.watch, self.zero_gather = weights, watch, shared
        self.copies: dict[str, nn.Parameter] = {}
        self.local_copies: list[str] = []  # copies that this rank makes of its own masters
        self.versions: list[int] = []
        self.masters_read = False  # whether a program reads a weight itself that replicas share as a copy

    def copies_for(self, program: Program) -> Mapping[str, nn.Parameter]:
        """The copies that a program reads, by name of the weight."""
        wanted = [weight for weight in program.weights if weight.master]
        for weight in wanted:
            if weight.name not in self.copies:
                self.add(weight.name, getattr(torch, weight.dtype))
        if self.zero_gather is not None:
            self.masters_read |= any(not w.master and w.name in self.zero_gather.copies for w in program.weights)
        return {weight.name: self.copies[weight.name] for weight in wanted}

    def add(self, name: str, dtype: torch.dtype) -> None:
        master = self.weights[name]
        given = self.zero_gather.copies.get(name) if self.zero_gather is not None else None
        if given is not None:
            assert given.dtype == dtype, f"{name}: copies in {given.dtype} and {dtype}"
        else:
            self.local_copies.append(name)
        tensor = given if given is not None else master.detach().to(dtype)
        copy = self.copies[name] = nn.Parameter(tensor, master.requires_grad)
        if master.requires_grad:
            self.watch(name, copy)
        self.versions = []

    def invalidate(self) -> None:
        """The masters have changed in a way that they do not show (``weight.data``)."""
        self.versions = []
        if self.zero_gather is not None:
            self.zero_gather.mark_overwritten()

    def refresh(self, always: bool = False) -> None:
        """Make what programs read equal to the masters, if those have changed since the last time.

        What comes from other replicas is under way then: `waits` wait for it.

        Args:
            always: also if they have not, as in a step that will be replayed.
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
        """Training steps follow: give up the memory of masters that nobody reads in them."""
        if self.zero_gather is not None and not self.masters_read:
            self.zero_gather.free_remote_masters()

    @property
    def waits(self) -> Mapping[str, Callable[[], None]]:
        """For weights that may be under way, what waits for them."""
        return self.zero_gather.waits if self.zero_gather is not None else {}

    def wait(self) -> None:
        """A step is over: wait for what nobody has read."""
        if self.zero_gather is not None:
            self.zero_gather.wait()

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies, and of the padding between weights."""
        shared = self.zero_gather.num_bytes if self.zero_gather is not None else 0
        return shared + sum(self.copies[name].nbytes for name in self.local_copies)

"""Low-precision copies of a rank's weights: what programs read while the float32 masters are optimised."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from autopar.ir import Program


class Copies:
    """The copies that programs have asked for, made of their masters and kept equal to them.

    A copy is a leaf of autograd. What a backward leaves in its gradient is moved on at once: added to the master's, in
    the master's dtype, as autocast does for every microbatch.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], came: Callable[[str], None]) -> None:
        """Nothing is copied yet.

        Args:
            weights: all of the rank's, by name.
            came: is told the name of each master whose gradient has grown.
        """
        self.weights, self.came = weights, came
        self.copies: dict[str, nn.Parameter] = {}
        self.versions: list[int] = []

    def read_by(self, program: Program) -> Mapping[str, nn.Parameter]:
        """The copies that a program reads, by name of the weight."""
        wanted = [weight for weight in program.weights if weight.master]
        for weight in wanted:
            if weight.name not in self.copies:
                self.add(weight.name, getattr(torch, weight.dtype))
        return {weight.name: self.copies[weight.name] for weight in wanted}

    def add(self, name: str, dtype: torch.dtype) -> None:
        master = self.weights[name]
        copy = nn.Parameter(master.detach().to(dtype), master.requires_grad)
        if master.requires_grad:
            copy.register_post_accumulate_grad_hook(lambda _: self.move(name))
        self.copies[name] = copy
        self.forget()

    def move(self, name: str) -> None:
        """Move a copy's gradient into its master's."""
        copy, master = self.copies[name], self.weights[name]
        assert copy.grad is not None
        if master.grad is None:
            master.grad = copy.grad.to(master.dtype)
        else:
            master.grad.add_(copy.grad)
        copy.grad = None
        self.came(name)

    def forget(self) -> None:
        """The masters have changed in a way that they do not show (``weight.data``)."""
        self.versions = []

    def refresh(self) -> None:
        """Make the copies equal to their masters, if those have changed since the last time."""
        if not self.copies:
            return
        masters = [self.weights[name].detach() for name in self.copies]
        versions = [master._version for master in masters]
        if versions != self.versions:
            torch._foreach_copy_([copy.detach() for copy in self.copies.values()], masters)
            self.versions = versions

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.nbytes for copy in self.copies.values())

"""Main grads of a rank: gradients summed over microbatches in flat memory, with few kernel launches per bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autopar.ops import wgrad_accumulation
from autopar.runtime.params.flat_buckets import FlatBucket
from autopar.runtime.params.grad_sums import add_gradients, take_gradients

MAX_DEFERRED_BYTES = 2**20  # smaller gradients of a bucket are added after the backward


class GradBuffer:
    """Main grads: flat sums of the gradients that backwards produce.

    Programs read leaves of autograd: the parameters, or low-precision copies of them. A backward writes a gradient into
    each leaf. The buffer adds it to the parameter's main grad in the parameter's dtype, as autocast does for every
    microbatch, and frees it. The gradients of a bucket are added together: when the last of them is ready, or after the
    backward.

    Compiled linear layers add to the main grads themselves (wgrad accumulation fusion), which they get from
    `main_grad_of`. The small gradients of other layers are then added after the backward, for all buckets together,
    unless ``flush_eagerly`` is set because a reduction waits for them.

    `attach_to_params` makes the main grads the parameters' ``grad``. `detach_from_params` undoes it, because autograd
    would otherwise add to them parameter by parameter. A step begins without main grads: `clear` ends each step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], buckets: Sequence[FlatBucket]) -> None:
        """Watch the parameters; a bucket's memory is allocated at its first gradient."""
        self.parameters, self.buckets = parameters, tuple(buckets)
        self.bucket_of = {name: i for i, bucket in enumerate(self.buckets) for name in bucket.names}
        self.like = {
            name: parameters[name].detach().to("meta") for name in self.bucket_of
        }  # shapes and strides; the parameters themselves may be without memory
        # Called with the names whose main grads have grown.
        self.on_accumulated: Callable[[Sequence[str]], None] = lambda names: None
        self.flats: list[torch.Tensor | None] = [None] * len(self.buckets)
        self.views: dict[str, torch.Tensor] = {}
        # By bucket: weights whose gradients are ready, with the gradient unless a layer has added it.
        self.ready: list[list[tuple[str, torch.Tensor | None]]] = [[] for _ in self.buckets]
        self.main_grads: dict[str, MainGrad] = {}
        self.hooks: list[RemovableHandle] = []
        self.accumulated: set[str] = set()
        self.flush_eagerly = False
        for name in self.bucket_of:
            self.watch(name, parameters[name])

    def watch(self, name: str, leaf: nn.Parameter) -> None:
        """Add the gradients of another leaf to a parameter's main grad too."""
        self.hooks.append(take_gradients(self, name, leaf))

    def main_grad_of(self, name: str) -> torch.Tensor | None:
        """Main grad of a weight, for a linear layer that adds to it.

        None for a weight that is not in a bucket, or that is empty and has no address.
        """
        if name not in self.main_grads and name in self.bucket_of and self.parameters[name].numel() > 0:
            self.flat(self.bucket_of[name])
            # ``.data`` has its own version counter, which autograd checks.
            self.main_grads[name] = MainGrad(self, name, self.views[name].data)
            wgrad_accumulation.register(self.main_grads[name].tensor, self.main_grads[name])
        return self.main_grads[name].tensor if name in self.main_grads else None

    def close(self) -> None:
        """Unregister the main grads, and stop watching."""
        for main_grad in self.main_grads.values():
            wgrad_accumulation.unregister(main_grad.tensor)
        for hook in self.hooks:
            hook.remove()
        self.main_grads.clear()
        self.hooks.clear()

    def mark_ready(self, name: str, gradient: torch.Tensor | None) -> None:
        """Note a gradient, which is to be added, or (None) that a layer has added it to the main grad."""
        index = self.bucket_of[name]
        self.ready[index].append((name, gradient))
        full = len(self.ready[index]) == len(self.buckets[index].names)
        if full and (self.flush_eagerly or not self.is_small(index)):
            self.flush_buckets([index])

    def is_small(self, index: int) -> bool:
        """Whether the ready gradients of a bucket take up little memory."""
        return sum(g.nbytes for _, g in self.ready[index] if g is not None) < MAX_DEFERRED_BYTES

    def flush(self) -> None:
        """After a backward: add the gradients of buckets that it did not fill, and deferred ones."""
        if deferred := self.flush_large():
            self.flush_buckets(deferred)

    def flush_large(self) -> list[int]:
        """After a backward: add the gradients of buckets that it did not fill; returns the buckets of deferred ones."""
        ready = [index for index, entries in enumerate(self.ready) if entries]
        for index in ready:
            if self.flush_eagerly or not self.is_small(index):
                self.flush_buckets([index])
        return [index for index in ready if self.ready[index]]

    def flat(self, index: int) -> torch.Tensor:
        """Main grads of a bucket, [bucket.numel]; allocated at the first call."""
        flat = self.flats[index]
        if flat is None:
            bucket = self.buckets[index]
            device = self.parameters[bucket.names[0]].device
            flat = self.flats[index] = torch.zeros(bucket.numel, dtype=bucket.dtype, device=device)
            self.views |= bucket.views(flat, self.like)
        return flat

    def flush_buckets(self, indices: Sequence[int]) -> None:
        """Add the ready gradients of buckets to their main grads, in a few calls for any number of gradients."""
        ready = [entry for index in indices for entry in self.ready[index]]
        for index in indices:
            self.ready[index] = []
            self.flat(index)
        names = tuple(name for name, _ in ready)
        add_gradients(self.views, [(name, g) for name, g in ready if g is not None], self.accumulated)
        del ready  # frees the gradients before a reduction starts
        self.on_accumulated(names)

    def with_zeros_for_missing(self, index: int) -> torch.Tensor:
        """Main grads of a bucket, with zeros where there is no gradient."""
        flat = self.flat(index)
        missing = [self.views[name] for name in self.buckets[index].names if name not in self.accumulated]
        if missing:
            torch._foreach_zero_(missing)
        return flat

    def absorb_param_grads(self) -> None:
        """Add gradients that the user has set by hand."""
        for name in self.bucket_of:
            gradient = self.parameters[name].grad
            if gradient is not None and gradient is not self.views.get(name):
                self.parameters[name].grad = None
                self.mark_ready(name, gradient)
        self.flush()

    def attach_to_params(self, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        """Make the main grads the gradients of the parameters, or of others by the same names."""
        holders = self.parameters if parameters is None else parameters
        for name in self.bucket_of.keys() & holders.keys():
            holders[name].grad = self.views[name] if name in self.accumulated else None

    def detach_from_params(self) -> None:
        """Before a backward: unset the parameters' gradients, and keep the main grads."""
        for name in self.accumulated:
            self.parameters[name].grad = None

    def clear(self) -> None:
        """Drop all main grads; their memory stays."""
        self.accumulated.clear()
        for entries in self.ready:
            entries.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes that stay allocated between steps."""
        return sum(flat.nbytes for flat in self.flats if flat is not None)


@dataclass(frozen=True, eq=False)
class MainGrad:
    """Main grad of a weight, as the linear layer that adds to it sees it."""

    gradients: GradBuffer
    name: str
    tensor: torch.Tensor

    def buffer(self) -> torch.Tensor:
        return self.tensor

    def is_initialized(self) -> bool:
        return self.name in self.gradients.accumulated

    def mark_accumulated(self) -> None:
        self.gradients.accumulated.add(self.name)
        self.gradients.mark_ready(self.name, None)

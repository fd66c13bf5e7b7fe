"""Gradients of weights that a split backward has left for later: from its layers' tensors into the main grads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.ir.program import DeferredWgrad
from autopar.ops.split_backward import convolution_gradients
from autopar.ops.wgrad_accumulation import OWNERS, add_product, takes_products
from autopar.runtime.params.grad_sums import GradSink

Captured = list[Tensor | None]  # per layer the gradient of its output and its input


class MainGrads(GradSink, Protocol):
    """Receiver of gradients that has keys of main grads too."""

    def main_grad_of(self, name: str) -> Tensor | None:
        """Key of a weight's main grad in `autopar.ops.wgrad_accumulation`."""
        ...


class _Slots(torch.autograd.Function):
    """Slots of one forward: their gradients go into a list."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, layers: Sequence[DeferredWgrad], captured: Captured) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.captured = captured
        return tuple(
            anchor.new_empty(1, dtype=getattr(torch, slot.dtype)).expand(slot.shape)
            for layer in layers
            for slot in layer.slots
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.captured += gradients
        return None, None, None


@dataclass(frozen=True)
class DeferredWgrads:
    """The layers of one program, with what their gradients need.

    Args:
        weights: the program's weights by name.
        main_grads: where gradients go.
    """

    layers: tuple[DeferredWgrad, ...]
    weights: Mapping[str, Tensor]
    main_grads: MainGrads
    device: torch.device

    @property
    def names(self) -> frozenset[str]:
        """Weights whose gradients are deferred."""
        return frozenset(name for layer in self.layers for name in layer.weights)

    def open_slots(self) -> tuple[tuple[Tensor, ...], Captured]:
        """Slots for one forward, and the list that its backward fills."""
        captured: Captured = []
        anchor = torch.empty((), device=self.device, requires_grad=True)
        return _Slots.apply(anchor, self.layers, captured), captured  # type: ignore[return-value]

    @torch.no_grad()
    def compute(self, captured: Captured) -> None:
        """Compute the gradients of a backward's weights, in the order in which an undivided backward does.

        A layer that the backward did not reach gets none. ``captured`` is emptied.
        """
        while captured:
            x, gradient = captured.pop(), captured.pop()
            layer = self.layers[len(captured) // 2]
            if x is not None and gradient is not None:
                self.compute_layer(layer, gradient, x)

    def compute_layer(self, layer: DeferredWgrad, gradient: Tensor, x: Tensor) -> None:
        if layer.convolution is not None:
            form, weight = layer.convolution, self.weights[layer.weight]
            arguments = form.stride, form.padding, form.dilation, form.groups
            bias_sizes = [weight.shape[0]] if layer.bias else None
            _, *made = convolution_gradients(
                gradient, x, weight, arguments, bias_sizes, (False, True, bool(layer.bias))
            )
            for name, grad in zip(layer.weights, made):
                self.main_grads.mark_ready(name, grad)
            return
        key = self.main_grads.main_grad_of(layer.weight) if layer.accumulates else None
        owner = OWNERS[key.data_ptr()] if key is not None and takes_products(key, x.dtype) else None
        if owner is None:
            self.main_grads.mark_ready(layer.weight, gradient.t() @ x)
        else:
            add_product(owner.buffer().data, gradient.t(), x, owner.is_initialized())
            owner.mark_accumulated()

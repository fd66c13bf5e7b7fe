"""Outputs with a graph: a ``loss.backward()`` of the caller's runs the backward of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autopar.api.dispatch import BatchRequest, Dispatcher
from autopar.api.kept_graphs import KeptGraph
from autopar.ir.graph import Mode
from autopar.ir.pytree import tree_map
from autopar.trace.call import Call


def outputs_with_graph(dispatcher: Dispatcher, mode: Mode, call: Call) -> Any:
    """Outputs of a batch, on the device of its inputs, whose backward accumulates the gradients of the ranks."""
    schedule = dispatcher.plan.schedule
    request = BatchRequest("forward_graph", mode, schedule, call, keep_outputs=True, keeps_graph=True)
    results, outputs = dispatcher.carry_out(request)
    assert outputs is not None
    graph, parts = dispatcher.newest_graph, dispatcher.output_parts(outputs, results)
    return outputs.join(attached(parts, graph.tracked, device_of(call), partial(run_backward, dispatcher, graph)))


def device_of(call: Call) -> torch.device:
    """Device of a call's first input that has values; the CPU if there is none."""
    devices = [leaf.device for leaf in call.leaves if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
    return devices[0] if devices else torch.device("cpu")


def moved_to_inputs(outputs: Any, call: Call) -> Any:
    """Outputs without a graph, on the device of the inputs as those with one."""
    device = device_of(call)
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, outputs)


def run_backward(dispatcher: Dispatcher, graph: KeptGraph, gradients: list[list[torch.Tensor | None]]) -> None:
    """Accumulate gradients of the ranks from those of the outputs of each microbatch of the caller's batch.

    Under a launcher they are those of the mean of all parts' losses.

    Raises:
        UsageError: the graph is gone, or the gradients were clipped.
    """
    graph.check_open()
    dispatcher.check_not_clipped()
    dispatcher.note("backward", (graph.number,))
    dispatcher.graphs.close(graph)
    if dispatcher.data_size > 1:
        gradients = [[None if g is None else g / dispatcher.data_size for g in part] for part in gradients]
    by_rank = dispatcher.of_replicas(gradients)
    dispatcher.call("backward", {rank: (graph.number, own) for rank, own in by_rank.items()})
    dispatcher.has_gradients = True


def attached(
    parts: Sequence[Sequence[Any]],
    tracked: Sequence[bool],
    device: torch.device,
    backward: Callable[[list[list[torch.Tensor | None]]], None],
) -> list[list[Any]]:
    """Outputs of microbatches on a device, whose backward calls ``backward`` with the gradients of all of them.

    Args:
        parts: flattened outputs of each microbatch.
        tracked: as in `KeptGraph`.
    """
    places = [(i, k) for i, part in enumerate(parts) for k, leaf in enumerate(part) if isinstance(leaf, torch.Tensor)]

    def run(gradients: Sequence[torch.Tensor | None]) -> None:
        by_part: list[list[torch.Tensor | None]] = [[None] * len(part) for part in parts]
        for (i, k), gradient in zip(places, gradients, strict=True):
            by_part[i][k] = gradient
        backward(by_part)

    tensors = [parts[i][k].to(device) for i, k in places]
    anchor = torch.zeros((), requires_grad=True, device="cpu")  # makes autograd call the backward
    results = RanksBackward.apply(anchor, run, [tracked[k] for _, k in places], *tensors)
    joined = [list(part) for part in parts]
    for (i, k), result in zip(places, results or (), strict=True):
        joined[i][k] = result
    return joined


class RanksBackward(torch.autograd.Function):
    """The identity of outputs, whose backward is that of the ranks. Outputs in float16 become float32.

    The ranks scale gradients under float16. Those of float16 outputs would have been rounded to float16 before.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        run: Callable[[Sequence[torch.Tensor | None]], None],
        tracked: Sequence[bool],
        *outputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        del anchor
        ctx.run = run
        ctx.set_materialize_grads(False)
        views = tuple(o.float() if o.dtype == torch.float16 else o.detach() for o in outputs)
        ctx.mark_non_differentiable(*(view for view, is_tracked in zip(views, tracked) if not is_tracked))
        return views

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.run(gradients)
        return (None,) * (3 + len(gradients))

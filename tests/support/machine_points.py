"""Points of `autopar profile` as a machine of a cost model would have measured them."""

from __future__ import annotations

import functools

import torch

from autopar.cost.ops.overlap import OVERLAP_WINDOWS
from autopar.ir.hardware import COMPUTE_KINDS, ExecutionMode, Hardware
from autopar.ir.network import CollectiveKind
from autopar.measure.machine.async_tp import ASYNC_TP_OPS
from autopar.measure.machine.cases import COLLECTIVES, Case
from autopar.measure.machine.collectives import communication_op_counts
from autopar.measure.machine.fit_constants import in_tiles
from autopar.measure.machine.kernels import BUILDERS, kernel_runs
from autopar.measure.machine.points import MeasuredPoint, OpCounts


@functools.cache
def parts(case: Case) -> tuple[OpCounts, ...]:
    """What the planner counts; of large cases without the memory to run them."""
    if case.kind in BUILDERS:
        with torch.device("meta"):
            return kernel_runs(case, torch.device("meta")).ops
    return communication_op_counts(case) if case.ranks > 1 else (OpCounts(0.0, 0.0),)


CAPTURED = ExecutionMode(compiled=True, captured=True)


def point(case: Case, machine: Hardware, way: ExecutionMode) -> MeasuredPoint:
    """What the machine would have measured."""
    here, own = machine.with_mode(way), parts(case)
    total = own[0].num_bytes
    if case.kind == "capacity":
        seconds = float(machine.memory_bytes)
    elif case.kind == "launch":
        seconds = getattr(machine.launch, case.variant)
    elif case.kind == "optimizer":
        seconds = machine.update_seconds(total)
    elif case.kind == "point-to-point" and case.nodes == 1:
        seconds = machine.transfer_seconds(total, 0, 1)
    elif case.kind == "point-to-point":
        away, senders = case.nodes // 2 * machine.devices_per_node, case.ranks // case.nodes
        link = machine.message_link(0, away, senders)
        seconds = link.seconds(total) + link.latency_seconds  # of its answer
    elif case.kind in (*COMPUTE_KINDS, "memory"):
        timed = in_tiles(MeasuredPoint(case, own, 1.0, 0.0)).ops if case.kind == "attention" else own
        seconds = sum(
            here.op_seconds(case.kind, p.flops, p.num_bytes, case.dtype, backward=number > 0)
            for number, p in enumerate(timed)
        )
    elif case.kind == "overlap":
        seconds = layer_seconds(case, here)
    else:
        kind: CollectiveKind = next(k for k in COLLECTIVES if k == case.kind)
        apart = case.nodes > 1 and case.ranks == case.nodes
        seconds = machine.collective_seconds(kind, total, case.ranks, machine.devices_per_node if apart else 1)
    return MeasuredPoint(case, own, seconds, 0.01)


def layer_seconds(case: Case, machine: Hardware) -> float:
    """A layer and its collective forwards and backwards, of which the fused ones hide a share."""
    product, backward, again, *travels = communication_op_counts(case)
    assert backward == again
    forward_seconds = machine.op_seconds("matmul", product.flops, product.num_bytes, case.dtype)
    backward_seconds = 2 * machine.op_seconds("matmul", backward.flops, backward.num_bytes, case.dtype, backward=True)
    sent = [
        machine.collective_seconds(kind, part.num_bytes, case.ranks) if kind else 0.0
        for kind, part in zip(ASYNC_TP_OPS[case.variant].kinds, travels, strict=True)
    ]
    window = OVERLAP_WINDOWS[case.variant](case.ranks)
    hidden = min(sent[0], window.forward * forward_seconds) + min(sent[1], window.backward * backward_seconds)
    return (
        forward_seconds + backward_seconds + sum(sent) - (case.fusion == "fused") * machine.overlap_efficiency * hidden
    )

"""Exposed seconds of the collectives that async tensor parallelism overlaps with a linear layer's GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.cost.ops.op_cost import OpCost, Pricing
from autopar.cost.ops.op_stats import GraphStats
from autopar.ir.graph import Op, refs
from autopar.ir.hardware import Hardware
from autopar.ir.strategies import ReshardingCost
from autopar.sharding.fuse_linear import find_fusable
from autopar.sharding.reshard import reshard_step


@dataclass(frozen=True)
class OverlapWindow:
    """Shares of the GEMM seconds of a layer under which its collective can hide: of the forward GEMM, and of the two
    backward GEMMs together."""

    forward: float
    backward: float


# By the fused operator and the number of ranks. In a forward, the GEMM of one rank's rows overlaps with the transfer of
# another's. In a backward, the weight's gradient is computed while the input's gradient is reduced.
OVERLAP_WINDOWS: Mapping[str, Callable[[int], OverlapWindow]] = {
    "all_gather_linear": lambda ranks: OverlapWindow(0.0, 1 / 2),
    "linear_with_async_grad_allreduce": lambda ranks: OverlapWindow(0.0, 1 / 2),
    "pipelined_all_gather_linear": lambda ranks: OverlapWindow(1 / ranks, 1 / 2),
    "pipelined_linear_reduce_scatter": lambda ranks: OverlapWindow(1 - 1 / ranks, 1 / ranks / 2),
}


def with_exposed_collectives(pricing: Pricing, costs: Mapping[str, OpCost]) -> Mapping[str, OpCost]:
    """Costs in which each collective that codegen fuses with a linear layer has its exposed seconds only.

    Args:
        pricing: of the local graph that each rank runs.
    """
    exposed = dict(costs)
    for pair in find_fusable(pricing.graph.ops, frozenset(refs(pricing.graph.outputs))):
        moved = costs[pair.collective.name]
        layer = gemm_seconds(pair.layer, costs[pair.layer.name], pricing.stats)
        step = reshard_step(pair.collective)
        assert step is not None, f"{pair.collective.name} sends nothing"
        time = ReshardingCost(moved.forward_seconds, moved.backward_seconds)
        seconds = exposed_seconds(pair.operator, layer, time, pricing.axis_of(step).ranks, pricing.hardware)
        exposed[pair.collective.name] = replace(
            moved,
            forward_seconds=seconds.forward_seconds,
            backward_seconds=seconds.backward_seconds,
            collectives=seconds,
        )
    return exposed


def gemm_seconds(layer: Op, cost: OpCost, stats: GraphStats) -> ReshardingCost:
    """Seconds of a layer's forward GEMM and of its two backward GEMMs; a single backward GEMM hides nothing: 0 s."""
    trains_both = {0, 1} <= {*stats.ops[layer.name].gradients}  # input and weight
    return ReshardingCost(
        cost.forward_seconds, cost.backward_seconds - cost.extra_traffic_seconds if trains_both else 0.0
    )


def exposed_seconds(
    operator: str, layer: ReshardingCost, moved: ReshardingCost, ranks: int, hardware: Hardware
) -> ReshardingCost:
    """Exposed seconds of a collective: what a linear layer's GEMMs do not hide.

    Args:
        operator: name in `autopar.ops.async_tp` of the layer fused with the collective.
        layer: the layer's GEMM seconds, from `gemm_seconds`.
        moved: the collective's seconds without overlap.
        ranks: of its axis.
    Error: fitted as one `Hardware.overlap_efficiency` per machine (``[overlap] layers`` of a cost model).
    """

    window, efficiency = OVERLAP_WINDOWS[operator](ranks), hardware.overlap_efficiency
    return ReshardingCost(
        moved.forward_seconds - efficiency * min(moved.forward_seconds, window.forward * layer.forward_seconds),
        moved.backward_seconds - efficiency * min(moved.backward_seconds, window.backward * layer.backward_seconds),
    )

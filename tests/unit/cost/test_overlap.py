"""Exposed seconds of collectives that overlap with the GEMMs of linear layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.graphs import MACHINE, graph, op, parameter, value
from support.priced import price

from autopar.cost.groups.weight_memory import Sharing
from autopar.cost.ops.op_cost import Factor
from autopar.cost.ops.op_stats import graph_stats
from autopar.ir.cost_graph import CostGraph
from autopar.ir.graph import Graph, Op, Weight

SHARE = 0.5
W = parameter("w", 4, 4)
GATHER_COLUMNS, GATHER_ROWS = (1, 1, 2, "tp", True), (0, 1, 2, "tp", True)


def inserted(name: str, args: tuple, output: str, *shape: int) -> Op:
    """A collective of a linear layer, as sharding inserts it."""
    return replace(op(f"autopar.{name}.default", args, value(output, *shape)), home="fc")


def collective_first(name: str, rest: tuple, own: tuple[int, int], *more: Op, weight: Weight = W) -> Graph:
    """A layer of two rows, 64 FLOPs, that reads what a collective of ``own`` made."""
    layer = op("aten.linear.default", ("%whole", "%w"), value("fc", 2, 4))
    moved = inserted(name, ("%h", *rest), "whole", 2, 4)
    results = " ".join(["fc", *(o.name for o in more)])
    return graph((value("h", *own),), (weight,), moved, layer, *more, outputs=results)


def layer_first(weight: Weight = W) -> Graph:
    """A layer whose result is summed, each rank keeping a row."""
    layer = op("aten.linear.default", ("%h", "%w"), value("fc", 2, 4))
    return graph(
        (value("h", 2, 4),), (weight,), layer, inserted("reduce_scatter", ("%fc", 0, 1, 2, "tp"), "rows", 1, 4)
    )


def hidden(model: Graph, peak: float = 1e6, factors: dict | None = None) -> tuple[float, float]:
    """Hidden seconds, forward and backward, at an overlap efficiency of ``SHARE``."""
    machine = replace(MACHINE, peak_flops={"float32": peak})

    def total(share: float) -> CostGraph:
        shared = replace(machine, overlap_efficiency=share)
        return price(model, graph_stats(model), shared, model.batch, Sharing(tp=2), factors=factors or {})

    unfused, fused = total(0.0), total(SHARE)
    forward = sum(a.forward_seconds - b.forward_seconds for a, b in zip(unfused.groups, fused.groups, strict=True))
    collectives = sum(
        a.forward_collective_seconds - b.forward_collective_seconds
        for a, b in zip(unfused.groups, fused.groups, strict=True)
    )
    assert forward == pytest.approx(collectives, abs=1e-12)
    return forward, sum(a.backward_seconds - b.backward_seconds for a, b in zip(unfused.groups, fused.groups))


# Seconds of the GEMMs that overlap with the collective, at 1e6 FLOP/s; of the collective, at most 1e-3 and bytes.
CASES = {
    "linear_with_async_grad_allreduce": (
        collective_first("sum_gradient", ("tp",), (2, 4)), (0.0, 64e-6), (0.0, 1e-3 + 32e-6),
    ),
    "all_gather_linear": (collective_first("all_gather", GATHER_COLUMNS, (2, 2)), (0.0, 64e-6), (0.0, 1e-3 + 16e-6)),
    "pipelined_all_gather_linear": (
        collective_first("all_gather", GATHER_ROWS, (1, 4)), (32e-6, 64e-6), (1e-3 + 16e-6, 1e-3 + 16e-6),
    ),
    "pipelined_linear_reduce_scatter": (layer_first(), (32e-6, 32e-6), (1e-3 + 16e-6, 1e-3 + 16e-6)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_product_hides_as_much_as_it_takes_and_a_collective_no_more_than_that(case: str) -> None:
    model, products, collectives = CASES[case]
    assert hidden(model) == pytest.approx([SHARE * seconds for seconds in products])
    assert hidden(model, peak=1e3) == pytest.approx([SHARE * seconds for seconds in collectives])


def test_a_measured_layer_hides_what_was_measured() -> None:
    model = CASES["pipelined_all_gather_linear"][0]
    assert hidden(model, factors={"fc": Factor(2.0, 3.0)}) == pytest.approx([SHARE * 64e-6, SHARE * 192e-6])


def test_without_a_gradient_of_the_weight_nothing_overlaps_with_a_backward() -> None:
    frozen = replace(W, requires_grad=False)
    assert hidden(collective_first("sum_gradient", ("tp",), (2, 4), weight=frozen)) == (0.0, 0.0)
    assert hidden(collective_first("all_gather", GATHER_ROWS, (1, 4), weight=frozen)) == pytest.approx(
        [SHARE * 32e-6, 0.0]
    )
    assert hidden(layer_first(frozen)) == pytest.approx([SHARE * 32e-6, 0.0])


def test_what_others_read_too_travels_before_the_layer() -> None:
    more = op("aten.relu.default", ("%whole",), value("act", 2, 4))
    assert hidden(collective_first("all_gather", GATHER_ROWS, (1, 4), more)) == (0.0, 0.0)
    partial = (*GATHER_ROWS[:-1], False)  # its gradient comes whole, so nothing of it has to travel
    assert hidden(collective_first("all_gather", partial, (1, 4))) == (0.0, 0.0)

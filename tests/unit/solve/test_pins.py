"""Pins: which stages they allow, and those that contradict the model or each other."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support.block_chains import MACHINE, blocks, graph_of, op, pipeline, plan_for, priced

from autopar.errors import UsageError
from autopar.solve.space.constraints import Constraints


@pytest.mark.parametrize(
    ("pins", "lengths"),
    [
        ({}, [4, 4]),
        ({"blocks.0.mlp": 1}, [1, 7]),
        ({"blocks.2": 0}, [6, 2]),
        ({"blocks.2": 0, "blocks.2.mlp": 1}, [5, 3]),
        ({"blocks.2.attn.linear": 0}, [5, 3]),
    ],
)
def test_pins_by_module_and_operation(pins: Mapping[str, int], lengths: list[int]) -> None:
    graph = blocks(4)
    asked = Constraints(devices=2, batch=8, microbatches=8, pins=pins, schedule="1f1b")
    stage_of = plan_for(graph, asked).stage_of(graph)
    assert [list(stage_of.values()).count(s) for s in (0, 1)] == lengths


@pytest.mark.parametrize(
    ("pins", "text"),
    [
        ({"block.3": 1}, "Cannot pin 'block.3': net has no operation or module of that name. Did you mean blocks.3 or "
                         "blocks.2 or blocks.1?"),
        ({"blocks.3": 2}, "blocks.3 is pinned to stage 2, stages are 0 to 1. Pin it to one of these."),
        ({"blocks.1.mlp": 1, "blocks.2.attn": 0},
         "Pins contradict the model's order: blocks.2.attn.linear is pinned to stage 0, and reads what comes from "
         "blocks.1.mlp.linear, pinned to stage 1. Pin blocks.1.mlp.linear to stage 0 or earlier, or "
         "blocks.2.attn.linear to stage 1 or later."),
    ],
)  # fmt: skip
def test_wrong_pins_are_refused(pins: Mapping[str, int], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_for(blocks(4), Constraints(devices=2, batch=8, pins=pins))
    assert str(caught.value) == text


def test_two_pins_for_one_group_are_refused() -> None:
    graph = graph_of([op("a.one", ["x"]), op("b.two", ["a.one:out"]), op("c.three", ["b.two:out"])])
    with pytest.raises(UsageError) as caught:
        pipeline(lambda b: priced(graph, [[0, 1], [2]], [1.0, 1.0], b), graph, MACHINE,
                 Constraints(devices=2, batch=8, pins={"a": 0, "b": 1}))  # fmt: skip
    assert str(caught.value) == (
        "Pins contradict each other: a is pinned to stage 0 and b to stage 1, but both reach a.one, which cannot be "
        "divided. Pin both to one stage."
    )

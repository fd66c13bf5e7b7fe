"""Parts of a step's time: they sum to the predicted step at every pipeline position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.explained_plans import RESNET, VIT, by_hand, planned

from autopar.ir.placement import Placement
from autopar.schedule.generate import generate
from autopar.schedule.simulate import simulate
from autopar.tools.explain.advice import explained
from autopar.tools.explain.breakdown import breakdown_of


@pytest.mark.parametrize(
    ("source", "devices", "given"),
    [
        (VIT, 4, {"pp": 4}),
        (VIT, 2, {"pp": 2, "microbatches": 5}),
        (VIT, 2, {"tp": 2, "hardware": None}),
        (VIT, 2, {"dp": 2, "zero": 1}),
        (VIT, 4, {"pp": 2, "tp": 2, "microbatches": 4}),
        (VIT, 4, {"pp": 2, "dp": 2, "zero": 0}),
        (VIT, 2, {"pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 4}),
        (VIT, 2, {"pp": 2, "schedule": "interleaved-overlap", "chunks": 3, "microbatches": 4}),
        (VIT, 2, {"pp": 2, "schedule": "zb-v", "microbatches": 4}),
        (VIT, 2, {"pp": 2, "schedule": "gpipe", "microbatches": 4}),
        (VIT, 2, {"pp": 2, "recompute": "all", "microbatches": 2}),
        (VIT, 1, {}),
        (RESNET, 3, {"pp": 3, "microbatches": 2}),
    ],
    ids=str,
)
def test_parts_sum_to_the_predicted_step_at_every_position(source: Any, devices: int, given: dict[str, Any]) -> None:
    plan = planned(source.name, devices, *((k, v) for k, v in given.items() if v is not None))
    breakdown = breakdown_of(plan)
    step = plan.prediction.step_seconds
    assert len(breakdown.positions) == plan.mesh.pp
    for position in breakdown.positions:
        assert position.spent.seconds == pytest.approx(step, rel=1e-9)
        assert min(position.spent.by_name.values()) >= -1e-12 * step
        assert position.memory.peak_bytes == sum(position.memory.by_name.values())
        assert (position.spent.collective_seconds > 0) == (plan.mesh.tp > 1)
        assert (position.spent.transfer_seconds > 0) == (plan.mesh.pp > 1)
        assert (position.spent.recompute_seconds > 0) == (given.get("recompute") == "all")
    assert breakdown.step_seconds == pytest.approx(step, rel=1e-9)
    assert explained(plan).notes == () or "edited" not in explained(plan).notes[0]
    waiting = breakdown.spent.transfer_seconds + breakdown.spent.bubble_seconds
    pipeline = breakdown.spent.pipeline_seconds
    if len({s.optimizer_seconds for s in plan.stages}) == 1:
        assert waiting == pytest.approx(plan.prediction.bubble_fraction * pipeline, abs=1e-9 * step)


def test_waiting_for_transfers_is_what_free_ones_save() -> None:
    plan = by_hand([(1.0, 2.0), (1.5, 3.0), (1.0, 2.0)], microbatches=4, hop_seconds=0.5)
    times = ([1.0, 1.5, 1.0], [2.0, 3.0, 2.0])
    pairs = {(s, s + 1): 0.5 for s in range(2)} | {(s + 1, s): 0.5 for s in range(2)}
    schedule = generate("1f1b", Placement(3), 4)
    timed, free = simulate(schedule, *times, pairs), simulate(schedule, *times)
    assert timed.step_seconds > free.step_seconds
    for rank, position in enumerate(breakdown_of(plan).positions):
        assert position.spent.compute_seconds == pytest.approx(timed.busy_seconds[rank])
        assert position.spent.transfer_seconds == pytest.approx(timed.step_seconds - free.step_seconds)
        assert position.spent.bubble_seconds == pytest.approx(free.step_seconds - free.busy_seconds[rank])


def test_waiting_for_a_port_is_what_free_transfers_save() -> None:
    plan = by_hand([(1.0, 2.0), (1.5, 3.0), (1.0, 2.0)], microbatches=4, hop_seconds=0.5)
    step = plan.prediction.step_seconds
    waits = replace(plan, prediction=replace(plan.prediction, step_seconds=step + 7, port_seconds=step + 7))
    found = explained(waits)
    assert found.breakdown.step_seconds == step + 7 and found.notes == explained(plan).notes
    saved = found.breakdown.spent.transfer_seconds
    assert saved == pytest.approx(breakdown_of(plan).spent.transfer_seconds + 7)
    assert found.headline.startswith("ports between nodes, in use until the pipeline ends; compute of stage 1")


def test_the_end_of_a_step_is_each_positions_own_optimizer_and_waiting_for_the_last() -> None:
    plan = by_hand([(1.0, 2.0)] * 2, microbatches=2)
    stages = tuple(replace(s, optimizer_seconds=o) for s, o in zip(plan.stages, (1.0, 4.0)))
    prediction = replace(plan.prediction, step_seconds=9.0 + 5.0, reduce_seconds=1.0, optimizer_seconds=4.0)
    first, last = breakdown_of(replace(plan, stages=stages, prediction=prediction)).positions
    assert (first.spent.optimizer_seconds, first.spent.reduce_seconds, first.spent.bubble_seconds) == (1, 1, 3 + 3)
    assert (last.spent.optimizer_seconds, last.spent.reduce_seconds, last.spent.bubble_seconds) == (4, 1, 3)


def test_stages_without_any_time_are_explained() -> None:
    plan = by_hand([(1.0, 2.0)] * 2)
    idle = replace(plan, stages=tuple(replace(s, forward_seconds=0.0, backward_seconds=0.0) for s in plan.stages))
    assert breakdown_of(idle).step_seconds == 0
    assert "written or edited by hand" in explained(idle).notes[0]

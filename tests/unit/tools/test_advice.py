"""Advice about a plan: the bottleneck of its step, and suggestions with the step that each would give."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.block_chains import blocks, plan_for
from support.explained_plans import GIB, VIT, by_hand, planned

from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import Alternative
from autopar.solve.space.constraints import Constraints
from autopar.tools.explain.advice import explained
from autopar.tools.explain.breakdown import Pipeline


def test_a_slow_stage_bounds() -> None:
    said = explained(by_hand([(1.0, 2.0), (3.0, 6.0), (1.0, 2.0)], microbatches=32))
    assert said.headline == "compute of stage 1 (blocks.1.first … blocks.1.last), 80.0 % over the mean; bubble 45 %"
    even = next(h for h in said.suggestions if "even split" in h.text)
    assert even.step_seconds == pytest.approx(34 * 5.0)  # (32 + 3 - 1) slots of the mean stage


def test_a_slow_link_bounds_and_is_named() -> None:
    plan = by_hand([(1e-3, 2e-3)] * 3)
    slow = replace(
        plan, messages=tuple(replace(m, seconds=0.05) if {m.src, m.dst} == {1, 2} else m for m in plan.messages)
    )
    said = explained(slow)
    assert said.headline.startswith("transfers behind stage 1 (blocks.1.first … blocks.1.last), 97 % of its time")
    assert said.suggestions[0].text == "free transfers between ranks 1 and 2, now 2.00 MiB in 100.0 ms a microbatch"
    assert said.suggestions[0].step_seconds == pytest.approx(Pipeline.of(plan).seconds)


def test_few_microbatches_make_a_bubble_that_more_would_fill() -> None:
    plan = by_hand([(1.0, 2.0)] * 4, microbatches=2)
    said = explained(plan)
    assert said.headline.startswith("bubble of 4 stages with 2 microbatches; compute of stage 0")
    assert said.headline.endswith("bubble 60 %")  # 3 of 5 slots
    assert [h.text for h in said.suggestions] == ["4 microbatches instead of 2, if a sample takes as long then"]
    assert said.suggestions[0].step_seconds == pytest.approx((4 + 3) * 3.0 / 2)
    assert explained(replace(plan, batch=2, microbatches=2)).suggestions == ()  # of one sample each


def test_what_the_planner_priced_outranks_a_guess() -> None:
    plan = by_hand([(1.0, 2.0)] * 4, microbatches=2)
    faster = explained(replace(plan, alternatives=(Alternative("4 microbatches", 11.0, microbatches=4),)))
    assert [(h.text, h.step_seconds) for h in faster.suggestions] == [
        ("4 microbatches instead of 2, as the planner priced it", 11.0)
    ]
    slower = explained(replace(plan, alternatives=(Alternative("4 microbatches", 20.0, microbatches=4),)))
    assert slower.suggestions == () and slower.notes == (
        "Smaller microbatches would not help: 4 microbatches take 20.0 s.",
    )


def test_alternatives_with_the_plans_mesh_and_schedule_hold_their_microbatches() -> None:
    plan = planned(VIT.name, 4, ("pp", 2), ("dp", 2))
    assert {a.label: a.microbatches for a in plan.alternatives} == {
        "2 microbatches, no ZeRO-1": 2, "1 microbatch, ZeRO-1": 1, "equal parameters": None, "one device": None,
    }  # fmt: skip


def test_what_an_older_file_does_not_hold_is_guessed() -> None:
    plan = by_hand([(1.0, 2.0)] * 4, microbatches=2)
    data = json.loads(replace(plan, alternatives=(Alternative("4 microbatches", 20.0, microbatches=4),)).to_json())
    del data["alternatives"][0]["microbatches"]
    assert explained(Plan.from_json(json.dumps(data))) == explained(plan)


def test_memory_that_is_nearly_full_is_said() -> None:
    said = explained(by_hand([(1.0, 2.0)] * 2, microbatches=64, peak_gib=9.7)).headline
    assert said.endswith("; memory of rank 0 97 % full (9.70 GiB of 10.0 GiB, largest part weights + state)")
    assert "memory" not in explained(by_hand([(1.0, 2.0)] * 2, microbatches=64)).headline


def test_the_memory_limit_that_the_planner_found_comes_first() -> None:
    plan = by_hand([(1.0, 2.0)] * 2, microbatches=64)
    plan = replace(plan, prediction=replace(plan.prediction, peak_bytes=(GIB, 2 * GIB)))
    limited = replace(plan, seconds_without_limit=9e-3)
    limit = "memory of stage 1, without whose limit the step would take 9.0 ms"
    assert explained(limited).headline == f"{limit}; then {explained(plan).headline}"
    edited = replace(limited, prediction=replace(plan.prediction, step_seconds=1e-3))
    assert explained(edited).headline == explained(plan).headline


def test_explain_repeats_the_memory_limit_of_the_plan_text() -> None:
    plan = plan_for(blocks(8), Constraints(devices=2, batch=8, microbatches=8, memory=20 * GIB), saved=1.5)
    limit, then, _ = plan.bound_by.partition("; then ")
    assert limit.startswith("memory of stage 0, without whose limit") and explained(plan).headline.startswith(
        limit + then
    )
    older = json.loads(plan.to_json())
    del older["seconds_without_limit"]
    assert limit not in explained(Plan.from_json(json.dumps(older))).headline


def test_collectives_reduction_optimizer_and_recomputation_bound() -> None:
    stage = by_hand([(1.0, 2.0)], microbatches=4).stages[0]
    base = by_hand([(1.0, 2.0)], microbatches=4)
    tp = {"mesh": Mesh(1, 2), "prediction": replace(base.prediction, peak_bytes=(1, 1))}
    split = replace(base, stages=(replace(stage, ranks=(0, 1), collective_seconds=2.5),), **tp)
    assert explained(split).headline.startswith("collectives of 2 tensor-parallel ranks; compute of stage 0")
    dp = replace(tp["prediction"], reduce_seconds=20.0)
    shared = replace(base, mesh=Mesh(1, 1, 2), stages=(replace(stage, ranks=(0, 1)),), prediction=dp)
    assert explained(shared).headline.startswith("reduction of gradients over 2 replicas; compute of stage 0")
    assert [h.text for h in explained(shared).suggestions] == ["a reduction that backwards hide whole"]
    late = replace(
        base,
        stages=(replace(stage, optimizer_seconds=36.0),),
        prediction=replace(base.prediction, optimizer_seconds=36.0),
    )
    assert explained(late).headline.startswith("optimizer, 75 % of the step; compute of stage 0")
    again = explained(replace(base, stages=(replace(stage, recompute="all", recompute_seconds=1.0),)))
    assert "recomputation 33 % of the step" in again.headline
    assert [(h.text, h.step_seconds) for h in again.suggestions] == [("memory enough to keep all activations", 8.0)]
    some = explained(replace(base, stages=(replace(stage, recompute=3, recompute_seconds=0.75),)))
    assert "recomputation 25 % of the step" in some.headline
    assert [(h.text, h.step_seconds) for h in some.suggestions] == [("memory enough to keep all activations", 9.0)]

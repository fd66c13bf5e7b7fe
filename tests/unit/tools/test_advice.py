"""Advice about a plan: the bottleneck of its step, and suggestions with the step that each would give."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.explained_plans import by_hand

from autopar.ir.mesh import Mesh
from autopar.ir.plan_parts import (
    Alternative,
)
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
    faster = explained(replace(plan, alternatives=(Alternative("4 microbatches", 11.0),)))
    assert [(h.text, h.step_seconds) for h in faster.suggestions] == [
        ("4 microbatches instead of 2, as the planner priced it", 11.0)
    ]
    slower = explained(replace(plan, alternatives=(Alternative("4 microbatches", 20.0),)))
    assert slower.suggestions == () and slower.notes == (
        "Smaller microbatches would not help: 4 microbatches take 20.0 s.",
    )


def test_memory_that_is_nearly_full_is_said() -> None:
    said = explained(by_hand([(1.0, 2.0)] * 2, microbatches=64, peak_gib=9.7)).headline
    assert said.endswith("; memory of rank 0 97 % full (9.70 GiB of 10.0 GiB, largest part weights + state)")
    assert "memory" not in explained(by_hand([(1.0, 2.0)] * 2, microbatches=64)).headline


def test_the_memory_limit_that_the_planner_found_comes_first() -> None:
    plan = by_hand([(1.0, 2.0)] * 2, microbatches=64)
    limit = "memory of stage 0, without whose limit the step would take 9.0 ms"
    limited = replace(plan, bound_by=f"{limit}; then compute of stage 1")
    assert explained(limited).headline == f"{limit}; then {explained(plan).headline}"
    edited = replace(limited, prediction=replace(plan.prediction, step_seconds=1e-3))
    assert explained(edited).headline == explained(plan).headline


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
    again = explained(replace(base, stages=(replace(stage, recompute="all"),)))
    assert "recomputation 33 % of the step" in again.headline
    assert [(h.text, h.step_seconds) for h in again.suggestions] == [("memory enough to keep all activations", 8.0)]

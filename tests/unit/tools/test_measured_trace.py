"""Chrome traces of measured steps."""

from __future__ import annotations

from typing import Any

import pytest
from support.bench import TINY, check_trace, early_arrivals, tiny_plan

from autopar.ir.plan import Plan
from autopar.runtime.engine.records import ActionTiming
from autopar.schedule.actions import Action
from autopar.schedule.generate import generate
from autopar.schedule.simulate import simulate
from autopar.tools.bench.timeline import MeasuredTimeline
from autopar.tools.report.measured_trace import MeasuredStep, trace_events


def simulated(plan: Plan, offset_ns: int = 0) -> MeasuredTimeline:
    """A step as the simulator has it; the first rank's clock is wrong by the offset."""
    line = simulate(generate("1f1b", plan.placement, plan.microbatches), [1e-3] * plan.mesh.pp, [2e-3] * plan.mesh.pp)
    spans, started = {}, {}
    for rank in range(plan.mesh.devices):
        own = [s for s in line.spans if s.rank == plan.mesh.place(rank).stage]
        first = own[0].start_seconds
        spans[rank] = tuple(ActionTiming(s.action, s.start_seconds - first, s.end_seconds - first) for s in own)
        started[rank] = 10**12 + round(first * 1e9) + (offset_ns if rank == 0 else 0)
    end = 10**12 + round(line.step_seconds * 1e9)
    return MeasuredStep(spans, started, dict.fromkeys(spans, (10**12 - 1000, end + 500_000))).timeline


def test_ranks_are_shown_on_one_clock() -> None:
    plan = tiny_plan(2, 2)
    trace = trace_events(plan, simulated(plan))
    check_trace(trace)
    assert early_arrivals(trace) == []
    at = {(e["pid"], e["name"]): e["ts"] for e in trace["traceEvents"] if e["ph"] == "X"}
    # Microseconds since the first rank began, a microsecond before its first action.
    assert at[0, "F s0 mb0"] == pytest.approx(1) and at[2, "F s1 mb0"] == pytest.approx(1001)
    assert at[2, "B s1 mb0"] == pytest.approx(2001) and at[0, "B s0 mb0"] == pytest.approx(4001)
    assert "rank 3 (stage 1, replica 1)" in process_names(trace)
    arrows = {(e["name"], e["pid"]) for e in trace["traceEvents"] if e["ph"] in "sf"}
    assert {("activation s0 → s1 mb3", 1), ("activation s0 → s1 mb3", 3), ("gradient s1 → s0 mb0", 2)} <= arrows
    last = next(e for e in trace["traceEvents"] if e["name"] == "sum and update" and e["pid"] == 0)
    assert last["ts"] == pytest.approx(at[0, "B s0 mb3"] + 2000) and last["dur"] == pytest.approx(500)


def process_names(trace: dict[str, Any]) -> set[str]:
    return {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}


def test_a_rank_is_named_with_all_its_stages() -> None:
    from autopar import plan

    found = plan(TINY, 2, batch_size=16, pp=2, schedule="interleaved", chunks=2, microbatches=4, hardware="cpu-generic")
    own = (ActionTiming(Action("F", 0, 0), 0.0, 1.0),)
    trace = trace_events(found, MeasuredStep({0: own, 1: own}, {0: 0, 1: 0}, {0: (0, 9), 1: (0, 9)}).timeline)
    assert process_names(trace) == {"rank 0 (stages 0 and 2)", "rank 1 (stages 1 and 3)"}


def test_a_wrong_clock_is_found() -> None:
    plan = tiny_plan()
    assert early_arrivals(trace_events(plan, simulated(plan, 40_000))) == []  # within the clocks' error
    late = trace_events(plan, simulated(plan, 1_200_000))  # the sender seems to begin after its receiver
    check_trace(late)
    assert any(text.startswith("activation s0 → s1 mb0: its sender began at 1201.0") for text in early_arrivals(late))


def test_one_rank_that_has_neighbouring_stages_sends_nothing() -> None:
    plan = tiny_plan(1)
    trace = trace_events(plan, simulated(plan))
    assert not [e for e in trace["traceEvents"] if e["ph"] in "sf"]

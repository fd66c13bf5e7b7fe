"""Simulated steps: they take and hold what the plan predicts, under its schedule; other schedules, traces, pictures."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bench import check_trace
from support.effort import examples
from support.handmade import plan_by_hand
from support.hardware import with_network
from support.models import UNet, tiny_vit
from torch import nn

import autopar
from autopar.errors import UsageError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import Message, Stage, StageMemory
from autopar.ir.text import rendered
from autopar.schedule.actions import Action
from autopar.schedule.timeline import Span
from autopar.tools.report.figure import save_figure
from autopar.tools.report.plan_trace import trace_events
from autopar.tools.report.simulate_table import numbers, simulation_parts
from autopar.tools.report.simulation_picture import figure_of
from autopar.tools.report.step_bars import bars
from autopar.tools.simulate.step import memory_curve, schedules_of, simulate_plan

CASES: dict[str, dict[str, Any]] = {
    "pp 4": {"devices": 4, "pp": 4, "microbatches": 8},
    "gpipe": {"devices": 4, "pp": 4, "microbatches": 8, "schedule": "gpipe"},
    "one device": {"devices": 1, "microbatches": 4},
    "ragged last microbatch": {"devices": 2, "pp": 2, "batch_size": 15, "microbatches": 4},
    "interleaved": {"devices": 2, "pp": 2, "batch_size": 15, "microbatches": 5, "schedule": "interleaved", "chunks": 3},
    "interleaved-overlap": {"devices": 2, "pp": 2, "microbatches": 8, "schedule": "interleaved-overlap", "chunks": 2},
    "zb-v": {"devices": 2, "pp": 2, "microbatches": 8, "schedule": "zb-v"},
    "interleaved, one chunk": {"devices": 2, "pp": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 1},
    "replicas": {"devices": 4, "pp": 2, "dp": 2, "microbatches": 4, "zero": 1},
    "shards": {"devices": 4, "pp": 2, "tp": 2, "microbatches": 4},
    "all axes": {"devices": 8, "pp": 2, "tp": 2, "dp": 2, "microbatches": 3, "batch_size": 22},
    "recomputing": {"devices": 2, "pp": 2, "microbatches": 4, "recompute": "all"},
    "one port": {
        "devices": 32,
        "pp": 4,
        "dp": 8,
        "microbatches": 16,
        "batch_size": 128,
        "schedule": "interleaved",
        "chunks": 2,
        "network": "ports = 1, bandwidth = 0.02 GB/s, latency = 1 us",
    },
    "skips": {"devices": 3, "pp": 3, "microbatches": 4, "pins": {"down1": 0, "down2": 1, "cat": 2}},
}


@functools.cache
def plan_of(name: str) -> Plan:
    """A plan of the planner's."""
    options = {"batch_size": 16, "hardware": "a100-nvlink", "schedule": "1f1b", **CASES[name]}
    torch.manual_seed(0)
    model = UNet() if name == "skips" else tiny_vit(depth=6)
    if name == "skips":
        options["example_inputs"] = torch.randn(16, 3, 16, 16)
    if network := options.pop("network", None):
        with TemporaryDirectory() as folder:
            options["hardware"] = with_network(Path(folder), "own", "a100-nvlink", network)
            return autopar.plan(model, **options)
    return autopar.plan(model, **options)


def by_hand(**changes: Any) -> Plan:
    """Two stages of 1 s forward and 2 s backward each, two microbatches of 2 samples."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return replace(plan_by_hand(model, torch.randn(4, 8), 2, ["2.linear"]), **changes)


def large(mesh: Mesh, microbatches: int, chunks: int = 1) -> Plan:
    """A plan of equal stages for a mesh that nobody has; its times add up without rounding."""
    base = by_hand()
    stages = tuple(
        Stage("a", "b", mesh.ranks(i % mesh.pp), 0, 2**-10, 2**-9, 0, 0, memory=StageMemory(2**30, 2**28, 2**26))
        for i in range(mesh.pp * chunks)
    )
    ways = [way for i, j in pairwise(range(len(stages))) for way in ((i, j), (j, i))]
    return replace(
        base,
        batch=mesh.dp * microbatches,
        microbatches=microbatches,
        mesh=mesh,
        stages=stages,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        messages=tuple(Message(src, dst, 2**24, 2**-14) for src, dst in ways),
        hardware=replace(base.hardware, memory_bytes=2**36),
    )


# -- as the plan predicts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_and_holds_what_the_plan_predicts(name: str) -> None:
    plan = plan_of(name)
    step = simulate_plan(plan)
    assert step.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-12)
    assert step.samples_per_second == pytest.approx(plan.prediction.samples_per_second, rel=1e-12)
    assert step.bubble_fraction == pytest.approx(plan.prediction.bubble_fraction, abs=1e-9)
    peaks = [p.memory.peak_bytes for p in step.positions if p.memory is not None for _ in p.ranks]
    assert [rank for p in step.positions for rank in p.ranks] == list(range(plan.mesh.devices))
    if plan.chunks == 1:
        assert tuple(peaks) == plan.prediction.peak_bytes
    else:
        assert len(peaks) == plan.mesh.devices
        assert all(0 < peak <= predicted for peak, predicted in zip(peaks, plan.prediction.peak_bytes))


@pytest.mark.parametrize("name", CASES)
def test_the_parts_of_a_step_add_up(name: str) -> None:
    plan = plan_of(name)
    step = simulate_plan(plan)
    for position in step.positions:
        assert position.busy_seconds + step.waiting_seconds(position) == pytest.approx(step.step_seconds)
        assert all(before.end_seconds <= after.start_seconds for before, after in pairwise(position.spans))
        assert position.memory is not None and position.memory.num_bytes[-1] == sum(
            memory.weight_bytes + memory.buffer_bytes
            for s in position.stages
            if (memory := plan.stages[s].memory) is not None
        )
        assert (position.collective_seconds > 0) == (plan.mesh.tp > 1)
        assert (position.reduce_seconds > 0) == (plan.mesh.dp > 1)


def test_a_pipeline_ends_when_its_ports_are_free() -> None:
    plan = plan_of("one port")
    step = simulate_plan(plan)
    assert step.pipeline_seconds == plan.prediction.port_seconds > 1.1 * step.timeline.step_seconds
    assert "ports between nodes, in use until the pipeline ends" in plan.bound_by


def test_transfers_arrive_before_they_are_needed() -> None:
    plan = plan_of("skips")
    step = simulate_plan(plan)
    starts = {span.action: span.start_seconds for span in step.timeline.spans}
    assert any(abs(t.src.chunk - t.dst.chunk) > 1 for t in step.transfers)
    assert len(step.transfers) == len(plan.messages) * 4
    assert all(t.end_seconds <= starts[t.dst] + 1e-12 and t.num_bytes > 0 for t in step.transfers)


# -- other schedules ---------------------------------------------------------------------------------------------------


def test_schedules_that_a_plan_can_have() -> None:
    assert schedules_of(plan_of("pp 4")) == schedules_of(plan_of("gpipe")) == ("1f1b", "gpipe", "zb-h1")
    assert schedules_of(plan_of("interleaved")) == ("interleaved", "interleaved-overlap")
    assert schedules_of(plan_of("zb-v")) == ("zb-v",)
    assert schedules_of(plan_of("interleaved, one chunk")) == ("1f1b", "gpipe", "zb-h1", "interleaved")


@pytest.mark.parametrize(("name", "other"), [("pp 4", "gpipe"), ("gpipe", "1f1b")])
def test_another_schedule_is_that_of_a_plan_for_it(name: str, other: str) -> None:
    assert plan_of("pp 4").stages[0].first == plan_of("gpipe").stages[0].first
    step, planned = simulate_plan(plan_of(name), other), simulate_plan(replace(plan_of(name), schedule=other))
    assert step.timeline == planned.timeline and step.schedule == other
    assert [p.memory for p in step.positions] == [p.memory for p in planned.positions]


def test_gpipe_holds_all_microbatches() -> None:
    plan = plan_of("pp 4")
    first = plan.stages[0].memory
    assert first is not None
    for schedule, held in (("gpipe", 8), ("1f1b", 4)):
        memory = simulate_plan(plan, schedule).positions[0].memory
        assert memory is not None
        standing = first.weight_bytes + first.buffer_bytes
        assert memory.peak_bytes == standing + held * first.microbatch_bytes + first.transient_bytes


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        (
            "pp 4",
            "interleaved",
            r"1 chunk a rank.* 1f1b or gpipe or zb-h1\..*--devices 4 --pp 4 --schedule interleaved --ch",
        ),
        ("interleaved", "gpipe", r"has 3 chunks a rank.* interleaved or interleaved-overlap\. .* --schedule gpipe -o"),
        ("one device", "interleaved", "no pipeline, so it cannot run under schedule interleaved"),
        ("pp 4", "forward-only", "no training step"),
        ("pp 4", "zigzag", "No schedule is named 'zigzag'. This plan is for 1f1b"),
    ],
)
def test_schedules_that_a_plan_cannot_have(name: str, asked: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        simulate_plan(plan_of(name), asked)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_curve_drops_only_where_a_rank_waits() -> None:
    spans = (
        Span(0, Action("F", 0, 0), 0.0, 1.0),
        Span(0, Action("F", 2, 0), 1.0, 2.0),  # at once, on another stage of the rank
        Span(0, Action("B", 2, 0), 3.0, 5.0),
        Span(0, Action("B", 0, 0), 5.0, 7.0),
    )
    curve = memory_curve(spans, {0: StageMemory(100, 10, 3), 2: StageMemory(200, 20, 5)})
    assert list(zip(curve.seconds, curve.num_bytes)) == [
        (0.0, 313), (1.0, 335), (2.0, 330), (3.0, 335), (5.0, 313), (7.0, 300),
    ]  # fmt: skip
    assert curve.peak_bytes == 335


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.sampled_from(["own", "other"]))
@settings(max_examples=examples(30))
def test_a_curve_is_what_is_held_at_every_moment(pp: int, microbatches: int, chunks: int, which: str) -> None:
    plan = large(Mesh(pp), microbatches, chunks)
    step = simulate_plan(plan, None if which == "own" else schedules_of(plan)[1])
    for position in step.positions:
        curve = position.memory
        assert curve is not None
        spans = {span.action: span for span in position.spans}
        for start, end, num_bytes in zip(curve.seconds, curve.seconds[1:], curve.num_bytes):
            now = (start + end) / 2
            held = sum(
                span.start_seconds <= now < spans[Action("B", action.chunk, action.microbatch)].end_seconds
                for action, span in spans.items()
                if action.kind == "F"
            )
            running = any(span.start_seconds <= now < span.end_seconds for span in position.spans)
            assert start == end or num_bytes == chunks * 2**30 + held * 2**28 + running * 2**26


def test_a_plan_without_memory_is_simulated_without() -> None:
    step = simulate_plan(by_hand())
    assert step.step_seconds == 9 and step.bubble_fraction == pytest.approx(1 / 3)
    assert [position.memory for position in step.positions] == [None, None]
    assert numbers(step, step)["positions"][0]["peak_bytes"] is None
    assert not [e for e in trace_events(step)["traceEvents"] if e["ph"] == "C"]
    assert len(figure_of(step).axes) == 1
    shown = rendered(simulation_parts(step, step, 100), 100, False)
    assert "not simulated: the plan does not say what its stages hold" in shown and "peak memory" not in shown
    assert "the plan predicts 1.00 s under 1f1b; the times of its stages make 9.00 s" in shown


# -- what is printed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("name", CASES)
def test_what_is_printed_is_no_wider_than_the_screen(name: str, width: int) -> None:
    step = simulate_plan(plan_of(name), schedules_of(plan_of(name))[:2][-1])
    lines = rendered(simulation_parts(step, simulate_plan(plan_of(name)), width), width, False).splitlines()
    assert max(map(len, lines)) <= width and not re.search(r"\w…", "\n".join(lines))


def test_a_simulation_as_text() -> None:
    plan = large(Mesh(2, 2, 4), 3)
    step = simulate_plan(plan, "gpipe")
    shown = rendered(simulation_parts(step, simulate_plan(plan), 100), 100, False)
    assert (
        shown[shown.index("ranks  stage") :]
        == """\
ranks  stage  busy  compute  waiting  optimizer   peak memory
─────────────────────────────────────────────────────────────
  0–7      0  74 %  8.79 ms  3.05 ms    0.00 µs  1.81 GiB 3 %
 8–15      1  74 %  8.79 ms  3.05 ms    0.00 µs  1.81 GiB 3 %

schedule            step  bubble  peak memory      compared
───────────────────────────────────────────────────────────
gpipe            11.8 ms  25.8 %     1.81 GiB  1.0 % faster
1f1b (the plan)  12.0 ms  26.5 %     1.56 GiB             –

the pipeline; numbers are microbatches, dots wait
ranks 0–7:  F0----F1----F2----...................B0----------B1----------B2----------|  74%
ranks 8–15: ......F0----F1----F2----B0----------B1----------B2----------.............|  74%"""
    )


def test_too_much_memory_is_said() -> None:
    plan = large(Mesh(4), 8)
    plan = replace(plan, hardware=replace(plan.hardware, memory_bytes=2**31))
    shown = rendered(simulation_parts(simulate_plan(plan, "gpipe"), simulate_plan(plan), 100), 100, False)
    assert "does not fit: rank 0 needs 3.06 GiB of 2.00 GiB; 4 of 4 positions are too full" in shown


def test_a_mesh_of_4096_devices() -> None:
    plan = large(Mesh(64, 8, 8), 128)
    step = simulate_plan(plan)
    assert step.positions[63].name == "ranks 4032–4095" and len(step.timeline.spans) == 2 * 64 * 128
    assert step.pipeline_seconds == pytest.approx((128 + 63) * 3 * 2**-10 + 126 * 2**-14, rel=0.05)
    shown = rendered(simulation_parts(step, step, 80), 80, False)
    assert "dots wait" not in shown and max(map(len, shown.splitlines())) <= 80
    assert len(json.dumps(trace_events(step), separators=(",", ":"))) < 12e6


# -- traces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pp 4", "interleaved", "all axes", "skips"])
def test_traces_are_sound(name: str) -> None:
    plan = plan_of(name)
    step = simulate_plan(plan)
    trace = trace_events(step)
    check_trace(trace)
    events = trace["traceEvents"]
    slices = [e["name"] for e in events if e["ph"] == "X" and e["name"][0] in "FB"]
    assert sorted(slices) == sorted(
        f"{k} s{s} mb{m}" for k in "FB" for s in range(len(plan.stages)) for m in range(plan.microbatches)
    )
    assert len([e for e in events if e["ph"] == "s"]) == len(step.transfers)
    ends = {e["ts"] + e["dur"] for e in events if e["ph"] == "X"}
    assert max(ends) == pytest.approx(1e6 * step.step_seconds, abs=1e-2)
    for number, position in enumerate(step.positions):
        assert position.memory is not None
        held = [e["args"]["memory GiB"] for e in events if e["ph"] == "C" and e["pid"] == number]
        assert max(held) == pytest.approx(position.memory.peak_bytes / 2**30, abs=1e-4)


def test_processes_are_positions_with_their_ranks() -> None:
    trace = trace_events(simulate_plan(large(Mesh(2, 2, 4), 4, chunks=2)))
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["ranks 0–7 (stages 0, 2)", "ranks 8–15 (stages 1, 3)"]


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "microbatches", "chunks"), [(Mesh(4), 16, 1), (Mesh(64, 8, 8), 32, 1), (Mesh(4), 8, 6), (Mesh(1), 1, 1)]
)
def test_labels_fit_their_bars_and_no_others(mesh: Mesh, microbatches: int, chunks: int) -> None:
    step = simulate_plan(large(mesh, microbatches, chunks))
    figure = figure_of(step)
    figure.draw_without_rendering()
    panel = figure.axes[0]
    labels = {(t.get_position(), t.get_text()): t.get_window_extent().width for t in panel.texts}
    bars = {}
    for span in step.timeline.spans:
        left, right = (panel.transData.transform((1e3 * t, 0))[0] for t in (span.start_seconds, span.end_seconds))
        middle = (span.start_seconds + span.end_seconds) / 2 * 1e3
        bars[(round(middle, 6), span.rank, str(span.action.microbatch))] = right - left
    for ((x, y), label), width in labels.items():
        assert width < bars[(round(x, 6), y, label)]
    assert (len(labels) == len(step.timeline.spans)) == (mesh.pp <= 4 and chunks == 1)


def test_a_picture_has_what_the_step_has(tmp_path: Path) -> None:
    plan = plan_of("recomputing")
    figure = figure_of(simulate_plan(plan))
    rows, memory = figure.axes
    assert [t.get_text() for t in rows.get_legend().get_texts()] == ["forward", "recompute", "backward", "optimizer"]
    assert [t.get_text() for t in memory.get_legend().get_texts()] == ["rank 0", "rank 1"]
    assert [t.get_text() for t in rows.get_yticklabels()] == ["rank 0", "rank 1"]
    assert any("capacity" in t.get_text() for t in memory.texts)
    again = [bar for bar in bars(simulate_plan(plan), simulate_plan(plan).positions[0]) if bar.kind == "recompute"]
    seconds = [bar.end_seconds - bar.start_seconds for bar in again]
    assert seconds == pytest.approx([plan.stages[0].recompute_seconds] * 4)
    assert plan.stages[0].recompute_seconds == plan.stages[0].forward_seconds
    replicas = figure_of(simulate_plan(plan_of("replicas"))).axes[0]
    assert "reduction" in [t.get_text() for t in replicas.get_legend().get_texts()]
    save_figure(figure_of(simulate_plan(plan)), tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="Cannot write the picture"):
        save_figure(figure_of(simulate_plan(plan)), tmp_path / "missing" / "step.png")


@pytest.mark.parametrize(("memory_bytes", "lines"), [(2**31, 1), (2**40, 0)])
def test_the_capacity_is_a_line_unless_it_is_far(memory_bytes: int, lines: int) -> None:
    plan = large(Mesh(2), 4)
    memory = figure_of(simulate_plan(replace(plan, hardware=replace(plan.hardware, memory_bytes=memory_bytes)))).axes[1]
    curves = [line for line in memory.lines if line.get_linestyle() == "-"]
    assert len(curves) == 2 and len(memory.lines) - len(curves) == lines
    assert memory.get_ylim()[1] > max(max(line.get_ydata()) for line in memory.lines)

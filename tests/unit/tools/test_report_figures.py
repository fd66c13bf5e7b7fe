"""Figures of ``autopar report``: what they show of a plan, a bench and questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import pytest
from support.explained_plans import GIB, VIT, by_hand, planned

from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import Alternative, BlockCost
from autopar.schedule.actions import Action, ActionKind
from autopar.schedule.timeline import Span
from autopar.tools.bench.row import BenchRow
from autopar.tools.bench.timeline import MeasuredTimeline
from autopar.tools.explain.breakdown import breakdown_of
from autopar.tools.explain.why_not_result import WhyNotResult
from autopar.tools.report.html.alternatives import Point, alternatives_figure, frontier
from autopar.tools.report.html.breakdown import breakdown_figure
from autopar.tools.report.html.memory import memory_figure
from autopar.tools.report.html.model_picture import blocks_of, model_figure
from autopar.tools.report.html.palette import position_colour, text_colour
from autopar.tools.report.html.plots import Figure
from autopar.tools.report.html.timeline import MAX_BARS, timeline_figure
from autopar.tools.report.step_bars import bars
from autopar.tools.simulate.step import simulate_plan


def checked(figure: Figure | None) -> Figure:
    """The figure, whose properties plotly knows."""
    assert figure is not None
    go.Figure(list(figure.traces), dict(figure.layout))
    return figure


def hovered(figure: Figure) -> dict[str, str]:
    """Hover texts by their first lines."""
    texts = [text for trace in figure.traces for text in trace.get("hovertext", ())]
    return {text.split("\n")[0]: text for text in texts}


def named(figure: Figure) -> Mapping[str, Mapping[str, Any]]:
    """Traces by name."""
    return {trace["name"]: trace for trace in figure.traces}


def with_blocks(plan: Plan, blocks: Sequence[tuple[str, int, float, float]]) -> Plan:
    """Plan with blocks of these names, stages, forward and backward seconds."""
    return replace(plan, block_costs=tuple(BlockCost(name, s, 1, f, b) for name, s, f, b in blocks))


# -- the model -----------------------------------------------------------------------------------------------------


def test_blocks_are_as_wide_as_their_time_and_lie_side_by_side_on_their_stage() -> None:
    plan = planned(VIT.name, 4, ("pp", 4), ("microbatches", 4))
    figure = checked(model_figure(plan))
    for s, stage in enumerate(plan.stages):
        (trace,) = [t for t in figure.traces if s in t["y"]]
        assert trace["name"] == f"rank {s}" and set(trace["y"]) == {s}
        ends = [0.0, *(base + width for base, width in zip(trace["base"], trace["x"]))]
        assert trace["base"] == pytest.approx(ends[:-1])
        total = (stage.forward_seconds + stage.backward_seconds) / 1e-6
        assert ends[-1] == pytest.approx(total if total < 1000 else total / 1000)
    names = [name for trace in figure.traces for name in trace["text"]]
    assert names[0] == "patch_embed" and names[-1] == "head"


def test_shardings_and_collectives_are_on_hover() -> None:
    plan = planned(VIT.name, 2, ("tp", 2), ("microbatches", 2))
    text = hovered(checked(model_figure(plan)))["blocks.1"]
    assert "stage 0, ranks 0–1" in text and "over 2 ranks:" in text and "mlp.fc2: columns / 2" in text
    assert "forward: " in text and "all-" in text
    assert "not sharded (tp 1)" in hovered(model_figure(planned(VIT.name, 2, ("pp", 2), ("microbatches", 4))))["head"]


def test_recomputation_and_gathered_parameters_are_on_hover() -> None:
    plan = by_hand([(1.0, 2.0)] * 2)
    some = replace(plan.stages[1], recompute=3, num_segments=8)
    plan = replace(with_blocks(plan, [("blocks.0", 0, 1.0, 2.0), ("blocks.1", 1, 1.0, 2.0)]),
                   stages=(plan.stages[0], some), param_blocks={"blocks.0": "kept"})  # fmt: skip
    texts = hovered(checked(model_figure(plan)))
    assert "recomputes 3 of 8 segments of the stage" in texts["blocks.1"] and "recomputes" not in texts["blocks.0"]
    assert "parameters gathered once a step (ZeRO-3)" in texts["blocks.0"]


def test_a_chunk_has_its_rank_s_colour_paler_than_the_next() -> None:
    plan = planned(VIT.name, 2, ("pp", 2), ("schedule", "interleaved"), ("chunks", 2), ("microbatches", 4))
    first, second = checked(model_figure(plan)).traces
    assert set(first["y"]) == {0, 2} and set(second["y"]) == {1, 3}
    colours = dict(zip(first["y"], first["marker"]["color"]))
    assert colours == {2: position_colour(0, 2), 0: position_colour(0, 2, 0, 2)} and colours[0] != colours[2]
    assert first["y"][0] == 2  # the legend has the colour of the first bar


@pytest.mark.parametrize(
    "blocks",
    [
        [],  # an older file
        [("blocks.0", 0, 1.0, 2.0), ("blocks.1", 1, 1.5, 2.0)],  # other times
        [("blocks.1", 0, 1.0, 2.0), ("blocks.0", 1, 1.0, 2.0)],  # cuts moved by hand
    ],
)
def test_without_times_of_its_blocks_a_bar_is_a_stage(blocks: list[tuple[str, int, float, float]]) -> None:
    plan = with_blocks(by_hand([(1.0, 2.0)] * 2), blocks)
    assert not blocks_of(plan)
    names = [name for trace in checked(model_figure(plan)).traces for name in trace["text"]]
    assert names == ["blocks.0.first … blocks.0.last", "blocks.1.first … blocks.1.last"]
    right = with_blocks(plan, [("blocks.0", 0, 1.0, 2.0), ("blocks.1", 1, 1.0, 2.0)])
    assert blocks_of(right) == right.block_costs


def test_names_are_not_read_as_tags() -> None:
    plan = with_blocks(by_hand([(1.0, 2.0)]), [("<b>x</b>", 0, 1.0, 2.0)])
    (trace,) = model_figure(plan).traces
    assert trace["text"] == ["&lt;b&gt;x&lt;/b&gt;"] and trace["hovertext"][0].startswith("<b>x</b>\n")  # set as text


# -- the step ------------------------------------------------------------------------------------------------------


def test_the_timeline_has_every_bar_of_the_simulated_step() -> None:
    step = simulate_plan(planned(VIT.name, 2, ("pp", 2), ("microbatches", 4), ("recompute", "all")))
    figure = checked(timeline_figure(step, None))
    traces = named(figure)
    assert list(traces) == ["waiting", "forward", "recompute", "backward", "optimizer"]
    expected = [(p, bar) for p, position in enumerate(step.positions) for bar in bars(step, position)]
    for kind, trace in traces.items():
        own = [(p, bar) for p, bar in expected if bar.kind == kind]
        if kind != "waiting":
            assert [(y, t) for y, t in zip(trace["y"], trace["text"])] == [(p, bar.label) for p, bar in own]
            assert sum(trace["x"]) * 1e-3 == pytest.approx(sum(b.end_seconds - b.start_seconds for _, b in own))
    assert "backward of microbatch 3, stage 1" in hovered(figure)
    assert "measured" not in figure.caption


def test_measured_rows_lie_below_predicted_ones_and_are_of_the_busiest_rank() -> None:
    plan = replace(by_hand([(1.0, 2.0)] * 2, 1), mesh=Mesh(2, 1, 2))
    plan = replace(plan, batch=2, prediction=replace(plan.prediction, peak_bytes=(GIB,) * 4),
                   stages=tuple(replace(s, ranks=(2 * i, 2 * i + 1)) for i, s in enumerate(plan.stages)))  # fmt: skip
    starts: dict[ActionKind, float] = {"F": 0.5, "B": 5.0}
    spans = [
        Span(rank, Action(kind, rank // 2, 0), start, start + seconds)
        for rank, seconds in enumerate((1.0, 1.5, 2.0, 1.0))
        for kind, start in starts.items()
    ]
    measured = MeasuredTimeline(tuple(spans), (0.0,) * 4, (8.0,) * 4)
    figure = checked(timeline_figure(simulate_plan(plan), measured))
    assert figure.layout["yaxis"]["ticktext"] == ["ranks 0–1", "measured", "ranks 2–3", "measured"]
    forward = {y: (base, x) for y, base, x in zip(*(named(figure)["forward"][key] for key in ("y", "base", "x")))}
    assert forward[1] == (0.5, 1.5) and forward[3] == (0.5, 2.0)  # ranks 1 and 2
    rest = named(figure)["reduction and update"]
    assert rest["base"] == [6.5, 7.0] and rest["x"] == [1.5, 1.0]  # from the last action to the end of the step
    assert figure.layout["xaxis"]["range"][1] == pytest.approx(max(8.0, simulate_plan(plan).step_seconds))


def test_split_backwards_are_measured_in_halves() -> None:
    plan = planned(VIT.name, 2, ("pp", 2), ("microbatches", 2), ("schedule", "zb-h1"))
    kinds: dict[ActionKind, float] = {"F": 0.0, "I": 1.0, "W": 2.0}
    spans = tuple(Span(rank, Action(kind, rank, 0), t, t + 1) for rank in range(2) for kind, t in kinds.items())
    figure = timeline_figure(simulate_plan(plan), MeasuredTimeline(spans, (0.0, 0.0), (3.0, 3.0)))
    traces = named(figure)
    assert all(1.0 in [x for x, y in zip(traces[k]["x"], traces[k]["y"]) if y % 2] for k in
               ("forward", "backward", "weight gradients"))  # fmt: skip
    assert "reduction and update" not in traces


def test_of_many_positions_some_are_shown_and_traces_stay_few() -> None:
    times = [(1.0, 2.0)] * 64
    plan = by_hand(times, microbatches=64)
    full = replace(plan.stages[37], memory=replace(plan.stages[37].memory, weight_bytes=9 * GIB))  # type: ignore[type-var]
    plan = replace(plan, stages=(*plan.stages[:37], full, *plan.stages[38:]))
    step = simulate_plan(plan)
    timeline, memory = checked(timeline_figure(step, None)), checked(memory_figure(step, None))
    assert len(timeline.traces) <= 7 and sum(len(t["x"]) for t in timeline.traces) <= MAX_BARS + len(times)
    rows = timeline.layout["yaxis"]["ticktext"]
    assert rows[0] == "rank 0" and "rank 37" in rows and len(rows) < 30
    assert "rank 37" in named(memory) and len(memory.traces) <= 13
    for figure in (timeline, memory):
        assert "Some of 64 positions, the fullest included." in figure.caption
    assert named(timeline)["forward"]["textposition"] == "none"
    assert len(checked(model_figure(plan)).traces) == 64 and not model_figure(plan).layout["showlegend"]
    breakdown = checked(breakdown_figure(breakdown_of(plan)))
    assert "One in 3 of 64 positions" in breakdown.caption


# -- memory, bound -------------------------------------------------------------------------------------------------


def test_memory_curves_are_those_of_the_simulation() -> None:
    step = simulate_plan(by_hand([(1.0, 2.0)] * 2, peak_gib=1.0))
    figure = checked(memory_figure(step, None))
    (first, second) = figure.traces
    curve = step.positions[0].memory
    assert curve is not None and first["line"]["shape"] == "hv" and second["name"] == "rank 1"
    assert first["y"][:-1] == pytest.approx([n / GIB for n in curve.num_bytes], abs=1e-3)
    assert first["x"][-1] == pytest.approx(step.step_seconds)
    assert "capacity" not in " ".join(named(figure))


def test_the_capacity_is_a_line_where_memory_comes_near() -> None:
    plan = by_hand([(1.0, 2.0)] * 2, peak_gib=8.0)
    line = named(checked(memory_figure(simulate_plan(plan), None)))["capacity 10.0 GiB"]
    assert line["y"] == [10.0, 10.0]


@pytest.mark.parametrize(("tensor_bytes", "expected"), [((), [3.0, 4.0]), ((GIB, 2 * GIB), [1.0, 2.0])])
def test_measured_peaks_are_marks(tensor_bytes: tuple[int, ...], expected: list[float]) -> None:
    from autopar.tools.bench.row import PipelineResult

    pipeline = PipelineResult("", 0.1, 0.1, 1.0, 1.0, (GIB, GIB), tensor_bytes)
    row = BenchRow("autopar", "autopar", "", "", 2, peak_bytes=(3 * GIB, 4 * GIB), pipeline=pipeline)
    marks = named(checked(memory_figure(simulate_plan(by_hand([(1.0, 2.0)] * 2)), row)))["measured peak"]
    assert marks["y"] == expected


def test_a_plan_without_memory_figures_has_no_curves() -> None:
    plan = by_hand([(1.0, 2.0)] * 2)
    plan = replace(plan, stages=tuple(replace(stage, memory=None) for stage in plan.stages))
    assert memory_figure(simulate_plan(plan), None) is None


def test_parts_of_the_breakdown_sum_to_the_step() -> None:
    breakdown = breakdown_of(by_hand([(1.0, 2.0), (1.5, 3.0)], microbatches=2, hop_seconds=0.25))
    figure = checked(breakdown_figure(breakdown))
    assert list(named(figure)) == ["compute", "transfers", "bubble"]
    for row in range(2):
        assert sum(trace["x"][row] for trace in figure.traces) == pytest.approx(breakdown.step_seconds)


# -- alternatives --------------------------------------------------------------------------------------------------


def with_alternatives(*rows: Alternative) -> Plan:
    plan = by_hand([(1.0, 2.0)], microbatches=1)  # 3 s, 1 GiB
    return replace(plan, alternatives=rows)


def test_alternatives_are_marks_with_their_row_s_number() -> None:
    plan = with_alternatives(
        Alternative("smaller", 3.6, "bubble 4 %", peak_bytes=GIB // 2),
        Alternative("does not fit", None, "does not fit: 99.0 GiB"),
        Alternative("one device", 12.0, peak_bytes=4 * GIB),
    )
    figure = checked(alternatives_figure(plan, ()))
    traces = named(figure)
    near, far = traces["rejected"], traces["rejected, far slower"]
    assert near["text"] == ["1"] and near["x"] == [0.5] and near["y"] == [3.6]
    assert "1: smaller\n3.60 s, 512.0 MiB on the fullest rank\n20.0 % slower\nbubble 4 %" in near["hovertext"]
    top = figure.layout["yaxis"]["range"][1]
    assert far["text"] == ["3"] and far["y"] == [top] and top < 4.5 and "12.0 s" in far["hovertext"][0]
    assert far["x"] == [figure.layout["xaxis"]["range"][1]]
    assert traces["this plan"]["x"] == [1.0] and traces["this plan"]["y"] == [3.0]


def test_answers_are_marks_too() -> None:
    plan, other = with_alternatives(), by_hand([(1.0, 3.0)], microbatches=1)
    found = WhyNotResult("tp=4", "4.00 s a step.", other, breakdown_of(other))
    figure = checked(alternatives_figure(plan, (found, WhyNotResult("tp=3", "3 does not divide 4"))))
    asked = named(figure)["asked (why not)"]
    assert asked["text"] == ["tp=4"] and asked["y"] == [4.0] and "33.3 % slower" in asked["hovertext"][0]


def test_far_alternatives_are_shown_where_they_are_if_none_is_near() -> None:
    figure = checked(alternatives_figure(with_alternatives(Alternative("a", 30.0, peak_bytes=GIB)), ()))
    assert named(figure)["rejected"]["y"] == [30.0] and "far slower" not in " ".join(named(figure))


@pytest.mark.parametrize("rows", [(), (Alternative("older file", 4.0),)])
def test_without_known_memory_there_is_no_scatter(rows: tuple[Alternative, ...]) -> None:
    assert alternatives_figure(with_alternatives(*rows), ()) is None


def test_the_frontier_is_of_plans_that_none_dominates() -> None:
    points = [Point(str(i), "", peak, seconds) for i, (peak, seconds) in enumerate([(5, 1.0), (1, 4.0), (2, 2.0),
              (2, 3.0), (3, 2.0), (9, 0.5), (1, 5.0)])]  # fmt: skip
    assert [p.mark for p in frontier(points)] == ["1", "2", "0", "5"]


# -- colours -------------------------------------------------------------------------------------------------------


def contrast(first: str, second: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_names_in_bars_can_be_read_on_every_colour() -> None:
    colours = [position_colour(p, n, c, 3) for n in (1, 2, 4, 16) for p in range(n) for c in range(3)]
    assert min(contrast(colour, text_colour(colour)) for colour in colours) >= 4.5

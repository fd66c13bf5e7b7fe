"""Results of `autopar bench`: rates, FLOPs, bubbles, notes, the table and the picture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.explained_plans import by_hand
from support.handmade import with_levels
from torch import nn

from autopar.ir.plan_parts import StageRecompute
from autopar.ir.text import rendered
from autopar.runtime.engine.records import ActionTiming
from autopar.schedule.actions import Action
from autopar.tools.bench.baselines.registry import BASELINES
from autopar.tools.bench.bubble import bubble_share
from autopar.tools.bench.description import plan_label
from autopar.tools.bench.request import flops_per_image
from autopar.tools.bench.result import BenchResult
from autopar.tools.bench.row import BenchRow, PipelineResult
from autopar.tools.bench.run import BenchOutput
from autopar.tools.report.bench_picture import figure_of
from autopar.tools.report.bench_table import rate_table


def result_of(*rows: BenchRow) -> BenchResult:
    return BenchResult(
        model="vit", model_kwargs={}, shape=(8, 3, 32, 32), devices=2, precision="fp32", channels_last=False,
        compiled=False, plan="pp 2", flops_per_image=1e9, warmup=1, steps=1, seed=0, memory="", machine="a CPU",
        torch="", autopar="", commit=None, command="", rows=rows,
    )  # fmt: skip


def row_of(rate: float, bound: float) -> BenchRow:
    """A plan's row with a batch of 8 at this rate, and its bubble bound's rate."""
    pipeline = PipelineResult("", 0.1, 0.1, bound_seconds=8 / bound, predicted_seconds=1.0, predicted_bytes=(1, 1))
    return BenchRow(
        "autopar", "autopar", "", "", 2, median_seconds=8 / rate, samples_per_second=rate, tflops_per_device=1.0,
        peak_bytes=(1, 1), pipeline=pipeline,
    )  # fmt: skip


def test_a_plan_s_label_says_how_much_recomputes() -> None:
    plan = by_hand([(1.0, 2.0)] * 2)
    cases: list[list[StageRecompute]] = [["none", "none"], ["all", "all"], [3, "none"]]
    labels = [plan_label(with_levels(plan, levels)) for levels in cases]
    assert labels == [
        f"pp 2, 1f1b{words}, 8 microbatches of 8" for words in ("", ", recomputing", ", recomputing in part")
    ]


def test_rates_stand_beside_their_bars_and_never_on_a_mark() -> None:
    near, far, below = row_of(10_000, 10_900), row_of(1_000, 12_000), row_of(5_000, 4_900)
    figure = figure_of(result_of(near, far, below))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert "12,000" in [label.get_text() for label in axes.get_xticklabels()]
    spans = [t.get_window_extent().transformed(axes.transData.inverted()) for t in axes.texts]
    assert [t.get_text().split(",")[0] for t in axes.texts] == ["10", "1", "5"]
    assert 10_900 < spans[0].x0 < 11_200
    assert spans[1].x0 > 1_000 and spans[1].x1 < 12_000
    assert 5_000 < spans[2].x0 < 5_300


def test_what_is_said_about_a_run_is_indented_on_every_line() -> None:
    row = replace(row_of(10, 11), label="microbatch 4", note="loss " * 20, median_seconds=None, reason="word " * 30)
    lines = rendered([rate_table(result_of(row))], 100, False).splitlines()[3:]
    assert len(lines) > 6 and lines[0].split() == ["microbatch", "4"]
    assert all(line.startswith("  ") and line[2] != " " for line in lines)


def test_the_bubble_is_the_time_without_actions() -> None:
    spans = {
        0: (ActionTiming(Action("F", 0, 0), 0.0, 1.0), ActionTiming(Action("B", 0, 0), 3.0, 5.0)),
        1: (ActionTiming(Action("F", 1, 0), 0.0, 1.0), ActionTiming(Action("B", 1, 0), 1.0, 2.0)),
    }
    assert bubble_share(spans, 5.0) == pytest.approx(1 - 5 / 10)


def test_unique_images_are_counted() -> None:
    row = BenchRow("ddp", "DDP", "", "", 4).with_seconds((0.5, 0.1, 0.2), 512, 1e12)
    assert row.median_seconds == 0.2 and row.samples_per_second == 2560 and row.tflops_per_device == 640


def test_flops_of_training_are_three_times_those_of_a_forward() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Linear(16, 4))
    # Two products forward, two for weights backward, one for the gradient between the layers.
    assert flops_per_image(model, (7, 3, 2, 2)) == 2 * (12 * 16 + 16 * 4) * 2 + 2 * 16 * 4


def test_rows_with_other_losses_get_a_note() -> None:
    from autopar.tools.bench.run import with_loss_notes

    def row(name: str, losses: tuple[float, ...]) -> BenchRow:
        return BenchRow(name, BASELINES[name].title, "", "", 2, losses=losses)

    rows = [row("plain", (2.0, 1.0)), row("ddp", (2.001, 1.0005)), row("fsdp2", (2.0, 1.2)), row("1f1b", ())]
    assert [r.note for r in with_loss_notes(rows, "fp32", False)] == [
        "",
        "",
        "loss 1.2000, plain PyTorch loop, one device 1.0000",
        "",
    ]
    assert [r.note for r in with_loss_notes(rows, "fp32", True)] == [""] * 4
    assert [r.note for r in with_loss_notes([row("plain", (2.0,)), row("ddp", (float("nan"),))], "bf16", False)][
        1
    ] != ""


def test_notebooks_show_the_tables_of_a_result() -> None:
    row = replace(row_of(10, 11), label="<b>")
    result = result_of(row, replace(row, contestant="ddp", title="DDP", pipeline=None, reason="no plan", best=False))
    html = result._repr_html_()
    assert html.count("<table") == 4 and "&lt;b&gt;" in html and "DDP" not in html  # not the fastest of its baseline
    output = BenchOutput(result, {"traceEvents": []})
    assert output._repr_html_() == html and "traceEvents" not in repr(output)

"""`autopar bench`: baselines that do the same work, what is derived from their times, timelines, bad input."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support.bench import FLAGS, KWARGS, TINY, check_trace, request
from support.cli import invoke
from support.effort import full, only
from timm import create_model
from torch import nn

from autopar.errors import UsageError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import Precision
from autopar.ir.text import rendered
from autopar.runtime.engine.executor import ActionTiming
from autopar.schedule.actions import Action
from autopar.schedule.generate import generate
from autopar.schedule.simulate import simulate
from autopar.tools.bench.baselines.autopar import limit_memory
from autopar.tools.bench.baselines.dtensor import check_blocks
from autopar.tools.bench.baselines.pipelining import split_evenly
from autopar.tools.bench.baselines.registry import BASELINES, BenchContext, NotExpressible, choose
from autopar.tools.bench.bubble import bubble_share
from autopar.tools.bench.flops import flops_per_image
from autopar.tools.bench.outcome import BaselineOutcome, failure_text, run_baseline
from autopar.tools.bench.parts import blocks, sequence
from autopar.tools.bench.rank_result import RankFailure
from autopar.tools.bench.request import BenchRequest
from autopar.tools.bench.result import BenchResult, BenchRow, PipelineResult
from autopar.tools.bench.run import BenchInterrupted, BenchOutput, run_bench
from autopar.tools.bench.task import BenchTask
from autopar.tools.report.bench_picture import figure_of
from autopar.tools.report.bench_table import rate_table
from autopar.tools.report.figure import save_figure
from autopar.tools.report.measured_trace import MeasuredStep, early_arrivals, trace_events

# -- baselines that run ------------------------------------------------------------------------------------------------


KEPT = ("plain", "autopar", "ddp")


@pytest.fixture(scope="module")
def finished() -> BenchOutput:
    """Baselines in processes over Gloo."""
    more = {"only": tuple(BASELINES)} if full() else {"only": KEPT, "microbatch_sizes": ()}
    return run_bench(request(**more))


def test_the_memory_of_a_plan_is_what_its_gpus_give(monkeypatch: pytest.MonkeyPatch) -> None:
    total, reserved, shares = 80 * 2**30, 2 * 2**30, []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    monkeypatch.setattr("autopar.tools.bench.baselines.autopar.reserved_bytes", lambda device: reserved)
    for num_bytes in (22 * 2**30, 2**30, 200 * 2**30):
        limit_memory(num_bytes, torch.device("cuda", 0))
    assert shares == [0.25, 0.0, 1.0]


@pytest.mark.parametrize("name", only(KEPT, BASELINES))
def test_every_baseline_does_the_same_work(finished: BenchOutput, name: str) -> None:
    reference, rows = finished.result.row("plain"), [r for r in finished.result.rows if r.contestant == name]
    assert rows
    for row in rows:
        assert row.reason is None, row.reason
        assert len(row.losses) == 3 and row.losses == pytest.approx(reference.losses, rel=1e-4)
        assert row.losses[2] < row.losses[0] and row.note == ""


def test_figures_follow_from_the_step_times(finished: BenchOutput) -> None:
    result = finished.result
    assert [row.contestant for row in result.best] == [n for n in BASELINES if full() or n in KEPT]
    for row in result.rows:
        assert len(row.step_seconds) == 2 and min(row.step_seconds) > 0
        assert row.median_seconds is not None and row.median_seconds == sum(row.step_seconds) / 2
        assert row.devices == (1 if row.contestant in ("plain", "single") else 2)
        assert row.samples_per_second == pytest.approx(8 / row.median_seconds)
        assert row.tflops_per_device is not None and row.samples_per_second is not None
        assert row.tflops_per_device * row.devices * 1e12 == pytest.approx(
            result.flops_per_image * row.samples_per_second
        )
        assert len(row.peak_bytes) == row.devices and min(row.peak_bytes) > 0
        assert (row.pipeline is not None) == BASELINES[row.contestant].planned
    data = json.loads(result.to_json())
    assert data["schema_version"] == 1 and len(data["rows"]) == len(result.rows) and data["machine"]


@pytest.mark.full
def test_the_best_variant_stands_for_its_baseline(finished: BenchOutput) -> None:
    fsdp2 = [row for row in finished.result.rows if row.contestant == "fsdp2"]
    assert len(fsdp2) == 2
    assert finished.result.row("fsdp2").median_seconds == min(row.median_seconds or 0.0 for row in fsdp2)


def test_bubbles_and_memory_of_the_plan(finished: BenchOutput) -> None:
    row = finished.result.row("autopar")
    assert row.pipeline is not None and row.median_seconds is not None and row.of_bound is not None
    assert 0 < row.pipeline.bubble_measured < 1 and 0 < row.pipeline.bubble_predicted < 1
    assert 0 < row.pipeline.bound_seconds <= row.median_seconds * 1.01
    assert len(row.pipeline.predicted_bytes) == len(row.pipeline.tensor_bytes) == 2
    assert row.pipeline.tensor_bytes == pytest.approx(row.pipeline.predicted_bytes, rel=0.1)


def test_the_timeline_of_a_measured_step_is_sound(finished: BenchOutput) -> None:
    trace = finished.trace
    assert trace is not None
    check_trace(trace)
    assert early_arrivals(trace) == []
    slices = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert sorted(n for n in slices if n[0] in "FB") == sorted(
        f"{k} s{s} mb{m}" for k in "FB" for s in (0, 1) for m in range(4)
    )
    assert len([e for e in trace["traceEvents"] if e["ph"] == "s"]) == 8


def test_a_picture_is_drawn(finished: BenchOutput, tmp_path: Path) -> None:
    failed = replace(finished.result.row("ddp"), median_seconds=None, samples_per_second=None, reason="out of memory")
    rows = tuple(failed if row.contestant == "ddp" else row for row in finished.result.rows)
    save_figure(figure_of(replace(finished.result, rows=rows)), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="Cannot write the picture"):
        save_figure(figure_of(finished.result), tmp_path / "missing" / "bench.png")


def a_result(*rows: BenchRow) -> BenchResult:
    return BenchResult(
        model="vit", model_kwargs={}, shape=(8, 3, 32, 32), devices=2, precision="fp32", channels_last=False,
        compiled=False, plan="pp 2", flops_per_image=1e9, warmup=1, steps=1, seed=0, memory="", machine="a CPU",
        torch="", autopar="", commit=None, command="", rows=rows,
    )  # fmt: skip


def a_row(rate: float, bound: float) -> BenchRow:
    """A plan's row with a batch of 8 at this rate, and its bubble bound's rate."""
    pipeline = PipelineResult("", 0.1, 0.1, bound_seconds=8 / bound, predicted_seconds=1.0, predicted_bytes=(1, 1))
    return BenchRow(
        "autopar", "autopar", "", "", 2, median_seconds=8 / rate, samples_per_second=rate, tflops_per_device=1.0,
        peak_bytes=(1, 1), pipeline=pipeline,
    )  # fmt: skip


def test_rates_stand_beside_their_bars_and_never_on_a_mark() -> None:
    near, far, below = a_row(10_000, 10_900), a_row(1_000, 12_000), a_row(5_000, 4_900)
    figure = figure_of(a_result(near, far, below))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert "12,000" in [label.get_text() for label in axes.get_xticklabels()]
    spans = [t.get_window_extent().transformed(axes.transData.inverted()) for t in axes.texts]
    assert [t.get_text().split(",")[0] for t in axes.texts] == ["10", "1", "5"]
    assert 10_900 < spans[0].x0 < 11_200
    assert spans[1].x0 > 1_000 and spans[1].x1 < 12_000
    assert 5_000 < spans[2].x0 < 5_300


def test_what_is_said_about_a_run_is_indented_on_every_line() -> None:
    row = replace(a_row(10, 11), label="microbatch 4", note="loss " * 20, median_seconds=None, reason="word " * 30)
    lines = rendered([rate_table(a_result(row))], 100, False).splitlines()[3:]
    assert len(lines) > 6 and lines[0].split() == ["microbatch", "4"]
    assert all(line.startswith("  ") and line[2] != " " for line in lines)


def test_a_baseline_that_fails_is_a_row() -> None:
    kept: list[BenchResult] = []
    done = run_bench(request(only=("plain", "1f1b"), microbatch_sizes=(8,)), keep=kept.append)
    plain, pipelining = done.result.rows
    assert plain.reason is None and len(plain.step_seconds) == 2
    assert (
        pipelining.reason is not None
        and "at least as many as the 2 ranks; pass --microbatch-sizes 4" in pipelining.reason
    )
    assert pipelining.median_seconds is None and done.trace is None
    assert [len(result.rows) for result in kept] == [1, 2]


# -- interrupted and ended ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "number", "said"),
    [
        (["-o", "r.json"], 1, "Interrupted after 1 of 3 baselines; rows so far in r.json."),
        (
            ["-o", "r.json", "--png", "r.png", "--only", "autopar", "--trace", "t.json"],
            1,
            "Interrupted after 1 of 4 baselines; rows so far in r.json, r.png.",
        ),
        ([], 1, "Interrupted after 1 of 3 baselines; nothing was written."),
        (["-o", "r.json"], 0, "Interrupted after 0 of 3 baselines; nothing was written."),
    ],
)
def test_ctrl_c_keeps_the_rows_so_far(
    flags: list[str], number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = iter([BaselineOutcome(failure=RankFailure("usage", "too slow"))] * number)

    def run(*told: object) -> BaselineOutcome:
        for outcome in outcomes:
            return outcome
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autopar.tools.bench.run.run_baseline", run)
    code, out, error = invoke("bench", *FLAGS, "--batch", "8", "--only", "plain,single,ddp", *flags)
    assert code == 130 and error.strip().endswith(said)
    assert ("too slow" in out) == (number > 0)
    if flags and number:
        assert [row["contestant"] for row in json.loads(Path("r.json").read_text())["rows"]] == ["plain"]
        assert Path("r.png").exists() == ("r.png" in flags) and not Path("t.json").exists()
    else:
        assert not list(tmp_path.iterdir())


def test_ctrl_c_keeps_the_first_variants_of_a_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(told: BenchTask, *others: object) -> BaselineOutcome:
        if told.settings["reshard"]:
            raise KeyboardInterrupt
        return BaselineOutcome(failure=RankFailure("usage", "too slow"))

    monkeypatch.setattr("autopar.tools.bench.run.run_baseline", run)
    with pytest.raises(BenchInterrupted, match="after 0 of 1 baseline") as caught:
        run_bench(request(only=("fsdp2",), microbatch_sizes=()))
    (row,) = caught.value.output.result.rows
    assert row.reason == "too slow" and row.best


def test_ctrl_c_while_planning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def planning(*given: object, **constraints: object) -> Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr("autopar.tools.bench.run.plan", planning)
    code, out, error = invoke("bench", *FLAGS, "--batch", "8")
    assert (code, out) == (130, "") and error.strip().endswith("before the first baseline; nothing was written.")


@pytest.mark.parametrize(
    ("number", "code"), only([(signal.SIGINT, 130)], [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
)
def test_a_signal_leaves_no_processes_and_no_folders(number: signal.Signals, code: int, tmp_path: Path) -> None:
    main = [sys.executable, "-c", "from autopar.tools.cli.app import main; main()"]
    command = [*main, "bench", *FLAGS, "--batch", "8", "--only", "ddp", "--steps", "1000000"]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE) as bench:
        try:
            deadline = time.monotonic() + 60
            while sum("building" in log.read_text() for log in tmp_path.glob("autopar-bench-*/*.log")) < 2:
                assert bench.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            workers = psutil.Process(bench.pid).children()
            assert len(workers) == 2
            bench.send_signal(number)
            rest = bench.communicate(timeout=60)[1].decode()
        finally:
            bench.kill()
    assert bench.returncode == code, rest
    assert ("Interrupted after 0 of 1 baseline; nothing was written." in rest) == (number is signal.SIGINT)
    assert not list(tmp_path.glob("autopar-bench-*"))
    assert not any(worker.is_running() for worker in workers)


def assignment(**changes: Any) -> BenchTask:
    given: dict[str, Any] = {
        "baseline": "plain", "settings": {"replicas": 1, "microbatches": 2}, "model": TINY.name,
        "model_kwargs": KWARGS, "shape": (8, 3, 32, 32), "classes": 10, "devices": 1, "device_type": "cpu",
        "precision": "fp32", "channels_last": False, "compile": False, "steps": 1, "warmup": 1, "seed": 0,
    }  # fmt: skip
    return BenchTask(**given | changes)


def test_reasons_name_the_rank_and_the_cause() -> None:
    told = assignment(
        baseline="1f1b", model="convnext_atto", model_kwargs={}, settings={"microbatch_size": 1, "chunks": 1}
    )
    outcome = run_baseline(told, 1, 1, 100.0)
    assert outcome.failure is not None and outcome.failure.text.startswith("there is no split of ConvNeXt into blocks")
    outcome = run_baseline(assignment(model="vit_tinny"), 2, 1, 100.0)
    assert outcome.failure is not None and outcome.failure.kind == "usage"
    assert outcome.failure.text.startswith("timm has no model named 'vit_tinny'")
    assert failure_text(RankFailure("ValueError", "no"), 1, 2) == "ValueError (rank 1): no"


def test_a_time_limit_ends_a_baseline() -> None:
    outcome = run_baseline(assignment(), 1, 1, 0.05)
    assert outcome.failure is not None and outcome.failure.text.startswith("no result within 0 s; rank 0 was at: ")


# -- timelines ---------------------------------------------------------------------------------------------------------


@functools.cache
def a_plan(pp: int = 2, dp: int = 1, microbatches: int = 4) -> Plan:
    """A plan of the tiny ViT."""
    from autopar import plan

    return plan(TINY, pp * dp, batch_size=16, pp=pp, dp=dp, microbatches=microbatches, hardware="cpu-generic")


def simulated(plan: Plan, offset_ns: int = 0) -> MeasuredStep:
    """A step as the simulator has it; the first rank's clock is wrong by the offset."""
    line = simulate(generate("1f1b", plan.mesh.pp, plan.microbatches), [1e-3] * plan.mesh.pp, [2e-3] * plan.mesh.pp)
    spans, started = {}, {}
    for rank in range(plan.mesh.devices):
        own = [s for s in line.spans if s.rank == plan.mesh.place(rank).stage]
        first = own[0].start_seconds
        spans[rank] = tuple(ActionTiming(s.action, s.start_seconds - first, s.end_seconds - first) for s in own)
        started[rank] = 10**12 + round(first * 1e9) + (offset_ns if rank == 0 else 0)
    end = 10**12 + round(line.step_seconds * 1e9)
    return MeasuredStep(spans, started, dict.fromkeys(spans, (10**12 - 1000, end + 500_000)))


def test_ranks_are_shown_on_one_clock() -> None:
    plan = a_plan(2, 2)
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
    trace = trace_events(found, MeasuredStep({0: own, 1: own}, {0: 0, 1: 0}, {0: (0, 9), 1: (0, 9)}))
    assert process_names(trace) == {"rank 0 (stages 0 and 2)", "rank 1 (stages 1 and 3)"}


def test_a_wrong_clock_is_found() -> None:
    plan = a_plan()
    assert early_arrivals(trace_events(plan, simulated(plan, 40_000))) == []  # within the clocks' error
    late = trace_events(plan, simulated(plan, 1_200_000))  # the sender seems to begin after its receiver
    check_trace(late)
    assert any(text.startswith("activation s0 → s1 mb0: its sender began at 1201.0") for text in early_arrivals(late))


def test_one_rank_that_has_neighbouring_stages_sends_nothing() -> None:
    plan = a_plan(1)
    trace = trace_events(plan, simulated(plan), edges=[])
    assert not [e for e in trace["traceEvents"] if e["ph"] in "sf"]


# -- what is derived ---------------------------------------------------------------------------------------------------


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


# -- models taken apart ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kwargs", "side", "count", "block"),
    [
        (TINY.name, KWARGS, 32, 4, "Block"),
        (TINY.name, KWARGS | {"global_pool": "avg", "class_token": False}, 32, 4, "Block"),
        ("vit_small_patch16_dinov3", {"depth": 3, "img_size": 64, "embed_dim": 48, "num_heads": 3}, 64, 3, "EvaBlock"),
        ("resnet18", {}, 64, 8, "BasicBlock"),
    ],
)
def test_a_sequence_of_parts_is_the_model(name: str, kwargs: dict, side: int, count: int, block: str) -> None:
    torch.manual_seed(0)
    model = create_model(name, **kwargs).eval()
    found = blocks(model)
    assert (len(found), type(found[0]).__name__) == (count, block)
    parts = sequence(model)
    assert len(parts) == count + 2
    x = y = torch.randn(2, 3, side, side)
    for part in parts:
        y = part(y)
    assert torch.equal(y, model(x))
    held = [id(p) for part in parts for p in part.parameters()]
    assert len(held) == len(set(held)) and set(held) == {id(p) for p in model.parameters()}


def test_stages_have_equal_numbers_of_blocks() -> None:
    modules = [nn.Linear(1, 1) for _ in range(9)]
    stages = split_evenly(modules, 3)
    assert [len(stage) for stage in stages] == [3, 3, 3] and [m for stage in stages for m in stage] == modules
    with pytest.raises(NotExpressible, match="7 blocks do not fill 8 stages"):
        split_evenly(modules, 8)


def test_what_cannot_be_taken_apart_says_so() -> None:
    with pytest.raises(NotExpressible, match="there is no split of ConvNeXt into blocks"):
        sequence(create_model("convnext_atto"))
    with pytest.raises(NotExpressible, match=r"BasicBlock is no block with attn\.qkv"):
        check_blocks(blocks(create_model("resnet18")), 2)
    with pytest.raises(NotExpressible, match="3 ranks cannot share 4 heads"):
        check_blocks(blocks(create_model(TINY.name, **KWARGS)), 3)
    normed = create_model(TINY.name, **KWARGS, qk_norm=True)
    with pytest.raises(NotExpressible, match=r"more between qkv and the projection \(q_norm, k_norm\)"):
        check_blocks(blocks(normed), 2)


# -- who takes part ----------------------------------------------------------------------------------------------------


def field_of(mesh: Mesh, batch: int = 16, sizes: tuple[int, ...] | None = None, compile: bool = False) -> BenchContext:
    plan = replace(a_plan(), mesh=mesh, batch=batch)
    return BenchContext(plan, compile, sizes)


def test_baselines_depend_on_the_mesh() -> None:
    def names(mesh: Mesh, only: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> list[str]:
        return [c.name for c in choose(only, skip, field_of(mesh))]

    everywhere = ["plain", "single", "autopar"]
    others = ["ddp", "fsdp2", "1f1b", "interleaved"]
    assert names(Mesh(1)) == everywhere
    assert names(Mesh(1, 1, 2)) == [*everywhere, *others]
    assert names(Mesh(2)) == [*everywhere, "uniform", *others]
    assert names(Mesh(1, 2)) == [*everywhere, *others, "dtensor"]
    assert names(Mesh(2), ("fsdp2", "dtensor", "autopar"), ("autopar",)) == ["fsdp2", "dtensor"]


def test_variants() -> None:
    def labels(name: str, field: BenchContext) -> list[str]:
        return [variant.label for variant in BASELINES[name].variants(field) if variant.reason is None]

    assert labels("1f1b", field_of(Mesh(4), 512, compile=True)) == [
        "blocks compiled, microbatch 16", "blocks compiled, microbatch 32", "blocks compiled, microbatch 64",
    ]  # fmt: skip
    assert labels("1f1b", field_of(Mesh(2), 12, (2, 3, 5, 6, 12))) == ["microbatch 2", "microbatch 3", "microbatch 6"]
    assert labels("interleaved", field_of(Mesh(4), 48, (4, 8, 12))) == ["microbatch 4", "microbatch 12"]
    assert labels("dtensor", field_of(Mesh(2, 2))) == ["tp 2 × FSDP2 2"]
    with pytest.raises(NotExpressible, match="4 replicas cannot share a batch of 6 evenly"):
        labels("ddp", field_of(Mesh(4), 6))
    with pytest.raises(NotExpressible, match="one stage"):
        labels("uniform", field_of(Mesh(1, 1, 2)))


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "bf16-params"])
def test_a_record_speaks_of_low_precision_where_it_was_used(precision: Precision) -> None:
    low = "bf16" in precision
    for name in ("plain", "ddp", "fsdp2", "1f1b"):
        about = BASELINES[name].about_in(precision)
        assert about.startswith(BASELINES[name].about) and bool(re.search("autocast|low-precision", about)) == low
    assert BASELINES["plain"].about_in("fp32") == "the plan's microbatches with accumulated gradients"


def test_sizes_that_were_asked_for_are_never_left_out() -> None:
    def reasons(name: str, field: BenchContext) -> dict[str, str | None]:
        return {variant.label: variant.reason for variant in BASELINES[name].variants(field)}

    assert reasons("1f1b", field_of(Mesh(4), 12, (2, 4))) == {
        "microbatch 2": None,
        "microbatch 4": "a batch of 12 in microbatches of 4 does not give equal microbatches, at least as many as the "
        "4 ranks; pass --microbatch-sizes 3",
    }
    assert reasons("interleaved", field_of(Mesh(2), 12, (4,)))["microbatch 4"] == (
        "a batch of 12 in microbatches of 4 does not give equal microbatches, a multiple of the 2 ranks; "
        "pass --microbatch-sizes 6"
    )
    with pytest.raises(NotExpressible, match="at least as many as the 4 ranks; use a batch of at least 4"):
        reasons("1f1b", field_of(Mesh(4), 2))
    with pytest.raises(NotExpressible, match="a multiple of the 2 ranks; use a batch that is a multiple of 2"):
        reasons("interleaved", field_of(Mesh(2), 3))
    with pytest.raises(UsageError, match="--skip plain,single,autopar leaves nothing to measure"):
        choose((), ("plain", "single", "autopar"), field_of(Mesh(1)))


def test_sizes_that_do_not_fit_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.tools.bench.run.run_baseline", None)  # nothing is started
    rows = run_bench(request(only=("interleaved",), microbatch_sizes=(3, 8))).result.rows
    assert [(row.label, row.best) for row in rows] == [("microbatch 3", True), ("microbatch 8", False)]
    assert all("does not give equal microbatches" in (row.reason or "") for row in rows)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "fdsp2"], r"--only fdsp2: there is no such baseline. Did you mean fsdp2\? Known: plain, single"),
        (["--skip", "ddp,megatron"], "--skip megatron: there is no such baseline. Known: plain"),
        (["--only", "ddp", "--skip", "ddp"], "--only ddp --skip ddp leaves nothing to measure"),
        (["--skip", ",".join(BASELINES)], "error: --skip plain,single.* leaves nothing to measure"),
        (["--only", ""], "--only '' names no baseline. Write names such as ddp,fsdp2"),
        (["--skip", ","], "--skip ',' names no baseline"),
        (["--only", "ddp", "--microbatch-sizes", "4"], "--microbatch-sizes is for 1f1b or interleaved, and neither"),
        (["-o", "a.json", "--png", "./a.json"], "-o and --png both write to a.json. Give each a file of its own"),
        (["--png", "a", "--trace", "a"], "--png and --trace both write to a"),
        (["--microbatch-sizes", "16,two"], "Cannot read --microbatch-sizes '16,two'"),
        (["--microbatch-sizes", "64"], "--microbatch-sizes 64: a microbatch has from 1 to 8 samples"),
        (["--only", "ddp", "--trace", "t.json"], "--trace shows a step of the plan: let autopar take part"),
        (["-o", "no/such/folder/r.json"], "Cannot write to no/such/folder/r.json: No such file or directory"),
        (["--png", "."], r"Cannot write to \.: Is a directory"),
        (["--steps", "0"], "--steps.* 1$"),
        (["--microbatches", "99"], "microbatch"),
    ],
)
def test_bad_input_ends_before_anything_runs(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autopar.tools.bench.run.run_baseline", None)  # nothing is started
    code, out, error = invoke("bench", *FLAGS, "--batch", "8", *flags)
    assert code in (2, 3) and out == "", error
    assert re.search(message, " ".join(re.sub("[│╭╮╰╯─]", " ", error).split())), error
    assert not list(tmp_path.iterdir())


def test_a_single_step_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BenchRequest] = []

    def note(told: BenchRequest, *others: object) -> BenchOutput:
        asked.append(told)
        raise UsageError("enough")

    monkeypatch.setattr("autopar.tools.bench.run.run_bench", note)
    assert invoke("bench", *FLAGS, "--steps", "1")[0] == 2
    assert invoke("bench", *FLAGS)[0] == 2
    assert [told.steps for told in asked] == [1, 10]


def test_a_launcher_around_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="Run it without torchrun"):
        run_bench(request())


def test_a_model_that_is_no_classifier_is_refused() -> None:
    code, _, error = invoke("bench", *FLAGS, "--model-kwargs", "num_classes=0", "--img-size", "48")
    assert code == 2, error


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

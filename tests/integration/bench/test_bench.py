"""`autopar bench` in processes: baselines that do the same work, failures, time limits, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.bench import FLAGS, TINY, check_trace, early_arrivals, request
from support.effort import full, only

from autopar.api.model_source import ModelSource
from autopar.errors import UsageError
from autopar.tools.bench.baselines.registry import BASELINES
from autopar.tools.bench.outcome import RankFailure, failure_text, run_baseline
from autopar.tools.bench.result import BenchResult
from autopar.tools.bench.run import BenchOutput, run_bench
from autopar.tools.bench.task import BenchTask
from autopar.tools.report.bench_picture import figure_of
from autopar.tools.report.figure import save_figure

KEPT = ("plain", "autopar")


@pytest.fixture(scope="module")
def finished() -> BenchOutput:
    """Results of baselines in processes over Gloo."""
    more = {"only": tuple(BASELINES)} if full() else {"only": KEPT, "microbatch_sizes": ()}
    constraints = {"pp": 2, "microbatches": 4, "timeout": 60.0, "schedule": "1f1b"}
    return run_bench(request(constraints=constraints, **more))


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


def test_the_file_has_the_timeline(finished: BenchOutput, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(finished.result.to_json())
    result = BenchResult.load(tmp_path / "b.json")
    assert result == finished.result
    pipeline = result.row("autopar").pipeline
    assert pipeline is not None and pipeline.timeline is not None
    timeline = pipeline.timeline
    for rank, (called, idle) in enumerate(zip(timeline.called_seconds, timeline.idle_seconds, strict=True)):
        spans = timeline.of_rank(rank)
        times = [called, *(t for span in spans for t in (span.start_seconds, span.end_seconds)), idle]
        assert len(spans) == 8 and times == sorted(times)
    assert min(timeline.called_seconds) == 0


@pytest.mark.full
def test_compiled_stages_on_cpu_have_the_memory_of_processes_alone() -> None:
    done = run_bench(request(only=("autopar",), compile=True, microbatch_sizes=()))
    (row,) = done.result.rows
    assert row.reason is None, row.reason
    assert row.pipeline is not None and row.pipeline.tensor_bytes == () and min(row.peak_bytes) > 0


def test_a_picture_is_drawn(finished: BenchOutput, tmp_path: Path) -> None:
    failed = replace(finished.result.row("plain"), median_seconds=None, samples_per_second=None, reason="out of memory")
    rows = tuple(failed if row.contestant == "plain" else row for row in finished.result.rows)
    save_figure(figure_of(replace(finished.result, rows=rows)), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="Cannot write the picture"):
        save_figure(figure_of(finished.result), tmp_path / "missing" / "bench.png")


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
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


def assignment(source: ModelSource = TINY, **changes: Any) -> BenchTask:
    settings = {"replicas": 1, "microbatches": 2}
    given = {"baseline": "plain", "settings": settings, "device_type": "cpu", "precision": "fp32"}
    return BenchTask(request(source=source, steps=1), **given | changes)


@pytest.mark.full
def test_reasons_name_the_rank_and_the_cause() -> None:
    told = assignment(ModelSource("convnext_atto"), baseline="1f1b", settings={"microbatch_size": 1, "chunks": 1})
    outcome = run_baseline(told, 1, 1, 100.0)
    assert outcome.failure is not None and outcome.failure.text.startswith("there is no split of ConvNeXt into blocks")
    outcome = run_baseline(assignment(ModelSource("vit_tinny")), 2, 1, 100.0)
    assert outcome.failure is not None and outcome.failure.kind == "usage"
    assert outcome.failure.text.startswith("timm has no model named 'vit_tinny'")
    assert failure_text(RankFailure("ValueError", "no"), 1, 2) == "ValueError (rank 1): no"


def test_a_time_limit_ends_a_baseline() -> None:
    outcome = run_baseline(assignment(), 1, 1, 0.05)
    assert outcome.failure is not None and outcome.failure.text.startswith("no result within 0 s; rank 0 was at: ")

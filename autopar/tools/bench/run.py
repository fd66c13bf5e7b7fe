"""Runs a bench: makes the plans, runs the baselines one after the other, and collects their rows."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import nn

import autopar
from autopar.api.options import Options
from autopar.api.planning.plan import plan
from autopar.errors import InfeasibleError, MicrobatchWarning
from autopar.ir.plan import Plan
from autopar.ir.units import plural
from autopar.runtime.launch.devices import Machine
from autopar.runtime.launch.torch_settings import TorchSettings
from autopar.tools.bench.baselines.registry import (
    Baseline,
    BaselineVariant,
    BenchContext,
    NotExpressible,
    choose,
    tp_ranks,
)
from autopar.tools.bench.bubble import bubble_bound_seconds, bubble_share
from autopar.tools.bench.description import commit, machine_text, outcome_text, plan_label
from autopar.tools.bench.outcome import BaselineOutcome, RankResult, run_baseline
from autopar.tools.bench.request import BenchRequest, flops_per_image, machine_for
from autopar.tools.bench.result import BenchResult
from autopar.tools.bench.row import BenchRow, PipelineResult
from autopar.tools.bench.task import BenchTask
from autopar.tools.bench.timeline import MeasuredTimeline
from autopar.tools.report.measured_trace import MeasuredStep, trace_events

# Relative differences of the first losses from the reference's that rounding can explain, by precision.
LOSS_TOLERANCE = {"fp64": 1e-6, "fp32": 2e-3, "bf16": 3e-2, "fp16": 3e-2, "bf16-params": 3e-2}
COMPARED_STEPS = 3
REFERENCES = ("plain", "single", "autopar")  # the first of them that ran has the losses that others must have


@dataclass(frozen=True)
class BenchOutput:
    """The result, and one step of the plan as Chrome trace events; None if the plan was not run."""

    result: BenchResult
    trace: dict[str, Any] | None = field(repr=False)

    def _repr_html_(self) -> str:
        """The printed result, as notebooks show it."""
        return self.result._repr_html_()


class BenchInterrupted(KeyboardInterrupt):
    """Ctrl-C while baselines ran.

    Args:
        output: of the baselines and variants that ran before.
        num_done: baselines that ran with all variants.
        num_baselines: baselines in all.
    """

    def __init__(self, output: BenchOutput, num_done: int, num_baselines: int) -> None:
        super().__init__(f"after {num_done} of {plural(num_baselines, 'baseline')}")
        self.output = output


def run_bench(
    request: BenchRequest,
    progress: Callable[[str], None] = lambda text: None,
    keep: Callable[[BenchResult], None] = lambda result: None,
) -> BenchOutput:
    """Run all baselines, each in its own processes. One that fails is a row with the reason.

    Args:
        progress: called with a line of text when a baseline starts and ends.
        keep: called with the result so far after every row.

    Raises:
        UsageError, InfeasibleError, TraceError: there is no plan to compare others with.
        BenchInterrupted: Ctrl-C while baselines ran.
    """
    machine = machine_for(request)
    with tempfile.TemporaryDirectory(prefix="autopar-bench-") as folder:
        return Bench(request, machine, Path(folder), progress, keep).run()


class Bench:
    """One run of the bench."""

    def __init__(
        self,
        request: BenchRequest,
        machine: Machine,
        folder: Path,
        progress: Callable[[str], None],
        keep: Callable[[BenchResult], None],
    ) -> None:
        """Make the plan and choose the baselines.

        Args:
            folder: where plans are written for workers to read.
        """
        self.request, self.machine, self.folder = request, machine, folder
        self.progress, self.keep = progress, keep
        model = request.source.build("meta")
        self.flops = flops_per_image(model, request.shape)
        self.batch_statistics = any(name.endswith("running_mean") for name, _ in model.named_buffers())
        progress(f"planning over {plural(request.devices, 'device')}")
        constraints = dict(request.constraints)
        # Bytes of a GPU that plans may use, if the user set a limit.
        self.memory_bytes = Options.of(constraints).memory if machine.device_type == "cuda" else None
        if machine.device_type == "cpu" and not {"memory", "hardware"} & constraints.keys():
            constraints["memory"] = psutil.virtual_memory().total // request.devices
        self.constraints = constraints
        self.plan = self.make_plan(request.devices, **constraints)
        self.context = BenchContext(self.plan, request.compile, machine.device_type == "cuda", request.microbatch_sizes)
        self.baselines = choose(request.only, request.skip, self.context)
        self.rows: list[BenchRow] = []
        self.trace: dict[str, Any] | None = None

    def example(self) -> tuple[nn.Module, torch.Tensor]:
        """The requested model and batch on the meta device, in the requested memory format."""
        request = self.request
        model, images = request.source.build("meta"), torch.empty(request.shape, device="meta")
        if request.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return model, images

    def make_plan(self, devices: int, **constraints: Any) -> Plan:
        """A plan of the requested model, batch and memory format under some constraints."""
        model, images = self.example()
        settings = TorchSettings.current()
        if self.machine.device_type == "cuda":  # regions are timed as workers run them
            settings = replace(settings, cudnn_benchmark=True)
        with settings.active():
            new_plan = plan(model, devices, images, **constraints)
        info = replace(new_plan.model, name=self.request.source.name, kwargs=dict(self.request.source.kwargs))
        return replace(new_plan, model=info)

    def run(self) -> BenchOutput:
        """Run all baselines."""
        num_done, count = 0, len(self.baselines)
        try:
            for baseline in self.baselines:
                self.add_rows(baseline, f"[{num_done + 1}/{count}] {baseline.name}")
                num_done += 1
        except KeyboardInterrupt as error:
            raise BenchInterrupted(self.output(), num_done, count) from error
        return self.output()

    def output(self) -> BenchOutput:
        """The rows and the trace so far."""
        return BenchOutput(self.result(), self.trace)

    def add_rows(self, baseline: Baseline, head: str) -> None:
        """Run a baseline and add its rows as they come: one per variant, or one that says why there is none.

        Args:
            head: beginning of its progress lines.
        """
        other_rows = self.rows
        rows: list[BenchRow] = []
        for row in self.run_variants(baseline, head):
            rows.append(row)
            fastest = min(rows, key=lambda row: (row.median_seconds is None, row.median_seconds or 0.0))
            marked = [replace(row, best=row is fastest) for row in rows]
            self.rows = with_loss_notes([*other_rows, *marked], self.plan.precision, self.batch_statistics)
            self.keep(self.result())

    def run_variants(self, baseline: Baseline, head: str) -> Iterator[BenchRow]:
        """Run the variants of a baseline; yields the row of each."""
        try:
            variants = baseline.variants(self.context)
            baseline_plan = self.plan_of(baseline)
        except (NotExpressible, InfeasibleError) as error:
            self.progress(f"{head}: {error}")
            yield replace(self.empty_row(baseline, BaselineVariant("", {})), reason=str(error))
            return
        for variant in variants:
            title = f"{head}{f', {variant.label}' if variant.label else ''}"
            if variant.reason is None:
                self.progress(f"{title}: running")
                row = self.run_variant(baseline, variant, baseline_plan)
            else:
                row = replace(self.empty_row(baseline, variant), reason=variant.reason)
            self.progress(f"{title}: {outcome_text(row)}")
            yield row

    def plan_of(self, baseline: Baseline) -> Plan | None:
        """The plan that a baseline runs; None if it runs none."""
        mesh = self.plan.mesh
        if baseline.name == "autopar":
            return self.plan
        constraints = dict(self.constraints)
        for name in ("microbatches", "microbatch_size", "pins"):
            constraints.pop(name, None)
        if baseline.name == "uniform":
            constraints |= {
                "pp": mesh.pp,
                "tp": mesh.tp_axes or mesh.tp,
                "dp": mesh.dp,
                "microbatches": self.plan.microbatches,
            }
            constraints |= {"schedule": self.plan.schedule, "chunks": self.plan.chunks, "balance": "uniform"}
            return self.make_plan(mesh.devices, **constraints)
        if baseline.name == "single":
            for name in ("pp", "tp", "dp", "zero", "balance", "schedule", "chunks", "memory"):
                constraints.pop(name, None)
            if self.machine.device_type == "cpu":
                constraints["memory"] = psutil.virtual_memory().total
            constraints["microbatches"] = min(self.plan.batch, mesh.dp * self.plan.microbatches)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MicrobatchWarning)  # the device runs the microbatches of all replicas
                return self.make_plan(1, **constraints)
        return None

    def empty_row(self, baseline: Baseline, variant: BaselineVariant) -> BenchRow:
        """The row of a variant that was not run."""
        return BenchRow(
            contestant=baseline.name,
            title=baseline.title,
            label=variant.label,
            about=baseline.about_in(self.plan.precision),
            devices=1 if baseline.single else self.request.devices,
            settings=dict(variant.settings),
        )

    def run_variant(self, baseline: Baseline, variant: BaselineVariant, baseline_plan: Plan | None) -> BenchRow:
        """Run one variant in worker processes."""
        row = self.empty_row(baseline, variant)
        path = self.folder / f"{baseline.name}.plan.json"
        if baseline_plan is not None:
            baseline_plan.save(path)
            row = replace(row, label=row.label or plan_label(baseline_plan))
        task = self.task(baseline, variant, None if baseline_plan is None else str(path))
        threads = self.machine.num_threads if self.machine.device_type == "cpu" else None
        outcome = run_baseline(task, row.devices, threads, self.request.limit_seconds)
        if outcome.failure is not None:
            return replace(row, reason=outcome.failure.text)
        seconds = step_seconds(outcome.ranks)
        row = replace(
            row.with_seconds(seconds, self.request.shape[0], self.flops),
            peak_bytes=tuple(rank.peak_bytes for rank in outcome.ranks),
            losses=tuple(map(sum, zip(*(rank.losses for rank in outcome.ranks), strict=True))),
            first_step_seconds=max(rank.first_step_seconds for rank in outcome.ranks),
        )
        if baseline_plan is not None:
            timeline = measured_timeline(outcome)
            row = replace(row, pipeline=pipeline_result(baseline_plan, outcome.ranks[0], seconds, timeline))
            if baseline.name == "autopar":
                self.trace = trace_events(self.plan, timeline)
        return row

    def task(self, baseline: Baseline, variant: BaselineVariant, plan_file: str | None) -> BenchTask:
        """The payload of a variant's workers."""
        return BenchTask(
            request=self.request,
            baseline=baseline.name,
            settings=variant.settings,
            device_type=self.machine.device_type,
            precision=self.plan.precision,
            plan=plan_file,
            tp=tp_ranks(self.context),
            memory_bytes=None if baseline.single else self.memory_bytes,
        )

    def result(self) -> BenchResult:
        """The result with the rows so far."""
        request = self.request
        on_gpu = self.machine.device_type == "cuda"
        return BenchResult(
            model=request.source.name,
            model_kwargs=dict(request.source.kwargs),
            shape=request.shape,
            devices=request.devices,
            precision=self.plan.precision,
            channels_last=request.channels_last,
            compiled=request.compile,
            plan=plan_label(self.plan),
            flops_per_image=self.flops,
            warmup=request.warmup,
            steps=request.steps,
            seed=request.seed,
            memory="peak of the allocator and of memory that peers reach" if on_gpu else "growth of the process",
            machine=machine_text(self.machine, request.devices),
            torch=torch.__version__,
            autopar=autopar.__version__,
            commit=commit(),
            command=request.command,
            rows=tuple(self.rows),
        )


def step_seconds(ranks: Sequence[RankResult]) -> tuple[float, ...]:
    """Seconds of each step on its slowest rank."""
    return tuple(map(max, zip(*(rank.seconds for rank in ranks), strict=True)))


def pipeline_result(
    plan: Plan, first: RankResult, seconds: Sequence[float], timeline: MeasuredTimeline
) -> PipelineResult:
    """Predicted and measured bubble, time and memory of a plan; measured bubbles are medians over inspected steps.

    Args:
        first: result of rank 0, which has the actions of all ranks.
        seconds: of each timed step.
        timeline: one of the inspected steps.
    """
    prediction = plan.prediction
    return PipelineResult(
        plan=plan.decision,
        bubble_predicted=prediction.bubble_fraction,
        bubble_measured=median(bubble_share(step.spans, median(seconds)) for step in first.steps),
        bound_seconds=median(bubble_bound_seconds(plan, step.spans) for step in first.steps),
        predicted_seconds=prediction.step_seconds,
        predicted_bytes=prediction.peak_bytes,
        tensor_bytes=tuple(first.tensor_bytes[rank] for rank in sorted(first.tensor_bytes)),
        timeline=timeline,
    )


def measured_timeline(outcome: BaselineOutcome) -> MeasuredTimeline:
    """The inspected step whose time is nearest to the median."""
    durations = [end - start for start, end in outcome.ranks[0].step_ns]
    k = min(range(len(durations)), key=lambda i: abs(durations[i] - median(durations)))
    step = outcome.ranks[0].steps[k]
    step_ns = {rank: result.step_ns[k] for rank, result in enumerate(outcome.ranks)}
    return MeasuredStep(step.spans, step.started_ns, step_ns).timeline


def with_loss_notes(rows: Sequence[BenchRow], precision: str, batch_statistics: bool) -> list[BenchRow]:
    """Rows with a note on those whose losses differ from the reference's: they did not do the same work.

    Args:
        batch_statistics: whether the model has batch norm. Losses then depend on the microbatches, and no row gets a
            note.
    """
    timed = [row for row in rows if row.losses]
    reference = next((row for name in REFERENCES for row in timed if row.contestant == name), None)
    if reference is None or batch_statistics:
        return list(rows)
    tolerance, result = LOSS_TOLERANCE[precision], []
    for row in rows:
        pairs = list(zip(row.losses, reference.losses))[:COMPARED_STEPS]
        wrong = [(loss, expected) for loss, expected in pairs if not abs(loss - expected) <= tolerance * abs(expected)]
        note = f"loss {wrong[0][0]:.4f}, {reference.title} {wrong[0][1]:.4f}" if wrong else ""
        result.append(replace(row, note=note))
    return result

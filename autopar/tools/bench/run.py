"""The whole bench: plans, contestants one after the other, rows."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import nn

import autopar
from autopar.api.model_source import ModelSource
from autopar.api.options import RUN_SETTINGS, Options
from autopar.api.planning.plan import plan
from autopar.errors import AutoparError, InfeasibleError, MicrobatchWarning, UsageError
from autopar.ir.plan import Plan
from autopar.ir.units import TIME, plural, text
from autopar.runtime.launch.devices import Machine, this_machine
from autopar.runtime.launch.environment import launched
from autopar.tools.bench.assignment import Assignment
from autopar.tools.bench.baselines.registry import (
    Baseline,
    BenchContext,
    NotExpressible,
    Variant,
    check_names,
    chosen,
    tensor_ranks,
)
from autopar.tools.bench.bubble import bubble_bound_seconds, bubble_share
from autopar.tools.bench.flops import flops_per_image
from autopar.tools.bench.processes import Outcome, run_contestant
from autopar.tools.bench.rank_result import RankResult
from autopar.tools.bench.result import BenchResult, Pipeline, Row, timed_row
from autopar.tools.report.measured_trace import StepOnClock, trace_events

# Relative differences of the first losses from the reference's that rounding does not explain.
NEAR = {"fp64": 1e-6, "fp32": 2e-3, "bf16": 3e-2, "fp16": 3e-2, "bf16-params": 3e-2}
COMPARED_STEPS = 3
# In whose losses others are looked for.
REFERENCES = ("plain", "single", "autopar")


@dataclass(frozen=True)
class Request:
    """What is benched and how.

    Args:
        shape: of the images, at the global batch.
        classes: labels are below this.
        constraints: keyword arguments of `autopar.parallelize` other than the model's and the loss's.
        limit_seconds: for each variant of each contestant.
        command: for the record.
    """

    source: ModelSource
    shape: tuple[int, ...]
    classes: int
    devices: int
    constraints: Mapping[str, Any]
    steps: int = 10
    warmup: int = 5
    seed: int = 0
    compile: bool = False
    channels_last: bool = False
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    microbatch_sizes: tuple[int, ...] | None = None
    limit_seconds: float = 600.0
    command: str = ""

    def __post_init__(self) -> None:
        check_names(self.only, self.skip)
        for size in self.microbatch_sizes or ():
            if not 1 <= size <= self.shape[0]:
                raise UsageError(
                    f"--microbatch-sizes {size}: a microbatch has from 1 to {self.shape[0]} samples, the global batch."
                )


@dataclass(frozen=True)
class Finished:
    """Rows, and the timeline of one step of the plan where it was measured."""

    result: BenchResult
    trace: dict[str, Any] | None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while contestants ran: what there is so far, how many were through, and how many were to take part."""

    def __init__(self, finished: Finished, through: int, contestants: int) -> None:
        super().__init__(f"after {through} of {plural(contestants, 'contestant')}")
        self.finished = finished


def run_bench(
    request: Request,
    progress: Callable[[str], None] = lambda text: None,
    keep: Callable[[BenchResult], None] = lambda result: None,
) -> Finished:
    """Every contestant, each in processes of its own: one that fails is a row with its reason.

    Args:
        progress: is told what is running and what came of it.
        keep: is given the rows so far whenever there is another one.

    Raises:
        UsageError, InfeasibleError, TraceError: there is no plan to compare others with.
        Interrupted: Ctrl-C while contestants ran.
    """
    machine = machine_for(request)
    with tempfile.TemporaryDirectory(prefix="autopar-bench-") as folder:
        return Bench(request, machine, Path(folder), progress, keep).run()


def machine_for(request: Request) -> Machine:
    """What the processes of a bench run on.

    Raises:
        UsageError: this is a launcher's process, or the machine is not one for the request.
    """
    if launched() is not None:
        raise UsageError("bench starts the processes of each contestant itself. Run it without torchrun or srun.")
    machine = this_machine(request.devices, request.constraints.get("backend"))
    Options.of(request.constraints).check_machine(machine.device_type)
    return machine


class Bench:
    """One run of the bench."""

    def __init__(
        self,
        request: Request,
        machine: Machine,
        folder: Path,
        progress: Callable[[str], None],
        keep: Callable[[BenchResult], None],
    ) -> None:
        """Make the plan."""
        self.request, self.machine, self.folder = request, machine, folder
        self.progress, self.keep = progress, keep
        model = request.source.build("meta")
        self.flops = flops_per_image(model, request.shape)
        self.batch_statistics = any(name.endswith("running_mean") for name, _ in model.named_buffers())
        progress(f"planning over {plural(request.devices, 'device')}")
        constraints = dict(request.constraints)
        self.memory_bytes = Options.of(constraints).memory if machine.device_type == "cuda" else None
        if machine.device_type == "cpu" and not {"memory", "hardware"} & constraints.keys():
            constraints["memory"] = psutil.virtual_memory().total // request.devices
        self.constraints = constraints
        self.plan = self.planned(request.devices, **constraints)
        self.field = BenchContext(self.plan, request.compile, request.microbatch_sizes)
        self.taking_part = chosen(request.only, request.skip, self.field)
        self.rows: list[Row] = []
        self.trace: dict[str, Any] | None = None

    def planned(self, devices: int, **constraints: Any) -> Plan:
        """A plan of the model as all contestants run it."""
        request = self.request
        model, images = request.source.build("meta"), torch.empty(request.shape, device="meta")
        if request.channels_last:
            model = model.to(memory_format=torch.channels_last)
            images = images.contiguous(memory_format=torch.channels_last)
        found = plan(model, devices, images, **constraints)
        info = replace(found.model, name=request.source.name, kwargs=dict(request.source.kwargs))
        return replace(found, model=info)

    def run(self) -> Finished:
        """All contestants."""
        through, count = 0, len(self.taking_part)
        try:
            for contestant in self.taking_part:
                self.take(contestant, f"[{through + 1}/{count}] {contestant.name}")
                through += 1
        except KeyboardInterrupt as error:
            raise Interrupted(self.finished(), through, count) from error
        return self.finished()

    def finished(self) -> Finished:
        """What there is so far."""
        return Finished(self.result(), self.trace)

    def take(self, contestant: Baseline, head: str) -> None:
        """Add a contestant's rows as they come: one for each variant, or one that says why there is none."""
        others = self.rows
        rows: list[Row] = []
        for row in self.tried(contestant, head):
            rows.append(row)
            fastest = min(rows, key=lambda row: (row.median_seconds is None, row.median_seconds or 0.0))
            marked = [replace(row, best=row is fastest) for row in rows]
            self.rows = noted([*others, *marked], self.plan.precision, self.batch_statistics)
            self.keep(self.result())

    def tried(self, contestant: Baseline, head: str) -> Iterator[Row]:
        """The rows of a contestant."""
        blank = self.blank(contestant, Variant("", {}))
        try:
            variants = contestant.variants(self.field)
            found = self.plan_of(contestant)
        except (NotExpressible, InfeasibleError) as error:
            self.progress(f"{head}: {error}")
            yield Row(**blank, reason=str(error))
            return
        for variant in variants:
            title = f"{head}{f', {variant.label}' if variant.label else ''}"
            if variant.reason is None:
                self.progress(f"{title}: running")
                row = self.measured(contestant, variant, found)
            else:
                row = Row(**self.blank(contestant, variant), reason=variant.reason)
            self.progress(f"{title}: {outcome_text(row)}")
            yield row

    def plan_of(self, contestant: Baseline) -> Plan | None:
        """The plan that a contestant runs."""
        mesh = self.plan.mesh
        kept = {k: v for k, v in self.constraints.items() if k not in ("microbatches", "microbatch_size", "pins")}
        if contestant.name == "autopar":
            return self.plan
        if contestant.name == "uniform":
            same = {"pp": mesh.pp, "tp": mesh.tp, "dp": mesh.dp, "microbatches": self.plan.microbatches}
            same |= {"schedule": self.plan.schedule, "chunks": self.plan.chunks}
            return self.planned(mesh.devices, **kept | same | {"balance": "uniform"})
        if contestant.name == "single":
            of_mesh = ("pp", "tp", "dp", "zero1", "balance", "schedule", "chunks", "memory")
            kept = {k: v for k, v in kept.items() if k not in of_mesh}
            if self.machine.device_type == "cpu":
                kept["memory"] = psutil.virtual_memory().total
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MicrobatchWarning)  # of replicas' microbatches one after the other
                return self.planned(1, **kept, microbatches=min(self.plan.batch, mesh.dp * self.plan.microbatches))
        return None

    def blank(self, contestant: Baseline, variant: Variant) -> dict[str, Any]:
        """What a row says before anything was measured."""
        return {
            "contestant": contestant.name,
            "title": contestant.title,
            "label": variant.label,
            "about": contestant.about_in(self.plan.precision),
            "devices": 1 if contestant.single else self.request.devices,
            "settings": dict(variant.settings),
        }

    def measured(self, contestant: Baseline, variant: Variant, found: Plan | None) -> Row:
        """Run one variant."""
        request, blank = self.request, self.blank(contestant, variant)
        path = self.folder / f"{contestant.name}.plan.json"
        if found is not None:
            found.save(path)
            blank["label"] = blank["label"] or plan_label(found)
        told = Assignment(
            contestant=contestant.name,
            settings=variant.settings,
            model=request.source.name,
            model_kwargs=request.source.kwargs,
            shape=request.shape,
            classes=request.classes,
            devices=blank["devices"],
            device_type=self.machine.device_type,
            precision=self.plan.precision,
            channels_last=request.channels_last,
            compile=request.compile,
            steps=request.steps,
            warmup=request.warmup,
            seed=request.seed,
            plan=str(path) if found is not None else None,
            tp=tensor_ranks(self.field),
            run_settings={k: v for k, v in self.constraints.items() if k in RUN_SETTINGS},
            memory_bytes=None if contestant.single else self.memory_bytes,
        )
        threads = self.machine.num_threads if self.machine.device_type == "cpu" else None
        outcome = run_contestant(told, blank["devices"], threads, request.limit_seconds)
        if outcome.failure is not None:
            return Row(**blank, reason=outcome.failure.text)
        seconds = step_seconds(outcome.ranks)
        pipeline = pipeline_of(found, outcome.ranks[0], seconds) if found is not None else None
        row = timed_row(
            blank, seconds, request.shape[0], self.flops,
            peak_bytes=tuple(own.peak_bytes for own in outcome.ranks),
            losses=tuple(map(sum, zip(*(own.losses for own in outcome.ranks), strict=True))),
            pipeline=pipeline,
        )  # fmt: skip
        if contestant.name == "autopar":
            self.trace = trace_of(self.plan, outcome)
        return row

    def result(self) -> BenchResult:
        """All rows so far."""
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
    """Each step's time on its slowest rank."""
    return tuple(map(max, zip(*(own.seconds for own in ranks), strict=True)))


def pipeline_of(found: Plan, first: RankResult, seconds: Sequence[float]) -> Pipeline:
    """Medians over the steps of what rank 0 was told of all ranks' actions."""
    prediction = found.prediction
    return Pipeline(
        plan=found.decision,
        bubble_predicted=prediction.bubble_fraction,
        bubble_measured=median(bubble_share(step.spans, median(seconds)) for step in first.steps),
        bound_seconds=median(bubble_bound_seconds(found, step.spans) for step in first.steps),
        predicted_seconds=prediction.step_seconds,
        predicted_bytes=prediction.peak_bytes,
        tensor_bytes=tuple(first.tensor_bytes[rank] for rank in sorted(first.tensor_bytes)),
    )


def trace_of(found: Plan, outcome: Outcome) -> dict[str, Any]:
    """The timeline of the inspected step whose time is nearest to the median of these."""
    took = [end - begun for begun, end in outcome.ranks[0].whole_ns]
    k = min(range(len(took)), key=lambda i: abs(took[i] - median(took)))
    step = outcome.ranks[0].steps[k]
    whole = {rank: own.whole_ns[k] for rank, own in enumerate(outcome.ranks)}
    return trace_events(found, StepOnClock(step.spans, step.started_ns, whole))


def noted(rows: Sequence[Row], precision: str, batch_statistics: bool) -> list[Row]:
    """Rows with a note where their losses are not those of the reference, so that they did not do the same work.

    With batch norm they differ by how the batch is cut, and nothing is noted.
    """
    timed = [row for row in rows if row.losses]
    reference = next((row for name in REFERENCES for row in timed if row.contestant == name), None)
    if reference is None or batch_statistics:
        return list(rows)
    result = []
    for row in rows:
        pairs = list(zip(row.losses, reference.losses))[:COMPARED_STEPS]
        off = [(own, there) for own, there in pairs if not abs(own - there) <= NEAR[precision] * abs(there)]
        note = f"loss {off[0][0]:.4f}, {reference.title} {off[0][1]:.4f}" if off else ""
        result.append(replace(row, note=note))
    return result


def plan_label(found: Plan) -> str:
    """The mesh and how the batch is cut: ``pp 4, 16 × 32, 1f1b``."""
    mesh = found.mesh
    axes = [f"{name} {size}" for name, size in (("pp", mesh.pp), ("tp", mesh.tp), ("dp", mesh.dp)) if size > 1]
    chunks = f" × {found.chunks}" if found.chunks > 1 else ""
    extra = [f"{found.schedule}{chunks}"] if mesh.pp > 1 else []
    extra += ["ZeRO-1"] if found.zero1 else []
    extra += ["recomputing"] if any(stage.recompute == "all" for stage in found.stages) else []
    cut = f"{plural(found.microbatches, 'microbatch', 'es')} of {found.microbatch_size}"
    return ", ".join([" × ".join(axes) or "1 device", *extra, cut])


def outcome_text(row: Row) -> str:
    """A row on one line."""
    if row.median_seconds is None or row.samples_per_second is None:
        return row.reason or ""
    return f"{text(row.median_seconds, TIME)} a step, {row.samples_per_second:,.1f} samples/s"


def machine_text(machine: Machine, devices: int) -> str:
    """Hardware and versions, for a record."""
    cpu = f"{platform.machine()} CPU, {plural(machine.num_threads, 'thread')} a process"
    device = f"{devices} × {torch.cuda.get_device_name()}" if machine.device_type == "cuda" else cpu
    return f"{device}, torch {torch.__version__}, Python {platform.python_version()}"


def commit() -> str | None:
    """The commit of autopar, where it runs from a checkout or was installed from one."""
    root = Path(__file__).parents[3]
    if (root / ".git").exists():
        with suppress(OSError, subprocess.CalledProcessError):
            command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
            return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    with suppress(importlib.metadata.PackageNotFoundError, json.JSONDecodeError):
        origin = importlib.metadata.distribution("autopar").read_text("direct_url.json")
        return json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")
    return None


def num_classes(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Columns of the logits of a model on the meta device.

    Raises:
        UsageError: it is no classifier of images.
    """
    with torch.no_grad():
        try:
            logits = model.eval()(torch.empty(1, *shape[1:], device="meta"))
        except AutoparError:
            raise
        except Exception as error:
            raise UsageError(
                f"{type(model).__name__} does not take images of shape {list(shape[1:])}: {type(error).__name__}: "
                f"{error}"
            ) from error
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        raise UsageError(
            f"bench trains a classifier; {type(model).__name__} does not return one row of logits per image."
        )
    return logits.shape[1]

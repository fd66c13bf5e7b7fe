"""``autopar bench --by-kernel``: kernels of one measured training step against the operations that the planner priced.

Input: a `BenchRequest` for one GPU, and one microbatch. Output: `ByKernel`, a JSON file.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from autopar.api.options import Options
from autopar.api.planning.costs import PlanCosts
from autopar.api.planning.plan import PlanRequest, example_call, lower_example
from autopar.cost.fusion.fused_kernels import fused_kernels
from autopar.cost.fusion.kernel import FusedKernel
from autopar.cost.hardware.load import load_hardware
from autopar.cost.ops.op_cost import Pricing
from autopar.cost.ops.op_stats import graph_stats
from autopar.errors import UsageError
from autopar.runtime.launch.devices import default_hardware_name
from autopar.tools.bench.baselines.registry import BASELINES, BaselineVariant
from autopar.tools.bench.kernel_rows import (
    KernelRow,
    KindRow,
    TimelineEntry,
    kernel_rows,
    kind_rows,
    measured_kinds,
    priced_kinds,
    timeline,
)
from autopar.tools.bench.outcome import RankResult, run_baseline
from autopar.tools.bench.priced_kernels import PricedKernels, priced_kernels
from autopar.tools.bench.priced_ops import PricedGraph, PricedOps, priced_graph
from autopar.tools.bench.request import BenchRequest, machine_for
from autopar.tools.bench.run import Bench

SCHEMA_VERSION = 2
PROFILED_STEPS = 3


@dataclass(frozen=True)
class ByKernel:
    """Kernels and prices of one step.

    Args:
        captured: whether the profiled steps were replayed from a CUDA graph.
        step_seconds: of each timed step, without the profiler.
        busy_seconds: time in which a kernel ran, and span_seconds: from the first kernel to the last one; means over
            the profiled steps.
        kinds: sum to the measured and to the predicted step; the largest difference first.
        kernels, ops: the most expensive first. fused_kernels: as priced, to be compared with ``kernels`` by name; the
            prices of ``ops`` contain them.
        timeline: of the first profiled step.
    """

    model: str
    model_kwargs: Mapping[str, Any]
    shape: tuple[int, ...]
    precision: str
    channels_last: bool
    plan: str
    hardware: str
    captured: bool
    step_seconds: tuple[float, ...]
    measured_seconds: float
    predicted_seconds: float
    busy_seconds: float
    span_seconds: float
    measured_bytes: int
    predicted_bytes: int
    machine: str
    torch: str
    autopar: str
    commit: str | None
    command: str
    kinds: tuple[KindRow, ...]
    kernels: tuple[KernelRow, ...]
    ops: tuple[PricedOps, ...]
    fused_kernels: tuple[PricedKernels, ...]
    timeline: tuple[TimelineEntry, ...]
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def bench_by_kernel(request: BenchRequest, progress: Callable[[str], None] = lambda text: None) -> ByKernel:
    """Run the plan of one GPU, and compare its kernels with its prices.

    Args:
        progress: called with a line of text before each part of the work.

    Raises:
        UsageError: the request is for several devices, other prices than the cost model's or several microbatches;
            there is no GPU; or the run failed.
        InfeasibleError, TraceError: there is no plan.
    """
    request = with_one_microbatch(request)
    machine = machine_for(request)
    if machine.device_type != "cuda":
        raise UsageError("--by-kernel reads the kernels of a CUDA device, and this run has none. Run it on a GPU.")
    with tempfile.TemporaryDirectory(prefix="autopar-bench-") as folder:
        bench = Bench(replace(request, only=("autopar",)), machine, Path(folder), progress, lambda result: None)
        path = Path(folder) / "plan.json"
        bench.plan.save(path)
        task = bench.task(BASELINES["autopar"], BaselineVariant("", {}), str(path))
        progress(f"running {bench.result().plan}")
        outcome = run_baseline(replace(task, profiled_steps=PROFILED_STEPS), 1, None, request.limit_seconds)
        if outcome.failure is not None:
            raise UsageError(f"The plan did not run, so there are no kernels to compare. {outcome.failure.text}")
        progress("pricing operations")
        hardware_name = Options.of(bench.constraints).hardware or default_hardware_name(machine)
        pricing, kernels = plan_pricing(bench, hardware_name)
        fused = priced_kernels(pricing, kernels)
        return by_kernel(bench, priced_graph(pricing), fused, outcome.ranks[0])


def with_one_microbatch(request: BenchRequest) -> BenchRequest:
    """The request with the cost model's prices and one microbatch.

    Raises:
        UsageError: it asks for others, or for several devices.
    """
    if request.devices != 1:
        raise UsageError(
            f"--by-kernel compares the kernels of one device: --devices {request.devices} is not supported. Use "
            "--devices 1."
        )
    needed = {"microbatches": 1, "cost": "analytic"}
    for name, value in needed.items():
        if request.constraints.get(name, value) != value:
            raise UsageError(
                f"--by-kernel compares a step of one microbatch with the cost model's prices: --{name} "
                f"{request.constraints[name]} is not supported. Leave it out."
            )
    if request.constraints.get("microbatch_size", request.shape[0]) != request.shape[0]:
        raise UsageError("--by-kernel compares a step of one microbatch: leave --microbatch-size out.")
    constraints = {name: value for name, value in request.constraints.items() if name != "microbatch_size"}
    return replace(request, constraints=constraints | needed)


def plan_pricing(bench: Bench, hardware_name: str) -> tuple[Pricing, tuple[FusedKernel, ...]]:
    """The graph of the bench's plan, to be priced, and the kernels that compiled code has between products."""
    request, options = bench.request, Options.of(bench.constraints)
    model, images = bench.example()
    call = example_call(model, images, None, None)
    planned = PlanRequest(model, call, 1, options, request.source.name, request.source.kwargs)
    hardware = load_hardware(hardware_name)
    hardware = hardware.with_mode(options.execution_mode(hardware.device_type))
    costs = PlanCosts(lower_example(planned, bench.plan), hardware)
    compiled, eager = hardware.execution_mode.compiled, graph_stats(costs.graph, hardware.device_type)
    kernels = fused_kernels(costs.graph, eager, costs.facts) if compiled else ()
    return costs.pricing((), bench.plan.microbatch_size), kernels


def by_kernel(bench: Bench, priced: PricedGraph, fused: tuple[PricedKernels, ...], rank: RankResult) -> ByKernel:
    """The comparison.

    Args:
        fused: prices of the kernels between products.
        rank: result of the only rank.

    Raises:
        UsageError: the profiler saw no kernels.
    """
    steps = rank.profiled
    if not steps or not all(step.kernels for step in steps):
        raise UsageError(
            "The profiler saw no kernels. Check that this process may profile the GPU (CUPTI), and that no other "
            "profiler is attached."
        )
    empty, prediction, kernels = bench.result(), bench.plan.prediction, kernel_rows(steps)
    measured, busy = median(rank.seconds), mean(step.busy_seconds for step in steps)
    return ByKernel(
        model=empty.model,
        model_kwargs=empty.model_kwargs,
        shape=empty.shape,
        precision=empty.precision,
        channels_last=empty.channels_last,
        plan=empty.plan,
        hardware=bench.plan.hardware.name,
        captured=all(step.captured for step in steps),
        step_seconds=rank.seconds,
        measured_seconds=measured,
        predicted_seconds=prediction.step_seconds,
        busy_seconds=busy,
        span_seconds=mean(step.span_seconds for step in steps),
        measured_bytes=rank.peak_bytes,
        predicted_bytes=max(prediction.peak_bytes),
        machine=empty.machine,
        torch=empty.torch,
        autopar=empty.autopar,
        commit=empty.commit,
        command=empty.command,
        kinds=kind_rows(priced_kinds(priced, bench.plan), measured_kinds(kernels, measured, busy)),
        kernels=kernels,
        ops=priced.rows,
        fused_kernels=fused,
        timeline=timeline(steps[0], kernels),
    )

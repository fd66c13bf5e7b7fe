"""``autopar bench``: a plan run beside the plain PyTorch loop, and compared with its own bubble bound and memory."""

from __future__ import annotations

import functools
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

import torch
from torch import nn

from autopar.api import parallelize
from autopar.batching import partition
from autopar.ir import Plan, microbatch_sizes
from autopar.ir.units import plural
from autopar.model import ParallelModel
from autopar.runtime import Span
from autopar.runtime.plain import plain_step_seconds
from autopar.schedule import generate, simulate

WARMUP_STEPS = 2
optimizer_of = functools.partial(torch.optim.AdamW, lr=1e-4)


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of one rank, byte: predicted, in tensors, and of the whole process less libraries and batch.

    On a GPU the last two are the same: what the allocator handed out.
    """

    rank: int
    predicted_bytes: int
    tensor_bytes: int
    resident_bytes: int


@dataclass(frozen=True)
class BenchResult:
    """Medians over the timed steps.

    ``bound_seconds`` is the step time that the schedule would take if nothing cost time but the actions, each as long
    as measured on its own rank.
    """

    model: str
    batch: int
    microbatches: int
    devices: int
    step_seconds: float
    bound_seconds: float
    single_seconds: float
    plain_seconds: float
    memory: tuple[RankMemory, ...]
    machine: str

    @property
    def of_bound(self) -> float:
        """Share of the bubble bound that was reached."""
        return self.bound_seconds / self.step_seconds

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def run_bench(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    devices: int,
    steps: int = 10,
    progress: Callable[[str], None] = lambda text: None,
    **constraints: Any,
) -> BenchResult:
    """A model's plan measured over ``devices``, over one device, and beside the plain loop on one device.

    All do the same microbatches with AdamW in the same precision; the two single-device runs take turns, so that drift
    of the machine's clock falls on both.

    Args:
        x, y: images and class indices at the global batch.
        steps: timed steps of each, after the warm-up.
        progress: is told what is running.
        constraints: of the plan.
    """
    progress(f"plan over {plural(devices, 'device')}")
    with parallelize(model, devices, example_inputs=x, optimizer=optimizer_of, **constraints) as pm:
        plan, machine = pm.plan, pm.machine
        seconds, bounds = timed(pm, x, y, steps)
        resident = {rank: stats.peak_bytes for rank, stats in pm.stats().items()}
        tensors = pm.measure_memory(x, y)
        predicted = plan.prediction.peak_bytes
        memory = tuple(RankMemory(r, predicted[r], tensors[r], resident[r]) for r in sorted(resident))
    progress("one device, in turns with the plain loop")
    torch.set_num_threads(machine.num_threads)
    device = torch.device(machine.device_of(0))
    sizes = partition(plan.batch, plan.mesh.dp, plan.microbatches)
    cut = list(zip(x.to(device).split(sizes), y.to(device).split(sizes)))
    plain_model = model.train().to(device)
    optimizer = optimizer_of(plain_model.parameters())
    single: list[float] = []
    plain: list[float] = []
    microbatches = plan.microbatches
    same = {"microbatches": len(sizes), "precision": plan.precision}
    with parallelize(model, 1, example_inputs=x, optimizer=optimizer_of, **same) as pm:
        low = getattr(torch, pm.autocast) if pm.autocast else None
        scaler = torch.amp.GradScaler(device.type, enabled=low is torch.float16)
        for _ in range(WARMUP_STEPS + steps):
            single.append(pm.train_step(x, y).step_seconds)
            plain.append(plain_step_seconds(plain_model, optimizer, nn.functional.cross_entropy, cut, scaler, low))
    return BenchResult(
        model=plan.model.name,
        batch=plan.batch,
        microbatches=microbatches,
        devices=devices,
        step_seconds=median(seconds),
        bound_seconds=median(bounds),
        single_seconds=median(single[WARMUP_STEPS:]),
        plain_seconds=median(plain[WARMUP_STEPS:]),
        memory=memory,
        machine=machine_text(machine.device_type, machine.num_threads),
    )


def timed(pm: ParallelModel, x: torch.Tensor, y: torch.Tensor, steps: int) -> tuple[list[float], list[float]]:
    """Step times, and the bubble bound of each step from its own action times."""
    seconds, bounds = [], []
    for i in range(WARMUP_STEPS + steps):
        result = pm.train_step(x, y)
        if i >= WARMUP_STEPS:
            seconds.append(result.step_seconds)
            bounds.append(bubble_bound_seconds(pm.plan, {rank: s.spans for rank, s in pm.stats().items()}))
    return seconds, bounds


def bubble_bound_seconds(plan: Plan, spans: dict[int, tuple[Span, ...]]) -> float:
    """Simulated step with the measured forward and backward of each stage's slowest rank, and free transfers."""

    def per_action(rank: int, kind: str, stage: int) -> float:
        own = (s for s in spans[rank] if s.action.kind == kind and s.action.chunk == stage)
        return mean(s.end_seconds - s.start_seconds for s in own)

    forward, backward = (
        [max(per_action(rank, kind, i) for rank in stage.ranks) for i, stage in enumerate(plan.stages)]
        for kind in ("F", "B")
    )
    count = len(microbatch_sizes(plan.batch // plan.mesh.dp, plan.microbatches))
    return simulate(generate(plan.schedule, plan.mesh.pp, count, plan.chunks), forward, backward).step_seconds


def machine_text(device_type: str, num_threads: int) -> str:
    """Hardware and versions, for a record."""
    cpu = f"{platform.machine()} CPU, {num_threads} thread{'s' * (num_threads > 1)} a process"
    device = torch.cuda.get_device_name() if device_type == "cuda" else cpu
    return f"{device}, torch {torch.__version__}, Python {platform.python_version()}"

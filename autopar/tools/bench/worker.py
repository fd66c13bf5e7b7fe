"""One worker process of a baseline: builds the model, takes the steps, and measures them.

Lines on stdout say how far it is. The timed steps on a GPU run as in a training loop: the host does not wait for them.
A few inspected steps follow, after which the host reads how long each action took.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import DeviceMemoryError, UsageError
from autopar.measure.timer import synchronize
from autopar.measure.workers import Emit, WorkerContext
from autopar.runtime.comm.symmetric_p2p import reserved_bytes
from autopar.runtime.memory.out_of_memory import lack_of_memory
from autopar.runtime.memory.peaks import peak_resident_bytes, resident_bytes, restart_peak
from autopar.tools.bench.baselines.autopar import run_plan
from autopar.tools.bench.baselines.ddp_fsdp import ddp, fsdp2, plain
from autopar.tools.bench.baselines.dtensor import tensor_parallel
from autopar.tools.bench.baselines.pipelining import pipelined
from autopar.tools.bench.baselines.registry import NotExpressible
from autopar.tools.bench.kernel_trace import ProfiledStep, profile_steps
from autopar.tools.bench.outcome import RankResult, StepSpans, failed_result
from autopar.tools.bench.task import BenchTask
from autopar.tools.bench.training import BaselineTrainer

BUILDERS: Mapping[str, Callable[[BenchTask, WorkerContext], BaselineTrainer]] = {
    "plain": plain, "single": run_plan, "autopar": run_plan, "uniform": run_plan, "ddp": ddp, "fsdp2": fsdp2,
    "1f1b": pipelined, "interleaved": pipelined, "dtensor": tensor_parallel,
}  # fmt: skip
# Baselines for which the worker initialises the default process group; autopar initialises it itself.
NEEDS_PROCESS_GROUP = {"ddp", "fsdp2", "1f1b", "interleaved", "dtensor"}
MAX_REASON_LENGTH = 300  # characters
INSPECTED_STEPS = 3
RUN_IN_STEPS = 5  # before each inspected step, so that the GPU is as warm, and its clock as slow, as in the timed steps
GROUP_TIMEOUT = timedelta(minutes=30)  # longer than the bench's time limit


def run(task: BenchTask, emit: Emit) -> None:
    """Emit this rank's `RankResult`; after a failure exit with code 1."""
    worker = WorkerContext.current(task.device_type)
    if worker.device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    try:
        result = run_steps(task, worker)
    except NotExpressible as error:
        result = failed_result("expressible", str(error))
    except UsageError as error:
        result = failed_result("usage", first_line(error))
    except Exception as error:
        traceback.print_exc()
        lack = lack_of_memory(error)
        reason = error if lack is None or isinstance(error, DeviceMemoryError) else lack
        result = failed_result(type(error).__name__ if lack is None else "memory", first_line(reason))
    emit(result)
    if result.failure is not None:
        sys.exit(1)


def run_steps(task: BenchTask, worker: WorkerContext) -> RankResult:
    """Build, warm up, and measure."""
    print_progress("building")
    on_gpu = worker.device.type == "cuda"
    if task.baseline in NEEDS_PROCESS_GROUP:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", device_id=worker.device if on_gpu else None, timeout=GROUP_TIMEOUT
        )
    started = time.perf_counter()
    trainer = BUILDERS[task.baseline](task, worker)
    gc.collect()
    barrier = make_barrier(worker)
    base_bytes = reset_peak(worker.device)
    losses: list[float] = []
    first_step_seconds = 0.0
    for i in range(task.request.warmup):
        print_progress(f"warm-up step {i + 1} of {task.request.warmup}")
        barrier()
        losses.append(trainer.step()())
        first_step_seconds = first_step_seconds or time.perf_counter() - started
    seconds: list[float] = []
    if on_gpu:
        print_progress(f"{task.request.steps} steps")
        barrier()
        seconds, shares = time_back_to_back(trainer, task.request.steps, worker.device)
        losses += shares
    num_inspected = task.request.steps if not on_gpu else INSPECTED_STEPS if trainer.stats is not None else 0
    steps = [inspect_step(trainer, worker, barrier, i) for i in range(num_inspected)]
    losses += [step.loss for step in steps]
    if not on_gpu:
        seconds = [(step.end_ns - step.start_ns) / 1e9 for step in steps]
    peak = peak_bytes(worker.device, base_bytes)  # before the additional step that counts tensors
    tensor_bytes = dict(trainer.tensor_peaks()) if trainer.tensor_peaks is not None else {}
    profiled: tuple[ProfiledStep, ...] = ()
    if task.profiled_steps:
        print_progress(f"{task.profiled_steps} profiled steps")
        profiled = profile_steps(trainer.step, task.profiled_steps, worker.device)
    result = RankResult(
        seconds=tuple(seconds),
        losses=tuple(losses),
        peak_bytes=peak,
        first_step_seconds=first_step_seconds,
        tensor_bytes=tensor_bytes,
        step_ns=tuple((step.start_ns, step.end_ns) for step in steps),
        steps=tuple(step.spans for step in steps if step.spans is not None),
        profiled=profiled,
    )
    barrier()
    print_progress("closing")
    trainer.close()
    return result


@dataclass(frozen=True)
class InspectedStep:
    """A step that the host waited for: host clock before and after, share of the loss, spans of all ranks on rank 0."""

    start_ns: int
    end_ns: int
    loss: float
    spans: StepSpans | None


def inspect_step(
    trainer: BaselineTrainer, worker: WorkerContext, barrier: Callable[[], None], number: int
) -> InspectedStep:
    """Take one step between two barriers, on a GPU after RUN_IN_STEPS others."""
    print_progress(f"step {number + 1}")
    for _ in range(RUN_IN_STEPS if worker.device.type == "cuda" else 0):
        trainer.step()
    barrier()
    start = time.perf_counter_ns()
    share = trainer.step()
    synchronize(worker.device)
    end = time.perf_counter_ns()
    barrier()
    loss = share()
    stats = trainer.stats() if trainer.stats is not None else None  # a call of all ranks
    return InspectedStep(start, end, loss, StepSpans.of(stats) if stats is not None and worker.rank == 0 else None)


def time_back_to_back(trainer: BaselineTrainer, steps: int, device: torch.device) -> tuple[list[float], list[float]]:
    """Seconds of GPU steps for which the host does not wait, and this rank's shares of their losses.

    A step's time is that between the ends of two consecutive steps on the device.
    """
    events, shares = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)], []
    events[0].record()
    for event in events[1:]:
        shares.append(trainer.step())
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)], [share() for share in shares]


def make_barrier(worker: WorkerContext) -> Callable[[], None]:
    """A barrier of all ranks with idle devices; it waits on the host, so that none of its kernels is timed."""
    if worker.world == 1:
        return lambda: synchronize(worker.device)
    group: Any = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)

    def barrier() -> None:
        synchronize(worker.device)
        dist.barrier(group)

    return barrier


def reset_peak(device: torch.device) -> int:
    """Count peak memory from now on; returns bytes that do not count: what the process holds now, 0 on a GPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    restart_peak()
    return resident_bytes()


def peak_bytes(device: torch.device, base_bytes: int) -> int:
    """Peak memory since `reset_peak`: on a GPU of the allocator and the symmetric buffers, weights included; on CPU
    the growth of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + reserved_bytes(device)
    return peak_resident_bytes() - base_bytes


def print_progress(text: str) -> None:
    """Print a line that says how far this rank is."""
    print(text, flush=True)


def first_line(error: BaseException) -> str:
    """The error's message for one line of a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return text if len(text) <= MAX_REASON_LENGTH else f"{text[: MAX_REASON_LENGTH - 1]}…"

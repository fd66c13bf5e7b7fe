"""One process of a contestant: ``python -m autopar.tools.bench.worker FOLDER``, started as torchrun starts its own.

It builds what ``FOLDER/assignment.json`` says, takes the steps and leaves ``FOLDER/RANK.json``. Lines on stdout say how
far it is. When its stdin closes the bench is gone, and so is the process.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import DeviceMemoryError, UsageError
from autopar.runtime.comm.symmetric_p2p import reserved_bytes
from autopar.runtime.memory.out_of_memory import lack_of_memory
from autopar.runtime.memory.peaks import peak_resident_bytes, resident_bytes, restart_peak
from autopar.tools.bench.assignment import BenchTask, WorkerContext
from autopar.tools.bench.baselines.autopar import run_plan
from autopar.tools.bench.baselines.ddp_fsdp import ddp, fsdp2, plain
from autopar.tools.bench.baselines.dtensor import tensor_parallel
from autopar.tools.bench.baselines.pipelining import pipelined
from autopar.tools.bench.baselines.registry import NotExpressible
from autopar.tools.bench.rank_result import RankResult, StepSpans, failed_result
from autopar.tools.bench.training import Trainer

BUILDERS: Mapping[str, Callable[[BenchTask, WorkerContext], Trainer]] = {
    "plain": plain, "single": run_plan, "autopar": run_plan, "uniform": run_plan, "ddp": ddp, "fsdp2": fsdp2,
    "1f1b": pipelined, "interleaved": pipelined, "dtensor": tensor_parallel,
}  # fmt: skip
NEEDS_PROCESS_GROUP = {"ddp", "fsdp2", "1f1b", "interleaved", "dtensor"}  # autopar makes one for itself
MAX_REASON_LENGTH = 300  # of a reason
INSPECTED_STEPS = 3  # after the timed ones on a GPU: what their actions took is read, which makes the host wait
RUN_IN_STEPS = 5  # before each of those, so that the GPU is as warm, and its clock as slow, as in the timed ones
GROUP_TIMEOUT = timedelta(minutes=30)  # the bench has a limit of its own


def main(folder: Path) -> int:
    """Run; the exit code."""
    threading.Thread(target=leave_with_parent, daemon=True).start()
    task = BenchTask.read(folder / "assignment.json")
    worker = worker_context(task)
    target = folder / f"{worker.rank}.json"
    try:
        left = run_steps(task, worker)
    except NotExpressible as error:
        left = failed_result("expressible", str(error))
    except UsageError as error:
        left = failed_result("usage", first_line(error))
    except Exception as error:
        traceback.print_exc()
        lack = lack_of_memory(error)
        reason = error if lack is None or isinstance(error, DeviceMemoryError) else lack
        left = failed_result(type(error).__name__ if lack is None else "memory", first_line(reason))
    left.write(target)
    sys.stdout.flush()
    # What a group or a compiler left running may keep an ordinary exit waiting for ever.
    os._exit(0 if left.failure is None else 1)


def leave_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def worker_context(task: BenchTask) -> WorkerContext:
    """This process's rank and device, from the launcher's variables."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(task.device_type, rank) if task.device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    return WorkerContext(rank, world, device)


def run_steps(task: BenchTask, worker: WorkerContext) -> RankResult:
    """Build, warm up, measure."""
    print_progress("building")
    if task.contestant in NEEDS_PROCESS_GROUP:
        on_gpu = worker.device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", device_id=worker.device if on_gpu else None, timeout=GROUP_TIMEOUT
        )
    ready = BUILDERS[task.contestant](task, worker)
    gc.collect()
    meet = make_barrier(worker)
    base = reset_peak(worker.device)
    losses = []
    for i in range(task.warmup):
        print_progress(f"warm-up step {i + 1} of {task.warmup}")
        meet()
        losses.append(ready.step()())
    on_gpu = worker.device.type == "cuda"
    seconds: list[float] = []
    if on_gpu:
        print_progress(f"{task.steps} steps")
        meet()
        seconds, shares = time_back_to_back(ready, task.steps, worker.device)
        losses += shares
    begun, ended, steps = [], [], []
    for i in range(0 if on_gpu and ready.stats is None else INSPECTED_STEPS if on_gpu else task.steps):
        print_progress(f"step {i + 1}")
        for _ in range(RUN_IN_STEPS if on_gpu else 0):
            ready.step()
        meet()
        start = time.perf_counter_ns()
        share = ready.step()
        synchronize(worker.device)
        end = time.perf_counter_ns()
        meet()
        begun.append(start)
        ended.append(end)
        losses.append(share())
        if ready.stats is not None:
            stats = ready.stats()  # a call of all ranks
            steps += [StepSpans.of(stats)] if worker.rank == 0 else []
    if not on_gpu:
        seconds = [(end - start) / 1e9 for start, end in zip(begun, ended, strict=True)]
    peak = peak_bytes(worker.device, base)
    tensors = ready.tensor_peaks() if ready.tensor_peaks is not None else {}
    whole = tuple(zip(begun, ended, strict=True))
    left = RankResult(tuple(seconds), tuple(losses), peak, whole, tuple(steps), dict(tensors))
    meet()
    print_progress("closing")
    ready.close()
    return left


def time_back_to_back(ready: Trainer, steps: int, device: torch.device) -> tuple[list[float], list[float]]:
    """Steps on a GPU that nobody waits for, as in a training loop: the time from the end of each to that of the next on
    the device, and this rank's shares of their losses.
    """
    events, shares = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)], []
    events[0].record()
    for mark in events[1:]:
        shares.append(ready.step())
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)], [share() for share in shares]


def make_barrier(worker: WorkerContext) -> Callable[[], None]:
    """What makes all ranks wait for each other, with an idle device; on the host, so that no kernel of it is timed."""
    if worker.world == 1:
        return lambda: synchronize(worker.device)
    group: Any = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)

    def meet() -> None:
        synchronize(worker.device)
        dist.barrier(group)

    return meet


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> int:
    """Count peak memory from now on; what the process holds already, which on a GPU counts too."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    restart_peak()
    return resident_bytes()


def peak_bytes(device: torch.device, base: int) -> int:
    """Most bytes since then: on a GPU in its allocator and where peers write, with weights; else beyond the base."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + reserved_bytes(device)
    return peak_resident_bytes() - base


def print_progress(text: str) -> None:
    print(text, flush=True)


def first_line(error: BaseException) -> str:
    """What happened, for one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    whole = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return whole if len(whole) <= MAX_REASON_LENGTH else f"{whole[: MAX_REASON_LENGTH - 1]}…"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""One process that measures: ``python -m autopar.measure.machine.worker FOLDER``, started as torchrun starts its own.

All ranks measure the same case at the same time, since in a step they share memory and power too; the slowest one's
time is kept. The first rank appends each point to the file of kept points. When its stdin closes the command is gone,
and so is the process.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from autopar.measure.machine.assignment import Assignment
from autopar.measure.machine.cases import Case
from autopar.measure.machine.collectives import (
    COMMUNICATION_BUILDERS,
    CONTROL_BACKEND,
    TIMEOUT,
    MeasuringRank,
    communication_op_counts,
    time_communication,
)
from autopar.measure.machine.kernels import kernel_runs
from autopar.measure.machine.launch_overhead import time_launch
from autopar.measure.machine.points import MeasuredPoint, OpCounts
from autopar.measure.machine.resume import append_point
from autopar.measure.timer import Timing, time_kernels
from autopar.runtime.memory.host_malloc import disable_malloc_trim

NEW_LINE = "\n"


def main(folder: Path) -> None:
    """Measure; ends the process."""
    threading.Thread(target=leave_with_parent, daemon=True).start()
    failed = False
    try:
        measure_all(folder)
    except Exception as error:
        failed = True
        traceback.print_exc()
        print(f"{type(error).__name__}: {str(error).strip().partition(NEW_LINE)[0]}")  # the last line is the reason
    sys.stdout.flush()
    # What a group or a compiler left running may keep an ordinary exit waiting for ever.
    os._exit(int(failed))


def measure_all(folder: Path) -> None:
    """Everything that is asked for."""
    task = Assignment.read(folder)
    worker = worker_context(task.device_type)
    if worker.device.type == "cpu":
        disable_malloc_trim()  # as ranks do
    capacity = capacity_bytes(worker)  # before anything else has taken memory
    dist.init_process_group(CONTROL_BACKEND, timeout=TIMEOUT)
    torch.manual_seed(worker.rank)
    for case in task.cases:
        print(case.name, flush=True)
        worker.barrier()
        point = measure_case(case, worker, capacity)
        if worker.rank == 0 and point is not None:
            append_point(task.points, point)
        gc.collect()
        if worker.device.type == "cuda":
            torch.cuda.empty_cache()
    worker.barrier()


def leave_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def worker_context(device_type: str) -> MeasuringRank:
    """This process's rank and device, from the launcher's variables."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # as training on a GPU has it
    return MeasuringRank(rank, world, device)


def capacity_bytes(worker: MeasuringRank) -> int:
    """Memory for tensors: on a GPU what is free once it has a context, on CPU a process's share of the machine's."""
    if worker.device.type == "cuda":
        torch.zeros(1, device=worker.device)
        torch.cuda.synchronize(worker.device)
        return torch.cuda.mem_get_info(worker.device)[0]
    return psutil.virtual_memory().total // worker.world


def measure_case(case: Case, worker: MeasuringRank, capacity: int) -> MeasuredPoint | None:
    """A point of the slowest rank, on all ranks; None where there is nothing like it here."""
    if case.kind == "capacity":
        least = min(worker.all_gather_objects(capacity))
        return MeasuredPoint(case.kind, case.name, "", 1, (OpCounts(0.0, 0.0),), float(least), 0.0)
    if case.kind in COMMUNICATION_BUILDERS:
        parts, timing = communication_op_counts(case), time_communication(case, worker)
    elif case.kind == "launch":
        parts, timing = (OpCounts(0.0, 0.0),), time_launch(case.variant, worker.device)
    else:
        work = kernel_runs(case, worker.device)
        parts, timing = work.ops, time_kernels(work.runs, worker.device, sum(part.flops for part in work.ops))
    found: list[Timing] = [t for t in worker.all_gather_objects(timing) if t is not None]
    if not found:
        return None
    slowest = max(found, key=lambda t: t.seconds)
    return MeasuredPoint(case.kind, case.name, case.dtype, case.ranks, parts, slowest.seconds, slowest.spread)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

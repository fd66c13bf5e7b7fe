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
from autopar.measure.machine.clock import Timing, timed_kernels
from autopar.measure.machine.collectives import CONTROL, RUNS, TIMEOUT, WorkerContext, communication, parts_of
from autopar.measure.machine.kept import append
from autopar.measure.machine.kernels import work_of
from autopar.measure.machine.launch_overhead import launch
from autopar.measure.machine.points import Part, Point
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
    told = Assignment.read(folder)
    seat = worker_context(told.device_type)
    if seat.device.type == "cpu":
        disable_malloc_trim()  # as ranks do
    capacity = capacity_bytes(seat)  # before anything else has taken memory
    dist.init_process_group(CONTROL, timeout=TIMEOUT)
    torch.manual_seed(seat.rank)
    for case in told.cases:
        print(case.name, flush=True)
        seat.meet()
        point = measured(case, seat, capacity)
        if seat.rank == 0 and point is not None:
            append(told.points, point)
        gc.collect()
        if seat.device.type == "cuda":
            torch.cuda.empty_cache()
    seat.meet()


def leave_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def worker_context(device_type: str) -> WorkerContext:
    """This process's rank and device, from the launcher's variables."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # as training on a GPU has it
    return WorkerContext(rank, world, device)


def capacity_bytes(seat: WorkerContext) -> int:
    """Memory for tensors: on a GPU what is free once it has a context, on CPU a process's share of the machine's."""
    if seat.device.type == "cuda":
        torch.zeros(1, device=seat.device)
        torch.cuda.synchronize(seat.device)
        return torch.cuda.mem_get_info(seat.device)[0]
    return psutil.virtual_memory().total // seat.world


def measured(case: Case, seat: WorkerContext, capacity: int) -> Point | None:
    """A point of the slowest rank, on all ranks; None where there is nothing like it here."""
    if case.kind == "capacity":
        least = min(seat.gathered(capacity))
        return Point(case.kind, case.name, "", 1, (Part(0.0, 0.0),), float(least), 0.0)
    if case.kind in RUNS:
        parts, timing = parts_of(case), communication(case, seat)
    elif case.kind == "launch":
        parts, timing = (Part(0.0, 0.0),), launch(case.what, seat.device)
    else:
        work = work_of(case, seat.device)
        parts, timing = work.parts, timed_kernels(work.runs, seat.device, sum(part.flops for part in work.parts))
    found: list[Timing] = [t for t in seat.gathered(timing) if t is not None]
    if not found:
        return None
    slowest = max(found, key=lambda t: t.seconds)
    return Point(case.kind, case.name, case.dtype, case.ranks, parts, slowest.seconds, slowest.spread)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

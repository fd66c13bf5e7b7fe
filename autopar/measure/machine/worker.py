"""One process of `autopar profile`.

All ranks measure the same case at the same time, since in a training step they share memory bandwidth and power too.
The time of the slowest rank counts.
"""

from __future__ import annotations

import gc

import psutil
import torch
import torch.distributed as dist

from autopar.measure.machine.cases import Case
from autopar.measure.machine.collectives import (
    COMMUNICATION_BUILDERS,
    CONTROL_BACKEND,
    TIMEOUT,
    RankGroups,
    communication_op_counts,
    time_communication,
)
from autopar.measure.machine.kernels import kernel_runs
from autopar.measure.machine.launch_overhead import time_launch
from autopar.measure.machine.measure import ProfileTask
from autopar.measure.machine.points import MeasuredPoint, OpCounts
from autopar.measure.timer import Timing, time_kernels
from autopar.measure.workers import Emit, WorkerContext
from autopar.runtime.memory.host_malloc import disable_malloc_trim


def run(task: ProfileTask, emit: Emit) -> None:
    """Measure all cases; rank 0 prints the name of each and emits its point."""
    worker = WorkerContext.current(task.device_type)
    if worker.device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # as in training on a GPU
    else:
        disable_malloc_trim()  # as ranks do
    capacity = capacity_bytes(worker)  # before anything else has taken memory
    dist.init_process_group(CONTROL_BACKEND, timeout=TIMEOUT)
    torch.manual_seed(worker.rank)
    groups = RankGroups(worker)
    for case in task.cases:
        print(case.name, flush=True)
        dist.barrier()
        point = measure_case(case, groups, capacity)
        if worker.rank == 0 and point is not None:
            emit(point)
        gc.collect()
        if worker.device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()


def capacity_bytes(worker: WorkerContext) -> int:
    """Bytes for tensors: on a GPU what is free once it has a context, on CPU an equal share of the machine's memory."""
    if worker.device.type == "cuda":
        torch.zeros(1, device=worker.device)
        torch.cuda.synchronize(worker.device)
        return torch.cuda.mem_get_info(worker.device)[0]
    return psutil.virtual_memory().total // worker.world


def measure_case(case: Case, groups: RankGroups, capacity: int) -> MeasuredPoint | None:
    """The slowest rank's point, on all ranks; None where this machine cannot run the case.

    Args:
        capacity: bytes for tensors on this rank.
    """
    device = groups.worker.device
    if case.kind == "capacity":
        return MeasuredPoint(case, (OpCounts(0.0, 0.0),), float(min(groups.all_gather_objects(capacity))), 0.0)
    if case.kind in COMMUNICATION_BUILDERS:
        ops, timing = communication_op_counts(case), time_communication(case, groups)
    elif case.kind == "launch":
        ops, timing = (OpCounts(0.0, 0.0),), time_launch(case.variant, device)
    else:
        kernels = kernel_runs(case, device)
        ops, timing = kernels.ops, time_kernels(kernels.runs, device, sum(op.flops for op in kernels.ops))
    timings: list[Timing] = [t for t in groups.all_gather_objects(timing) if t is not None]
    if not timings:
        return None
    slowest = max(timings, key=lambda t: t.seconds)
    return MeasuredPoint(case, ops, slowest.seconds, slowest.spread)

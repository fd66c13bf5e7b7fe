"""One process of `autopar profile`.

All ranks of a node measure the same case at the same time, since in a training step they share memory bandwidth and
power too. The time of the slowest rank counts. Of several nodes, the first measures what happens inside a node.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

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
from autopar.measure.machine.kernels import kernel_runs, time_launch
from autopar.measure.machine.measure import ProfileTask
from autopar.measure.machine.points import MeasuredPoint, OpCounts
from autopar.measure.timer import Timing, time_kernels
from autopar.measure.workers import Emit, WorkerContext
from autopar.runtime.memory.host_malloc import disable_malloc_trim


def run(task: ProfileTask, emit: Emit) -> None:
    """Measure all cases in a process that the caller started; rank 0 prints the name of each and emits its point."""
    worker = WorkerContext.current(task.device_type)
    dist.init_process_group(CONTROL_BACKEND, timeout=TIMEOUT)
    measure_cases(worker, task.cases, lambda case: print(case.name, flush=True), emit)


def measure_cases(
    worker: WorkerContext,
    cases: Sequence[Case],
    on_case: Callable[[Case], None],
    on_point: Callable[[MeasuredPoint], None],
) -> None:
    """Measure cases with the other ranks of the default group, all of which make this call.

    Args:
        on_case: called before each case.
        on_point: called on rank 0 with each point.
    """
    if worker.device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # as in training on a GPU
    else:
        disable_malloc_trim()  # as ranks do
    capacity = capacity_bytes(worker)  # before anything else has taken memory
    torch.manual_seed(worker.rank)
    groups = RankGroups(worker)
    for case in cases:
        on_case(case)
        dist.barrier()
        point = measure_case(case, groups, capacity)
        if worker.rank == 0 and point is not None:
            on_point(point)
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
    return psutil.virtual_memory().total // worker.per_node


def measure_case(case: Case, groups: RankGroups, capacity: int) -> MeasuredPoint | None:
    """The slowest rank's point, on all ranks; None where this machine cannot run the case.

    Args:
        capacity: bytes for tensors on this rank.
    """
    worker, device = groups.worker, groups.worker.device
    if case.kind == "capacity":
        return MeasuredPoint(case, (OpCounts(0.0, 0.0),), float(min(groups.all_gather_objects(capacity))), 0.0)
    if case.kind in COMMUNICATION_BUILDERS:
        ops, timing = communication_op_counts(case), time_communication(case, groups)
    elif worker.rank >= worker.per_node:
        ops, timing = (), None
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

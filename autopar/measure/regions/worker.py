"""One process that times regions, alone or together with others on the same machine."""

from __future__ import annotations

import gc

import torch

from autopar.measure.regions.task import RegionTask
from autopar.measure.regions.timing import time_region
from autopar.measure.workers import Emit
from autopar.runtime.memory.host_malloc import disable_malloc_trim


def run(task: RegionTask, emit: Emit) -> None:
    """Emit the `RegionTimes` of each region, in order; None for a region that does not fit in memory."""
    device = torch.device(task.device_type)
    task.settings.apply()
    if device.type == "cpu":
        torch.set_num_threads(task.threads)
        disable_malloc_trim()  # as ranks do
    for program, ranks in task.regions:
        print(f"{len(program.ops)} operations of {program.batch} samples", flush=True)
        try:
            times = time_region(program, ranks, task.execution_mode, device)
        except torch.OutOfMemoryError:
            times = None
        emit(times)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

"""The process that measures pieces: ``python -m autopar.measure.regions.worker FOLDER``.

It reads the pieces from a file and appends a line for each as soon as it is measured. When its stdin closes the caller
is gone, and so is the process.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import torch

from autopar.measure.machine.worker import leave_with_parent
from autopar.measure.regions.task import TASK_FILE, TIMES_FILE, RegionTask
from autopar.measure.regions.timing import time_region
from autopar.runtime.memory.host_malloc import disable_malloc_trim

NEW_LINE = "\n"


def main(folder: Path) -> None:
    """Measure everything; ends the process."""
    Thread(target=leave_with_parent, daemon=True).start()
    failed = False
    try:
        with (folder / TASK_FILE).open("rb") as file:
            measure(pickle.load(file), folder / TIMES_FILE)
    except Exception as error:
        failed = True
        traceback.print_exc()
        print(f"{type(error).__name__}: {str(error).strip().partition(NEW_LINE)[0]}")  # the last line is the reason
    sys.stdout.flush()
    os._exit(int(failed))  # what a compiler left running may keep an ordinary exit waiting


def measure(task: RegionTask, times: Path) -> None:
    """A line of JSON for each piece: its times, or null where memory does not suffice."""
    device = torch.device(task.device_type)
    task.settings.apply()
    if device.type == "cpu":
        torch.set_num_threads(task.threads)
        disable_malloc_trim()  # as ranks do
    for program, ranks in task.regions:
        print(f"{len(program.ops)} operations of {program.batch} samples", flush=True)
        try:
            found = asdict(time_region(program, ranks, task.execution_mode, device))
        except torch.OutOfMemoryError:
            found = None
        with times.open("a") as file:
            file.write(json.dumps(found) + NEW_LINE)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

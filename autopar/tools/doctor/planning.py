"""Planning: the integer-program solver, the cost model of this machine, and the folder of measured times."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import HardwareError
from autopar.ir.hardware import Hardware
from autopar.ir.units import BYTES, plural, text
from autopar.runtime.launch.devices import DEFAULT_GPU_COST_MODEL, describes
from autopar.tools.doctor.finding import Finding, Gpu, Probe, Subject
from autopar.tools.doctor.in_processes import result_in_process

if TYPE_CHECKING:
    from autopar.measure.workers import Emit

SOLVER_LIMIT_SECONDS = 30.0
SOLVER_REMEDY = "pip install --force-reinstall highspy pulp"
DAY_SECONDS = 86400.0
PROFILE_REMEDY = "Measure this machine: `autopar profile -o machine.toml`, then plan with --hardware machine.toml."
MANY_BYTES = 2**30  # of measured times


def solver(subject: Subject) -> Iterator[Finding]:
    """Finding on the solver of integer programs."""
    del subject
    name = result_in_process(f"{__name__}:solve", None, SOLVER_LIMIT_SECONDS)
    if name == "HiGHS":
        yield Finding("planning", "solver", "ok", f"{name} solves a program of three variables")
    else:
        value = f"{name}, since highspy cannot be imported: it proves less in the same time"
        yield Finding("planning", "solver", "slow", value, SOLVER_REMEDY)


def solve(payload: None, emit: Emit) -> None:
    """Emit the name of the solver that has solved an example; called in a process, which it may crash."""
    from autopar.solve.backend import solve_example

    emit(solve_example())


def cost_model(subject: Subject) -> Iterator[Finding]:
    """Finding on the cost model that plans for this machine rest on."""
    hardware = subject.hardware
    if hardware is None:
        raise HardwareError("there is no cost model for this machine")
    measured = sum(error.is_measured for error in hardware.errors.values())
    source = "measured" if measured > len(hardware.errors) / 2 else "from data sheets and assumptions"
    value = f"{hardware.name}, {source}"
    other = other_device(hardware, subject.gpus)
    if other:
        yield Finding("planning", "cost model", "slow", f"{value}; it describes {other}", PROFILE_REMEDY)
    else:
        yield Finding("planning", "cost model", "ok", f"{value}: {hardware.device}")


def other_device(hardware: Hardware, gpus: tuple[Gpu, ...]) -> str:
    """Device that a cost model describes and this machine does not have, in words; empty if it has it."""
    if not gpus:
        return "" if hardware.device_type == "cpu" else f"{hardware.device}, and this machine has no GPU"
    unlike = next((gpu.name for gpu in gpus if not describes(hardware, gpu.name)), None)
    if unlike is None:
        return ""
    chosen = " (by default for unknown GPUs)" if hardware.name == DEFAULT_GPU_COST_MODEL else ""
    return f"{hardware.device}{chosen}, and this machine has {unlike}"


def measured_times(subject: Subject) -> Iterator[Finding]:
    """Finding on the folder in which times of compiled regions are kept."""
    from autopar.measure.regions.cache import FOLDER_VARIABLE, cache_folder

    del subject
    folder = cache_folder()
    remedy = f"Set {FOLDER_VARIABLE} to a folder that can be written to; without one each plan measures again."
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        yield Finding("planning", "measured times", "slow", f"{folder} cannot be written to", remedy)
        return
    files = [path.stat() for path in Path(folder).glob("times/*/*.json")]
    if not files:
        yield Finding("planning", "measured times", "ok", f"none in {folder} yet")
        return
    days = (time.time() - max(file.st_mtime for file in files)) / DAY_SECONDS
    num_bytes = sum(file.st_size for file in files)
    age = "today" if days < 1 else f"{plural(int(days), 'day')} ago"
    value = f"{plural(len(files), 'region')}, the last measured {age}; {text(num_bytes, BYTES)} in {folder}"
    if num_bytes > MANY_BYTES:
        remedy = f"Remove {folder / 'times'}: most times are of earlier versions."
        yield Finding("planning", "measured times", "slow", value, remedy)
    else:
        yield Finding("planning", "measured times", "ok", value)


PROBES = (
    Probe("planning", "solver", solver, SOLVER_REMEDY, limit_seconds=SOLVER_LIMIT_SECONDS + 30),
    Probe("planning", "cost model", cost_model, "Install autopar again, or pass --hardware FILE."),
    Probe("planning", "measured times", measured_times, "Look at the folder in AUTOPAR_CACHE.", limit_seconds=20.0),
)

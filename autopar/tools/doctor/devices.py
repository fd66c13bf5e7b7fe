"""Processor and GPUs: what there is, who else uses it, and how fast a GPU computes at its clocks and power limit."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil

from autopar.errors import WorkerError
from autopar.ir.hardware import ExecutionMode, Hardware
from autopar.ir.units import BYTES, plural, text
from autopar.tools.doctor.finding import Finding, Gpu, Probe, Rate, Subject
from autopar.tools.doctor.gpu_processes import PRODUCT, LoadedGpu, SeenGpus, describe, load
from autopar.tools.doctor.in_processes import result_in_process, run_in_processes
from autopar.tools.doctor.nvidia_smi import POWER_CAP, GpuState, is_installed, states
from autopar.tools.doctor.versions import with_tried

BUSY_PERCENT, BUSY_WAIT_SECONDS = 30.0, 0.3
FREE_BYTES = 2 * 2**30  # that drivers and displays may take of a GPU
SEE_LIMIT_SECONDS, LOAD_LIMIT_SECONDS = 60.0, 60.0
BOARD_REMEDY = "Look at cooling and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER."
POWER_REMEDY = "The power limit holds its clock down: nvidia-smi -q -d POWER says which limit is in force."
CLOCK_REMEDY = (
    "Look for other processes on it and for locked clocks (nvidia-smi -q -d CLOCK). If this is its rate, measure it "
    "for the planner: autopar profile."
)
WORK_REMEDY = (
    "The GPU cannot compute: look at the kernel's log (dmesg | grep -i xid) and for other processes on it (nvidia-smi)."
)
HIDDEN = ("", "-1")  # values of CUDA_VISIBLE_DEVICES


def processor(subject: Subject) -> Iterator[Finding]:
    """Finding on the processor, and on other processes that use it now."""
    from autopar.runtime.launch.devices import cpu_name, num_processors

    del subject
    value = f"{cpu_name()}, {plural(num_processors(), 'processor')}"
    busy = psutil.cpu_percent(BUSY_WAIT_SECONDS)
    if busy > BUSY_PERCENT:
        remedy = "Other processes compute here, and times vary: end them before you train, measure or trust this page."
        yield Finding("devices", "processor", "slow", f"{value}, {busy:.0f} % in use", remedy)
    else:
        yield Finding("devices", "processor", "ok", value)


def seen_gpus() -> SeenGpus:
    """GPUs that torch sees in a process of its own.

    Raises:
        WorkerError: that process failed or took too long, as under a driver that hangs.
    """
    return result_in_process(f"{describe.__module__}:{describe.__name__}", None, SEE_LIMIT_SECONDS)


def presence(seen: SeenGpus) -> Iterator[Finding]:
    """Findings on whether torch sees the GPUs that nvidia-smi sees.

    Raises:
        SmiError: nvidia-smi failed.
    """
    import torch

    installed = states() if is_installed() else ()
    if installed:
        yield Finding("versions", "driver", "ok", with_tried("driver", installed[0].driver))
    if seen.gpus:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in seen.gpus))
        least = min(gpu.memory_bytes for gpu in seen.gpus)
        yield Finding("devices", "GPUs", "ok", f"{len(seen.gpus)} × {names}, {text(least, BYTES)} each")
    elif not installed:
        yield Finding("devices", "GPUs", "absent", "no NVIDIA GPU: ranks are CPU processes over Gloo")
    elif os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        value = f"{plural(len(installed), 'GPU')}, hidden by CUDA_VISIBLE_DEVICES: ranks are CPU processes over Gloo"
        yield Finding("devices", "GPUs", "absent", value)
    else:
        value = f"nvidia-smi sees {plural(len(installed), 'GPU')} and torch none"
        if torch.version.cuda is None:
            remedy = "This torch is built for CPU: install one with CUDA, by the command on pytorch.org."
            yield Finding("devices", "GPUs", "broken", value, remedy)
            return
        remedy = (
            f"Install a driver for CUDA {torch.version.cuda}, or a torch for this driver ({installed[0].driver}); in a "
            "container start it with --gpus all."
        )
        yield Finding("devices", "GPUs", "broken", f"{value}: {seen.reason}", remedy)


def idle_gpus(subject: Subject) -> Iterator[Finding]:
    """Findings on the GPUs that torch sees, before autopar uses them.

    Raises:
        SmiError: nvidia-smi failed.
    """
    if not subject.gpus:
        return
    if not is_installed():
        remedy = "Install NVIDIA's tools (in a container NVIDIA_DRIVER_CAPABILITIES=all): clocks and power are unknown."
        yield Finding("devices", "nvidia-smi", "slow", "not installed", remedy)
        return
    by_uuid = {state.uuid: state for state in states()}
    for gpu in subject.gpus:
        state = by_uuid.get(gpu.uuid)
        yield (
            idle_finding(gpu, state)
            if state is not None
            else Finding("devices", f"GPU {gpu.index}", "absent", f"nvidia-smi does not list {gpu.uuid}")
        )


def idle_finding(gpu: Gpu, state: GpuState) -> Finding:
    """Finding on one GPU: errors first, then what makes it slow."""
    name = f"GPU {gpu.index}"
    limit, default = state.power_limit_watts, state.default_limit_watts
    parts = [
        f"{state.celsius:.0f} °C" if state.celsius is not None else "",
        f"power limit {limit:.0f} W" if limit is not None else "",
        f"{text(state.used_bytes, BYTES)} in use" if state.used_bytes is not None else "",
    ]
    value = ", ".join(filter(None, parts)) or state.name
    if state.compute_mode == "Prohibited":
        return Finding("devices", name, "broken", f"{value}; compute mode Prohibited", f"nvidia-smi -i {gpu.uuid} -c 0")
    if state.uncorrected_errors:
        remedy = "Restart the machine; if errors come back, its memory is damaged: nvidia-smi -q -d ECC,ROW_REMAPPER."
        errors = plural(state.uncorrected_errors, "uncorrected memory error")
        return Finding("devices", name, "broken", f"{value}; {errors}", remedy)
    if state.throttles:
        return Finding("devices", name, "slow", f"{value}; {', '.join(state.throttles)}", BOARD_REMEDY)
    if (state.used_bytes or 0) > FREE_BYTES:
        remedy = "Other processes hold memory of it: nvidia-smi lists them. End them, or plan for less with --memory."
        return Finding("devices", name, "slow", value, remedy)
    if limit is not None and default is not None and limit < default:
        remedy = f"Raise the power limit: nvidia-smi -i {gpu.uuid} -pl {default:.0f}"
        return Finding("devices", name, "slow", f"{value}; {default:.0f} W by default", remedy)
    if state.compute_mode == "Exclusive_Process":
        remedy = f"Measuring while a model is open needs two processes on it: nvidia-smi -i {gpu.uuid} -c 0"
        return Finding("devices", name, "slow", f"{value}; one process at a time", remedy)
    if state.mig:
        remedy = f"Parts of a GPU have no peer access: nvidia-smi -i {gpu.uuid} -mig 0"
        return Finding("devices", name, "slow", f"{value}; divided by MIG", remedy)
    return Finding("devices", name, "ok", value)


def gpus_at_work(subject: Subject) -> Iterator[Finding]:
    """Findings on the GPUs while all of them compute products: rate, clock, power, throttling."""
    gpus = subject.gpus[: subject.devices]
    if not gpus:
        return
    loaded: list[LoadedGpu] = []
    uuids, failure = tuple(gpu.uuid for gpu in gpus), ""
    try:
        run_in_processes(f"{load.__module__}:{load.__name__}", uuids, len(gpus), LOAD_LIMIT_SECONDS, loaded.append)
    except WorkerError as error:
        failure = str(error)
    by_index = {one.index: one for one in loaded}
    for gpu in gpus:
        if gpu.index in by_index:
            yield work_finding(by_index[gpu.index], subject.comparable)
        else:
            yield Finding("devices", f"GPU {gpu.index} at work", "broken", failure, WORK_REMEDY)


def work_finding(loaded: LoadedGpu, hardware: Hardware | None) -> Finding:
    """Finding on one GPU that computes products."""
    name, state = f"GPU {loaded.index} at work", loaded.state
    predicted = None
    if hardware is not None:
        captured = hardware.with_mode(ExecutionMode(captured=True))
        seconds = captured.op_seconds("matmul", loaded.flops, loaded.num_bytes, PRODUCT.dtype)
        predicted = loaded.flops / seconds
    rate = Rate(loaded.flops / loaded.seconds, predicted, "FLOP/s")
    value = f"{rate.text} in {PRODUCT.dtype} products"
    if state is None:
        return Finding("devices", name, "slow" if rate.is_slow else "ok", value, CLOCK_REMEDY * rate.is_slow, rate)
    value += f"; {state_text(state)}"
    if state.throttles:
        return Finding("devices", name, "slow", f"{value}, {', '.join(state.throttles)}", BOARD_REMEDY, rate)
    if rate.is_slow:
        remedy = POWER_REMEDY if state.reasons & POWER_CAP else CLOCK_REMEDY
        return Finding("devices", name, "slow", value, remedy, rate)
    return Finding("devices", name, "ok", value, rate=rate)


def state_text(state: GpuState) -> str:
    """Clock, power and temperature of a GPU."""
    parts: list[str] = []
    if state.clock_hertz is not None and state.max_clock_hertz is not None:
        parts.append(f"{state.clock_hertz / 1e6:,.0f} of {state.max_clock_hertz / 1e6:,.0f} MHz")
    if state.power_watts is not None and state.power_limit_watts is not None:
        parts.append(f"{state.power_watts:.0f} of {state.power_limit_watts:.0f} W")
    if state.celsius is not None:
        parts.append(f"{state.celsius:.0f} °C")
    return ", ".join(parts) or "clocks and power unknown"


PROCESSOR = Probe("devices", "processor", processor, "Read /proc/cpuinfo.")
PROBES = (
    Probe(
        "devices", "GPU state", idle_gpus, "Run nvidia-smi: if it hangs or fails, load the driver again or restart.",
        limit_seconds=45.0,
    ),
    Probe("devices", "GPUs at work", gpus_at_work, WORK_REMEDY, limit_seconds=120.0),
)  # fmt: skip

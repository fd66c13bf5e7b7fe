"""Where points are measured."""

from __future__ import annotations

from pathlib import Path

import torch

from autopar.measure.machine.points import ProfileSetting
from autopar.runtime.launch.devices import Machine

CPU_INFO = Path("/proc/cpuinfo")


def profile_setting(machine: Machine, devices: int) -> ProfileSetting:
    """The devices of a run that would use a machine."""
    if machine.device_type == "cuda":
        return ProfileSetting(
            torch.cuda.get_device_name(), "cuda", torch.__version__, 0, devices, torch.cuda.device_count()
        )
    return ProfileSetting(cpu_name(), "cpu", torch.__version__, machine.num_threads, devices, devices)


def cpu_name() -> str:
    """The processor's name where the system tells it, else what torch compiles for."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{torch.backends.cpu.get_cpu_capability()} CPU"

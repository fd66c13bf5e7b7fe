"""Where and how pieces are timed: what is measured in one setting says nothing of another."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from autopar import __version__
from autopar.ir.hardware import ExecutionMode
from autopar.measure.machine.setting import cpu_name
from autopar.runtime.launch.devices import num_processors
from autopar.runtime.launch.torch_settings import TorchSettings

DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class RegionSetting:
    """A device and how programs run on it.

    Args:
        driver: of the GPU, as the system tells it; nothing on CPU.
        threads: of each process, and ``processes`` that run at the same time, on CPU; 0 and 1 on GPUs.
        precision: of float32 products, and what else is set in torch that decides between kernels.
    """

    device: str
    device_type: str
    driver: str
    torch: str
    autopar: str
    execution_mode: ExecutionMode
    threads: int
    processes: int
    precision: str

    @property
    def text(self) -> str:
        """A line for each."""
        return "\n".join(f"{key}: {value}" for key, value in asdict(self).items())


def region_setting(device_type: str, mode: ExecutionMode, devices: int) -> RegionSetting:
    """The device at hand, one of several that run at the same time."""
    cuda = device_type == "cuda"
    return RegionSetting(
        device=torch.cuda.get_device_name() if cuda else cpu_name(),
        device_type=device_type,
        driver=DRIVER.read_text().splitlines()[0] if cuda and DRIVER.exists() else "",
        torch=torch.__version__,
        autopar=__version__,
        execution_mode=mode,
        threads=0 if cuda else max(1, num_processors() // devices),
        processes=1 if cuda else min(devices, num_processors()),
        precision=str(TorchSettings.current()),
    )

"""The device and the settings under which something was measured: numbers of different settings are never mixed."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import cache
from itertools import permutations
from pathlib import Path

import torch

from autopar.ir.hardware import ExecutionMode
from autopar.runtime.launch.devices import Machine, cpu_name, num_processors, rank_threads
from autopar.runtime.launch.environment import launched
from autopar.runtime.launch.torch_settings import TorchSettings

DRIVER = Path("/proc/driver/nvidia/version")
PACKAGE = Path(__file__).parents[1]
SOURCES = (
    "codegen",
    "ir/graph.py",
    "ir/layout.py",
    "ir/program.py",
    "ir/tensor_axes.py",
    "measure/regions",
    "measure/timer.py",
    "ops",
    "runtime/launch/torch_settings.py",
    "runtime/memory/host_malloc.py",
    "runtime/params",
    "sharding",
    "trace",
)


@dataclass(frozen=True)
class ProfileSetting:
    """Device and software with which a cost model's points were measured; fields are keys of the file's [raw] table.

    Args:
        threads: of each process, on CPU; 0 on GPUs.
        devices: processes of a node that measured at the same time.
        node_devices: devices of a node; on CPU equal to ``devices``.
        nodes: number of nodes, each with as many processes.
        peer_access: each of the node's devices reaches the memory of all others.
    """

    device: str
    device_type: str
    torch: str
    threads: int
    devices: int
    node_devices: int
    nodes: int = 1
    peer_access: bool = True

    def differences(self, other: ProfileSetting) -> str:
        """Fields in which another setting differs, in words; empty where the two are equal."""
        fields, other_fields = asdict(self), asdict(other)
        return ", ".join(
            f"{key} {other_fields[key]} instead of {value}"
            for key, value in fields.items()
            if value != other_fields[key]
        )


@dataclass(frozen=True)
class RegionSetting:
    """Device, software and settings with which compiled regions were timed; the cache has one folder for each.

    Args:
        driver: version of the GPU driver; empty on CPU.
        source: digest of the code that makes and times regions.
        threads: of each process, on CPU; 0 on GPUs.
        processes: that run at the same time, on CPU; 1 on GPUs.
        precision: of float32 products, and the other torch settings that decide between kernels.
    """

    device: str
    device_type: str
    driver: str
    torch: str
    source: str
    execution_mode: ExecutionMode
    threads: int
    processes: int
    precision: str

    @property
    def text(self) -> str:
        """A line for each field."""
        return "\n".join(f"{key}: {value}" for key, value in asdict(self).items())


def profile_setting(machine: Machine, devices: int) -> ProfileSetting:
    """The setting of ``autopar profile`` on so many devices of a node."""
    nodes = machine.launched.num_nodes if machine.launched else 1
    if machine.device_type == "cuda":
        gpus = torch.cuda.device_count()  # a launcher may show each process one
        pairs = permutations(range(gpus), 2)
        peers = all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        name = torch.cuda.get_device_name()
        return ProfileSetting(name, "cuda", torch.__version__, 0, devices, max(gpus, devices), nodes, peers)
    return ProfileSetting(cpu_name(), "cpu", torch.__version__, machine.num_threads, devices, devices, nodes)


def region_setting(device_type: str, mode: ExecutionMode, devices: int) -> RegionSetting:
    """The setting of regions that run on this machine's device, one of several that run at the same time.

    Args:
        devices: number of ranks on all nodes.
    """
    cuda, launch = device_type == "cuda", launched()
    processes = devices if launch is None else launch.devices_per_node
    return RegionSetting(
        device=torch.cuda.get_device_name() if cuda else cpu_name(),
        device_type=device_type,
        driver=DRIVER.read_text().splitlines()[0] if cuda and DRIVER.exists() else "",
        torch=torch.__version__,
        source=source_digest(),
        execution_mode=mode,
        threads=0 if cuda else rank_threads(processes, launch),
        processes=1 if cuda else min(processes, num_processors()),
        precision=str(TorchSettings.current()),
    )


@cache
def source_digest(package: Path = PACKAGE) -> str:
    """Digest of the source files that decide how long a region takes: measured times are reused while it is the same.

    It is half of a SHA-256 of their names and contents, in hexadecimal, read once per process. A version number would
    not do: a checkout has the same one for many commits. Files that count, with the reason:

    | files | reason |
    |---|---|
    | ``trace/``, ``sharding/`` | lower a model and shard it: they make the operations of a region |
    | ``codegen/`` | emits a region as Python, fuses its operations, compiles it |
    | ``ops/`` | operators and kernels that a region calls |
    | ``ir/graph.py``, ``layout.py``, ``program.py`` | describe a region, its tensors and weights |
    | ``runtime/params/`` | compute copies of weights and main gradients, which a region reads and writes |
    | ``runtime/launch/torch_settings.py``, ``runtime/memory/host_malloc.py`` | torch and allocator settings |
    | ``measure/regions/``, ``measure/timer.py`` | cut graphs into regions, run and time them |

    The planner, the cost model, the other runtime and the tools do not count: they change neither a region nor its run.

    Args:
        package: folder of the package ``autopar``.

    Source: 88 files, 0.44 MB: 2.4 to 6.7 ms on one core.
    """
    total = hashlib.sha256()
    for file in source_files(package):
        content = file.read_bytes()
        total.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return total.hexdigest()[:32]


def source_files(package: Path) -> list[Path]:
    """The files that count, in the order of their names."""
    places = [package / name for name in SOURCES]
    return sorted(file for place in places for file in ([place] if place.is_file() else place.rglob("*.py")))

"""Loads a machine by name or path: a file of cost_models/ becomes an `ir.hardware.Hardware`.

Needs no torch: a cost model can be read where torch is not installed.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, get_args

from autopar.cost.hardware.cost_file import Table
from autopar.cost.hardware.network import read_link, read_link_ports, read_network, read_peer_access
from autopar.errors import HardwareError, suggest
from autopar.ir.hardware import (
    CALIBRATED,
    COMPUTE_KINDS,
    DEVICE_TYPES,
    DTYPES,
    Efficiency,
    Hardware,
    Launch,
    LaunchKind,
    Link,
    NumberError,
    StepCalibration,
)
from autopar.ir.network import CollectiveKind

Value = TypeVar("Value")
# Contention of overlapped replica collectives on GPUs whose file has no measurement: unknown, which is not free.
# Measured with ViT-B, ViT-L and ViT-giant over dp 2 and ZeRO-1 on 2 x NVIDIA H100, torch 2.11 (docs/benchmarks.md).
ASSUMED_REPLICA_CONTENTION, ASSUMED_CONTENTION_ERROR = Link(86e-6, 6.2e12), NumberError(0.5, is_measured=False)
RENAMED_TABLES = {"beside": "overlap"}  # earlier name -> present name


def hardware_names() -> tuple[str, ...]:
    """Names of the machines that autopar ships, sorted."""
    return tuple(sorted(p.stem for p in cost_model_dir().glob("*.toml")))


def load_hardware(name_or_path: str | PathLike[str]) -> Hardware:
    """A shipped machine by name, or the machine in a TOML file.

    Raises:
        HardwareError: unknown name, unreadable file, or a field that is missing, unknown, negative or in a wrong unit.
    """
    path = find_file(name_or_path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareError(
            f"Cannot read cost model {path}: {error}. Give one of {', '.join(hardware_names())}."
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(f"Cost model {path} is not valid TOML: {error}. Correct that line.") from error
    return read_hardware(Table(path, "", with_current_names(data)))


def with_current_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a file under their present names, since files of users may have earlier ones."""
    return {RENAMED_TABLES.get(key, key): table for key, table in data.items()}


def cost_model_dir() -> Path:
    """The folder with the shipped machines: inside an installed package; next to the package in a checkout."""
    package = Path(__file__).parents[2]
    for folder in (package / "cost_models", package.parent / "cost_models"):
        if folder.is_dir():
            return folder
    raise HardwareError(f"This installation has no cost models next to {package}. Install autopar again.")


def find_file(name_or_path: str | PathLike[str]) -> Path:
    """Path of a machine's file; text that ends in .toml or has a folder is a path."""
    path = Path(name_or_path)
    if not isinstance(name_or_path, str) or path.suffix == ".toml" or len(path.parts) > 1:
        return path
    names = hardware_names()
    if name_or_path not in names:
        hint = suggest(name_or_path, names, 3, cutoff=0.5)
        raise HardwareError(
            f"No cost model is named {name_or_path!r}.{hint} There are {', '.join(names)}; "
            "or give the path of a .toml file."
        )
    return cost_model_dir() / f"{name_or_path}.toml"


def read_hardware(file: Table) -> Hardware:
    """The machine in a parsed file; raises HardwareError with file and field."""
    memory, peaks, launch, kinds, optimizer = (
        file.table(key) for key in ("memory", "peak_flops", "launch", "efficiency", "optimizer")
    )
    devices_per_node = file.whole("devices_per_node", 1)
    device_type = file.text("device_type")
    if device_type not in DEVICE_TYPES:
        raise file.fail("device_type", f"is {device_type!r}; it is one of {', '.join(DEVICE_TYPES)}.")
    alone = devices_per_node == 1  # such a machine needs no links
    tables = {kind: kinds.table(kind) for kind in COMPUTE_KINDS}
    link = None if alone and "link" not in file.data else file.table("link")
    network = None if "network" not in file.data else file.table("network")
    collective = None if alone and "collective" not in file.data else file.table("collective")
    calibration = read_whole(read_calibration, file.table("calibration")) if "calibration" in file.data else {}
    overlap = read_whole(read_overlap, file.table("overlap")) if "overlap" in file.data else Overlap()
    contention = overlap.replica_contention
    if contention is None and device_type == "cuda" and not alone:
        contention = ASSUMED_REPLICA_CONTENTION
        file.errors |= dict.fromkeys(("overlap.replica_latency", "overlap.replica_bandwidth"), ASSUMED_CONTENTION_ERROR)
    hardware = Hardware(
        name=file.text("name"),
        device=file.text("device"),
        device_type=device_type,
        memory_bytes=int(memory.number("capacity", "bytes")),
        peak_flops={dtype: peaks.number(dtype, "FLOPs per second") for dtype in DTYPES},
        memory_bytes_per_second=memory.number("bandwidth", "bytes per second"),
        launch=Launch(*(launch.number(way, "seconds", zero=True) for way in get_args(LaunchKind))),
        efficiency={
            kind: read_efficiency(table)
            for kind, table in tables.items()
            if "asymptote" in table.data or any(dtype not in table.data for dtype in DTYPES)
        },
        memory_efficiency=memory.number("efficiency", "share"),
        memory_half_bytes=memory.number("half", "bytes", zero=True),
        optimizer_bytes_per_second=optimizer.number("bandwidth", "bytes per second"),
        devices_per_node=devices_per_node,
        link=None if link is None else read_link(link),
        link_ports=inf if link is None else read_link_ports(link),
        peer_access=link is None or read_peer_access(link),
        link_name=file.text("link_name"),
        network=None if network is None else read_network(network),
        collective=None if collective is None else read_link(collective),
        dtype_efficiency={
            (kind, dtype): read_whole(read_efficiency, table.table(dtype))
            for kind, table in tables.items()
            for dtype in DTYPES
            if dtype in table.data
        },
        replica_contention=contention or Link(0.0, inf),
        overlap_efficiency=overlap.efficiency,
        reserve_bytes=read_whole(read_reserve, file.table("reserve")) if "reserve" in file.data else 0,
        group_collective=read_groups(collective) if collective is not None else {},
        errors=file.errors,
        calibration=calibration,
    )
    if network is not None and hardware.network is not None and devices_per_node < hardware.network.ports < inf:
        raise network.fail(
            "ports",
            f"is {hardware.network.ports}; a node has {devices_per_node} devices, each of which uses one port at most. "
            "Describe the ports of one device as one port.",
        )
    if "raw" in file.data:
        file.table("raw")  # measurements behind the constants: for people and for the test that refits them
    for table in (
        memory,
        peaks,
        launch,
        kinds,
        optimizer,
        *tables.values(),
        *(table for table in (link, network, collective) if table is not None),
        file,
    ):
        table.finish()
    return hardware


def read_whole(read: Callable[[Table], Value], table: Table) -> Value:
    """The value that ``read`` makes of a table; the table must have no other fields."""
    result = read(table)
    table.finish()
    return result


def read_efficiency(table: Table) -> Efficiency:
    """The efficiency of one kind, or of one dtype of it, with that of its backward if the table has one."""
    forward = read_curve(table)
    if "backward" not in table.data:
        return forward
    return replace(forward, backward=read_whole(read_curve, table.table("backward")))


def read_curve(table: Table) -> Efficiency:
    """The efficiency of one direction, forward or backward."""
    added = table.number("bandwidth", "bytes per second") if "bandwidth" in table.data else math.inf
    return Efficiency(table.number("asymptote", "ratio"), table.number("half", "FLOPs", zero=True), added)


def read_calibration(table: Table) -> Mapping[str, StepCalibration]:
    """Largest relative error of the predicted steps of plans that were run, by the source of their costs."""
    covers = table.texts("covers")
    named = [source for source in CALIBRATED if source in table.data] or CALIBRATED[:1]  # one is required
    return {source: StepCalibration(table.number(source, "share"), covers) for source in named}


def read_reserve(table: Table) -> int:
    """Bytes of a device's memory that libraries take."""
    return int(table.number("memory", "bytes"))


@dataclass(frozen=True)
class Overlap:
    """Costs of overlapped communication, as in ``[overlap]``; None and 0 where the file has none."""

    replica_contention: Link | None = None
    efficiency: float = 0.0


def read_overlap(table: Table) -> Overlap:
    """Costs of overlapped communication.

    ``replica_latency`` and ``replica_bandwidth``: time by which each collective of replicas, and each of its bytes,
    makes compute longer that it overlaps with. ``layers``: share that is hidden of the collectives that the GEMMs of
    linear layers are long enough to hide.
    """
    if "replicas" in table.data:
        raise table.fail("replicas", "is of an earlier format: write replica_latency and replica_bandwidth, or none.")
    contention = None
    if "layers" not in table.data or table.data.keys() & {"replica_latency", "replica_bandwidth"}:
        latency = table.number("replica_latency", "seconds", zero=True)
        contention = Link(latency, table.number("replica_bandwidth", "bytes per second"))
    return Overlap(contention, table.number("layers", "share") if "layers" in table.data else 0.0)


def read_groups(table: Table) -> Mapping[tuple[str, int], Link]:
    """Links of groups of measured sizes, by kind and ranks: the tables ``[collective.all-reduce.4]``."""
    groups: dict[tuple[str, int], Link] = {}
    for kind in get_args(CollectiveKind):
        if kind not in table.data:
            continue
        sizes = table.table(kind)
        for size in sizes.data:
            if not size.isdecimal() or int(size) < 2:
                raise sizes.fail(size, "is no group; write a number of ranks of at least 2.")
            groups[kind, int(size)] = read_whole(read_link, sizes.table(size))
    return groups

"""The machine that a plan is priced for: reads the files of cost_models/ and answers "how many seconds".

Imports the standard library only, so that a cost model can be read where torch is not installed.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from autopar.errors import HardwareError

Kind = Literal["matmul", "attention", "convolution", "memory"]
COMPUTE_KINDS: tuple[Kind, ...] = ("matmul", "attention", "convolution")
DTYPES = ("float32", "bfloat16", "float16", "float64")

DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BYTES = {f"{p}B": f for p, f in DECIMAL.items()} | {f"{p}iB": 1024.0**i for i, p in enumerate("KMGT", start=1)}
# What each quantity may be written in, and the factor to its SI base unit.
UNITS: Mapping[str, Mapping[str, float]] = {
    "bytes": BYTES,
    "bytes per second": {f"{u}/s": f for u, f in BYTES.items()} | {f"{p}bit/s": f / 8 for p, f in DECIMAL.items()},
    "FLOPs": {f"{p}FLOP": f for p, f in DECIMAL.items()},
    "FLOPs per second": {f"{p}FLOP/s": f for p, f in DECIMAL.items()},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "share": {"1": 1.0, "%": 1e-2},
}


@dataclass(frozen=True)
class Link:
    """A way from one device to another; ``bytes_per_second`` counts one direction."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: float) -> float:
        """Time of one point-to-point message, α + bytes/β."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Efficiency:
    """Share of the peak that a kernel reaches: ``asymptote`` when large, half of it at ``half_flops``."""

    asymptote: float
    half_flops: float

    def at(self, flops: float) -> float:
        """Share of the peak at a kernel size of ``flops`` > 0."""
        return self.asymptote * flops / (flops + self.half_flops)


@dataclass(frozen=True)
class Hardware:
    """A machine as the planner sees it, in SI base units.

    ``error`` is the largest relative error among its numbers: the band of every time predicted from them.
    """

    name: str
    device: str
    memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bytes_per_second: float
    launch_seconds: float
    efficiency: Mapping[str, Efficiency]
    memory_efficiency: float
    devices_per_node: int
    link: Link
    link_name: str
    network: Link | None
    error: float

    def op_seconds(self, kind: Kind, flops: float, num_bytes: float, dtype: str) -> float:
        """Time of one operation on one device: its arithmetic or its memory traffic, whichever takes longer, + launch.

        Args:
            kind: "memory" prices the traffic alone.
            flops: multiplications and additions counted separately.
            num_bytes: read and written.
            dtype: of the operands, such as "float32".
        Raises:
            HardwareError: the machine's file has no peak for ``dtype``.
        Error: `error`, relative.
        Source: roofline model (Williams, Waterman, Patterson 2009) with a saturating efficiency.
        """
        traffic = self.traffic_seconds(num_bytes)
        if kind == "memory" or flops <= 0:
            return traffic + self.launch_seconds
        if dtype not in self.peak_flops:
            raise HardwareError(
                f"Cost model {self.name} has no peak FLOP/s for {dtype}, which a {kind} of {flops:.3g} FLOPs uses; "
                f"it has {', '.join(self.peak_flops)}. Run the model in one of these."
            )
        return max(flops / (self.peak_flops[dtype] * self.efficiency[kind].at(flops)), traffic) + self.launch_seconds

    def traffic_seconds(self, num_bytes: float) -> float:
        """Time to move bytes between a device and its memory."""
        return num_bytes / (self.memory_bytes_per_second * self.memory_efficiency)

    def transfer_seconds(self, num_bytes: float, src_rank: int, dst_rank: int) -> float:
        """Time of one message between two ranks; ranks fill nodes in order, and a rank reaches itself in no time.

        Raises:
            HardwareError: the ranks are on different nodes and the machine's file has no network.
        """
        if src_rank == dst_rank:
            return 0.0
        if src_rank // self.devices_per_node == dst_rank // self.devices_per_node:
            return self.link.seconds(num_bytes)
        if self.network is None:
            raise HardwareError(
                f"Cost model {self.name} describes one node of {self.devices_per_node} devices and no network; ranks "
                f"{src_rank} and {dst_rank} are on different nodes. Use fewer devices or add [network] to its file."
            )
        return self.network.seconds(num_bytes)


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
    return read_hardware(Table(path, "", data))


def cost_model_dir() -> Path:
    """The folder with the shipped machines: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "cost_models", package.parent / "cost_models"):
        if folder.is_dir():
            return folder
    raise HardwareError(f"This installation has no cost models beside {package}. Install autopar again.")


def find_file(name_or_path: str | PathLike[str]) -> Path:
    """Path of a machine's file; text that ends in .toml or has a folder is a path."""
    path = Path(name_or_path)
    if not isinstance(name_or_path, str) or path.suffix == ".toml" or len(path.parts) > 1:
        return path
    names = hardware_names()
    if name_or_path not in names:
        near = difflib.get_close_matches(name_or_path, names, cutoff=0.5)
        guess = f" Did you mean {' or '.join(near)}?" if near else ""
        raise HardwareError(
            f"No cost model is named {name_or_path!r}.{guess} There are {', '.join(names)}; "
            "or give the path of a .toml file."
        )
    return cost_model_dir() / f"{name_or_path}.toml"


@dataclass
class Table:
    """One TOML table while it is read: hands out its fields once, and knows what to call them in an error."""

    path: Path
    prefix: str
    data: dict[str, Any]
    errors: list[float] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def fail(self, key: str, problem: str) -> HardwareError:
        where = f"{self.prefix}.{key}" if self.prefix else key
        return HardwareError(f"Cost model {self.path}: field {where} {problem}")

    def get(self, key: str, kind: type | tuple[type, ...], what: str) -> Any:
        self.seen.add(key)
        if key not in self.data:
            raise self.fail(key, f"is missing; it must be {what}.")
        value = self.data[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.fail(key, f"is {value!r}; it must be {what}.")
        return value

    def text(self, key: str) -> str:
        return self.get(key, str, "a text")

    def table(self, key: str) -> Table:
        data = self.get(key, dict, "a table")
        return Table(self.path, f"{self.prefix}.{key}" if self.prefix else key, data, self.errors)

    def number(self, key: str, quantity: str, zero: bool = False) -> float:
        """A number with unit, source, date and error, in SI base units; above 0, or from 0 where ``zero``."""
        entry = self.table(key)
        value = float(entry.get("value", (int, float), "a number"))
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise entry.fail("value", f"is {value:g}; it must be {'at least' if zero else 'above'} 0.")
        unit, known = entry.text("unit"), UNITS[quantity]
        if unit not in known:
            raise entry.fail("unit", f"is {unit!r}; {quantity} are written in {', '.join(known)}.")
        if quantity == "share" and value * known[unit] > 1:
            raise entry.fail("value", f"is {value:g} {unit}; a share is at most 1.")
        error = float(entry.get("error", (int, float), "a relative error such as 0.1"))
        if not 0 <= error < math.inf:
            raise entry.fail("error", f"is {error:g}; it must be a relative error such as 0.1.")
        if not entry.text("source").strip():
            raise entry.fail("source", "is empty; say which datasheet, command or assumption the number is from.")
        entry.get("date", date, "a date such as 2026-11-20")
        entry.finish()
        self.errors.append(error)
        return value * known[unit]

    def finish(self) -> None:
        """Refuse fields that nothing has read."""
        for key in self.data:
            if key not in self.seen:
                near = difflib.get_close_matches(key, self.seen, 1)
                raise self.fail(
                    key, f"is unknown.{f' Did you mean {near[0]}?' if near else ''} Known: {sorted(self.seen)}."
                )


def read_hardware(file: Table) -> Hardware:
    """The machine in a parsed file; raises HardwareError with file and field."""
    memory, peaks, launch, kinds = (file.table(key) for key in ("memory", "peak_flops", "launch", "efficiency"))
    devices_per_node = file.get("devices_per_node", int, "a whole number of devices")
    if devices_per_node < 1:
        raise file.fail("devices_per_node", f"is {devices_per_node}; it must be at least 1.")
    efficiency = {kind: read_efficiency(kinds.table(kind)) for kind in COMPUTE_KINDS}
    hardware = Hardware(
        name=file.text("name"),
        device=file.text("device"),
        memory_bytes=int(memory.number("capacity", "bytes")),
        peak_flops={dtype: peaks.number(dtype, "FLOPs per second") for dtype in DTYPES},
        memory_bytes_per_second=memory.number("bandwidth", "bytes per second"),
        launch_seconds=launch.number("overhead", "seconds", zero=True),
        efficiency=efficiency,
        memory_efficiency=memory.number("efficiency", "share"),
        devices_per_node=devices_per_node,
        link=read_link(file.table("link")),
        link_name=file.text("link_name"),
        network=read_link(file.table("network")) if "network" in file.data else None,
        error=max(file.errors),
    )
    if "raw" in file.data:
        file.table("raw")  # measurements behind the constants: for people and for the test that refits them
    for table in (memory, peaks, launch, kinds, file):
        table.finish()
    return hardware


def read_efficiency(table: Table) -> Efficiency:
    """One kind's efficiency."""
    result = Efficiency(table.number("asymptote", "share"), table.number("half", "FLOPs", zero=True))
    table.finish()
    return result


def read_link(table: Table) -> Link:
    """One link's latency and bandwidth."""
    result = Link(table.number("latency", "seconds", zero=True), table.number("bandwidth", "bytes per second"))
    table.finish()
    return result

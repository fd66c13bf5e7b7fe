"""Output of nvidia-smi: clocks, power, throttling and errors of GPUs, and how these are linked."""

from __future__ import annotations

import atexit
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMMAND = "nvidia-smi"
LIMIT_SECONDS = 20.0  # the first call on a machine without persistence mode loads the driver
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")  # underlines the header of the topology
LINK = re.compile(r"^\s*Link (\d+): (?:([\d.]+) GB/s|<inactive>)", re.MULTILINE)
# Bits of a GPU's reasons for lower clocks (NVML's nvmlClocksEventReasons), and what they say. Idle, clocks that an
# application asks for, sync boost and display clocks are no faults.
POWER_CAP = 0x4
THROTTLES: Mapping[int, str] = {
    0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
    0x80: "power brake",
}  # fmt: skip


class SmiError(Exception):
    """nvidia-smi failed; the message is what it printed."""


@dataclass(frozen=True)
class GpuState:
    """State of a GPU; None where nvidia-smi does not know a number.

    Args:
        clock_hertz, max_clock_hertz: of its multiprocessors.
        power_limit_watts, default_limit_watts: the limit in force, and that which the GPU has by itself.
        reasons: bits of the reasons for lower clocks.
        used_bytes: of its memory.
        uncorrected_errors: of its memory, since the driver was loaded.
    """

    index: int
    uuid: str
    name: str
    driver: str
    clock_hertz: float | None
    max_clock_hertz: float | None
    power_watts: float | None
    power_limit_watts: float | None
    default_limit_watts: float | None
    celsius: float | None
    reasons: int
    used_bytes: float | None
    uncorrected_errors: int
    mig: bool
    compute_mode: str

    @property
    def throttles(self) -> tuple[str, ...]:
        """Reasons for lower clocks that are faults of power supply or cooling."""
        return tuple(text for bit, text in THROTTLES.items() if self.reasons & bit)


# Fields of --query-gpu in the order of `GpuState`. Older drivers know the reasons by the second name.
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
FIELDS = (
    "index", "uuid", "name", "driver_version", "clocks.sm", "clocks.max.sm", "power.draw", "power.limit",
    "power.default_limit", "temperature.gpu", REASONS[0], "memory.used", "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current", "compute_mode",
)  # fmt: skip


def is_installed() -> bool:
    """Whether the command is there."""
    return shutil.which(COMMAND) is not None


def output_of(*arguments: str) -> str:
    """Standard output of nvidia-smi.

    Raises:
        SmiError: it failed, or did not end in time.
    """
    process = subprocess.Popen(
        [COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    atexit.register(process.kill)  # if this process ends while it waits
    try:
        said, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise SmiError(f"{COMMAND} did not answer within {LIMIT_SECONDS:.0f} s") from None
    finally:
        atexit.unregister(process.kill)
    if process.returncode:
        lines = said.strip().splitlines() or [f"exit code {process.returncode}"]
        raise SmiError(f"{COMMAND} says: {lines[0]}")
    return said


def states(*selection: str) -> tuple[GpuState, ...]:
    """States of GPUs, by index.

    Args:
        selection: arguments that select GPUs, such as ``-i UUID``; by default all.

    Raises:
        SmiError: nvidia-smi failed, or printed something else.
    """
    for reasons in REASONS:
        fields = ",".join(reasons if field in REASONS else field for field in FIELDS)
        try:
            said = output_of(f"--query-gpu={fields}", "--format=csv,noheader,nounits", *selection)
        except SmiError as error:
            if "not a valid field" not in str(error) or reasons == REASONS[-1]:
                raise
            continue
        return parsed_states(said)
    raise AssertionError("the last of the names has returned or raised")


def parsed_states(said: str) -> tuple[GpuState, ...]:
    """States in the lines of a query.

    Raises:
        SmiError: a line has other fields.
    """
    parsed: list[GpuState] = []
    for line in said.strip().splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS) or not cells[0].isdecimal():
            raise SmiError(f"{COMMAND} printed {line!r} for {len(FIELDS)} fields")
        index, uuid, name, driver, clock, max_clock, *powers, celsius, reasons, used, errors, mig, mode = cells
        watts = [number(power) for power in powers]
        parsed.append(
            GpuState(
                int(index), uuid, name, driver, number(clock, 1e6), number(max_clock, 1e6), watts[0], watts[1],
                watts[2], number(celsius), bits(reasons), number(used, 2**20), int(number(errors) or 0),
                mig == "Enabled", mode,
            )
        )  # fmt: skip
    return tuple(parsed)


def number(cell: str, unit: float = 1.0) -> float | None:
    """Number of a cell times its unit; None for [N/A], [Not Supported] and their like."""
    try:
        return float(cell) * unit
    except ValueError:
        return None


def bits(cell: str) -> int:
    """Bits of a hexadecimal cell; none for [N/A] and its like."""
    return int(cell, 16) if cell.startswith("0x") else 0


def topology(said: str) -> dict[tuple[int, int], str]:
    """Connection of each pair of GPUs, such as NV18, PIX, PHB or SYS, from ``nvidia-smi topo -m``."""
    lines = [[cell.strip() for cell in line.split("\t")] for line in ESCAPE.sub("", said).splitlines()]
    columns = next((cells for cells in lines if "GPU0" in cells), [])
    connections: dict[tuple[int, int], str] = {}
    for cells in lines:
        row = re.fullmatch(r"GPU(\d+)", cells[0])
        for name, cell in zip(columns, cells if row is not None else ()):
            column = re.fullmatch(r"GPU(\d+)", name)
            if row is not None and column is not None and int(row[1]) < int(column[1]):
                connections[int(row[1]), int(column[1])] = cell
    return connections


def link_rates(said: str) -> dict[int, Sequence[float]]:
    """Rates of each GPU's NVLinks, byte/s, 0 for one that is inactive, from ``nvidia-smi nvlink --status``.

    A GPU without NVLink has none.
    """
    starts = [*re.finditer(r"^GPU (\d+):", said, re.MULTILINE)]
    ends = [match.start() for match in starts[1:]] + [len(said)]
    return {
        int(match[1]): [float(rate or 0) * 1e9 for _, rate in LINK.findall(said[match.end() : end])]
        for match, end in zip(starts, ends)
    }

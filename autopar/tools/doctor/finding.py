"""A line of the page, and the probe that it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from autopar.ir.hardware import Hardware

Status = Literal["ok", "slow", "broken", "absent"]
STATUSES: tuple[Status, ...] = get_args(Status)
FAULTS: tuple[Status, ...] = ("slow", "broken")  # that need a remedy
Section = Literal["versions", "devices", "links", "limits", "launch", "variables", "compile", "planning", "run folder"]
SECTIONS: tuple[Section, ...] = get_args(Section)  # in the order of the page
SLOW_SHARE = 0.7  # of the cost model's rate, below which a device or a link is slow


@dataclass(frozen=True)
class Rate:
    """A measured rate and the cost model's, None where there is none to compare with; ``unit`` is B/s or FLOP/s."""

    measured: float
    predicted: float | None
    unit: Literal["B/s", "FLOP/s"]

    @property
    def is_slow(self) -> bool:
        """Whether the rate is less than `SLOW_SHARE` of the cost model's."""
        return self.predicted is not None and self.measured < SLOW_SHARE * self.predicted

    @property
    def text(self) -> str:
        """Both rates: ``1.93 GB/s, cost model 2.00 GB/s``."""
        measured = rate_text(self.measured, self.unit)
        return measured if self.predicted is None else f"{measured}, cost model {rate_text(self.predicted, self.unit)}"


def rate_text(rate: float, unit: str) -> str:
    """A rate with a decimal prefix: ``350.2 GB/s``, ``745.1 TFLOP/s``."""
    prefix, size = next(((p, s) for p, s in (("T", 1e12), ("G", 1e9), ("M", 1e6)) if rate >= s), ("k", 1e3))
    if unit == "B/s" and prefix == "T":  # links and memories are quoted in GB/s
        prefix, size = "G", 1e9
    scaled = rate / size
    return f"{scaled:,.{2 if scaled < 10 else 1}f} {prefix}{unit}"


@dataclass(frozen=True)
class Finding:
    """A line of the page.

    Args:
        status: "absent" where the machine does not have what is checked, and nothing needs it.
        value: text of what was seen.
        remedy: sentence that says what to do; only of the statuses in `FAULTS`, which must have one.
        rate: number behind the value, where a transfer or a computation was timed.
    """

    section: Section
    name: str
    status: Status
    value: str
    remedy: str = ""
    rate: Rate | None = None

    def __post_init__(self) -> None:
        assert self.value and bool(self.remedy) == (self.status in FAULTS), self


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees.

    Args:
        uuid: as nvidia-smi prints it, ``GPU-…``.
        peers: indices of the GPUs whose memory it reads and writes.
    """

    index: int
    name: str
    uuid: str
    memory_bytes: int
    peers: frozenset[int]


@dataclass(frozen=True)
class Subject:
    """The machine that is checked, as far as probes need to know it.

    Args:
        gpus: that torch sees; empty on a machine without.
        devices: number of devices between which transfers are measured: the first GPUs, or CPU processes.
        hardware: cost model to compare with; None if it cannot be loaded.
        run_folder: folder whose disk is measured.
    """

    gpus: tuple[Gpu, ...]
    devices: int
    hardware: Hardware | None
    run_folder: Path

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.gpus else "cpu"

    @property
    def comparable(self) -> Hardware | None:
        """Cost model whose rates are compared with this machine's; None if it describes another type of device."""
        return self.hardware if self.hardware is not None and self.hardware.device_type == self.device_type else None


@dataclass(frozen=True)
class Probe:
    """A check that gives one or several findings.

    Args:
        remedy: of the finding that stands for a probe which raises or takes too long.
        limit_seconds: time after which the probe is given up.
        needs_torch: whether it is left out where torch cannot be imported.
    """

    section: Section
    name: str
    run: Callable[[Subject], Iterable[Finding]]
    remedy: str
    limit_seconds: float = 10.0
    needs_torch: bool = True

"""Limits of the control group of this process, as of a container or a Slurm job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

PROC, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class GroupLimits:
    """Limits of a control group and of those around it; infinite where there are none.

    Args:
        processors: share of processor time, in processors.
        processes: number of processes and threads.
    """

    memory_bytes: float
    processors: float
    processes: float


def group_limits(proc: Path = PROC, mount: Path = MOUNT) -> GroupLimits:
    """Limits of this process, by version 2 or 1 of Linux's control groups.

    Args:
        proc: file with the groups of this process.
        mount: folder where groups are mounted.
    """
    return GroupLimits(
        memory_bytes=min(
            *numbers(proc, mount, "memory", "memory.max"), *numbers(proc, mount, "memory", "memory.limit_in_bytes"), inf
        ),
        processors=min(*quotas(proc, mount), inf),
        processes=min(*numbers(proc, mount, "pids", "pids.max"), inf),
    )  # fmt: skip


def quotas(proc: Path, mount: Path) -> list[float]:
    """Shares of processor time, in processors."""
    values: list[float] = []
    for folder in folders(proc, mount, "cpu"):
        with suppress(OSError, ValueError):  # no such file, or "max" for no quota
            quota, period = map(float, (folder / "cpu.max").read_text().split())
            values.append(quota / period)
        with suppress(OSError, ValueError):
            quota, period = (float((folder / f"cpu.cfs_{n}_us").read_text()) for n in ("quota", "period"))
            values += [quota / period] if quota > 0 else []
    return values or [inf]


def numbers(proc: Path, mount: Path, controller: str, name: str) -> list[float]:
    """Numbers in the files of a name, of the process's group and those around it."""
    values: list[float] = []
    for folder in folders(proc, mount, controller):
        with suppress(OSError, ValueError):  # no such file, or "max" for no limit
            values.append(float((folder / name).read_text()))
    return values or [inf]


def folders(proc: Path, mount: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's group, and of those around it, for a controller.

    In a container the path may be that of the host, which is not mounted there; the mounted root is the group then.
    """
    lines = proc.read_text().splitlines() if proc.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controller if controllers else mount
        group = root / path.lstrip("/")
        yield group
        yield from (parent for parent in group.parents if parent.is_relative_to(root))

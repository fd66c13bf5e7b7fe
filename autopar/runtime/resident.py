"""Resident memory of this process: now, and at its peak."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Bytes of this process that are in memory now, libraries included."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """Most bytes that were in memory at once since the process began or `restart_peak` was called."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def restart_peak() -> None:
    """Forget the peak so far, such as that of importing torch. Only Linux can; elsewhere the peak stays.

    What getrusage reports is not reset by this, the status file is.
    """
    if STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")

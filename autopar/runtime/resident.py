"""Resident memory of this process: now, and at its peak."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil


def resident_bytes() -> int:
    """Bytes of this process that are in memory now, libraries included."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """Most bytes that were in memory at once since the process began or `restart_peak` was called."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def restart_peak() -> None:
    """Forget the peak so far, such as that of importing torch. Only Linux can; elsewhere the peak stays."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")

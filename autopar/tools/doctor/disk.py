"""Disk of the run folder: free space, and speed of a file that is written and flushed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator

from autopar.ir.units import BYTES, text
from autopar.tools.doctor.finding import Finding, Probe, Rate, Subject

FILE_BYTES = 32 * 2**20
SLOW_BYTES_PER_SECOND = 50e6  # a checkpoint of ViT-L takes a minute and a half
LOW_SPACE_BYTES = 5 * 2**30  # about a checkpoint of ViT-L, of which two are there while one is replaced


def disk(subject: Subject) -> Iterator[Finding]:
    """Findings on the run folder's disk."""
    folder = subject.run_folder
    usage = shutil.disk_usage(folder)
    value = f"{text(usage.free, BYTES)} free of {text(usage.total, BYTES)}"
    if usage.free < LOW_SPACE_BYTES:
        remedy = "Remove files, or put the run on another disk: a checkpoint needs 16 bytes for each parameter."
        yield Finding("run folder", "space", "slow", value, remedy)
    else:
        yield Finding("run folder", "space", "ok", value)
    try:
        seconds = write_seconds(str(folder))
    except OSError as error:
        remedy = f"Give another --run-folder, or make {folder} writable and the disk not full."
        yield Finding("run folder", "write", "broken", f"{folder}: {error.strerror}", remedy)
        return
    rate = Rate(FILE_BYTES / seconds, None, "B/s")
    value = f"{rate.text} in {folder.resolve()}"
    if rate.measured < SLOW_BYTES_PER_SECOND:
        remedy = "Checkpoints wait for this disk: write runs to a local disk, or save less often."
        yield Finding("run folder", "write", "slow", value, remedy, rate)
    else:
        yield Finding("run folder", "write", "ok", value, rate=rate)


def write_seconds(folder: str) -> float:
    """Seconds in which a file of `FILE_BYTES` reaches the disk.

    The file has no name, so that it is gone however this process ends.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    block = os.urandom(2**20)  # no file system can compress it
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start, written = time.perf_counter(), 0
        while written < FILE_BYTES:
            written += file.write(block)
        os.fsync(file.fileno())
        return time.perf_counter() - start


PROBES = (
    Probe(
        "run folder", "disk", disk, "Give another --run-folder: this disk does not answer.", limit_seconds=30.0,
        needs_torch=False,
    ),
)  # fmt: skip

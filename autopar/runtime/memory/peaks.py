"""Measured memory: bytes of the process, and bytes of tensors alone."""

from __future__ import annotations

import resource
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.pytree import leaves

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Resident bytes of this process now, with libraries."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """Peak of the resident bytes since the process began or `restart_peak` was called."""
    with suppress(OSError):  # not Linux, or a sandbox that hides the file
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM"):  # some sandboxes omit the line
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def restart_peak() -> None:
    """Reset the resident peak, such as the peak of importing torch. Only Linux can; elsewhere the old peak counts.

    The reset affects the status file, not the result of getrusage.
    """
    with suppress(OSError):  # not Linux, or a sandbox that forbids it
        CLEAR.write_text("5")


class TensorPeak(TorchDispatchMode):
    """Context that tracks every tensor which an operation creates, until its memory is freed. Slow.

    ``bytes`` is the peak of their bytes; tensors from before the context do not count, nor does a kernel's scratch
    memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.bytes = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in inputs | self.alive:
                self.follow(tensor.untyped_storage())
        return result

    def follow(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        self.alive.add(storage._cdata)
        self.now += storage.nbytes()
        self.bytes = max(self.bytes, self.now)
        weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())

    def freed(self, key: int, num_bytes: int) -> None:
        self.alive.discard(key)
        self.now -= num_bytes

"""Memory in use: of the process, and of tensors alone."""

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
    """Bytes of this process that are in memory now, libraries included."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """Most bytes that were in memory at once since the process began or `restart_peak` was called."""
    with suppress(OSError):  # not Linux, or a sandbox that hides the file
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM"):  # some sandboxes leave it out
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def restart_peak() -> None:
    """Forget the peak so far, such as that of importing torch. Only Linux can; elsewhere the peak stays and counts.

    What getrusage reports is not reset by this, the status file is.
    """
    with suppress(OSError):  # not Linux, or a sandbox that forbids it
        CLEAR.write_text("5")


class TensorPeak(TorchDispatchMode):
    """Within ``with``: follows every tensor that an operation makes until its memory is freed. Slow.

    ``bytes`` is the most there were at once, tensors from before not counted. What a kernel takes for itself while it
    runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.bytes = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given | self.alive:
                self.follow(tensor.untyped_storage())
        return result

    def follow(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from now to its end."""
        self.alive.add(storage._cdata)
        self.now += storage.nbytes()
        self.bytes = max(self.bytes, self.now)
        weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())

    def freed(self, key: int, num_bytes: int) -> None:
        self.alive.discard(key)
        self.now -= num_bytes

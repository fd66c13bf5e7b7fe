"""Process groups of a launcher's process: the default group, which its models share, and those of dropped models.

torch has one default process group per process, of which all other groups are parts. If the user has made it, autopar
makes groups in it and never destroys it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import UsageError
from autopar.runtime.comm.connect import init_process_group

# Process groups of models that were dropped without close(), by number of the model. Garbage is collected at another
# time on each rank, but the ranks have to agree on what groups there are, and destroy those of NCCL together.
DROPPED: dict[int, ExitStack] = {}


class DefaultGroup:
    """Default process group that autopar makes for the first open model, and destroys after the last one."""

    def __init__(self) -> None:
        self.group: Any = None
        self.models = 0  # that use it

    def is_users(self) -> bool:
        """Whether the user has made the default group that there is."""
        return dist.is_initialized() and dist.group.WORLD is not self.group

    def join(
        self, backend: str, rank: int, world: int, device: torch.device, timeout_seconds: float, store: dist.Store
    ) -> Any:
        """Use the group for one model more, and return it; without an open model, make it.

        Args:
            store: where the ranks of a new group meet; without keys.

        Raises:
            UsageError: the group runs over another backend.
        """
        if not dist.is_initialized():
            init_process_group(backend, rank, world, device, timeout_seconds, store)
            self.group, self.models = dist.group.WORLD, 0
        elif dist.get_backend() != backend:
            raise UsageError(
                f"The models that are open in this process run over {dist.get_backend()}, this one is to run over "
                f'{backend}. Close them first, or pass backend="{dist.get_backend()}".'
            )
        self.models += 1
        return self.group

    def leave(self, group: Any) -> None:
        """Use the group that `join` returned for one model less; after the last, destroy it."""
        if dist.group.WORLD is not group:  # the user has destroyed it
            return
        self.models -= 1
        if self.models == 0:
            self.group = None
            dist.destroy_process_group()


DEFAULT_GROUP = DefaultGroup()


def close_dropped(by_rank: Iterable[Iterable[int]]) -> None:
    """Destroy the process groups of the models that all ranks have dropped; all ranks make the call.

    Args:
        by_rank: numbers of the models that each rank has dropped.
    """
    for number in sorted(set.intersection(*map(set, by_rank))):
        DROPPED.pop(number).close()

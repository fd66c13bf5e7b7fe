"""Import of the checkpoint code at its first use."""

from __future__ import annotations

from typing import Protocol

from autopar.errors import CheckpointError
from autopar.ir.checkpoint_header import Header
from autopar.runtime.checkpoint.rank_state import CheckpointedRank, OptionChange


class CheckpointModule(Protocol):
    """`autopar.runtime.checkpoint.save_load`, as ranks use it."""

    def save(self, rank: CheckpointedRank, folder: str, header: Header, keep: int) -> CheckpointError | None: ...

    def inspect(self, folder: str, part: int, parts: int) -> Header | CheckpointError: ...

    def load(self, rank: CheckpointedRank, folder: str, header: Header) -> CheckpointError | list[OptionChange]: ...


def import_checkpoint() -> CheckpointModule:
    """The module `save_load`.

    A worker's start does not import it: torch.distributed.checkpoint takes 0.7 of the 2.8 s that its imports take.
    """
    from autopar.runtime.checkpoint import save_load

    return save_load

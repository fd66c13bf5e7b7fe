"""Work that only rank 0 does, such as printing and writing, with its errors raised on all ranks."""

from __future__ import annotations

from collections.abc import Callable

from autopar.errors import AutoparError, UsageError
from autopar.runtime.launch.environment import launched


def is_rank_zero() -> bool:
    """Whether this process prints and writes: it is the only process, or rank 0 of a launcher."""
    launch = launched()
    return launch is None or launch.rank == 0


def run_on_rank_zero(act: Callable[[], None], broadcast: Callable[[str], str]) -> None:
    """Run ``act`` on rank 0 alone; all ranks call this and wait until it is done.

    Other ranks may see another disk, or the same one before or after rank 0 wrote to it.

    Args:
        told: returns the text that rank 0 passes, on all ranks.

    Raises:
        Exception: what ``act`` raised on rank 0; on the other ranks a UsageError with the same text.
    """
    if not is_rank_zero():
        failure = broadcast("")
        if failure:
            raise UsageError(failure)
        return
    try:
        act()
    except Exception as error:
        broadcast(str(error) if isinstance(error, AutoparError) else f"Rank 0 failed: {type(error).__name__}: {error}")
        raise
    broadcast("")

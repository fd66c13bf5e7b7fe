"""The process that prints and writes, and how what it refuses is refused on all ranks."""

from __future__ import annotations

from collections.abc import Callable

from autopar.errors import AutoparError, UsageError
from autopar.runtime.launch.environment import launched


def is_rank_zero() -> bool:
    """Whether this process prints and writes: the only one, or torchrun's first."""
    launch = launched()
    return launch is None or launch.rank == 0


def run_on_rank_zero(act: Callable[[], None], broadcast: Callable[[str], str]) -> None:
    """Do something on the leading rank alone. All ranks make the call, and go on when it is done.

    Others may not see the same disk, or see it before or after the leading one wrote to it.

    Args:
        told: what the leading rank passes to it, on all ranks.

    Raises:
        Exception: the one that ``act`` raised on the leading rank; on the others a UsageError with its text.
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

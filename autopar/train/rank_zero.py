"""Work that only rank 0 does, such as printing and writing, with its errors raised on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from autopar.errors import AutoparError, UsageError
from autopar.runtime.launch.environment import launched

Answer = TypeVar("Answer")  # plain data


def is_rank_zero() -> bool:
    """Whether this process prints and writes: it is the only process, or rank 0 of a launcher."""
    launch = launched()
    return launch is None or launch.rank == 0


def run_on_rank_zero(act: Callable[[], Answer], broadcast: Callable[[str], str]) -> Answer:
    """Result of ``act``, which runs on rank 0 alone; all ranks call this and wait until it is done.

    Other ranks may see another disk, or the same one before or after rank 0 wrote to it.

    Args:
        act: returns what JSON can hold.
        broadcast: returns the text that rank 0 passes, on all ranks.

    Raises:
        Exception: what ``act`` raised on rank 0; on the other ranks a UsageError with the same text.
    """
    if not is_rank_zero():
        failure, answer = json.loads(broadcast(""))
        if failure:
            raise UsageError(failure)
        return answer
    try:
        answer = act()
    except Exception as error:
        known = isinstance(error, AutoparError)
        broadcast(json.dumps([str(error) if known else f"Rank 0 failed: {type(error).__name__}: {error}", None]))
        raise
    broadcast(json.dumps(["", answer]))
    return answer

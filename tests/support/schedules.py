"""Data flow of a pipeline whose chunk i runs on rank i, written without the code that it tests."""

from __future__ import annotations

from autopar.schedule.actions import Action


def sources(action: Action, last: int) -> tuple[Action, ...]:
    """Actions whose result an action receives; ``last`` is the last chunk's number."""
    chunk = action.chunk + (-1 if action.kind == "F" else 1)
    return (Action(action.kind, chunk, action.microbatch),) if 0 <= chunk <= last else ()

"""Schedules as text, and the data flow of a pipeline whose chunk i runs on rank i, without the code that is tested."""

from __future__ import annotations

import re

from autopar.schedule.actions import Action, Schedule


def sources(action: Action, last: int) -> tuple[Action, ...]:
    """Actions whose result an action receives; ``last`` is the last chunk's number."""
    chunk = action.chunk + (-1 if action.kind == "F" else 1)
    return (Action(action.kind, chunk, action.microbatch),) if 0 <= chunk <= last else ()


def format_schedule(schedule: Schedule) -> str:
    """A schedule as text, a line per rank: ``rank 0: 0F0 0F1 0B0 0B1``."""
    return "\n".join(" ".join([f"rank {rank}:", *map(str, row)]) for rank, row in enumerate(schedule))


def parse_schedule(text: str) -> Schedule:
    """The schedule that `format_schedule` printed."""
    rows = [re.findall(r"(\d+)([FB])(\d+)", line.partition(":")[2]) for line in text.splitlines()]
    return tuple(tuple(Action(kind, int(chunk), int(number)) for chunk, kind, number in row) for row in rows)

"""Schedules as text, and the data flow of a pipeline whose chunk i runs on rank i, without the code that is tested."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autopar.ir.placement import placement_of
from autopar.ir.plan_parts import ListOrder
from autopar.schedule.actions import Action, Schedule
from autopar.schedule.simulate import Pipelined, replayed_seconds


def sources(action: Action, last: int) -> tuple[Action, ...]:
    """Actions of other chunks whose result an action receives; ``last`` is the last chunk's number."""
    if action.kind == "W":
        return ()
    chunk = action.chunk + (-1 if action.kind == "F" else 1)
    return (Action(action.kind, chunk, action.microbatch),) if 0 <= chunk <= last else ()


def format_schedule(schedule: Schedule) -> str:
    """A schedule as text, a line per rank: ``rank 0: 0F0 0F1 0B0 0B1``."""
    return "\n".join(" ".join([f"rank {rank}:", *map(str, row)]) for rank, row in enumerate(schedule))


def parse_schedule(text: str) -> Schedule:
    """The schedule that `format_schedule` printed."""
    rows = [re.findall(r"(\d+)([FBIW])(\d+)", line.partition(":")[2]) for line in text.splitlines()]
    return tuple(tuple(Action(kind, int(chunk), int(number)) for chunk, kind, number in row) for row in rows)


def replayed(
    name: str,
    pp: int,
    forward: Sequence[float],
    backward: Sequence[float],
    transfers: Mapping[tuple[int, int], float],
    sizes: Sequence[float],
) -> float:
    """Seconds of a generated schedule with whole backwards."""
    pipeline = Pipelined(name, placement_of(name, pp, len(forward) // pp))
    return replayed_seconds(pipeline, forward, backward, transfers, sizes, [0.0] * len(forward))


def uniform_order(pp: int, chunks: int, max_in_flight: Sequence[int]) -> ListOrder:
    """The order for forwards, gradients of inputs and gradients of weights that all take equally long."""
    ones = (1,) * (pp * chunks)
    return ListOrder(ones, ones, ones, 0, tuple(max_in_flight))

"""An action, a schedule, and their text."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from autopar.errors import ScheduleError

ActionKind = Literal["F", "B"]

ACTION = re.compile(rf"(0|[1-9][0-9]*)([{''.join(get_args(ActionKind))}])(0|[1-9][0-9]*)")
ROW = re.compile(r"\s*rank (0|[1-9][0-9]*):")
GRID_CELLS = 24


@dataclass(frozen=True)
class Action:
    """Forward (F) or backward (B) of one stage chunk for one microbatch; prints as ``2F0``.

    ``chunk`` counts over the whole pipeline: the i-th chunk of a rank is rank + i·pp, and the rank itself where each
    rank has one chunk.
    """

    kind: ActionKind
    chunk: int
    microbatch: int

    def __post_init__(self) -> None:
        assert self.chunk >= 0 and self.microbatch >= 0, f"negative chunk or microbatch: {self}"

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as ``text``.

        Raises:
            ScheduleError: the text is no action.
        """
        match = ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is no action. Write chunk, F or B, microbatch: 2F0 is the forward of chunk 2, microbatch 0."
            )
        chunk, kind, microbatch = match.groups()
        return Action("F" if kind == "F" else "B", int(chunk), int(microbatch))


Schedule: TypeAlias = tuple[tuple[Action, ...], ...]


def format_schedule(schedule: Schedule) -> str:
    """The whole schedule as text, a line per rank: ``rank 0: 0F0 0F1 0B0 0B1``."""
    return "\n".join(" ".join([f"rank {rank}:", *map(str, row)]) for rank, row in enumerate(schedule))


def parse_schedule(text: str) -> Schedule:
    """The schedule that `format_schedule` printed; blank lines and extra spaces are ignored.

    Raises:
        ScheduleError: a line does not start with its rank, or a word is no action; names line and column.
    """
    rows: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        head = ROW.match(line)
        if head is None or int(head[1]) != len(rows):
            raise ScheduleError(
                f"Cannot read the schedule at line {number}, column 1: {line[:20]!r} does not start with "
                f"'rank {len(rows)}:'. Write one line per rank, in order: rank 0: 0F0 0F1 0B0 0B1"
            )
        rows.append(tuple(_parse_action(word, number) for word in re.compile(r"\S+").finditer(line, head.end())))
    return tuple(rows)


def _parse_action(word: re.Match[str], line: int) -> Action:
    try:
        return Action.parse(word[0])
    except ScheduleError as error:
        raise ScheduleError(f"Cannot read the schedule at line {line}, column {word.start() + 1}: {error}") from error


def format_grid(schedule: Schedule, marked: Collection[tuple[int, int]]) -> str:
    """The actions of all ranks in columns, with ``marked`` actions in brackets.

    An index one past a rank's last action marks its end. Of a longer row, only 24 actions around the mark are shown.

    Args:
        marked: (rank, index) of actions.
    """
    width = max((len(str(action)) for row in schedule for action in row), default=3)
    middle = min((index for _, index in marked), default=0)
    lines = []
    for rank, row in enumerate(schedule):
        marked_here = [index for marked_rank, index in marked if marked_rank == rank]
        words = [*map(str, row), *(["end"] if len(row) in marked_here else [])]
        first = max(0, min(max(marked_here, default=middle) - GRID_CELLS // 2, len(words) - GRID_CELLS))
        shown = range(first, min(first + GRID_CELLS, len(words)))
        cells = [(f"[{words[i]}]" if i in marked_here else f" {words[i]} ").ljust(width + 2) for i in shown]
        left, right = " …" if first else "", "…" if shown.stop < len(words) else ""
        lines.append(f"rank {rank}:{left} {''.join(cells)}{right}".rstrip())
    return "\n".join(lines)

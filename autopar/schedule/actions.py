"""An action, a schedule, and their text."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

ActionKind = Literal["F", "B", "I", "W"]

GRID_CELLS = 24


@dataclass(frozen=True)
class Action:
    """Forward (F) or backward (B) of one stage chunk for one microbatch; prints as ``2F0``.

    A split backward is two actions: gradients of the chunk's inputs (I), then of its weights (W).
    ``chunk`` counts over the whole pipeline: the i-th chunk of a rank is rank + i·pp, and the rank itself where each
    rank has one chunk.
    """

    kind: ActionKind
    chunk: int
    microbatch: int

    def __post_init__(self) -> None:
        assert self.chunk >= 0 and self.microbatch >= 0, f"negative chunk or microbatch: {self}"

    @property
    def ends_backward(self) -> bool:
        """Whether its chunk needs the microbatch's activations no longer."""
        return self.kind in ("B", "W")

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"


Schedule: TypeAlias = tuple[tuple[Action, ...], ...]


def is_split(schedule: Schedule) -> bool:
    """Whether backwards of the schedule are two actions each."""
    return any(action.kind in ("I", "W") for row in schedule for action in row)


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

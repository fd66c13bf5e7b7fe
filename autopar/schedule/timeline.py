"""A simulated step: the start and end of each action, and a picture in text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.schedule.actions import Action

COLUMNS = 100
MAX_ACTION_CELLS = 8


@dataclass(frozen=True)
class Span:
    """One action on its rank, in seconds from the start of the step."""

    rank: int
    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Timeline:
    """One simulated step.

    Args:
        spans: actions with their times, by rank.
        busy_seconds: per rank.
        in_flight: per rank, the most (chunk, microbatch) pairs whose activations it keeps for a backward at one time.
    """

    spans: tuple[Span, ...]
    busy_seconds: tuple[float, ...]
    in_flight: tuple[int, ...]

    @property
    def step_seconds(self) -> float:
        """Seconds from the start of the step to the end of its last action."""
        return max((span.end_seconds for span in self.spans), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the ranks' time in the step: 1 - mean busy / step, from 0 to 1.

        With p balanced stages and m microbatches GPipe and 1F1B have (p - 1) / (m + p - 1). The literature often gives
        idle over busy time, (p - 1) / m, instead: for p = 4, m = 8 ours is 3/11 = 0.273, theirs 0.375.
        """
        if not self.step_seconds:
            return 0.0
        return 1.0 - sum(self.busy_seconds) / len(self.busy_seconds) / self.step_seconds

    def __str__(self) -> str:
        seconds = self.step_seconds
        step = f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"
        kept = " ".join(map(str, self.in_flight))
        head = f"step {step}, bubble {self.bubble_fraction:.1%} of it, activations in flight {kept}"
        return "\n".join([head, *self.rows()])

    def rows(self, columns: int = COLUMNS, names: Sequence[str] | None = None) -> tuple[str, ...]:
        """A row per rank: each action from its letter on, as wide as it is long; dots are idle.

        Letters carry the microbatch where it fits, and the chunk before it where a rank has several.

        Args:
            columns: maximum width of a row.
            names: of the rows, by default ``rank 0``, ``rank 1``, …
        """
        names = names or _names(self)
        label_width = max(map(len, names)) + len(": ")
        scale = _scale(self, _cells(columns, names))
        num_cells = round(self.step_seconds * scale)
        several = any(span.action.chunk != span.rank for span in self.spans)
        cells = [["."] * num_cells for _ in self.busy_seconds]
        for span in self.spans:
            first, last = round(span.start_seconds * scale), round(span.end_seconds * scale)
            cells[span.rank][first:last] = _label(span.action, several, last - first)
        shares = [busy / self.step_seconds if self.step_seconds else 0.0 for busy in self.busy_seconds]
        return tuple(
            f"{f'{name}:':<{label_width}}{''.join(row)}|{share:5.0%}"
            for name, row, share in zip(names, cells, shares, strict=True)
        )

    def fits(self, columns: int = COLUMNS, names: Sequence[str] | None = None) -> bool:
        """Whether `rows` have a cell for every action; actions of a smaller last microbatch do not count."""
        last = max((span.action.microbatch for span in self.spans), default=0)
        whole = [s.end_seconds - s.start_seconds for s in self.spans if s.action.microbatch < last or not last]
        return bool(whole) and min(whole) * _cells(columns, names or _names(self)) >= self.step_seconds


def _names(timeline: Timeline) -> tuple[str, ...]:
    return tuple(f"rank {rank}" for rank in range(len(timeline.busy_seconds)))


def _cells(columns: int, names: Sequence[str]) -> int:
    return columns - max(map(len, names)) - len(": | 100%")


def _scale(timeline: Timeline, columns: int) -> float:
    """Cells per second: a whole number per shortest action where there is room, so that equal actions look equal."""
    shortest = min(
        (s.end_seconds - s.start_seconds for s in timeline.spans if s.end_seconds > s.start_seconds), default=0
    )
    if not shortest:
        return 0.0
    whole = min(MAX_ACTION_CELLS, int(columns * shortest / timeline.step_seconds + 1e-9))
    return whole / shortest if whole else columns / timeline.step_seconds


def _label(action: Action, with_chunk: bool, width: int) -> str:
    text = str(action) if with_chunk else f"{action.kind}{action.microbatch}"
    return (text if len(text) <= width else action.kind).ljust(width, "-")[:width]

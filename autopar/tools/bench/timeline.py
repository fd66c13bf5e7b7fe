"""A measured step of a plan: the actions of all ranks on one clock."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.schedule.timeline import Span


@dataclass(frozen=True)
class MeasuredTimeline:
    """One step of all ranks, in seconds since the first rank was called.

    Args:
        spans: compute of each action, without the wait for its inputs, by rank.
        called_seconds: call of the step on each rank.
        idle_seconds: end of the step on each rank, when its device is idle again.
    """

    spans: tuple[Span, ...]
    called_seconds: tuple[float, ...]
    idle_seconds: tuple[float, ...]

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """Actions of a rank, in the order in which they ran."""
        return tuple(span for span in self.spans if span.rank == rank)

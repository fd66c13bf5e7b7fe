"""Where a pipeline's stages lie: the position in the pipeline that runs each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

# Schedules whose stages lie in a V.
V_SHAPED = ("zb-v",)


@dataclass(frozen=True)
class Placement:
    """Stages on the positions of a pipeline, ``chunks`` on each, in rounds of ``pp``.

    Every round goes from the first position to the last: position p has the stages p, p + pp, p + 2·pp, … In a V every
    other round comes back: of two rounds position p has the stages p and 2·pp − 1 − p, and the first position the last
    stage.
    """

    pp: int
    chunks: int = 1
    is_v: bool = False

    @property
    def num_stages(self) -> int:
        return self.pp * self.chunks

    @property
    def last_position(self) -> int:
        """The position of the last stage."""
        return self.position(self.num_stages - 1)

    @cached_property
    def rounds(self) -> list[list[int]]:
        """For each round, the stage of every position, [chunks][pp]."""
        ways = (range(self.pp), range(self.pp)[::-1] if self.is_v else range(self.pp))
        return [[chunk * self.pp + offset for offset in ways[chunk % 2]] for chunk in range(self.chunks)]

    def position(self, stage: int) -> int:
        """The position that runs a stage."""
        chunk, offset = divmod(stage, self.pp)
        return self.pp - 1 - offset if self.is_v and chunk % 2 else offset

    def stages(self, position: int) -> tuple[int, ...]:
        """The stages of a position, in order."""
        return tuple(row[position] for row in self.rounds)

    def are_apart(self, src: int, dst: int) -> bool:
        """Whether two stages are on different positions, so that what one sends the other travels."""
        return self.position(src) != self.position(dst)


def placement_of(schedule: str, pp: int, chunks: int = 1) -> Placement:
    """Where a schedule's stages are."""
    return Placement(pp, chunks, schedule in V_SHAPED)

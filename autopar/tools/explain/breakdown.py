"""Where a plan's step goes at each pipeline position, from the numbers in its file alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from autopar.ir.microbatches import microbatch_factors
from autopar.ir.plan import Plan
from autopar.schedule.simulate import scheduled_seconds
from autopar.solve.result.step_breakdown import StepBreakdown, mean
from autopar.tools.explain.memory import PositionMemory, memory_of


@dataclass(frozen=True)
class Pipeline:
    """All that decides how long a plan's pipeline takes: seconds per stage of a microbatch, of transfers from stage to
    stage, and the size of each microbatch as a share of the largest."""

    schedule: str
    pp: int
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    transfers: Mapping[tuple[int, int], float]
    sizes: tuple[float, ...]

    @staticmethod
    def of(plan: Plan) -> Pipeline:
        """The plan's own."""
        transfers: dict[tuple[int, int], float] = {}
        for message in plan.messages:
            pair = (message.src, message.dst)
            transfers.setdefault((min(pair), max(pair)), 0.0)  # a gradient travels back along an edge
            transfers[pair] = transfers.get(pair, 0.0) + message.seconds
        return Pipeline(
            plan.schedule,
            plan.mesh.pp,
            tuple(s.forward_seconds for s in plan.stages),
            tuple(s.backward_seconds for s in plan.stages),
            transfers,
            microbatch_factors(plan.batch // plan.mesh.dp, plan.microbatches),
        )

    @property
    def seconds(self) -> float:
        """From the first forward to the end of the last backward."""
        return scheduled_seconds(
            self.schedule, self.pp, self.forward_seconds, self.backward_seconds, self.transfers, self.sizes
        )

    def without(self, pairs: Collection[tuple[int, int]]) -> Pipeline:
        """The same where the transfers between some pairs of stages take no time."""
        free = {pair: 0.0 if pair in pairs else seconds for pair, seconds in self.transfers.items()}
        return replace(self, transfers=free)


@dataclass(frozen=True)
class Position:
    """The ranks at one position of the pipeline: their stages, what they spend the step on, what fills them."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    spent: StepBreakdown
    memory: PositionMemory


@dataclass(frozen=True)
class Breakdown:
    """A step by position. ``spent`` is that of the mean position; each sums to ``step_seconds``."""

    step_seconds: float
    spent: StepBreakdown
    positions: tuple[Position, ...]


def breakdown_of(plan: Plan) -> Breakdown:
    """The step divided at every position.

    What free transfers would save is waiting for transfers, at every position the same; what else a rank waits is
    bubble. At the end of the step a position has its own optimizer and up to the plan's exposed reduction; what is left
    until the last rank is done is bubble too.

    Error: a position's own exposed reduction is not in the file; where it is shorter than that of the last rank, as
        much of its bubble is called reduction.
    """
    pipeline = Pipeline.of(plan)
    seconds, free = pipeline.seconds, pipeline.without(pipeline.transfers.keys()).seconds
    parts = [spent_at(plan, pipeline, position, seconds, free) for position in range(plan.mesh.pp)]
    positions = tuple(
        Position(
            plan.mesh.ranks(position),
            tuple(range(position, len(plan.stages), plan.mesh.pp)),
            spent,
            memory_of(plan, position),
        )
        for position, spent in enumerate(parts)
    )
    prediction = plan.prediction
    return Breakdown(seconds + prediction.reduce_seconds + prediction.optimizer_seconds, mean(parts), positions)


def spent_at(plan: Plan, pipeline: Pipeline, position: int, seconds: float, free_seconds: float) -> StepBreakdown:
    """What the ranks at a position spend the step on.

    Args:
        seconds, free_seconds: of the pipeline, and of it with free transfers.
    """
    stages, count = plan.stages[position :: plan.mesh.pp], sum(pipeline.sizes)
    busy = count * sum(s.forward_seconds + s.backward_seconds for s in stages)
    collectives = min(busy, count * sum(s.collective_seconds for s in stages))
    again = min(busy - collectives, count * sum(s.forward_seconds for s in stages if s.recompute == "all"))
    end = plan.prediction.reduce_seconds + plan.prediction.optimizer_seconds
    optimizer = min(end, sum(s.optimizer_seconds for s in stages))
    reduction = min(end - optimizer, plan.prediction.reduce_seconds)
    return StepBreakdown(
        compute_seconds=busy - collectives - again,
        recompute_seconds=again,
        collective_seconds=collectives,
        transfer_seconds=seconds - free_seconds,
        bubble_seconds=free_seconds - busy + (end - optimizer - reduction),
        reduce_seconds=reduction,
        optimizer_seconds=optimizer,
    )

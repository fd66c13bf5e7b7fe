"""A sharding for each stage, chosen with the cuts out of a few shardings of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from autopar.solve.cuts.dynamic_programme import contiguous_cuts
from autopar.solve.cuts.evaluate import own_peak_costs, rank_bytes
from autopar.solve.cuts.intervals import is_ascending
from autopar.solve.cuts.local_search import MAX_TRIALS, cuts_of, moved, stages_of
from autopar.solve.cuts.problem import CutProblem
from autopar.solve.cuts.step_time import Setting, step_time_of

Cuts = tuple[int, ...]


@dataclass(frozen=True)
class StageShardings:
    """Stage of every group, sharding of every stage, and the step, which counts no resharding between shardings."""

    seconds: float
    stage_of: tuple[int, ...] = ()
    sharding_of: tuple[int, ...] = ()


NONE = StageShardings(float("inf"))


@dataclass
class StageSearch:
    """Search for cuts of which each stage has the fastest sharding with which it fits, by the simulated step.

    Args:
        problems: the problem under each sharding, of merged groups in one order.
        tried: of each cuts that were looked at.
    """

    setting: Setting
    problems: Sequence[CutProblem]
    tried: dict[Cuts, StageShardings] = field(default_factory=dict)

    def best(self, known: Sequence[int], number: int) -> list[StageShardings]:
        """So many that differ in their shardings, the best first.

        Cuts are moved while that shortens the step, from some that are known and those of each sharding. What every
        stage has alike is among these too.

        Args:
            known: stage of every group.
        """
        starts = [*filter(None, map(contiguous_cuts, self.problems)), *([tuple(known)] if is_ascending(known) else [])]
        if not starts:
            return []
        best = min({cuts_of(units): None for units in starts}, key=lambda cuts: self.at(cuts).seconds)
        moved(best, lambda cuts, ceiling: self.at(cuts).seconds, self.tried, MAX_TRIALS)
        alike = (self.under(units, [q]) for units in starts for q in range(len(self.problems)))
        found = [*self.tried.values(), *alike]
        by_sharding: dict[tuple[int, ...], StageShardings] = {}
        for own in sorted(found, key=lambda own: own.seconds):
            by_sharding.setdefault(own.sharding_of, own)
        return [own for own in by_sharding.values() if own.seconds < float("inf")][:number]

    def at(self, cuts: Cuts) -> StageShardings:
        """The fastest shardings of the stages that begin at some groups; `NONE` if they are no stages or none fits."""
        problem = self.problems[0]
        if cuts not in self.tried:
            units = stages_of(cuts, len(problem.cost.groups))
            empty = any(low >= high for low, high in pairwise((0, *cuts, problem.cost.loss)))
            moved = empty or any(units[group] != stage for group, stage in problem.pins.items())
            self.tried[cuts] = NONE if moved else self.under(units, range(len(self.problems)))
        return self.tried[cuts]

    def under(self, units: Sequence[int], shardings: Sequence[int]) -> StageShardings:
        """The fastest of some shardings for each stage; `NONE` if a rank does not fit.

        Of several stages on a rank each is given its share of the capacity.
        """
        problem = self.problems[0]
        costs = {q: own_peak_costs(self.problems[q], units) for q in shardings}
        capacity = float("inf") if problem.capacity_bytes is None else problem.capacity_bytes

        def rank(stage: int, q: int) -> tuple[bool, float]:
            cost = costs[q][stage]
            fits = len(costs) == 1 or cost.memory_bytes <= capacity * problem.capacity_share(stage)
            return not fits, cost.seconds + cost.optimizer_seconds / problem.microbatches

        picked = tuple(min(costs, key=lambda q: rank(s, q)) for s in range(problem.stages))
        chosen = [costs[q][s] for s, q in enumerate(picked)]
        if any(rank_bytes(problem, chosen, position) > capacity for position in range(problem.pp)):
            return NONE
        return StageShardings(step_time_of(self.setting, problem, units, chosen).seconds, tuple(units), picked)

"""Range of stages of each group in any solution worth finding; it keeps the integer program small."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError
from autopar.ir.cost_graph import CostGraph
from autopar.solve.cuts.problem import CutProblem, group_loads, objective_of, update_seconds

# Slack for rounding in sums of seconds, relative.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Ranges:
    """First and last stage of each group."""

    earliest: tuple[int, ...]
    latest: tuple[int, ...]

    def can_be_on(self, group: int, stage: int) -> bool:
        return self.earliest[group] <= stage <= self.latest[group]


def ancestors(cost: CostGraph) -> NDArray[np.bool_]:
    """Element [v, u]: a path of flows leads from group u to group v."""
    above = np.zeros((len(cost.groups), len(cost.groups)), dtype=bool)
    for flow in sorted(cost.edges, key=lambda f: f.producer):
        # Every flow into the producer comes from a lower number, so that its row is complete here.
        for consumer in flow.consumers:
            above[consumer] |= above[flow.producer]
            above[consumer, flow.producer] = True
    return above


def check_pins(problem: CutProblem) -> None:
    """Refuse pins that no order of stages satisfies.

    Raises:
        UsageError: names the two pins.
    """
    above, names = ancestors(problem.cost), [g.name for g in problem.cost.groups]
    for reader, stage in sorted(problem.pins.items()):
        for producer, later in sorted(problem.pins.items()):
            if above[reader, producer] and later > stage:
                raise UsageError(
                    f"Pins contradict the model's order: {names[reader]} is pinned to stage {stage}, and reads what "
                    f"comes from {names[producer]}, pinned to stage {later}. Pin {names[producer]} to stage {stage} "
                    f"or earlier, or {names[reader]} to stage {later} or later."
                )


def slowest_limit(problem: CutProblem, value: float) -> float:
    """No solution better than ``value`` has a stage slower than this, second.

    Source: the objective with everything but the slowest stage at its lower bound: total load without transfers, an
    even share of the optimizer's time.
    """
    o = objective_of(problem)
    if o.slowest == 0:
        return float("inf")
    rest = o.total * sum(group_loads(problem.cost, problem.balance))
    rest += o.optimizer * sum(map(update_seconds, problem.cost.weights)) / problem.stages
    return (value - rest) / o.slowest


def stage_ranges(problem: CutProblem, limit_seconds: float = float("inf")) -> Ranges:
    """The stages each group can be on, when no stage's load exceeds ``limit_seconds``.

    A group and all its ancestors fill the stages up to its own; if their load is more than k stages can take, it is on
    none of the first k. The same holds backwards for its descendants. Pins, the loss on the last stage and the order
    of the flows narrow the ranges further. No solution within the limit is lost.
    """
    size, last = len(problem.cost.groups), problem.stages - 1
    earliest, latest = np.zeros(size, dtype=int), np.full(size, last)
    if 0 < limit_seconds < float("inf"):
        above = ancestors(problem.cost)
        load = np.array(group_loads(problem.cost, problem.balance))
        full = limit_seconds * (1 + ROUNDING)
        earliest = np.maximum(np.ceil((above @ load + load) / full).astype(int) - 1, 0)
        latest = np.minimum(last + 1 - np.ceil((above.T @ load + load) / full).astype(int), last)
    earliest[problem.cost.loss] = last
    for group, stage in problem.pins.items():
        earliest[group] = max(earliest[group], stage)
        latest[group] = min(latest[group], stage)
    for flow in sorted(problem.cost.edges, key=lambda f: f.producer):
        for consumer in flow.consumers:
            earliest[consumer] = max(earliest[consumer], earliest[flow.producer])
    for flow in sorted(problem.cost.edges, key=lambda f: f.producer, reverse=True):
        latest[flow.producer] = min(latest[flow.producer], *(latest[c] for c in flow.consumers))
    return Ranges(tuple(map(int, earliest)), tuple(map(int, latest)))

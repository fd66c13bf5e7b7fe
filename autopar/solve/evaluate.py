"""What given cuts cost: time, traffic and memory of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.hardware import Link
from autopar.ir import Holding
from autopar.solve.problem import CutProblem, group_loads, objective_of


@dataclass(frozen=True)
class StageCost:
    """One stage's cost. Times and ``saved_bytes`` are per microbatch; ``weight_bytes`` includes gradients and optimizer
    state."""

    forward_seconds: float
    backward_seconds: float
    load_seconds: float
    transfer_seconds: float
    optimizer_seconds: float
    weight_bytes: int
    saved_bytes: int
    received_bytes: int
    transient_bytes: int
    in_flight: int

    @property
    def seconds(self) -> float:
        """Time of one microbatch, transfers to and from the next stage included."""
        return self.forward_seconds + self.backward_seconds + self.transfer_seconds

    @property
    def memory_bytes(self) -> int:
        """Peak memory: weights, what the microbatches in flight hold, and the largest working set."""
        per_microbatch = self.saved_bytes + self.received_bytes
        return self.weight_bytes + self.in_flight * per_microbatch + self.transient_bytes


def one_way_seconds(num_bytes: int, link: Link) -> float:
    """Time of one transfer over a boundary; nothing takes no time."""
    return link.seconds(num_bytes) if num_bytes else 0.0


def holders(holding: Holding, stage_of: Sequence[int]) -> set[int]:
    """Stages that hold it."""
    return {stage_of[g] for g in holding.groups}


def stage_costs(problem: CutProblem, stage_of: Sequence[int]) -> tuple[StageCost, ...]:
    """The cost of every stage under the given assignment of groups to stages.

    A tensor is counted at every boundary it crosses, in time and in memory.

    Error: memory is too high by what crosses, per microbatch in flight, where a stage's operation saves the very tensor
    that it received, and on stages that a skip only passes (it travels straight past them).
    """
    cost, stages = problem.cost, range(problem.stages)
    members = [[g for g, s in enumerate(stage_of) if s == stage] for stage in stages]
    forward, backward = [0] * problem.stages, [0] * problem.stages
    for flow in cost.flows:
        for s in range(stage_of[flow.producer], max(stage_of[c] for c in flow.consumers)):
            forward[s] += flow.num_bytes
            backward[s] += flow.num_bytes * flow.requires_grad
    loads = group_loads(cost, problem.balance)
    held = [[w for w in cost.weights if s in holders(w, stage_of)] for s in stages]
    saved = [[a for a in cost.saved if s in holders(a, stage_of)] for s in stages]
    return tuple(
        StageCost(
            forward_seconds=sum(cost.groups[g].forward_seconds for g in members[s]),
            backward_seconds=sum(cost.groups[g].backward_seconds for g in members[s]),
            load_seconds=sum(loads[g] for g in members[s]),
            transfer_seconds=sum(one_way_seconds(n, problem.boundary[s]) for n in (forward[s], backward[s]) if n),
            optimizer_seconds=sum(w.optimizer_seconds for w in held[s]),
            weight_bytes=sum(w.num_bytes for w in held[s]),
            saved_bytes=sum(cost.groups[g].saved_bytes for g in members[s]) + sum(a.num_bytes for a in saved[s]),
            received_bytes=forward[s - 1] if s else 0,
            transient_bytes=max((cost.groups[g].transient_bytes for g in members[s]), default=0),
            in_flight=problem.in_flight[s],
        )
        for s in stages
    )


def floor_seconds(problem: CutProblem) -> float:
    """A lower bound of the objective that needs no solver: even shares of the load and of the optimizer's time."""
    o = objective_of(problem)
    loads = group_loads(problem.cost, problem.balance)
    optimizer = sum(w.optimizer_seconds for w in problem.cost.weights) / problem.stages
    slowest = max(sum(loads) / problem.stages, *loads)
    return o.slowest * slowest + o.total * sum(loads) + o.optimizer * optimizer


def objective_seconds(problem: CutProblem, costs: Sequence[StageCost]) -> float:
    """The value that the problem minimises, at the given stage costs."""
    o = objective_of(problem)
    stage = [c.load_seconds + o.transfer * c.transfer_seconds for c in costs]
    return (
        o.slowest * max(stage)
        + o.total * sum(stage)
        + o.traffic * sum(c.transfer_seconds for c in costs)
        + o.optimizer * max(c.optimizer_seconds for c in costs)
    )

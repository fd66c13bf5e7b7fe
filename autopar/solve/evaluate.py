"""What given cuts cost: time, traffic and memory of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.hardware import Link
from autopar.ir import BUCKET_BYTES, Holding
from autopar.solve.problem import CutProblem, group_loads, objective_of, update_seconds

GRADIENT_BYTES = 4  # per element


@dataclass(frozen=True)
class StageCost:
    """One stage's cost on each of its ranks. Compute, transfers and ``saved_bytes`` are per microbatch, optimizer and
    reduction per step; ``weight_bytes`` includes gradients and optimizer state, ``num_reduced`` counts the elements of
    the gradients that replicas reduce."""

    forward_seconds: float
    backward_seconds: float
    load_seconds: float
    transfer_seconds: float
    optimizer_seconds: float
    reduce_seconds: float
    num_reduced: int
    weight_bytes: int
    saved_bytes: int
    received_bytes: int
    transient_bytes: int
    in_flight: int
    recomputed: bool = False

    @property
    def recompute_seconds(self) -> float:
        """What of the backward runs the forward again."""
        return self.forward_seconds if self.recomputed else 0.0

    @property
    def seconds(self) -> float:
        """Time of one microbatch, transfers to and from the next stage included."""
        return self.forward_seconds + self.backward_seconds + self.transfer_seconds

    @property
    def update_seconds(self) -> float:
        """Optimizer and the whole reduction of gradients, once a step."""
        return self.optimizer_seconds + self.reduce_seconds

    @property
    def exposed_seconds(self) -> float:
        """What of the reduction is left when the last backward ends: what is longer than it, at least the last bucket.
        Under ZeRO-1 also what is left of gathering weights when a forward needs them.

        Error: gathering is compared with the backward, which is longer than the forward; a stage before the last one
        waits for others' backwards at the end of a step, and that they hide its reduction too is not counted.
        """
        buckets = max(1, round(self.num_reduced * GRADIENT_BYTES / BUCKET_BYTES))
        return max(self.reduce_seconds - self.backward_seconds, self.reduce_seconds / buckets)

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

    Where it is open which stages recompute, those do that do not fit otherwise and need less memory so.
    """
    plain = costs_as_given(problem, stage_of)
    if not problem.may_recompute or max(c.memory_bytes for c in plain) <= (problem.capacity_bytes or 0):
        return plain
    pairs = zip(plain, costs_as_given(problem.recomputing, stage_of))
    return tuple(again if recomputes(problem, once, again) else once for once, again in pairs)


def recomputes(problem: CutProblem, once: StageCost, again: StageCost) -> bool:
    """Whether a stage has to recompute, from its costs without and with that."""
    return once.memory_bytes > (problem.capacity_bytes or 0) and again.memory_bytes < once.memory_bytes


def costs_as_given(problem: CutProblem, stage_of: Sequence[int]) -> tuple[StageCost, ...]:
    """The same with no stage recomputing, or all.

    A tensor is counted at every boundary it crosses, in time and in memory.

    Error: memory is too high by what crosses, per microbatch in flight, where a stage's operation saves the very tensor
    that it received, and on stages that a skip only passes (it travels straight past them).
    """
    cost, stages = problem.cost, range(problem.stages)
    members: list[list[int]] = [[] for _ in stages]
    for g, s in enumerate(stage_of):
        members[s].append(g)
    forward, backward = [0] * problem.stages, [0] * problem.stages
    for flow in cost.flows:
        for s in range(stage_of[flow.producer], max(stage_of[c] for c in flow.consumers)):
            forward[s] += flow.num_bytes
            backward[s] += flow.num_bytes * flow.requires_grad
    loads = group_loads(cost, problem.balance)
    held: list[list[Holding]] = [[] for _ in stages]
    for weight in cost.weights:
        for s in holders(weight, stage_of):
            held[s].append(weight)
    saved = [0] * problem.stages
    for activation in cost.saved:
        for s in holders(activation, stage_of):
            saved[s] += activation.num_bytes
    return tuple(
        StageCost(
            forward_seconds=sum(cost.groups[g].forward_seconds for g in members[s]),
            backward_seconds=sum(cost.groups[g].backward_seconds for g in members[s]),
            load_seconds=sum(loads[g] for g in members[s]),
            transfer_seconds=sum(one_way_seconds(n, problem.boundary[s]) for n in (forward[s], backward[s]) if n),
            optimizer_seconds=sum(w.optimizer_seconds for w in held[s]),
            reduce_seconds=sum(w.reduce_seconds for w in held[s]),
            num_reduced=sum(w.numel for w in held[s] if w.reduce_seconds) // problem.tp,
            weight_bytes=sum(w.num_bytes for w in held[s]),
            saved_bytes=sum(cost.groups[g].saved_bytes for g in members[s]) + saved[s],
            received_bytes=forward[s - 1] if s else 0,
            transient_bytes=max((cost.groups[g].transient_bytes for g in members[s]), default=0),
            in_flight=problem.in_flight[s],
            recomputed=problem.recompute == "all",
        )
        for s in stages
    )


def floor_seconds(problem: CutProblem) -> float:
    """A lower bound of the objective that needs no solver: even shares of the load and of the update."""
    o = objective_of(problem)
    loads = group_loads(problem.cost, problem.balance)
    update = sum(map(update_seconds, problem.cost.weights)) / problem.stages
    slowest = max(sum(loads) / problem.stages, *loads)
    return o.slowest * slowest + o.total * sum(loads) + o.optimizer * update


def objective_seconds(problem: CutProblem, costs: Sequence[StageCost]) -> float:
    """The value that the problem minimises, at the given stage costs."""
    o = objective_of(problem)
    stage = [c.load_seconds + o.transfer * c.transfer_seconds for c in costs]
    return (
        o.slowest * max(stage)
        + o.total * sum(stage)
        + o.traffic * sum(c.transfer_seconds for c in costs)
        + o.optimizer * max(c.update_seconds for c in costs)
    )

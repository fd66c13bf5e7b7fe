"""What given cuts cost: time, traffic and memory of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ir.cost_graph import BUCKET_BYTES, ResidentTensor
from autopar.ir.hardware import Link
from autopar.solve.cuts.buffers import buffer_bytes
from autopar.solve.cuts.memory import working_bytes
from autopar.solve.cuts.problem import CutProblem, group_loads, objective_of, update_seconds

GRADIENT_BYTES = 4  # per element


@dataclass(frozen=True)
class StageCost:
    """One stage's cost on each of its ranks. Compute with its collectives, transfers and ``saved_bytes`` are per
    microbatch, optimizer and reduction per step; ``weight_bytes`` includes optimizer state, and gradients but where
    ``transient_bytes`` has those that come in a step's one backward; ``buffer_bytes`` are a step's inputs and memory
    that peers reach; ``num_reduced`` counts the elements of the gradients that replicas reduce."""

    forward_seconds: float
    backward_seconds: float
    collective_seconds: float
    load_seconds: float
    transfer_seconds: float
    optimizer_seconds: float
    reduce_seconds: float
    contention_seconds: float
    num_reduced: int
    weight_bytes: int
    saved_bytes: int
    received_bytes: int
    transient_bytes: int
    in_flight: int
    recomputed: bool = False
    sent_bytes: int = 0
    buffer_bytes: int = 0

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
    def held_bytes(self) -> int:
        """What each microbatch in flight holds."""
        return self.saved_bytes + self.received_bytes + self.sent_bytes

    @property
    def memory_bytes(self) -> int:
        """Peak memory: weights, buffers, what the microbatches in flight hold, and the largest working set.

        Of ranks with several stages it is the stage's part when the rank is fullest: they sum to the rank's peak.
        """
        return self.weight_bytes + self.buffer_bytes + self.in_flight * self.held_bytes + self.transient_bytes


@dataclass(frozen=True)
class RankCost:
    """What all stages of a rank cost it together."""

    stages: tuple[StageCost, ...]

    @property
    def memory_bytes(self) -> int:
        return sum(c.memory_bytes for c in self.stages)

    @property
    def optimizer_seconds(self) -> float:
        return sum(c.optimizer_seconds for c in self.stages)

    @property
    def update_seconds(self) -> float:
        return sum(c.update_seconds for c in self.stages)

    @property
    def exposed_seconds(self) -> float:
        """What of the reduction is left when the last backward ends: what is longer than it, at least the last bucket.
        Under ZeRO-1 also what is left of gathering weights when a forward needs them. To this comes by what the rest
        slows the compute beside it.

        Error: gathering is compared with the backward, which is longer than the forward; a rank before the last one
        waits for others' backwards at the end of a step, and that they hide its reduction too is not counted.
        """
        reduce_seconds, backward_seconds = (
            sum(getattr(c, name) for c in self.stages) for name in ("reduce_seconds", "backward_seconds")
        )
        buckets = max(1, round(sum(c.num_reduced for c in self.stages) * GRADIENT_BYTES / BUCKET_BYTES))
        drag = sum(c.contention_seconds for c in self.stages)
        return max(reduce_seconds - backward_seconds, reduce_seconds / buckets) + drag


def one_way_seconds(num_bytes: int, link: Link) -> float:
    """Time of one transfer over a boundary; nothing takes no time."""
    return link.seconds(num_bytes) if num_bytes else 0.0


def holders(holding: ResidentTensor, stage_of: Sequence[int]) -> set[int]:
    """Stages that hold it."""
    return {stage_of[g] for g in holding.groups}


def stage_costs(problem: CutProblem, stage_of: Sequence[int]) -> tuple[StageCost, ...]:
    """The cost of every stage under the given assignment of groups to stages.

    Where it is open which stages recompute, those do that do not fit otherwise and need less memory so; of a rank's
    stages, those first that save most.
    """
    once = stage_costs_unlimited(problem, stage_of)
    plain = at_peak(problem, once)
    if not problem.may_recompute or fullest_bytes(problem, plain) <= (problem.capacity_bytes or 0):
        return plain
    again = stage_costs_unlimited(problem.recomputing, stage_of)
    found, saving = list(once), [a.memory_bytes - b.memory_bytes for a, b in zip(once, again)]
    for position in range(problem.pp):
        for s in sorted(problem.stages_at(position), key=lambda s: -saving[s]):
            rank = rank_at_peak(problem, found, position)
            if saving[s] <= 0 or rank.memory_bytes <= (problem.capacity_bytes or 0):
                break
            found[s] = again[s]
    return at_peak(problem, found)


def rank_costs(problem: CutProblem, costs: Sequence[StageCost]) -> tuple[RankCost, ...]:
    """What the ranks at every position have, from their stages' costs."""
    return tuple(RankCost(tuple(costs[s] for s in problem.stages_at(position))) for position in range(problem.pp))


def fullest_bytes(problem: CutProblem, costs: Sequence[StageCost]) -> int:
    """Memory of the fullest rank."""
    return max(rank.memory_bytes for rank in rank_costs(problem, costs))


def at_peak(problem: CutProblem, costs: Sequence[StageCost]) -> tuple[StageCost, ...]:
    """The stages' costs as in `rank_at_peak`."""
    ranks = [rank_at_peak(problem, costs, position) for position in range(problem.pp)]
    return tuple(ranks[s % problem.pp].stages[s // problem.pp] for s in range(problem.stages))


def rank_at_peak(problem: CutProblem, costs: Sequence[StageCost], position: int) -> RankCost:
    """The ranks at a position, with what each of their stages holds in flight when they are fullest; of their working
    sets only the largest counts, as only one of a rank's stages runs at a time."""
    own = [costs[s] for s in problem.stages_at(position)]
    if problem.chunks == 1:
        return RankCost(tuple(own))
    held = [c.held_bytes for c in own]
    fullest = max(problem.in_flight_profiles[position], key=lambda moment: sum(n * h for n, h in zip(moment, held)))
    widest = max(range(len(own)), key=lambda i: own[i].transient_bytes)
    transient = [c.transient_bytes if i == widest else 0 for i, c in enumerate(own)]
    return RankCost(
        tuple(replace(c, in_flight=n, transient_bytes=t) for c, n, t in zip(own, fullest, transient, strict=True))
    )


def stage_costs_unlimited(problem: CutProblem, stage_of: Sequence[int]) -> tuple[StageCost, ...]:
    """The same with no stage recomputing, or all, and what each stage holds at most, whatever else its rank holds then.

    A tensor is counted at every boundary it crosses, in time and in memory; a weight that several stages of a rank read
    at the first of them.

    Error: memory is too high by what crosses, per microbatch in flight, on stages that a skip only passes (it travels
    straight past them), and where peers are known to have taken what they were sent before (with two ranks a third of
    it stays, with four all).
    """
    cost, stages = problem.cost, range(problem.stages)
    members: list[list[int]] = [[] for _ in stages]
    for g, s in enumerate(stage_of):
        members[s].append(g)
    forward, backward = [0] * problem.stages, [0] * problem.stages
    for flow in cost.edges:
        for s in range(stage_of[flow.producer], max(stage_of[c] for c in flow.consumers)):
            forward[s] += flow.num_bytes
            backward[s] += flow.num_bytes * flow.requires_grad
    loads = group_loads(cost, problem.balance)
    held: list[list[ResidentTensor]] = [[] for _ in stages]
    for weight in cost.weights:
        by_position: dict[int, int] = {}
        for s in sorted(holders(weight, stage_of), reverse=True):
            by_position[s % problem.pp] = s
        for s in by_position.values():
            held[s].append(weight)
    saved, sent = [0] * problem.stages, [0] * problem.stages
    for activation in cost.saved:
        for s in holders(activation, stage_of):
            saved[s] += activation.num_bytes
    for flow in cost.edges:  # what was received is there already
        for s in {stage_of[g] for g in flow.saved_by}:
            saved[s] -= flow.num_bytes * (s > stage_of[flow.producer])
        # What was sent stays until the peer is known to have taken it, at the latest until its gradient comes.
        saver = stage_of[flow.saved_by[0]] if flow.saved_by else problem.stages
        for s in range(stage_of[flow.producer], max(stage_of[c] for c in flow.consumers)):
            sent[s] += flow.num_bytes * (s < saver)
    reduced = [sum(w.numel for w in held[s] if w.reduce_seconds) // problem.tp for s in stages]
    buffers = buffer_bytes(problem, stage_of)
    return tuple(
        StageCost(
            forward_seconds=sum(cost.groups[g].forward_seconds for g in members[s]),
            backward_seconds=sum(cost.groups[g].backward_seconds for g in members[s]),
            collective_seconds=sum(
                cost.groups[g].forward_collective_seconds + cost.groups[g].backward_collective_seconds
                for g in members[s]
            ),
            load_seconds=sum(loads[g] for g in members[s]),
            transfer_seconds=sum(one_way_seconds(n, problem.boundary[s]) for n in (forward[s], backward[s]) if n),
            optimizer_seconds=sum(w.optimizer_seconds for w in held[s]),
            reduce_seconds=sum(w.reduce_seconds for w in held[s]),
            contention_seconds=sum(w.contention_seconds for w in held[s]),
            num_reduced=reduced[s],
            weight_bytes=sum(map(problem.standing_bytes, held[s])),
            saved_bytes=sum(cost.groups[g].saved_bytes for g in members[s]) + saved[s],
            received_bytes=problem.kept_received * forward[s - 1] if s else 0,
            sent_bytes=sent[s],
            transient_bytes=working_bytes(problem, members[s], held[s]),
            buffer_bytes=buffers[s],
            in_flight=problem.in_flight[s],
            recomputed=problem.recompute == "all",
        )
        for s in stages
    )


def floor_seconds(problem: CutProblem) -> float:
    """A lower bound of the objective that needs no solver: even shares of the load and of the update."""
    o = objective_of(problem)
    loads = group_loads(problem.cost, problem.balance)
    update = sum(map(update_seconds, problem.cost.weights)) / problem.pp
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
        + o.optimizer * max(rank.update_seconds for rank in rank_costs(problem, costs))
    )

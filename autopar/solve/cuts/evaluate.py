"""Time, traffic and memory of every stage under given cuts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any

from autopar.ir.cost_graph import ResidentTensor
from autopar.ir.hardware import Link
from autopar.solve.cuts.buffers import buffer_bytes
from autopar.solve.cuts.intervals import Sums, intervals_of, is_ascending
from autopar.solve.cuts.memory import working_bytes
from autopar.solve.cuts.problem import CutProblem, group_loads, objective_of, update_seconds


@dataclass(frozen=True)
class StageCost:
    """One stage's cost on each of its ranks.

    Compute with its collectives, transfers and ``saved_bytes`` are per microbatch; optimizer and reduction are per
    step. ``weight_bytes`` includes optimizer state and gradients, except for gradients that the step's only backward
    allocates: these are in ``transient_bytes``. ``buffer_bytes`` are a step's inputs and symmetric buffers.
    ``num_buckets`` counts the gradient buckets that replicas reduce. The stage's segments with a number below
    ``recomputed_below`` recompute, which takes ``recompute_seconds`` of the backward. ``wgrad_seconds`` of it a split
    backward leaves for later, if it ``is_split``.
    """

    forward_seconds: float
    backward_seconds: float
    collective_seconds: float
    load_seconds: float
    transfer_seconds: float
    optimizer_seconds: float
    reduce_seconds: float
    gather_seconds: float
    contention_seconds: float
    num_buckets: float
    weight_bytes: int
    saved_bytes: int
    received_bytes: int
    transient_bytes: int
    in_flight: int
    recomputed_below: int = 0
    recompute_seconds: float = 0.0
    wgrad_seconds: float = 0.0
    is_split: bool = False
    sent_bytes: int = 0
    buffer_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Time of one microbatch, transfers to and from the next stage included."""
        return self.forward_seconds + self.backward_seconds + self.transfer_seconds

    @property
    def hiding_seconds(self) -> float:
        """Part of a microbatch's backward in which its gradients of weights come, under which their reduction hides."""
        return self.wgrad_seconds if self.is_split else self.backward_seconds

    @property
    def update_seconds(self) -> float:
        """Optimizer and the whole reduction of gradients, once a step."""
        return self.optimizer_seconds + self.reduce_seconds + self.gather_seconds

    @property
    def held_bytes(self) -> int:
        """Bytes that each microbatch in flight holds."""
        return self.saved_bytes + self.received_bytes + self.sent_bytes

    @property
    def memory_bytes(self) -> int:
        """Peak memory: weights, buffers, what the microbatches in flight hold, and the largest working set.

        On a rank with several stages it is the stage's part at the rank's peak: the parts sum to that peak.
        """
        return self.weight_bytes + self.buffer_bytes + self.in_flight * self.held_bytes + self.transient_bytes


@dataclass(frozen=True)
class RankCost:
    """Cost of all stages of a rank together."""

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
        """Exposed time of the exchange between replicas, with the slowdown that the overlapped part causes in compute.

        The gradients' reduction hides under the last backward, and under ZeRO the weights' all-gather under the next
        forward. At least one bucket of each is exposed: the last one reduced and the first one gathered.

        Error: ranks before the last one also wait for other ranks' backwards, which hide more of their reduction; not
            counted.
        """
        return (
            self.exposed_part("reduce_seconds", "hiding_seconds")
            + self.exposed_part("gather_seconds", "forward_seconds")
            + self.total("contention_seconds")
        )

    def exposed_part(self, exchange: str, passes: str) -> float:
        """Seconds of an exchange between replicas that passes do not hide; both are names of fields."""
        seconds = self.total(exchange)
        return max(seconds - self.total(passes), seconds / max(1.0, self.total("num_buckets")))

    def total(self, name: str) -> float:
        """Sum of a field over the rank's stages."""
        return sum(getattr(c, name) for c in self.stages)


def one_way_seconds(num_bytes: int, link: Link) -> float:
    """Time of one transfer over a boundary; 0 for no bytes."""
    return link.seconds(num_bytes) if num_bytes else 0.0


def stages_holding(holding: ResidentTensor, stage_of: Sequence[int]) -> set[int]:
    """Stages that hold a resident tensor."""
    return {stage_of[g] for g in holding.groups}


def stage_costs(problem: CutProblem, stage_of: Sequence[int]) -> tuple[StageCost, ...]:
    """The cost of every stage under the given assignment of groups to stages.

    With ``recompute`` "auto", stages recompute that do not fit otherwise and need less memory then; of a rank's stages,
    those that save most come first. The last of them recomputes no more of its segments than it takes to fit.
    """
    return at_peak(problem, own_peak_costs(problem, stage_of))


def own_peak_costs(problem: CutProblem, stage_of: Sequence[int]) -> tuple[StageCost, ...]:
    """As `stage_costs`, with the memory of each stage at its own peak instead of the rank's."""
    once = stage_costs_unlimited(problem, stage_of)
    if not problem.may_recompute or fullest_bytes(problem, once) <= (problem.capacity_bytes or 0):
        return once
    again = stage_costs_unlimited(problem.recomputing, stage_of)
    found, saving = list(once), [a.memory_bytes - b.memory_bytes for a, b in zip(once, again)]
    for position in range(problem.pp):
        for s in sorted(problem.stages_at(position), key=lambda s: -saving[s]):
            if saving[s] <= 0 or has_room(problem, found, position):
                break
            found[s] = again[s]
            if has_room(problem, found, position):
                found[s] = least_recomputed(problem, stage_of, found, s)
    return tuple(found)


def least_recomputed(problem: CutProblem, stage_of: Sequence[int], costs: Sequence[StageCost], stage: int) -> StageCost:
    """The cost of a stage that recomputes the fewest of its first segments with which its rank fits.

    Args:
        costs: of all stages; they fit with this one recomputing all of its segments.
    """
    segments, found = problem.cost.segments_on(stage_of, stage), list(costs)
    is_interval, without = problem.stages > 1 and is_ascending(stage_of), counted_before(problem, stage_of)[stage]
    begin, end, num_buffered = bisect_left(stage_of, stage), bisect_right(stage_of, stage), costs[stage].buffer_bytes
    low, high, best = 0, len(segments), costs[stage]
    while high - low > 1:
        middle = (low + high) // 2
        way = problem.recomputing_below(segments[middle - 1] + 1)
        if is_interval:
            found[stage] = interval_cost(way, stage, begin, end, num_buffered, without)
        else:
            found[stage] = assignment_costs(way, stage_of)[stage]
        if has_room(problem, found, problem.placement.position(stage)):
            high, best = middle, found[stage]
        else:
            low = middle
    return best


def has_room(problem: CutProblem, costs: Sequence[StageCost], position: int) -> bool:
    """Whether the rank at a position is within its capacity."""
    return rank_bytes(problem, costs, position) <= (problem.capacity_bytes or 0)


def rank_costs(problem: CutProblem, costs: Sequence[StageCost]) -> tuple[RankCost, ...]:
    """Cost of the ranks at every position, from their stages' costs."""
    return tuple(RankCost(tuple(costs[s] for s in problem.stages_at(position))) for position in range(problem.pp))


def fullest_bytes(problem: CutProblem, costs: Sequence[StageCost]) -> int:
    """Memory of the fullest rank, from stages at their own peaks or at their rank's."""
    return max(rank_bytes(problem, costs, position) for position in range(problem.pp))


def rank_bytes(problem: CutProblem, costs: Sequence[StageCost], position: int) -> int:
    """Memory of a rank at a position; see `rank_at_peak`."""
    own = [costs[s] for s in problem.stages_at(position)]
    if problem.chunks == 1:
        return own[0].memory_bytes
    held = [c.held_bytes for c in own]
    fullest = max(sum(map(mul, profile, held)) for profile in problem.in_flight_profiles[position])
    return fullest + max(c.transient_bytes for c in own) + sum(c.weight_bytes + c.buffer_bytes for c in own)


def peak_bytes(problem: CutProblem, stage_of: Sequence[int]) -> int:
    """Memory of the fullest rank under an assignment."""
    return fullest_bytes(problem, own_peak_costs(problem, stage_of))


def at_peak(problem: CutProblem, costs: Sequence[StageCost]) -> tuple[StageCost, ...]:
    """Costs of all stages, as `rank_at_peak` gives them for one position."""
    ranks = [rank_at_peak(problem, costs, position) for position in range(problem.pp)]
    return tuple(ranks[problem.placement.position(s)].stages[s // problem.pp] for s in range(problem.stages))


def rank_at_peak(problem: CutProblem, costs: Sequence[StageCost], position: int) -> RankCost:
    """Cost of the ranks at a position, with the microbatches that each stage has in flight at the rank's peak.

    Only the largest working set counts, because one of a rank's stages runs at a time.
    """
    own = [costs[s] for s in problem.stages_at(position)]
    if problem.chunks == 1:
        return RankCost(tuple(own))
    held = [c.held_bytes for c in own]
    fullest = max(problem.in_flight_profiles[position], key=lambda profile: sum(n * h for n, h in zip(profile, held)))
    widest = max(range(len(own)), key=lambda i: own[i].transient_bytes)
    transient = [c.transient_bytes if i == widest else 0 for i, c in enumerate(own)]
    return RankCost(
        tuple(replace(c, in_flight=n, transient_bytes=t) for c, n, t in zip(own, fullest, transient, strict=True))
    )


def stage_costs_unlimited(problem: CutProblem, stage_of: Sequence[int]) -> tuple[StageCost, ...]:
    """As `stage_costs`, but without the capacity: no stage recomputes, or all do, and each has its own peak.

    A tensor counts at every boundary that it crosses, in time and in memory. A weight that several stages of a rank
    read counts at the first of them.

    Error: memory is high by the crossing tensors, per microbatch in flight, on stages that a skip only passes (it
    travels straight past them). It is also high where peers are known to have received what they were sent (with two
    ranks a third of it stays, with four all).
    """
    if problem.stages == 1:
        known, key = problem.stage_costs, (0, 0, len(stage_of), buffer_bytes(problem, stage_of)[0], frozenset())
        if key not in known:
            known[key] = assignment_costs(problem, stage_of)[0]
        return (known[key],)
    if is_ascending(stage_of):
        return interval_costs(problem, stage_of)
    return assignment_costs(problem, stage_of)


def is_contiguous(problem: CutProblem, stage_of: Sequence[int]) -> bool:
    """Whether every stage is an interval of the groups, and no weight is read by two stages of one rank."""
    return is_ascending(stage_of) and not any(counted_before(problem, stage_of))


def counted_before(problem: CutProblem, stage_of: Sequence[int]) -> Sequence[frozenset[int]]:
    """For each stage, the numbers of its weights that an earlier stage of its rank reads too, where they count."""
    weights = problem.cost.weights
    shared = problem.cost.remember("shared", lambda: [n for n, w in enumerate(weights) if len(w.groups) > 1])
    if problem.chunks == 1 or not shared:
        return [frozenset()] * problem.stages
    found: list[set[int]] = [set() for _ in range(problem.stages)]
    for number in shared:
        positions = set[int]()
        for s in sorted(stages_holding(weights[number], stage_of)):
            if (position := problem.placement.position(s)) in positions:
                found[s].add(number)
            positions.add(position)
    return [*map(frozenset, found)]


def interval_costs(problem: CutProblem, stage_of: Sequence[int]) -> tuple[StageCost, ...]:
    """As `stage_costs_unlimited`, for stages that are intervals of the groups."""
    buffers, without = buffer_bytes(problem, stage_of), counted_before(problem, stage_of)
    costs, begin = [], 0
    for s in range(problem.stages):
        end = bisect_right(stage_of, s)
        costs.append(interval_cost(problem, s, begin, end, buffers[s], without[s]))
        begin = end
    return tuple(costs)


def interval_cost(
    problem: CutProblem, stage: int, begin: int, end: int, num_buffered: int, without: frozenset[int]
) -> StageCost:
    """Cost of the groups ``begin`` … ``end`` − 1 on a stage with so many bytes of buffers; made once.

    Args:
        without: numbers of weights of these groups that count elsewhere.
    """
    known, key = problem.stage_costs, (stage, begin, end, num_buffered, without)
    if key not in known:
        known[key] = make_interval_cost(problem, stage, begin, end, num_buffered)
        if without:
            own = (w for number, w in enumerate(problem.cost.weights) if number not in without)
            held = [weight for weight in own if any(begin <= group < end for group in weight.groups)]
            known[key] = replace(known[key], **weight_costs(problem, range(begin, end), held))
    return known[key]


def make_interval_cost(problem: CutProblem, stage: int, begin: int, end: int, num_buffered: int) -> StageCost:
    """As `interval_cost`, without a cache."""
    of, at = intervals_of(problem), (end, begin)
    messages, last = of.messages, stage == problem.stages - 1
    crossing = () if last else (int(messages.forward_bytes[end]), int(messages.backward_bytes[end]))
    forward, backward = float(of.forward_seconds[at]), float(of.backward_seconds[at])
    return StageCost(
        forward_seconds=forward,
        backward_seconds=backward,
        collective_seconds=float(of.collective_seconds[at]),
        load_seconds=forward + backward if problem.balance == "time" else float(load_sums(problem)[at]),
        transfer_seconds=sum(one_way_seconds(n, problem.boundary[stage]) for n in crossing),
        optimizer_seconds=float(of.weight_sums("optimizer_seconds")[at]),
        reduce_seconds=float(of.weight_sums("reduce_seconds")[at]),
        gather_seconds=float(of.weight_sums("gather_seconds")[at]),
        contention_seconds=float(of.weight_sums("contention_seconds")[at]),
        num_buckets=float(of.weight_sums("num_buckets")[at]),
        weight_bytes=int(of.weight_bytes[at]),
        saved_bytes=int(of.saved_bytes[at]),
        received_bytes=problem.kept_received * int(messages.forward_bytes[begin]) if stage else 0,
        sent_bytes=0 if last else int(of.sent_bytes[end]),
        transient_bytes=of.working.num_bytes(begin, end),
        buffer_bytes=num_buffered,
        in_flight=problem.in_flight[stage],
        recomputed_below=problem.cost.recomputed_below,
        recompute_seconds=float(of.recompute_seconds[at]),
        wgrad_seconds=float(of.wgrad_seconds[at]),
        is_split=problem.is_split,
    )


def load_sums(problem: CutProblem) -> Sums:
    """Load of every interval by the problem's balance, second."""
    key = "load", problem.balance
    return problem.cost.remember(key, lambda: Sums.of(group_loads(problem.cost, problem.balance)))


def assignment_costs(problem: CutProblem, stage_of: Sequence[int]) -> tuple[StageCost, ...]:
    """As `stage_costs_unlimited`, for any assignment of groups to stages."""
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
        for s in sorted(stages_holding(weight, stage_of), reverse=True):
            by_position[problem.placement.position(s)] = s
        for s in by_position.values():
            held[s].append(weight)
    saved, sent = [0] * problem.stages, [0] * problem.stages
    for activation in cost.saved:
        for s in stages_holding(activation, stage_of):
            saved[s] += activation.num_bytes
    for flow in cost.edges:  # received tensors are counted already
        for s in {stage_of[g] for g in flow.saved_by}:
            saved[s] -= flow.num_bytes * (s > stage_of[flow.producer])
        # A sent tensor stays until the peer is known to have received it, at the latest until its gradient arrives.
        saver = min((stage_of[g] for g in flow.saved_by), default=problem.stages)
        for s in range(stage_of[flow.producer], max(stage_of[c] for c in flow.consumers)):
            sent[s] += flow.num_bytes * (s < saver)
    buffers = buffer_bytes(problem, stage_of)
    kept = [sum(cost.groups[g].saved_bytes for g in members[s]) + saved[s] for s in stages]
    deferred = [sum(cost.groups[g].deferred_bytes for g in members[s]) for s in stages]
    return tuple(
        StageCost(
            forward_seconds=sum(cost.groups[g].forward_seconds for g in members[s]),
            backward_seconds=sum(problem.backward_seconds(cost.groups[g]) for g in members[s]),
            collective_seconds=sum(cost.groups[g].collective_seconds for g in members[s]),
            load_seconds=sum(loads[g] for g in members[s]),
            transfer_seconds=sum(one_way_seconds(n, problem.boundary[s]) for n in (forward[s], backward[s]) if n),
            saved_bytes=max(kept[s], deferred[s]) if problem.is_split else kept[s],
            received_bytes=problem.kept_received * forward[s - 1] if s else 0,
            sent_bytes=sent[s],
            buffer_bytes=buffers[s],
            in_flight=problem.in_flight[s],
            recomputed_below=cost.recomputed_below,
            recompute_seconds=sum(cost.groups[g].recompute_seconds for g in members[s]),
            wgrad_seconds=sum(cost.groups[g].wgrad_seconds for g in members[s]),
            is_split=problem.is_split,
            **weight_costs(problem, members[s], held[s]),
        )
        for s in stages
    )


def weight_costs(problem: CutProblem, members: Sequence[int], held: Sequence[ResidentTensor]) -> dict[str, Any]:
    """Fields of `StageCost` that the weights on a stage determine, by name."""
    sums = ("optimizer_seconds", "reduce_seconds", "gather_seconds", "contention_seconds", "num_buckets")
    return {name: sum(getattr(weight, name) for weight in held) for name in sums} | {
        "weight_bytes": sum(map(problem.standing_bytes, held)),
        "transient_bytes": working_bytes(problem, members, held),
    }


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

"""The integer program of contiguous cuts: where each stage begins, and what its step takes at least."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import pulp
from numpy.typing import NDArray

from autopar.solve.backend import Outcome, SolverName, run, value_of
from autopar.solve.cuts.dynamic_programme import StageIntervals, stage_intervals
from autopar.solve.cuts.evaluate import load_matrix, one_way_seconds
from autopar.solve.cuts.intervals import Matrix, Vector
from autopar.solve.cuts.problem import CutProblem

Expr = pulp.LpAffineExpression


class Quantity(Enum):
    """What a stage contributes to rows. ``AGAIN`` is the forward that its backward runs again; ``SENT`` and
    ``RETURNED`` are messages to and from the next stage; ``REDUCE`` and ``GATHER`` are what the exchange of replicas
    takes more than the pass that hides it, and ``EXPOSED`` what of both is exposed at least. ``STANDING`` and ``HELD``
    are bytes, the latter for each microbatch."""

    FORWARD = auto()
    BACKWARD = auto()
    AGAIN = auto()
    SENT = auto()
    RETURNED = auto()
    UPDATE = auto()
    REDUCE = auto()
    GATHER = auto()
    EXPOSED = auto()
    LOAD = auto()
    TRAFFIC = auto()
    STANDING = auto()
    HELD = auto()

    @property
    def is_bytes(self) -> bool:
        return self in (Quantity.STANDING, Quantity.HELD)


# A number for each quantity of each stage: weights in a row, or the amounts of a solution.
Numbers = Mapping[tuple[int, Quantity], float]


@dataclass(frozen=True)
class Separable:
    """A lower bound end[j] − begin[i] of a quantity of groups i … j − 1; exact where every group adds its own."""

    end: Vector
    begin: Vector

    @classmethod
    def of(cls, matrix: Matrix) -> Separable:
        """The bound that is exact for intervals from the first group on."""
        inside = np.tril(np.ones_like(matrix, dtype=bool))
        return cls(matrix[:, 0], np.where(inside, matrix[:, :1] - matrix, -np.inf).max(axis=0))


@dataclass
class CutProgram:
    """The program under construction. Seconds are counted in ``unit`` and bytes in the capacity, so that the solver
    sees numbers near one.

    Args:
        begins: y[s, j], 1 where stage s begins at group j or before it; the others are known.
        first, last: groups at which each stage can begin, and the number of groups.
        bounds: of each quantity but `Quantity.AGAIN`.
        amounts: expressions of the quantities that rows weigh.
    """

    problem: CutProblem
    unit: float
    first: Sequence[int]
    last: Sequence[int]
    bounds: Mapping[tuple[int, Quantity], Separable]
    lp: pulp.LpProblem = field(default_factory=lambda: pulp.LpProblem("cuts"))
    begins: dict[tuple[int, int], pulp.LpVariable] = field(default_factory=dict)
    amounts: dict[tuple[int, Quantity], Expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for s in range(1, self.problem.stages):
            for j in range(self.first[s], self.last[s]):
                self.begins[s, j] = self.lp.add_variable(f"y_{s}_{j}", 0, 1)
        self.pipeline = self.lp.add_variable("X", 0)
        self.tail = self.lp.add_variable("E", 0)
        self.possible = True
        for s, j in self.begins:
            self.imply((s, j), (s, j + 1))
            self.imply((s + 1, j + 1), (s, j))

    def upto(self, stage: int, group: int) -> pulp.LpVariable | int:
        """y[stage, group]."""
        return self.begins.get((stage, group), int(group >= self.last[stage]))

    def imply(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        """y[one] <= y[other]."""
        y, limit = self.upto(*one), self.upto(*other)
        if isinstance(y, int) and isinstance(limit, int):
            self.possible &= y <= limit
        elif y != 0 and limit != 1:
            self.lp.addConstraint(Expr(y) - limit <= 0)

    def scale(self, quantity: Quantity) -> float:
        """The unit in which a quantity is counted."""
        return float(self.problem.capacity_bytes or 1) if quantity.is_bytes else self.unit

    def amount(self, stage: int, quantity: Quantity) -> Expr:
        """v of a stage and quantity."""
        key = stage, quantity
        if key not in self.amounts:
            if quantity is Quantity.AGAIN:
                self.amounts[key] = Expr(self.lp.add_variable(f"again_{stage}", 0))
            else:
                of, scale = self.bounds[key], self.scale(quantity)
                made = self.lp.add_variable(f"v_{stage}_{quantity.name}")
                ends, begins = self.at(stage + 1, of.end / scale), self.at(stage, of.begin / scale)
                self.lp.addConstraint(ends - begins - made == 0)
                self.amounts[key] = Expr(made)
        return self.amounts[key]

    def at(self, stage: int, values: Vector) -> Expr:
        """The value of the group where a stage begins: values[last] − Σ (values[j + 1] − values[j]) · y[stage, j]."""
        steps = range(self.first[stage], self.last[stage])
        terms = [(self.begins[stage, j], float(values[j] - values[j + 1])) for j in steps if values[j] != values[j + 1]]
        return Expr(terms, constant=float(values[self.last[stage]]))

    def weighted(self, weights: Numbers) -> Expr:
        """Σ weights · v."""
        return pulp.lpSum(weight * self.amount(*key) for key, weight in weights.items() if weight)

    def add(self, kind: str, weights: Numbers) -> None:
        """A row: Σ weights · v is at most X, E or the capacity, as the kind is pipeline, tail or memory."""
        limit = {"pipeline": self.pipeline, "tail": self.tail, "memory": 1.0}[kind]
        self.lp.addConstraint(self.weighted(weights) - limit <= 0)

    def begin(self, stage: int) -> Expr:
        """Number of the group at which a stage begins."""
        steps = range(self.first[stage], self.last[stage])
        return Expr([(self.begins[stage, j], -1) for j in steps], constant=self.last[stage])

    def refuse(self, units: Sequence[int], stages: Collection[int]) -> None:
        """Leave out all solutions in which some stages are what they are in this one."""
        known = {s for stage in stages for s in (stage, stage + 1)} & set(range(1, self.problem.stages))
        begins = {s: units.index(s) for s in known}
        kept = sum(self.upto(s, j) - self.upto(s, j - 1) for s, j in begins.items())
        if isinstance(kept, Expr):
            self.lp.addConstraint(kept <= len(known) - 1)
        else:
            self.possible = False

    def solve(self, whole: bool, solver: SolverName, gap: float, time_limit_seconds: float) -> Outcome:
        """Solve the program, or its relaxation in which a stage begins at several groups in part."""
        for y in self.begins.values():
            y.cat = pulp.LpInteger if whole else pulp.LpContinuous
        return run(self.lp, solver, gap, time_limit_seconds)

    def solved_amounts(self) -> dict[tuple[int, Quantity], float]:
        """Every quantity of the last solution, second and byte."""
        size, stages = len(self.problem.cost.groups) + 1, self.problem.stages
        begins = np.zeros((stages + 1, size))  # part of each stage that begins at a group
        for s in range(stages + 1):
            upto = [y if isinstance(y, int) else value_of(y) for j in range(size) for y in (self.upto(s, j),)]
            begins[s] = np.diff(upto, prepend=0.0)
        found = {(s, q): float(begins[s + 1] @ of.end - begins[s] @ of.begin) for (s, q), of in self.bounds.items()}
        again = ((s, q) for s, q in self.amounts if q is Quantity.AGAIN)
        return found | {key: value_of(self.amounts[key]) * self.unit for key in again}

    def solved_units(self) -> tuple[int, ...]:
        """The stage of each group in the last solution, which was whole."""
        begins = [
            self.last[s] - sum(value_of(self.begins[s, j]) > 0.5 for j in range(self.first[s], self.last[s]))
            for s in range(1, self.problem.stages)
        ]
        return tuple(sum(g >= begin for begin in begins) for g in range(len(self.problem.cost.groups)))


def cut_program(problem: CutProblem, unit: float, windows: Windows) -> CutProgram | None:
    """The program without rows of the step, or None where memory leaves no cuts.

    ==========================================  ==============================================================
    y[s, j] <= y[s, j + 1]                      y is 1 where stage s begins at group j or before it
    y[s + 1, j + 1] <= y[s, j]                  every stage has a group
    y[p, g] = 1, y[p + 1, g] = 0                group g is pinned to stage p (`pinned_windows`)
    y[s, i] <= y[s + 1, end(i)]                 a stage that begins at i or before fits up to end(i) at most
    v[s, q] = end_q − begin_q                   `Separable` bounds of every quantity
    X >= Σ weights · v                          paths of dependencies in the schedule
    E >= Σ weights · v                          what a rank does after the pipeline
    Σ weights · v <= capacity                   memory of ranks with several stages, and of stages that recompute
    minimise X + E + traffic                    traffic counts for other balances than time
    ==========================================  ==============================================================

    Args:
        unit: seconds of about a step.
        windows: groups at which stages may begin.
    """
    ways = [stage_intervals(way) for way in ([problem, problem.recomputing] if problem.may_recompute else [problem])]
    program = CutProgram(problem, unit, *windows, bounds_of(ways[0], windows))
    if problem.capacity_bytes is not None:
        for stage in range(problem.stages):
            add_lengths(program, stage, np.logical_or.reduce([fits_alone(way, stage, windows) for way in ways]))
    return program if program.possible else None


# First and last group at which each stage can begin, and the number of groups at the end of both.
Windows = tuple[list[int], list[int]]


def pinned_windows(problem: CutProblem) -> Windows | None:
    """Windows that the pins leave; None if they leave a stage nothing."""
    size, stages = len(problem.cost.groups), problem.stages
    first, last = [0, *[0] * (stages - 1), size], [0, *[problem.cost.loss - 1] * (stages - 1), size]
    for group, stage in problem.pins.items():
        last[stage] = min(last[stage], group)
        if stage + 1 < stages:
            first[stage + 1] = max(first[stage + 1], group + 1)
    for s in range(1, stages):
        first[s] = max(first[s], first[s - 1] + 1)
    for s in reversed(range(1, stages)):
        last[s] = min(last[s], last[s + 1] - 1)
    return None if any(low > high for low, high in zip(first, last)) else (first, last)


def fits_alone(way: StageIntervals, stage: int, windows: Windows) -> NDArray[np.bool_]:
    """Intervals that the rank could hold besides empty other stages.

    Where messages have places that are as large on every rank as on the fullest, those over the interval's own cuts
    count for its neighbours too.
    """
    problem, (first, last) = way.problem, windows
    held = problem.in_flight[stage]
    if problem.chunks > 1:
        held = max(profile[stage // problem.pp] for profile in problem.in_flight_profiles[stage % problem.pp])
    need = way.standing_bytes + held * way.held_bytes + way.costs.working.matrix + problem.fixed_bytes(stage)
    if problem.places and problem.chunks == 1:
        own, others = way.costs.incoming_bytes, np.zeros_like(need)
        if stage < problem.stages - 1:
            sent, _ = next_stage_bytes(problem, last[stage], first[stage + 2])
            others = np.maximum(others, np.array(sent)[:, None])
        if stage:
            _, returned = next_stage_bytes(problem, last[stage - 1], first[stage + 1])
            others = np.maximum(others, np.array(returned)[None, :])
        need = need + problem.places * np.maximum(others - own, 0.0)
    return need <= (problem.capacity_bytes or np.inf)


def add_lengths(program: CutProgram, stage: int, fits: NDArray[np.bool_]) -> None:
    """y[s, i] <= y[s + 1, end(i)], end(i) being where what begins at i or before ends at most."""
    end = -1
    for i in range(program.first[stage], program.last[stage] + 1):
        own = np.flatnonzero(fits[i + 1 :, i])
        end = max(end, i + 1 + int(own[-1])) if len(own) else end
        program.imply((stage, i), (stage + 1, end))


def bounds_of(way: StageIntervals, windows: Windows) -> dict[tuple[int, Quantity], Separable]:
    """Bounds of the quantities of every stage, without recomputation.

    Error: low by messages of tensors of which the windows leave open whether the next stage reads them, and with
        several stages a rank by symmetric memory.
    """
    problem, of = way.problem, way.costs
    cache, size = problem.cost.derived, len(problem.cost.groups)
    key = ("separable", problem.balance, problem.kept_received, problem.places, problem.has_buckets,
           problem.gradients_come, problem.microbatches > 1)  # fmt: skip
    if key not in cache:
        matrices = {
            Quantity.FORWARD: of.forward_seconds,
            Quantity.BACKWARD: of.backward_seconds,
            Quantity.UPDATE: of.optimizer_seconds + of.contention_seconds,
            Quantity.REDUCE: of.reduce_seconds - of.backward_seconds,
            Quantity.GATHER: of.gather_seconds - of.forward_seconds,
            Quantity.LOAD: load_matrix(problem),
            Quantity.STANDING: of.weight_bytes + problem.places * of.incoming_bytes,
            Quantity.HELD: way.held_bytes,
        }
        cache[key] = {quantity: Separable.of(matrix) for quantity, matrix in matrices.items()}
    found = {(s, q): bound for s in range(problem.stages) for q, bound in cache[key].items()}
    buckets = np.maximum(1.0, of.num_buckets)
    exposed = np.maximum(of.reduce_seconds - of.backward_seconds, of.reduce_seconds / buckets)
    exposed += np.maximum(of.gather_seconds - of.forward_seconds, of.gather_seconds / buckets)
    first, last = windows
    for s in range(problem.stages):
        begins, ends = slice(first[s], last[s] + 1), slice(first[s + 1], last[s + 1] + 1)
        inside = np.tri(size + 1, k=-1, dtype=bool)[ends, begins]
        least = exposed[ends, begins][inside].min() if problem.chunks == 1 else 0.0
        found[s, Quantity.EXPOSED] = Separable(np.full(size + 1, least), np.zeros(size + 1))
    for s, link in enumerate(problem.boundary):
        sent, returned = next_stage_bytes(problem, last[s], first[s + 2])
        pairs = zip(of.forward_bytes, of.backward_bytes)
        traffic = [sum(one_way_seconds(int(n), link) for n in pair) for pair in pairs]
        for quantity, seconds in (
            (Quantity.SENT, [one_way_seconds(n, link) for n in sent]),
            (Quantity.RETURNED, [one_way_seconds(n, link) for n in returned]),
            (Quantity.TRAFFIC, traffic),
        ):
            found[s, quantity] = Separable(np.array(seconds), np.zeros(size + 1))
    return found


def next_stage_bytes(problem: CutProblem, begun: int, ends: int) -> tuple[list[int], list[int]]:
    """Bytes that surely pass from a stage to the next one, by the cut between them, and of their gradients.

    Args:
        begun: group at which the stage has begun. ends: first group that the stage behind the next one can begin with.
    """
    size = len(problem.cost.groups)
    sent, returned = [0] * (size + 1), [0] * (size + 1)
    for edge in problem.cost.edges:
        for cut in range(edge.producer + 1, max(edge.consumers) + 1):
            made_here = edge.producer >= begun or edge.producer == cut - 1
            reader = min(c for c in edge.consumers if c >= cut)
            if made_here and (reader < ends or reader == cut):
                sent[cut] += edge.num_bytes
                returned[cut] += edge.num_bytes * edge.requires_grad
    return sent, returned


def freed_per_second(problem: CutProblem) -> float:
    """Most bytes of a microbatch that recomputing a segment frees, for each second of its forward; infinite where a
    segment takes no time."""
    cost, again = problem.cost, problem.recomputing.cost
    freed, seconds = defaultdict[int, float](float), defaultdict[int, float](float)
    for once, other in zip(cost.groups, again.groups, strict=True):
        freed[once.segment] += once.saved_bytes - other.saved_bytes
        seconds[once.segment] += once.forward_seconds
    for tensor in cost.saved:
        for segment in {cost.groups[g].segment for g in tensor.groups}:
            freed[segment] += tensor.num_bytes
    for edge in cost.edges:
        for segment in {cost.groups[g].segment for g in edge.saved_by}:
            freed[segment] += edge.num_bytes
    return max((n / seconds[s] if seconds[s] else math.inf for s, n in freed.items() if n > 0), default=0.0)

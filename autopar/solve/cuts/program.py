"""The integer program of contiguous cuts: where each stage begins, and what its step takes at least."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import pulp
from numpy.typing import NDArray

from autopar.solve.backend import Outcome, SolverName, run, value_of
from autopar.solve.cuts.dynamic_programme import StageIntervals, stage_intervals
from autopar.solve.cuts.evaluate import load_sums, one_way_seconds
from autopar.solve.cuts.intervals import Matrix, Vector, exposed_seconds
from autopar.solve.cuts.problem import CutProblem

Expr = pulp.LpAffineExpression

# Relative excess from which a row counts as violated.
CLOSE = 1e-6
# Seconds below which no bound lies: of what is no interval.
LEAST = -1e9


class Quantity(Enum):
    """A quantity of a stage that rows weigh. ``AGAIN`` is the forward that its backward runs again; ``SENT`` and
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


def steepest(least: Matrix, ends: Vector, begins: Vector) -> Separable:
    """The bound end[j] − begin[i] of a matrix that is largest for a part of each end and of each begin, of those that
    are exact from some begin or to some end on. Elements that are not finite are no intervals."""
    found, most, known = Separable(np.zeros(len(ends)), np.zeros(len(begins))), 0.0, np.isfinite(least)

    def begin_of(end: Vector) -> Vector:
        return np.where(known, end[:, None] - np.where(known, least, 0.0), -np.inf).max(axis=0, initial=LEAST)

    def end_of(begin: Vector) -> Vector:
        return np.where(known, least + begin, np.inf).min(axis=1, initial=-LEAST)

    starts = [np.where(known[:, i], least[:, i], LEAST) for i in np.flatnonzero(begins > CLOSE)]
    starts += [end_of(np.where(known[j], -least[j], -LEAST)) for j in np.flatnonzero(ends > CLOSE)]
    for end in starts:
        begin = begin_of(end)
        own = Separable(np.where(known.any(axis=1), end_of(begin), 0.0), np.where(known.any(axis=0), begin, 0.0))
        value = ends @ own.end - begins @ own.begin
        if value > most and max(np.abs(own.end).max(), np.abs(own.begin).max()) < -LEAST / 2:
            found, most = own, value
    return found


@dataclass
class CutProgram:
    """The program under construction. Seconds are counted in ``unit`` and bytes in the capacity, so that the solver
    sees numbers near one.

    Args:
        begins: x[s, j], 1 where stage s begins at group j.
        first, last: groups at which each stage can begin, and the number of groups.
        bounds: of each quantity but `Quantity.AGAIN`.
        again: for each stage the seconds that every interval recomputes at least.
        amounts: expressions of the quantities that rows weigh.
    """

    problem: CutProblem
    unit: float
    first: Sequence[int]
    last: Sequence[int]
    bounds: Mapping[tuple[int, Quantity], Separable]
    again: Sequence[Matrix]
    lp: pulp.LpProblem = field(default_factory=lambda: pulp.LpProblem("cuts"))
    begins: dict[tuple[int, int], pulp.LpVariable] = field(default_factory=dict)
    amounts: dict[tuple[int, Quantity], Expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for s in range(self.problem.stages + 1):
            for j in range(self.first[s], self.last[s] + 1):
                self.begins[s, j] = self.lp.add_variable(f"x_{s}_{j}", 0, 1)
            self.lp.addConstraint(pulp.lpSum(self.begins[s, j] for j in self.window(s)) == 1)
            if s:
                self.lp.addConstraint(self.begin(s) - self.begin(s - 1) >= 1)
        self.pipeline = self.lp.add_variable("X", 0)
        self.tail = self.lp.add_variable("E", 0)

    def window(self, stage: int) -> range:
        """Groups at which a stage may begin; the one behind the last stage begins behind the last group."""
        return range(self.first[stage], self.last[stage] + 1)

    def at(self, stage: int, values: Vector | Sequence[float]) -> Expr:
        """The value of the group where a stage begins."""
        return Expr([(self.begins[stage, j], float(values[j])) for j in self.window(stage) if values[j]])

    def begin(self, stage: int) -> Expr:
        """Number of the group where a stage begins."""
        return self.at(stage, range(len(self.problem.cost.groups) + 1))

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

    def recompute(self, stage: int) -> bool:
        """Add a lower bound of what a stage recomputes that the last solution violates; whether there is one."""
        ends, begins = self.window(stage + 1), self.window(stage)
        parts = [[value_of(self.begins[s, j]) for j in window] for s, window in ((stage + 1, ends), (stage, begins))]
        found = steepest(self.again[stage][ends.start : ends.stop, begins.start : begins.stop], *map(np.array, parts))
        least = float(parts[0] @ found.end - parts[1] @ found.begin)
        again = self.amounts.get((stage, Quantity.AGAIN))
        solved = 0.0 if again is None else again.value() or 0.0  # None: in no row of the last solution
        if least <= solved * self.unit * (1 + CLOSE) + CLOSE * self.unit:
            return False
        bound = Expr()
        for window, s, values in ((ends, stage + 1, found.end), (begins, stage, -found.begin)):
            bound += Expr([(self.begins[s, j], float(v) / self.unit) for j, v in zip(window, values) if v])
        self.lp.addConstraint(bound - self.amount(stage, Quantity.AGAIN) <= 0)
        return True

    def weighted(self, weights: Numbers) -> Expr:
        """Σ weights · v."""
        return pulp.lpSum(weight * self.amount(*key) for key, weight in weights.items() if weight)

    def add(self, kind: str, weights: Numbers, free: float = 0.0) -> None:
        """A row: Σ weights · v is at most X, E or the capacity, as the kind is pipeline, tail or memory, and what is
        free of it, in seconds."""
        limit = {"pipeline": self.pipeline, "tail": self.tail, "memory": 1.0}[kind]
        self.lp.addConstraint(self.weighted(weights) - limit <= free / self.unit)

    def refuse(self, units: Sequence[int], stages: Collection[int]) -> None:
        """Leave out all solutions in which some stages are what they are in this one."""
        cuts = {s for stage in stages for s in (stage, stage + 1)} - {self.problem.stages}
        same = pulp.lpSum(self.begins[s, units.index(s)] for s in cuts)
        self.lp.addConstraint(same <= len(cuts) - 1)

    def solve(self, whole: bool, solver: SolverName, gap: float, time_limit_seconds: float) -> Outcome:
        """Solve the program, or its relaxation in which a stage begins at several groups in part."""
        for x in self.begins.values():
            x.cat = pulp.LpInteger if whole else pulp.LpContinuous
        return run(self.lp, solver, gap, time_limit_seconds)

    def solved_amounts(self) -> dict[tuple[int, Quantity], float]:
        """Every quantity of the last solution, second and byte."""
        stages, size = self.problem.stages, len(self.problem.cost.groups) + 1
        begins = np.zeros((stages + 1, size))  # part of each stage that begins at a group
        for place, x in self.begins.items():
            begins[place] = value_of(x)
        found = {(s, q): float(begins[s + 1] @ of.end - begins[s] @ of.begin) for (s, q), of in self.bounds.items()}
        again = ((s, q) for s, q in self.amounts if q is Quantity.AGAIN)
        return found | {key: value_of(self.amounts[key]) * self.unit for key in again}

    def solved_units(self) -> tuple[int, ...]:
        """The stage of each group in the last solution, which was whole."""
        begins = [max(self.window(s), key=lambda j: value_of(self.begins[s, j])) for s in range(1, self.problem.stages)]
        return tuple(sum(g >= begin for begin in begins) for g in range(len(self.problem.cost.groups)))


def cut_program(problem: CutProblem, unit: float, windows: Windows) -> CutProgram | None:
    """The program without rows of the step, or None where memory leaves a stage nothing.

    ==========================================  ==============================================================
    Σ_j x[s, j] = 1                             stage s begins at a group j of its window; pins narrow the windows
    Σ_j j · (x[s + 1, j] − x[s, j]) >= 1        every stage has a group
    Σ_j j · x[s + 1, j] <= Σ_i end(i) · x[s, i] a stage that begins at i fits up to end(i) at most
    v[s, q] = end_q − begin_q                   `Separable` bounds of every quantity
    v[s, AGAIN] >= end − begin                  bounds of what every interval recomputes at least, as `steepest` finds
    X >= Σ weights · v                          paths of dependencies in the schedule; messages over the ports of a node
    E >= Σ weights · v                          what a rank does after the pipeline
    Σ weights · v <= capacity                   memory of ranks with several stages
    minimise X + E + traffic                    traffic counts for other balances than time
    ==========================================  ==============================================================

    Args:
        unit: seconds of about a step.
        windows: groups at which stages may begin.
    """
    ways, again = [stage_intervals(way) for way in recompute_ways(problem)], []
    program = CutProgram(problem, unit, *windows, bounds_of(ways[0], windows), again)
    if problem.capacity_bytes is not None:
        for stage in range(problem.stages):
            fits = fits_alone(ways[0], stage, windows)
            seconds = np.where(np.tri(len(fits), k=-1, dtype=bool), 0.0, np.inf)
            for way in ways[1:]:
                seconds[~fits] = np.maximum(seconds, way.costs.recompute_seconds.matrix)[~fits]
                fits = fits | fits_alone(way, stage, windows, exact=way is ways[-1])
            again.append(seconds)
            ends = longest(fits)
            if max(ends[j] for j in program.window(stage)) < windows[0][stage + 1]:
                return None
            program.lp.addConstraint(program.begin(stage + 1) - program.at(stage, ends) <= 0)
    return program


def recompute_ways(problem: CutProblem) -> list[CutProblem]:
    """The problem without recomputation and with ever more of it."""
    if not problem.may_recompute:
        return [problem]
    return [problem, *map(problem.recomputing_below, problem.cost.segments[1:]), problem.recomputing]


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


def fits_alone(way: StageIntervals, stage: int, windows: Windows, exact: bool = True) -> NDArray[np.bool_]:
    """Intervals that the rank could hold besides empty other stages, and unless ``exact`` some more.

    Where messages have places that are as large on every rank as on the fullest, those over the interval's own cuts
    count for its neighbours too.
    """
    problem, (first, last) = way.problem, windows
    held = problem.in_flight[stage]
    if problem.chunks > 1:
        profiles = problem.in_flight_profiles[problem.placement.position(stage)]
        held = max(profile[stage // problem.pp] for profile in profiles)
    capacity = problem.capacity_bytes or np.inf
    need = way.standing_bytes + held * way.held_bytes + problem.fixed_bytes(stage)
    if problem.places and problem.chunks == 1:
        own, others = way.costs.messages.incoming_bytes, np.zeros_like(need)
        if stage < problem.stages - 1:
            sent, _ = next_stage_bytes(problem, last[stage], first[stage + 2])
            others = np.maximum(others, sent[:, None])
        if stage:
            _, returned = next_stage_bytes(problem, last[stage - 1], first[stage + 1])
            others = np.maximum(others, returned[None, :])
        need = need + problem.places * np.maximum(others - own, 0.0)
    pending = sum(w.wgrad_bytes + w.gradient_bytes + w.flattened_grad_bytes for w in problem.cost.weights)
    roomy, possible = (need + way.costs.working.floor + more <= capacity for more in (pending, 0))
    if not exact or (roomy == possible).all():
        return possible
    return need + way.costs.working.matrix <= capacity


def longest(fits: NDArray[np.bool_]) -> Sequence[int]:
    """Last end of a fitting interval from each group on; 0 where none fits."""
    ends = fits * np.arange(len(fits))[:, None]
    return np.where(np.tri(len(fits), k=-1, dtype=bool), ends, 0).max(axis=0).tolist()


def bounds_of(way: StageIntervals, windows: Windows) -> dict[tuple[int, Quantity], Separable]:
    """Bounds of the quantities of every stage, without recomputation.

    Error: low by messages of tensors of which the windows leave open whether the next stage reads them, and with
        several stages a rank by symmetric memory.
    """
    problem, of = way.problem, way.costs
    size = len(problem.cost.groups)
    forward, backward = of.forward_seconds.matrix, of.backward_seconds.matrix

    def additive() -> dict[Quantity, Separable]:
        matrices = {
            Quantity.FORWARD: forward,
            Quantity.BACKWARD: backward,
            Quantity.UPDATE: of.weight_sums("optimizer_seconds") + of.weight_sums("contention_seconds"),
            Quantity.REDUCE: of.weight_sums("reduce_seconds") - backward,
            Quantity.GATHER: of.weight_sums("gather_seconds") - forward,
            Quantity.LOAD: load_sums(problem).matrix,
            Quantity.STANDING: of.weight_bytes + problem.places * of.messages.incoming_bytes,
            Quantity.HELD: way.held_bytes,
        }
        return {quantity: Separable.of(matrix) for quantity, matrix in matrices.items()}

    key = "separable", problem.balance, problem.places, *problem.interval_key
    bounds = problem.cost.remember(key, additive)
    found = {(s, q): bound for s in range(problem.stages) for q, bound in bounds.items()}
    exposed = exposed_seconds(of, backward + forward * problem.may_recompute, forward, lambda sums: sums)
    first, last = windows
    for s in range(problem.stages):
        begins, ends = slice(first[s], last[s] + 1), slice(first[s + 1], last[s + 1] + 1)
        inside = np.tri(size + 1, k=-1, dtype=bool)[ends, begins]
        least = exposed[ends, begins][inside].min() if problem.chunks == 1 else 0.0
        found[s, Quantity.EXPOSED] = Separable(np.full(size + 1, least), np.zeros(size + 1))
    for s, link in enumerate(problem.boundary):
        sent, returned = next_stage_bytes(problem, last[s], first[s + 2])
        pairs = zip(of.messages.forward_bytes, of.messages.backward_bytes)
        traffic = [sum(one_way_seconds(int(n), link) for n in pair) for pair in pairs]
        for quantity, seconds in (
            (Quantity.SENT, [one_way_seconds(int(n), link) for n in sent]),
            (Quantity.RETURNED, [one_way_seconds(int(n), link) for n in returned]),
            (Quantity.TRAFFIC, traffic),
        ):
            found[s, quantity] = Separable(np.array(seconds), np.zeros(size + 1))
    return found


def next_stage_bytes(problem: CutProblem, begun: int, ends: int) -> tuple[Vector, Vector]:
    """Bytes that surely pass from a stage to the next one, by the cut between them, and of their gradients.

    Args:
        begun: group at which the stage has begun. ends: first group that the stage behind the next one can begin with.
    """
    sent, returned = (np.zeros(len(problem.cost.groups) + 1) for _ in range(2))
    for edge in problem.cost.edges:
        first = edge.producer + 1
        for reader in edge.consumers:
            # Cuts of which this is the first reader behind them.
            begin = first if reader < ends else reader
            end = reader if edge.producer >= begun else edge.producer + 1
            if first <= reader and begin <= end:
                sent[begin : end + 1] += edge.num_bytes
                returned[begin : end + 1] += edge.num_bytes * edge.requires_grad
            first = max(first, reader + 1)
    return sent, returned


def freed_per_second(problem: CutProblem) -> float:
    """Most bytes of a microbatch that a stage frees by recomputing, for each second that this takes; infinite where
    some take none."""

    def most() -> float:
        once, found = stage_intervals(problem).held_bytes, 0.0
        for way in recompute_ways(problem)[1:]:
            again = stage_intervals(way)
            freed, seconds = once - again.held_bytes, again.costs.recompute_seconds.matrix
            frees = np.tri(len(freed), k=-1, dtype=bool) & (freed > 0)
            if (frees & (seconds <= 0)).any():
                return math.inf
            found = max(found, float((freed[frees] / seconds[frees]).max(initial=0.0)))
        return found

    return problem.cost.remember(("freed per second", *problem.interval_key), most)

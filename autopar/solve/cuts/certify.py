"""A lower bound of the simulated step over all contiguous cuts, and the cuts that reach it.

A simulated step is the longest of many paths of dependencies; each is linear in the stages' times. Such rows are added
as mixtures of known cuts violate them, and cuts as they are cheapest under the prices of the rows, until neither is
found (Kelley's and Dantzig's and Wolfe's methods together). Then no cuts are cheaper than the prices say, and the
integer program decides among the few columns that may still beat the best cuts known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from autopar.ir.microbatches import microbatch_factors
from autopar.schedule.simulate import critical_path
from autopar.solve.backend import SolverName
from autopar.solve.cuts.columns import Columns, Path, Quantity, Weights, columns_of
from autopar.solve.cuts.evaluate import fullest_bytes, objective_seconds, stage_costs
from autopar.solve.cuts.problem import CutProblem, objective_of
from autopar.solve.cuts.program import Mixture, Row, best_columns, mix
from autopar.solve.result.make_plan import Setting, step_time_of

# Rounds of pricing, and columns that the integer program is given at most: 8 stages of a ViT take some 30 rounds and
# leave a few hundred columns.
MAX_ROUNDS, MAX_COLUMNS = 100, 20_000
# Columns are left out again where the last time left that share of them.
SHRUNK = 0.8
# Integer programs that are solved one after the other, each with the rows that the cuts of the last one violate.
MAX_PROGRAMS = 30
# Relative distance below which rows are not violated and prices do not improve.
CLOSE = 1e-6


@dataclass
class Certificate:
    """Best cuts known of one order of the groups, and what is proven of all.

    Args:
        seconds, units: of the best cuts; infinite and None without any.
        bound_seconds: no contiguous cuts of the problem take less; infinite where it is proven that there are none.
    """

    seconds: float
    units: tuple[int, ...] | None
    bound_seconds: float = 0.0


def value_of_cuts(setting: Setting, problem: CutProblem, units: Sequence[int]) -> float:
    """What is minimised, at given cuts: the simulated step, or the largest load for other balances. Infinite where a
    rank is too full."""
    costs = stage_costs(problem, units)
    if problem.capacity_bytes is not None and fullest_bytes(problem, costs) > problem.capacity_bytes:
        return float("inf")
    if problem.balance != "time":
        return objective_seconds(problem, costs)
    return step_time_of(setting, problem, units, costs).seconds


def certify(
    setting: Setting, problem: CutProblem, seconds: float, units: tuple[int, ...] | None, solver: SolverName
) -> Certificate:
    """The best contiguous cuts of a problem whose groups are in order, with a bound.

    Args:
        seconds, units: the best cuts known, of this order or, without units, of another one; only better ones matter.
    """
    found = Certificate(seconds, units)
    columns = columns_of(problem)
    search = Search(setting, problem, columns, found, solver)
    among, left = None, float("inf")
    while search.relax() and (among is None or len(among) < SHRUNK * left):
        left = float("inf") if among is None else len(among)
        among = search.cheap_columns()
        columns.keep(among)
    if among is not None and not search.closed and len(among) <= MAX_COLUMNS:
        search.decide(among)
    return found


@dataclass
class Search:
    """State of `certify`."""

    setting: Setting
    problem: CutProblem
    columns: Columns
    found: Certificate
    solver: SolverName
    rows: list[Row] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    prices: Weights | None = None
    constant_seconds: float = 0.0
    limit_seconds: float = float("inf")

    def __post_init__(self) -> None:
        problem = self.problem
        self.sizes = microbatch_factors(self.setting.constraints.batch // problem.dp, problem.microbatches)
        self.base = np.zeros((problem.stages, len(Quantity)))
        self.base[:, Quantity.TRAFFIC] = objective_of(problem).traffic
        self.end = monotonic() + problem.time_limit_seconds
        if problem.balance == "time":
            for stage in range(problem.stages):  # the path through all microbatches of one stage
                self.rows.append(
                    self.pipeline_row([1.0 + problem.stages * (s == stage) for s in range(problem.stages)])
                )
            self.rows += [self.tail_row(position, False, False) for position in range(problem.pp)]
        else:
            self.rows += [self.row("pipeline", {(s, Quantity.LOAD): 1.0}) for s in range(problem.stages)]

    @property
    def closed(self) -> bool:
        """Whether the bound is within the problem's gap of the best cuts."""
        return self.found.bound_seconds >= (1 - self.problem.gap) * self.found.seconds

    # -- rows ------------------------------------------------------------------------------------------------------

    def row(self, kind: str, weights: dict[tuple[int, Quantity], float], limit: float = 0.0) -> Row:
        matrix = np.zeros((self.problem.stages, len(Quantity)))
        for place, weight in weights.items():
            matrix[place] = weight
        return Row(kind, matrix, limit)  # pyright: ignore[reportArgumentType]

    def pipeline_row(self, forward: Sequence[float], amounts: Weights | None = None) -> Row:
        """The critical path at mixed amounts, or where forwards and backwards take so long and messages no time."""
        stages, backward, transfers = self.problem.stages, forward, dict[tuple[int, int], float]()
        if amounts is not None:
            backward = amounts[:, Quantity.BACKWARD].tolist()
            for s in range(stages - 1):
                transfers[s, s + 1] = max(0.0, float(amounts[s, Quantity.SENT]))
                transfers[s + 1, s] = max(0.0, float(amounts[s, Quantity.RETURNED]))
        path = critical_path(self.problem.schedule, self.problem.pp, forward, backward, transfers, self.sizes)
        weights: dict[tuple[int, Quantity], float] = {}
        for s in range(stages):
            weights[s, Quantity.FORWARD], weights[s, Quantity.BACKWARD] = path.forward[s], path.backward[s]
            weights[s, Quantity.SENT] = path.transfers.get((s, s + 1), 0.0)
            weights[s, Quantity.RETURNED] = path.transfers.get((s + 1, s), 0.0)
        return self.row("pipeline", weights)

    def tail_row(self, position: int, reduce: bool, gather: bool) -> Row:
        """What ranks at a position take after the pipeline; with several stages a rank, with what of the reduction and
        the all-gather is longer than the passes that hide it."""
        if self.problem.chunks == 1:
            return self.row("tail", {(position, Quantity.TAIL): 1.0})
        parts = {Quantity.UPDATE: 1.0, Quantity.REDUCE: float(reduce), Quantity.GATHER: float(gather)}
        return self.row("tail", {(s, q): w for s in self.problem.stages_at(position) for q, w in parts.items()})

    def violated(self, mixed: Mixture) -> list[Row]:
        """Rows that mixed amounts violate: of the simulated pipeline, of the tails and of ranks' memory."""
        problem, amounts, found = self.problem, mixed.amounts, list[Row]()
        if problem.balance == "time":
            row = self.pipeline_row(amounts[:, Quantity.FORWARD].tolist(), amounts)
            if (row.weights * amounts).sum() > mixed.pipeline_seconds + CLOSE * mixed.seconds:
                found.append(row)
        if problem.chunks == 1:
            return found
        for position in range(problem.pp):
            own = list(problem.stages_at(position))
            flags = [bool(amounts[own, q].sum() > 0) for q in (Quantity.REDUCE, Quantity.GATHER)]
            row = self.tail_row(position, *flags)
            if problem.balance == "time" and (row.weights * amounts).sum() > mixed.tail_seconds + CLOSE * mixed.seconds:
                found.append(row)
            if problem.capacity_bytes is not None:
                row = self.memory_row(position, amounts)
                if (row.weights * amounts).sum() > (1 + mixed.lacking + CLOSE) * row.limit:
                    found.append(row)
        return found

    def memory_row(self, position: int, amounts: Weights) -> Row:
        """Memory of ranks at a position, without working sets, at the moment that is fullest with mixed amounts."""
        own = list(self.problem.stages_at(position))
        held = amounts[own, Quantity.HELD]
        fullest = max(self.problem.in_flight_profiles[position], key=lambda profile: float((profile * held).sum()))
        weights = {(s, Quantity.HELD): float(n) for s, n in zip(own, fullest, strict=True)}
        weights |= {(s, Quantity.STANDING): 1.0 for s in own}
        return self.row("memory", weights, float(self.problem.capacity_bytes or 0))

    # -- the relaxation --------------------------------------------------------------------------------------------

    def add(self, path: Path) -> None:
        """Take a path among the known ones, as the best cuts if it is shorter than these."""
        self.paths.append(path)
        units = path.stage_of
        seconds = value_of_cuts(self.setting, self.problem, units)
        if seconds < self.found.seconds:
            self.found.seconds, self.found.units = seconds, units

    def relax(self) -> bool:
        """Prove as much as prices of rows can, of the columns that are left; whether others may be left out now."""
        value, path = self.columns.shortest(self.even_prices())
        self.paths, self.prices = [], None
        if path is None:
            self.prove(float("inf"))
            return False
        self.add(path)
        unit, proven = value or 1.0, 0.0
        for _ in range(MAX_ROUNDS):
            mixed = mix(self.paths, self.rows, self.base, unit, self.solver)
            while more := self.violated(mixed):
                self.rows += more
                mixed = mix(self.paths, self.rows, self.base, unit, self.solver)
            prices, constant = self.priced(mixed, unit)
            value, path = self.columns.shortest(prices)
            assert path is not None, "a path was there before"
            if value - constant > proven or self.prices is None:
                proven, self.prices, self.constant_seconds = value - constant, prices, constant
                self.prove(proven)
            known = any((path.ends, path.ways) == (p.ends, p.ways) for p in self.paths)
            if self.closed or known or proven >= mixed.seconds * (1 - CLOSE) or monotonic() > self.end:
                break
            self.add(path)
        return not self.closed and np.isfinite(self.found.seconds)

    def prove(self, seconds: float) -> None:
        """Take in a bound of the columns that are left; those that are not cost at least ``limit_seconds``."""
        self.found.bound_seconds = max(self.found.bound_seconds, min(seconds, self.limit_seconds))

    def even_prices(self) -> Weights:
        """Weights before any row has a price: every second of compute and of the tails alike."""
        weights = np.array(self.base)
        weights[:, [Quantity.FORWARD, Quantity.BACKWARD, Quantity.LOAD]] += 1.0 / self.problem.stages
        return weights

    def priced(self, mixed: Mixture, unit: float) -> tuple[Weights, float]:
        """Weights of the quantities under the prices of the rows, and what they count too much."""
        weights, constant = np.array(self.base), 0.0
        totals = {
            kind: max(1.0, sum(p for p, row in zip(mixed.prices, self.rows) if row.kind == kind))
            for kind in ("pipeline", "tail")
        }
        for price, row in zip(mixed.prices, self.rows, strict=True):
            if row.kind == "memory":
                weights += price * unit / row.limit * row.weights
                constant += price * unit
            else:
                weights += price / totals[row.kind] * row.weights
        return weights, constant

    # -- the integer program ---------------------------------------------------------------------------------------

    def cheap_columns(self) -> list[tuple[int, int, int, int]]:
        """Columns that may be in a path shorter than the best by more than the gap."""
        assert self.prices is not None
        self.limit_seconds = min(self.limit_seconds, (1 - self.problem.gap) * self.found.seconds)
        return list(self.columns.cheap(self.prices, self.limit_seconds + self.constant_seconds))

    def decide(self, among: Sequence[tuple[int, int, int, int]]) -> None:
        """Find the best path over some columns."""
        tried = list[Path]()
        for _ in range(MAX_PROGRAMS):
            left = self.end - monotonic()
            if left <= 0:
                break
            program = best_columns(
                self.columns, among, self.rows, self.base, self.limit_seconds, self.solver, self.problem.gap / 2, left,
                tried,
            )  # fmt: skip
            self.prove(float("inf") if program.infeasible else program.bound_seconds)
            if program.path is None or self.closed:
                break
            tried.append(program.path)
            self.add(program.path)
            self.rows += self.rows_of(program.path)
            if self.closed:
                break

    def rows_of(self, path: Path) -> list[Row]:
        """Rows by which a path's own step is longer than the program said."""
        exact = Mixture(path.amounts, 0.0, 0.0, 0.0, 0.0, ())
        known = {(row.kind, row.weights.tobytes()) for row in self.rows}
        return [row for row in self.violated(exact) if (row.kind, row.weights.tobytes()) not in known]

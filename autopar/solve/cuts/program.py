"""Linear and integer programs over columns: what weights prove most, and which columns are best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pulp

from autopar.solve.backend import SolverName, run, value_of
from autopar.solve.cuts.columns import Columns, Path, Quantity, Weights

Expr = pulp.LpAffineExpression


@dataclass(frozen=True)
class Row:
    """What a path costs at least: its amounts by ``weights`` are no more than the pipeline's seconds, or the seconds
    after it, or the bytes of a rank, at most ``limit``."""

    kind: Literal["pipeline", "tail", "memory"]
    weights: Weights
    limit: float = 0.0

    def of(self, path: Path) -> float:
        """The path's own value."""
        return float((self.weights * path.amounts).sum())


@dataclass(frozen=True)
class Mixture:
    """Solution of the relaxation over known paths.

    Args:
        amounts: of the mixed paths.
        lacking: memory beyond the limits, as a share of a rank's.
        prices: of each row; under them known paths cost ``seconds`` at least.
    """

    amounts: Weights
    pipeline_seconds: float
    tail_seconds: float
    lacking: float
    seconds: float
    prices: tuple[float, ...]


@dataclass(frozen=True)
class Found:
    """End of an integer program: its path, if any, a proven lower bound, whether it is proven that there is no path,
    and the solver's seconds."""

    path: Path | None
    bound_seconds: float
    infeasible: bool
    solver_seconds: float


def mix(paths: Sequence[Path], rows: Sequence[Row], base: Weights, unit: float, solver: SolverName) -> Mixture:
    """The mixture of known paths whose step is shortest.

    Minimise X + E + base · amounts, with shares y of the paths, Σ y = 1, X >= every pipeline row, E >= every tail row,
    every memory row within its limit; lacking memory costs `LACKING` steps per rank.

    Args:
        base: weights of what counts besides pipeline and tail.
        unit: seconds of about a step, so that the solver sees numbers near one.
    """
    lp = pulp.LpProblem("mixture")
    shares = [lp.add_variable(f"y_{p}", 0) for p in range(len(paths))]
    ends = {"pipeline": lp.add_variable("X", 0), "tail": lp.add_variable("E", 0), "memory": lp.add_variable("M", 0)}
    lp.addConstraint(pulp.lpSum(shares) == 1, "one")
    for number, row in enumerate(rows):
        scale = row.limit if row.kind == "memory" else unit
        value = Expr([(share, row.of(path) / scale) for share, path in zip(shares, paths, strict=True)])
        lp.addConstraint(ends[row.kind] + (row.kind == "memory") * pulp.lpSum(shares) - value >= 0, f"r_{number}")
    own = Expr([(y, float((base * path.amounts).sum()) / unit) for y, path in zip(shares, paths, strict=True)])
    lp.setObjective(ends["pipeline"] + ends["tail"] + LACKING * ends["memory"] + own)
    outcome = run(lp, solver, 0.0, LP_SECONDS)
    assert outcome.found, "the mixture of known paths has no solution"
    x, e, lacking = (value_of(end) for end in ends.values())
    amounts = np.array(sum(value_of(y) * path.amounts for y, path in zip(shares, paths, strict=True)))
    prices = tuple(abs(lp.constraints[f"r_{number}"].pi or 0.0) for number in range(len(rows)))
    return Mixture(amounts, x * unit, e * unit, lacking, value_of(lp.objective) * unit, prices)


# Steps that a rank's whole memory costs where known paths lack it: more than any path is slower than another.
LACKING = 100.0
# No program of the mixture takes a tenth of this.
LP_SECONDS = 60.0


def best_columns(
    columns: Columns,
    among: Sequence[tuple[int, int, int, int]],
    rows: Sequence[Row],
    base: Weights,
    limit_seconds: float,
    solver: SolverName,
    gap: float,
    time_limit_seconds: float,
    refused: Sequence[Path] = (),
) -> Found:
    """The path of least X + E over some columns, by integer program.

    ==========================================  ==============================================================
    z[c] binary                                 a column (stage, i, j, way) is in the path
    Σ z[c into (s, i)] = Σ z[c out of (s, i)]   flow from (0, 0) to (S, last): a path
    v[s, q] = Σ z[c] · quantity q               of every stage, for the quantities that rows weigh
    X, E >= Σ weights · v                       pipeline and tail rows
    Σ weights · v + W[p] <= limit               memory rows of position p, with W[p] >= v[s, WORKING] of its stages
    Σ z[c of a refused path] <= S − 1           paths that do not fit after all
    X + E + base · v <= limit, minimised
    ==========================================  ==============================================================

    Args:
        among: columns as (stage, i, j, way).
        limit_seconds: paths that take longer are not wanted.
        refused: paths to leave out.
    """
    lp, problem = pulp.LpProblem("columns"), columns.problem
    z = {column: lp.add_variable(f"z_{n}", cat="Binary") for n, column in enumerate(among)}
    flow: dict[tuple[int, int], list[tuple[pulp.LpVariable, int]]] = {}
    for (stage, i, j, _), variable in z.items():
        flow.setdefault((stage, i), []).append((variable, -1))
        flow.setdefault((stage + 1, j), []).append((variable, 1))
    ends = {(0, 0): -1, (problem.stages, len(problem.cost.groups)): 1}
    for node, terms in flow.items():
        lp.addConstraint(Expr(terms) == ends.get(node, 0))
    weighed = np.any([base != 0, *(row.weights != 0 for row in rows)], axis=0)
    if any(row.kind == "memory" for row in rows):
        weighed[:, Quantity.WORKING] = True
    of_bytes = problem.capacity_bytes or 1
    amounts: dict[tuple[int, int], pulp.LpVariable] = {}
    for stage, quantity in np.argwhere(weighed).tolist():
        scale = limit_seconds if quantity < Quantity.STANDING else of_bytes
        amounts[stage, quantity] = lp.add_variable(f"v_{stage}_{quantity}")
        own = [
            (variable, float(columns.quantities[way][s][quantity][j, i]) / scale)
            for (s, i, j, way), variable in z.items()
            if s == stage
        ]
        lp.addConstraint(amounts[stage, quantity] - Expr(own) == 0)

    def weighted(weights: Weights) -> Expr:
        return Expr([(amounts[s, q], weights[s, q]) for s, q in np.argwhere(weights).tolist()])

    pipeline, tail = lp.add_variable("X", 0), lp.add_variable("E", 0)
    working: dict[int, pulp.LpVariable] = {}
    for row in rows:
        if row.kind != "memory":
            lp.addConstraint((pipeline if row.kind == "pipeline" else tail) - weighted(row.weights) >= 0)
            continue
        position = int(np.argwhere(row.weights)[0, 0]) % problem.pp
        if position not in working:
            working[position] = lp.add_variable(f"W_{position}", 0)
            for stage in problem.stages_at(position):
                lp.addConstraint(working[position] - amounts[stage, Quantity.WORKING] >= 0)
        lp.addConstraint(weighted(row.weights) + working[position] <= row.limit / of_bytes)
    for path in refused:
        own = list(zip(range(problem.stages), (0, *path.ends), path.ends, path.ways))
        if all(column in z for column in own):
            lp.addConstraint(pulp.lpSum(z[column] for column in own) <= problem.stages - 1)
    lp.setObjective(pipeline + tail + weighted(base))
    lp.addConstraint(pipeline + tail + weighted(base) <= 1.0, "limit")
    outcome = run(lp, solver, gap, time_limit_seconds)
    path = None
    if outcome.found:
        picked = sorted(column for column, variable in z.items() if value_of(variable) > 0.5)
        path = columns.path(tuple(j for _, _, j, _ in picked), tuple(way for *_, way in picked))
    return Found(path, outcome.bound * limit_seconds, outcome.infeasible, outcome.seconds)

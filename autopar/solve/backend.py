"""Runs an integer program with HiGHS, or CBC if highspy is missing; returns the solution and its proven bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pulp

from autopar.errors import UsageError
from autopar.solve.cuts.ilp import Program

SolverName = Literal["HiGHS", "CBC"]


@dataclass(frozen=True)
class Solved:
    """``stage_of`` is None where nothing was found; ``bound`` is a proven lower bound in the program's own unit.

    ``infeasible`` means proven so; ``seconds`` is the solver's wall time.
    """

    solver: SolverName
    stage_of: tuple[int, ...] | None
    bound: float
    infeasible: bool
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """End of a solver run; ``found``: whether the variables hold a solution. Other fields as in `Solved`."""

    found: bool
    bound: float
    infeasible: bool
    seconds: float


def default_solver() -> SolverName:
    """HiGHS, or CBC where highspy is not installed.

    Raises:
        UsageError: neither is there.
    """
    if pulp.HiGHS().available():
        return "HiGHS"
    if pulp.PULP_CBC_CMD(msg=False).available():
        return "CBC"
    raise UsageError(
        "No integer-programming solver is installed: neither HiGHS nor CBC was found. `pip install highspy`."
    )


def solve(program: Program, solver: SolverName) -> Solved:
    """The best assignment that the solver finds within the problem's time limit and gap."""
    outcome = run(program.lp, solver, program.problem.gap, program.problem.time_limit_seconds)
    stage_of = stages_found(program) if outcome.found else None
    return Solved(solver, stage_of, outcome.bound, outcome.infeasible, outcome.seconds)


def run(lp: pulp.LpProblem, solver: SolverName, gap: float, time_limit_seconds: float) -> Outcome:
    """Solve a program; the values stay in its variables.

    Error: HiGHS reports its dual bound. CBC reports none through PuLP: when it ends on its own, its solution is within
    the gap it was given, and that is the bound; when it runs out of time it proves nothing and the bound is zero.
    """
    if solver == "HiGHS":
        from autopar.solve.highs import SilentHiGHS

        lp.solve(SilentHiGHS(gap, time_limit_seconds))
        assert lp.solverModel is not None
        info = lp.solverModel.getInfo()
        found = info.primal_solution_status == HIGHS_FEASIBLE
        bound = info.mip_dual_bound if lp.isMIP() else info.objective_function_value
    else:
        lp.solve(pulp.PULP_CBC_CMD(msg=False, gapRel=gap, timeLimit=time_limit_seconds))
        found = lp.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        value = value_of(lp.objective) if lp.sol_status == pulp.LpSolutionOptimal else 0.0
        bound = value * (1 - gap)
    return Outcome(found, bound, lp.sol_status == pulp.LpSolutionInfeasible, lp.solutionTime)


# highspy.SolutionStatus.kSolutionStatusFeasible, written out because highspy may be missing.
HIGHS_FEASIBLE = 2


def stages_found(program: Program) -> tuple[int, ...]:
    """The stages that the binaries' values say."""
    return tuple(
        sum(value_of(program.upto(v, s)) < 0.5 for s in range(program.problem.stages - 1))
        for v in range(len(program.problem.cost.groups))
    )


def value_of(expression: pulp.LpAffineExpression | pulp.LpVariable | None) -> float:
    """The value that the solver gave an expression."""
    value = None if expression is None else expression.value()
    assert isinstance(value, float | int), "the solver returned no value for a variable"
    return float(value)

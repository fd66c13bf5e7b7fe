"""Runs an integer program with HiGHS, or CBC if highspy is missing; returns the solution and its proven bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pulp

from autopar.errors import SEE_DOCTOR, UsageError

SolverName = Literal["HiGHS", "CBC"]

# Solvers meet constraints and integrality to 1e-6 in the program's unit, which is about the result's.
SOLVER_TOLERANCE = 1e-5
EXAMPLE_SECONDS = 10.0


@dataclass(frozen=True)
class Outcome:
    """End of a solver run.

    Args:
        found: whether the variables hold a solution.
        bound: proven lower bound in the program's own unit.
        infeasible: proven so.
    """

    found: bool
    bound: float
    infeasible: bool


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
        "No integer-programming solver is installed: neither HiGHS nor CBC was found. `pip install highspy`. "
        f"{SEE_DOCTOR}"
    )


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
    return Outcome(found, bound, lp.sol_status == pulp.LpSolutionInfeasible)


def solve_example() -> SolverName:
    """Solver that has solved a program of three variables: the cheapest of three items that weigh at least 4 together.

    Raises:
        UsageError: no solver is installed, or its solution is wrong.
    """
    solver, costs, weights, cheapest = default_solver(), (3, 4, 8), (2, 3, 5), 7.0
    program = pulp.LpProblem("example", pulp.LpMinimize)
    chosen = [program.add_variable(f"x{number}", cat="Binary") for number in range(len(costs))]
    program += pulp.lpSum(cost * x for cost, x in zip(costs, chosen, strict=True))
    program += pulp.lpSum(weight * x for weight, x in zip(weights, chosen, strict=True)) >= 4
    outcome = run(program, solver, 0.0, EXAMPLE_SECONDS)
    cost = value_of(program.objective) if outcome.found else None
    if cost is None or abs(cost - cheapest) > SOLVER_TOLERANCE:
        raise UsageError(f"{solver} solves a program of three variables wrongly: {cost} instead of {cheapest}.")
    return solver


# highspy.SolutionStatus.kSolutionStatusFeasible, written out because highspy may be missing.
HIGHS_FEASIBLE = 2


def value_of(expression: pulp.LpAffineExpression | pulp.LpVariable | None) -> float:
    """The value that the solver gave an expression."""
    value = None if expression is None else expression.value()
    assert isinstance(value, float | int), "the solver returned no value for a variable"
    return float(value)

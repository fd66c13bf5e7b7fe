"""Cuts and shardings in one optimisation, for models and stages few enough for it."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.plan_parts import SolverInfo
from autopar.solve.backend import Outcome, SolverName, default_solver, run, stages_found
from autopar.solve.cuts.evaluate import floor_seconds
from autopar.solve.cuts.ranges import check_pins, slowest_limit, stage_ranges
from autopar.solve.cuts.solve import SOLVER_TOLERANCE
from autopar.solve.joint.problem import Assignment, JointProblem, joint_seconds, relaxed, stage_loads
from autopar.solve.joint.program import JointProgram, joint_program


@dataclass(frozen=True)
class Joint:
    """The choice and the stage of every group, their step time, and a proven lower bound of it."""

    strategy_index: tuple[int, ...]
    stage_of: tuple[int, ...]
    objective_seconds: float
    bound_seconds: float
    solver: SolverInfo


@dataclass(frozen=True)
class Unsolved:
    """Nothing was found; ``infeasible`` means proven not to exist, otherwise the time limit ended the search."""

    infeasible: bool
    solver: SolverInfo


def solve_joint(
    problem: JointProblem, known: Assignment | None = None, solver: SolverName | None = None
) -> Joint | Unsolved:
    """The best choice and stage of every group, with a proven bound.

    Variables, for group v, its choice k, stage or boundary s, value f, its reader j, layouts A and B: x[v, k] binary,
    one for all groups of a kind where kinds share their choice; y[v, s] binary (v is on a stage up to s); continuous
    w[v, k, s] (v runs k on s), e_j[A, B, s] (made in A, read by j on s in B), c[f, A, B, s] (converted on s from A to
    B), x[f, s] (f crosses boundary s), r[f, b, s] (f crosses s and has b bytes or more on a rank), a[s], t[s], T, O.

    ======================================================  ======================================================
    Σ_k x[v, k] = 1                                         `new_strategy_vars`
    x agree on every shared weight                          `add_agreement`
    order, occupancy, loss on the last stage, pins          `new_program`, `stage_ranges`: see `solve_cuts`
    y[u, s] = y[v, s] for u, v together                     `add_together`
    Σ_s w[v, k, s] = x[v, k]                                `placements`
    Σ_k w[v, k, s] = y[v, s] − y[v, s−1]                    `placements`
    Σ_{B, s} e_j[A, B, s] = Σ_{k: gives = A} x[f made, k]   `reading_of`
    Σ_A e_j[A, B, s] = Σ_{k: takes = B} w[j, k, s]          `reading_of`
    c[f, A, B, s] >= e_j[A, B, s]                           `conversions`
    x[f, s] >= y[producer, s] − y[consumer, s]              `crossings`
    r[f, b, s] >= Σ_{k: bytes >= b, s' <= s}                `wide_transfers`: transfers are 2·(α·a + Σ x·least bytes/β
    w[producer, k, s'] − y[consumer, s]                     + Σ r·more bytes/β)
    Σ w · (weight bytes + n_s · saved bytes)                `add_capacity`
    + n_s · Σ c · saved bytes <= capacity
    T >= t[s] = Σ w·seconds + Σ c·conversion + transfers    `add_step_time`
    O >= Σ w·step seconds                                   `add_step_time`
    minimise (m − 1)·T + Σ t[s] + O                         `add_step_time`
    ======================================================  ======================================================

    Args:
        known: a solution that obeys every constraint; it bounds the search and stands in if nothing better is found.
        solver: "HiGHS" or "CBC"; by default the first that is installed.
    Raises:
        UsageError: pins contradict the order of the model.
    Error: the solver may overfill the capacity by a millionth of it.
    """
    name, cuts = solver or default_solver(), relaxed(problem)
    check_pins(cuts)
    limit = slowest_limit(cuts, joint_seconds(problem, stage_loads(problem, known))) if known else float("inf")
    ranges = stage_ranges(cuts, limit)
    if any(first > last for first, last in zip(ranges.earliest, ranges.latest)):
        assert known is None, "the known solution is outside the ranges that it implies"
        return Unsolved(True, SolverInfo(name, "infeasible", 1.0, 0.0, method="joint"))
    program = joint_program(problem, ranges)
    outcome = run(program.cuts.lp, name, problem.gap, problem.time_limit_seconds)
    found = Assignment(program.strategy_vars.solution(), stages_found(program.cuts)) if outcome.found else None
    options = [answer for answer in (known, found) if answer is not None]
    if not options:
        status = "infeasible" if outcome.infeasible else "time limit"
        return Unsolved(outcome.infeasible, SolverInfo(name, status, 1.0, outcome.seconds, method="joint"))
    best = min(options, key=lambda answer: joint_seconds(problem, stage_loads(problem, answer)))
    return _certified(program, best, outcome, name)


def _certified(program: JointProgram, answer: Assignment, outcome: Outcome, name: SolverName) -> Joint:
    """The answer with its own cost and the solver's bound."""
    problem = program.problem
    objective = joint_seconds(problem, stage_loads(problem, answer))
    bound = min(max(outcome.bound * program.cuts.seconds, floor_seconds(program.cuts.problem)), objective)
    gap = (objective - bound) / objective if objective else 0.0
    status = "optimal" if gap <= problem.gap + SOLVER_TOLERANCE else "time limit"
    return Joint(
        answer.strategy_index,
        answer.stage_of,
        objective,
        bound,
        SolverInfo(name, status, gap, outcome.seconds, method="joint"),
    )

"""The best contiguous cuts in several orders of the groups, with a certificate."""

from __future__ import annotations

from time import monotonic

from autopar.errors import InfeasibleError
from autopar.ir.plan_parts import SolverInfo
from autopar.solve.backend import SOLVER_TOLERANCE, SolverName, default_solver
from autopar.solve.cuts.certify import certify, cuts_seconds
from autopar.solve.cuts.dynamic_programme import contiguous_cuts, least_memory_cuts
from autopar.solve.cuts.evaluate import peak_bytes
from autopar.solve.cuts.infeasible import check_num_stages, check_pins, memory_message, no_cuts
from autopar.solve.cuts.local_search import local_search
from autopar.solve.cuts.merge import Merged, in_every_order
from autopar.solve.cuts.problem import CutProblem, Cuts
from autopar.solve.cuts.step_time import Setting


def solve_cuts(
    setting: Setting, problem: CutProblem, known: tuple[int, ...] | None = None, solver: SolverName | None = None
) -> Cuts:
    """The stage of every group in the shortest simulated step, with a proven bound.

    Stages are intervals of the groups in an order that every tensor follows: as traced, and where the model has
    branches also by the work before or behind each group. Of each order the cuts of the dynamic programme are improved
    by local search; `certify` then proves a bound and finds what is better.

    Error: in other orders than the traced one, working sets are first those of that order.

    Args:
        known: the best cuts known in the traced order, as the stage of every group.
        solver: "HiGHS" or "CBC"; by default the first that is installed.
    Raises:
        UsageError: pins contradict each other or the order of the model, or leave a stage empty.
        InfeasibleError: more stages than pieces, or no cuts within the capacity; names the smallest that would do.
    """
    begin, name = monotonic(), solver or default_solver()
    orders = in_every_order(problem)
    traced = orders[0]
    check_num_stages(traced.problem)
    check_pins(traced.problem)
    seconds, stage_of, bound = float("inf"), None, float("inf")
    starts = [] if known is None else [known]
    for merged in orders if known is None else orders[1:]:
        if (units := start(setting, merged)) is not None:
            starts.append(merged.expand(units))
    for cuts in starts:
        own = cuts_seconds(setting, traced.problem, traced.units(cuts))
        if own < seconds:
            seconds, stage_of = own, cuts
    if problem.stages == 1:
        bound = seconds
    for number, merged in enumerate(orders if problem.stages > 1 else ()):
        left = problem.time_limit_seconds - (monotonic() - begin)
        found = certify(setting, traced, merged, seconds, name, left / (len(orders) - number))
        if found.stage_of is not None:
            seconds, stage_of = found.seconds, found.stage_of
        bound = min(bound, found.bound_seconds)
    if stage_of is None:
        raise does_not_fit(orders)
    bound = min(bound, seconds)
    gap = (seconds - bound) / seconds if seconds else 0.0
    took = monotonic() - begin
    closed = gap <= problem.gap + SOLVER_TOLERANCE
    status = "optimal" if closed else "time limit" if took >= problem.time_limit_seconds else "feasible"
    return Cuts(stage_of, seconds, bound, SolverInfo(name, status, gap, took, problem.balance))


def start(setting: Setting, merged: Merged) -> tuple[int, ...] | None:
    """Contiguous cuts of one order to start from, if any fit."""
    units = contiguous_cuts(merged.problem)
    if units is None or merged.problem.stages == 1:
        return units
    return local_search(setting, merged.problem, units)


def does_not_fit(orders: list[Merged]) -> Exception:
    """The error for cuts of which none fit: names the least memory that would do."""
    found = [(merged.problem, units) for merged in orders if (units := least_memory_cuts(merged.problem)) is not None]
    if not found:
        return no_cuts(orders[0].problem)
    return InfeasibleError(memory_message(*min(found, key=lambda own: peak_bytes(*own))))

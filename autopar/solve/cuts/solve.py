"""Pipeline cuts with a certificate: bounds, integer program, proven gap."""

from __future__ import annotations

from autopar.errors import InfeasibleError
from autopar.ir.plan_parts import SolverInfo
from autopar.solve.backend import Solved, SolverName, default_solver, solve
from autopar.solve.cuts.dynamic_programme import contiguous_cuts
from autopar.solve.cuts.evaluate import floor_seconds, objective_seconds, peak_bytes, stage_costs
from autopar.solve.cuts.ilp import time_program
from autopar.solve.cuts.infeasible import check_num_stages, fitting_cuts, least_memory, memory_message, no_cuts
from autopar.solve.cuts.merge import merge
from autopar.solve.cuts.problem import CutProblem, Cuts
from autopar.solve.cuts.ranges import check_pins, slowest_limit, stage_ranges


def solve_cuts(problem: CutProblem, solver: SolverName | None = None) -> Cuts:
    """The best stage for every group, with a proven bound.

    Variables, for group v, stage or boundary s, flow f, holding k: y[v, s] binary (v is on a stage up to s), and
    w[v, s] = y[v, s] − y[v, s−1]; continuous x[f, s] (f crosses boundary s), a[s] (anything crosses), h[k, s] (stage s
    keeps k), τ[s] (working set), t[s], T, O. Where it is open whether stages recompute: r[s] binary, u[v, s] = r·w,
    q[k, s] (s keeps the shared tensor k nevertheless).

    ==========================================  ==============================================================
    y[v, s] <= y[v, s+1]                        `add_monotone`
    y[consumer, s] <= y[producer, s]            `add_order`, every flow
    Σ_v w[v, s] >= 1                            `add_occupancy`, over groups with operations
    y[loss, s] = 0 for s < S − 1                `stage_ranges`, with pins: y[v, s] = (s >= pin)
    w[u, s] = w[v, s] for u, v together         `merge`: they become one group
    x[f, s] >= y[producer, s] − y[consumer, s]  `crossings`, every consumer
    a[s] >= x[f, s]                             `transfer_times`: transfers are α·a + Σ x·bytes/β, both ways
    h[k, s] >= w[v, s]                          `held`, every group v of the weight or saved tensor k
    Σ h·weights + n_s·(Σ w·saved + Σ h·shared   `add_memory`, n_s microbatches in flight,
    + Σ x[·, s−1]·bytes) + τ[s] <= capacity     τ[s] >= w[v, s]·transient_v − what is freed before v
    u <= r[s], u <= w[v, s], u >= w + r − 1     `recomputations`; the memory of a stage gains n_s·(Σ u·(kept − saved)),
    q[k, s] >= h[k, s] − r[s]                   q replaces h of shared tensors, w·transient_v gains u·segment_v
    T >= t[s] = Σ w·seconds + Σ u·forward       `add_time_objective`
    + transfers[s]
    O >= Σ h[k, s]·(optimizer + reduction)      `add_time_objective`, stands for what the step ends with
    minimise (m − 1)·T + Σ t[s] + O             `add_time_objective`; other balances: max load + 0.001 · transfers
    ==========================================  ==============================================================

    Contiguous cuts found by dynamic programming give an upper bound U. What is better than U has
    T <= (U − lower bound of the rest) / (m − 1), so a group whose ancestors take longer than k·T is on none of the
    first k stages: `stage_ranges` fixes those y and loses no better solution. If the time limit ends the search, or
    more than `MAX_OPEN` y are left, the contiguous cuts stand in and the gap says how far they may be off.

    With several stages a rank there is no integer program, as ranks' memory joins stages that are far apart: the
    contiguous cuts are final, and the bound is that of even shares, (c/S + 1) · Σ t with `slowest_count` c instead of
    m − 1, and of an even update.

    Args:
        solver: "HiGHS" or "CBC"; by default the first that is installed.
    Raises:
        UsageError: pins contradict each other or the order of the model, or leave a stage empty.
        InfeasibleError: more stages than pieces, or no cuts within the capacity; names the smallest that would do.
    """
    merged = merge(problem)
    work = merged.problem
    check_num_stages(work)
    check_pins(work)
    name = solver or default_solver()
    known = contiguous_cuts(work)
    if work.chunks > 1:
        known = known or least_memory(work)
        return _certified(problem, merged.expand(known), Solved(name, known, 0.0, False, 0.0), 1.0)
    if known is None and work.capacity_bytes is not None:
        known = fitting_cuts(work, name)
    limit = slowest_limit(work, objective_seconds(work, stage_costs(work, known))) if known else float("inf")
    ranges = stage_ranges(work, limit)
    if known and sum(ranges.latest) - sum(ranges.earliest) > MAX_OPEN:
        return _certified(problem, merged.expand(known), Solved(name, known, 0.0, False, 0.0), 1.0)
    program = time_program(work, ranges)
    solved = solve(program, name)
    options = [cuts for cuts in (known, solved.stage_of) if cuts is not None and fits(work, cuts)]
    if not options and solved.stage_of is not None:
        raise InfeasibleError(memory_message(work, solved.stage_of))
    if not options:
        raise no_cuts(work, solved.infeasible)
    best = min(options, key=lambda cuts: objective_seconds(work, stage_costs(work, cuts)))
    return _certified(problem, merged.expand(best), solved, program.seconds)


def fits(problem: CutProblem, stage_of: tuple[int, ...]) -> bool:
    """Whether the fullest rank is within the capacity; the program's memory leaves out what waits in buckets and
    symmetric memory."""
    return problem.capacity_bytes is None or peak_bytes(problem, stage_of) <= problem.capacity_bytes


def _certified(problem: CutProblem, stage_of: tuple[int, ...], solved: Solved, unit_seconds: float) -> Cuts:
    """The cuts with their own costs and the solver's bound."""
    costs = stage_costs(problem, stage_of)
    objective = objective_seconds(problem, costs)
    bound = min(max(solved.bound * unit_seconds, floor_seconds(problem)), objective)
    gap = (objective - bound) / objective if objective else 0.0
    closed = gap <= problem.gap + SOLVER_TOLERANCE
    limited = solved.seconds >= problem.time_limit_seconds
    status = "optimal" if closed else "time limit" if limited else "feasible" if solved.seconds else "contiguous cuts"
    return Cuts(
        stage_of=stage_of,
        objective_seconds=objective,
        bound_seconds=bound,
        stage_seconds=tuple(c.seconds for c in costs),
        solver=SolverInfo(solved.solver, status, gap, solved.seconds, problem.balance),
    )


# Solvers meet constraints and integrality to 1e-6 in units of the mean stage.
SOLVER_TOLERANCE = 1e-5

# Binaries that the solver is given at most. 64 stages of 400 groups with 4 microbatches leave more: writing them down
# takes 15 s, and what the solver then finds in 10 s has a gap of 15 % and is no better than contiguous cuts.
MAX_OPEN = 10_000

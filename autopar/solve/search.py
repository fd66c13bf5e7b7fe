"""From a priced model and the user's constraints to a plan: microbatches by enumeration, cuts by integer program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.hardware import Hardware
from autopar.ir import Alternative, Balance, CostGraph, Graph, ModelInfo, Plan
from autopar.ir.units import BYTES, text
from autopar.schedule import max_in_flight
from autopar.solve.assemble import Setting, bound_by, make_plan, simulated, step_seconds
from autopar.solve.constraints import (
    Constraints,
    boundary_links,
    microbatch_candidates,
    microbatch_size,
    pinned_groups,
)
from autopar.solve.contiguous import contiguous_cuts, least_memory_cuts
from autopar.solve.cuts import solve_cuts
from autopar.solve.evaluate import stage_costs
from autopar.solve.merge import merge
from autopar.solve.problem import CutProblem

BALANCES: Mapping[Balance, str] = {
    "time": "equal time", "uniform": "uniform cuts", "params": "equal parameters", "flops": "equal FLOPs"
}  # fmt: skip

# The least relative gain of lifting the memory limit that makes memory what bounds a plan.
NOTABLE = 0.01


@dataclass(frozen=True)
class Candidate:
    """A problem with the best contiguous cuts found for it, or why there are none; the step as simulated."""

    problem: CutProblem
    stage_of: tuple[int, ...] | None
    step_seconds: float | None
    note: str = ""


def search(
    cost_at: Callable[[int], CostGraph],
    graph: Graph,
    hardware: Hardware,
    constraints: Constraints,
    model: ModelInfo,
) -> Plan:
    """The fastest plan found, with the ones it was preferred to.

    Every number of microbatches is tried with contiguous cuts and simulated; the integer program then cuts for the best
    of them. The others, cuts by other balances and a single device are listed as alternatives.

    Args:
        cost_at: the model priced at that many samples per microbatch.
        graph: the training graph that the costs are of.
    Raises:
        UsageError: pins that name nothing or contradict each other or the model.
        InfeasibleError: nothing fits; the message holds the smallest relaxation that would.
    """
    setting = Setting(graph, hardware, model, constraints.batch, constraints.schedule)

    limit_bytes = constraints.capacity_bytes(hardware)

    def candidate(microbatches: int, stages: int) -> Candidate:
        cost = cost_at(microbatch_size(constraints.batch, microbatches))
        return evaluated(setting, posed(setting, constraints, cost, microbatches, stages), limit_bytes)

    candidates = {m: candidate(m, constraints.stages) for m in microbatch_candidates(constraints)}
    chosen = best_of(list(candidates.values()))
    try:
        cuts = solve_cuts(chosen.problem)
    except InfeasibleError as error:
        more = devices_that_fit(setting, constraints, chosen.problem)
        raise InfeasibleError(f"{error} {more}" if more else str(error)) from error
    microbatches = chosen.problem.microbatches
    others = [
        Alternative(f"{m} microbatch{'es' * (m > 1)}", c.step_seconds, c.note)
        for m, c in candidates.items()
        if m != microbatches
    ]
    for balance, label in BALANCES.items():
        # Cuts by another balance stand for those made by hand, which look at no limit; it is judged afterwards.
        other = evaluated(setting, replace(chosen.problem, balance=balance, capacity_bytes=None), limit_bytes)
        if balance != constraints.balance and other.stage_of != cuts.stage_of and constraints.stages > 1:
            others.append(Alternative(label, other.step_seconds, other.note))
    if constraints.stages > 1:
        alone = candidate(microbatches, 1)
        others.append(Alternative("one device", alone.step_seconds, alone.note))
    return make_plan(
        setting, chosen.problem, cuts.stage_of, cuts.solver, tuple(others),
        bound_by(chosen.problem, cuts.stage_of, simulated(setting, chosen.problem, cuts.stage_of),
                 seconds_without_limit(setting, chosen.problem, cuts.stage_of)),
    )  # fmt: skip


def posed(setting: Setting, constraints: Constraints, cost: CostGraph, microbatches: int, stages: int) -> CutProblem:
    """The cut problem for one number of microbatches and stages. A single device is compared without the pins."""
    return CutProblem(
        cost=cost,
        stages=stages,
        microbatches=microbatches,
        capacity_bytes=constraints.capacity_bytes(setting.hardware),
        in_flight=tuple(max_in_flight(setting.schedule, s, stages, microbatches) for s in range(stages)),
        boundary=boundary_links(setting.hardware, stages),
        balance=constraints.balance,
        pins=pinned_groups(cost, setting.graph, constraints.pins, stages) if stages == constraints.stages else {},
        time_limit_seconds=constraints.time_limit_seconds,
    )


def evaluated(setting: Setting, problem: CutProblem, limit_bytes: int) -> Candidate:
    """The problem with its best contiguous cuts and their simulated step, if these stay within ``limit_bytes``."""
    merged = merge(problem)
    units = contiguous_cuts(merged.problem)
    fullest = units or least_memory_cuts(merged.problem)
    if fullest is None:
        return Candidate(problem, None, None, "has no contiguous cuts")
    costs = stage_costs(merged.problem, fullest)
    full = max(range(problem.stages), key=lambda s: costs[s].memory_bytes)
    if units is None or costs[full].memory_bytes > limit_bytes:
        return Candidate(
            problem, None, None, f"does not fit: stage {full} needs {text(costs[full].memory_bytes, BYTES)}"
        )
    stage_of = merged.expand(units)
    return Candidate(problem, stage_of, step_seconds(simulated(setting, problem, stage_of), costs))


def best_of(candidates: list[Candidate]) -> Candidate:
    """The fastest that fits, or, where contiguous cuts fit nowhere, the one with the smallest microbatches."""
    fitting = [c for c in candidates if c.step_seconds is not None]
    if fitting:
        return min(fitting, key=lambda c: c.step_seconds or 0.0)
    return max(candidates, key=lambda c: c.problem.microbatches)


def devices_that_fit(setting: Setting, constraints: Constraints, problem: CutProblem) -> str:
    """A sentence with the smallest larger number of devices on which contiguous cuts fit, or nothing."""
    for stages in range(problem.stages + 1, min(4 * problem.stages, problem.cost.loss) + 1):
        if stages > setting.hardware.devices_per_node and setting.hardware.network is None:
            break
        larger = posed(setting, constraints, problem.cost, problem.microbatches, stages)
        if contiguous_cuts(merge(larger).problem) is not None:
            return f"With {stages} devices it fits."
    return ""


def seconds_without_limit(setting: Setting, problem: CutProblem, stage_of: tuple[int, ...]) -> float | None:
    """The step of the best contiguous cuts without the memory limit, where that is notably faster."""
    free = evaluated(setting, replace(problem, capacity_bytes=None), sys.maxsize)
    timeline = simulated(setting, problem, stage_of)
    seconds = step_seconds(timeline, stage_costs(problem, stage_of))
    if free.step_seconds is not None and free.step_seconds < (1 - NOTABLE) * seconds:
        return free.step_seconds
    return None

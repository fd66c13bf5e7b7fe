"""From a priced model and the user's constraints to a plan: meshes and microbatches by enumeration with bounds, cuts by
integer program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import ModelInfo, SolverInfo
from autopar.ir.status import doing
from autopar.ir.strategies import StrategyGraph
from autopar.solve.backend import SOLVER_TOLERANCE
from autopar.solve.cuts.dynamic_programme import contiguous_cuts, least_memory_cuts
from autopar.solve.cuts.evaluate import peak_bytes
from autopar.solve.cuts.infeasible import memory_message
from autopar.solve.cuts.local_search import local_search
from autopar.solve.cuts.merge import merge
from autopar.solve.cuts.problem import Costs, CutProblem, Priced
from autopar.solve.cuts.solve import solve_cuts
from autopar.solve.cuts.step_time import Decision, Setting, step_time
from autopar.solve.result.alternatives import alternatives, other_meshes
from autopar.solve.result.make_plan import make_plan
from autopar.solve.result.reasons import bound_by, seconds_without_limit
from autopar.solve.shardings.stages import StageSearch
from autopar.solve.shardings.variables import agrees
from autopar.solve.space.candidates import (
    Candidate,
    does_not_fit,
    even_share_bytes,
    fullest_rank_bytes,
    make_cut_problem,
)
from autopar.solve.space.constraints import Constraints
from autopar.solve.space.explore import SearchResult, evaluate_neighbours, explore, fastest_nearby
from autopar.solve.space.lower_bounds import LowerBounds, shardings_at
from autopar.solve.space.meshes import no_mesh, possible_meshes
from autopar.solve.space.points import Point, least_memory_points, point_of

# Largest ratio of a step before final shardings, which stages that share ranks do not get, to the one after; and of one
# before final cuts alone. Of 61 steps these shortened three by 0.1 to 0.5 %, and one by 4 %, whose memory was tight.
MAX_GAIN, MAX_GAIN_OF_CUTS = 1.05, 1.01

# Cuts with a sharding for each stage that are priced as they will run.
MAX_TRIED = 6


@dataclass(frozen=True)
class Refined:
    """Shardings for a decision's mesh and microbatches, and a bound of the step over all shardings and cuts.

    ``graph`` has the strategies that they are made of; ``priced`` prices any other choice of them, one for each group.
    ``bound_seconds`` is None where nothing is proven over all shardings.
    """

    graph: StrategyGraph
    shardings: tuple[Priced, ...]
    priced: Callable[[tuple[int, ...]], Priced]
    bound_seconds: float | None


Refine = Callable[[Decision], Refined]

# Called with all candidates that were evaluated, and the decision.
Listen = Callable[[Sequence[Candidate], Decision], None]


def search(
    costs: Costs,
    graph: Graph,
    hardware: Hardware,
    constraints: Constraints,
    model: ModelInfo,
    refine: Refine | None = None,
    listen: Listen = lambda candidates, decision: None,
    slack: float = 0.0,
) -> Plan:
    """The fastest plan found, with the ones it was preferred to.

    Every mesh with every number of microbatches, at every ZeRO stage, under every schedule that is left open, has a
    lower bound of its step. In the order of these bounds each is priced, cut contiguously and simulated, until the next
    bound is above the best step: what comes later cannot be better. The integer program then cuts for the best, where
    ranks have one stage each. Where tensors are sharded, ``refine`` may decide on cuts and shardings together.

    Args:
        costs: prices of one rank under any tp, dp and microbatch.
        graph: the training graph that the costs are of.
        listen: called with all candidates that were evaluated, and the decision.
        slack: evaluate those too whose bound is above the best step by less than this share.
    Raises:
        UsageError: pins that name nothing or contradict each other or the model; mesh sizes that contradict the
            devices, the batch or what the model can be split into.
        HardwareError: the devices fill several nodes and the machine has no network.
        InfeasibleError: nothing fits; the message holds the smallest relaxation that would.
    """
    setting = Setting(graph, hardware, model, constraints, costs)
    meshes = possible_meshes(constraints, hardware)
    bounds = LowerBounds(setting, slack)
    explored = explore(setting, bounds, meshes)
    chosen = fastest_nearby(setting, bounds, explored)
    if chosen is None:
        check_pieces(setting, explored)
        chosen = least_memory_candidate(setting, explored)
    try:
        decision, solver = finish(bounds, chosen, refine)
    except InfeasibleError as error:
        mesh, others = chosen.point.mesh, len(explored.by_mesh) - 1
        which = f" Of all meshes {mesh} needs least." if others else ""
        remedies = devices_that_fit(setting, chosen) + recomputation_that_fits(setting, explored)
        raise InfeasibleError(f"{error}{which}{remedies}") from error
    finished = {chosen.point}
    best = step_seconds(setting, decision)
    while (other := rival(explored, finished, best)) is not None:
        finished.add(other.point)
        rivals, rivals_solver = finish(bounds, other, refine)
        if (seconds := step_seconds(setting, rivals)) < best:
            decision, solver, best = rivals, rivals_solver, seconds
            evaluate_neighbours(setting, bounds, explored, other.point)
    check_memory(decision)
    listen([c for found in explored.by_mesh.values() for c in found], decision)
    free_seconds = seconds_without_limit(setting, decision)
    solver = replace(solver, other_meshes=other_meshes(bounds, meshes.allowed, decision))
    return make_plan(
        setting, decision, solver, alternatives(setting, bounds, explored.by_mesh, explored.refused, decision),
        bound_by(setting, decision, free_seconds), free_seconds,
    )  # fmt: skip


def rival(explored: SearchResult, finished: Set[Point], seconds: float) -> Candidate | None:
    """The fastest candidate, or the fastest with one stage a rank, which final cuts and shardings may shorten; None if
    neither may take less than so many seconds, or both are final."""
    single = min((c for c in explored.fitting if c.problem.chunks == 1), key=lambda c: c.seconds, default=None)
    gain = MAX_GAIN if single is not None and single.problem.tp > 1 else MAX_GAIN_OF_CUTS
    for candidate, most in ((explored.best, 1.0), (single, gain)):
        if candidate is not None and candidate.point not in finished and candidate.seconds < most * seconds:
            return candidate
    return None


def check_pieces(setting: Setting, explored: SearchResult) -> None:
    """Refuse devices of which every mesh has more stages than the model has pieces.

    Raises:
        InfeasibleError: names what is wrong with each mesh.
    """
    deep = {
        mesh: found[0].note
        for mesh, found in explored.by_mesh.items()
        if found and all(c.problem.stages > merge(c.problem).problem.cost.loss for c in found)
    }
    if len(deep) == len(explored.by_mesh) and setting.constraints.pp is None:
        raise no_mesh(setting.model.name, setting.constraints, deep | dict(explored.refused))


def least_memory_candidate(setting: Setting, explored: SearchResult) -> Candidate:
    """The candidate that needs least memory, over all meshes, with the smallest sharding.

    Contiguous cuts of it do not fit; it is what the integer program is asked for, and what an error names.
    """
    best, least = None, float("inf")
    for point in (p for mesh in explored.by_mesh for p in least_memory_points(setting, mesh)):
        *_, priced = shardings_at(setting, point)
        problem = make_cut_problem(setting, point, priced)
        if best is not None and even_share_bytes(problem) >= least:
            continue
        merged = merge(problem)
        units = least_memory_cuts(merged.problem)
        need = float("inf") if units is None else fullest_rank_bytes(merged, units)
        if best is None or need < least:
            note = "" if units is None else does_not_fit(fullest_rank_bytes(merged, units))
            best, least = Candidate(point, problem, priced, None, None, note), need
    assert best is not None, "no mesh was explored"
    return best


def devices_that_fit(setting: Setting, chosen: Candidate) -> str:
    """A sentence with the smallest larger number of devices on which contiguous cuts fit, or nothing."""
    mesh = chosen.point.mesh
    width = mesh.tp * mesh.dp
    for stages in sorted({-(-mesh.pp * quarters // 4) for quarters in range(5, 17)}):
        if stages * width > setting.hardware.devices_per_node and setting.hardware.network is None:
            break
        larger = replace(chosen.point, pp=stages)
        if larger.stages <= chosen.problem.cost.loss and fits(make_cut_problem(setting, larger, chosen.priced)):
            return f" With {stages * width} devices it fits."
    return ""


def recomputation_that_fits(setting: Setting, explored: SearchResult) -> str:
    """A sentence where contiguous cuts fit once stages recompute, or nothing."""
    if setting.constraints.recompute != "none":
        return ""
    open_ = replace(setting, constraints=replace(setting.constraints, recompute="auto"))
    fitting = fits(least_memory_candidate(open_, explored).problem)
    return ' With recompute="auto" (--recompute auto) it fits.' if fitting else ""


def fits(problem: CutProblem) -> bool:
    """Whether contiguous cuts fit."""
    limit = problem.capacity_bytes
    if limit is not None and even_share_bytes(problem) > limit:
        return False
    return contiguous_cuts(merge(problem).problem) is not None


def finish(bounds: LowerBounds, chosen: Candidate, refine: Refine | None) -> tuple[Decision, SolverInfo]:
    """The candidate with its final cuts, and with shardings of ``refine`` for its stages if the step is shorter; and
    what is proven of them: of the cuts alone or, where tensors are sharded, of all shardings and cuts.

    Raises:
        UsageError, InfeasibleError: as `solve_cuts`.
    """
    problem, setting = chosen.problem, bounds.setting
    doing(f"choosing the final cuts of {chosen.point.mesh}")
    cuts = solve_cuts(setting, problem, chosen.stage_of)
    decision = Decision(problem, chosen.priced, cuts.stage_of)
    if problem.tp == 1:
        return decision, cuts.solver
    method = "shardings then cuts" if problem.stages > 1 else "shardings"
    if problem.balance != "time" or refine is None:
        return decision, replace(cuts.solver, method=method)
    refined = refine(decision)
    better = min(stage_sharded(setting, decision, refined), key=lambda own: own.seconds, default=None)
    if better is not None and better.seconds < cuts.seconds:
        cuts = solve_cuts(setting, better.problem, better.stage_of)
        decision = replace(better.decision, stage_of=cuts.stage_of)
    if refined.bound_seconds is None:
        return decision, replace(cuts.solver, status=f"{cuts.solver.status} for the cuts")
    bound = min(cuts.bound_seconds, refined.bound_seconds)
    gap = (cuts.seconds - bound) / cuts.seconds if cuts.seconds else 0.0
    closed = gap <= problem.gap + SOLVER_TOLERANCE
    status = cuts.solver.status if closed else f"{cuts.solver.status} for the cuts"
    return decision, replace(cuts.solver, gap=gap, status=status, method=method)


def stage_sharded(setting: Setting, decision: Decision, refined: Refined) -> Iterator[Candidate]:
    """The best cuts with a sharding for each stage that fit, priced as they will run and moved by local search."""
    problem = decision.problem
    # A mesh with tensor parallelism is there to use it, however small the model.
    shardings = [own for own in refined.shardings if own.strategies or not decision.priced.strategies]

    def under(priced: Priced) -> CutProblem:
        return replace(problem, cost=priced.cost.recomputed if problem.recompute == "all" else priced.cost)

    merged = [merge(under(own)) for own in shardings]
    # A resharded value is sent by its first reader, a path that joins more groups to those that must share a stage.
    unit_of = merge(problem).unit_of
    alike = [q for q, own in enumerate(merged) if own.unit_of == unit_of]
    if not alike:
        return
    shardings, merged = [shardings[q] for q in alike], [merged[q] for q in alike]
    found = StageSearch(setting, [own.problem for own in merged])
    for column in found.best(merged[0].units(decision.stage_of), MAX_TRIED):
        stage_of = merged[0].expand(column.stage_of)
        index = tuple(shardings[column.sharding_of[s]].strategy_index[group] for group, s in enumerate(stage_of))
        if agrees(refined.graph, index):
            priced = refined.priced(index)
            own = merge(under(priced))
            starts = [own.units(stage_of), *filter(None, [contiguous_cuts(own.problem)])]
            stage_of = own.expand(local_search(setting, own.problem, *starts))
            if peak_bytes(under(priced), stage_of) <= (problem.capacity_bytes or math.inf):
                step = step_time(setting, under(priced), stage_of)
                yield Candidate(point_of(decision), under(priced), priced, stage_of, step)


def check_memory(decision: Decision) -> None:
    """Refuse a decision of which a rank needs more memory than it may use.

    Raises:
        InfeasibleError: names the fullest rank and its largest parts.
    """
    problem = decision.problem
    capacity = problem.capacity_bytes
    if capacity is not None and peak_bytes(problem, decision.stage_of) > capacity:
        raise InfeasibleError(memory_message(problem, decision.stage_of))


def step_seconds(setting: Setting, decision: Decision) -> float:
    """Seconds of the decision's simulated step."""
    return step_time(setting, decision.problem, decision.stage_of).seconds

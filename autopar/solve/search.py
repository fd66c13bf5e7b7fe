"""From a priced model and the user's constraints to a plan: meshes and microbatches by enumeration with bounds, cuts by
integer program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from autopar.errors import InfeasibleError, UsageError
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import ModelInfo, SolverInfo, ZeroStage
from autopar.ir.strategies import StrategyGraph
from autopar.solve.backend import SOLVER_TOLERANCE
from autopar.solve.cuts.dynamic_programme import contiguous_cuts, least_memory_cuts
from autopar.solve.cuts.evaluate import peak_bytes
from autopar.solve.cuts.infeasible import memory_message
from autopar.solve.cuts.local_search import local_search
from autopar.solve.cuts.merge import merge
from autopar.solve.cuts.problem import Costs, CutProblem, Priced
from autopar.solve.cuts.solve import solve_cuts
from autopar.solve.result.alternatives import MAX_MESHES, alternatives, other_meshes
from autopar.solve.result.make_plan import Decision, Setting, make_plan, step_time
from autopar.solve.result.reasons import bound_by, seconds_without_limit
from autopar.solve.shardings.stages import StageSearch
from autopar.solve.shardings.variables import agrees
from autopar.solve.space.candidates import (
    Candidate,
    LowerBounds,
    Pipeline,
    Point,
    cut_and_evaluate,
    does_not_fit,
    enumerate_points,
    evaluate,
    even_share_bytes,
    fullest_rank_bytes,
    look_up,
    make_cut_problem,
    neighbours,
    point_of,
    points_with_other_schedules,
    shardings_at,
    weights_fit,
)
from autopar.solve.space.constraints import Constraints
from autopar.solve.space.meshes import Meshes, divisors, in_the_way, nearest, no_mesh, possible_meshes

# A mesh whose bound is that many times the best step is not worth a row.
FAR = 2.0

# On so many devices at most, a mesh whose best step may be below that many times the best step is listed with its best
# one. Others are listed with the first one that fits: looking on takes long.
FEW_DEVICES, LISTED_WITH_BEST = 8, 1.25

# Steps that differ by that share do so by rounding.
EQUAL = 1e-9

# Largest ratio of a step before final cuts and shardings, which stages that share ranks do not get, to the one after.
MAX_GAIN = 1.05

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


@dataclass(frozen=True)
class SearchResult:
    """Candidates evaluated on every mesh, and the meshes that were refused, with the reason."""

    by_mesh: Mapping[Mesh, list[Candidate]]
    refused: Mapping[Mesh, str]

    @property
    def fitting(self) -> list[Candidate]:
        """All candidates that fit."""
        return [c for found in self.by_mesh.values() for c in found if c.step is not None]

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits; where schedules take equally long, the one that keeps least."""
        fitting = self.fitting
        best = min(fitting, key=lambda c: c.seconds, default=None)
        if best is None:
            return None
        alike = [
            c
            for c in fitting
            if c.seconds <= best.seconds * (1 + EQUAL) and replace(c.point, pipeline=best.point.pipeline) == best.point
        ]
        return min(alike, key=lambda c: sum(c.problem.in_flight) / c.problem.chunks)


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
    while (other := rival(explored, finished, step_seconds(setting, decision))) is not None:
        finished.add(other.point)
        rivals, rivals_solver = finish(bounds, other, refine)
        if step_seconds(setting, rivals) < step_seconds(setting, decision):
            decision, solver = rivals, rivals_solver
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
    """The fastest candidate, or the fastest with one stage a rank, which final cuts may shorten; None if neither may
    take less than so many seconds, or both have final cuts."""
    single = min((c for c in explored.fitting if c.problem.chunks == 1), key=lambda c: c.seconds, default=None)
    for candidate, gain in ((explored.best, 1.0), (single, MAX_GAIN)):
        if candidate is not None and candidate.point not in finished and candidate.seconds < gain * seconds:
            return candidate
    return None


def explore(setting: Setting, bounds: LowerBounds, meshes: Meshes) -> SearchResult:
    """Every mesh that may hold the best step, and the next ones until there are enough to list.

    Meshes come in the order of their expected steps, so that the first ones are near the best. Those whose bound over
    all shardings is above the best step come last.

    Raises:
        UsageError: the tp that was asked for splits nothing of this model.
        InfeasibleError: no mesh is left.
    """
    found: dict[Mesh, list[Candidate]] = {}
    refused = dict(meshes.refused)
    best = float("inf")
    points = {mesh: first_points(setting, mesh) for mesh in meshes.allowed}
    waiting = [(False, 0.0, number, mesh) for number, mesh in enumerate(points)]
    while waiting:
        place = heappop(waiting)
        *_, number, mesh = place
        is_listed = len(found) > MAX_MESHES
        ceiling = bounds.limit(best) if is_listed else FAR * best
        lowest = bounds.lowest(points[mesh], ceiling)
        if lowest >= ceiling:
            continue
        is_slower = lowest >= bounds.limit(best)
        later = is_slower, bounds.least_expected(points[mesh]), number, mesh
        if later > place:
            heappush(waiting, later)
        elif problem := nothing_to_split(setting, bounds, mesh):
            refused[mesh] = problem
        else:
            looks_on = not is_listed and mesh.devices <= FEW_DEVICES
            near = LISTED_WITH_BEST * best if looks_on else best
            if candidates := explore_mesh(setting, bounds, mesh, near, is_listed):
                found[mesh] = candidates
                best = min([best, *(c.seconds for c in candidates)])
    if not found:
        lifted = in_the_way(setting.constraints, setting.hardware, refused)
        raise no_mesh(setting.model.name, setting.constraints, refused, lifted)
    return SearchResult(found, refused)


def first_points(setting: Setting, mesh: Mesh) -> list[Point]:
    """Points of a mesh without ZeRO-2, unless that is asked for: it is as fast as ZeRO-1, which needs more memory."""
    return [p for p in enumerate_points(setting, mesh) if p.zero < 2 or setting.constraints.zero == 2]


def fastest_nearby(setting: Setting, bounds: LowerBounds, explored: SearchResult) -> Candidate | None:
    """The fastest that fits, compared once more with its neighbours."""
    before, best = None, explored.best
    while best is not None and (before is None or best.point != before.point):
        evaluate_neighbours(setting, bounds, explored, best.point)
        before, best = best, explored.best
    return best


def evaluate_neighbours(setting: Setting, bounds: LowerBounds, explored: SearchResult, point: Point) -> None:
    """Look up a point's neighbours and every other schedule on its mesh: their bounds are of the solver's model, which
    a simulated step may undercut, and those found far from the best step have no cuts by local search."""
    near = points_with_other_schedules(setting, point) + neighbours(setting, point)
    look_up(setting, bounds, explored.by_mesh[point.mesh], near)


def explore_mesh(
    setting: Setting, bounds: LowerBounds, mesh: Mesh, ceiling_seconds: float, better_only: bool
) -> list[Candidate]:
    """Candidates of one mesh: the first that fits, and all others that may be better than it and than the ceiling.

    Points come in the order of `LowerBounds.expected_seconds`, so that the first ones are near the best. ZeRO-2 is
    tried where ZeRO-1 does not fit, or only with recomputation.

    Args:
        better_only: leave out the first that fits too where it cannot be better than the ceiling.
    """
    found: list[Candidate] = []
    best = float("inf")
    too_large: dict[tuple[Pipeline, ZeroStage], int] = {}
    waiting = [(bounds.expected_seconds(p), number, p) for number, p in enumerate(first_points(setting, mesh))]
    heapify(waiting)
    while waiting:
        expected, number, point = heappop(waiting)
        near = min(best, ceiling_seconds)
        limit = bounds.limit_at(point, near) if best < float("inf") or better_only else float("inf")
        if bounds.seconds(point) >= limit or bounds.tighten(point) >= limit:
            continue
        # Fewer and larger microbatches need no less memory, nor does giving up ZeRO. With several stages a rank they
        # may: how many a rank holds depends on how they group.
        limits = (m for (p, z), m in too_large.items() if p == point.pipeline and z >= point.zero)
        candidate = None
        if point.pipeline.chunks > 1 or all(point.microbatches > m for m in limits):
            if bounds.estimate(point) > expected:
                heappush(waiting, (bounds.estimate(point), number, point))
                continue
            candidate = evaluate(setting, bounds, point, limit, near, 0.0 if better_only else best)
            if candidate is None:
                continue
            found.append(candidate)
            best = min(best, candidate.seconds)
        if candidate is not None and candidate.step is None:
            if not too_large and not fits_at_all(setting, mesh):
                break
            kind = (point.pipeline, point.zero)
            too_large[kind] = max(too_large.get(kind, 0), point.microbatches)
        may_share_gradients = point.zero == 1 and point.microbatches == 1 and setting.constraints.zero is None
        if may_share_gradients and (candidate is None or candidate.step is None or candidate.recomputes):
            again = replace(point, zero=2)
            heappush(waiting, (bounds.expected_seconds(again), number, again))
    if found:
        look_up(setting, bounds, found, [min(found, key=lambda c: c.seconds).point])  # it may be listed
    return found


def fits_at_all(setting: Setting, mesh: Mesh) -> bool:
    """Whether the mesh fits at a point that needs little memory, under any sharding."""
    limit_bytes = setting.constraints.capacity_bytes(setting.hardware)
    found = (
        cut_and_evaluate(setting, point, priced, make_cut_problem(setting, point, priced), limit_bytes, 0.0)
        for point in least_memory_points(setting, mesh)
        if weights_fit(setting, point)
        for priced in shardings_at(setting, point)
    )
    return any(candidate is not None and candidate.step is not None for candidate in found)


def least_memory_points(setting: Setting, mesh: Mesh) -> list[Point]:
    """Points of a mesh of which one needs least memory: with fewest stages a rank, most microbatches or ZeRO."""
    points = list(enumerate_points(setting, mesh))
    fewest = min(p.pipeline.chunks for p in points)
    points = [p for p in points if p.pipeline.chunks == fewest]
    # Slots of equal size for each owner may make ZeRO-2 larger than ZeRO-1 over many replicas.
    stages = sorted({p.zero for p in points}, reverse=True)[:2]
    best = [max(points, key=lambda p: (p.microbatches, p.zero))]
    best += [max((p for p in points if p.zero == zero), key=lambda p: p.microbatches) for zero in stages]
    return list(dict.fromkeys(best))


def nothing_to_split(setting: Setting, bounds: LowerBounds, mesh: Mesh) -> str:
    """Reason why tensor parallelism over that many ranks is pointless, or an empty string.

    Raises:
        UsageError: it is, and was asked for; says what limits it and which sizes are not.
    """
    if mesh.tp == 1:
        return ""
    point = min(enumerate_points(setting, mesh), key=bounds.seconds)
    priced = next(shardings_at(setting, point))
    if priced.strategies:
        return ""
    if setting.constraints.tp is None:
        return f"nothing can be split {mesh.tp} ways"
    others = [d for d in divisors(setting.constraints.devices) if d != mesh.tp]
    able = [d for d in others if d == 1 or _splits(setting, point, d)]
    use = " or ".join(f"tp={d}" for d in nearest(mesh.tp, able)) or "tp=1"
    limits = f": {listed(priced.notes)}" if priced.notes else ""
    raise UsageError(f"tp={mesh.tp}: nothing in {setting.model.name} can be split {mesh.tp} ways{limits}. Use {use}.")


def listed(notes: tuple[str, ...]) -> str:
    """The first few of what limits the ranks; a model has as many as it has kinds of layers."""
    more = len(notes) - MAX_NOTES
    return ", ".join(notes[:MAX_NOTES]) + (f", and {more} more" if more > 0 else "")


MAX_NOTES = 5


def _splits(setting: Setting, point: Point, tp: int) -> bool:
    """Whether the model can use that many tensor-parallel ranks on the same devices."""
    return bool(next(shardings_at(setting, replace(point, mesh=Mesh(1, tp, 1), zero=0))).strategies)


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
        larger = replace(chosen.point, mesh=replace(mesh, pp=stages))
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
    cuts = solve_cuts(setting, problem, chosen.stage_of)
    decision = Decision(problem, chosen.priced, chosen.point.zero, cuts.stage_of)
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

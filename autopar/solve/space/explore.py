"""The meshes that may hold the best step, and on each the points that may: in the order of their expected steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from autopar.errors import UsageError
from autopar.ir.mesh import Mesh
from autopar.ir.plan_parts import ONE_REPLICA, ZeroStage
from autopar.ir.status import doing
from autopar.sharding.rule import axis_labels
from autopar.solve.cuts.step_time import Setting
from autopar.solve.result.alternatives import MAX_MESHES
from autopar.solve.space.candidates import Candidate, cut_and_evaluate, evaluate, look_up, make_cut_problem
from autopar.solve.space.lower_bounds import LowerBounds, shardings_at, weights_fit
from autopar.solve.space.meshes import Meshes, divisors, in_the_way, nearest, no_mesh
from autopar.solve.space.points import (
    Pipeline,
    Point,
    enumerate_points,
    first_points,
    least_memory_points,
    more_divided,
    neighbours,
    points_with_other_schedules,
)

# A mesh whose bound is that many times the best step is not worth a row.
FAR = 2.0

# On so many devices at most, a mesh whose best step may be below that many times the best step is listed with its best
# one. Others are listed with the first one that fits: looking on takes long.
FEW_DEVICES, LISTED_WITH_BEST = 8, 1.25

# Steps that differ by that share do so by rounding.
EQUAL = 1e-9

# Limits of tensor parallelism that a message names.
MAX_NOTES = 5


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
            doing(f"searching meshes: {len(points) - len(waiting) - 1} of {len(points)} done, now {mesh}")
            looks_on = not is_listed and mesh.devices <= FEW_DEVICES
            near = LISTED_WITH_BEST * best if looks_on else best
            if candidates := explore_mesh(setting, bounds, mesh, near, is_listed):
                found[mesh] = candidates
                best = min([best, *(c.seconds for c in candidates)])
    if not found:
        lifted = in_the_way(setting.constraints, setting.hardware, refused)
        raise no_mesh(setting.model.name, setting.constraints, refused, lifted)
    return SearchResult(found, refused)


def explore_mesh(
    setting: Setting, bounds: LowerBounds, mesh: Mesh, ceiling_seconds: float, better_only: bool
) -> list[Candidate]:
    """Candidates of one mesh: the first that fits, and all others that may be better than it and than the ceiling.

    Points come in the order of `LowerBounds.expected_seconds`, so that the first ones are near the best. ZeRO-2 and -3
    are tried where the stage before does not fit, or only with recomputation.

    Args:
        better_only: leave out the first that fits too where it cannot be better than the ceiling.
    """
    found: list[Candidate] = []
    best = float("inf")
    too_large: dict[tuple[Pipeline, ZeroStage, int], int] = {}
    waiting = [(bounds.expected_seconds(p), number, p) for number, p in enumerate(first_points(setting, mesh))]
    heapify(waiting)
    while waiting:
        expected, number, point = heappop(waiting)
        near = min(best, ceiling_seconds)
        limit = bounds.limit_at(point, near) if best < float("inf") or better_only else float("inf")
        if bounds.seconds(point) >= limit or bounds.tighten(point) >= limit:
            continue
        # Fewer and larger microbatches need no less memory, nor does giving up ZeRO or dividing among fewer. With
        # several stages a rank they may: how many a rank holds depends on how they group.
        limits = (
            m
            for (pipeline, zero, sharing), m in too_large.items()
            if pipeline == point.pipeline and zero >= point.replicas.zero and sharing >= point.replicas.sharing
        )
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
            kind = (point.pipeline, point.replicas.zero, point.replicas.sharing)
            too_large[kind] = max(too_large.get(kind, 0), point.microbatches)
        again = more_divided(setting, point)
        if again is not None and (candidate is None or candidate.step is None or candidate.recomputes_to_fit):
            heappush(waiting, (bounds.expected_seconds(again), number, again))
    if found:
        look_up(setting, bounds, found, [min(found, key=lambda c: c.seconds).point])  # it may be listed
    return found


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
        texts = (axis_labels(text) for text in priced.strategies.values())
        used = {axis for labels in texts for axis, label in labels.items() if label}
        idle = [axis for axis in mesh.tensor_axes if axis.name not in used]
        if not idle or not mesh.tp_axes or isinstance(setting.constraints.tp, tuple):
            return ""
        return f"the fastest sharding splits nothing over {idle[0].name}, its axis of {idle[0].ranks}"
    if setting.constraints.tp is None:
        return f"nothing can be split {mesh.tp} ways"
    others = [d for d in divisors(setting.constraints.devices) if d != mesh.tp]
    able = [d for d in others if d == 1 or _splits(setting, point, d)]
    use = " or ".join(f"tp={d}" for d in nearest(mesh.tp, able)) or "tp=1"
    limits = f": {listed(priced.notes)}" if priced.notes else ""
    raise UsageError(f"tp={mesh.tp}: nothing in {setting.model.name} can be split {mesh.tp} ways{limits}. Use {use}.")


def _splits(setting: Setting, point: Point, tp: int) -> bool:
    """Whether the model can use that many tensor-parallel ranks on the same devices."""
    return bool(next(shardings_at(setting, replace(point, pp=1, tp=tp, replicas=ONE_REPLICA, tp_axes=()))).strategies)


def listed(notes: tuple[str, ...]) -> str:
    """The first few of what limits the ranks; a model has as many as it has kinds of layers."""
    more = len(notes) - MAX_NOTES
    return ", ".join(notes[:MAX_NOTES]) + (f", and {more} more" if more > 0 else "")

"""Candidates: points with a sharding, contiguous cuts, and their simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ir.mesh import Mesh
from autopar.ir.units import BYTES, plural, text
from autopar.solve.cuts.dynamic_programme import contiguous_cuts, least_memory_cuts
from autopar.solve.cuts.evaluate import fullest_bytes, peak_bytes, stage_costs
from autopar.solve.cuts.kept_blocks import kept_blocks
from autopar.solve.cuts.local_search import busy_seconds, is_given_up, local_search
from autopar.solve.cuts.merge import Merged, merge
from autopar.solve.cuts.problem import Axis, CutProblem, Priced
from autopar.solve.cuts.step_time import Decision, Setting, StepTime, step_time
from autopar.solve.space.constraints import boundary_links, pinned_groups
from autopar.solve.space.lower_bounds import LowerBounds, shardings_at, step_floor, weights_fit
from autopar.solve.space.points import Point, microbatch_samples

# Largest ratio of a step with contiguous cuts to the best step known at which local search is tried: it has shortened
# steps by 8.3 % at most (ResNet-50 on 4 stages). What may be listed, which it shortens by up to 16 %, is `look_up`'s.
NEAR_BEST = 1.12


@dataclass(frozen=True)
class Candidate:
    """A point with its sharding and the contiguous cuts that simulate fastest, or what the fullest stage needs at
    least, in bytes. ``is_improved``: its cuts come from a local search that was not given up."""

    point: Point
    problem: CutProblem
    priced: Priced
    stage_of: tuple[int, ...] | None
    step: StepTime | None
    note: str = ""
    is_improved: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of the step; infinite if the point does not fit."""
        return self.step.seconds if self.step is not None else float("inf")

    @property
    def recomputes_to_fit(self) -> bool:
        """Whether any stage recomputes because it would not fit otherwise."""
        if self.stage_of is None or not self.problem.may_recompute:
            return False
        return any(c.recomputed_below for c in stage_costs(self.problem, self.stage_of))

    @property
    def decision(self) -> Decision:
        assert self.stage_of is not None, f"{self.point} was not cut"
        return Decision(self.problem, self.priced, self.stage_of)


def evaluate(
    setting: Setting,
    bounds: LowerBounds,
    point: Point,
    ceiling_seconds: float,
    best_seconds: float = float("inf"),
    listed_seconds: float = 0.0,
) -> Candidate | None:
    """The point with the fastest sharding that fits; None where its step is proven to reach the ceiling.

    Where no sharding fits, the smallest one, with what it needs, or the fastest one, where not even weights fit. One
    that fits only with recomputation is compared with the smaller ones.

    Args:
        best_seconds: the best step known; cuts far above it are not improved by local search, or not to the end.
        listed_seconds: a step below this one is of interest too, once there are cuts.
    """
    best, limit_bytes = None, setting.constraints.capacity_bytes(setting.hardware)
    if bounds.tighten(point) >= ceiling_seconds:
        return None
    for priced in shardings_at(setting, point):
        if point.pipeline.is_split and setting.constraints.schedule == "auto" and not priced.wgrad_seconds:
            return None  # nothing to split
        known = best.seconds if best is not None else float("inf")
        limit, found = min(ceiling_seconds, known), None
        if step_floor(setting, point, priced) < limit:
            ceiling = max(limit, min(listed_seconds, known))
            problem = make_cut_problem(setting, point, priced)
            found = cut_and_evaluate(setting, point, priced, problem, limit_bytes, best_seconds, ceiling)
        if found is None:
            return best if known < float("inf") else None
        if best is None or found.seconds <= best.seconds:
            best = found
        if found.step is not None and not found.recomputes_to_fit:
            break
        if found.step is None and not weights_fit(setting, point):
            break
    return best


def look_up(setting: Setting, bounds: LowerBounds, known: list[Candidate], points: Sequence[Point]) -> list[Candidate]:
    """The candidates at some points, with cuts by local search; those that are not known are evaluated and added."""
    limit_bytes = setting.constraints.capacity_bytes(setting.hardware)
    index = {candidate.point: i for i, candidate in enumerate(known)}
    for point in points:
        if point in index:
            known[index[point]] = improve(setting, known[index[point]], limit_bytes)
        elif (candidate := evaluate(setting, bounds, point, float("inf"))) is not None:
            index[point] = len(known)
            known.append(candidate)
    return [known[index[point]] for point in points if point in index]


def cut_and_evaluate(
    setting: Setting,
    point: Point,
    priced: Priced,
    problem: CutProblem,
    limit_bytes: float,
    best_seconds: float = float("inf"),
    ceiling_seconds: float = float("inf"),
) -> Candidate | None:
    """The point under one sharding, with the best contiguous cuts, or with a note why there are none; None where the
    ranks are busy until the ceiling, and too long for local search.

    Args:
        limit_bytes: memory of a rank, from which the capacity for which the problem is cut first may differ.
        best_seconds: the best step known; cuts far above it are not improved by local search, or not to the end.
    """
    uncut = Candidate(point, problem, priced, None, None)
    if (share := even_share_bytes(problem)) > limit_bytes:
        return replace(uncut, note=f"does not fit: over {text(share, BYTES)}")
    merged = merge(problem)
    units = contiguous_cuts(merged.problem)
    if units is None or fullest_rank_bytes(merged, units) > limit_bytes:
        units = units or least_memory_cuts(merged.problem)
        note = no_cuts_note(merged) if units is None else does_not_fit(fullest_rank_bytes(merged, units))
        return replace(uncut, note=note)
    near_seconds = NEAR_BEST * best_seconds
    ceiling = max(near_seconds, ceiling_seconds)
    if ceiling < float("inf") and busy_seconds(setting, merged.problem, units) >= ceiling:
        return None
    stage_of = merged.expand(units)
    found = replace(uncut, stage_of=stage_of, step=step_time(setting, problem, stage_of))
    if point.replicas.zero == 3:
        found = keep_blocks(setting, found, limit_bytes)
    return improve(setting, found, limit_bytes, best_seconds) if found.seconds < near_seconds else found


def keep_blocks(setting: Setting, candidate: Candidate, limit_bytes: float) -> Candidate:
    """The candidate with the blocks kept that fit and save most, if its step is shorter then."""
    assert candidate.stage_of is not None
    kept = kept_blocks(candidate.problem, candidate.stage_of, limit_bytes)
    if not kept:
        return candidate
    point, axes, priced = candidate.point, candidate.point.mesh.tensor_axes, candidate.priced
    priced = setting.costs.keeping(priced, axes, point.replicas, microbatch_samples(setting, point), kept)
    problem = make_cut_problem(setting, point, priced)
    step = step_time(setting, problem, candidate.stage_of)
    fits = peak_bytes(problem, candidate.stage_of) <= limit_bytes
    if not fits or step.seconds > candidate.seconds:
        return candidate
    return replace(candidate, problem=problem, priced=priced, step=step)


def improve(
    setting: Setting, candidate: Candidate, limit_bytes: float, best_seconds: float = float("inf")
) -> Candidate:
    """The candidate with its cuts moved by local search, unless they were, or there are none.

    Args:
        best_seconds: the best step known; a search that does not come near it is given up.
    """
    if candidate.stage_of is None or candidate.is_improved:
        return candidate
    merged = merge(candidate.problem)
    limit, units = None if limit_bytes == float("inf") else int(limit_bytes), merged.units(candidate.stage_of)
    if merged.problem.stages > 1:
        problem = replace(merged.problem, capacity_bytes=limit)
        units = local_search(setting, problem, units, best_seconds=best_seconds)
    stage_of = merged.expand(units)
    step = candidate.step if stage_of == candidate.stage_of else step_time(setting, candidate.problem, stage_of)
    assert step is not None, "the candidate has cuts"
    return replace(candidate, stage_of=stage_of, step=step, is_improved=not is_given_up(step.seconds, best_seconds))


def evaluate_cuts(
    setting: Setting, point: Point, priced: Priced, problem: CutProblem, limit_bytes: float = float("inf")
) -> Candidate:
    """As `cut_and_evaluate`, without a ceiling."""
    found = cut_and_evaluate(setting, point, priced, problem, limit_bytes)
    assert found is not None, "there is no ceiling to reach"
    return found


def make_cut_problem(setting: Setting, point: Point, priced: Priced) -> CutProblem:
    """The cut problem of a point. A single device is compared without the pins."""
    asked, mesh, microbatches = setting.constraints, point.mesh, point.microbatches
    schedule, chunks = point.pipeline.schedule, point.pipeline.chunks
    compared = mesh.devices != asked.devices
    placement = point.placement
    # More stages than groups are refused, while listing what they hold takes minutes.
    profiles = (((1,) * chunks,),) * mesh.pp if point.stages > priced.cost.loss else point.in_flight
    in_flight = [profiles[placement.position(s)][0][s // mesh.pp] for s in range(point.stages)]
    return CutProblem(
        cost=priced.cost.recomputed if asked.recompute == "all" else priced.cost,
        stages=point.stages,
        microbatches=microbatches,
        capacity_bytes=asked.capacity_bytes(setting.hardware),
        in_flight=tuple(in_flight),
        boundary=boundary_links(setting.hardware, mesh, placement),
        balance=asked.balance,
        pins={} if compared else pinned_groups(priced.cost, setting.graph, asked.pins, point.stages),
        time_limit_seconds=asked.solver_seconds,
        tp=mesh.tp,
        replicas=point.replicas,
        tp_axes=mesh.tp_axes,
        recompute=asked.recompute,
        schedule=schedule,
        chunks=chunks,
        in_flight_profiles=profiles if chunks > 1 else (),
        peers=peers(setting, point),
        input_bytes=input_bytes(setting, mesh),
        reserve_bytes=setting.hardware.reserve_bytes,
        reduce_dtype=asked.reduce_dtype,
    )


def peers(setting: Setting, point: Point) -> frozenset[Axis]:
    """Mesh axes whose ranks reach each other's memory: on GPUs of one node that have peer access, where they may.

    Of the replicas those that divide what ZeRO says.
    """
    hardware = setting.hardware
    if not (setting.constraints.peer_memory and hardware.peer_access and hardware.device_type == "cuda"):
        return frozenset()
    mesh, replicas = point.mesh, point.replicas
    spans: dict[Axis, int] = {"tp": mesh.tp, "dp": mesh.tp * replicas.group_size, "pp": mesh.devices}
    sizes: dict[Axis, int] = {"tp": mesh.tp, "dp": mesh.dp, "pp": mesh.pp}
    return frozenset(axis for axis, span in spans.items() if sizes[axis] > 1 and span <= hardware.devices_per_node)


def input_bytes(setting: Setting, mesh: Mesh) -> int:
    """Bytes of a replica's inputs of a step on a GPU: the copy of the caller's tensors, and that of a captured step.

    On CPU the caller's tensors are read in place.

    Error: all inputs count for the first stage, and targets are neglected.
    """
    graph, hardware = setting.graph, setting.hardware
    if hardware.device_type != "cuda":
        return 0
    share = setting.constraints.batch / mesh.dp / graph.batch
    times = 2 if hardware.execution_mode.captured else 1
    return times * round(share * sum(value.num_bytes for value in graph.inputs))


def without_limit(problem: CutProblem) -> CutProblem:
    """The problem without a memory limit."""
    return replace(problem, capacity_bytes=None)


def even_share_bytes(problem: CutProblem) -> int:
    """Lower bound of the fullest rank's bytes: an even share of weights and of simultaneous activations."""
    if problem.may_recompute:
        saved = sum(min(g.saved_bytes, g.kept_bytes) for g in problem.cost.groups)
    else:
        saved = sum(g.saved_bytes for g in problem.cost.groups) + sum(a.num_bytes for a in problem.cost.saved)
    weights = sum(map(problem.standing_bytes, problem.cost.weights))
    held = min(problem.in_flight)
    if problem.chunks > 1:
        held = min(max(min(profile) for profile in profiles) for profiles in problem.in_flight_profiles)
    return (weights + held * saved) // problem.pp


def fullest_rank_bytes(merged: Merged, units: tuple[int, ...]) -> int:
    """Memory of the fullest rank."""
    return fullest_bytes(merged.problem, stage_costs(merged.problem, units))


def does_not_fit(num_bytes: int) -> str:
    """Note for a candidate whose fullest rank needs that many bytes."""
    return f"does not fit: {text(num_bytes, BYTES)}"


def no_cuts_note(merged: Merged) -> str:
    """Note for a candidate without any cuts."""
    pieces = merged.problem.cost.loss
    if merged.problem.stages > pieces:
        return f"can be cut into {plural(pieces, 'piece')} at most"
    return "has no contiguous cuts"

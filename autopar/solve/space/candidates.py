"""Points of the search space: their lower bounds, their cuts, and their simulated step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import get_args

from autopar.ir.cost_graph import CostGraph
from autopar.ir.mesh import Mesh
from autopar.ir.microbatches import microbatch_size
from autopar.ir.plan_parts import INTERLEAVED, ScheduleName, ZeroStage
from autopar.ir.units import BYTES, plural, text
from autopar.schedule.generate import in_flight_profiles, max_in_flight, may_overlap
from autopar.solve.cuts.dynamic_programme import ROUNDING, contiguous_cuts, least_memory_cuts
from autopar.solve.cuts.evaluate import fullest_bytes, stage_costs
from autopar.solve.cuts.local_search import busy_seconds, local_search
from autopar.solve.cuts.merge import Merged, merge
from autopar.solve.cuts.problem import Axis, CutProblem, Priced, slowest_count
from autopar.solve.result.make_plan import Decision, Setting, StepTime, step_time
from autopar.solve.space.constraints import Constraints, boundary_links, microbatch_candidates, pinned_groups

# More stages a rank than this cost more in transfers and in kernels that are too small than their bubble is worth: with
# 6 of them it is a sixth of 1F1B's.
MAX_CHUNKS = 6
# Largest ratio of a step with contiguous cuts to the best step known at which local search is tried: it has shortened
# steps by 8.3 % at most (ResNet-50 on 4 stages). What may be listed, which it shortens by up to 16 %, is `look_up`'s.
NEAR_BEST = 1.12
# Least share that a simulated pipeline is taken to have of one with equal stages, whose ends shorter stages shorten. Of
# 900 candidates of ten models none had less than 97.2 %.
LEAST_OF_EQUAL = 0.9
# Least share that a step has of `pipeline_floor` with fewer microbatches than twice the stages.
LEAST_OF_FEW = 0.93
# Ranks of a pipeline from which slow stages are not taken to meet fast ones on every rank: no candidate on so many was
# faster than if all stages took as long as the slowest one must.
MANY_RANKS = 16


@dataclass(frozen=True)
class Pipeline:
    """A schedule and how many stages each rank has under it."""

    schedule: ScheduleName = "1f1b"
    chunks: int = 1

    def __str__(self) -> str:
        return self.schedule if self.chunks == 1 else f"{self.schedule}, {self.chunks} chunks a rank"


@dataclass(frozen=True)
class Point:
    """Point of the search space: mesh, microbatches per replica, ZeRO stage, and schedule."""

    mesh: Mesh
    microbatches: int
    zero: ZeroStage = 0
    pipeline: Pipeline = Pipeline()

    @property
    def stages(self) -> int:
        return self.mesh.pp * self.pipeline.chunks

    @property
    def is_interleaved_too(self) -> bool:
        """Whether its schedule is interleaved-overlap with actions in interleaved's order."""
        return self.pipeline.schedule == "interleaved-overlap" and not may_overlap(self.mesh.pp, self.microbatches)


@dataclass(frozen=True)
class Candidate:
    """A point with its sharding and the contiguous cuts that simulate fastest, or what the fullest stage needs at
    least, in bytes. ``is_improved``: its cuts come from local search, not only from the dynamic programme."""

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
    def recomputes(self) -> bool:
        """Whether any stage recomputes."""
        return self.stage_of is not None and any(c.recomputed_below for c in stage_costs(self.problem, self.stage_of))

    @property
    def decision(self) -> Decision:
        assert self.stage_of is not None, f"{self.point} was not cut"
        return Decision(self.problem, self.priced, self.point.zero, self.stage_of)


def point_of(decision: Decision) -> Point:
    """Point at which a decision was found."""
    problem = decision.problem
    return Point(problem.mesh, problem.microbatches, decision.zero, Pipeline(problem.schedule, problem.chunks))


@dataclass(frozen=True)
class LowerBounds:
    """Lower bounds of the step at every point.

    ``strategy_seconds`` collects bounds of one microbatch by `Costs.bound_seconds`, by tp and samples, for every mesh.
    ``estimates`` collects the steps of points that were priced. Points slower than the best step by at most the share
    ``slack`` are still evaluated.
    """

    setting: Setting
    slack: float = 0.0
    strategy_seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    estimates: dict[Point, float] = field(default_factory=dict)

    def limit(self, best_seconds: float) -> float:
        """Seconds from which a point need not be evaluated."""
        return (1 + self.slack) * best_seconds

    def limit_at(self, point: Point, best_seconds: float) -> float:
        """As `limit`, but for a point whose `seconds` may be above its step."""
        is_high = 1 < point.microbatches < 2 * point.mesh.pp and point.pipeline.chunks == 1
        return self.limit(best_seconds) / (LEAST_OF_FEW if is_high else 1)

    def seconds(self, point: Point) -> float:
        """Lower bound of the point's step that is known without pricing it."""
        return pipeline_floor(self.setting, point, self.microbatch_seconds(point), 0.0)

    def expected_seconds(self, point: Point) -> float:
        """The point's `step_estimate` or, before it is priced, its step with equal stages and without its update: no
        bound."""
        if point in self.estimates:
            return self.estimates[point]
        total = self.microbatch_seconds(point)
        return equal_stages_seconds(self.setting, point, total / point.stages, total)

    def estimate(self, point: Point) -> float:
        """As `expected_seconds`, after pricing the point under its fastest sharding."""
        if point not in self.estimates:
            self.estimates[point] = step_estimate(self.setting, point, next(shardings_at(self.setting, point)))
        return self.estimates[point]

    def microbatch_seconds(self, point: Point) -> float:
        """Lower bound of the time of one microbatch on all stages."""
        tp, size = point.mesh.tp, microbatch_samples(self.setting, point)
        return self.strategy_seconds.get((tp, size)) or self.setting.costs.floor_seconds(tp, size)

    def least_expected(self, points: Sequence[Point]) -> float:
        """The least of `expected_seconds`, after pricing its points until one of them keeps it or it rises."""
        known = min(map(self.expected_seconds, points))
        while True:
            point = min(points, key=self.expected_seconds)
            expected = self.expected_seconds(point)
            if expected > known or point in self.estimates:
                return expected
            self.tighten(point)
            if self.expected_seconds(point) <= known:
                self.estimate(point)

    def lowest(self, points: Sequence[Point], ceiling_seconds: float) -> float:
        """The least of `seconds`, over all shardings unless it reaches the ceiling."""
        while True:
            point = min(points, key=self.seconds)
            lowest = self.seconds(point)
            if lowest >= ceiling_seconds or self.tighten(point) <= lowest:
                return lowest

    def tighten(self, point: Point) -> float:
        """As `seconds`, after solving for the shortest time of one microbatch over all shardings."""
        tp, size = key = point.mesh.tp, microbatch_samples(self.setting, point)
        self.strategy_seconds[key] = self.setting.costs.bound_seconds(tp, size)
        return self.seconds(point)


def microbatch_samples(setting: Setting, point: Point) -> int:
    """Samples of the point's largest microbatch."""
    return microbatch_size(setting.constraints.batch // point.mesh.dp, point.microbatches)


def num_microbatches(setting: Setting, point: Point) -> float:
    """Microbatches of the point; a smaller last one counts as its share of a full one."""
    return setting.constraints.batch / point.mesh.dp / microbatch_samples(setting, point)


def enumerate_points(setting: Setting, mesh: Mesh) -> Iterator[Point]:
    """Every number of microbatches, at every ZeRO stage and under every schedule as far as that is left open; of
    schedules that run the same actions in the same order only the first. ZeRO-2 is for one microbatch."""
    wanted = setting.constraints.zero
    for pipeline in allowed_pipelines(setting.constraints, mesh):
        for zero in get_args(ZeroStage) if wanted is None else (wanted,):
            if not zero or mesh.dp > 1:
                for m in microbatch_candidates(setting.constraints, mesh.dp):
                    if zero == 2 and m > 1:
                        break
                    point = Point(mesh, m, zero, pipeline)
                    if setting.constraints.schedule != "auto" or not point.is_interleaved_too:
                        yield point


def points_with_other_schedules(setting: Setting, point: Point) -> list[Point]:
    """Points with the same mesh, microbatches and ZeRO stage under every other schedule."""
    points = enumerate_points(setting, point.mesh)
    return [p for p in points if p != point and replace(p, pipeline=point.pipeline) == point]


def neighbours(setting: Setting, point: Point) -> list[Point]:
    """Points with the same mesh and schedule: with fewer and with more microbatches, and with ZeRO-1 or without."""
    points = [p for p in enumerate_points(setting, point.mesh) if are_alike(p, point.pipeline)]
    same = [p for p in points if p.zero == min(point.zero, 1)]  # ZeRO-2 is for one microbatch
    near = [p for p in same if p.microbatches < point.microbatches][-1:]
    near += [p for p in same if p.microbatches > point.microbatches][:1]
    return near + [p for p in points if p.zero not in (point.zero, 2) and p.microbatches == point.microbatches]


def are_alike(point: Point, pipeline: Pipeline) -> bool:
    """Whether a point's schedule is the given one, or runs its actions in the same order."""
    other = replace(point, pipeline=pipeline)
    return point == other or (other.is_interleaved_too and point.pipeline == replace(pipeline, schedule="interleaved"))


def allowed_pipelines(asked: Constraints, mesh: Mesh) -> tuple[Pipeline, ...]:
    """The schedules to consider on a mesh, of as many stages a rank the one that needs least memory first."""
    if asked.schedule != "auto" and asked.schedule not in INTERLEAVED:
        return (Pipeline(asked.schedule),)
    if mesh.pp == 1:
        return (Pipeline(),)
    chunks = [asked.chunks] if asked.chunks is not None else range(1, 1 + (1 if asked.pins else MAX_CHUNKS))
    single: tuple[ScheduleName, ...] = ("1f1b",) if asked.schedule == "auto" else (asked.schedule,)
    several = INTERLEAVED if asked.schedule == "auto" else single
    return tuple(Pipeline(schedule, n) for n in chunks for schedule in (single if n == 1 else several))


def pipeline_floor(setting: Setting, point: Point, total_seconds: float, largest_seconds: float) -> float:
    """A lower bound of the pipeline's time, from that of one microbatch on all stages and in the largest group.

    Error: of the solver's model, (m − 1) · max t + Σ t; where an early stage is the slowest one, later ones hide in its
        shadow and a simulated step can be shorter (`one_f_one_b_seconds`). With several stages a rank there is none:
        a rank is busy for an even share at least, and runs the largest group once per microbatch.
    """
    microbatches = num_microbatches(setting, point)
    if point.pipeline.chunks > 1:
        return max(max(microbatches / point.mesh.pp, 1) * total_seconds, microbatches * largest_seconds)
    return (microbatches - 1) * max(total_seconds / point.stages, largest_seconds) + total_seconds


def step_floor(setting: Setting, point: Point, priced: Priced) -> float:
    """A lower bound of the step once the point is priced: even shares of compute, update and memory traffic, and no
    less than `LEAST_OF_EQUAL` of a pipeline with equal stages. On `MANY_RANKS` all of these take as long as the slowest
    one must."""
    total, largest = priced.seconds, max(group.seconds for group in priced.cost.groups)
    slowest = fastest_slowest_stage(priced.cost, point.stages) if point.mesh.pp >= MANY_RANKS else total / point.stages
    even = pipeline_floor(setting, point, total, largest)
    equal = equal_stages_seconds(setting, point, slowest, total)
    return max(even, LEAST_OF_EQUAL * equal) + least_update(point, priced)


def equal_stages_seconds(setting: Setting, point: Point, slowest_seconds: float, total_seconds: float) -> float:
    """Seconds of a pipeline whose stages all count as the slowest one, with free transfers, from that one's seconds and
    those of all stages for one microbatch."""
    count = slowest_count(num_microbatches(setting, point), point.mesh.pp, point.pipeline.chunks)
    return count * slowest_seconds + total_seconds


def fastest_slowest_stage(cost: CostGraph, stages: int) -> float:
    """Seconds of a microbatch on the slowest stage, without transfers, under the contiguous cuts with the least."""

    def made() -> float:
        ends = list(accumulate((group.seconds for group in cost.groups), initial=0.0))
        low, high = max(ends[-1] / stages, *(group.seconds for group in cost.groups)), ends[-1]
        while high - low > ROUNDING * high:
            middle, at = (low + high) / 2, 0
            for _ in range(stages):
                at = bisect_right(ends, ends[at] + middle) - 1
            low, high = (low, middle) if at == len(ends) - 1 else (middle, high)
        return low

    return cost.remember_for(("groups",), ("slowest stage", stages), made)


def step_estimate(setting: Setting, point: Point, priced: Priced) -> float:
    """Seconds of the step with equal stages, with an even share of the update and of `recomputation_estimate`; no
    bound."""
    total = priced.seconds
    pipeline = equal_stages_seconds(setting, point, total / point.stages, total)
    return pipeline + least_update(point, priced) + recomputation_estimate(setting, point, priced)


def recomputation_estimate(setting: Setting, point: Point, priced: Priced) -> float:
    """Seconds of recomputation with which the first of equal stages fits, which holds most; infinite where it does not
    fit."""
    asked, groups, pp = setting.constraints, priced.cost.groups, point.mesh.pp
    held = max_in_flight(point.pipeline.schedule, 0, pp, point.microbatches, point.pipeline.chunks) / point.stages
    kept = held * sum(min(g.saved_bytes, g.kept_bytes) for g in groups)
    saved = held * (sum(g.saved_bytes for g in groups) + sum(a.num_bytes for a in priced.cost.saved))
    room = asked.capacity_bytes(setting.hardware) - sum(w.num_bytes for w in priced.cost.weights) / pp
    if room < (saved if asked.recompute == "none" else kept):
        return float("inf")
    again = 1.0 if asked.recompute == "all" else max(0.0, saved - room) / max(saved - kept, 1.0)
    return min(1.0, again) * num_microbatches(setting, point) * sum(g.forward_seconds for g in groups) / pp


def weights_fit(setting: Setting, point: Point) -> bool:
    """Whether an even share of the weights fits, if all are sharded."""
    mesh, size = point.mesh, microbatch_samples(setting, point)
    whole = setting.costs.priced(1, mesh.dp, point.zero, size, point.microbatches, 0)
    assert whole is not None, f"{point} has no price"
    come = mesh.pp == mesh.dp == 1  # gradients may be allocated by the last backward
    held = sum(w.num_bytes - w.gradient_bytes * come for w in whole.cost.weights)
    return held <= mesh.tp * mesh.pp * setting.constraints.capacity_bytes(setting.hardware)


def least_update(point: Point, priced: Priced) -> float:
    """An even share of the update, of which compute hides as much of the exchange between replicas as it can."""
    groups, weights = priced.cost.groups, priced.cost.weights
    reduction = sum(w.reduce_seconds for w in weights) - sum(g.backward_seconds for g in groups)
    gather = sum(w.gather_seconds for w in weights) - sum(g.forward_seconds for g in groups)
    update = sum(w.optimizer_seconds + w.contention_seconds for w in weights) + max(0.0, reduction) + max(0.0, gather)
    return update / point.mesh.pp


def priced_at(setting: Setting, point: Point, memory_level: int) -> Priced | None:
    """The point's prices under its fastest sharding, or a smaller one."""
    mesh, size = point.mesh, microbatch_samples(setting, point)
    return setting.costs.priced(mesh.tp, mesh.dp, point.zero, size, point.microbatches, memory_level)


def shardings_at(setting: Setting, point: Point) -> Iterator[Priced]:
    """Shardings of the point, fastest first. With tp > 1 the first is one that splits something, if there is any."""
    fastest = priced_at(setting, point, 0)
    assert fastest is not None, f"{point} has no price"
    levels = count(1)
    later = iter(lambda: priced_at(setting, point, next(levels)), None)
    if point.mesh.tp > 1 and not fastest.strategies:
        first = next((priced for priced in later if priced.strategies), None)
        yield fastest if first is None else first
    else:
        yield fastest
    yield from later


def make_cut_problem(setting: Setting, point: Point, priced: Priced) -> CutProblem:
    """The cut problem of a point. A single device is compared without the pins."""
    asked, mesh, microbatches = setting.constraints, point.mesh, point.microbatches
    schedule, chunks = point.pipeline.schedule, point.pipeline.chunks
    compared = mesh.devices != asked.devices
    in_flight = [max_in_flight(schedule, p, mesh.pp, microbatches, chunks) for p in range(mesh.pp)]
    profiles: tuple[tuple[tuple[int, ...], ...], ...] = ()
    if chunks > 1:
        if point.stages > priced.cost.loss:  # more than groups: refused, while listing what they hold takes minutes
            profiles = (((1,) * chunks,),) * mesh.pp
        else:
            profiles = tuple(in_flight_profiles(schedule, p, mesh.pp, microbatches, chunks) for p in range(mesh.pp))
        in_flight = [profiles[p][0][chunk] for chunk in range(chunks) for p in range(mesh.pp)]
    return CutProblem(
        cost=priced.cost.recomputed if asked.recompute == "all" else priced.cost,
        stages=point.stages,
        microbatches=microbatches,
        capacity_bytes=asked.capacity_bytes(setting.hardware),
        in_flight=tuple(in_flight),
        boundary=boundary_links(setting.hardware, mesh, chunks),
        balance=asked.balance,
        pins={} if compared else pinned_groups(priced.cost, setting.graph, asked.pins, point.stages),
        time_limit_seconds=asked.solver_seconds,
        tp=mesh.tp,
        dp=mesh.dp,
        recompute=asked.recompute,
        schedule=schedule,
        chunks=chunks,
        in_flight_profiles=profiles,
        peers=peers(setting, mesh),
        input_bytes=input_bytes(setting, mesh),
        reserve_bytes=setting.hardware.reserve_bytes,
        zero=point.zero,
        reduce_dtype=asked.reduce_dtype,
    )


def peers(setting: Setting, mesh: Mesh) -> frozenset[Axis]:
    """Mesh axes whose ranks reach each other's memory: on GPUs of one node that have peer access, where they may."""
    hardware = setting.hardware
    if not (setting.constraints.peer_memory and hardware.peer_access and hardware.device_type == "cuda"):
        return frozenset()
    spans: dict[Axis, int] = {"tp": mesh.tp, "dp": mesh.tp * mesh.dp, "pp": mesh.devices}
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
        best_seconds: the best step known; cuts far above it are not improved by local search.
        listed_seconds: a step below this one is of interest too, once there are cuts.
    """
    best, limit_bytes = None, setting.constraints.capacity_bytes(setting.hardware)
    if bounds.tighten(point) >= ceiling_seconds:
        return None
    for priced in shardings_at(setting, point):
        known = best.seconds if best is not None else float("inf")
        limit, found = min(ceiling_seconds, known), None
        if step_floor(setting, point, priced) < limit:
            ceiling = max(limit, min(listed_seconds, known))
            problem = make_cut_problem(setting, point, priced)
            found = cut_and_evaluate(setting, point, priced, problem, limit_bytes, NEAR_BEST * best_seconds, ceiling)
        if found is None:
            return best if known < float("inf") else None
        if best is None or found.seconds <= best.seconds:
            best = found
        if found.step is not None and not (found.problem.may_recompute and found.recomputes):
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
    near_seconds: float = float("inf"),
    ceiling_seconds: float = float("inf"),
) -> Candidate | None:
    """The point under one sharding, with the best contiguous cuts, or with a note why there are none; None where the
    ranks are busy until the ceiling, and too long for local search.

    Args:
        limit_bytes: memory of a rank, from which the capacity for which the problem is cut first may differ.
        near_seconds: cuts whose step is longer are not improved by local search.
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
    ceiling = max(near_seconds, ceiling_seconds)
    if ceiling < float("inf") and busy_seconds(setting, merged.problem, units) >= ceiling:
        return None
    stage_of = merged.expand(units)
    found = replace(uncut, stage_of=stage_of, step=step_time(setting, problem, stage_of))
    return improve(setting, found, limit_bytes) if found.seconds < near_seconds else found


def improve(setting: Setting, candidate: Candidate, limit_bytes: float) -> Candidate:
    """The candidate with its cuts moved by local search, unless they were, or there are none."""
    if candidate.stage_of is None or candidate.is_improved:
        return candidate
    merged = merge(candidate.problem)
    limit, units = None if limit_bytes == float("inf") else int(limit_bytes), merged.units(candidate.stage_of)
    if merged.problem.stages > 1:
        units = local_search(setting, replace(merged.problem, capacity_bytes=limit), units)
    stage_of = merged.expand(units)
    step = candidate.step if stage_of == candidate.stage_of else step_time(setting, candidate.problem, stage_of)
    return replace(candidate, stage_of=stage_of, step=step, is_improved=True)


def evaluate_cuts(
    setting: Setting, point: Point, priced: Priced, problem: CutProblem, limit_bytes: float = float("inf")
) -> Candidate:
    """As `cut_and_evaluate`, without a ceiling."""
    found = cut_and_evaluate(setting, point, priced, problem, limit_bytes)
    assert found is not None, "there is no ceiling to reach"
    return found


def does_not_fit(num_bytes: int) -> str:
    """Note for a candidate whose fullest rank needs that many bytes."""
    return f"does not fit: {text(num_bytes, BYTES)}"


def no_cuts_note(merged: Merged) -> str:
    """Note for a candidate without any cuts."""
    pieces = merged.problem.cost.loss
    if merged.problem.stages > pieces:
        return f"can be cut into {plural(pieces, 'piece')} at most"
    return "has no contiguous cuts"


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


def without_limit(problem: CutProblem) -> CutProblem:
    """The problem without a memory limit."""
    return replace(problem, capacity_bytes=None)

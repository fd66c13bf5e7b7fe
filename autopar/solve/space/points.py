"""Points of the search space: a mesh, a number of microbatches, a ZeRO stage, and a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from autopar.ir.mesh import Mesh
from autopar.ir.microbatches import microbatch_size
from autopar.ir.placement import Placement, placement_of
from autopar.ir.plan_parts import FIXED_CHUNKS, INTERLEAVED, SPLIT, Replicas, ScheduleName, ZeroStage
from autopar.schedule.generate import in_flight_profiles, max_in_flight, may_overlap
from autopar.solve.cuts.step_time import Decision, Setting
from autopar.solve.space.constraints import Constraints, microbatch_candidates

# More stages a rank than this cost more in transfers and in kernels that are too small than their bubble is worth: with
# 6 of them it is a sixth of 1F1B's.
MAX_CHUNKS = 6
# Of a searched schedule, whose bubble is half as long, and of how many actions: list scheduling takes 30 us for each.
MAX_SEARCHED_CHUNKS, MAX_SEARCHED_ACTIONS = 3, 3000
# Limits of activations for which schedules are searched, see `Pipeline.kept`: from those of 1F1B's first rank up to
# those with which list scheduling leaves no bubble but the first forwards of the ranks before.
KEPT = (2, 3, 4)


@dataclass(frozen=True)
class Pipeline:
    """A schedule and how many stages each rank has under it.

    Args:
        kept: under a searched schedule, activations that a rank keeps at most, in halves of those of all its stages for
            as many microbatches as there are ranks.
    """

    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    kept: int = 0

    @property
    def is_split(self) -> bool:
        """Whether backwards leave the gradients of weights for later."""
        return self.schedule in SPLIT

    def __str__(self) -> str:
        return self.schedule if self.chunks == 1 else f"{self.schedule}, {self.chunks} chunks a rank"


@dataclass(frozen=True)
class Point:
    """Point of the search space: mesh, what replicas share, microbatches of each, and schedule. ``tp_axes`` are as in
    `Mesh`."""

    pp: int
    tp: int
    replicas: Replicas
    microbatches: int
    pipeline: Pipeline = Pipeline()
    tp_axes: tuple[int, ...] = ()

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(self.pp, self.tp, self.replicas.dp, self.tp_axes)

    @property
    def stages(self) -> int:
        return self.pp * self.pipeline.chunks

    @cached_property
    def placement(self) -> Placement:
        return placement_of(self.pipeline.schedule, self.pp, self.pipeline.chunks)

    @property
    def in_flight(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """`in_flight_at` of each position."""
        return tuple(map(self.in_flight_at, range(self.pp)))

    def in_flight_at(self, position: int) -> tuple[tuple[int, ...], ...]:
        """Numbers of microbatches that a position's stages hold at once, at every moment that may be the peak.

        Error: a searched schedule divides its limit evenly among the stages of a rank.
        """
        pp, m, schedule, chunks = self.pp, self.microbatches, self.pipeline.schedule, self.pipeline.chunks
        if schedule == "searched":
            return ((min(m, -(-self.pipeline.kept * pp // 2)),) * chunks,)
        if chunks == 1:
            return ((max_in_flight(schedule, position, self.placement, m),),)
        return in_flight_profiles(schedule, position, self.placement, m)

    @property
    def is_interleaved_too(self) -> bool:
        """Whether its schedule is interleaved-overlap with actions in interleaved's order."""
        return self.pipeline.schedule == "interleaved-overlap" and not may_overlap(self.pp, self.microbatches)


def point_of(decision: Decision) -> Point:
    """Point at which a decision was found."""
    problem = decision.problem
    kept = max(KEPT[0], -(-2 * problem.in_flight[0] // problem.pp)) if problem.schedule == "searched" else 0
    pipeline = Pipeline(problem.schedule, problem.chunks, kept)
    return Point(problem.pp, problem.tp, problem.replicas, problem.microbatches, pipeline, problem.tp_axes)


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
                    if pipeline.is_split and not may_split(setting, pipeline, mesh, zero, m):
                        continue
                    for dp_shard in sharing_groups(setting, mesh) if zero else (0,):
                        replicas = Replicas(mesh.dp, zero, dp_shard)
                        point = Point(mesh.pp, mesh.tp, replicas, m, pipeline, mesh.tp_axes)
                        if setting.constraints.schedule != "auto" or not point.is_interleaved_too:
                            yield point


def may_split(setting: Setting, pipeline: Pipeline, mesh: Mesh, zero: ZeroStage, microbatches: int) -> bool:
    """Whether a schedule with split backwards is searched: with ZeRO-1 at most, with few actions unless it is
    asked for, and not if a smaller limit of activations holds all microbatches too."""
    is_short = 3 * mesh.pp * pipeline.chunks * microbatches <= MAX_SEARCHED_ACTIONS
    holds_all = pipeline.kept > KEPT[0] and (pipeline.kept - 1) * mesh.pp >= 2 * microbatches
    return zero <= 1 and not holds_all and (is_short or setting.constraints.schedule != "auto")


def sharing_groups(setting: Setting, mesh: Mesh) -> tuple[int, ...]:
    """Replicas that may divide what ZeRO says: all (0), or those of a node where replicas fill several nodes."""
    wanted, node = setting.constraints.dp_shard, setting.hardware.devices_per_node
    if wanted is not None:
        return (0,) if wanted == mesh.dp else (wanted,)
    inside = node // mesh.tp
    is_split = node % mesh.tp == 0 and 1 < inside < mesh.dp and mesh.dp % inside == 0
    return (0, inside) if is_split else (0,)


def first_points(setting: Setting, mesh: Mesh) -> list[Point]:
    """Points of a mesh without ZeRO-2 and -3, unless they are asked for: ZeRO-1 is as fast, and needs more memory."""
    return [p for p in enumerate_points(setting, mesh) if p.replicas.zero in (0, 1, setting.constraints.zero)]


def least_memory_points(setting: Setting, mesh: Mesh) -> list[Point]:
    """Points of a mesh of which one needs least memory: with fewest stages a rank, most microbatches or ZeRO."""
    points = [p for p in enumerate_points(setting, mesh) if p.replicas.dp_shard in (0, setting.constraints.dp_shard)]
    fewest = min(p.pipeline.chunks for p in points)
    points = [p for p in points if p.pipeline.chunks == fewest]
    # Slots may make a stage larger than the one before it.
    stages = sorted({p.replicas.zero for p in points}, reverse=True)[:2]
    best = [max(points, key=lambda p: (p.microbatches, p.replicas.zero))]
    best += [max((p for p in points if p.replicas.zero == zero), key=lambda p: p.microbatches) for zero in stages]
    return list(dict.fromkeys(best))


def points_with_other_schedules(setting: Setting, point: Point) -> list[Point]:
    """Points with the same mesh, microbatches and ZeRO stage under every other schedule."""
    points = enumerate_points(setting, point.mesh)
    return [p for p in points if p != point and replace(p, pipeline=point.pipeline) == point]


def neighbours(setting: Setting, point: Point) -> list[Point]:
    """Points with the same mesh and schedule: with fewer and with more microbatches, and with ZeRO-1 or without; from
    ZeRO-2 on, where replicas fill several nodes, with ZeRO-3 too, whose buckets are smaller."""
    points = [p for p in enumerate_points(setting, point.mesh) if are_alike(p, point.pipeline)]
    alike = replace(point.replicas, zero=1) if point.replicas.zero == 2 else point.replicas  # 2 is for one microbatch
    same = [p for p in points if p.replicas == alike]
    near = [p for p in same if p.microbatches < point.microbatches][-1:]
    near += [p for p in same if p.microbatches > point.microbatches][:1]
    crosses_nodes = point.mesh.dp * point.mesh.tp > setting.hardware.devices_per_node
    stages = (0, 1, 3) if crosses_nodes and point.replicas.zero >= 2 else (0, 1)
    others = [p for p in points if p.replicas.zero in stages and p.replicas != point.replicas]
    return near + [p for p in others if p.microbatches == point.microbatches]


def more_divided(setting: Setting, point: Point) -> Point | None:
    """The point with the next ZeRO stage, for a point that needs too much memory; None if none is left to try."""
    zero = point.replicas.zero
    if zero in (0, 3) or setting.constraints.zero is not None or point.pipeline.is_split:
        return None
    return replace(point, replicas=replace(point.replicas, zero=2 if zero == 1 and point.microbatches == 1 else 3))


def are_alike(point: Point, pipeline: Pipeline) -> bool:
    """Whether a point's schedule is the given one, or runs its actions in the same order."""
    other = replace(point, pipeline=pipeline)
    return point == other or (other.is_interleaved_too and point.pipeline == replace(pipeline, schedule="interleaved"))


def allowed_pipelines(asked: Constraints, mesh: Mesh) -> tuple[Pipeline, ...]:
    """The schedules to consider on a mesh, of as many stages a rank the one that needs least memory first."""
    if asked.schedule != "auto" and asked.schedule in FIXED_CHUNKS:
        return (Pipeline(asked.schedule, FIXED_CHUNKS[asked.schedule]),)
    if mesh.pp == 1:
        return (Pipeline(),)
    chunks = [asked.chunks] if asked.chunks is not None else range(1, 1 + (1 if asked.pins else MAX_CHUNKS))
    found: list[Pipeline] = []
    for n in chunks:
        if asked.schedule == "auto":
            whole: tuple[ScheduleName, ...] = INTERLEAVED if n > 1 else ("1f1b", "zb-h1")
        else:
            whole = (asked.schedule,) if asked.schedule in INTERLEAVED else ()
        if asked.schedule == "auto" and n == FIXED_CHUNKS["zb-v"]:
            found.append(Pipeline("zb-v", n))
        found += [Pipeline(schedule, n) for schedule in whole]
        if asked.schedule in ("auto", "searched") and n <= (asked.chunks or MAX_SEARCHED_CHUNKS):
            found += [Pipeline("searched", n, kept) for kept in KEPT]
    return tuple(found)


def microbatch_samples(setting: Setting, point: Point) -> int:
    """Samples of the point's largest microbatch."""
    return microbatch_size(setting.constraints.batch // point.mesh.dp, point.microbatches)


def num_microbatches(setting: Setting, point: Point) -> float:
    """Microbatches of the point; a smaller last one counts as its share of a full one."""
    return setting.constraints.batch / point.mesh.dp / microbatch_samples(setting, point)

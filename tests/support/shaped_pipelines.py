"""Pipelines whose stages have tensor-parallel ranks and replicas of their own: their cuts and simulated steps.

Error: optimistic. Memory is not limited. Messages are free, or those of a boundary are spread evenly over the ranks of
its smaller side. Ports between nodes have no limit beyond that of each message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, permutations
from typing import Any

import numpy as np

from autopar.ir.hardware import Hardware, Link
from autopar.ir.mesh import Mesh
from autopar.ir.placement import V_SHAPED
from autopar.ir.plan_parts import ONE_REPLICA, ZeroStage
from autopar.schedule.simulate import Pipelined, scheduled_seconds
from autopar.solve.cuts.problem import SPLIT_OVERHEAD, CutProblem, Priced, slowest_count
from autopar.solve.cuts.step_time import Setting, list_orders, messages
from autopar.solve.space.candidates import make_cut_problem
from autopar.solve.space.constraints import TYPICAL_BYTES, microbatch_candidates
from autopar.solve.space.points import Pipeline, Point, allowed_pipelines, may_split
from support.shape_prices import Floats, Ints, Prices, Shape, shape_prices, update_seconds, whole_model

STAGES = (2, 3, 4)  # ranks of a pipeline
# Where messages take time, cuts are also made where only few bytes cross: shares of the units that they may be before.
FEW_BYTES = (1.0, 0.5, 0.25, 0.12)
HALVINGS = 24  # of the interval in which the slowest stage's time lies
# Pipelines that are simulated of each schedule, by their estimates, and moved of each number of stages.
SIMULATED, MOVED = 4, 2
# Largest ratio to the best step, of an estimate that is simulated and of a step that is moved.
FAR, NEAR = 1.4, 1.15
STEPS = (1, -1, 2, -2, 4, -4, 8, -8, 16, -16)  # units by which a cut moves
MAX_MOVES = 200  # simulated for a pipeline


@dataclass(frozen=True)
class ShapedPipeline:
    """A pipeline with a shape for each position.

    Args:
        microbatches: of the whole batch.
        cuts: first unit of each stage, and the number of units (see `Prices`); stage s is at position s % pp.
    """

    shapes: tuple[Shape, ...]
    microbatches: int
    pipeline: Pipeline
    cuts: tuple[int, ...]

    @property
    def are_equal(self) -> bool:
        """Whether all stages have one shape."""
        return len(set(self.shapes)) == 1

    @property
    def stage_of(self) -> tuple[int, ...]:
        """Stage of each unit."""
        sizes = np.diff(self.cuts)
        return tuple(np.repeat(np.arange(len(sizes)), sizes).tolist())

    def __str__(self) -> str:
        chunks = f", v {self.pipeline.chunks}" if self.pipeline.chunks > 1 else ""
        return f"{' + '.join(map(str, self.shapes))}{chunks}, m {self.microbatches}, {self.pipeline.schedule}"


Estimated = tuple[float, ShapedPipeline]


@dataclass(frozen=True)
class ShapeSearch:
    """Search for the best pipelines with a shape for each stage.

    Args:
        has_messages: whether messages between stages take time.
    """

    setting: Setting
    has_messages: bool
    known: dict[Any, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return self.setting.constraints.batch

    @property
    def hardware(self) -> Hardware:
        return self.setting.hardware

    @cached_property
    def microbatches(self) -> tuple[int, ...]:
        """Numbers of microbatches that divide the batch."""
        return tuple(m for m in microbatch_candidates(self.setting.constraints, 1) if self.batch % m == 0)

    def best(self, are_equal: bool, starts: Iterable[ShapedPipeline] = ()) -> tuple[ShapedPipeline, float]:
        """The pipeline with the shortest step, and its seconds.

        Args:
            are_equal: whether all stages have one shape, or some differ.
            starts: pipelines to move too.
        """
        best, timed = float("inf"), dict[tuple[int, int], list[tuple[float, ShapedPipeline]]]()
        for estimate, own in sorted(self.estimated(are_equal), key=lambda pair: pair[0]):
            if estimate > FAR * best:
                break
            seconds = self.step_seconds(own)
            timed.setdefault((len(own.shapes), own.pipeline.chunks), []).append((seconds, own))
            best = min(best, seconds)
        found = [pair for pairs in timed.values() for pair in sorted(pairs, key=lambda pair: pair[0])[:MOVED]]
        found += [(self.step_seconds(own), own) for own in starts]
        moved = [self.moved(*pair, are_equal) for pair in found if pair[0] <= NEAR * best]
        seconds, own = min((pair for pair in moved if pair[1].are_equal == are_equal), key=lambda pair: pair[0])
        return own, seconds

    # -- candidates ------------------------------------------------------------------------------------------------

    def estimated(self, are_equal: bool) -> Iterator[Estimated]:
        """For each number of stages and microbatches, and each schedule, the best pipelines by their estimates."""
        for pp in STAGES:
            for m in self.microbatches:
                prices = self.prices(m)
                index = np.array([*self.combinations(prices.shapes, pp, are_equal)], dtype=np.int64)
                if len(index):
                    for pipeline in self.pipelines(pp, m):
                        yield from self.of_schedule(prices, pipeline, m, index)

    def of_schedule(self, prices: Prices, pipeline: Pipeline, m: int, index: Ints) -> Iterator[Estimated]:
        """As `estimated`, for one schedule and the shapes of every position [pipeline, position]."""
        for share in FEW_BYTES if self.has_messages else (1.0,):
            key = "cuts", m, pipeline.chunks, share, index.shape, index.tobytes()
            if key not in self.known:
                self.known[key] = balanced(prices, np.tile(index, (1, pipeline.chunks)), share)
            rows, cuts = self.known[key]
            if len(rows):
                seconds = self.estimates(prices, pipeline, m, index[rows], cuts)
                for i in np.argsort(seconds)[:SIMULATED]:
                    shapes = tuple(prices.shapes[k] for k in index[rows[i]])
                    yield float(seconds[i]), ShapedPipeline(shapes, m, pipeline, tuple(cuts[i].tolist()))

    def pipelines(self, pp: int, microbatches: int) -> Collection[Pipeline]:
        """Schedules that the planner considers, but for ZB-V: of those with equal orders the first, of searched ones
        with as many stages a rank the one that may keep most activations."""
        mesh, found = Mesh(pp), dict[tuple[str, int], Pipeline]()
        for pipeline in allowed_pipelines(self.setting.constraints, mesh):
            point = Point(pp, 1, ONE_REPLICA, microbatches, pipeline)
            if pipeline.schedule in V_SHAPED:  # whose stages are not at s % pp
                continue
            if pipeline.is_split and not may_split(self.setting, pipeline, mesh, 0, microbatches):
                continue
            if not point.is_interleaved_too:
                found[pipeline.schedule, pipeline.chunks] = pipeline
        return found.values()

    def combinations(self, shapes: Sequence[Shape], pp: int, are_equal: bool) -> Iterator[tuple[int, ...]]:
        """Numbers of the shapes of every position, with all devices in use."""
        for own in filled([shape.devices for shape in shapes], pp, self.setting.constraints.devices):
            if (len(set(own)) == 1) == are_equal:
                yield own

    def estimates(self, prices: Prices, pipeline: Pipeline, m: int, index: Ints, cuts: Ints) -> Floats:
        """Estimates of steps: as if all stages took as long as the slowest, then the longest update."""
        v, pp = pipeline.chunks, index.shape[1]
        passes = prices.at(prices.passes, np.tile(index, (1, v)), cuts)
        seconds = passes[..., 0] + passes[..., 1] * (1 + SPLIT_OVERHEAD * pipeline.is_split)
        slowest, total = seconds.max(axis=1), seconds.sum(axis=1)
        if pipeline.is_split:
            step = np.maximum((v * m + (pp - 1) / 3) * slowest, total / 2)
        else:
            step = slowest_count(m, pp, v) * slowest + total
        return step + self.updates(prices, pipeline, index, cuts) + self.fill_seconds(prices, index, cuts)

    def fill_seconds(self, prices: Prices, index: Ints, cuts: Ints) -> Floats | float:
        """Estimate of the messages of the first microbatch, both ways, over links that they do not share."""
        if not self.has_messages:
            return 0.0
        devices = np.array([shape.devices for shape in prices.shapes])[np.tile(index, cuts.shape[1])]
        stages = cuts.shape[1] - 1
        width = np.minimum(devices[:, : stages - 1], devices[:, 1:stages])
        link = self.hardware.message_link(0, 1)
        return 2 * (prices.crossing[cuts[:, 1:-1]] / width / link.bytes_per_second + link.latency_seconds).sum(axis=1)

    def updates(
        self, prices: Prices, pipeline: Pipeline, index: Ints, cuts: Ints, zero: ZeroStage | None = None
    ) -> Floats:
        """Seconds of `update_seconds` at the position where they are most.

        Args:
            zero: as in `step_seconds`.
        """
        v, pp = pipeline.chunks, index.shape[1]
        stages = np.tile(index, (1, v))

        def of_ranks(sums: Floats) -> Floats:
            found = prices.at(sums, stages, cuts)
            return found.reshape(len(index), v, pp, *found.shape[2:]).sum(axis=1)

        seconds = update_seconds(of_ranks(prices.passes), of_ranks(prices.updates), pipeline.is_split)
        return (seconds.min(axis=2) if zero is None else seconds[..., zero]).max(axis=1)

    def prices(self, microbatches: int) -> Prices:
        """Prices of every shape that has enough samples of a microbatch."""
        key = "prices", microbatches
        if key not in self.known:
            self.known[key] = shape_prices(self.setting, microbatches)
        return self.known[key]

    # -- steps -----------------------------------------------------------------------------------------------------

    def step_seconds(self, own: ShapedPipeline, limit: float = float("inf"), zero: ZeroStage | None = None) -> float:
        """The simulated pipeline, then the longest update; or a lower bound of both that is no less than the limit.

        Args:
            zero: ZeRO stage of all stages; None for the faster one of each.
        """
        prices, problem = self.prices(own.microbatches), self.problem(own)
        index, cuts = np.array([[prices.shapes.index(shape) for shape in own.shapes]]), np.array([own.cuts])
        forward, backward, wgrad = prices.at(prices.passes, np.tile(index, (1, own.pipeline.chunks)), cuts)[0].T
        backward = backward * (1 + SPLIT_OVERHEAD * own.pipeline.is_split)
        durations = forward.tolist(), backward.tolist(), wgrad.tolist()
        update = float(self.updates(prices, own.pipeline, index, cuts, zero)[0])
        busy = own.microbatches * (forward + backward).reshape(-1, len(own.shapes)).sum(axis=0).max()
        if busy + update >= limit:
            return busy + update
        transfers = self.transfers(own, problem) if self.has_messages else {}
        is_searched = own.pipeline.schedule == "searched"
        orders = list_orders(problem, *durations, transfers) if is_searched else (None,)
        pipelined = (Pipelined(problem.schedule, problem.placement, order) for order in orders)
        sizes = [1.0] * own.microbatches
        simulated = min(scheduled_seconds(way, *durations[:2], transfers, sizes, durations[2]) for way in pipelined)
        return simulated + update

    def problem(self, own: ShapedPipeline) -> CutProblem:
        """The cut problem of a pipeline of single devices with the same schedule."""
        key = len(own.shapes), own.microbatches, own.pipeline
        if key not in self.known:
            point = Point(len(own.shapes), 1, ONE_REPLICA, own.microbatches, own.pipeline)
            self.known[key] = make_cut_problem(self.setting, point, Priced(whole_model(self.setting, own.microbatches)))
        return self.known[key]

    def transfers(self, own: ShapedPipeline, problem: CutProblem) -> Mapping[tuple[int, int], float]:
        """Seconds of a microbatch's messages by (source stage, destination stage)."""
        pp, found = problem.pp, dict[tuple[int, int], float]()
        of_units = own.stage_of
        stage_of = [of_units[unit] for unit in self.prices(own.microbatches).unit_of]
        for (src, dst), num_bytes in messages(problem, stage_of).items():
            ends = src % pp, dst % pp
            width = min(own.shapes[end].devices for end in ends)
            found[src, dst] = self.hop(own, *ends).seconds(num_bytes / width) if ends[0] != ends[1] else 0.0
        return found

    def hop(self, own: ShapedPipeline, src: int, dst: int) -> Link:
        """Link of the messages between two positions."""
        key = tuple(shape.devices for shape in own.shapes), src, dst, own.pipeline.chunks > 1
        if key not in self.known:
            self.known[key] = slowest_hop(self.hardware, *key)
        return self.known[key]

    def moved(self, seconds: float, own: ShapedPipeline, are_equal: bool) -> tuple[float, ShapedPipeline]:
        """The pipeline with its cuts and devices moved as long as its step gets shorter, and its seconds."""
        tried, improved, shapes = 0, True, set(self.prices(own.microbatches).shapes)
        while improved and tried < MAX_MOVES:
            improved = False
            for other in [*moves(own), *(() if are_equal else device_moves(own))]:
                if shapes.issuperset(other.shapes):
                    tried += 1
                    if (shorter := self.step_seconds(other, seconds)) < seconds:
                        own, seconds, improved = other, shorter, True
        return seconds, own


def moves(own: ShapedPipeline) -> Iterator[ShapedPipeline]:
    """The pipeline with one cut moved, with a unit on every stage."""
    for s in range(1, len(own.cuts) - 1):
        for step in STEPS:
            at = own.cuts[s] + step
            if own.cuts[s - 1] < at < own.cuts[s + 1]:
                yield replace(own, cuts=(*own.cuts[:s], at, *own.cuts[s + 1 :]))


def device_moves(own: ShapedPipeline) -> Iterator[ShapedPipeline]:
    """The pipeline with one replica of a single device moved to another position."""
    for src, dst in permutations(range(len(own.shapes)), 2):
        dps = [shape.dp + (p == dst) - (p == src) for p, shape in enumerate(own.shapes)]
        if own.shapes[src].tp == own.shapes[dst].tp == 1 and min(dps):
            yield replace(own, shapes=tuple(Shape(s.tp, dp) for s, dp in zip(own.shapes, dps)))


def filled(sizes: Sequence[int], places: int, total: int) -> Iterator[tuple[int, ...]]:
    """Numbers of the sizes, one for each place, that sum to the total."""
    for number, size in enumerate(sizes):
        if places == 1 and size == total:
            yield (number,)
        elif places > 1 and size < total:
            for rest in filled(sizes, places - 1, total - size):
                yield (number, *rest)


def balanced(prices: Prices, stages: Ints, share: float = 1.0) -> tuple[Ints, Ints]:
    """Cuts with the least time of the slowest stage, for pipelines with a unit on every stage; numbers of these
    pipelines, and their cuts.

    Args:
        stages: shape of each stage [pipeline, stage].
        share: of the units, those with the fewest bytes before them, before which there may be cuts.
    """
    allowed = np.flatnonzero(prices.crossing <= np.quantile(prices.crossing, share))
    ends = np.unique([*allowed, prices.passes.shape[-1] - 1])
    until = (prices.passes[:, 0] + prices.passes[:, 1])[:, ends]
    last, offset = until.shape[1] - 1, 3 * until.max()
    flat = (until + offset * np.arange(len(until))[:, None]).ravel()

    def cuts_under(limit: Floats) -> Ints:
        at = np.zeros(len(stages), dtype=np.int64)
        found = [at]
        for index in stages.T:
            reached = until[index, at] + limit + offset * index
            at = np.searchsorted(flat, reached, side="right") - 1 - index * (last + 1)
            found.append(at)
        return np.stack(found, axis=1)

    low, high = np.zeros(len(stages)), until[stages].max(axis=(1, 2))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        fits = cuts_under(middle)[:, -1] == last
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    cuts = cuts_under(high)
    rows = np.flatnonzero((np.diff(cuts, axis=1) > 0).all(axis=1) & (cuts[:, -1] == last))
    return rows, ends[cuts[rows]]


def slowest_hop(hardware: Hardware, devices: Sequence[int], src: int, dst: int, wraps: bool) -> Link:
    """As `autopar.solve.space.constraints.hop_link`, for positions of so many devices each; ranks of the smaller side
    send to, or receive from, ranks at equal distances on the other side."""
    per_node, pp = hardware.devices_per_node, len(devices)
    first = [*accumulate(devices, initial=0)]

    def pairs(p: int, q: int) -> list[tuple[int, int]]:
        width = min(devices[p], devices[q])
        return [(first[p] + i * devices[p] // width, first[q] + i * devices[q] // width) for i in range(width)]

    def along(steps: Iterable[int]) -> list[tuple[int, int]]:
        return [pair for step in steps for p in range(pp) if 0 <= p + step < pp for pair in pairs(p, p + step)]

    def node(rank: int) -> int:
        return rank // per_node

    steps = {1, abs(dst - src), *((pp - 1,) if wraps else ())}
    leaving = {(node(a), a) for pair in along({*steps, *(-s for s in steps)}) for a, b in [pair] if node(a) != node(b)}
    inside = [node(a) for a, b in along([dst - src]) if node(a) == node(b)]
    links = [
        hardware.message_link(
            a, b, inside.count(node(a)) if node(a) == node(b) else sum(n == node(a) for n, _ in leaving)
        )
        for a, b in pairs(src, dst)
    ]
    return max(links, key=lambda link: link.seconds(TYPICAL_BYTES))

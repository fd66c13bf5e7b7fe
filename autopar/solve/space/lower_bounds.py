"""Lower bounds and estimates of the step at a point, before anything is cut."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

import numpy as np

from autopar.ir.cost_graph import CostGraph
from autopar.ir.tensor_axes import TensorAxes
from autopar.schedule.generate import microbatch_groups
from autopar.solve.cuts.dynamic_programme import ROUNDING
from autopar.solve.cuts.evaluate import one_way_seconds
from autopar.solve.cuts.problem import Priced, slowest_count
from autopar.solve.cuts.step_time import Setting
from autopar.solve.space.constraints import hop_link
from autopar.solve.space.points import KEPT, Point, microbatch_samples, num_microbatches

# Least share that a simulated step is taken to have of one with equal stages, whose ends shorter stages shorten. Of 346
# candidates of six models with cuts by local search none had less than 96.8 %; of those under interleaved-overlap
# 96.0 %, and of those with split backwards that keep no more activations than 1F1B 101.7 %.
LEAST_OF_EQUAL, LEAST_WITH_OVERLAP, LEAST_SPLIT = 0.95, 0.9, 0.98

# Least share that a step has of `pipeline_floor` with fewer microbatches than twice the stages.
LEAST_OF_FEW = 0.93

# Least share of a microbatch's time that its forwards and gradients of inputs take, on one stage after the other.
LEAST_WITHOUT_WGRAD = 0.5

# Ranks of a pipeline from which slow stages are not taken to meet fast ones on every rank: no candidate on so many was
# faster than if all stages took as long as the slowest one must.
MANY_RANKS = 16


@dataclass(frozen=True)
class LowerBounds:
    """Lower bounds of the step at every point.

    ``strategy_seconds`` collects bounds of one microbatch by `Costs.bound_seconds`, by tensor axes and samples, for
    every mesh.
    ``estimates`` collects the steps of points that were priced. Points slower than the best step by at most the share
    ``slack`` are still evaluated.
    """

    setting: Setting
    slack: float = 0.0
    strategy_seconds: dict[tuple[TensorAxes, int], float] = field(default_factory=dict)
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
        axes, size = point.mesh.tensor_axes, microbatch_samples(self.setting, point)
        return self.strategy_seconds.get((axes, size)) or self.setting.costs.floor_seconds(axes, size)

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
        axes, size = key = point.mesh.tensor_axes, microbatch_samples(self.setting, point)
        self.strategy_seconds[key] = self.setting.costs.bound_seconds(axes, size)
        return self.seconds(point)


def pipeline_floor(setting: Setting, point: Point, total_seconds: float, largest_seconds: float) -> float:
    """A lower bound of the pipeline's time, from that of one microbatch on all stages and in the largest group.

    Error: of the solver's model, (m − 1) · max t + Σ t; where an early stage is the slowest one, later ones hide in its
        shadow and a simulated step can be shorter (`one_f_one_b_seconds`). With several stages a rank there is none:
        a rank is busy for an even share at least, and runs the largest group once per microbatch.
    """
    microbatches = num_microbatches(setting, point)
    if point.pipeline.is_split:
        passes = max(microbatches / point.mesh.pp, LEAST_WITHOUT_WGRAD)
        return max(passes * total_seconds, microbatches * largest_seconds)
    if point.pipeline.chunks > 1:
        return max(max(microbatches / point.mesh.pp, 1) * total_seconds, microbatches * largest_seconds)
    return (microbatches - 1) * max(total_seconds / point.stages, largest_seconds) + total_seconds


def step_floor(setting: Setting, point: Point, priced: Priced) -> float:
    """A lower bound of the step once the point is priced: even shares of compute, update and memory traffic, and no
    less than `LEAST_OF_EQUAL` of a pipeline with equal stages and the smallest messages. On `MANY_RANKS` all of these
    stages take as long as the slowest one must."""
    total, largest = priced.seconds, max(group.seconds for group in priced.cost.groups)
    slowest = fastest_slowest_stage(priced.cost, point.stages) if point.mesh.pp >= MANY_RANKS else total / point.stages
    even = pipeline_floor(setting, point, total, largest)
    equal = equal_stages_seconds(setting, point, slowest, total) + message_seconds(setting, point, priced)
    share = LEAST_OF_EQUAL
    if point.pipeline.schedule == "interleaved-overlap":
        share = LEAST_WITH_OVERLAP
    elif point.pipeline.is_split and point.pipeline.kept <= KEPT[0]:
        share = LEAST_SPLIT
    return max(even, share * equal) + least_update(point, priced)


def equal_stages_seconds(setting: Setting, point: Point, slowest_seconds: float, total_seconds: float) -> float:
    """Seconds of a pipeline whose stages all count as the slowest one, with free transfers, from that one's seconds and
    those of all stages for one microbatch."""
    microbatches, mesh, pipeline = num_microbatches(setting, point), point.mesh, point.pipeline
    if pipeline.is_split:  # busy, after a third of a stage on each rank before
        busy = (pipeline.chunks * microbatches + (mesh.pp - 1) / 3) * slowest_seconds
        return max(busy, LEAST_WITHOUT_WGRAD * total_seconds)
    return slowest_count(microbatches, mesh.pp, pipeline.chunks) * slowest_seconds + total_seconds


def message_seconds(setting: Setting, point: Point, priced: Priced) -> float:
    """Seconds for which a rank of a pipeline with equal stages waits for messages, if these are the smallest that cuts
    can have.

    The last rank waits for those before it and, unless gradients of weights fill that time, the first one for those
    after it. Under interleaved 1F1B whose groups have as many microbatches as there are ranks, a message also passes
    all ranks before each further chunk, both ways.
    """
    mesh, pipeline = point.mesh, point.pipeline
    if mesh.pp == 1:
        return 0.0
    fills = pipeline.schedule == "interleaved" and len(microbatch_groups(mesh.pp, point.microbatches)[0]) == mesh.pp
    hops = mesh.pp - 1 + (pipeline.chunks - 1) * mesh.pp * fills
    # Of all links it is the fastest: the first two stages are on one node where any two are.
    link = priced.cost.remember(
        ("first hop", mesh, point.placement), lambda: hop_link(setting.hardware, mesh, 0, 1, point.placement)
    )
    forward, backward = smallest_messages(priced.cost)
    ways = (forward,) if pipeline.is_split else (forward, backward)
    return sum(one_way_seconds(num_bytes, link) for way in ways for num_bytes in way[:hops])


def smallest_messages(cost: CostGraph) -> tuple[list[int], list[int]]:
    """Bytes that pass each cut between groups before the loss, forward and backward, the smallest first."""

    def made() -> tuple[list[int], list[int]]:
        forward, backward = np.zeros((2, len(cost.groups) + 1), dtype=np.int64)
        for edge in cost.edges:
            crossed = slice(edge.producer + 1, max(edge.consumers) + 1)
            forward[crossed] += edge.num_bytes
            backward[crossed] += edge.num_bytes * edge.requires_grad
        return sorted(forward[1 : cost.loss].tolist()), sorted(backward[1 : cost.loss].tolist())

    return cost.remember_for(("edges",), "smallest messages", made)


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
    pipeline += message_seconds(setting, point, priced)
    return pipeline + least_update(point, priced) + recomputation_estimate(setting, point, priced)


def recomputation_estimate(setting: Setting, point: Point, priced: Priced) -> float:
    """Seconds of recomputation with which the first of equal stages fits, which holds most; infinite where it does not
    fit."""
    asked, groups, pp = setting.constraints, priced.cost.groups, point.mesh.pp
    if point.stages > priced.cost.loss:
        return float("inf")
    held = sum(point.in_flight_at(0)[0]) / point.stages
    kept = held * sum(min(g.saved_bytes, g.kept_bytes) for g in groups)
    saved = held * (sum(g.saved_bytes for g in groups) + sum(a.num_bytes for a in priced.cost.saved))
    room = asked.capacity_bytes(setting.hardware) - sum(w.num_bytes for w in priced.cost.weights) / pp
    if room < (saved if asked.recompute == "none" else kept):
        return float("inf")
    again = 1.0 if asked.recompute == "all" else max(0.0, saved - room) / max(saved - kept, 1.0)
    return min(1.0, again) * num_microbatches(setting, point) * sum(g.forward_seconds for g in groups) / pp


def least_update(point: Point, priced: Priced) -> float:
    """An even share of the update, of which compute hides as much of the exchange between replicas as it can."""
    groups, weights = priced.cost.groups, priced.cost.weights
    reduction = sum(w.reduce_seconds for w in weights) - sum(g.backward_seconds for g in groups)
    gather = sum(w.gather_seconds for w in weights) - sum(g.forward_seconds for g in groups)
    update = sum(w.optimizer_seconds + w.contention_seconds for w in weights) + max(0.0, reduction) + max(0.0, gather)
    return update / point.mesh.pp


def weights_fit(setting: Setting, point: Point) -> bool:
    """Whether an even share of the weights fits, if all are sharded."""
    mesh, size = point.mesh, microbatch_samples(setting, point)
    whole = setting.costs.priced((), point.replicas, size, point.microbatches, 0)
    assert whole is not None, f"{point} has no price"
    come = mesh.pp == mesh.dp == 1  # gradients may be allocated by the last backward
    held = sum(w.num_bytes - w.gradient_bytes * come for w in whole.cost.weights)
    return held <= mesh.tp * mesh.pp * setting.constraints.capacity_bytes(setting.hardware)


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


def priced_at(setting: Setting, point: Point, memory_level: int) -> Priced | None:
    """The point's prices under its fastest sharding, or a smaller one."""
    mesh, size = point.mesh, microbatch_samples(setting, point)
    return setting.costs.priced(mesh.tensor_axes, point.replicas, size, point.microbatches, memory_level)

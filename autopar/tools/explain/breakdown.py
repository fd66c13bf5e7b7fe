"""Seconds of a plan's step by activity at each pipeline position, from the numbers in its file alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from autopar.ir.microbatches import microbatch_factors
from autopar.ir.plan import Plan
from autopar.schedule.simulate import Pipelined, scheduled_seconds
from autopar.solve.result.step_breakdown import StepBreakdown, mean

BUFFERS = "buffers"  # inputs and peer-access buffers: on GPUs only


@dataclass(frozen=True)
class PositionMemory:
    """A rank's predicted peak and its parts, byte.

    ``weight_bytes`` includes gradients and optimizer state, ``in_flight_bytes`` are the activations of microbatches in
    flight, ``transient_bytes`` the working set. ``spare_bytes`` is negative if the peak does not fit. Parts are None in
    plans written by hand.
    """

    peak_bytes: int
    capacity_bytes: int
    spare_bytes: int
    weight_bytes: int | None = None
    in_flight_bytes: int | None = None
    transient_bytes: int | None = None
    buffer_bytes: int = 0

    @property
    def share(self) -> float:
        """Peak as a share of the capacity."""
        return self.peak_bytes / self.capacity_bytes if self.capacity_bytes else 0.0

    @property
    def by_name(self) -> Mapping[str, int]:
        """Bytes by printed name; empty if the parts are unknown."""
        if self.weight_bytes is None or self.in_flight_bytes is None or self.transient_bytes is None:
            return {}
        return {
            "weights + state": self.weight_bytes,
            "activations": self.in_flight_bytes,
            "transient": self.transient_bytes,
            BUFFERS: self.buffer_bytes,
        }

    @property
    def largest(self) -> str:
        """Name of the largest part; empty if the parts are unknown."""
        return max(self.by_name, key=self.by_name.__getitem__, default="")


def memory_of(plan: Plan, position: int) -> PositionMemory:
    """Memory of the fullest rank at a position."""
    peak = max(plan.prediction.peak_bytes[rank] for rank in plan.mesh.ranks(position))
    capacity = plan.hardware.memory_bytes
    memories = [m for s in plan.placement.stages(position) if (m := plan.stages[s].memory) is not None]
    if len(memories) < plan.chunks:
        return PositionMemory(peak, capacity, capacity - peak)
    weights, transient = sum(m.weight_bytes for m in memories), sum(m.transient_bytes for m in memories)
    buffers = sum(m.buffer_bytes for m in memories)
    in_flight = max(0, peak - weights - transient - buffers)
    return PositionMemory(peak, capacity, capacity - peak, weights, in_flight, transient, buffers)


@dataclass(frozen=True)
class Pipeline:
    """Everything that determines the duration of a plan's pipeline.

    ``forward_seconds``, ``backward_seconds`` and ``wgrad_seconds`` are per stage and microbatch, ``transfers`` are
    seconds by (source stage, destination stage), and ``sizes`` are microbatch sizes relative to the largest.
    ``port_seconds`` is how long it takes at least by the ports of nodes.
    """

    pipelined: Pipelined
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    transfers: Mapping[tuple[int, int], float]
    sizes: tuple[float, ...]
    port_seconds: float
    wgrad_seconds: tuple[float, ...]

    @staticmethod
    def of(plan: Plan) -> Pipeline:
        """Pipeline of a plan."""
        return Pipeline(
            Pipelined(plan.schedule, plan.placement, plan.order),
            tuple(s.forward_seconds for s in plan.stages),
            tuple(s.backward_seconds for s in plan.stages),
            plan.transfer_seconds,
            microbatch_factors(plan.batch // plan.mesh.dp, plan.microbatches),
            plan.prediction.port_seconds,
            tuple(s.wgrad_seconds for s in plan.stages),
        )

    @property
    def seconds(self) -> float:
        """Seconds from the first forward to the end of the last backward."""
        played = scheduled_seconds(
            self.pipelined,
            self.forward_seconds,
            self.backward_seconds,
            self.transfers,
            self.sizes,
            self.wgrad_seconds,
        )
        return max(played, self.port_seconds)

    def without(self, pairs: Collection[tuple[int, int]]) -> Pipeline:
        """Copy of the pipeline in which the transfers between some pairs of stages take no time.

        Error: ports are as long in use while other transfers are left.
        """
        free = {pair: 0.0 if pair in pairs else seconds for pair, seconds in self.transfers.items()}
        return replace(self, transfers=free, port_seconds=self.port_seconds if any(free.values()) else 0.0)


@dataclass(frozen=True)
class Position:
    """The ranks at one position of the pipeline: their stages, their step by activity, their memory."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    spent: StepBreakdown
    memory: PositionMemory


@dataclass(frozen=True)
class Breakdown:
    """A step by position. ``spent`` is the mean over positions; each breakdown sums to ``step_seconds``."""

    step_seconds: float
    spent: StepBreakdown
    positions: tuple[Position, ...]


def breakdown_of(plan: Plan) -> Breakdown:
    """Breakdown of the step at every position.

    Transfer time is the time that free transfers would save, equal at every position. A rank's other waiting is bubble.
    At the end of the step a position has its own optimizer and up to the plan's exposed reduction. The remaining time
    until the last rank ends is bubble too.

    Error: the file has no exposed reduction per position. Where a position's exposed reduction is shorter than the
        plan's, the difference counts as reduction instead of bubble.
    """
    pipeline = Pipeline.of(plan)
    seconds, free = pipeline.seconds, pipeline.without(pipeline.transfers.keys()).seconds
    parts = [spent_at(plan, pipeline, position, seconds, free) for position in range(plan.mesh.pp)]
    positions = tuple(
        Position(
            plan.mesh.ranks(position),
            plan.placement.stages(position),
            spent,
            memory_of(plan, position),
        )
        for position, spent in enumerate(parts)
    )
    prediction = plan.prediction
    return Breakdown(seconds + prediction.reduce_seconds + prediction.optimizer_seconds, mean(parts), positions)


def spent_at(plan: Plan, pipeline: Pipeline, position: int, seconds: float, free_seconds: float) -> StepBreakdown:
    """Step by activity of the ranks at a position.

    Args:
        seconds: duration of the pipeline.
        free_seconds: duration of the pipeline with free transfers.
    """
    stages, count = [plan.stages[s] for s in plan.placement.stages(position)], sum(pipeline.sizes)
    busy = count * sum(s.forward_seconds + s.backward_seconds for s in stages)
    collectives = min(busy, count * sum(s.collective_seconds for s in stages))
    again = min(busy - collectives, count * sum(s.recompute_seconds for s in stages))
    end = plan.prediction.reduce_seconds + plan.prediction.optimizer_seconds
    optimizer = min(end, sum(s.optimizer_seconds for s in stages))
    reduction = min(end - optimizer, plan.prediction.reduce_seconds)
    return StepBreakdown(
        compute_seconds=busy - collectives - again,
        recompute_seconds=again,
        collective_seconds=collectives,
        transfer_seconds=seconds - free_seconds,
        bubble_seconds=free_seconds - busy + (end - optimizer - reduction),
        reduce_seconds=reduction,
        optimizer_seconds=optimizer,
    )

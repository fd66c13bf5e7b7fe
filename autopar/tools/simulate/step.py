"""Simulated training step of a plan, under the plan's schedule or another one that its stages allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from autopar.errors import UsageError
from autopar.ir.microbatches import microbatch_factors
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import INTERLEAVED, Message, ScheduleName, StageMemory
from autopar.ir.table import ranks_text
from autopar.ir.units import plural
from autopar.schedule.actions import Action
from autopar.schedule.generate import SCHEDULES, generate
from autopar.schedule.simulate import simulate
from autopar.schedule.timeline import Span, Timeline


@dataclass(frozen=True)
class MemoryCurve:
    """A step function with the value ``num_bytes[i]`` from ``seconds[i]`` on.

    Times never decrease. Two are equal where an action takes no time.
    """

    seconds: tuple[float, ...]
    num_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.num_bytes)


def memory_curve(spans: Sequence[Span], memory: Mapping[int, StageMemory]) -> MemoryCurve:
    """Memory of a rank over a step.

    Weights and buffers of its stages are always allocated. A microbatch's activations are allocated from the start of
    its forward to the end of its backward, a stage's working set while one of its actions runs.

    Args:
        spans: the rank's actions in the order in which they run.
        memory: bytes of each of the rank's stages, by stage.
    Error: the error of the plan's bytes. A smaller last microbatch counts as a full one, as in the plan's peak.
    """
    held = sum(stage.weight_bytes + stage.buffer_bytes for stage in memory.values())
    points, ended = [(0.0, held)], 0.0
    for span in spans:
        stage = memory[span.action.chunk]
        if span.start_seconds == ended:
            points.pop()  # one action starts when the other ends: no value between them
        if span.action.kind == "F":
            held += stage.microbatch_bytes
        points.append((span.start_seconds, held + stage.transient_bytes))
        if span.action.ends_backward:
            held -= stage.microbatch_bytes
        ended = span.end_seconds
        points.append((ended, held))
    return MemoryCurve(tuple(seconds for seconds, _ in points), tuple(num_bytes for _, num_bytes in points))


@dataclass(frozen=True)
class Transfer:
    """A message from an action to an action on another rank; it starts when the sending action ends."""

    src: Action
    dst: Action
    num_bytes: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Position:
    """A position in the pipeline and its tp × dp ranks, which all do the same.

    Seconds are totals of the whole step. ``compute_seconds`` excludes ``collective_seconds``, the tensor-parallel
    collectives. ``reduce_seconds`` and ``optimizer_seconds`` follow the pipeline. ``memory`` is None if the plan has no
    memory figures of its stages.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    spans: tuple[Span, ...]
    compute_seconds: float
    collective_seconds: float
    reduce_seconds: float
    optimizer_seconds: float
    memory: MemoryCurve | None

    @property
    def name(self) -> str:
        """The ranks as text: ``rank 3``, ``ranks 0–511``."""
        return f"{'rank' if len(self.ranks) == 1 else 'ranks'} {ranks_text(self.ranks)}"

    @property
    def busy_seconds(self) -> float:
        return self.compute_seconds + self.collective_seconds + self.reduce_seconds + self.optimizer_seconds


@dataclass(frozen=True)
class SimulatedStep:
    """One step: the pipeline, then exposed gradient reduction and optimizer, which take ``end_seconds``.

    The rows of ``timeline`` and the ranks of its spans are pipeline positions.
    """

    plan: Plan
    schedule: ScheduleName
    timeline: Timeline
    positions: tuple[Position, ...]
    transfers: tuple[Transfer, ...]
    end_seconds: float

    @property
    def pipeline_seconds(self) -> float:
        """Until the last action ends, or as long as the busiest port between nodes is in use."""
        return max(self.timeline.step_seconds, self.plan.prediction.port_seconds)

    @property
    def step_seconds(self) -> float:
        return self.pipeline_seconds + self.end_seconds

    @property
    def samples_per_second(self) -> float:
        return self.plan.batch / self.step_seconds if self.step_seconds else 0.0

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the positions' time in the pipeline."""
        busy = self.timeline.busy_seconds
        return 1.0 - sum(busy) / len(busy) / self.pipeline_seconds if self.pipeline_seconds else 0.0

    def waiting_seconds(self, position: Position) -> float:
        """Seconds of the step in which a position is idle."""
        return max(0.0, self.step_seconds - position.busy_seconds)


def schedules_of(plan: Plan) -> tuple[ScheduleName, ...]:
    """Schedules under which the plan's stages can train, the plan's own included."""
    if plan.placement.is_v:  # under others stages lie on other ranks
        return (plan.schedule,)
    names: tuple[ScheduleName, ...] = INTERLEAVED if plan.chunks > 1 else ("1f1b", "gpipe")
    if plan.chunks == 1 and any(stage.wgrad_seconds for stage in plan.stages):  # older files do not divide backwards
        names = (*names, "zb-h1")
    return names if plan.schedule in names else (*names, plan.schedule)


def simulate_plan(plan: Plan, schedule: str | None = None) -> SimulatedStep:
    """Training step of a plan, by default under its own schedule.

    Raises:
        UsageError: the plan's stages cannot run under this schedule, or the schedule has no training step.
    Error: the error of the plan's times. Exposed reduction and optimizer are the plan's predictions for its own
        schedule. Every position is charged the same exposed reduction, because the plan does not say how much less the
        positions have that finish earlier.
    """
    name = checked_schedule(plan, schedule)
    sizes = microbatch_factors(plan.batch // plan.mesh.dp, plan.microbatches)
    timeline = simulate(
        generate(name, plan.placement, len(sizes), plan.order),
        [stage.forward_seconds for stage in plan.stages],
        [stage.backward_seconds for stage in plan.stages],
        plan.transfer_seconds,
        sizes,
        [stage.wgrad_seconds for stage in plan.stages],
    )
    rows = {rank: tuple(spans) for rank, spans in groupby(timeline.spans, key=lambda span: span.rank)}
    optimizers = [sum(plan.stages[s].optimizer_seconds for s in plan.placement.stages(p)) for p in rows]
    reduce_seconds = plan.prediction.reduce_seconds
    end_seconds = max(reduce_seconds + plan.prediction.optimizer_seconds, *optimizers)
    positions = tuple(
        position_of(plan, p, spans, sum(sizes), min(reduce_seconds, end_seconds - optimizers[p]))
        for p, spans in rows.items()
    )
    return SimulatedStep(plan, name, timeline, positions, transfers_of(plan, timeline, sizes), end_seconds)


def checked_schedule(plan: Plan, asked: str | None) -> ScheduleName:
    """The requested schedule, or the plan's if none is requested.

    Raises:
        UsageError: the schedule is not one of `schedules_of`.
    """
    allowed = schedules_of(plan)
    for name in allowed:
        if name == (asked or plan.schedule):
            return name
    words = f"it has {plural(plan.chunks, 'chunk')} a rank, which can be simulated under {' or '.join(allowed)}"
    if asked not in SCHEDULES:
        raise UsageError(f"No schedule is named {asked!r}. This plan is for {plan.schedule}: {words}.")
    if asked == "forward-only":
        raise UsageError(
            f"Schedule {asked} has no training step to simulate. This plan is for {plan.schedule}: {words}."
        )
    if asked in INTERLEAVED and plan.mesh.pp == 1:
        raise UsageError(f"This plan has no pipeline, so it cannot run under schedule {asked}.")
    chunks = " --chunks 2" if asked in INTERLEAVED else ""
    raise UsageError(
        f"This plan's stages cannot run under schedule {asked}: {words}. Plan for it: autopar plan {plan.model.name} "
        f"--devices {plan.mesh.devices} --pp {plan.mesh.pp} --schedule {asked}{chunks} -o other.json."
    )


def position_of(
    plan: Plan, position: int, spans: tuple[Span, ...], microbatches: float, reduce_seconds: float
) -> Position:
    """A position's share of the step.

    Args:
        microbatches: their number, a smaller last one counted as a fraction.
    """
    numbers = plan.placement.stages(position)
    stages = {s: plan.stages[s] for s in numbers}
    collective_seconds = microbatches * sum(stage.collective_seconds for stage in stages.values())
    memory = {s: stage.memory for s, stage in stages.items() if stage.memory is not None}
    return Position(
        ranks=stages[position].ranks,
        stages=numbers,
        spans=spans,
        compute_seconds=sum(span.end_seconds - span.start_seconds for span in spans) - collective_seconds,
        collective_seconds=collective_seconds,
        reduce_seconds=reduce_seconds,
        optimizer_seconds=sum(stage.optimizer_seconds for stage in stages.values()),
        memory=memory_curve(spans, memory) if len(memory) == len(stages) else None,
    )


def transfers_of(plan: Plan, timeline: Timeline, sizes: tuple[float, ...]) -> tuple[Transfer, ...]:
    """All messages between ranks, in the order of the actions that send them.

    Args:
        sizes: of each microbatch, relative to the largest.
    """
    sent: dict[tuple[bool, int], list[Message]] = {}
    for message in plan.messages:
        if plan.placement.are_apart(message.src, message.dst):
            sent.setdefault((message.src < message.dst, message.src), []).append(message)
    return tuple(
        Transfer(
            src=span.action,
            dst=Action(span.action.kind, message.dst, span.action.microbatch),
            num_bytes=round(message.num_bytes * sizes[span.action.microbatch]),
            start_seconds=span.end_seconds,
            end_seconds=span.end_seconds + message.seconds * sizes[span.action.microbatch],
        )
        for span in timeline.spans
        if span.action.kind != "W"
        for message in sent.get((span.action.kind == "F", span.action.chunk), ())
    )

"""A measured step as Chrome trace events, which Perfetto shows: all ranks on one clock, transfers as arrows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.ir.plan import Plan
from autopar.runtime.engine.records import ActionTiming
from autopar.runtime.spec import rank_text
from autopar.schedule.actions import Action
from autopar.schedule.timeline import Span
from autopar.tools.bench.timeline import MeasuredTimeline
from autopar.tools.report.chrome_trace import Slice, arrow_events, colour, row_names, slice_event, title

# Largest error of a GPU's first action on the host's clock, by `Stopwatch.host_ns`. On CPU there is no error.
ALIGNMENT_SECONDS = 50e-6
COMPUTE, STEP = 0, 1  # thread numbers
THREADS = {COMPUTE: "compute", STEP: "whole step"}


@dataclass(frozen=True)
class MeasuredStep:
    """One step of all ranks.

    Args:
        spans: by rank, in seconds since the rank's first action.
        started_ns: host clock at each rank's first action.
        step_ns: host clock at each rank's call of the step, and when its device was idle again.
    """

    spans: Mapping[int, tuple[ActionTiming, ...]]
    started_ns: Mapping[int, int]
    step_ns: Mapping[int, tuple[int, int]]

    @property
    def timeline(self) -> MeasuredTimeline:
        """The step on one clock."""
        zero, ranks = min(called for called, _ in self.step_ns.values()), sorted(self.spans)
        offsets = {rank: (self.started_ns[rank] - zero) / 1e9 for rank in ranks}
        return MeasuredTimeline(
            tuple(
                Span(rank, span.action, offsets[rank] + span.start_seconds, offsets[rank] + span.end_seconds)
                for rank in ranks
                for span in self.spans[rank]
            ),
            *(tuple((self.step_ns[rank][end] - zero) / 1e9 for rank in ranks) for end in (0, 1)),
        )


def trace_events(plan: Plan, timeline: MeasuredTimeline) -> dict[str, Any]:
    """A Chrome trace as JSON types: one process per rank, times in µs since the first rank began."""
    events: list[dict[str, Any]] = []
    slices: dict[tuple[int, Action], Slice] = {}
    for rank, (called, idle) in enumerate(zip(timeline.called_seconds, timeline.idle_seconds, strict=True)):
        events += row_names(rank, rank_text(plan.mesh, rank, plan.placement), THREADS)
        begun, ended = 1e6 * called, 1e6 * idle
        last = begun
        for span in timeline.of_rank(rank):
            start, last = 1e6 * span.start_seconds, 1e6 * span.end_seconds
            slices[rank, span.action] = Slice(rank, COMPUTE, start, last)
            events.append(slice_event(slices[rank, span.action], title(span.action), colour(span.action)))
        events.append(slice_event(Slice(rank, STEP, begun, ended), "step"))
        if last < ended:
            events.append(slice_event(Slice(rank, COMPUTE, last, ended), "sum and update", "grey"))
    for number, (sender, receiver) in enumerate(transfers(plan, slices)):
        events += arrow_events(number, sender[1], receiver[1], slices[sender], slices[receiver])
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "plan": plan.decision,
            "clock": "the host's monotonic clock, one for all processes; GPU actions by events in the stream",
            "alignment_error_us": 1e6 * ALIGNMENT_SECONDS,
        },
    }


def transfers(
    plan: Plan, slices: Collection[tuple[int, Action]]
) -> Iterator[tuple[tuple[int, Action], tuple[int, Action]]]:
    """(rank, action) that sends and (rank, action) that receives, of every tensor that travels between stages."""
    for rank, action in slices:
        if action.kind == "W":
            continue
        stage = action.chunk + (1 if action.kind == "F" else -1)
        if stage not in range(len(plan.stages)):
            continue
        peer = plan.mesh.group(rank, "pp")[plan.placement.position(stage)]
        if peer != rank:
            receiver = peer, Action(action.kind, stage, action.microbatch)
            if receiver in slices:
                yield (rank, action), receiver

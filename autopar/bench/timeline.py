"""A measured step as Chrome trace events, which Perfetto shows: all ranks on one clock, transfers as arrows.

Source: "Trace Event Format" (Duffy), phases X, M, s and f; a flow binds to the slices that enclose its ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.ir import Place, Plan
from autopar.runtime import Span
from autopar.runtime.spec import rank_text
from autopar.schedule import Action

# How late a GPU's first action may seem, by `Stopwatch.host_ns`, beyond another's; on CPU there is no error.
ALIGNMENT_SECONDS = 50e-6
TICK_US = 1e-3  # an arrow leaves a slice this long before its end, so that it lies inside
COMPUTE, STEP = 0, 1  # thread numbers

Transfer = tuple[Action, Action]


@dataclass(frozen=True)
class StepOnClock:
    """One step of all ranks. Spans count from each rank's first action, all else is the host's clock.

    ``whole`` has for each rank when the step was called and when its device was idle again.
    """

    spans: Mapping[int, tuple[Span, ...]]
    started_ns: Mapping[int, int]
    whole: Mapping[int, tuple[int, int]]


def trace_events(plan: Plan, step: StepOnClock, edges: Iterable[tuple[int, int]] | None = None) -> dict[str, Any]:
    """The events as JSON's types: a process for each rank, times in µs since the first rank began.

    Args:
        edges: (src, dst) of stages with src < dst that exchange tensors; consecutive ones by default.
    """
    zero = min(begun for begun, _ in step.whole.values())
    events: list[dict[str, Any]] = []
    slices: dict[tuple[int, Action], tuple[float, float]] = {}
    for rank in sorted(step.spans):
        events += names(plan, rank)
        offset = (step.started_ns[rank] - zero) / 1e3
        for span in step.spans[rank]:
            start, end = (offset + 1e6 * t for t in (span.start_seconds, span.end_seconds))
            slices[rank, span.action] = (start, end)
            events.append(slice_event(rank, COMPUTE, title(span.action), start, end, colour(span.action)))
        begun, ended = ((t - zero) / 1e3 for t in step.whole[rank])
        events.append(slice_event(rank, STEP, "step", begun, ended))
        last = max((end for (r, _), (_, end) in slices.items() if r == rank), default=begun)
        if last < ended:
            events.append(slice_event(rank, COMPUTE, "sum and update", last, ended, "grey"))
    for number, (rank, src, dst) in enumerate(transfers(plan, slices, edges)):
        sender, receiver = rank, peer(plan, rank, dst.chunk)
        (began, ended), arrives = slices[sender, src], slices[receiver, dst][0]
        # An action sends before it ends, and a process that is suspended just then ends it late.
        leaves = max(began, min(arrives, ended - min(TICK_US, (ended - began) / 2)))
        arrives = max(arrives, leaves)
        name = f"{'activation' if src.kind == 'F' else 'gradient'} s{src.chunk} → s{dst.chunk} mb{src.microbatch}"
        common = {"name": name, "cat": "transfer", "id": number, "tid": COMPUTE}
        events.append({**common, "ph": "s", "pid": sender, "ts": leaves})
        events.append({**common, "ph": "f", "bp": "e", "pid": receiver, "ts": arrives})
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
    plan: Plan, slices: Mapping[tuple[int, Action], Any], edges: Iterable[tuple[int, int]] | None
) -> Iterable[tuple[int, Action, Action]]:
    """(sending rank, action that sends, action that receives) for every tensor's way between ranks."""
    count = len(plan.stages)
    pairs = [(i, i + 1) for i in range(count - 1)] if edges is None else sorted(edges)
    for rank, action in slices:
        ways = pairs if action.kind == "F" else [(dst, src) for src, dst in pairs]
        for src, dst in ways:
            if src != action.chunk or peer(plan, rank, dst) == rank:
                continue
            there = Action(action.kind, dst, action.microbatch)
            if (peer(plan, rank, dst), there) in slices:
                yield rank, action, there


def peer(plan: Plan, rank: int, stage: int) -> int:
    """The rank that runs a stage in the same replica and at the same shard."""
    place = plan.mesh.place(rank)
    return plan.mesh.rank(Place(stage % plan.mesh.pp, place.replica, place.shard))


def names(plan: Plan, rank: int) -> list[dict[str, Any]]:
    """What the rows of a rank are called."""
    return [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": rank_text(plan.mesh, rank, plan.chunks)}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
        {"ph": "M", "pid": rank, "tid": COMPUTE, "name": "thread_name", "args": {"name": "compute"}},
        {"ph": "M", "pid": rank, "tid": STEP, "name": "thread_name", "args": {"name": "whole step"}},
    ]


def title(action: Action) -> str:
    """``F s1 mb3``."""
    return f"{action.kind} s{action.chunk} mb{action.microbatch}"


def colour(action: Action) -> str:
    return "thread_state_running" if action.kind == "F" else "rail_response"


def slice_event(
    rank: int, thread: int, name: str, start: float, end: float, colour: str | None = None
) -> dict[str, Any]:
    event = {"ph": "X", "pid": rank, "tid": thread, "name": name, "ts": start, "dur": end - start}
    return event | ({"cname": colour} if colour else {})


def early_arrivals(trace: Mapping[str, Any]) -> list[str]:
    """Transfers that a trace shows to arrive before the action that sends them began, by more than the clocks' error.

    There are none in a sound trace. Slices are compared: arrows never go back in time.
    """
    starts = {(e["pid"], e["name"]): e["ts"] for e in trace["traceEvents"] if e["ph"] == "X"}
    senders = {e["id"]: e["pid"] for e in trace["traceEvents"] if e["ph"] == "s"}
    found = []
    for event in trace["traceEvents"]:
        if event["ph"] != "f":
            continue
        what, src, _, dst, microbatch = event["name"].split()
        kind = "F" if what == "activation" else "B"
        began = starts[senders[event["id"]], f"{kind} {src} {microbatch}"]
        arrived = starts[event["pid"], f"{kind} {dst} {microbatch}"]
        if arrived < began - trace["otherData"]["alignment_error_us"]:
            found.append(f"{event['name']}: its sender began at {began:.1f} µs, it was there at {arrived:.1f} µs")
    return found

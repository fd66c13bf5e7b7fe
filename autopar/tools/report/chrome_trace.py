"""Chrome trace events for Perfetto: rows of actions, measured or simulated, and arrows between them.

Source: "Trace Event Format" (Duffy), phases X, M, C, s and f; a flow binds to the slices that enclose its ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.schedule.actions import Action

TICK_US = 1e-3  # an arrow starts this long before its slice ends, so that its start lies inside

Event = dict[str, Any]


@dataclass(frozen=True)
class Slice:
    """A bar in the row of a process's thread; times in µs."""

    process: int
    thread: int
    start_us: float
    end_us: float


def row_names(process: int, name: str, threads: Mapping[int, str]) -> list[Event]:
    """Events that name a process and its threads and sort processes by number."""
    return [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}},
        *(
            {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": text}}
            for thread, text in threads.items()
        ),
    ]


def slice_event(where: Slice, name: str, colour: str | None = None) -> Event:
    """Event that draws a slice."""
    event = {"ph": "X", "pid": where.process, "tid": where.thread, "name": name}
    event |= {"ts": where.start_us, "dur": round(where.end_us - where.start_us, 6)}
    return event | ({"cname": colour} if colour else {})


def arrow_events(number: int, src: Action, dst: Action, sender: Slice, receiver: Slice) -> tuple[Event, Event]:
    """Start and end of an arrow from the end of the sending action to the start of the receiving action."""
    # An action sends before it ends. If the process is suspended between the two, the action ends after the receipt.
    arrives = receiver.start_us
    inside = round(sender.end_us - min(TICK_US, (sender.end_us - sender.start_us) / 2), 6)
    leaves = max(sender.start_us, min(arrives, inside))
    name = f"{'activation' if src.kind == 'F' else 'gradient'} s{src.chunk} → s{dst.chunk} mb{src.microbatch}"
    starts = {"sender_start_us": sender.start_us, "receiver_start_us": receiver.start_us}
    common = {"name": name, "cat": "transfer", "id": number, "args": starts}
    return (
        {**common, "ph": "s", "pid": sender.process, "tid": sender.thread, "ts": leaves},
        {**common, "ph": "f", "bp": "e", "pid": receiver.process, "tid": receiver.thread, "ts": max(arrives, leaves)},
    )


def title(action: Action) -> str:
    """Name of an action's slice: ``F s1 mb3``."""
    return f"{action.kind} s{action.chunk} mb{action.microbatch}"


def colour(action: Action) -> str:
    """Chrome's name of an action's colour."""
    return "thread_state_running" if action.kind == "F" else "rail_response"

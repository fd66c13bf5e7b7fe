"""Chrome trace events of a simulated step: one process per pipeline position, with a counter of its memory."""

from __future__ import annotations

from typing import Any

from autopar.tools.report.chrome_trace import (
    Event,
    Slice,
    arrow_events,
    colour,
    row_names,
    slice_event,
    title,
)
from autopar.tools.simulate.step import Position, SimulatedStep

COMPUTE = 0  # number of the only thread
GIB, MEMORY = 2**30, "memory GiB"  # name of the counter


def trace_events(step: SimulatedStep) -> dict[str, Any]:
    """Trace events as JSON types, times in µs since the start of the step."""
    slices = {
        span.action: Slice(span.rank, COMPUTE, in_us(span.start_seconds), in_us(span.end_seconds))
        for span in step.timeline.spans
    }
    events: list[Event] = []
    for number, position in enumerate(step.positions):
        events += row_names(number, name_of(position), {COMPUTE: "compute"})
        events += [slice_event(slices[s.action], title(s.action), colour(s.action)) for s in position.spans]
        events += end_events(step, number, position)
        events += memory_events(number, position)
    for number, transfer in enumerate(step.transfers):
        events += arrow_events(number, transfer.src, transfer.dst, slices[transfer.src], slices[transfer.dst])
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "plan": step.plan.decision,
            "schedule": step.schedule,
            "clock": "simulated",
            "relative_error": step.plan.prediction.error,
        },
    }


def end_events(step: SimulatedStep, number: int, position: Position) -> list[Event]:
    """Slices of reduction and optimizer, if they take time."""
    begins, reduced = step.pipeline_seconds, step.pipeline_seconds + position.reduce_seconds
    parts = {
        "reduction": Slice(number, COMPUTE, in_us(begins), in_us(reduced)),
        "optimizer": Slice(number, COMPUTE, in_us(reduced), in_us(reduced + position.optimizer_seconds)),
    }
    return [slice_event(where, name, "grey") for name, where in parts.items() if where.end_us > where.start_us]


def memory_events(number: int, position: Position) -> list[Event]:
    """Counter of GiB; none if the plan has no memory figures of its stages."""
    if position.memory is None:
        return []
    points = zip(position.memory.seconds, position.memory.num_bytes)
    common = {"ph": "C", "pid": number, "name": MEMORY}
    return [{**common, "ts": in_us(t), "args": {MEMORY: round(held / GIB, 4)}} for t, held in points]


def name_of(position: Position) -> str:
    """Name of a position's process: ``ranks 0–511 (stage 0)``."""
    stages = f"{'stage' if len(position.stages) == 1 else 'stages'} {', '.join(map(str, position.stages))}"
    return f"{position.name} ({stages})"


def in_us(seconds: float) -> float:
    """Microseconds, rounded to three decimals."""
    return round(1e6 * seconds, 3)

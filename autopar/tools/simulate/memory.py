"""What lies in a rank's memory over a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.plan_parts import StageMemory
from autopar.schedule.timeline import Span


@dataclass(frozen=True)
class MemoryCurve:
    """A step function: ``num_bytes[i]`` from ``seconds[i]`` on. Times never decrease; where two are equal, something
    that takes no time came between."""

    seconds: tuple[float, ...]
    num_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.num_bytes)


def memory_curve(spans: Sequence[Span], memory: Mapping[int, StageMemory]) -> MemoryCurve:
    """Memory of a rank: the weights and buffers of its stages, a microbatch of a stage from the start of its forward to
    the end of its backward, and a stage's working set while it runs.

    Args:
        spans: the rank's, in the order in which they run.
        memory: of each of the rank's stages.
    Error: that of the plan's bytes. A smaller last microbatch counts as a whole one, as in the plan's peak.
    """
    held = sum(stage.weight_bytes + stage.buffer_bytes for stage in memory.values())
    points, ended = [(0.0, held)], 0.0
    for span in spans:
        stage = memory[span.action.chunk]
        if span.start_seconds == ended:
            points.pop()  # between two actions of which one begins when the other ends nothing is to be seen
        if span.action.kind == "F":
            held += stage.microbatch_bytes
        points.append((span.start_seconds, held + stage.transient_bytes))
        if span.action.kind == "B":
            held -= stage.microbatch_bytes
        ended = span.end_seconds
        points.append((ended, held))
    return MemoryCurve(tuple(seconds for seconds, _ in points), tuple(num_bytes for _, num_bytes in points))

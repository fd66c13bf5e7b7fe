"""Memory of a rank over a simulated step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.plan_parts import StageMemory
from autopar.schedule.timeline import Span


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
        if span.action.kind == "B":
            held -= stage.microbatch_bytes
        ended = span.end_seconds
        points.append((ended, held))
    return MemoryCurve(tuple(seconds for seconds, _ in points), tuple(num_bytes for _, num_bytes in points))

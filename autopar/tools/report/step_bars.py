"""Bars of a simulated step, as all pictures of it show them: the actions of each position, reduction and optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.schedule.timeline import Span
from autopar.tools.simulate.step import Position, SimulatedStep

COLOURS = {
    "forward": "#5b9bd5", "recompute": "#b7a5d8", "backward": "#e8a33d",
    "weight gradients": "#f3d08a", "reduction": "#4f9d69", "optimizer": "#c0504d",
}  # fmt: skip
PALEST, DARKEST = 0.55, 1.0  # strength of colour of a rank's first and last chunk


@dataclass(frozen=True)
class Bar:
    """Part of a row. ``kind`` is a key of `COLOURS`, ``chunk`` an index among the rank's stages."""

    kind: str
    start_seconds: float
    end_seconds: float
    chunk: int = 0
    label: str = ""


def bars(step: SimulatedStep, position: Position) -> list[Bar]:
    """Bars of a position's row."""
    found = [bar for span in position.spans for bar in bars_of(step, span)]
    begins = step.pipeline_seconds
    reduced = begins + position.reduce_seconds
    found += [Bar("reduction", begins, reduced), Bar("optimizer", reduced, reduced + position.optimizer_seconds)]
    return [bar for bar in found if bar.end_seconds > bar.start_seconds]


def bars_of(step: SimulatedStep, span: Span) -> list[Bar]:
    """Bars of an action; a backward that recomputes starts with a bar for its forward."""
    action = span.action
    stage, chunk, label = step.plan.stages[action.chunk], action.chunk // step.plan.mesh.pp, str(action.microbatch)
    if action.kind == "F":
        return [Bar("forward", span.start_seconds, span.end_seconds, chunk, label)]
    if action.kind == "W":
        return [Bar("weight gradients", span.start_seconds, span.end_seconds, chunk, label)]
    whole = stage.backward_seconds - (stage.wgrad_seconds if action.kind == "I" else 0.0)
    share = stage.recompute_seconds / whole if whole else 0.0
    turns = span.start_seconds + min(share, 1.0) * (span.end_seconds - span.start_seconds)
    return [
        Bar("recompute", span.start_seconds, turns, chunk),
        Bar("backward", turns, span.end_seconds, chunk, label),
    ]


def shade(colour: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Red, green and blue of a colour, paler for earlier chunks."""
    strength = DARKEST if chunks == 1 else PALEST + (DARKEST - PALEST) * chunk / (chunks - 1)
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return (1 - strength * (1 - red), 1 - strength * (1 - green), 1 - strength * (1 - blue))


def shown_positions(positions: Sequence[Position], limit: int) -> list[Position]:
    """All positions, or of more than ``limit`` every second, third, … and the fullest one."""
    every = -(-len(positions) // limit)
    fullest = max(positions, key=lambda position: position.memory.peak_bytes if position.memory is not None else 0)
    return [position for place, position in enumerate(positions) if place % every == 0 or position is fullest]


def some_text(shown: Sequence[Position], positions: Sequence[Position]) -> str:
    """Sentence that a picture leaves out positions, after a space; empty if it does not."""
    return f" Some of {len(positions)} positions, the fullest included." if len(shown) < len(positions) else ""

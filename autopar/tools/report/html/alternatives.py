"""The plan among its alternatives: step over memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.plan import Plan
from autopar.ir.plan_parts import Alternative
from autopar.ir.table import comparison_text
from autopar.ir.units import BYTES, TIME, text, unit_of
from autopar.tools.explain.why_not_result import WhyNotResult
from autopar.tools.report.html.palette import MUTED
from autopar.tools.report.html.plots import Figure, axis, hover, layout, plain

HEIGHT = 440
FAR = 1.5  # ratio to the plan's step from which others are shown at the upper edge
PLAN, ASKED, REJECTED = "#c2185b", "#1b6ca8", "#5f6b75"
ROOM = 0.12  # of an axis around the values


@dataclass(frozen=True)
class Point:
    """A plan: its number or name in the figure, its fullest rank's memory, its step, and lines about it."""

    mark: str
    label: str
    peak_bytes: int
    step_seconds: float
    lines: tuple[str, ...] = ()

    @property
    def hover_lines(self) -> list[str]:
        cost = f"{text(self.step_seconds, TIME)}, {text(self.peak_bytes, BYTES)} on the fullest rank"
        return [self.label, cost, *(line for line in self.lines if line)]


@dataclass(frozen=True)
class Scale:
    """Units and limits of both axes; what lies beyond is shown at the edge."""

    memory_unit: tuple[str, float]
    time_unit: tuple[str, float]
    memory: tuple[float, float]
    time: tuple[float, float]

    @staticmethod
    def of(own: Point, others: Sequence[Point]) -> Scale:
        """Scale in which points near the plan fill the figure, or all where none is near."""
        near = [p for p in others if p.step_seconds <= FAR * own.step_seconds] or others
        peaks, steps = ([getattr(p, name) for p in (own, *near)] for name in ("peak_bytes", "step_seconds"))
        memory_unit, time_unit = unit_of(max(peaks), BYTES), unit_of(own.step_seconds, TIME)
        return Scale(memory_unit, time_unit, with_room(peaks, memory_unit[1]), with_room(steps, time_unit[1]))

    def x(self, point: Point) -> float:
        return min(self.memory[1], max(self.memory[0], point.peak_bytes / self.memory_unit[1]))

    def y(self, point: Point) -> float:
        return min(self.time[1], point.step_seconds / self.time_unit[1])

    def is_far(self, point: Point) -> bool:
        """Whether a point is at the upper edge."""
        return point.step_seconds / self.time_unit[1] > self.time[1]


def with_room(values: Sequence[float], size: float) -> tuple[float, float]:
    """Limits of an axis in a unit of this size."""
    room = ROOM * (max(values) - min(values)) or ROOM * max(values)
    return (min(values) - room) / size, (max(values) + room) / size


def alternatives_figure(plan: Plan, answers: Sequence[WhyNotResult]) -> Figure | None:
    """A mark for each plan with a known memory; None if there is none but the plan itself.

    Marks of rejected plans have the numbers of their rows in `autopar.ir.table.alternative_table`.
    """
    own = Point("", "this plan", max(plan.prediction.peak_bytes), plan.prediction.step_seconds)
    rejected, asked = rejected_points(plan), asked_points(plan, answers)
    if not rejected and not asked:
        return None
    scale, points = Scale.of(own, [*rejected, *asked]), [own, *rejected, *asked]
    far = [point for point in points if scale.is_far(point)]
    above = f" Triangles at the upper edge take over {FAR:g} × as long." if far else ""
    return Figure(
        "alternatives",
        f"Step over memory of this plan and {len(points) - 1} others.",
        [
            frontier_line(points, scale),
            *marks("rejected", [p for p in rejected if p not in far], scale, REJECTED, "circle", 21),
            *marks("rejected, far slower", [p for p in far if p in rejected], scale, REJECTED, "triangle-up", 24),
            *marks("asked (why not)", asked, scale, ASKED, "diamond", 15),
            *marks("this plan", [own], scale, PLAN, "star", 20),
        ],
        layout(
            HEIGHT,
            xaxis=axis(f"memory of the fullest rank, {scale.memory_unit[0]}", range=scale.memory),
            yaxis=axis(f"step, {scale.time_unit[0]}", range=scale.time),
        ),
        "Lower is faster, further left needs less memory; no listed plan lies below the dotted line. Numbers are rows "
        f"of the table.{above}",
    )


def rejected_points(plan: Plan) -> list[Point]:
    """The plan's alternatives with a known memory."""
    best = plan.prediction.step_seconds
    return [
        Point(str(number), f"{number}: {a.label}", a.peak_bytes, a.step_seconds, (comparison_text(a, best), a.note))
        for number, a in enumerate(plan.alternatives, start=1)
        if a.step_seconds is not None and a.peak_bytes is not None
    ]


def asked_points(plan: Plan, answers: Sequence[WhyNotResult]) -> list[Point]:
    """The plans that answers found."""
    found = []
    for answer in answers:
        if answer.plan is not None and answer.breakdown is not None:
            seconds = answer.breakdown.step_seconds
            compared = comparison_text(Alternative(answer.asked, seconds), plan.prediction.step_seconds)
            peak = max(answer.plan.prediction.peak_bytes)
            found.append(Point(answer.asked, f"why not {answer.asked}", peak, seconds, (compared,)))
    return found


def frontier(points: Sequence[Point]) -> list[Point]:
    """Points than which no other is both faster and smaller, by memory."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, p.step_seconds)):
        if not found or point.step_seconds < found[-1].step_seconds:
            found.append(point)
    return found


def frontier_line(points: Sequence[Point], scale: Scale) -> Mapping[str, Any]:
    """The shortest step for each memory."""
    found = frontier(points)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "frontier",
        "x": [*map(scale.x, found), scale.memory[1]],
        "y": [*map(scale.y, found), scale.y(found[-1])],
        "line": {"shape": "hv", "color": MUTED, "width": 2, "dash": "dot"},
        "hoverinfo": "skip",
    }


def marks(
    name: str, points: Sequence[Point], scale: Scale, colour: str, symbol: str, pixels: int
) -> list[Mapping[str, Any]]:
    """A trace of marks with their names, inside of round ones and else above; none without points."""
    inside = symbol in ("circle", "triangle-up")
    style = {
        "type": "scatter",
        "mode": "markers+text",
        "name": name,
        "x": list(map(scale.x, points)),
        "y": list(map(scale.y, points)),
        "text": [plain(point.mark) for point in points],
        "textposition": "middle center" if inside else "top center",
        "textfont": {"color": "white" if inside else colour, "size": 12},
        **hover([point.hover_lines for point in points]),
        "marker": {"color": colour, "symbol": symbol, "size": pixels, "line": {"color": "white", "width": 1}},
        "cliponaxis": False,
    }
    return [style] if points else []

"""Kernels of a step summed by name, and both sides of the comparison summed by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.plan import Plan
from autopar.tools.bench.kernel_kinds import Direction, KernelKind, kernel_directions, kernel_kind
from autopar.tools.bench.kernel_trace import ProfiledStep
from autopar.tools.bench.priced_ops import PricedGraph

# Parts of a step that are no kernel: pauses of the device; kernels that run at the same time, negative; what a plan's
# step has besides its operations and its update, such as recomputed forwards.
GAP, OVERLAP, OTHER = "gap", "overlap", "other"
Kinds = Mapping[tuple[str, str], float]  # seconds of a step by kind and direction


@dataclass(frozen=True)
class KernelRow:
    """Kernels of one name, grid and direction in a step.

    Args:
        count: of a step; a mean over the profiled steps.
        seconds: of a step, summed over the kernels.
    """

    name: str
    grid: tuple[int, ...]
    kind: KernelKind
    direction: Direction
    count: float
    seconds: float


@dataclass(frozen=True)
class KindRow:
    """Priced and measured seconds of a step in one kind of kernel and direction; the direction may be empty."""

    kind: str
    direction: str
    priced_seconds: float
    measured_seconds: float

    @property
    def difference_seconds(self) -> float:
        """Measured minus priced seconds: positive where the planner is too fast."""
        return self.measured_seconds - self.priced_seconds


@dataclass(frozen=True)
class TimelineEntry:
    """One kernel of the first profiled step: index of its row, seconds since the step's first kernel, duration."""

    row: int
    start_seconds: float
    seconds: float


# -- measured ------------------------------------------------------------------------------------------------------


def kernel_rows(steps: Sequence[ProfiledStep]) -> tuple[KernelRow, ...]:
    """Kernels by name, grid and direction, the most expensive first."""
    durations: defaultdict[tuple[str, tuple[int, ...], Direction], list[float]] = defaultdict(list)
    for step in steps:
        directions = kernel_directions(kernel.name for kernel in step.kernels)
        for kernel, direction in zip(step.kernels, directions, strict=True):
            durations[kernel.name, kernel.grid, direction].append(kernel.seconds)
    rows = (
        KernelRow(name, grid, kernel_kind(name), direction, len(seconds) / len(steps), sum(seconds) / len(steps))
        for (name, grid, direction), seconds in durations.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def timeline(step: ProfiledStep, rows: Sequence[KernelRow]) -> tuple[TimelineEntry, ...]:
    """Kernels of a step in the order of their starts."""
    index = {(row.name, row.grid, row.direction): number for number, row in enumerate(rows)}
    directions, start = kernel_directions(k.name for k in step.kernels), step.kernels[0].start_seconds
    return tuple(
        TimelineEntry(index[k.name, k.grid, direction], k.start_seconds - start, k.seconds)
        for k, direction in zip(step.kernels, directions, strict=True)
    )


def measured_kinds(rows: Sequence[KernelRow], step_seconds: float, busy_seconds: float) -> Kinds:
    """Seconds of kernels by kind and direction, with the gap and the overlap; they sum to the step."""
    kinds = defaultdict[tuple[str, str], float](float)
    for row in rows:
        kinds[row.kind, row.direction] += row.seconds
    kinds[OVERLAP, ""] = busy_seconds - sum(row.seconds for row in rows)
    kinds[GAP, ""] = step_seconds - busy_seconds
    return kinds


# -- priced --------------------------------------------------------------------------------------------------------


def priced_kinds(priced: PricedGraph, plan: Plan) -> Kinds:
    """Priced seconds by kind and direction; they sum to the predicted step. Extra traffic counts as memory."""
    kinds, prediction = defaultdict[tuple[str, str], float](float), plan.prediction
    for row in priced.rows:
        kinds[row.kind, "forward"] += row.forward_seconds
        kinds[row.kind, "backward"] += row.backward_seconds
        kinds["memory", "backward"] += row.extra_traffic_seconds
    kinds["optimizer", "update"] = prediction.optimizer_seconds
    kinds[GAP, ""] = priced.pause_seconds
    kinds[OTHER, ""] = prediction.step_seconds - sum(kinds.values())
    return kinds


def kind_rows(priced: Kinds, measured: Kinds) -> tuple[KindRow, ...]:
    """A row for each kind and direction of either side, the largest difference first."""
    keys = dict.fromkeys((*priced, *measured))
    rows = (KindRow(*key, priced.get(key, 0.0), measured.get(key, 0.0)) for key in keys)
    return tuple(sorted(rows, key=lambda row: -abs(row.difference_seconds)))

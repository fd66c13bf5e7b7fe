"""Constants of a cost model from raw points, with the error that each leaves.

An operation of f FLOPs and n bytes is priced (`autopar.hardware.Hardware.op_seconds`) as

    t = max((f + half) / rate, (n + half_memory) / rate_memory) + launch

which is linear in half/rate and 1/rate while one side of the maximum is chosen. These two are the non-negative least-
squares solution of Σ (t_fit − t)² / (t · t_fit), near the squares of ln(t_fit / t): half as long costs what twice as
long does. It is found by solving with the weights of the solution before (`line`); operations that memory bounds
under one solution leave the next, until none changes sides. Of messages t = latency + n / bandwidth, where n is what
a rank of a ring sends (`autopar.hardware.ring_share`).

Each constant's error is the 90th percentile of its points' relative errors |t_fit / t − 1|; where a measurement is the
constant, the spread of its repeats.

Source: iteratively reweighted least squares; roofline (Williams, Waterman, Patterson 2009), as in `autopar.hardware`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import UsageError
from autopar.hardware import COMPUTE_KINDS, DTYPES, ring_share
from autopar.profiling.cases import COLLECTIVES
from autopar.profiling.points import Part, Point, Setting

ERROR_PERCENTILE = 90
LEAST_ERROR = 0.001  # nothing measured is exact
ROUNDS = 20  # of a fit, in which weights settle, and in which parts change sides; a few do
LEAST_SHARE = 1e-3  # of a measured time, below which a fitted one counts as that


@dataclass(frozen=True)
class Constant:
    """A number of a cost model.

    Args:
        path: of its field in the file, such as ("launch", "plain").
        value: in SI base units.
        quantity: what `autopar.cost_file.UNITS` calls it.
        num_points: that it was fitted from; 0 of an assumption.
        assumption: why it was not measured.
    """

    path: tuple[str, ...]
    value: float
    quantity: str
    error: float
    num_points: int
    assumption: str = ""


@dataclass(frozen=True)
class Row:
    """One point of a fit: c0 · a + c1 · x + known should be ``seconds``."""

    a: float
    x: float
    known: float
    seconds: float


@dataclass(frozen=True)
class Line:
    """Both coefficients, and the relative error of each row."""

    c0: float
    c1: float
    errors: tuple[float, ...]

    @property
    def rate(self) -> float:
        """What is done in a second when large."""
        return 1 / self.c1

    @property
    def half(self) -> float:
        """Where half of it is reached."""
        return self.c0 / self.c1


def fit(points: Sequence[Point], setting: Setting) -> tuple[Constant, ...]:
    """All constants that the points give.

    Raises:
        UsageError: a kind is missing, or its times do not grow with its sizes.
    """
    launches = launch_constants(points)
    own_launch = {c.path[-1]: c.value for c in launches}["captured" if setting.device_type == "cuda" else "plain"]
    traffic = line("memory", [memory_row(p, own_launch) for p in needed(points, "memory")])
    constants = [*capacity_constants(points), *memory_constants(points, traffic), *launches]
    constants += compute_constants(points, own_launch, traffic)
    constants += optimizer_constants(points)
    if setting.devices > 1:
        link = line("point-to-point", [Row(1, p.num_bytes, 0, p.value) for p in needed(points, "point-to-point")])
        constants += link_constants(("link",), link)
        constants += collective_constants(points)
    return tuple(constants)


def needed(points: Sequence[Point], kind: str, dtype: str = "") -> list[Point]:
    """The points of a kind, or of one dtype of it.

    Raises:
        UsageError: there are none.
    """
    found = [p for p in points if p.kind == kind and dtype in ("", p.dtype)]
    if not found:
        what = f"{kind} in {dtype}" if dtype else kind
        raise UsageError(f"A cost model needs {what}, of which there is no measurement. Measure it with --only {kind}.")
    return found


def line(kind: str, rows: Sequence[Row]) -> Line:
    """The non-negative coefficients with the least sum of squared errors, relative to measured times and fitted ones.

    With weights the normal equations are two; where a solution's first coefficient is negative, the best one with it
    at 0 is the answer, as the sum is convex.

    Raises:
        UsageError: times do not grow with sizes.
    """
    a, x, y = (np.array(v) for v in zip(*((r.a / r.seconds, r.x / r.seconds, 1 - r.known / r.seconds) for r in rows)))
    # Where launching is most of the time, what is left is its error: such rows count in the error alone.
    working = y >= 0.5
    u, v, w = (a[working], x[working], y[working]) if working.sum() > 1 else (a, x, y)
    weights, c0, c1 = np.ones_like(w), 0.0, 0.0
    for _ in range(ROUNDS):
        aa, ax, xx, ay, xy = (float(weights @ both) for both in (u * u, u * v, v * v, u * w, v * w))
        det = aa * xx - ax * ax
        c0, c1 = 0.0, xy / xx
        if det > 1e-9 * aa * xx and xx * ay >= ax * xy:
            c0, c1 = (xx * ay - ax * xy) / det, (aa * xy - ax * ay) / det
        if not c1 > 0:
            break
        weights = 1 / np.maximum(c0 * u + c1 * v, LEAST_SHARE)
    if not c1 > 0:
        raise UsageError(
            f"Times of {kind} do not grow with sizes in {len(rows)} measurements: something else was using the machine."
            f" Measure them again with --only {kind}."
        )
    return Line(float(c0), float(c1), tuple(abs(c0 * a + c1 * x - y).tolist()))


def error_of(errors: Sequence[float]) -> float:
    """The error that a fit leaves."""
    return max(LEAST_ERROR, float(np.percentile(np.array(errors), ERROR_PERCENTILE)))


def capacity_constants(points: Sequence[Point]) -> list[Constant]:
    """Memory for tensors."""
    (point,) = needed(points, "capacity")
    return [Constant(("memory", "capacity"), point.value, "bytes", LEAST_ERROR, 1)]


def launch_constants(points: Sequence[Point]) -> list[Constant]:
    """Of each way; one that does not exist on the device is taken for the next slower one."""
    measured = {p.name.split()[-1]: p for p in needed(points, "launch")}
    if "plain" not in measured:
        raise UsageError("A cost model needs launch plain, of which there is no measurement. Use --only launch.")
    constants: list[Constant] = []
    for way in ("plain", "compiled", "captured"):
        path = ("launch", way)
        if way in measured:
            found = measured[way]
            constants.append(Constant(path, found.value, "seconds", max(LEAST_ERROR, found.spread), 1))
        else:
            before = constants[-1]
            reason = f"as {before.path[-1]}, because programs are not {way} on this machine"
            constants.append(Constant(path, before.value, "seconds", 0.5, 0, reason))
    return constants


def memory_row(point: Point, launch: float) -> Row:
    """A point that memory bounds."""
    return Row(len(point.parts), point.num_bytes, len(point.parts) * launch, point.value)


def memory_constants(points: Sequence[Point], traffic: Line) -> list[Constant]:
    """``bandwidth`` is the most that large operations reached; their efficiency is the fit's share of it."""
    found = needed(points, "memory")
    largest = max(p.num_bytes for p in found)
    best = max(traffic.rate, *(p.num_bytes / p.value for p in found if 2 * p.num_bytes >= largest))
    error, count = error_of(traffic.errors), len(found)
    return [
        Constant(("memory", "bandwidth"), best, "bytes per second", error, count),
        Constant(("memory", "efficiency"), traffic.rate / best, "share", error, count),
        Constant(("memory", "half"), traffic.half, "bytes", error, count),
    ]


def compute_constants(points: Sequence[Point], launch: float, traffic: Line) -> list[Constant]:
    """Peaks and efficiencies: the peak of a dtype is the most that any kind reaches or approaches in it."""
    lines: dict[tuple[str, str], Line] = {}
    peaks: list[Constant] = []
    for dtype in DTYPES:
        needed(points, "matmul", dtype)
        own = [p for p in points if p.dtype == dtype and p.kind in COMPUTE_KINDS]
        for kind in COMPUTE_KINDS:
            chosen = [p for p in own if p.kind == kind]
            if chosen:
                lines[kind, dtype] = compute_line(f"{kind} {dtype}", chosen, launch, traffic, lambda p: 1.0)
        rates = [lines[kind, dtype].rate for kind in COMPUTE_KINDS if (kind, dtype) in lines]
        peak, error = max(*rates, *(p.flops / p.value for p in own)), error_of(lines["matmul", dtype].errors)
        peaks.append(Constant(("peak_flops", dtype), peak, "FLOPs per second", error, len(own)))
    peak_of = {c.path[1]: c.value for c in peaks}
    constants = peaks
    for kind in COMPUTE_KINDS:
        every = needed(points, kind)
        shared = compute_line(kind, every, launch, traffic, lambda p: peak_of[p.dtype])
        constants += efficiency_constants((kind,), shared, 1.0)
        for dtype in DTYPES:
            if (kind, dtype) in lines:
                constants += efficiency_constants((kind, dtype), lines[kind, dtype], peak_of[dtype])
    return constants


def efficiency_constants(path: tuple[str, ...], found: Line, peak: float) -> list[Constant]:
    """Both constants of a curve."""
    error, count = error_of(found.errors), len(found.errors)
    return [
        Constant(("efficiency", *path, "asymptote"), min(1.0, found.rate / peak), "share", error, count),
        Constant(("efficiency", *path, "half"), found.half, "FLOPs", error, count),
    ]


def compute_line(
    name: str, points: Sequence[Point], launch: float, traffic: Line, peak: Callable[[Point], float]
) -> Line:
    """The fit of operations that compute, of which some parts are bound by memory after all.

    Args:
        peak: of a point's dtype, where the rate is to be a share of it.
    """
    bound = [[False] * len(p.parts) for p in points]
    found = None
    for _ in range(ROUNDS):
        rows = [compute_row(p, b, launch, traffic, peak(p)) for p, b in zip(points, bound)]
        if not any(row.x for row in rows):
            break
        previous, found = found, line(name, [row for row in rows if row.x])
        sides = [[by_memory(part, found, traffic, peak(p)) for part in p.parts] for p in points]
        if sides == bound and previous is not None:
            break
        bound = sides
    assert found is not None  # the first round counts all parts
    errors = [abs(predicted(p, launch, found, traffic, peak(p)) / p.value - 1) for p in points]
    return Line(found.c0, found.c1, tuple(errors))


def compute_row(point: Point, bound: Sequence[bool], launch: float, traffic: Line, peak: float) -> Row:
    """A point whose parts that memory bounds are known."""
    computing = [part for part, by in zip(point.parts, bound) if not by]
    moving = sum(traffic_seconds(part, traffic) for part, by in zip(point.parts, bound) if by)
    flops = sum(part.flops for part in computing)
    return Row(len(computing) / peak, flops / peak, len(point.parts) * launch + moving, point.value)


def by_memory(part: Part, found: Line, traffic: Line, peak: float) -> bool:
    """Which side of the maximum is chosen."""
    return traffic_seconds(part, traffic) > (found.c0 + found.c1 * part.flops) / peak


def predicted(point: Point, launch: float, found: Line, traffic: Line, peak: float) -> float:
    """What the fitted constants say of a point."""
    work = (max(traffic_seconds(p, traffic), (found.c0 + found.c1 * p.flops) / peak) for p in point.parts)
    return sum(work) + len(point.parts) * launch


def traffic_seconds(part: Part, traffic: Line) -> float:
    """Of one operation's memory."""
    return traffic.c0 + traffic.c1 * part.num_bytes


def optimizer_constants(points: Sequence[Point]) -> list[Constant]:
    """Bytes per second of a fused AdamW step."""
    found = line("optimizer", [Row(0.0, p.num_bytes, 0, p.value) for p in needed(points, "optimizer")])
    count = len(found.errors)
    return [Constant(("optimizer", "bandwidth"), found.rate, "bytes per second", error_of(found.errors), count)]


def collective_constants(points: Sequence[Point]) -> list[Constant]:
    """Of each kind and group size; what stands for others is fitted to all-reduces of all sizes."""
    constants = link_constants(("collective",), line("all-reduce", ring_rows(needed(points, "all-reduce"))))
    for kind in COLLECTIVES:
        for ranks in sorted({p.ranks for p in needed(points, kind)}):
            rows = ring_rows([p for p in points if p.kind == kind and p.ranks == ranks])
            constants += link_constants(("collective", kind, str(ranks)), line(kind, rows))
    return constants


def ring_rows(points: Sequence[Point]) -> list[Row]:
    """Collectives of one kind."""
    return [
        Row(1.0, ring_share(kind, p.ranks) * p.num_bytes, 0, p.value)
        for p in points
        for kind in COLLECTIVES
        if kind == p.kind
    ]


def link_constants(path: tuple[str, ...], found: Line) -> list[Constant]:
    """Latency and bandwidth."""
    error, count = error_of(found.errors), len(found.errors)
    return [
        Constant((*path, "latency"), found.c0, "seconds", error, count),
        Constant((*path, "bandwidth"), found.rate, "bytes per second", error, count),
    ]

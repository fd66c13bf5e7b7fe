"""Raw measurements: what was timed, where, and how far the repeats lay apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autopar.ir.hardware import CollectiveKind, Kind

PointKind = Literal["launch", "optimizer", "capacity", "point-to-point", "beside"] | Kind | CollectiveKind
MAX_STEADY_SPREAD = (
    0.25  # more than this between the quartiles of the repeats, and something else was using the machine
)


@dataclass(frozen=True)
class OpCounts:
    """One operation as the planner counts it: FLOPs, and bytes read and written (of a message: its bytes)."""

    flops: float
    num_bytes: float


@dataclass(frozen=True)
class MeasuredPoint:
    """One measurement.

    Args:
        name: says what was run, once among the points of a file.
        dtype: that it computed in; empty where that does not matter.
        ranks: of the group of a collective, 2 for a message, otherwise 1.
        parts: the operations that were timed together.
        value: median of the repeats in seconds on the slowest rank; of the kind "capacity", bytes.
        spread: between the quartiles of that rank's repeats, as a share of the median.
    """

    kind: PointKind
    name: str
    dtype: str
    ranks: int
    ops: tuple[OpCounts, ...]
    value: float
    spread: float

    @property
    def flops(self) -> float:
        return sum(p.flops for p in self.ops)

    @property
    def num_bytes(self) -> float:
        return sum(p.num_bytes for p in self.ops)

    @property
    def is_steady(self) -> bool:
        return self.spread <= MAX_STEADY_SPREAD


def point_data(point: MeasuredPoint) -> dict[str, Any]:
    """A point as JSON and TOML hold it."""
    flops, num_bytes = [p.flops for p in point.ops], [p.num_bytes for p in point.ops]
    return {
        "kind": point.kind, "name": point.name, "dtype": point.dtype, "ranks": point.ranks, "flops": flops,
        "bytes": num_bytes, "value": point.value, "spread": point.spread,
    }  # fmt: skip


def point_from(data: Mapping[str, Any]) -> MeasuredPoint:
    """The point in such data.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    parts = tuple(OpCounts(float(f), float(b)) for f, b in zip(data["flops"], data["bytes"], strict=True))
    value, spread = float(data["value"]), float(data["spread"])
    if not value > 0 or not spread >= 0:
        raise ValueError(f"value {value} and spread {spread} must be positive")
    texts = (str(data[key]) for key in ("kind", "name", "dtype"))
    kind, name, dtype = texts
    return MeasuredPoint(kind, name, dtype, int(data["ranks"]), parts, value, spread)  # type: ignore[arg-type]

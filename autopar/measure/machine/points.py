"""Raw measurements: a case, the FLOPs and bytes of its operations, and the median and spread of its repeats.

Cost-model files and the file of an interrupted run hold a point as one flat record (`point_data`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.measure.machine.cases import Case, PointKind

RENAMED_WORDS: Mapping[str, Any] = {  # of kinds and names in files of users: earlier -> present
    "beside": "overlap",
    "gathered_linear": "all_gather_linear",
    "summed_linear": "linear_with_async_grad_allreduce",
    "gathered_rows_linear": "pipelined_all_gather_linear",
    "scattered_rows_linear": "pipelined_linear_reduce_scatter",
    "apart": "unfused",
    "joined": "fused",
}
MAX_STEADY_SPREAD = 0.25  # a larger spread means that something else was using the machine


@dataclass(frozen=True)
class OpCounts:
    """FLOPs of one operation, and the bytes that it reads and writes; of a message or collective, the tensor's bytes.

    They are counted as the planner counts them.
    """

    flops: float
    num_bytes: float


@dataclass(frozen=True)
class MeasuredPoint:
    """One measurement.

    Args:
        case: what was run; points of a file have different cases.
        ops: the operations that were timed together.
        value: median of the repeats on the slowest rank, seconds; for the kind "capacity", bytes.
        spread: interquartile range of that rank's repeats, as a share of the median.
    """

    case: Case
    ops: tuple[OpCounts, ...]
    value: float
    spread: float

    @property
    def kind(self) -> PointKind:
        return self.case.kind

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def dtype(self) -> str:
        return self.case.dtype

    @property
    def ranks(self) -> int:
        return self.case.ranks

    @property
    def flops(self) -> float:
        return sum(op.flops for op in self.ops)

    @property
    def num_bytes(self) -> float:
        return sum(op.num_bytes for op in self.ops)

    @property
    def is_steady(self) -> bool:
        return self.spread <= MAX_STEADY_SPREAD


def point_data(point: MeasuredPoint) -> dict[str, Any]:
    """The record of a point in JSON and TOML files."""
    return {
        "kind": point.kind, "name": point.name, "dtype": point.dtype, "ranks": point.ranks,
        "flops": [op.flops for op in point.ops], "bytes": [op.num_bytes for op in point.ops],
        "value": point.value, "spread": point.spread,
    }  # fmt: skip


def point_from(data: Mapping[str, Any]) -> MeasuredPoint:
    """The point of a record.

    Raises:
        KeyError, TypeError, ValueError: the record is not one of a point.
    """
    ops = tuple(OpCounts(float(f), float(b)) for f, b in zip(data["flops"], data["bytes"], strict=True))
    value, spread = float(data["value"]), float(data["spread"])
    if not value > 0 or not spread >= 0:
        raise ValueError(f"value {value} and spread {spread} must be positive")
    kind, name = data["kind"], " ".join(RENAMED_WORDS.get(word, word) for word in str(data["name"]).split())
    case = Case.from_name(RENAMED_WORDS.get(kind, kind), name, str(data["dtype"]), int(data["ranks"]))
    return MeasuredPoint(case, ops, value, spread)

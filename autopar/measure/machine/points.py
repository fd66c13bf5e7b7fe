"""Raw measurements: a case, the FLOPs and bytes of its operations, and the median and spread of its repeats.

Cost-model files and the file of an interrupted run hold a point as one flat record (`point_data`). That file has a
line of JSON for the setting, then one for each point, written as soon as it is measured. Only its last line can be cut
off. A later run resumes from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.errors import UsageError
from autopar.measure.device import ProfileSetting
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


@dataclass(frozen=True)
class ResumedPoints:
    """Points of an earlier run, and a sentence for the user that says whether they are used or discarded, and why."""

    points: tuple[MeasuredPoint, ...] = ()
    note: str = ""


def load_points(path: Path, setting: ProfileSetting) -> ResumedPoints:
    """The points of a file if they were measured in this setting, else none.

    Raises:
        UsageError: the file exists and is not a file of points.
    """
    if not path.exists():
        return ResumedPoints()
    lines = path.read_text(encoding="utf-8").split("\n")
    if len(lines) == 1:
        return ResumedPoints(note=f"{path} was cut off in its first line and is thrown away.")
    *complete, rest = lines  # a line that was cut off has no line end
    try:
        file_setting = ProfileSetting(**json.loads(complete[0]))
        points = tuple(point_from(json.loads(line)) for line in complete[1:])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"Cannot read the points kept in {path}: {type(error).__name__}: {error}. Remove that file to start again."
        ) from error
    differences = setting.differences(file_setting)
    if differences:
        return ResumedPoints(note=f"{path} has points of another setting ({differences}); they are thrown away.")
    cut = " Its last line was cut off and is measured again." if rest else ""
    return ResumedPoints(points, f"Taking over {len(points)} points from {path}.{cut}")


def save_points(path: Path, setting: ProfileSetting, points: Sequence[MeasuredPoint]) -> None:
    """Replace a file of points."""
    path.write_text(json.dumps(asdict(setting)) + "\n", encoding="utf-8")
    for point in points:
        append_point(path, point)


def append_point(path: Path, point: MeasuredPoint) -> None:
    """Add a point to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(point_data(point)) + "\n")

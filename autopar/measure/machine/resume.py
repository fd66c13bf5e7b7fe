"""Points kept next to the cost model until it is written, so that a later run resumes where an earlier one ended.

The file has a line of JSON for the setting, then one for each point, written as soon as it is measured. Only its last
line can be cut off.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.errors import UsageError
from autopar.measure.device import ProfileSetting
from autopar.measure.machine.points import MeasuredPoint, point_data, point_from


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

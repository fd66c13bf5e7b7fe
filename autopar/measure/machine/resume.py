"""Points kept beside the cost model until it is written, so that a second run goes on where the first was ended.

A line of JSON for the setting, then one for each point as soon as it is measured. Only the last line can be cut off.
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
    """What an earlier run left, and in words what became of it: taken over, or thrown away and why."""

    points: tuple[MeasuredPoint, ...] = ()
    note: str = ""


def load_points(path: Path, setting: ProfileSetting) -> ResumedPoints:
    """The points of a file that were measured in this setting; none of another setting's.

    Raises:
        UsageError: the file is there and is none of these.
    """
    if not path.exists():
        return ResumedPoints()
    lines = path.read_text(encoding="utf-8").split("\n")
    if len(lines) == 1:
        return ResumedPoints(note=f"{path} was cut off in its first line and is thrown away.")
    *whole, rest = lines  # the text after the last line end is a line that was cut off
    try:
        theirs = ProfileSetting(**json.loads(whole[0]))
        points = tuple(point_from(json.loads(line)) for line in whole[1:])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"Cannot read the points kept in {path}: {type(error).__name__}: {error}. Remove that file to start anew."
        ) from error
    differences = setting.differences(theirs)
    if differences:
        return ResumedPoints(note=f"{path} has points of another setting ({differences}); they are thrown away.")
    cut = " Its last line was cut off and is measured again." if rest else ""
    return ResumedPoints(points, f"Taking over {len(points)} points from {path}.{cut}")


def save_points(path: Path, setting: ProfileSetting, points: Sequence[MeasuredPoint]) -> None:
    """Write a file of kept points anew."""
    path.write_text(json.dumps(asdict(setting)) + "\n", encoding="utf-8")
    for point in points:
        append_point(path, point)


def append_point(path: Path, point: MeasuredPoint) -> None:
    """Add a point."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(point_data(point)) + "\n")

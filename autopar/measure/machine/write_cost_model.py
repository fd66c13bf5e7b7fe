"""Text of a cost-model file: constants with unit, source, date and error, and the points that they were fitted from."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from autopar.cost.hardware.cost_file import UNITS
from autopar.errors import HardwareError
from autopar.ir.units import plural
from autopar.measure.device import ProfileSetting
from autopar.measure.machine.constants import Constant
from autopar.measure.machine.points import MeasuredPoint, point_data, point_from
from autopar.measure.machine.preserved import PreservedSections, field_text

# Units from small to large. A value is written in the last unit in which it is at least 1, else in the first.
FILE_UNITS: Mapping[str, Sequence[str]] = {
    "bytes": ("B", "kB", "MB", "GB"), "bytes per second": ("GB/s",), "FLOPs": ("MFLOP", "GFLOP"),
    "FLOPs per second": ("GFLOP/s", "TFLOP/s"), "seconds": ("us",), "share": ("1",), "ratio": ("1",),
    "count": ("1",),
}  # fmt: skip
DIGITS = 6
NOTHING_PRESERVED = PreservedSections()
NOTE = """\
# Measured by `autopar profile`. Every number carries its unit, its source, the date and its fit's error: the 90th
# percentile of the relative errors of its large points, those of at least 20 launches. The points are below, formulas
# in autopar/measure/machine/curves.py and fit.py. A kind's asymptote is relative to what matmuls reach in that dtype.
"""


@dataclass(frozen=True)
class RawMeasurements:
    """Points, and the setting in which they were measured: the [raw] table of a file."""

    setting: ProfileSetting
    points: tuple[MeasuredPoint, ...]


def cost_model_text(
    name: str,
    raw: RawMeasurements,
    constants: Sequence[Constant],
    day: date,
    preserved: PreservedSections = NOTHING_PRESERVED,
) -> str:
    """The text of a cost-model file.

    Args:
        name: of the machine.
        preserved: sections of the file that this one replaces, without numbers that were measured. Its devices per
            node count if this machine has fewer.
    """
    setting = raw.setting
    alone = setting.devices == 1
    link_name = preserved.link_name or ("NCCL" if setting.device_type == "cuda" else "Gloo")
    head = {
        "name": name, "device": device_text(setting), "device_type": setting.device_type,
        "link_name": "none" if alone else link_name,
        "devices_per_node": 1 if alone else max(preserved.devices_per_node, setting.node_devices),
    }  # fmt: skip
    lines = [NOTE, *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in head.items())]
    tables: dict[str, dict[str, str]] = {}
    for constant in sorted(constants, key=lambda c: TABLE_ORDER.index(c.path[0])):
        *table, key = constant.path
        tables.setdefault(".".join(table), {})[key] = constant_text(constant, setting, day)
    if not setting.peer_access and "link" in tables:
        tables["link"]["peer_access"] = "false"
    for table, fields in preserved.tables.items():
        if table != "link" or not alone:
            tables.setdefault(table, {}).update((key, field_text(value)) for key, value in fields.items())
    for table, entries in tables.items():
        lines += ["", f"[{table}]", *(f"{key} = {text}" for key, text in entries.items())]
    lines += [
        "",
        "# Measurements from which the constants were fitted: seconds of operations with their FLOPs and bytes.",
        "[raw]",
    ]
    lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in asdict(setting).items()]
    lines += ["points = [", *(f"  {field_text(point_data(point))}," for point in raw.points), "]", ""]
    return "\n".join(lines)


TABLE_ORDER = ("memory", "peak_flops", "launch", "efficiency", "optimizer", "link", "collective", "overlap", "network")


def device_text(setting: ProfileSetting) -> str:
    """The device in words. For a GPU it is torch's name, by which `autopar.runtime.launch.devices` recognises it."""
    if setting.device_type == "cuda":
        return setting.device
    return f"{plural(setting.threads, 'thread')} of {setting.device}"


def constant_text(constant: Constant, setting: ProfileSetting, day: date) -> str:
    """A constant in TOML: a whole number, or an inline table with value, unit, error, date and source."""
    value, unit = in_file_unit(constant)
    if constant.quantity == "count":
        return str(int(value))
    source = f"assumption: {constant.assumption}"
    if not constant.assumption:
        command = f"`autopar profile --devices {setting.devices}`"
        if setting.nodes > 1:
            command = f"`autopar profile` on {setting.nodes} such nodes"
        source = f"measured: {setting.devices} x {setting.device}, torch {setting.torch}, {command}; "
        source += plural(constant.num_points, "point")
        if constant.error_of_all > constant.error:
            source += f", error with small ones {constant.error_of_all:.1%}"
        source += f"; {constant.note}" if constant.note else ""
    attributes = f"error = {constant.error:.3g}, date = {day}, source = {json.dumps(source, ensure_ascii=False)}"
    return f'{{ value = {value:.{DIGITS}g}, unit = "{unit}", {attributes} }}'


def in_file_unit(constant: Constant) -> tuple[float, str]:
    """A constant's value in the unit in which the file has it, and that unit."""
    factors = UNITS[constant.quantity]
    units = FILE_UNITS[constant.quantity]
    unit = next((u for u in reversed(units) if constant.value >= factors[u]), units[0])
    return constant.value / factors[unit], unit


def value_text(constant: Constant) -> str:
    """A constant's value and unit with four digits, for a table."""
    value, unit = in_file_unit(constant)
    return f"{value:,.4g} {'' if unit == '1' else unit}".rstrip()


def raw_points(path: Path) -> RawMeasurements | None:
    """The points in a cost-model file; None if `autopar profile` did not write it.

    Raises:
        HardwareError: the file or its points cannot be read.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8")).get("raw", {})
        if "points" not in raw:
            return None
        points = tuple(map(point_from, raw.pop("points")))
        return RawMeasurements(ProfileSetting(**raw), points)
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise HardwareError(
            f"Cannot read the measurements in {path}: {type(error).__name__}: {error}. Write the file again with "
            "`autopar profile`."
        ) from error

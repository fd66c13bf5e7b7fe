"""What a cost model says beyond measurements, taken over when its machine is measured anew."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.cost.hardware.cost_file import Table
from autopar.cost.hardware.load import read_beside, read_calibration, read_link, read_reserve, whole
from autopar.errors import HardwareError

READERS = {"reserve": read_reserve, "beside": read_beside, "network": read_link, "calibration": read_calibration}


@dataclass(frozen=True)
class PreservedSections:
    """The name of the machine and its links, its devices per node, and the tables that are not measured."""

    name: str = ""
    link_name: str = ""
    devices_per_node: int = 1
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def without(self, measured: Collection[tuple[str, ...]]) -> PreservedSections:
        """What is left of it where some numbers were measured, by table and name."""
        remaining = {
            table: {key: entry for key, entry in numbers.items() if (table, key) not in measured}
            for table, numbers in self.tables.items()
        }
        return replace(self, tables={table: numbers for table, numbers in remaining.items() if numbers})


def preserved_sections(path: Path, device_type: str) -> PreservedSections:
    """What is kept of a file; nothing where there is none or it describes another type of device.

    Raises:
        HardwareError: it cannot be read, or these parts are wrong.
    """
    if not path.exists():
        return PreservedSections()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise HardwareError(f"Cannot read cost model {path}: {error}. Correct or remove it.") from error
    if data.get("device_type") != device_type:
        return PreservedSections()
    file = Table(path, "", data)
    names = [name for name in READERS if name in data]
    for name in names:
        whole(READERS[name], file.table(name))
    devices_per_node = file.get("devices_per_node", int, "a whole number of devices")
    return PreservedSections(
        file.text("name"), file.text("link_name"), devices_per_node, {name: data[name] for name in names}
    )


def number_text(entry: Mapping[str, Any]) -> str:
    """A number with what is said of it; a date is written bare."""
    texts = (
        f"{key} = {json.dumps(value, ensure_ascii=False) if isinstance(value, str | int | float) else value}"
        for key, value in entry.items()
    )
    return f"{{ {', '.join(texts)} }}"

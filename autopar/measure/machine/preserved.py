"""The sections of a cost model that `autopar profile` does not measure, copied when it replaces the file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.cost.hardware.cost_file import Table
from autopar.cost.hardware.load import (
    read_calibration,
    read_link,
    read_overlap,
    read_reserve,
    read_whole,
    with_current_names,
)
from autopar.errors import HardwareError

READERS = {"reserve": read_reserve, "overlap": read_overlap, "network": read_link, "calibration": read_calibration}


@dataclass(frozen=True)
class PreservedSections:
    """Names of the machine and of its links, devices per node, and tables that are not measured, by name."""

    name: str = ""
    link_name: str = ""
    devices_per_node: int = 1
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def without(self, measured: Collection[tuple[str, ...]]) -> PreservedSections:
        """These sections without numbers that were measured after all.

        Args:
            measured: (table, key) of each measured number.
        """
        remaining = {
            table: {key: entry for key, entry in numbers.items() if (table, key) not in measured}
            for table, numbers in self.tables.items()
        }
        return replace(self, tables={table: numbers for table, numbers in remaining.items() if numbers})


def preserved_sections(path: Path, device_type: str) -> PreservedSections:
    """Sections to copy from a file; empty if it does not exist or describes another type of device.

    Raises:
        HardwareError: the file cannot be read, or one of these sections is wrong.
    """
    if not path.exists():
        return PreservedSections()
    try:
        data = with_current_names(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise HardwareError(f"Cannot read cost model {path}: {error}. Correct or remove it.") from error
    if data.get("device_type") != device_type:
        return PreservedSections()
    file = Table(path, "", data)
    names = [name for name in READERS if name in data]
    for name in names:
        read_whole(READERS[name], file.table(name))
    devices_per_node = file.get("devices_per_node", int, "a whole number of devices")
    return PreservedSections(
        file.text("name"), file.text("link_name"), devices_per_node, {name: data[name] for name in names}
    )


def number_text(entry: Mapping[str, Any]) -> str:
    """A TOML inline table with a number's value, unit, error, source and date."""
    texts = (
        f"{key} = {json.dumps(value, ensure_ascii=False) if isinstance(value, str | int | float) else value}"
        for key, value in entry.items()
    )
    return f"{{ {', '.join(texts)} }}"

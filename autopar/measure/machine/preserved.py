"""The sections of a cost model that `autopar profile` does not measure, copied when it replaces the file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.cost.hardware.cost_file import Table
from autopar.cost.hardware.load import (
    read_calibration,
    read_overlap,
    read_reserve,
    read_whole,
    with_current_names,
)
from autopar.cost.hardware.network import read_network
from autopar.errors import HardwareError

READERS = {"reserve": read_reserve, "overlap": read_overlap, "network": read_network, "calibration": read_calibration}


@dataclass(frozen=True)
class PreservedSections:
    """Names of the machine and of its links, devices per node, and tables that are not measured.

    Args:
        tables: fields by the table's path in the file, such as ``network.leaf``.
    """

    name: str = ""
    link_name: str = ""
    devices_per_node: int = 1
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def without(self, measured: Collection[tuple[str, ...]]) -> PreservedSections:
        """These sections without numbers that were measured after all.

        Args:
            measured: path of each measured number.
        """
        measured = set(measured)
        if any(path[0] == "network" and path[-1] == "hop" for path in measured):  # one for each kind of collective
            measured.add(("network", "hop"))
        remaining = {
            table: {key: entry for key, entry in fields.items() if (*table.split("."), key) not in measured}
            for table, fields in self.tables.items()
        }
        return replace(self, tables={table: fields for table, fields in remaining.items() if fields})

    @property
    def levels(self) -> Mapping[str, int]:
        """Nodes of the groups of each level of the network, by the level's name."""
        prefix = "network."
        return {
            table.removeprefix(prefix): fields["nodes"]
            for table, fields in self.tables.items()
            if table.startswith(prefix) and "nodes" in fields
        }


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
    link = {key: value for key, value in data.get("link", {}).items() if key == "ports"}
    tables = {path: fields for name in names for path, fields in flat_tables(name, data[name])}
    return PreservedSections(
        file.text("name"),
        file.text("link_name"),
        file.whole("devices_per_node", 1),
        ({"link": link} if link else {}) | tables,
    )


def flat_tables(path: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Path and fields of a table and of the tables within it; a number with unit and source is a field."""
    inner = {key: value for key, value in table.items() if isinstance(value, dict) and "value" not in value}
    yield path, {key: value for key, value in table.items() if key not in inner}
    for key, value in inner.items():
        yield from flat_tables(f"{path}.{key}", value)


def field_text(entry: Any) -> str:
    """A field in TOML: a number with unit, error, source and date as an inline table, or a plain value."""
    if not isinstance(entry, dict):
        return json.dumps(entry, ensure_ascii=False) if isinstance(entry, str | int | float | list) else str(entry)
    return f"{{ {', '.join(f'{key} = {field_text(value)}' for key, value in entry.items())} }}"

"""A cost-model file while it is read: each number has a unit, a source, a date and an error, and each is checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from autopar.errors import HardwareError, suggest
from autopar.ir.hardware import NumberError

DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BYTES = {f"{p}B": f for p, f in DECIMAL.items()} | {f"{p}iB": 1024.0**i for i, p in enumerate("KMGT", start=1)}
# The units in which each quantity may be written, with the factor to its SI base unit.
UNITS: Mapping[str, Mapping[str, float]] = {
    "bytes": BYTES,
    "bytes per second": {f"{u}/s": f for u, f in BYTES.items()} | {f"{p}bit/s": f / 8 for p, f in DECIMAL.items()},
    "FLOPs": {f"{p}FLOP": f for p, f in DECIMAL.items()},
    "FLOPs per second": {f"{p}FLOP/s": f for p, f in DECIMAL.items()},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "share": {"1": 1.0, "%": 1e-2},  # at most 1
    "ratio": {"1": 1.0, "%": 1e-2},
    "count": {"1": 1.0},  # written as a plain whole number
}


@dataclass
class Table:
    """One TOML table while it is read. Errors name its fields with ``prefix``, the table's path in the file.

    ``errors`` collects the errors of all numbers read, by path, and all tables of a file share it. ``seen`` are the
    fields read so far; `finish` refuses any other.
    """

    path: Path
    prefix: str
    data: dict[str, Any]
    errors: dict[str, NumberError] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def fail(self, key: str, problem: str) -> HardwareError:
        """The error about one field."""
        where = f"{self.prefix}.{key}" if self.prefix else key
        return HardwareError(f"Cost model {self.path}: field {where} {problem}")

    def get(self, key: str, kind: type | tuple[type, ...], what: str) -> Any:
        """The value of a field, which must exist and be of this type; ``what`` describes it in errors."""
        self.seen.add(key)
        if key not in self.data:
            raise self.fail(key, f"is missing; it must be {what}.")
        value = self.data[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fail(key, f"is {value!r}; it must be {what}.")
        return value

    def has(self, key: str) -> bool:
        """Whether a field that may be left out is there."""
        self.seen.add(key)
        return key in self.data

    def text(self, key: str) -> str:
        """The value of a text field."""
        return self.get(key, str, "a text")

    def texts(self, key: str) -> tuple[str, ...]:
        """The value of a field that is a list of texts."""
        value = self.get(key, list, "a list of texts")
        if not all(isinstance(item, str) for item in value):
            raise self.fail(key, f"is {value!r}; it must be a list of texts.")
        return tuple(value)

    def flag(self, key: str) -> bool:
        """The value of a field that is true or false."""
        return self.get(key, bool, "true or false")

    def whole(self, key: str, least: int) -> int:
        """The value of a field that is a whole number of at least ``least``."""
        value = self.get(key, int, "a whole number")
        if value < least:
            raise self.fail(key, f"is {value}; it must be at least {least}.")
        return value

    def table(self, key: str) -> Table:
        """A table within this one."""
        data = self.get(key, dict, "a table")
        return Table(self.path, f"{self.prefix}.{key}" if self.prefix else key, data, self.errors)

    def number(self, key: str, quantity: str, zero: bool = False) -> float:
        """A number with unit, source, date and error, in SI base units; above 0, or at least 0 with ``zero``."""
        entry = self.table(key)
        value = float(entry.get("value", (int, float), "a number"))
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise entry.fail("value", f"is {value:g}; it must be {'at least' if zero else 'above'} 0.")
        unit, known = entry.text("unit"), UNITS[quantity]
        if unit not in known:
            raise entry.fail("unit", f"is {unit!r}; {quantity} are written in {', '.join(known)}.")
        if quantity == "share" and value * known[unit] > 1:
            raise entry.fail("value", f"is {value:g} {unit}; a share is at most 1.")
        error = float(entry.get("error", (int, float), "a relative error such as 0.1"))
        if not 0 <= error < math.inf:
            raise entry.fail("error", f"is {error:g}; it must be a relative error such as 0.1.")
        source = entry.text("source").strip()
        if not source:
            raise entry.fail("source", "is empty; say which datasheet, command or assumption the number is from.")
        entry.get("date", date, "a date such as 2026-11-20")
        entry.finish()
        self.errors[entry.prefix] = NumberError(error, source.startswith("measured"))
        return value * known[unit]

    def finish(self) -> None:
        """Refuse fields that nothing has read."""
        for key in self.data:
            if key not in self.seen:
                raise self.fail(key, f"is unknown.{suggest(key, self.seen)} Known: {sorted(self.seen)}.")

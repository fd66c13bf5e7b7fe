"""Numbers for people: seconds, bytes and counts as text with a unit. Inside the package all are SI base units."""

from __future__ import annotations

from collections.abc import Sequence

Scale = tuple[tuple[str, float], ...]

TIME: Scale = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
BYTES: Scale = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
COUNT: Scale = (("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


def unit_of(value: float, scale: Scale) -> tuple[str, float]:
    """Name and size of the largest unit that is at most the value; the smallest unit for smaller values."""
    return next((unit for unit in scale if abs(value) >= unit[1]), scale[-1])


def decimals(scaled: float) -> int:
    """Number of decimals with which a value shows three digits or a bit more."""
    return 2 if abs(scaled) < 10 else 1


def in_unit(value: float, unit: tuple[str, float], digits: int) -> str:
    """The value in a unit. Values in bytes and plain counts have no decimals."""
    name, size = unit
    number = f"{value / size:,.0f}" if name in ("", "B") else f"{value / size:,.{digits}f}"
    return f"{number} {name}".rstrip()


def text(value: float, scale: Scale) -> str:
    """One value in a unit of matching size: ``3.31 ms``, ``2.34 GiB``, ``304.3 M``."""
    unit = unit_of(value, scale)
    return in_unit(value, unit, decimals(value / unit[1]))


def column(values: Sequence[float], scale: Scale) -> list[str]:
    """All values in the unit and with the decimals of the largest, so that they can be compared down the column."""
    largest = max(values, key=abs, default=0.0)
    unit = unit_of(largest, scale)
    return [in_unit(value, unit, decimals(largest / unit[1])) for value in values]


def percent(share: float, digits: int = 1) -> str:
    """A share as percentage: ``16.6 %``."""
    return f"{100 * share:,.{digits}f} %"


def signed_percent(share: float) -> str:
    """A difference as percentage with its sign: ``+1.5 %``."""
    return f"{100 * share:+.1f} %"


def of_type(thing: object) -> str:
    """The type of an object with its article: ``a str``, ``an int``."""
    name = type(thing).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"  # a u is mostly spoken as in unit


def plural(number: int, noun: str, ending: str = "s") -> str:
    """``1 stage``, ``4 stages``."""
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def first_few(texts: Sequence[str], limit: int) -> str:
    """The first texts, and the number of the others: ``a, b and 3 more``."""
    return ", ".join(texts[:limit]) + (f" and {len(texts) - limit} more" if len(texts) > limit else "")

"""docs/scale.md has the tables of docs/scale/plans.json and of the cost model."""

from __future__ import annotations

from pathlib import Path

from support.scale import STUDIES, bandwidths, table

TEXT = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()


def test_tables_are_as_planned() -> None:
    for lines in (bandwidths(), *map(table, STUDIES)):
        assert "\n".join(lines) in TEXT

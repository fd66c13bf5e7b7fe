"""docs/tensor_meshes.md has the table that `support.arrangements` computes."""

from __future__ import annotations

from pathlib import Path

from support.arrangements import table

TEXT = (Path(__file__).parents[2] / "docs" / "tensor_meshes.md").read_text()


def test_the_table_is_computed() -> None:
    assert "\n".join(table()) in TEXT

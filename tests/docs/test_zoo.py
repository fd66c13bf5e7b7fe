"""docs/zoo.md shows docs/zoo/cells.json, and a sample of its rows is as it says."""

from __future__ import annotations

import pytest
from support.zoo import COLUMNS, PAGE, page_text, row_cells, saved
from support.zoo_models import ROWS
from support.zoo_timm import TIMM
from timm.models import list_modules

SAMPLE = ("timm/vision_transformer",)


def test_the_page_shows_the_cells() -> None:
    text = PAGE.read_text()
    assert page_text(text, saved()) == text


def test_every_module_of_timm_is_a_row() -> None:
    assert set(TIMM) == set(list_modules())


@pytest.mark.full
@pytest.mark.parametrize("key", SAMPLE)
def test_a_row_is_as_published(key: str) -> None:
    row = next(row for row in ROWS if row.key == key)
    published = saved()[key]
    assert published["name"] == row.name
    found = dict(row_cells(row))
    assert set(found) == set(COLUMNS)
    for column, cell in found.items():
        assert cell.ok == published["cells"][column]["ok"], f"{column}: {cell.text}"

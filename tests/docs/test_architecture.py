"""docs/architecture.md is true: what it names exists, its layers are the tested ones, and it leaves nothing out."""

from __future__ import annotations

import re
from pathlib import Path

from support.layers import LAYERS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
PATH = re.compile(r"`((?:autopar|cost_models|tests|examples|docs)/[\w./-]*)`|\]\(([\w./-]+)\)")
LAYER = re.compile(r"^\| (\d+) \| (.+) \|$", re.MULTILINE)


def test_every_file_that_it_names_exists() -> None:
    named = {ROOT / path if path else ROOT / "docs" / link for path, link in PATH.findall(TEXT)}
    assert len(named) > 20
    assert {str(p) for p in named if not p.exists()} == set()


def test_every_room_is_in_its_layer() -> None:
    written = {
        re.sub(r"autopar/|\.py|/$", "", name) or "autopar": int(layer)
        for layer, cells in LAYER.findall(TEXT)
        for name in re.findall(r"`(autopar/[\w.]*/?)`", cells)
    }
    assert written == LAYERS


def test_it_is_one_page() -> None:
    assert len(TEXT.split()) < 2500  # a quarter of an hour

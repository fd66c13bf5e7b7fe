"""docs/architecture.md is true: what it names exists, its layers are the tested ones, and it leaves nothing out."""

from __future__ import annotations

import re
from pathlib import Path

from test_layers import LAYERS, TOP

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "autopar"
TEXT = (ROOT / "docs" / "architecture.md").read_text()
PATH = re.compile(r"`((?:autopar|cost_models|tests|examples|docs)/[\w./-]*)`|\]\(([\w./-]+)\)")
LAYER = re.compile(r"^\| (\d) \| (.+) \|$", re.MULTILINE)


def test_every_file_that_it_names_exists() -> None:
    named = {ROOT / path if path else ROOT / "docs" / link for path, link in PATH.findall(TEXT)}
    assert len(named) > 20
    assert {str(p) for p in named if not p.exists()} == set()


def test_every_module_is_in_its_layer() -> None:
    entries = {p.name for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()} - {"__init__.py"}
    actual = {name.removesuffix(".py"): LAYERS.get(name.removesuffix(".py"), TOP) for name in entries}
    written = {
        name.rstrip("/").removesuffix(".py"): int(layer)
        for layer, cells in LAYER.findall(TEXT)
        for name in re.findall(r"`autopar/([\w.]+/?)`", cells)
    }
    assert written == actual


def test_it_is_one_page() -> None:
    assert len(TEXT.split()) < 2500  # a quarter of an hour

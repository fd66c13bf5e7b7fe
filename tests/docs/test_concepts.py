"""The pages of docs/concepts show one picture each, which a script draws, and quote rules as they are; the glossary."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import timm
from support.concept_search import draw_solver
from support.concept_sharding import layout_words, sharded_block
from support.concepts import DRAW, draw_schedules, main, schedule_plans

from autopar.ir.plan_parts import OF_PIPELINES
from autopar.sharding.table import RULES

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {path.stem: path.read_text() for path in sorted((DOCS / "concepts").glob("*.md"))}
PNG = b"\x89PNG\r\n\x1a\n"
QUOTED_RULE = re.compile(r"^\| `(\w+)` \| `([^`]+->[^`]+)` \|", re.M)
TERM = re.compile(r"^\*\*(.+)\*\*\n:   ", re.M)


def draw_small_schedules(path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=3, img_size=32, patch_size=8)
    draw_schedules(path, schedule_plans(model, ["1f1b", "zb-v"], batch_size=16, microbatches=4))


@pytest.mark.parametrize(
    "draw",
    [
        DRAW["rules"],
        DRAW["costs"],
        partial(draw_solver, model="test_resnet", devices=2, batch=16, microbatches=2),
        draw_small_schedules,
    ],
    ids=["rules", "costs", "solver", "schedules"],
)
def test_pictures_are_drawn(draw: Callable[[Path], None], tmp_path: Path) -> None:
    draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG)


def test_the_script_draws_named_pictures_into_a_folder(tmp_path: Path) -> None:
    main(tmp_path, ["costs"])
    assert [path.name for path in tmp_path.iterdir()] == ["costs.png"]


def test_each_page_has_its_picture() -> None:
    assert set(PAGES) == set(DRAW)
    for name, text in PAGES.items():
        assert re.findall(r"!\[[^]]+\]\(([^)]+)\)", text) == [f"../pictures/{name}.png"]
        assert (DOCS / "pictures" / f"{name}.png").read_bytes().startswith(PNG)


def test_the_picture_of_rules_is_as_the_page_tells_it() -> None:
    drawn = [f"{box.title}: {layout_words(box.layout)}" for box in sharded_block(1024, 197, 64)]
    assert drawn == [
        "layer-norm: dim 0 split", "all-gather: replicated", "fc1.weight: dim 0 split", "linear: dim 2 split",
        "gelu: dim 2 split", "fc2.weight: dim 1 split", "linear: partial sums", "reduce-scatter: dim 0 split",
    ]  # fmt: skip


def test_quoted_rules_are_in_the_table() -> None:
    quoted = QUOTED_RULE.findall(PAGES["rules"])
    assert len(quoted) == 3
    assert {name: RULES[name] for name, _ in quoted} == dict(quoted)


def test_every_schedule_is_explained() -> None:
    assert [name for name in ("gpipe", "1f1b", *OF_PIPELINES) if f"| `{name}` |" not in PAGES["schedules"]] == []


def test_terms_are_in_alphabetical_order() -> None:
    terms = [term.lower() for term in TERM.findall((DOCS / "glossary.md").read_text())]
    assert len(terms) > 50
    assert terms == sorted(terms)

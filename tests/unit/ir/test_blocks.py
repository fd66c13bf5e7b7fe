"""Blocks of a model by the names of its operations, and the shardings that belong to them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.graphs import op, value

from autopar.ir.blocks import MAX_BLOCKS, blocks_of, fits, picture_blocks, shardings_inside
from autopar.ir.graph import Graph
from autopar.ir.plan_parts import BlockSharding


def graph_of(modules: Sequence[str]) -> Graph:
    """Chain of operations in these modules."""
    values = [value(f"v{i}:0", 2) for i in range(len(modules) + 1)]
    ops = tuple(op("relu", (f"%v{i}:0",), values[i + 1], module=module) for i, module in enumerate(modules))
    return Graph("m", "train", 1, (values[0],), (), ops, (), (), None, None)


MODULES = ["stem.conv", "stem.norm", "stages.0.blocks.0.fc1", "stages.0.blocks.1.fc1", "stages.1.down", "norm", ""]


def test_pictures_show_innermost_blocks_and_outermost_modules_elsewhere() -> None:
    graph = graph_of(MODULES)
    assert picture_blocks(graph) == [
        "stem", "stem", "stages.0.blocks.0", "stages.0.blocks.1", "stages.1", "norm", "v7"
    ]  # fmt: skip
    assert list(blocks_of(graph))[:2] == ["stem.conv", "stem.norm"]


def test_pictures_of_many_blocks_show_outermost_ones() -> None:
    modules = [f"stages.{s}.blocks.{b}.fc1" for s in range(2) for b in range(MAX_BLOCKS)]
    assert set(picture_blocks(graph_of(modules))) == {"stages.0", "stages.1"}
    assert len(set(picture_blocks(graph_of(modules[:MAX_BLOCKS])))) == MAX_BLOCKS


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("blocks.*", "blocks.12", True),
        ("blocks.*", "blocks", False),
        ("blocks.*", "blocks.norm", False),
        ("blocks.0…5,7", "blocks.5", True),
        ("blocks.0…5,7", "blocks.6", False),
        ("blocks.0…5,7", "blocks.7", True),
        ("blocks.0…99999999999999999999", "blocks.6", True),
        ("stages.*.blocks.0", "stages.2.blocks.0", True),
        ("norm", "norm", True),
        ("a…b", "3", False),
    ],
)
def test_names_fit_patterns(pattern: str, name: str, expected: bool) -> None:
    assert fits(pattern, name) is expected


def test_the_most_specific_sharding_counts() -> None:
    known = [
        BlockSharding(name, 1, {})
        for name in ("patch_embed.proj", "blocks.0", "blocks.*", "stages.*.blocks.*", "stages.*.blocks.0", "norm")
    ]

    def found(block: str) -> list[str]:
        return [sharding.name for sharding in shardings_inside(known, block)]

    assert found("blocks.0") == ["blocks.0"] and found("blocks.3") == ["blocks.*"]
    assert found("stages.1.blocks.0") == ["stages.*.blocks.0"]
    assert found("patch_embed") == ["patch_embed.proj"] and found("head") == []
    assert found("stages.1") == ["stages.*.blocks.*", "stages.*.blocks.0"]  # all inside of a coarser block

"""Where compiled regions begin: after the first product of a block, or at its first operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.graphs import op, value

from autopar.ir.graph import Op
from autopar.ops.regions import MIN_REGION_OPS, product_end, region_starts

ROWS = value("x", 2, 4, 8)


def linear(name: str, read: str, target: str = "aten.linear.default") -> Op:
    return op(target, (f"%{read}", "%w", "%b"), value(name, 2, 4, 8))


def convolution(name: str, read: str, bias: str | None = None, target: str = "aten.conv2d.default") -> Op:
    return op(target, (f"%{read}", "%w", bias), value(name, 2, 3, 4, 4))


def norm(name: str = "norm", read: str = "x") -> Op:
    return op("aten.layer_norm.default", (f"%{read}", (8,)), value(name, 2, 4, 8))


def relu(name: str, read: str) -> Op:
    return op("aten.relu.default", (f"%{read}",), value(name, 2, 4, 8))


def view(name: str, read: str) -> Op:
    return op("aten.view.default", (f"%{read}", (8, 8)), value(name, 8, 8))


def transposed(name: str, read: str) -> Op:
    return op("aten.transpose.int", (f"%{read}", 1, 2), replace(value(name, 2, 8, 4), stride=(32, 1, 8)))


def added(name: str, *read: str) -> Op:
    return op("aten.add.Tensor", tuple(f"%{r}" for r in read), value(name, 2, 4, 8))


def reduced(name: str, read: str, home: str) -> Op:
    return replace(op("autopar.all_reduce.default", (f"%{read}", "tp"), value(name, 2, 4, 8)), home=home)


@pytest.mark.parametrize(
    ("block", "end"),
    [
        ([norm(), linear("qkv", "norm"), relu("y", "qkv"), added("sum", "x", "y")], 2),
        ([linear("y", "x", "autopar.linear_wgrad_fused.default"), relu("z", "y")], 1),
        ([convolution("y", "x"), relu("z", "y"), convolution("shortcut", "x"), added("sum", "z", "shortcut")], 1),
        # an activation that the shortcut reads too, as in ResNetV2
        ([relu("a", "x"), convolution("shortcut", "a"), convolution("y", "a"), added("sum", "y", "shortcut")], 3),
        # query, key and value of separate layers
        ([norm(), linear("q", "norm"), view("r", "q"), linear("k", "norm"), linear("v", "norm"), view("s", "k")], 5),
        # another operation than a product reads the norm
        ([norm(), linear("q", "norm"), added("sum", "norm", "q"), linear("y", "sum")], None),
        ([convolution("y", "x", "%b"), relu("z", "y")], None),
        ([convolution("y", "x", "%b", "autopar.patch_convolution.default"), relu("z", "y")], None),
        # tokens are mixed, as in MLP-Mixer
        ([norm(), transposed("t", "norm"), linear("y", "t"), relu("z", "y")], None),
        ([norm(), relu("y", "norm")], None),
        # tensor parallelism
        ([linear("y", "x"), reduced("whole", "y", "y"), relu("z", "whole")], 2),
    ],
)  # fmt: skip
def test_end_of_a_blocks_first_products(block: list[Op], end: int | None) -> None:
    assert product_end(block) == end


def block(number: int, size: int, product: int | None = 1, module: str = "blocks") -> list[Op]:
    """Operations of a block; the one at ``product`` is a matrix product."""
    names = [f"{module}.{number}.v{k}" for k in range(size)]
    ops = [linear(n, "x") if k == product else relu(n, "x") for k, n in enumerate(names)]
    return [replace(own, module=f"{module}.{number}" if module else "") for own in ops]


SIZE = MIN_REGION_OPS + 2
STEM, HEAD = block(0, 3, 0, ""), block(1, 3, 2, "")


@pytest.mark.parametrize(
    ("ops", "starts"),
    [
        ([*STEM, *block(0, SIZE), *block(1, SIZE), *HEAD], (0, 5, 15)),
        ([*STEM, *block(0, SIZE, None), *block(1, SIZE, None), *HEAD], (0, 3, 13, 23)),  # no products: whole blocks
        ([*block(2, SIZE), *block(3, SIZE)], (0, 2, 12)),  # a stage that begins with a block
        ([*block(2, SIZE), *block(3, SIZE, SIZE - 1)], (0, 2)),  # the last product is at the end
        ([*STEM, *block(0, SIZE, 8), *block(1, SIZE, 1), *block(2, SIZE, 1)], (0, 12, 25)),  # 3 operations apart
        ([*STEM, *block(0, 4), *block(1, 4), *HEAD], (0,)),  # small modules
        ([], ()),
    ],
)  # fmt: skip
def test_regions_begin_once_for_each_block(ops: Sequence[Op], starts: tuple[int, ...]) -> None:
    assert region_starts(ops) == starts
    assert region_starts(ops, [1] if ops else []) == tuple(sorted({*starts, *([1] if ops else [])}))


def test_the_stem_of_a_wrapped_model_is_no_block() -> None:
    """As in ``nn.Sequential(model, head)``, where all modules are below a number."""
    stem = [replace(own, module="0.stem") for own in block(0, SIZE)]
    assert region_starts([*stem, *block(0, SIZE, module="0.blocks")]) == (0, SIZE + 2)

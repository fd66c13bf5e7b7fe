"""Linear layers fused with the collective before or after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar.codegen.fusions.async_tp import fuse_async_tp
from autopar.ir.graph import Op, Ref, Value


def op(name: str, target: str, *args: object, requires_grad: bool = True, shape: tuple[int, ...] = (4, 8)) -> Op:
    strides = (*shape[1:], 1)
    return Op(name, target, args, (), (Value(name, shape, "float32", strides, requires_grad),), name)


SUM = op("sum", "autopar.sum_gradient.default", Ref("x"), "tp")
GATHER = op("gather", "autopar.all_gather.default", Ref("x"), 1, 1, 2, "tp", True)
LINEAR = op("fc", "aten.linear.default", Ref("sum"), Ref("weight"), Ref("bias"))
PLAIN = op("fc", "aten.linear.default", Ref("gather"), Ref("weight"))
SCATTER = op("scatter", "autopar.reduce_scatter.default", Ref("fc"), 0, 1, 2, "tp")
RELU = op("relu", "aten.relu.default", Ref("x"))


def test_a_collective_and_the_linear_layer_that_alone_reads_it_become_one() -> None:
    first, second = fuse_async_tp([SUM, RELU, LINEAR], ())
    assert first is RELU
    assert (second.target, second.outputs) == ("autopar.linear_with_async_grad_allreduce.default", LINEAR.outputs)
    assert second.args == (Ref("x"), Ref("weight"), Ref("bias"), "tp")
    (both,) = fuse_async_tp([GATHER, PLAIN], ())
    assert both.target == "autopar.all_gather_linear.default"
    assert both.args == (Ref("x"), Ref("weight"), None, 1, 1, 2, "tp")


def test_along_the_first_dim_rows_are_apart() -> None:
    gather = op("gather", "autopar.all_gather.default", Ref("x"), 0, 1, 2, "tp", True)
    (both,) = fuse_async_tp([gather, PLAIN], ())
    assert (both.target, both.outputs) == ("autopar.pipelined_all_gather_linear.default", PLAIN.outputs)
    assert both.args == (Ref("x"), Ref("weight"), None, 2, "tp")
    linear = op("fc", "aten.linear.default", Ref("x"), Ref("weight"), Ref("bias"))
    relu, both = fuse_async_tp([linear, RELU, SCATTER], ())
    assert relu is RELU
    assert (both.target, both.outputs) == ("autopar.pipelined_linear_reduce_scatter.default", SCATTER.outputs)
    assert both.args == (Ref("x"), Ref("weight"), Ref("bias"), 2, "tp")
    layer, scatter = fuse_async_tp([gather, PLAIN, SCATTER], ())  # one of the two
    assert (layer.target, scatter) == ("autopar.pipelined_all_gather_linear.default", SCATTER)


@pytest.mark.parametrize(
    "ops",
    [
        [SUM, LINEAR, op("relu", "aten.relu.default", Ref("sum"))],
        [SUM, LINEAR, op("fc2", "aten.linear.default", Ref("sum"), Ref("weight2"))],
        [SUM, op("fc", "aten.linear.default", Ref("x"), Ref("sum"))],
        [SUM, op("fc", "aten.linear.default", Ref("sum"), Ref("sum"))],
        [op("gather", "autopar.all_gather.default", Ref("x"), 1, 1, 2, "tp", False), PLAIN],  # nothing to sum
        [op("sum", "autopar.sum_gradient.default", Ref("x"), "tp", requires_grad=False), LINEAR],
        [op("gather", "autopar.all_reduce.default", Ref("x"), "tp"), PLAIN],
        [SUM, op("fc", "aten.linear.default", Ref("sum"), Ref("weight"), Ref("bias"), shape=(8,))],
        [op("fc", "aten.linear.default", Ref("x"), Ref("weight")), SCATTER, op("relu", "aten.relu.default", Ref("fc"))],
        [
            op("fc", "aten.linear.default", Ref("x"), Ref("weight")),
            op("scatter", "autopar.reduce_scatter.default", Ref("fc"), 1, 1, 2, "tp"),
        ],
        [SUM, replace(LINEAR, outputs=(replace(LINEAR.outputs[0], dtype="complex64"),))],
    ],
    ids=[
        "another reader",
        "two layers",
        "as weight",
        "as both",
        "no sum",
        "no gradient",
        "another collective",
        "one dim",
        "another reader of the product",
        "another dim of the product",
        "complex numbers",
    ],
)
def test_others_stay_as_they_are(ops: Sequence[Op]) -> None:
    assert fuse_async_tp(ops, ()) == list(ops)


def test_what_others_read_is_still_made() -> None:
    assert fuse_async_tp([SUM, LINEAR], {"sum"}) == [SUM, LINEAR]

"""The priced graph: bytes that cross a cut, and its printed form."""

from __future__ import annotations

import pytest
import torch
from support.models import UNet
from support.priced import price

from autopar.cost.hardware.load import load_hardware
from autopar.cost.ops.op_stats import graph_stats
from autopar.ir.cost_graph import CostGraph, Group, ResidentTensor, TensorEdge
from autopar.trace.trace import trace

MIB = 2**20


def diamond() -> CostGraph:
    """0 feeds 1 and 2, both feed 3, and 0 skips to 3; 4 is the loss."""
    groups = tuple(Group(name, (name,), name, 1e-3, 2e-3, saved_bytes=MIB) for name in "abcd")
    flows = (
        TensorEdge("a", 0, (1, 2, 3), MIB, True),
        TensorEdge("b", 1, (3,), 2 * MIB, True),
        TensorEdge("c", 2, (3,), 4 * MIB, True),
        TensorEdge("d", 3, (4,), MIB, True),
    )
    return CostGraph("diamond", 2, (*groups, Group("loss", (), "")), flows)


def test_a_cut_is_charged_each_tensor_once() -> None:
    assert diamond().cut_bytes == (MIB, 3 * MIB, 7 * MIB, MIB)


def test_printed() -> None:
    assert str(diamond()) == (
        "diamond: 5 groups, 4 flows, microbatch of 2\n"
        "   0 a: F 1.000 ms, B 2.000 ms, saves 1.00 MiB, reads [], a cut after it sends 1.00 MiB\n"
        "   1 b: F 1.000 ms, B 2.000 ms, saves 1.00 MiB, reads [0], a cut after it sends 3.00 MiB\n"
        "   2 c: F 1.000 ms, B 2.000 ms, saves 1.00 MiB, reads [0], a cut after it sends 7.00 MiB\n"
        "   3 d: F 1.000 ms, B 2.000 ms, saves 1.00 MiB, reads [0, 1, 2], a cut after it sends 1.00 MiB\n"
        "   4 loss: F 0.000 ms, B 0.000 ms, saves 0.00 MiB, reads [3]"
    )


def test_skip_over_a_real_model_is_charged_at_every_cut_it_crosses() -> None:
    graph = trace(UNet(), (torch.randn(2, 3, 8, 8),))
    cost = price(graph, graph_stats(graph), load_hardware("cpu-generic"), 2)
    skip = next(f for f in cost.edges if f.value == "relu")
    inside = range(skip.producer, max(skip.consumers))
    names = [cost.groups[i].name for i in inside]
    assert "middle.conv2d" in names and not {"merge.conv2d", "head.conv2d"} & set(names)
    assert len(inside) >= 3 and all(cost.cut_bytes[i] >= skip.num_bytes for i in inside)


def test_an_edge_backwards_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="runs backwards"):
        CostGraph("bad", 1, (Group("a", (), ""), Group("b", (), "")), (TensorEdge("x", 1, (0,), 1, True),))


def test_a_weight_that_no_group_uses_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="no group uses w"):
        CostGraph("bad", 1, (Group("loss", (), ""),), (), weights=(ResidentTensor("w", 1, ()),))

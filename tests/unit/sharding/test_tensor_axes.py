"""Local graphs on several tensor axes against the whole model: outputs, and the gradients of input and weights."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import pytest
import torch
from support.arrangements import ARRANGEMENTS, Arrangement, Products
from support.virtual_mesh import on_each_shard
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from autopar.codegen.emit import graph_module
from autopar.codegen.split import split
from autopar.ir.graph import Graph, Op, Ref, Value
from autopar.ir.layout import AxisSizes, Layout
from autopar.ir.tensor_axes import axis_index, axis_sizes, tensor_axes
from autopar.ops.registry import operator
from autopar.sharding.localise import localised
from autopar.sharding.lookup import local_rule, rule_of
from autopar.sharding.reshard import COLLECTIVES
from autopar.sharding.rule import Rule, Strategy, label_text, replicate, strategies
from autopar.sharding.shard_graph import shard_graph, shard_over_axis, storage, storage_on_axis
from autopar.sharding.table import RULES
from autopar.sharding.tensors import local_part, summed_parts, whole_tensor
from autopar.trace.trace import trace, weight_tensors

CPU = torch.device("cpu")
SHAPE = (4, 8, 24)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(24), nn.Linear(24, 32), nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise, self.group = nn.Conv2d(8, 8, 3, groups=8), nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.group(self.depthwise(torch.relu(self.norm(self.conv1(x))))).mean((2, 3))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(24, 4, qkv_bias=True)
        self.head = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x).mean(1))


MODELS = {
    "mlp": (Mlp, SHAPE), "block": (partial(Block, 24, 4, qkv_bias=True), SHAPE),
    "convolutions": (Convolutions, (4, 4, 6, 6)), "pooled": (Pooled, SHAPE),
    "products": (lambda: nn.Sequential(Products(32, 4)), (8, 4, 32)),
    "three heads, seven tokens": (partial(Block, 24, 3), (5, 7, 24)),
}  # fmt: skip
MEGATRON = {"attn.qkv.linear": "nx3", "attn.proj.linear": "k", "mlp.fc1.linear": "n", "mlp.fc2.linear": "k"}
RESIDUAL = ("norm1.layer_norm", "norm2.layer_norm", "add", "add_1")
TOKENS = dict.fromkeys((*RESIDUAL, *MEGATRON), "d1") | {"attn.scaled_dot_product_attention": "q"}


@cache
def traced(name: str) -> tuple[nn.Module, Graph]:
    """A model in float64, and its graph, with a gradient for its input."""
    torch.manual_seed(1)
    make, shape = MODELS[name]
    model = make().double()
    graph = trace(model, (torch.randn(shape, dtype=torch.float64),), mode="train")
    return model, replace(graph, inputs=tuple(replace(v, requires_grad=True) for v in graph.inputs))


def per_axis(*labels: Mapping[str, str]) -> dict[str, str]:
    """Strategies of the labels on each axis."""
    names = dict.fromkeys(name for own in labels for name in own)
    return {name: label_text({f"tp{i}": own[name] for i, own in enumerate(labels) if name in own}) for name in names}


def random_strategies(graph: Graph, sizes: AxisSizes, seed: int) -> dict[str, str]:
    """A random label of every operation on every axis, collectives of outer axes included."""
    draw, found = random.Random(seed), dict[str, dict[str, str]]()
    for axis in tensor_axes(sizes):
        labels: dict[str, str] = {}
        for op in graph.ops:
            rule = local_rule(op, graph)
            if rule is not None and draw.random() < 0.6:
                parts = dict.fromkeys(rule.free, (2, 3))
                labels[op.name] = draw.choice(strategies(rule, axis.ranks, parts, rule.free)).label
        for name, label in labels.items():
            found.setdefault(name, {})[axis.name] = label
        stored = storage_on_axis(graph, labels, axis)
        graph = shard_over_axis(graph, labels, stored, axis, dict.fromkeys((op.name for op in graph.ops), 0))
    return {name: label_text(labels) for name, labels in found.items()}


def check(
    name: str, sizes: AxisSizes, by_name: Mapping[str, str], layouts: Mapping[str, Layout] | None = None
) -> Mapping[str, Layout]:
    """Compare all shards with the whole model; returns the layouts of its weights, as given or as they are read."""
    model, graph = traced(name)
    stored = storage(graph, by_name, sizes) if layouts is None else layouts
    whole, model = weight_tensors(model, graph), copy.deepcopy(model)
    x = torch.randn(graph.inputs[0].shape, dtype=torch.float64)
    expected = model.train()(x.requires_grad_())
    arriving = torch.randn_like(expected)
    expected.backward(arriving)

    def work(shard: int, keys: dict[str, str]) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
        local = shard_graph(graph, by_name, stored, sizes, dict.fromkeys((op.name for op in graph.ops), 0), shard)
        (program,) = split(local, dict.fromkeys((op.name for op in graph.ops), 0), 1)
        index = axis_index(sizes, shard)
        held = {n: local_part(t, stored[n], sizes, index).detach().clone() for n, t in whole.items()}
        held = {n: t.requires_grad_(graph.weight[n].requires_grad) for n, t in held.items()}
        own = x.detach().clone().requires_grad_()
        (made,) = graph_module(program, held, CPU, keys)(own)
        made.backward(arriving)
        return made.detach(), own.grad, {n: t.grad if t.requires_grad else t for n, t in held.items()}

    results = on_each_shard(sizes, work)
    for made, gradient, _ in results:
        close(made, expected, "output")
        assert gradient is not None and x.grad is not None
        close(gradient, x.grad, "input gradient")
    whole_values = {n: p.grad for n, p in model.named_parameters()} | dict(model.named_buffers())
    for n, wanted in whole_values.items():
        layout, parts = stored[n], [(axis_index(sizes, i), own[n]) for i, (_, _, own) in enumerate(results)]
        assert wanted is not None
        close(whole_tensor(summed_parts(parts, layout.partial_gradient), layout, sizes), wanted, n)
    return stored


def close(found: Tensor, wanted: Tensor, what: str) -> None:
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-10), f"{what} differs by {(found - wanted).abs().max()}"


# -- rules of collectives --------------------------------------------------------------------------------------------

TWO_BY_TWO = axis_sizes((2, 2))
THREE_PARTS = (1, 3)  # dim and outer
ARGUMENTS: Mapping[str, Sequence[tuple[Any, ...]]] = {
    "all_reduce": [("tp0",)], "sum_gradient": [("tp0",)], "first_rank": [("tp0",)], "share_gradient": [(2,)],
    "shard": [(*THREE_PARTS, 2, "tp0", False), (*THREE_PARTS, 2, "tp0", True), (0, 1, 2, "tp0", False)],
    "reduce_scatter": [(*THREE_PARTS, 2, "tp0"), (2, 2, 2, "tp0")],
    "all_gather": [(*THREE_PARTS, 2, "tp0", False), (*THREE_PARTS, 2, "tp0", True)],
    "all_to_all": [(*THREE_PARTS, 2, 2, 2, "tp0"), (2, 1, *THREE_PARTS, 2, "tp0")],
}  # fmt: skip


def test_every_collective_has_a_rule() -> None:
    assert ARGUMENTS.keys() == COLLECTIVES.keys()
    assert {f"autopar.{name}" for name in ARGUMENTS} <= RULES.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_collectives_of_the_outer_axis_run_on_parts(name: str) -> None:
    """Every letter of the rule: the parts of the inner axis together are what the outer axis makes of whole tensors."""
    for args in ARGUMENTS[name]:
        bare = Op("op", f"autopar.{name}.default", (Ref("x"), *args), (), (), "")
        x = torch.randn(2, 8, 24, 16, dtype=torch.float64)  # one for each rank of the outer axis
        y = operator(bare.target)(x[0].to("meta"), *args)
        op = replace(bare, outputs=(Value("y", tuple(y.shape), "float64", y.stride(), True),))
        rule = rule_of(op, {"x": x.shape[1:]}.__getitem__)
        assert rule is not None and len(rule.free) >= 3
        arriving = torch.randn(2, *y.shape, dtype=torch.float64)
        expected = parts_of_collective(op, rule, replicate(rule), x, arriving)
        for chosen in strategies(rule, 2, dict.fromkeys(rule.free, (2, 3)), axis="tp1")[1:]:
            for shard, found in enumerate(parts_of_collective(op, rule, chosen, x, arriving)):
                for layout, one, whole in zip((*chosen.outputs, *chosen.operands), found, expected[shard], strict=True):
                    index = axis_index(TWO_BY_TWO, shard)
                    close(one, local_part(whole, layout, TWO_BY_TWO, index), f"{args} by {chosen.label}")


def parts_of_collective(
    op: Op, rule: Rule, chosen: Strategy, x: Tensor, arriving: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Result and gradient of a collective of the outer axis on every shard, under a strategy of the inner axis."""

    def work(shard: int, keys: dict[str, str]) -> tuple[Tensor, Tensor]:
        index = axis_index(TWO_BY_TWO, shard)
        local = localised(op, rule, chosen, 2, index["tp1"])
        own = local_part(x[index["tp0"]], chosen.operands[0], TWO_BY_TWO, index).clone().requires_grad_()
        args = (keys.get(argument, argument) if isinstance(argument, str) else argument for argument in local.args[1:])
        made = operator(op.target)(own, *args)
        assert made.shape == local.outputs[0].shape
        made.backward(local_part(arriving[index["tp0"]], chosen.outputs[0], TWO_BY_TWO, index))
        assert own.grad is not None
        return made.detach(), own.grad

    return on_each_shard(TWO_BY_TWO, work)


# -- models ----------------------------------------------------------------------------------------------------------

CASES = {
    "Megatron on both axes": (MEGATRON, MEGATRON),
    "tokens, Megatron": (TOKENS, MEGATRON),
    "Megatron, tokens": (MEGATRON, TOKENS),
    "tokens on both axes": (TOKENS, TOKENS),
    "Megatron with tokens between, on both axes": 2 * (MEGATRON | dict.fromkeys(RESIDUAL, "d1"),),
    "heads, head dims": (MEGATRON, {"attn.qkv.linear": "n", "attn.proj.linear": "k"}),
    "columns, rows": ({"mlp.fc1.linear": "n"}, {"mlp.fc1.linear": "k"}),
    "on the outer axis alone": (MEGATRON, {}),
    "on the inner axis alone": ({}, MEGATRON),
}


@pytest.mark.parametrize("labels", CASES.values(), ids=CASES)
def test_a_block_on_two_axes(labels: tuple[Mapping[str, str], ...]) -> None:
    check("block", axis_sizes((2, 2)), per_axis(*labels))


def test_a_weight_is_split_over_several_axes() -> None:
    sizes = axis_sizes((2, 2))
    stored = check("block", sizes, per_axis(MEGATRON, MEGATRON))
    assert str(stored["attn.qkv.weight"]) == "tp0:0x3 tp1:0x3" and str(stored["attn.proj.weight"]) == "tp0:1 tp1:1"
    columns = per_axis({"mlp.fc1.linear": "n"}, {"mlp.fc1.linear": "k"})
    assert str(check("block", sizes, columns)["mlp.fc1.weight"]) == "tp0:0 tp1:1"
    assert str(check("block", sizes, per_axis(TOKENS, MEGATRON))["mlp.fc1.weight"]) == "tp1:0 tp0:gradient"


def test_a_block_on_three_axes() -> None:
    """The 3-D arrangement of a product: each axis splits another one of its letters."""
    rows = dict.fromkeys(MEGATRON, "n")
    check("block", axis_sizes((2, 2, 2)), per_axis(TOKENS, rows, dict.fromkeys(MEGATRON, "k")))


@pytest.mark.parametrize("arrangement", ARRANGEMENTS[:1] + ARRANGEMENTS[2:], ids=lambda own: own.name)
def test_arrangements_of_the_textbooks(arrangement: Arrangement) -> None:
    """As in docs/tensor_meshes.md: weights are stored in parts that are gathered before each use."""
    layouts = arrangement.storage(traced("products")[1])
    stored = check("products", axis_sizes(arrangement.sizes), arrangement.strategies, layouts)
    shares = {layout.largest_share((96, 96), axis_sizes(arrangement.sizes)) for layout in stored.values()}
    depth = arrangement.sizes[0] if "2.5d" in arrangement.name else 1
    assert shares == {depth / prod(arrangement.sizes)}


@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", MODELS)
def test_any_letters_on_any_axes(name: str, seed: int, sizes: tuple[int, ...]) -> None:
    _, graph = traced(name)
    check(name, axis_sizes(sizes), random_strategies(graph, axis_sizes(sizes), seed))

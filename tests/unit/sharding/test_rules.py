"""Rules as text, the layouts they imply, and the local operations, case by case."""

from __future__ import annotations

from itertools import pairwise

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.rule_cases import Case, case, n, x
from support.rule_oracle import cut, example

from autopar.ir.graph import Op, Ref, Value
from autopar.ir.layout import Layout, split_layout
from autopar.sharding.bound_call import BoundCall
from autopar.sharding.functions.shapes import regroup
from autopar.sharding.localise import localised
from autopar.sharding.lookup import rule_of
from autopar.sharding.parse import bind
from autopar.sharding.rule import Rule, by_operand, by_output, strategies, strategy
from autopar.trace.trace import trace

EMPTY = Op("op", "aten.none.default", (), (), (), "")


def rule_for(found: Case) -> Rule | None:
    this = example(found)
    return rule_of(this.op, this.shape_of)


def bound(text: str, operands: tuple[tuple[int, ...], ...], outputs: tuple[tuple[int, ...], ...]) -> Rule:
    rule = bind(text, BoundCall(EMPTY, operands, outputs))
    assert rule is not None
    return rule


# -- text ----------------------------------------------------------------------------------------------------------


LINEAR = bound("... k, n k, +n -> ... n", ((2, 5, 8), (12, 8), (12,)), ((2, 5, 12),))


def test_a_text_binds_to_shapes() -> None:
    assert str(LINEAR) == "d0 d1 k, n k, +n -> d0 d1 n"
    assert LINEAR.sizes == {"d0": 2, "d1": 5, "k": 8, "n": 12}
    assert LINEAR.free == ("d0", "d1", "k", "n")


def test_a_text_that_does_not_match_gives_no_rule() -> None:
    shapes = {
        "sizes differ": (((4, 8), (12, 7)), ((4, 12),)),
        "too many operands": (((4, 8), (12, 8), (12,), (12,)), ((4, 12),)),
        "rank": (((4, 8), (12,)), ((4, 12),)),
    }
    for what, (operands, outputs) in shapes.items():
        assert bind("... k, n k, +n -> ... n", BoundCall(EMPTY, operands, outputs)) is None, what


def test_a_letter_of_only_some_outputs_is_whole() -> None:
    assert str(bound("n k -> n k, n", ((4, 8),), ((4, 8), (4,)))) == "n k! -> n k!, n"


PRINTED = [
    (case("conv2d.default", x(2, 4, 8, 8), x(8, 4, 3, 3), x(8)), "n i v0! v1!, o i 1 1, +o -> n o 1 1"),
    (case("conv2d.default", x(2, 4, 8, 8), x(8, 4, 2, 2), None, (2, 2)),
     "n i (y0 s0!) (y1 s1!), o i 1 1 -> n o y0 y1"),
    (case("conv2d.default", x(2, 4, 8, 9), x(8, 4, 3, 3), None, (2, 1), (1, 0)),
     "n i (y0~ s0!) v1!, o i 1 1 -> n o y0~ 1"),
    (case("conv_transpose2d.input", x(2, 4, 8, 8), x(4, 4, 4, 2), None, (2, 2), (1, 0)),
     "n i y0~ y1, i o 1 1 -> n o (y0~ s0!) (y1 s1!)"),
    (case("max_pool2d.default", x(2, 4, 8, 8), (3, 2), (2, 2), (1, 0)),
     "d0 d1 (y0~ s0!) (y1 s1!) -> d0 d1 y0~ y1"),
    (case("upsample_bilinear2d.vec", x(2, 4, 8, 8), (16, 12), False, None),
     "d0 d1 (y0~ a0!) (y1~ a1!) -> d0 d1 (y0~ b0!) (y1~ b1!)"),
    (case("conv2d.default", x(2, 8, 4, 4), x(16, 2, 3, 3), x(16), (1, 1), (0, 0), (1, 1), 4),
     "n (g i) v0! v1!, (g o) i 1 1, +(g o) -> n (g o) 1 1"),
    (case("layer_norm.default", x(2, 4, 8), (8,), x(8), x(8)), "d0 d1 d2!, d2!, d2! -> d0 d1 d2!"),
    (case("batch_norm.default", x(4, 8, 2, 2), x(8), x(8), x(8).detach(), x(8).detach(), True, 0.1, 1e-5, True),
     "n! c y0 y1, c, c, c, c -> n! c y0 y1"),
    (case("scaled_dot_product_attention.default", x(2, 4, 8, 4), x(2, 4, 6, 4), x(2, 4, 6, 4), x(2, 1, 8, 6)),
     "d0 d1 q e!, d0 d1 s! e!, d0 d1 s! v!, d0 1 q s! -> d0 d1 q v!"),
    (case("scaled_dot_product_attention.default", x(2, 8, 4, 4), x(2, 2, 4, 4), x(2, 2, 4, 4), is_causal=True,
          enable_gqa=True),
     "d0 (h g) q! e!, d0 h s! e!, d0 h s! v! -> d0 (h g) q! v!"),
    (case("scaled_dot_product_attention.default", x(2, 4, 8, 4), x(2, 4, 8, 4), x(2, 4, 8, 4), None, 0.1),
     "d0! d1! q! e!, d0! d1! s! e!, d0! d1! s! v! -> d0! d1! q! v!"),
    (case("matmul.default", x(4, 1, 4, 8), x(2, 8, 4)), "d0 1 n k, d1 k m -> d0 d1 n m"),
    (case("embedding.default", x(8, 4), n(8, 2, 4)), "v! e, d0 d1 -> d0 d1 e"),
    (case("index.Tensor", x(8, 4), (n(8, 16),)), "d0! d1, i0 -> i0 d1"),
    (case("add.Tensor", x(2, 1, 8), x(4, 1)), "d0 1 d2, d1 1 -> d0 d1 d2"),
    (case("expand.default", x(1, 1, 8), (4, -1, -1)), "1 d1 d2 -> d0 d1 d2"),
    (case("reshape.default", x(2, 5, 24), (2, 5, 3, 4, 2)), "a b (c d e) -> a b c d e"),
    (case("reshape.default", x(4, 6), (6, 4)), "(a b!) (c! f) -> (a d!) (e! f)"),
    (case("view.default", x(1, 4, 4, 8), (1, 2, 2, 2, 2, 8)), "a (b c) (d e) f -> a b c d e f"),
    (case("permute.default", x(2, 4, 3), (2, 0, 1)), "d0 d1 d2 -> d2 d0 d1"),
    (case("unbind.int", x(3, 4)), "d0! d1 -> d1, d1, d1"),
    (case("chunk.default", x(2, 8), 2, 1), "d0 (p! r) -> d0 r, d0 r"),
    (case("split_with_sizes.default", x(2, 8), (2, 6), 1), "d0 d1! -> d0 1, d0 1"),
    (case("cat.default", (x(2, 4), x(2, 4)), 1), "d0 r, d0 r -> d0 (p! r)"),
    (case("cat.default", (x(2, 1), x(2, 4)), 1), "d0 1, d0 1 -> d0 1"),
    (case("slice.Tensor", x(4, 8), 1, 1, 8), "d0 d1! -> d0 1"),
    (case("slice.Tensor", x(4, 8), 1, 0, 0), "d0 d1! -> d0 1"),
    (case("cat.default", (x(2, 0), x(2, 4)), 1), "d0 1, d0 1 -> d0 1"),
    (case("sum.dim_IntList", x(2, 4, 8), (1,), True), "d0 d1 d2 -> d0 1 d2"),
    (case("mean.dim", x(2, 4, 8), (1,)), "d0 d1 d2 -> d0 d2"),
    (case("softmax.int", x(2, 4, 8), -1), "d0 d1 d2! -> d0 d1 d2!"),
    (case("new_zeros.default", x(2, 4), (2, 1)), "u0? u1? -> d0! d1!"),
    (case("bernoulli.p", x(2, 4).detach(), 0.5), "d0! d1! -> d0! d1!"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "text"), PRINTED, ids=[f"{c.target}-{i}" for i, (c, _) in enumerate(PRINTED)])
def test_rules_as_text(found: Case, text: str) -> None:
    assert str(rule_for(found)) == text


def test_a_tensor_read_twice_is_split_only_where_both_positions_agree() -> None:
    square = x(4, 4)
    assert str(rule_for(case("mul.Tensor", square, square))) == "d0 d1 -> d0 d1"
    assert str(rule_for(case("mm.default", square, square))) == "n! k! -> n! m!"
    assert str(rule_for(case("addmm.default", square, square, x(4, 4)))) == "n m!, k! m! -> n m!"


def test_what_has_no_rule() -> None:
    counter = Op("op", "aten.add_.Tensor", (Ref("a"), 1), (), (), "")
    updating = Op("op", "aten.relu.default", (Ref("a"),), (), (Value("y", (4,), "float32", (1,)),), "", mutates=("a",))
    assert rule_of(counter, lambda _: (4,)) is None
    assert rule_of(updating, lambda _: (4,)) is None
    assert rule_for(case("kthvalue.default", x(4, 8), 2)) is None
    assert rule_for(case("view.dtype", x(4, 8).detach(), torch.int64)) is None
    assert rule_for(case("reshape.default", x(0, 8), (8, 0))) is None
    assert rule_of(Op("op", "autopar.all_reduce.default", (), (), (), ""), lambda _: ()) is None


# -- strategies ----------------------------------------------------------------------------------------------------


def described(rule: Rule, label: str, ranks: int) -> str:
    found = strategy(rule, label, ranks)
    assert found is not None
    return f"{', '.join(map(str, found.operands))} -> {', '.join(map(str, found.outputs))}"


def test_the_layouts_of_a_linear_layer() -> None:
    assert described(LINEAR, "", 2) == "replicated, replicated, replicated -> replicated"
    assert described(LINEAR, "n", 2) == "tp:gradient, tp:0, tp:0 -> tp:2"
    assert described(LINEAR, "nx3", 4) == "tp:gradient, tp:0x3, tp:0x3 -> tp:2x3"
    assert described(LINEAR, "k", 4) == "tp:2, tp:1, tp:sum -> tp:sum"
    assert described(LINEAR, "d0", 2) == "tp:0, tp:gradient, tp:gradient -> tp:0"


def test_a_letter_inside_a_dim_is_split_behind_those_before_it() -> None:
    rule = rule_for(case("reshape.default", x(2, 5, 24), (2, 5, 3, 4, 2)))
    assert rule is not None
    assert described(rule, "d", 4) == "tp:2x3 -> tp:3"
    assert described(rule, "dx2", 2) == "tp:2x6 -> tp:3x2"
    assert described(rule, "e", 2) == "tp:2x12 -> tp:4"


def test_unread_operands_lie_anyhow() -> None:
    rule = rule_for(case("type_as.default", x(2, 4), x(8).detach()))
    assert rule is not None
    assert described(rule, "u0", 2) == "replicated, tp:0 -> replicated"
    assert described(rule, "d1", 2) == "tp:1, tp:gradient -> tp:1"


def test_no_strategy_for_what_does_not_divide() -> None:
    assert [s.label for s in strategies(LINEAR, 2, {"n": (3, 5)})] == ["", "d0", "k", "n", "nx3"]
    assert [s.label for s in strategies(LINEAR, 5, {})] == ["", "d1"]
    empty = bound("n k -> n k", ((4, 0),), ((4, 0),))
    assert [s.label for s in strategies(empty, 2, {})] == ["", "n"]
    for label in ("d1", "n!", "z", "nx5", "x2", "2", "nx0"):
        assert strategy(LINEAR, label, 2) is None, label


def test_strategies_on_another_axis() -> None:
    found = strategy(LINEAR, "k", 2, "inner")
    assert found is not None
    assert found.outputs == (Layout(partial=("inner",)),)
    assert by_operand(LINEAR, 0, found.operands[0], 2) == found


def test_the_strategy_that_reads_or_makes_a_layout() -> None:
    rule = rule_for(case("reshape.default", x(2, 5, 24), (2, 5, 3, 4, 2)))
    assert rule is not None
    cases = {(2, 3, 4): "d", (2, 6, 2): "dx2", (2, 1, 3): "c", (2, 12, 2): "e", (2, 3, 8): None, (2, 1, 4): None,
             (1, 1, 2): None, (0, 1, 2): "a", (5, 1, 2): None}  # fmt: skip
    for (dim, outer, ranks), label in cases.items():
        found = by_operand(rule, 0, split_layout(dim, outer), ranks)
        assert (found and found.label) == label, (dim, outer, ranks)
        if found:
            assert by_output(rule, 0, found.outputs[0], ranks) == found
    for layout in (Layout(), Layout(partial=("tp",)), Layout(split_layout(0).splits, partial=("dp",))):
        assert by_operand(rule, 0, layout, 2) is None


# -- digits --------------------------------------------------------------------------------------------------------


SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=5)


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Shapes of equal size, each made of the same factors in the same order, or of any."""
    factors = draw(SIZES)
    shapes = []
    for _ in range(draw(st.integers(2, 4))):
        order = draw(st.permutations(factors)) if draw(st.booleans()) else factors
        cuts = draw(st.lists(st.booleans(), min_size=len(factors), max_size=len(factors)))
        shape = [1]
        for size, apart in zip(order, cuts):
            shape[-1:] = [shape[-1], size] if apart else [shape[-1] * size]
        shapes.append(tuple(shape))
    return shapes


def reshaping(before: tuple[int, ...], after: tuple[int, ...]) -> Op:
    stride = torch.empty(after).stride()
    return Op("op", "aten.view.default", (Ref("x"), after), (), (Value("y", after, "float64", stride),), "")


@given(chains(), st.sampled_from([2, 3, 4]), st.data())
def test_a_digit_follows_reshapes(shapes: list[tuple[int, ...]], ranks: int, data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shapes[0]).numel())
    dim = data.draw(st.integers(0, len(shapes[0]) - 1))
    outers = [n for n in range(1, shapes[0][dim] + 1) if shapes[0][dim] % (n * ranks) == 0]
    layout = split_layout(dim, data.draw(st.sampled_from(outers))) if outers else Layout()
    mine = [cut(whole.reshape(shapes[0]), layout, ranks, rank) for rank in range(ranks)]
    for before, after in pairwise(shapes):
        op = reshaping(before, after)
        rule = rule_of(op, lambda _, shape=before: shape)
        assert rule is not None
        found = by_operand(rule, 0, layout, ranks)
        if found is None:
            return
        assert found.operands == (layout,)
        assert by_output(rule, 0, found.outputs[0], ranks) == found
        local = localised(op, rule, found, ranks)
        layout = found.outputs[0]
        mine = [part.reshape(local.args[1]) for part in mine]
        for rank, part in enumerate(mine):
            assert torch.equal(part, cut(whole.reshape(after), layout, ranks, rank))


@given(chains())
def test_factors_make_up_both_shapes(shapes: list[tuple[int, ...]]) -> None:
    before, after = shapes[:2]
    factors = regroup(before, after)
    for side, shape in enumerate((before, after)):
        sizes = [1] * len(shape)
        for factor in factors:
            dim = factor.dims[side]
            if dim is not None:
                sizes[dim] *= factor.size
        assert tuple(sizes) == shape
    if shapes[0] == shapes[1]:
        assert all(None not in factor.dims for factor in factors)


# -- local operations ----------------------------------------------------------------------------------------------


LOCAL: list[tuple[Case, str, str]] = [
    (case("view.default", x(2, 8), (-1, 4)), "", "aten.reshape.default(%x0, (4, 4)) [4, 4]"),
    (case("view.default", x(2, 24), (2, 3, 4, 2)), "c", "aten.reshape.default(%x0, (2, 3, 2, 2)) [2, 3, 2, 2]"),
    (case("view_as.default", x(4, 8), x(4, 2, 4)), "a", "aten.reshape_as.default(%x0, %x1) [2, 2, 4]"),
    (case("squeeze.dim", x(4, 2), 1), "b", "aten.reshape.default(%x0, (4, 1)) [4, 1]"),
    (case("expand.default", x(1, 4), (4, -1)), "d0", "aten.expand.default(%x0, (2, 4)) [2, 4]"),
    (case("repeat.default", x(4), (2, 4)), "r1", "aten.repeat.default(%x0, (2, 2)) [2, 8]"),
    (case("repeat.default", x(4), (2, 4)), "d1", "aten.repeat.default(%x0, (2, 4)) [2, 8]"),
    (case("conv1d.default", x(1, 8, 4), x(8, 2, 1), None, (1,), (0,), (1,), 4), "g",
     "aten.conv1d.default(%x0, %x1, None, (1,), (0,), (1,), 2) [1, 4, 4]"),
    (case("conv1d.default", x(1, 8, 4), x(8, 2, 1), None, groups=4), "o",
     "aten.conv1d.default(%x0, %x1, None, groups=4) [1, 4, 4]"),
    (case("conv1d.default", x(1, 8, 4), x(8, 2, 1), None, groups=4), "g",
     "aten.conv1d.default(%x0, %x1, None, groups=2) [1, 4, 4]"),
    (case("group_norm.default", x(2, 8, 4), 4), "g", "aten.group_norm.default(%x0, 2) [2, 4, 4]"),
    (case("split.Tensor", x(8, 2), 4), "r", "aten.split.Tensor(%x0, 2) [2, 2] [2, 2]"),
    (case("split_with_sizes.default", x(2, 8), (4, 4), -1), "r",
     "aten.split_with_sizes.default(%x0, (2, 2), -1) [2, 2] [2, 2]"),
    (case("narrow.default", x(4, 8), 0, 0, 4), "d0", "aten.narrow.default(%x0, 0, 0, 2) [2, 8]"),
    (case("slice.Tensor", x(4, 8), 0, 0, 4), "d0", "aten.slice.Tensor(%x0, 0, 0, 4) [2, 8]"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "label", "text"), LOCAL, ids=[f"{c.target}-{i}" for i, (c, *_) in enumerate(LOCAL)])
def test_integer_arguments_become_local(found: Case, label: str, text: str) -> None:
    this = example(found)
    rule = rule_of(this.op, this.shape_of)
    assert rule is not None
    chosen = strategy(rule, label, 2)
    assert chosen is not None
    op = localised(this.op, rule, chosen, 2)
    arguments = ", ".join([*map(repr, op.args), *(f"{k}={v!r}" for k, v in op.kwargs)])
    assert f"{op.target}({arguments}) {' '.join(str(list(v.shape)) for v in op.outputs)}" == text


@pytest.mark.parametrize(
    ("stride", "local"),
    [((32, 8, 1), (16, 8, 1)), ((32, 1, 4), (16, 1, 2)), ((1, 2, 8), (1, 2, 4)), ((0, 8, 1), (16, 8, 1))],
    ids=["row-major", "channels last", "transposed", "expanded"],
)
def test_local_strides_keep_the_order_of_dims(stride: tuple[int, ...], local: tuple[int, ...]) -> None:
    value = Value("y", (2, 4, 8), "float32", stride)
    op = Op("op", "aten.relu.default", (Ref("x"),), (), (value,), "")
    rule = rule_of(op, lambda _: (2, 4, 8))
    assert rule is not None
    chosen = strategy(rule, "d1", 2)
    assert chosen is not None
    assert localised(op, rule, chosen, 2).outputs[0] == Value("y", (2, 2, 8), "float32", local)


# -- whole models --------------------------------------------------------------------------------------------------

FAMILIES = {
    "vit_tiny_patch16_224": {"depth": 1},
    "deit_tiny_distilled_patch16_224": {"depth": 1},
    "swin_tiny_patch4_window7_224": {"depths": (2, 1)},
    "convnext_atto": {"depths": (1, 1, 1, 1)},
    "mixer_s32_224": {},
    "resnet18": {},
    "efficientnet_lite0": {},
    "beit_base_patch16_224": {"depth": 1},
    "eva02_tiny_patch14_224": {"depth": 1},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_operation_of_a_family_has_a_rule(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, drop_path_rate=0.1, **FAMILIES[name])
    graph = trace(model, (torch.empty(2, 3, 224, 224, device="meta"),))
    shapes = {v.name: v.shape for v in (*graph.values.values(), *graph.weights)}
    computing = [op for op in graph.ops if op.outputs]
    assert len(computing) > 20
    assert {op.target for op in computing if rule_of(op, shapes.__getitem__) is None} == set()


def test_heads_of_a_fused_query_key_value_come_out_of_the_rules() -> None:
    """From the rows of its weight, split by heads, to the sum behind the projection: no operation stands in the way."""
    with torch.device("meta"):
        model = timm.create_model("vit_small_patch16_224", depth=1)
    graph = trace(model, (torch.empty(2, 3, 224, 224, device="meta"),))
    shapes = {v.name: v.shape for v in (*graph.values.values(), *graph.weights)}
    layouts = {"blocks.0.attn.qkv.weight": split_layout(0, 3)}
    lines = []
    for op in graph.ops:
        known = [number for number, name in enumerate(op.reads) if name in layouts]
        if not op.name.startswith("blocks.0.attn") or not known:
            continue
        rule = rule_of(op, shapes.__getitem__)
        assert rule is not None
        found = by_operand(rule, known[0], layouts[op.reads[known[0]]], 2)
        assert found is not None, op.name
        layouts |= {value.name: layout for value, layout in zip(op.outputs, found.outputs)}
        lines.append(f"{op.name.removeprefix('blocks.0.attn.')} {found.label}: {found.outputs[0]}")
    assert lines == [
        "qkv.linear nx3: tp:2x3",
        "reshape d: tp:3",
        "permute d3: tp:2",
        "unbind d2: tp:1",
        "scaled_dot_product_attention d1: tp:1",
        "transpose d1: tp:2",
        "reshape_1 c: tp:2",
        "proj.linear k: tp:sum",
    ]

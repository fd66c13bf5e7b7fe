"""Facts of operations, and prices of models: tables on hand-made graphs, torch itself as oracle on models."""

from typing import Any

import pytest
import timm
import torch
from support.graphs import MACHINE, H, X, buffer, graph, op, parameter, value
from support.priced import price
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.cost.ops.op_cost import Pricing
from autopar.cost.ops.op_stats import copied_mask_bytes, graph_stats, has_fused_kernel
from autopar.errors import TraceError
from autopar.ir.cost_graph import CostGraph
from autopar.ir.graph import Graph, LocalDevice, Value
from autopar.ir.hardware import ExecutionMode
from autopar.ops.registry import operand_of
from autopar.trace.trace import trace


def priced(model: Graph) -> CostGraph:
    return price(model, graph_stats(model), MACHINE, 2)


# -- facts -----------------------------------------------------------------------------------------------------------

LINEAR = op("aten.linear.default", ("%h", "%w", "%b"), value("y", 2, 8))
FACTS = {
    # name: (operation, FLOPs forward, backward, moves data, gradients, saved operands, outputs, bytes, aliases)
    "linear": (LINEAR, 128, 256, True, (0, 1, 2), (0, 1), (), 0, ()),
    "linear of an input": (
        op("aten.linear.default", ("%x", "%w", "%b"), value("y", 2, 8)), 128, 128, True, (1, 2), (0,), (), 0, (),
    ),
    "view": (op("aten.view.default", ("%h", (8,)), value("y", 8)), 0, 0, False, (), (), (), 0, ((0, 0),)),
    "copying reshape": (
        op("aten.reshape.default", ("%t", (8,)), value("y", 8)), 0, 0, True, (), (), (), 0, (),
    ),
    "slice, whose backward fills a tensor": (
        op("aten.slice.Tensor", ("%h", 0, 0, 1), value("y", 1, 4)), 0, 0, False, (0,), (), (), 0, ((0, 0),),
    ),
    "unbind": (
        op("aten.unbind.int", ("%h",), value("y:0", 4), value("y:1", 4)),
        0, 0, False, (0,), (), (), 0, ((0, 0), (1, 0)),
    ),
    "add, whose gradient passes through": (
        op("aten.add.Tensor", ("%h", "%g"), value("y", 2, 4)), 0, 0, True, (), (), (), 0, (),
    ),
    "square": (op("aten.mul.Tensor", ("%h", "%h"), value("y", 2, 4)), 0, 0, True, (0,), (0,), (), 0, ()),
    "relu": (op("aten.relu.default", ("%h",), value("y", 2, 4)), 0, 0, True, (0,), (), (0,), 0, ()),
    "layer norm": (
        op("aten.layer_norm.default", ("%h", (4,)), value("y", 2, 4)), 0, 0, True, (0,), (0,), (), 16, (),
    ),
    "cat of a list": (op("aten.cat.default", (("%h", "%g"),), value("y", 4, 4)), 0, 0, True, (), (), (), 0, ()),
    "arange on the local device": (
        op("aten.arange.default", (4,), value("y", 4, grad=False, dtype="int64"), device=LocalDevice()),
        0, 0, True, (), (), (), 0, (),
    ),
    "without gradient": (
        op("aten.linear.default", ("%x", "%frozen"), value("y", 2, 8, grad=False)), 128, 0, True, (), (), (), 0, (),
    ),
    "detach": (op("aten.detach.default", ("%h",), value("y", 2, 4, grad=False)), 0, 0, False, (), (), (), 0, ((0, 0),)),
    "update in place, which saves a copy": (
        op("aten.mul_.Tensor", ("%h", "%g")), 0, 0, True, (0, 1), (1,), (), 32, (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FACTS)
def test_facts_of_one_operation(case: str):
    operation, *expected = FACTS[case]
    transposed = Value("t", (4, 2), "float32", (1, 4), True)
    known = (H, value("g", 2, 4), transposed, X)
    weights = (parameter("w", 8, 4), parameter("b", 8), buffer("frozen", 8, 4))
    outputs = "" if operation.outputs else "h"
    facts = graph_stats(graph(known, weights, operation, outputs=outputs)).ops[operation.name]
    assert [
        facts.forward_flops, facts.backward_flops, facts.moves_data, facts.gradients, facts.saved_operands,
        facts.saved_outputs, facts.saved_bytes, facts.aliases,
    ] == expected  # fmt: skip


@pytest.mark.parametrize(("groups", "transposed"), [(1, False), (32, False), (1, True), (4, True)])
def test_a_convolutions_backward_costs_twice_its_forward(groups: int, transposed: bool):
    kernel = parameter("w", 32, 32 // groups, 3, 3)
    image, out = value("h", 2, 32, 8, 8), value("y", 2, 32, 8, 8)
    args = ("%h", "%w", None, (1, 1), (1, 1), *(((0, 0), groups) if transposed else ((1, 1), groups)))
    target = "aten.conv_transpose2d.input" if transposed else "aten.conv2d.default"
    facts = graph_stats(graph((image,), (kernel,), op(target, args, out))).ops["y"]
    assert facts.forward_flops == 2 * 2 * 32 * 64 * 9 * 32 // groups
    assert facts.backward_flops == 2 * facts.forward_flops


def attention(**kwargs: Any) -> Graph:
    """Attention of 5 queries on 7 keys, 3 heads of 4, as a transposed projection."""
    query = Value("q", (2, 3, 5, 4), "float32", (60, 4, 12, 1), True)
    key, values = value("k", 2, 3, 7, 4), value("v", 2, 3, 7, 4)
    mask = value("mask", 5, 7)
    target = "aten.scaled_dot_product_attention.default"
    ops = (
        op(target, ("%q", "%k", "%v"), value("y", 2, 3, 5, 4), **kwargs),
        op("aten.transpose.int", ("%y", 1, 2), value("t", 2, 5, 3, 4)),
        op("aten.reshape.default", ("%t", (2, 5, 12)), value("r", 2, 5, 12)),
    )
    return graph((query, key, values, mask), (), *ops)


def test_attention_saves_what_fused_kernels_save():
    facts = graph_stats(attention()).ops["y"]
    assert (facts.forward_flops, facts.backward_flops) == (2 * 2 * 3 * 5 * 7 * 8, 5 * 2 * 3 * 5 * 7 * 8)
    assert (facts.saved_operands, facts.saved_outputs, facts.saved_bytes) == ((0, 1, 2), (0,), 2 * 3 * 5 * 4)
    kept: dict[int, torch.UntypedStorage] = {}
    q, k, v = (torch.randn(2, n, 3, 4, requires_grad=True).transpose(1, 2) for n in (5, 7, 7))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert (
        sum(s.nbytes() for s in kept.values()) == 4 * (q.numel() + k.numel() + v.numel() + out.numel()) + 2 * 3 * 5 * 4
    )
    assert facts.outputs[0].stride == out.stride()


def test_the_reshape_behind_attention_is_free_because_its_output_lies_like_the_query():
    facts = graph_stats(attention()).ops
    assert facts["y"].outputs[0].stride == (60, 4, 12, 1)
    assert not facts["r"].moves_data


@pytest.mark.parametrize("kwargs", [{"dropout_p": 0.5}, {"attn_mask": "%mask"}])
def test_attention_without_a_fused_kernel_saves_its_matrix(kwargs: dict[str, Any]):
    facts = graph_stats(attention(**kwargs)).ops["y"]
    assert facts.saved_bytes >= 2 * 3 * 5 * 7 * 4
    assert facts.forward_flops == 2 * 2 * 3 * 5 * 7 * 8


def test_on_gpus_attention_with_a_trained_mask_is_one_kernel():
    """Its rows of 7 do not begin where the kernel can read them: it keeps a copy with rows of 8."""
    facts = graph_stats(attention(attn_mask="%mask"), "cuda").ops["y"]
    assert (facts.saved_operands, facts.saved_outputs) == ((0, 1, 2), (0,))
    assert facts.saved_bytes == 2 * 3 * 5 * 4 + 5 * 8 * 4
    assert (facts.backward_flops, facts.gradients) == (5 * 2 * 3 * 5 * 7 * 8, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("mask", "copied"),
    [
        (value("mask", 5, 8), 0), (value("mask", 5, 7), 5 * 8 * 4), (value("mask", 5, 8, dtype="bool"), 5 * 8 * 4),
        (value("mask", 5, 7, dtype="bool"), 5 * 8 * 4), (Value("mask", (5, 8), "float32", (1, 5), False), 5 * 16 * 4),
    ],
)  # fmt: skip
def test_the_copy_that_a_gpus_kernel_reads_of_a_mask(mask: Value, copied: int):
    assert copied_mask_bytes(operand_of(mask), operand_of(value("q", 2, 3, 5, 4))) == copied


def test_gpus_have_no_kernel_for_attention_in_float64():
    op_ = attention().ops[0]
    wide = tuple(operand_of(value(name, 2, 3, 5, 4, dtype="float64")) for name in "qkv")
    assert not has_fused_kernel(op_, wide, "cuda") and has_fused_kernel(op_, wide, "cpu")


def test_equal_operations_are_run_once():
    tower = graph(
        (H,),
        (parameter("a", 4, 4), parameter("b", 4, 4)),
        op("aten.linear.default", ("%h", "%a"), value("one", 2, 4)),
        op("aten.linear.default", ("%one", "%b"), value("two", 2, 4)),
        op("aten.mul.Tensor", ("%two", "%one"), value("three", 2, 4)),
        op("aten.mul.Tensor", ("%three", "%three"), value("four", 2, 4)),
    )
    facts = graph_stats(tower).ops
    assert facts["one"] is facts["two"]
    assert (facts["three"].gradients, facts["four"].gradients) == ((0, 1), (0,))


def test_an_operation_that_meta_tensors_cannot_run():
    odd = graph((H,), (), op("aten.nonzero.default", ("%h",), value("y", 3, 2, grad=False, dtype="int64")))
    with pytest.raises(
        TraceError, match=r"Cannot price y \(aten.nonzero.default of float32\[2, 4\]\) at model.py:7: forward"
    ):
        graph_stats(odd)


# -- models ------------------------------------------------------------------------------------------------------------

MODELS = ("vit_tiny_patch16_224", "resnet18", "swin_tiny_patch4_window7_224", "convnext_atto")


@pytest.fixture(scope="module", params=MODELS)
def traced(request: pytest.FixtureRequest) -> Graph:
    with torch.device("meta"):
        model = timm.create_model(request.param)
        return trace(model, (torch.empty(2, 3, 224, 224),), {}, mode="train", name=request.param)


def test_flops_equal_those_of_the_model(traced: Graph):
    facts = graph_stats(traced)
    with torch.device("meta"):
        model, x = timm.create_model(traced.model), torch.empty(2, 3, 224, 224)
    with FlopCounterMode(display=False) as forward:
        out = model(x)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert sum(f.forward_flops for f in facts.ops.values()) == forward.get_total_flops()
    # on meta tensors attention's backward is four matmuls, in fused kernels five
    fused = sum(f.forward_flops for n, f in facts.ops.items() if n.endswith("attention") and f.saved_outputs)
    counted, by_torch = sum(f.backward_flops for f in facts.ops.values()), backward.get_total_flops() + fused // 2
    if traced.model == "convnext_atto":  # torch counts a depthwise convolution's backward too high
        assert sum(f.forward_flops for f in facts.ops.values()) < counted < by_torch
    else:
        assert counted == by_torch


def test_saved_bytes_equal_those_of_the_model_on_cpu(traced: Graph):
    cost = priced(traced)
    torch.manual_seed(0)
    model = timm.create_model(traced.model).train()
    weights = [t.untyped_storage() for t in (*model.parameters(), *model.buffers())]
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = model(torch.randn(2, 3, 224, 224))
    assert out.requires_grad
    expected = sum(s.nbytes() for key, s in kept.items() if key not in {id(w) for w in weights})
    predicted = sum(g.saved_bytes for g in cost.groups) + sum(h.num_bytes for h in cost.saved)
    assert predicted == pytest.approx(expected, rel=0.001)


def test_groups_of_a_vision_transformer():
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", depth=2)
        cost = priced(trace(model, (torch.empty(2, 3, 224, 224),), {}, mode="train"))
    block = ["norm1.layer_norm", "attn.qkv.linear", "attn.scaled_dot_product_attention", "attn.proj.linear",
             "norm2.layer_norm", "mlp.fc1.linear", "mlp.fc2.linear"]  # fmt: skip
    blocks = [f"blocks.{i}.{name}" for i in range(2) for name in block]
    assert [g.name for g in cost.groups] == [
        "patch_embed.proj.conv2d", "add", *blocks, "norm.layer_norm", "head.linear", "loss",
    ]  # fmt: skip
    assert sum(h.numel for h in cost.weights) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_only_compiled_linear_layers_add_to_gradients(compiled: bool, captured: bool) -> None:
    """Eager ones make a gradient first, in a CUDA graph as outside; rows of 2 elements are not aligned."""
    layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model = trace(layers, (torch.randn(2, 4),))
    pricing = Pricing(model, graph_stats(model), MACHINE.with_mode(ExecutionMode(compiled, captured)), 2)
    assert pricing.fused_wgrad_weights == ({"1.weight", "2.weight"} if compiled else set())


def test_a_linear_layer_of_a_weight_or_a_buffer():
    """Swin v2 has one that reads a table of coordinates."""
    model = graph(
        (value("x", 2, 4, grad=False),),
        (parameter("token", 2, 4), buffer("table", 2, 4), parameter("a", 4, 4), parameter("b", 4, 4)),
        op("aten.linear.default", ("%token", "%a"), value("one", 2, 4)),
        op("aten.linear.default", ("%table", "%b"), value("two", 2, 4)),
        op("aten.add.Tensor", ("%one", "%two"), value("bias", 2, 4)),
        op("aten.add.Tensor", ("%bias", "%x"), value("out", 2, 4)),
    )
    assert Pricing(model, graph_stats(model), MACHINE.with_mode(ExecutionMode(True, True)), 2).fused_wgrad_weights == {
        "a"
    }

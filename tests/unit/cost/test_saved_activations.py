"""What compiled regions keep for their backward, beside what torch.compile's own partitioner decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import timm
import torch
from functorch.compile import min_cut_rematerialization_partition
from support.effort import only
from support.graphs import graph, op, parameter, value
from support.models import tiny_vit
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

from autopar.api.planning.plan import example_call
from autopar.codegen import compile as compiled
from autopar.codegen.emit import graph_module
from autopar.codegen.fusions.pad_groups import pad_groups
from autopar.codegen.split import split
from autopar.cost.groups.saved_activations import compiled_stats
from autopar.cost.ops.kernel_shapes import group_padding
from autopar.cost.ops.op_stats import GraphStats, graph_stats, storage_names
from autopar.ir.graph import Graph
from autopar.trace.lower import lower_model
from autopar.trace.trace import weight_tensors


def small_swin() -> nn.Module:
    """Windows of 49 with attention in separate operations, as timm runs it by default."""
    return timm.models.SwinTransformer(
        img_size=56, window_size=7, embed_dim=32, depths=(2, 2), num_heads=(2, 4), num_classes=10, drop_path_rate=0.0
    )


def small_convnext() -> nn.Module:
    return timm.models.ConvNeXt(depths=(1, 1, 2, 1), dims=(16, 32, 64, 128), num_classes=10)


def small_resnet() -> nn.Module:
    return timm.create_model("resnet50", layers=(1, 2, 1, 1), num_classes=10)


def small_efficientnet() -> nn.Module:
    return timm.create_model("efficientnet_b0", num_classes=10)


def small_mobilenet() -> nn.Module:
    """Hard swishes, which torch does not tag as pointwise."""
    return timm.create_model("mobilenetv3_small_100", num_classes=10)


def small_hiera() -> nn.Module:
    """Queries are maxima over tokens."""
    return timm.models.Hiera(img_size=(64, 64), embed_dim=32, num_heads=1, stages=(1, 2, 2, 1), num_classes=10)


def small_regnet() -> nn.Module:
    """Groups of 24 channels."""
    cfg = timm.models.regnet.RegNetCfg(depth=5, w0=24, wa=40.0, wm=2.0, group_size=24, se_ratio=0.25)
    return timm.models.regnet.RegNet(cfg, num_classes=10)


def saved_bytes(graph: Graph, facts: GraphStats) -> int:
    """Bytes that the operations save, each tensor once and no weights."""
    root = storage_names(graph, facts)
    names = {root.get(name, name) for own in graph.ops for name in facts.ops[own.name].saved_names(own)}
    values = sum(graph.values[name].num_bytes for name in names - graph.weight.keys())
    return values + sum(facts.ops[own.name].saved_bytes for own in graph.ops)


def kept_bytes(graph: Graph, model: nn.Module, x: torch.Tensor, on_gpu: bool = False) -> int:
    """Bytes that autograd keeps of the graph's compiled regions, each tensor once and no weights.

    Args:
        on_gpu: compile the program of a GPU, for the CPU.
    """
    (program,) = split(graph, {own.name: 0 for own in graph.ops}, 1)
    program = pad_groups(program) if on_gpu else program
    tensors = weight_tensors(model, graph)
    held = {w.name: tensors[w.name].detach().to(getattr(torch, w.dtype)) for w in graph.weights}
    held = {w.name: held[w.name].requires_grad_(w.requires_grad) for w in graph.weights}
    module = graph_module(program, held, torch.device("cpu"), compiled=True)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        module(x)
    weights = {tensor.untyped_storage().data_ptr() for tensor in held.values()}
    return sum(storage.nbytes() for place, storage in kept.items() if place not in weights)


@pytest.fixture
def partitioner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile by the partitioner that inductor calls, without making machine code."""

    def partition(joint: fx.GraphModule, arguments: Any, **options: Any) -> Any:
        joint_graph_passes(joint)  # drops views that change nothing
        return min_cut_rematerialization_partition(joint, arguments, compiler="inductor", **options)

    backend = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, decompositions=select_decomp_table, partition_fn=partition
    )

    monkeypatch.setattr(compiled, "inductor", lambda module, arguments, options: backend(module, arguments))
    monkeypatch.setattr(compiled, "COMPILED_REGIONS", {})


@pytest.mark.parametrize(
    ("model", "side", "fused_less"),
    only(
        [(tiny_vit, 32, 0.0)],
        [
            (small_swin, 56, 0.08),
            (tiny_vit, 32, 0.0),
            (small_convnext, 64, 0.0),
            (small_resnet, 64, -0.2),
            (small_efficientnet, 64, 0.4),
            (small_mobilenet, 64, 0.2),
            (small_hiera, 64, 0.0),
        ],
    ),
)
def test_what_is_kept_is_what_torch_keeps(
    model: Callable[[], nn.Module], side: int, fused_less: float, partitioner: None
) -> None:
    torch.manual_seed(0)
    built, x = model().train(), torch.randn(2, 3, side, side)
    traced = lower_model(built, example_call(built, x, None, None), "train", "net", "bf16")
    eager = graph_stats(traced)
    kept = kept_bytes(traced, built, x)
    assert saved_bytes(traced, compiled_stats(traced, eager)) == pytest.approx(kept, rel=0.04)
    assert saved_bytes(traced, eager) >= (1 + fused_less) * kept


def test_padded_operands_are_kept_and_cut_results(partitioner: None) -> None:
    """As torch keeps them, which also keeps padded weights."""
    torch.manual_seed(0)
    built, x = small_regnet().train(), torch.randn(2, 3, 64, 64)
    traced = lower_model(built, example_call(built, x, None, None), "train", "net", "bf16")
    eager, kept = graph_stats(traced), kept_bytes(traced, built, x, on_gpu=True)
    wide = {own.reads[1]: prod(group_padding(own, traced)) for own in traced.ops if "conv" in own.target}
    weights = sum(factor * traced.readable[name].num_bytes for name, factor in wide.items() if factor > 1)
    padded, plain = (saved_bytes(traced, compiled_stats(traced, eager, kind)) for kind in ("cuda", "cpu"))
    assert padded == pytest.approx(kept - weights, rel=0.01)
    assert plain < 0.98 * padded


def residual(between: torch.dtype) -> Graph:
    """A float32 sum of two branches that a norm saves; the second one has another dtype for a while."""
    narrow = value("narrow", 4, 8, dtype=str(between).removeprefix("torch."))
    ops = (
        op("aten.linear.default", ("%x", "%w"), value("branch", 4, 8)),
        op("aten.to.dtype", ("%branch", between), narrow),
        op("aten.to.dtype", ("%narrow", torch.float32), value("wide", 4, 8)),
        op("aten.add.Tensor", ("%x", "%wide"), value("sum", 4, 8)),
        op("aten.layer_norm.default", ("%sum", (8,)), value("norm", 4, 8)),
        op("aten.linear.default", ("%norm", "%w"), value("y", 4, 8)),
    )
    return graph((value("x", 4, 8),), (parameter("w", 8, 8),), *ops)


def test_a_sum_is_made_again_where_what_it_is_made_of_is_not_larger() -> None:
    """Its other summand is kept anyway, for the gradient of the weight."""
    narrow, equal = residual(torch.bfloat16), residual(torch.float32)
    facts = compiled_stats(narrow, graph_stats(narrow)).ops
    assert (facts["norm"].saved_operands, facts["wide"].saved_operands) == ((), (0,))
    assert compiled_stats(equal, graph_stats(equal)).ops["norm"].saved_operands == ()


def test_a_layer_that_adds_to_its_main_gradient_saves_its_operand_not_a_copy() -> None:
    """Its weight is a copy in bfloat16 of a float32 parameter; with a float32 weight, autograd saves the dense copy."""
    weight = parameter("w", 4, 4)
    narrow = replace(weight, dtype="bfloat16", master="float32")
    for held, operands, copied in ((weight, (1,), 2 * 8 * 4 * 4), (narrow, (0, 1), 0)):
        x, turned = (value(name, *shape, dtype=held.dtype) for name, shape in (("x", (2, 4, 8)), ("turned", (2, 8, 4))))
        turned = replace(turned, stride=(32, 1, 8))
        ops = (
            op("aten.transpose.int", ("%x", 1, 2), turned),
            op("aten.linear.default", ("%turned", "%w"), value("y", 2, 8, 4, dtype=held.dtype)),
        )
        net = graph((x,), (held,), *ops)
        facts = compiled_stats(net, graph_stats(net)).ops["y"]
        assert (facts.saved_operands, facts.saved_bytes) == (operands, copied)


def test_operations_alike_go_on_sharing_their_facts() -> None:
    model = tiny_vit()
    call = example_call(model, torch.randn(2, 3, 32, 32), None, None)
    traced = lower_model(model, call, "train", "net", "bf16")
    eager = graph_stats(traced)
    distinct = [len({id(own) for own in f.ops.values()}) for f in (eager, compiled_stats(traced, eager))]
    assert distinct[0] <= distinct[1] < distinct[0] + 8

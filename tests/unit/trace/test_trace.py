"""Traced graphs: weights, inputs, outputs, fingerprints; the model stays as it was."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.handmade import run_in_one_process
from support.models import SharedModule, Tied, TwoInputs, tiny_vit
from support.traced import Body, X, calls, ops
from torch import nn

from autopar.codegen.split import split
from autopar.errors import TraceError
from autopar.ir.graph import Mode, Ref
from autopar.trace.call import as_call
from autopar.trace.trace import trace, weight_tensors


def test_a_block_of_a_vit() -> None:
    graph = trace(tiny_vit(depth=1, embed_dim=12), (torch.randn(2, 3, 32, 32),))
    assert str(graph).splitlines()[0] == "VisionTransformer (train, batch 2): 24 ops, 4,570 parameters"
    assert [line for line in ops(graph) if line.startswith("blocks.0.attn.")] == [
        "blocks.0.attn.qkv.linear: float32[2, 17, 36] = aten.linear.default"
        "(%blocks.0.norm1.layer_norm, %blocks.0.attn.qkv.weight, %blocks.0.attn.qkv.bias)",
        "blocks.0.attn.reshape: float32[2, 17, 3, 3, 4] = aten.reshape.default"
        "(%blocks.0.attn.qkv.linear, (2, 17, 3, 3, 4))",
        "blocks.0.attn.permute: float32[3, 2, 3, 17, 4] = aten.permute.default"
        "(%blocks.0.attn.reshape, (2, 0, 3, 1, 4))",
        "blocks.0.attn.unbind: float32[2, 3, 17, 4], float32[2, 3, 17, 4], float32[2, 3, 17, 4] = aten.unbind.int"
        "(%blocks.0.attn.permute)",
        "blocks.0.attn.scaled_dot_product_attention: float32[2, 3, 17, 4] = aten.scaled_dot_product_attention.default"
        "(%blocks.0.attn.unbind:0, %blocks.0.attn.unbind:1, %blocks.0.attn.unbind:2)",
        "blocks.0.attn.transpose: float32[2, 17, 3, 4] = aten.transpose.int"
        "(%blocks.0.attn.scaled_dot_product_attention, 1, 2)",
        "blocks.0.attn.reshape_1: float32[2, 17, 12] = aten.reshape.default(%blocks.0.attn.transpose, (2, 17, 12))",
        "blocks.0.attn.proj.linear: float32[2, 17, 12] = aten.linear.default"
        "(%blocks.0.attn.reshape_1, %blocks.0.attn.proj.weight, %blocks.0.attn.proj.bias)",
    ]
    assert {op.module for op in graph.ops} >= {"patch_embed.proj", "blocks.0.attn", "blocks.0.mlp.fc1", "norm", ""}
    assert "vision_transformer.py" in graph.producer["blocks.0.add"].source


def test_constants_and_buffers_that_no_state_dict_knows() -> None:
    graph = trace(TwoInputs(), (torch.randn(2, 3, 8, 8),), {"text": torch.randn(2, 6)})
    (constant,) = graph.constants
    assert graph.weight[constant].kind == "constant" and torch.equal(graph.constants[constant], torch.tensor([0.5]))
    assert (graph.weight["scale"].names, graph.weight["hidden"].names) == (("scale",), ())


def test_tied_parameters_are_one_weight_with_all_names() -> None:
    graph = trace(Tied(), (torch.randint(0, 32, (2, 5)),))
    assert graph.weight["embed.weight"].names == ("embed.weight", "head.weight")
    assert "head.weight" not in graph.weight
    assert [op.name for op in graph.ops if "embed.weight" in op.reads] == ["embed.embedding", "head.linear"]
    assert graph.num_params == sum(p.numel() for p in Tied().parameters())


def test_nested_inputs_and_outputs() -> None:
    def forward(self: Body, batch: dict[str, Any], scale: float) -> Any:
        first, second = batch["pair"]
        y = self.lin(first) * scale
        return {"sum": y + second, "again": (y, first), "number": 3, "nothing": None}

    batch = {"pair": (X, X + 1)}
    graph = trace(Body(forward), (batch, 2.5))
    first, second = (v.name for v in graph.inputs)
    assert graph.leaves == (Ref(first), Ref(second), 2.5)
    assert calls(graph) == [
        f"lin.linear = aten.linear.default(%{first}, %lin.weight, %lin.bias)",
        "mul = aten.mul.Tensor(%lin.linear, 2.5)",
        f"add = aten.add.Tensor(%mul, %{second})",
    ]
    assert graph.outputs == (Ref("add"), Ref("mul"), Ref(first), 3, None)


def test_keyword_inputs_keep_their_names() -> None:
    graph = trace(TwoInputs(), (torch.randn(2, 3, 8, 8),), {"text": torch.randn(2, 6), "gain": 2.0})
    assert [v.name for v in graph.inputs] == ["image", "text"]
    assert graph.leaves == (Ref("image"), Ref("text"), 2.0)
    assert [str(r) for r in graph.outputs] == ["%out.linear", "%early.linear", "%add_1"]


def test_any_mapping_is_keyword_inputs() -> None:
    """As the results of Hugging Face's processors."""
    image, text = torch.randn(2, 3, 8, 8), torch.randn(2, 6)
    call = as_call(TwoInputs(), UserDict(text=text, image=image))
    assert [id(leaf) for leaf in call.leaves] == [id(image), id(text)]


def test_a_module_called_three_times_is_one_weight_and_three_operations() -> None:
    graph = trace(SharedModule(), (torch.randn(2, 8),))
    assert [op.name for op in graph.ops if "shared.weight" in op.reads] == [
        "shared.linear", "shared.linear_1", "shared.linear_2",
    ]  # fmt: skip
    assert {op.module for op in graph.ops if "shared.weight" in op.reads} == {"shared"}


def test_frozen_parameters_have_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    graph = trace(model, (X,))
    assert [op.outputs[0].requires_grad for op in graph.ops] == [False, True, True]
    assert [w.requires_grad for w in graph.weights] == [False, False, True, True, True, True]


def test_a_graph_module_of_the_user() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert calls(trace(traced, (X,))) == [
        "0.linear = aten.linear.default(%input, %0.weight, %0.bias)",
        "1.relu = aten.relu.default(%0.linear)",
    ]


def test_fingerprints() -> None:
    model = tiny_vit(depth=2)
    reference = trace(model, (torch.randn(2, 3, 32, 32),)).fingerprint
    assert trace(model, (torch.randn(7, 3, 32, 32),)).fingerprint == reference
    assert trace(model, (torch.randn(1, 3, 32, 32),)).fingerprint == reference
    assert trace(tiny_vit(depth=2).to("meta"), (torch.empty(2, 3, 32, 32, device="meta"),)).fingerprint == reference
    assert trace(model, (torch.empty(2, 3, 32, 32, device="meta"),)).fingerprint == reference
    assert trace(tiny_vit(depth=3), (torch.randn(2, 3, 32, 32),)).fingerprint != reference
    assert trace(tiny_vit(depth=2, num_classes=7), (torch.randn(2, 3, 32, 32),)).fingerprint != reference
    mlp = [trace(m, (X,)).fingerprint for m in (nn.Sequential(nn.Linear(4, 4), act) for act in (nn.ReLU(), nn.GELU()))]
    assert mlp[0] != mlp[1]


def fails_late(self: Body, x: torch.Tensor) -> torch.Tensor:
    y = self.norm(self.lin(x))
    return y if y.sum() > 0 else -y


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("function", [lambda self, x: self.norm(self.lin(x)), fails_late])
def test_the_model_is_untouched(function: Callable, mode: Mode) -> None:
    model = Body(function, norm=nn.BatchNorm1d(4))
    model.norm.eval()  # a mode of its own
    model.lin.bias.requires_grad_(False)
    model.lin.weight.grad = torch.ones(4, 4)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    tensors = {n: t.data_ptr() for n, t in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    x = X.clone()
    if function is fails_late:
        with pytest.raises(TraceError):
            trace(model, (x,), mode=mode)
    else:
        trace(model, (x,), mode=mode)
    assert [m.training for m in model.modules()] == modes
    assert {n: t.data_ptr() for n, t in model.state_dict().items()} == tensors
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert torch.equal(model.lin.weight.grad, torch.ones(4, 4)) and torch.equal(x, X)
    assert not model._forward_hooks
    model(X + 1 if function is not fails_late else X)


class Shadowed(nn.Module):
    """Parameters called like the arguments of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.x_1, self.z = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, *, z: torch.Tensor) -> torch.Tensor:
        return (x * self.x + self.x_1) * (z - self.z)


def test_an_input_with_the_name_of_a_parameter() -> None:
    model, z = Shadowed(), X + 3
    graph = trace(model, (X,), {"z": z})
    assert [v.name for v in graph.inputs] == ["x_2", "z_1"] and graph.leaves == (Ref("x_2"), Ref("z_1"))
    assert calls(graph)[0] == "mul = aten.mul.Tensor(%x_2, %x)"
    programs = split(graph, {op.name: i // 2 for i, op in enumerate(graph.ops)}, 2)
    assert torch.equal(run_in_one_process(graph, programs, weight_tensors(model, graph), X, z)[0], model(X, z=z))

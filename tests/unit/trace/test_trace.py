"""Traced graphs as text, one feature at a time, and the model itself as oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from support.effort import only
from support.handmade import run_in_one_process
from support.models import SharedModule, Tied, TwoInputs, UNet, Updating, resnet18, tiny_vit
from torch import nn

from autopar.codegen.split import split
from autopar.errors import TraceError
from autopar.ir.graph import Graph, Mode, Ref
from autopar.ir.pytree import leaves
from autopar.trace.hooks import check_hooks
from autopar.trace.trace import trace, weight_tensors


class Body(nn.Module):
    """A linear layer and a forward given as a function, so that each case is a few lines."""

    norm: nn.Module
    idle: nn.Module
    drop: nn.Module

    def __init__(self, function: Callable, **modules: nn.Module) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Any, *rest: Any) -> Any:
        return self.function(self, x, *rest)


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def ops(graph: Graph) -> list[str]:
    """The printed operations, without the heading."""
    return [line.strip() for line in str(graph).splitlines()[1:]]


def calls(graph: Graph) -> list[str]:
    """The printed operations without types: ``add = aten.add.Tensor(%x, 1)``."""
    return [line.split(":")[0] + " =" + line.split("=", 1)[1] for line in ops(graph)]


# -- printed graphs --------------------------------------------------------------------------------------------------


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


def test_in_place_operations_become_out_of_place() -> None:
    def forward(self: Body, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        alias = y
        F.relu_(y)
        y += 1
        return y + alias

    graph = trace(Body(forward), (X,))
    assert calls(graph) == [
        "lin.linear = aten.linear.default(%x, %lin.weight, %lin.bias)",
        "relu = aten.relu.default(%lin.linear)",
        "add = aten.add.Tensor(%relu, 1)",
        "add_1 = aten.add.Tensor(%add, %add)",
    ]
    assert graph.colocated == ()


def test_an_update_seen_through_a_view_stays_in_place_and_together() -> None:
    def forward(self: Body, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        y[:, :2].mul_(2)
        return y.sum(1)

    graph = trace(Body(forward), (X,))
    assert calls(graph) == [
        "lin.linear = aten.linear.default(%x, %lin.weight, %lin.bias)",
        "slice = aten.slice.Tensor(%lin.linear, 1, 0, 2)",
        "mul = aten.mul_.Tensor(%slice, 2)",
        "sum = aten.sum.dim_IntList(%lin.linear, (1,))",
    ]
    assert graph.colocated == (("lin.linear", "slice", "mul"),)


def test_buffer_updates_are_declared_and_together() -> None:
    graph = trace(Updating(), (torch.randn(2, 8),))
    assert {op.name: op.mutates for op in graph.ops if op.mutates} == {
        "add": ("calls",), "mul": ("mean",), "add_1": ("mean",),
    }  # fmt: skip
    assert ("mul", "add_1", "sub") in graph.colocated
    assert not any(op.mutates for op in trace(Updating(), (torch.randn(2, 8),), mode="eval").ops)


def test_batch_norm_statistics_are_declared_updates() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    train, evaluation = (trace(model, (torch.randn(2, 3, 5, 5),), mode=mode) for mode in ("train", "eval"))
    assert [(op.name, op.mutates) for op in train.ops] == [
        ("0.conv2d", ()),
        ("1.add", ("1.num_batches_tracked",)),
        ("1.batch_norm", ("1.running_mean", "1.running_var")),
    ]
    assert train.colocated == (("1.add", "1.batch_norm"),)
    assert [(op.name, op.mutates) for op in evaluation.ops] == [("0.conv2d", ()), ("1.batch_norm", ())]
    frozen = trace(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), (torch.randn(2, 3, 5, 5),)
    )
    assert [(op.name, op.mutates) for op in frozen.ops] == [("0.conv2d", ()), ("1.batch_norm", ())]


def test_an_out_argument_is_an_update() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    graph = trace(model, (X,))
    updated = {name for op in graph.ops for name in op.mutates}
    assert updated == {"0.parametrizations.weight.0._u", "0.parametrizations.weight.0._v"}


def test_idle_dropout_and_checks_are_dropped_and_active_ones_kept() -> None:
    def forward(self: Body, x: torch.Tensor) -> torch.Tensor:
        torch._assert(x.shape[1] == 4, "four features")
        return self.drop(self.idle(self.lin(x)).to(torch.float32))

    model = Body(forward, idle=nn.Dropout(0.0), drop=nn.Dropout(0.25))
    names = [[op.name for op in trace(model, (X,), mode=mode).ops] for mode in ("train", "eval")]
    assert [n for n in names[0] if n != "to"] == ["lin.linear", "drop.dropout"]
    assert [n for n in names[1] if n != "to"] == ["lin.linear"]


def test_drop_path_is_in_the_training_graph_only() -> None:
    model = tiny_vit(depth=2, embed_dim=12, drop_path_rate=0.5)
    names = [
        {op.name for op in trace(model, (torch.randn(2, 3, 32, 32),), mode=mode).ops} for mode in ("train", "eval")
    ]
    assert sorted(names[0] - names[1]) == [
        f"blocks.1.drop_path{i}.{op}" for i in (1, 2) for op in ("bernoulli", "div", "mul", "new_empty")
    ]
    assert names[1] < names[0]


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


def test_a_no_grad_region_detaches_what_enters_it() -> None:
    def forward(self: Body, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        with torch.no_grad():
            target = torch.softmax(y, -1)
            with torch.enable_grad():
                again = self.lin(x)
        return y * target + again

    graph = trace(Body(forward), (X,))
    grads = {v.name: v.requires_grad for op in graph.ops for v in op.outputs}
    assert grads["lin.linear"] and grads["lin.linear_1"] and not grads["softmax"]
    assert "softmax = aten.softmax.int(%detach, -1)" in calls(graph)


def test_an_update_under_no_grad_keeps_the_history() -> None:
    def forward(self: Body, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        with torch.no_grad():
            y.mul_(2)
            self.lin.bias.clamp_(-0.1, 0.1)
        return self.lin(y)

    graph = trace(Body(forward), (X,))
    assert [r.name for r in graph.ops[-1].args] == ["lin.linear", "lin.weight", "lin.bias"]
    assert graph.values["lin.linear"].requires_grad
    assert {name for op in graph.ops for name in op.mutates} == {"lin.bias"}


def test_autocast_becomes_casts() -> None:
    def forward(self: Body, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.lin(x)
            with torch.autocast("cpu", enabled=False):
                z = self.lin(x)
        return y + z

    assert [
        line.split(": ")[0] + " " + line.split(": ")[1].split(" = ")[0] for line in ops(trace(Body(forward), (X,)))
    ] == [
        "lin.to bfloat16[2, 4]",
        "lin.to_1 bfloat16[4, 4]",
        "lin.to_2 bfloat16[4]",
        "lin.linear bfloat16[2, 4]",
        "lin.linear_1 float32[2, 4]",
        "add float32[2, 4]",
    ]


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


# -- the model is left alone -----------------------------------------------------------------------------------------


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


# -- models that cannot be traced ------------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def branches(self: Body, x: torch.Tensor) -> torch.Tensor:
    return x if self.lin(x).sum() > 0 else -x  # branch


def loops(self: Body, x: torch.Tensor) -> torch.Tensor:
    for _ in range(int(x.max())):  # loop
        x = self.lin(x)
    return x


def to_numpy(self: Body, x: torch.Tensor) -> torch.Tensor:
    return self.lin(x) + torch.from_numpy(x.detach().numpy())  # numpy


def formats(self: Body, x: torch.Tensor) -> torch.Tensor:
    print(f"{self.lin(x).mean():.3f}")  # print
    return x


def raises(self: Body, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such head")  # own error


REFUSED = {
    "branch": (branches, "return x if self.lin(x).sum() > 0 else -x"),
    "loop": (loops, "for _ in range(int(x.max())):"),
    "numpy": (to_numpy, "torch.from_numpy(x.detach().numpy())"),
    "print": (formats, 'print(f"{self.lin(x).mean():.3f}")'),
    "own error": (raises, "ValueError: no such head"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_file_line_and_code(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    function, part = REFUSED[case]
    line = next(i for i, code in enumerate(Path(__file__).read_text().splitlines(), 1) if code.endswith(f"  # {case}"))
    with pytest.raises(TraceError) as caught:
        trace(Body(function), (X.abs() + 2,))
    message = str(caught.value)
    assert (
        f"Cannot trace Body in train mode at {__file__}:{line}, in {function.__name__}" in message and part in message
    )
    assert "def forward" not in capfd.readouterr().err  # torch prints the graph so far; a user gets the message only


class Item(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.max().item()


class Selects(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum() + x


class Chooses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))


@pytest.mark.parametrize(
    ("model", "code", "remedy"),
    [
        (Item(), "return x * x.max().item()", "Keep it a tensor"),
        (Chooses(), "return torch.cond(", "torch.where"),
    ],
)
def test_what_export_takes_and_a_pipeline_cannot(model: nn.Module, code: str, remedy: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(model, (X,))
    assert __file__ in str(caught.value) and code in str(caught.value) and remedy in str(caught.value)


def test_sizes_that_depend_on_values() -> None:
    with pytest.raises(TraceError, match="tensor"):
        trace(Selects(), (X,))


def test_a_backward_of_the_users_own_is_refused_not_dropped() -> None:
    model = Body(lambda self, x: Square.apply(self.lin(x)))
    with pytest.raises(TraceError, match=r"autograd\.Function Square .*detach"):
        trace(model, (X,))
    assert [op.name for op in trace(model, (X,), mode="eval").ops] == ["lin.linear", "mul"]


def scaled_by_a_hook(self: Body, x: torch.Tensor) -> torch.Tensor:
    y = self.lin(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: 2 * gradient)  # in forward
    return y


def test_a_hook_that_a_forward_registers_is_refused_not_dropped() -> None:
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, code in enumerate(lines, 1) if code.endswith("  # in forward"))
    where = rf"register_hook at {__file__}:{line}, in scaled_by_a_hook: `y\.register_hook.*`\), which"
    with pytest.raises(TraceError, match=where):
        trace(Body(scaled_by_a_hook), (X,))
    assert [op.name for op in trace(Body(scaled_by_a_hook), (X,), mode="eval").ops] == ["lin.linear"]


def half_frozen(self: Body, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.lin(x)
        with torch.no_grad():  # in autocast
            scale = y.abs().mean()
        return (y / scale).float()


def frozen_around(self: Body, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scale = x.abs().mean()
    return self.lin(x) / scale


def test_no_grad_inside_of_an_autocast_region_is_refused_not_dropped() -> None:
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, code in enumerate(lines, 1) if code.endswith("  # in autocast"))
    with pytest.raises(TraceError, match=rf"off inside of an autocast region at {__file__}:{line}, in half_frozen: "):
        trace(Body(half_frozen), (X,))
    assert trace(Body(half_frozen), (X,), mode="eval").ops
    assert trace(Body(frozen_around), (X,)).ops


class Hooked(nn.Module):
    """Linear layers in a block, and a buffer that has a gradient."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("shift", torch.ones(4, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x + self.shift)


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize(("name", "kind"), [("block.1.weight", "parameter"), ("shift", "buffer")])
def test_a_hook_on_a_weight_is_refused_until_it_is_removed(name: str, kind: str, method: str) -> None:
    model = Hooked()
    tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
    handle = getattr(tensor, method)(lambda tensor: None)
    with pytest.raises(
        TraceError, match=rf"Hooked: its {kind} {name} has a hook on its gradient \({method}\).*optimizer="
    ):
        check_hooks(model)
    tensor.requires_grad_(False)  # a gradient that is never computed calls nothing
    check_hooks(model)
    tensor.requires_grad_()
    handle.remove()
    check_hooks(model)


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


# -- the traced graph computes what the model computes ---------------------------------------------------------------


def image(side: int) -> torch.Tensor:
    return torch.randn(2, 3, side, side)


def mixed_precision(self: Body, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.norm(self.lin(x))
    return torch.softmax(y.float(), -1)


def updated_under_no_grad(self: Body, x: torch.Tensor) -> torch.Tensor:
    y = self.lin(x)
    with torch.no_grad():
        y[:, 1:].mul_(2)
        self.lin.bias.clamp_(-0.1, 0.1)
    return y.exp() + self.lin(x)


def written_by_copy(self: Body, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y.copy_(self.lin(x))
    y[:, 0] = y[:, 1]
    return y * y


def default_probability(self: Body, x: torch.Tensor) -> torch.Tensor:
    return self.lin(x) * torch.empty(2, 1).bernoulli_()


# Small members of families that trace differently; sizes as small as each allows.
FAMILIES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "unet": lambda: (UNet(), (image(8),)),
    "tied": lambda: (Tied(), (torch.randint(0, 32, (2, 5)),)),
    "updating": lambda: (Updating(), (torch.randn(2, 8),)),
    "shared": lambda: (SharedModule(), (torch.randn(2, 8),)),
    "autocast": lambda: (Body(mixed_precision, norm=nn.LayerNorm(4)), (X,)),
    "no_grad update": lambda: (Body(updated_under_no_grad), (X,)),
    "copy": lambda: (Body(written_by_copy), (X,)),
    "bernoulli": lambda: (Body(default_probability), (X,)),
    "spectral norm": lambda: (nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))), (X,)),
    "lstm": lambda: (Body(lambda self, x: self.norm(x)[0], norm=nn.LSTM(4, 4)), (X[None],)),
    "resnet18": lambda: (resnet18(), (image(64),)),
    "vit with dropout": lambda: (tiny_vit(drop_path_rate=0.2, proj_drop_rate=0.1, attn_drop_rate=0.1), (image(32),)),
    "deit distilled": lambda: (timm.create_model("deit_tiny_distilled_patch16_224", img_size=32), (image(32),)),
    "eva": lambda: (timm.create_model("eva02_tiny_patch14_224", img_size=28), (image(28),)),
    "beit": lambda: (
        timm.create_model("beit_base_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=3),
        (image(32),),
    ),
    "swin": lambda: (
        timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 4)
        ),
        (image(64),),
    ),
    "mixer": lambda: (timm.create_model("mixer_s32_224", img_size=64), (image(64),)),
    "convnext": lambda: (timm.create_model("test_convnext"), (image(64),)),
    "efficientnet": lambda: (timm.create_model("test_efficientnet"), (image(64),)),
    "regnet": lambda: (timm.create_model("test_byobnet"), (image(64),)),
    "levit": lambda: (timm.create_model("levit_128s"), (image(224),)),
    "coat": lambda: (timm.create_model("coat_lite_tiny", img_size=64), (image(64),)),
    "mobilevit": lambda: (timm.create_model("mobilevit_xxs"), (image(64),)),
    "maxxvit": lambda: (timm.create_model("coatnet_pico_rw_224", img_size=64), (image(64),)),
    "cpubone": lambda: (timm.create_model("cpubone_nano"), (image(64),)),
}  # fmt: skip


CELLS = [(family, mode) for family in FAMILIES for mode in ("train", "eval")]
KEPT = [(family, "eval" if i % 3 == 2 else "train") for i, family in enumerate(FAMILIES)]


@pytest.mark.parametrize(("family", "mode"), only(KEPT, CELLS))
def test_one_stage_equals_the_model_to_the_last_bit(family: str, mode: Mode) -> None:
    torch.manual_seed(0)
    model, args = FAMILIES[family]()
    model.train(mode == "train")
    twin = copy.deepcopy(model)
    graph = trace(twin, args, mode=mode)
    programs = split(graph, {op.name: 0 for op in graph.ops}, 1)
    torch.manual_seed(1)  # the same random numbers in the same order
    actual = run_in_one_process(graph, programs, weight_tensors(twin, graph), *leaves(args))
    torch.manual_seed(1)
    expected = leaves(model(*args))
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))
    if mode == "train":
        torch.stack([t.square().mean() for t in actual]).sum().backward()
        torch.stack([t.square().mean() for t in expected]).sum().backward()
        for (name, a), b in zip(twin.named_parameters(), model.parameters()):
            assert (a.grad is None) == (b.grad is None), name
            assert a.grad is None or b.grad is None or torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(twin.named_buffers(), model.buffers()):
        assert torch.equal(a, b), name


class Formats(nn.Module):
    """Convolutions, and tensors that are no buffers: one that is kept, one that is made in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 1)
        self.offset = torch.full((1, 4, 1, 1), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))) + self.offset + torch.ones(1, 4, 1, 1, device=x.device)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("make", [Formats, lambda: timm.create_model("resnet18")])
def test_a_meta_model_has_the_memory_formats_of_a_real_one(
    make: Callable[[], nn.Module], memory_format: torch.memory_format
) -> None:
    found = {}
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = make().to(memory_format=memory_format)
            x = torch.empty(2, 3, 32, 32).contiguous(memory_format=memory_format)
        found[device] = trace(model, (x,))
        assert {t.device.type for t in (*model.state_dict().values(), *found[device].constants.values())} == {device}
    real, meta = found["cpu"], found["meta"]
    assert (meta.ops, meta.weights, meta.inputs) == (real.ops, real.weights, real.inputs)
    images = [v for op in meta.ops for v in op.outputs if len(v.shape) == 4]
    last = memory_format == torch.channels_last
    assert images and {v.memory_order == (0, 2, 3, 1) for v in images if v.shape[2] > 1} == {last}
    kernels = [w for w in meta.weights if len(w.shape) == 4 and w.kind == "parameter"]
    assert kernels and {w.order == (0, 2, 3, 1) for w in kernels} == {last}
    assert {w.value.stride[1] == 1 for w in kernels if w.shape[2] > 1} == {last}


def test_a_meta_model_whose_shapes_are_not_known_yet() -> None:
    with torch.device("meta"):
        lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with pytest.raises(TraceError, match="uninitialized parameter"):
        trace(lazy, (torch.empty(2, 3, device="meta"),))

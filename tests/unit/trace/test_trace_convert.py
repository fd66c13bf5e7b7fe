"""Conversion of exported graphs: in-place operations, buffer updates, gradients, casts, dropped operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.models import Updating, tiny_vit
from support.traced import Body, X, calls, ops
from torch import nn

from autopar.trace.trace import trace


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


def test_an_update_of_a_list_updates_each_of_its_tensors() -> None:
    def forward(self: Body, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        with torch.no_grad():
            torch._foreach_lerp_([self.lin.weight, self.lin.bias], [y.detach().mean(0)] * 2, 0.1)
            torch._foreach_mul_([y], 2.0)
        return self.lin(y)

    graph = trace(Body(forward), (X,))
    updates = [op for op in graph.ops if "foreach" in op.target]
    assert [op.mutates for op in updates] == [("lin.weight", "lin.bias"), ()]
    together = [{*names} for names in graph.colocated]
    assert sum({"lin.linear", "_foreach_lerp", "lin.linear_1"} <= names for names in together) == 2
    assert any({"lin.linear", "_foreach_mul"} <= names for names in together)


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

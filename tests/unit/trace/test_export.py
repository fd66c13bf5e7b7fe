"""Models that cannot be exported: the error names file, line, code and remedy."""

from __future__ import annotations

import linecache
import traceback
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.traced import Body, X
from timm.models.levit import Attention
from torch import nn
from torch.fx import graph_module

from autopar.errors import TraceError
from autopar.trace.trace import trace


class Square(torch.autograd.Function):
    """Function whose backward is not the derivative of its forward."""

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


def reads_data(self: Body, x: torch.Tensor) -> torch.Tensor:
    return self.lin(x) * self.lin.weight.data.abs().mean()  # data is read


def sets_data(self: Body, x: torch.Tensor) -> torch.Tensor:
    self.lin.bias.data = 0.9 * self.lin.bias.detach()  # data is set
    return self.lin(x)


REFUSED = {
    "branch": (branches, "return x if self.lin(x).sum() > 0 else -x"),
    "loop": (loops, "for _ in range(int(x.max())):"),
    "numpy": (to_numpy, "torch.from_numpy(x.detach().numpy())"),
    "print": (formats, 'print(f"{self.lin(x).mean():.3f}")'),
    "data is read": (reads_data, "Read tensor.detach() instead"),
    "data is set": (sets_data, "in place under torch.no_grad()"),
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


def checks_size(self: Body, x: torch.Tensor) -> torch.Tensor:
    assert x.shape[1] == 3, "Not 3 features."  # size
    return self.lin(x)


def only_evaluates(self: Body, x: torch.Tensor) -> torch.Tensor:
    if self.training:
        raise ValueError("no such head")  # own error
    return self.lin(x)


def narrows(self: Body, x: torch.Tensor) -> torch.Tensor:
    return self.lin(x[:, :3])  # operator


def calls_with_two(self: Body, x: torch.Tensor) -> torch.Tensor:
    return self.lin(x, x)  # call


OWN = {
    "size": (checks_size, "AssertionError: Not 3 features (at"),
    "own error": (only_evaluates, "ValueError: no such head (at"),
    "operator": (narrows, "RuntimeError: "),
    "call": (calls_with_two, "TypeError: Linear.forward() takes 2 positional arguments but 3 were given"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", OWN)
def test_an_error_of_the_model_itself_is_not_blamed_on_the_trace(case: str, device: str) -> None:
    function, part = OWN[case]
    line = next(i for i, code in enumerate(Path(__file__).read_text().splitlines(), 1) if code.endswith(f"  # {case}"))
    model = Body(function).to(device).eval()
    with pytest.raises(TraceError) as caught:
        trace(model, (X,))
    message = str(caught.value)
    assert f"Body itself fails in train mode on inputs of shape [2, 4]: {part}" in message, message
    assert f" (at {__file__}:{line}, in {function.__name__}: `" in message, message
    assert message.endswith("`). Pass inputs that its forward takes, or build the model for these."), message
    assert not any(module.training for module in model.modules())


def test_an_error_without_a_text_is_named_once() -> None:
    def forward(self: Body, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    with pytest.raises(TraceError, match=r"shape \[2, 4\]: NotImplementedError \(at "):
        trace(Body(forward), (X,))


@pytest.mark.parametrize("function", [branches, checks_size])
def test_a_traceback_shows_the_frames_of_the_model_and_none_of_torch(function: Callable) -> None:
    with pytest.raises(TraceError) as caught:
        trace(Body(function), (X,))
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 1 and f"in {function.__name__}\n" in shown
    assert "torch/export" not in shown and "torch/nn/modules/module.py" not in shown
    hidden = caught.value.__context__
    assert hidden is not None and "torch/export" in "".join(traceback.format_tb(hidden.__traceback__))


def test_a_parameter_that_a_forward_replaces_is_named() -> None:
    def forward(self: Body, x: torch.Tensor) -> torch.Tensor:
        self.lin.bias = nn.Parameter(0.9 * self.lin.bias.detach())
        return self.lin(x)

    def same(self: Body, x: torch.Tensor) -> torch.Tensor:
        self.lin.bias = self.lin.bias
        self.lin.bias.data = self.lin.bias
        return self.lin(x)

    with pytest.raises(TraceError, match=r"Body: its forward assigns a new parameter to lin\.bias"):
        trace(Body(forward), (X,))
    assert "lin.linear" in {op.name for op in trace(Body(same), (X,)).ops}


def test_a_refused_detector_is_told_which_part_can_be_traced() -> None:
    torchvision = pytest.importorskip("torchvision")
    make = torchvision.models.detection.ssdlite320_mobilenet_v3_large
    model = make(weights=None, weights_backbone=None, num_classes=3)
    with pytest.raises(TraceError, match=r"SSD in train mode at .*head\(list\(backbone\(images\)\.values\(\)\)\)"):
        trace(model, (torch.rand(2, 3, 64, 64),))


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


def test_a_trace_leaves_no_source_behind() -> None:
    """torch.fx keeps the source of each module that it generates for the life of the process."""
    before = set(graph_module._loader.eval_cache), set(linecache.cache)
    trace(nn.Linear(3, 2), (torch.randn(2, 3),))
    assert set(graph_module._loader.eval_cache) == before[0]
    assert not [name for name in set(linecache.cache) - before[1] if name.startswith("<eval_with_key>")]


def points(size: int) -> torch.Tensor:
    return torch.linspace(0, 1, size)


class Points:
    """Made once for each size, in a dict."""

    def __init__(self) -> None:
        self.by_size: dict[int, torch.Tensor] = {}

    def __call__(self, size: int) -> torch.Tensor:
        if size not in self.by_size:
            self.by_size[size] = points(size)
        return self.by_size[size]


class LastPoints(nn.Module):
    """Keeps the points of the last size. Before the first call, only its class has the attributes."""

    size, made = 0, torch.empty(0)

    def forward(self, size: int) -> torch.Tensor:
        if self.size != size:
            self.size, self.made = size, points(size)
        return self.made


@pytest.mark.parametrize("make", [Points, LastPoints, lambda: lru_cache(points), lambda: [{0: Points()}][0][0]])
@pytest.mark.parametrize("used_before", [False, True])
def test_a_trace_leaves_no_tensors_without_data_in_caches(make: Callable[[], Any], used_before: bool) -> None:
    model = Body(lambda self, x: self.lin(x) + self.points(x.shape[1]))
    model.points = make()
    if used_before:
        assert torch.equal(model.points(3), points(3))
    trace(model, (X,), mode="eval")
    assert type(model.points(X.shape[1])) is torch.Tensor
    assert torch.equal(model(X), model.lin(X) + points(X.shape[1]))


def test_promoted_dtypes() -> None:
    graph = trace(Body(lambda self, x: self.lin(x).to(torch.promote_types(x.dtype, torch.float64))), (X,))
    assert [op.name for op in graph.ops] == ["lin.linear", "to"]


class Recurrent(nn.Module):
    def __init__(self, keeps_state: bool) -> None:
        super().__init__()
        self.lstm, self.keeps_state, self.state = nn.LSTM(3, 4, batch_first=True), keeps_state, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("of the user", stacklevel=1)
        y, _ = self.lstm(x)
        if self.keeps_state:
            self.state = y.detach()
        return y[:, -1]


def test_torch_warns_of_assigned_tensors_only_where_they_are_state() -> None:
    filters = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for mode in ("train", "eval", "train"):
            trace(Recurrent(False), (torch.randn(2, 5, 3),), mode=mode)
        trace(Attention(8, 4, resolution=(2, 2)), (torch.randn(2, 4, 8),), mode="eval")
    assert [str(w.message) for w in caught] == ["of the user"]  # once, as Python shows it without a trace
    with pytest.warns(UserWarning, match=r"self\.state.* were assigned during export"):
        trace(Recurrent(True), (torch.randn(2, 5, 3),))
    assert warnings.filters == filters

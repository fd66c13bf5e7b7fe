"""Models with autocast regions of their own: traced and run without autocast, against the models themselves."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.handmade import in_threads, plan_by_hand, run_in_one_process
from support.reference import Reference
from torch import nn

import autopar
from autopar.codegen.split import split
from autopar.errors import TraceError
from autopar.ir.graph import Graph, Mode
from autopar.trace.trace import trace, weight_tensors

SGD = functools.partial(torch.optim.SGD, lr=0.1)
X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Region(nn.Module):
    """A linear layer and a function of it under autocast; ``lin`` makes the low precision, ``x`` is float32."""

    norm: nn.Module

    def __init__(self, function: Callable, norm: nn.Module | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.function, self.dtype = function, dtype
        if norm is not None:
            self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            y = self.function(self, x)
        return y.float()


def unbiased() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.GELU(), nn.Linear(4, 4, bias=False))


def convolutions(last: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3, padding=1, bias=False), nn.ReLU(), last(4, 2, 3, padding=1, bias=False))


def attention(self: Region, x: torch.Tensor) -> torch.Tensor:
    low, high = self.lin(x).view(1, 2, 2, 2), x.view(1, 2, 2, 2)
    return F.scaled_dot_product_attention(low, high, low, attn_mask=high[:, :1])


def nested(self: Region, x: torch.Tensor) -> torch.Tensor:
    y = self.lin(x)
    with torch.autocast("cpu", enabled=False):
        z = self.norm(y.float()) * x
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.norm(z)
    with torch.autocast("cuda", enabled=False):  # says nothing about this device
        return y @ z.t() @ self.lin.weight[:2]


def half_inside(self: Region, x: torch.Tensor) -> torch.Tensor:
    y = self.lin(x)
    with torch.autocast("cpu", dtype=torch.float16):
        z = y @ self.norm(x).t()
    return z @ y


LABELS = torch.tensor([0, 1])
CASES: dict[str, Callable[[], nn.Module]] = {
    "no bias": lambda: Region(lambda m, x: m.norm(x), unbiased()),
    "no bias in half": lambda: Region(lambda m, x: m.norm(x), unbiased(), torch.float16),
    "matmul": lambda: Region(lambda m, x: m.lin(x) @ x.t() @ x),
    "matmul of the wide first": lambda: Region(lambda m, x: x @ m.lin(x).t()),
    "mm": lambda: Region(lambda m, x: torch.mm(torch.mm(m.lin(x), x.t()), x)),
    "bmm": lambda: Region(lambda m, x: torch.bmm(m.lin(x)[None], x.t()[None])),
    "addmm": lambda: Region(lambda m, x: torch.addmm(x, m.lin(x), m.lin.weight)),
    "einsum of products": lambda: Region(lambda m, x: torch.einsum("bi,ij,cj->bc", m.lin(x), m.lin.weight, x)),
    "einsum by elements": lambda: Region(lambda m, x: torch.einsum("bi,bj->bij", m.lin(x), x)),
    "einsum behind copies": lambda: Region(
        lambda m, x: torch.einsum("bhi,bhj->bij", m.lin(x).view(2, 2, 2), x.view(2, 2, 2))
    ),
    "attention": lambda: Region(attention),
    "multi-head": lambda: Region(lambda m, x: m.norm(x, x, x)[0], nn.MultiheadAttention(4, 2, bias=False)),
    "convolution": lambda: Region(lambda m, x: m.norm(m.lin(x)[:, None].expand(2, 2, 4)), convolutions(nn.Conv1d)),
    "transposed": lambda: Region(
        lambda m, x: m.norm(m.lin(x)[:, None].expand(2, 2, 4)), convolutions(nn.ConvTranspose1d)
    ),
    "prelu": lambda: Region(lambda m, x: m.norm(m.lin(x)), nn.PReLU(4)),
    "lstm": lambda: Region(lambda m, x: m.norm(m.lin(x))[0], nn.LSTM(4, 4)),
    "gru": lambda: Region(lambda m, x: m.norm(m.lin(x))[0], nn.GRU(4, 4)),
    "layer norm": lambda: Region(lambda m, x: m.norm(m.lin(x)), nn.LayerNorm(4)),
    "rms norm": lambda: Region(lambda m, x: m.norm(m.lin(x)), nn.RMSNorm(4)),
    "group norm": lambda: Region(lambda m, x: m.norm(m.lin(x)), nn.GroupNorm(2, 4)),
    "batch norm": lambda: Region(lambda m, x: m.norm(m.lin(x)), nn.BatchNorm1d(4)),
    "softmax": lambda: Region(lambda m, x: m.lin(x).softmax(-1)),
    "softmax to its own dtype": lambda: Region(lambda m, x: m.lin(x).softmax(-1, dtype=torch.float32) @ x.t()),
    "sum": lambda: Region(lambda m, x: m.lin(x).sum(1)),
    "product": lambda: Region(lambda m, x: m.lin(x).prod(1)),
    "norm": lambda: Region(lambda m, x: m.lin(x).norm(dim=1)),
    "power": lambda: Region(lambda m, x: m.lin(x) ** 3),
    "add": lambda: Region(lambda m, x: m.lin(x) + x),
    "add to the wide": lambda: Region(lambda m, x: x + m.lin(x)),
    "where": lambda: Region(lambda m, x: torch.where(x > 0, m.lin(x), x)),
    "cat": lambda: Region(lambda m, x: torch.cat([m.lin(x), x, m.lin(x)])),
    "cat of the low": lambda: Region(lambda m, x: torch.cat([m.lin(x), m.lin(x)])),
    "stack": lambda: Region(lambda m, x: torch.stack([x, m.lin(x)])),
    "grid": lambda: Region(
        lambda m, x: F.grid_sample(m.lin(x).view(1, 2, 2, 2), x.view(1, 2, 2, 2), align_corners=False)
    ),
    "mse": lambda: Region(lambda m, x: F.mse_loss(m.lin(x), x)),
    "cross entropy": lambda: Region(lambda m, x: F.cross_entropy(m.lin(x), LABELS, label_smoothing=0.1)),
    "binary cross entropy": lambda: Region(lambda m, x: F.binary_cross_entropy_with_logits(m.lin(x), x)),
    "distances": lambda: Region(lambda m, x: torch.cdist(m.lin(x), x)),
    "fourier": lambda: Region(lambda m, x: torch.fft.fft(m.lin(x)).abs()),
    "complex view": lambda: Region(lambda m, x: torch.view_as_complex(m.lin(x).view(2, 2, 2)).abs()),
    "own casts": lambda: Region(lambda m, x: m.lin(x).float().to(torch.bfloat16) @ x.type_as(m.lin(x)).t()),
    "double": lambda: Region(lambda m, x: m.lin(x).double() @ x.double().t()),
    "dropout": lambda: Region(lambda m, x: m.norm(m.lin(x)), nn.Dropout(0.5)),
    "in place": lambda: Region(lambda m, x: m.lin(x).add_(x).relu_()),
    "comparison in place": lambda: Region(lambda m, x: m.lin(x).gt_(x) * m.lin(x)),
    "twice": lambda: Region(lambda m, x: m.lin(F.gelu(m.lin(x)))),
    "weight and its view": lambda: Region(lambda m, x: m.lin(x) @ m.lin.weight.t() @ m.lin.weight),
    "weight norm": lambda: Region(
        lambda m, x: m.norm(m.lin(x)), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False))
    ),
    "nested": lambda: Region(nested, nn.Linear(4, 4, bias=False)),
    "half inside": lambda: Region(half_inside, nn.Linear(4, 4, bias=False)),
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_model_to_the_last_bit(name: str, mode: Mode) -> None:
    torch.manual_seed(0)
    model = CASES[name]().train(mode == "train")
    twin = copy.deepcopy(model)
    graph = trace(twin, (X,), mode=mode)
    programs = split(graph, {op.name: 0 for op in graph.ops}, 1)
    torch.manual_seed(1)  # the same random numbers in the same order
    (actual,) = run_in_one_process(graph, programs, weight_tensors(twin, graph), X)
    torch.manual_seed(1)
    expected = model(X)
    assert actual.dtype == expected.dtype and torch.equal(actual, expected)
    if mode == "train":
        actual.square().mean().backward()
        expected.square().mean().backward()
        for (parameter, a), b in zip(twin.named_parameters(), model.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), parameter
            assert a.grad is None or b.grad is None or torch.equal(a.grad, b.grad), parameter


# -- the graph ------------------------------------------------------------------------------------------------------


def casts(graph: Graph) -> list[str]:
    """Casts in order, as ``x bfloat16``."""
    return [f"{op.reads[0]} {op.outputs[0].dtype}" for op in graph.ops if op.target == "aten.to.dtype"]


LINEAR = ["x bfloat16", "lin.weight bfloat16", "lin.bias bfloat16"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no bias", ["x bfloat16", "norm.0.weight bfloat16", "norm.2.weight bfloat16"]),
        ("add", LINEAR),  # promotes by itself
        ("layer norm", LINEAR),  # takes float32 weights beside what is bfloat16
        ("product", [*LINEAR, "lin.linear float32"]),
        ("cat", [*LINEAR, "x bfloat16", "lin.linear float32", "lin.linear_1 float32"]),
        ("twice", LINEAR),
        ("own casts", [*LINEAR, "lin.linear float32", "to bfloat16", "x bfloat16"]),
    ],
)
def test_only_what_autocast_casts_is_cast(name: str, expected: list[str]) -> None:
    found = casts(trace(CASES[name](), (X,)))
    assert found[:-1] == expected  # the last is the model's own


def test_a_weight_is_cast_once_in_an_outermost_region() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.region = nn.Linear(4, 4, bias=False), torch.autocast("cpu", dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.lin(self.lin(x))
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    x = self.lin(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.lin(x)

    graph = trace(Twice(), (X,))
    assert casts(graph).count("lin.weight bfloat16") == 2


@pytest.mark.parametrize("given", [lambda m, x: x, lambda m, x: m.lin(x)])
def test_what_casts_of_inputs_cannot_express_is_refused(given: Callable) -> None:
    model = Region(lambda m, x: m.norm(given(m, x), x), nn.GRUCell(4, 4))
    with pytest.raises(TraceError, match=r"Cannot write gru_cell at .*without autocast.*enabled=False"):
        trace(model, (X,))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # on the CPU its state stays float32 beside bfloat16 products
        assert model.norm(given(model, X), X).dtype == torch.float32


# -- training -------------------------------------------------------------------------------------------------------


class Unbiased(nn.Module):
    """Layers without biases, a shared one among them, and products of activations, under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mlp = nn.Linear(8, 4), unbiased()
        self.shared, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.shared(self.mlp(x))
            y = self.shared(torch.einsum("bi,bj->bij", y, x).flatten(1)[:, :4] + x)
            y = y @ self.last.weight.t()
        return y.float() + self.last(x)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 8), torch.randint(0, 3, (8,))


def test_one_device_trains_like_the_model() -> None:
    torch.manual_seed(0)
    model, (x, y) = Unbiased(), batch()
    reference = Reference(model, F.cross_entropy, SGD)
    with autopar.parallelize(model, 1, x, optimizer=SGD, microbatches=2) as pm:
        for _ in range(3):
            assert pm.train_step(x, y).loss == reference.forward_backward(x, y, 2)
            reference.step()
        assert all(torch.equal(t, reference.model.state_dict()[name]) for name, t in pm.state_dict().items())


@pytest.mark.parametrize("first", ["mlp.1.gelu", "shared.linear", "shared.linear_1", "matmul"])
def test_two_stages_train_like_the_model(first: str) -> None:
    torch.manual_seed(0)
    model, (x, y) = Unbiased(), batch()
    reference = Reference(model, F.cross_entropy, SGD)
    pm = in_threads(model, plan_by_hand(model, x, 2, [first]), x, F.cross_entropy, optimizer=SGD)
    for _ in range(2):
        assert pm.train_step(x, y).loss == reference.forward_backward(x, y, 2)
        reference.step()
    state: dict[str, Any] = pm.state_dict()
    assert all(torch.equal(t, reference.model.state_dict()[name]) for name, t in state.items())

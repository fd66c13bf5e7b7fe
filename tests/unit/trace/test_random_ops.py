"""Random operations as functions of counters: distributions, invariance under cuts of the batch, what is left alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from support.models import tiny_vit
from torch import Tensor, nn

import autopar
from autopar.codegen.emit import graph_module
from autopar.codegen.split import split
from autopar.ir.graph import Graph
from autopar.ops.counter_rng import counter_rows
from autopar.sharding.propagate import ops_without_rule
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model
from autopar.trace.passes.random_ops import RNG_COUNTERS, is_random

BATCH = 8
CUTS = ([8], [4, 4], [5, 3], [1] * 8)
X = torch.rand(BATCH, 64, 32, generator=torch.Generator().manual_seed(0)) + 0.5


class Body(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@functools.cache
def graph_at(model: nn.Module, shape: torch.Size, dtype: torch.dtype) -> Graph:
    return lower_model(model, as_call(model, torch.empty(shape, dtype=dtype)), "train", "body")


def graph_of(model: nn.Module, x: Tensor) -> Graph:
    return graph_at(model, x.shape, x.dtype)


def run(model: nn.Module, x: Tensor, sizes: Sequence[int] = (BATCH,), step: int = 0) -> Tensor:
    """The model's output from microbatches of these sizes."""
    outputs = []
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    for part, own in zip(x.split(sizes), counter_rows(3, step, 0, len(x)).split(sizes)):
        graph = graph_of(model, part)
        (program,) = split(graph, dict.fromkeys((op.name for op in graph.ops), 0), 1)
        module = graph_module(program, weights | dict(graph.constants), torch.device("cpu"))
        by_name = {graph.inputs[0].name: part, RNG_COUNTERS: own}
        outputs.append(module(*(by_name[value.name] for value in program.inputs))[0])
    return torch.cat(outputs)


@dataclass(frozen=True)
class Draw:
    """A random function of [samples, 64, 32] and how many independent numbers it draws of a batch."""

    function: Callable[[Tensor], Tensor]
    independent: int = X.numel()
    of_sample: bool = True


def heads(x: Tensor) -> Tensor:
    return x.unflatten(2, (2, 16)).transpose(1, 2)


MASK = torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) > 0.3
MASK[5] = False  # a query that may look at nothing


def attention(x: Tensor, **kwargs: Any) -> Tensor:
    """With values of 1 the outputs are sums of the weights that were kept."""
    return F.scaled_dot_product_attention(heads(x), heads(x), torch.ones_like(heads(x)), dropout_p=0.3, **kwargs)


def grouped(x: Tensor) -> Tensor:
    q, kv = x.unflatten(2, (4, 8)).transpose(1, 2), x[..., :16].unflatten(2, (2, 8)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, kv, torch.ones_like(kv), dropout_p=0.3, enable_gqa=True, scale=0.5)


def filled(x: Tensor, name: str, *args: Any) -> Tensor:
    return x + getattr(torch.empty_like(x), name)(*args)


def in_place(x: Tensor) -> Tensor:
    """Memory that is read under another name afterwards."""
    y = x * 2
    view = y[:, :32]
    F.dropout(y, 0.3, inplace=True)
    return y + F.pad(view, (0, 0, 0, 32))


ROWS = BATCH * 64
FUNCTIONS: dict[str, Draw] = {
    "dropout": Draw(lambda x: F.dropout(x, 0.3)),
    "dropout of all": Draw(lambda x: F.dropout(x, 1.0)),
    "dropout in bfloat16": Draw(lambda x: F.dropout(x.bfloat16(), 0.3)),
    "dropout of a transpose": Draw(lambda x: F.dropout(x.transpose(0, 2), 0.3).transpose(0, 2)),
    "dropout of windows": Draw(lambda x: F.dropout(x.reshape(-1, 16, 32), 0.3).reshape(x.shape)),
    "dropout in place": Draw(in_place),
    "dropout2d": Draw(lambda x: F.dropout2d(x[..., None], 0.3)[..., 0], ROWS),
    "alpha dropout": Draw(lambda x: F.alpha_dropout(x, 0.3, True)),
    "alpha dropout of all": Draw(lambda x: x + F.alpha_dropout(x, 1.0, True) + torch.rand_like(x)),
    "feature alpha dropout": Draw(lambda x: F.feature_alpha_dropout(x, 0.3, True), ROWS),
    "rrelu": Draw(lambda x: F.rrelu(x - 1, training=True)),
    "drop path": Draw(lambda x: x * x.new_empty((len(x), 1, 1)).bernoulli_(0.7), BATCH),
    "bernoulli of numbers": Draw(lambda x: torch.bernoulli(x - 0.5)),
    "bernoulli in place of a tensor": Draw(lambda x: torch.empty_like(x).bernoulli_(x - 0.5)),
    "rand_like": Draw(lambda x: torch.rand_like(x)),
    "rand": Draw(lambda x: x + torch.rand(len(x), 64, 32)),
    "rand in float16": Draw(lambda x: torch.rand_like(x, dtype=torch.float16)),
    "uniform": Draw(lambda x: filled(x, "uniform_", 1, 3)),
    "randn_like": Draw(lambda x: torch.randn_like(x)),
    "randn": Draw(lambda x: x + torch.randn(len(x), 64, 32)),
    "randn of the middle dim": Draw(lambda x: x + torch.randn(64, len(x), 32).transpose(0, 1)),
    "normal": Draw(lambda x: filled(x, "normal_", 2, 0.1)),
    "normal of a size": Draw(lambda x: x + torch.normal(2.0, 0.5, (len(x), 64, 32))),
    "normal of tensors": Draw(lambda x: torch.normal(x, x / 2)),
    "normal of a mean": Draw(lambda x: torch.normal(x, 2.0)),
    "randint": Draw(lambda x: x + torch.randint(5, (len(x), 64, 32))),
    "randint from": Draw(lambda x: x * torch.randint(-3, 5, (len(x), 64, 32))),
    "randint_like": Draw(lambda x: torch.randint_like(x, 3)),
    "exponential": Draw(lambda x: filled(x, "exponential_", 2.0)),
    "gumbel": Draw(lambda x: F.gumbel_softmax(x, tau=2.0)),
    "attention": Draw(attention),
    "causal attention": Draw(lambda x: attention(x, is_causal=True), 2000),
    "attention with a mask": Draw(lambda x: attention(x, attn_mask=MASK), 2000),
    "attention with a bias": Draw(lambda x: attention(x, attn_mask=MASK.float().log()), 2000),
    "grouped attention": Draw(grouped, 2000),
    "patches at random": Draw(lambda x: x.gather(1, torch.rand(len(x), 64).argsort(1)[:, :9, None].expand(-1, -1, 32))),
    "of all samples": Draw(lambda x: x * torch.empty(1, 1, 1).bernoulli_(0.5), 1, of_sample=False),
    "of the model": Draw(lambda x: x + torch.rand(64, 1), 64, of_sample=False),
    "permuted": Draw(lambda x: x[:, torch.randperm(64)], 1, of_sample=False),
}
BODIES = {name: Body(draw.function) for name, draw in FUNCTIONS.items()}


def distance(one: Tensor, other: Tensor) -> float:
    """The Kolmogorov-Smirnov statistic: the largest distance of two samples' distributions."""
    one, other = (t.flatten().float().round(decimals=4).sort().values for t in (one, other))
    points = torch.cat([one, other])
    below = [torch.searchsorted(t, points, right=True) / len(t) for t in (one, other)]
    return (below[0] - below[1]).abs().max().item()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_distributed_as_torch_draws_them(name: str) -> None:
    draw = FUNCTIONS[name]
    torch.manual_seed(100)  # not that of X, with which it would be correlated
    model = BODIES[name]
    wanted, found = model(X), run(model, X)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    apart = distance(wanted, found)
    assert apart < 1.95 * math.sqrt(2 / draw.independent)
    if name != "dropout of all":
        assert not all(torch.equal(found, run(model, X, step=step)) for step in range(1, 8))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_do_not_depend_on_how_the_batch_is_cut(name: str) -> None:
    model = BODIES[name]
    whole = run(model, X)
    for sizes in CUTS[1:]:
        torch.testing.assert_close(run(model, X, sizes), whole, rtol=1e-6, atol=1e-6)
    if FUNCTIONS[name].independent > BATCH and FUNCTIONS[name].of_sample and name != "dropout of all":
        same = run(model, X[:1].expand_as(X))
        assert not any(torch.equal(same[0], same[i]) for i in range(1, BATCH))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_random_is_left_and_everything_can_be_split(name: str) -> None:
    graph = graph_of(BODIES[name], X)
    assert not any(is_random(op) for op in graph.ops)
    assert graph.inputs[-1].name == RNG_COUNTERS and graph.inputs[-1].shape == (BATCH, 4)
    assert ops_without_rule(graph) == ()


def test_gradients_pass_what_was_kept() -> None:
    x = X.clone().requires_grad_()
    for function in (lambda x: F.dropout(x, 0.3), in_place):
        y = run(Body(function), x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.allclose(gradient * x, y, rtol=1e-5)


NOTHING_DROPPED = 1e-9
ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda q, p: F.scaled_dot_product_attention(q, q.cos(), q.sin(), dropout_p=p),
    "causal": lambda q, p: F.scaled_dot_product_attention(q, q[:, :, :40], q[:, :, :40], None, p, True),
    "mask": lambda q, p: F.scaled_dot_product_attention(q, q, q.sin(), MASK, p, scale=0.3),
    "bias": lambda q, p: F.scaled_dot_product_attention(q, q, q.sin(), q @ q.mT, p),
    "grouped": lambda q, p: F.scaled_dot_product_attention(q, q[:, ::2], q[:, ::2], dropout_p=p, enable_gqa=True),
    "bfloat16": lambda q, p: F.scaled_dot_product_attention(*[q.bfloat16()] * 3, dropout_p=p),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_equals_torchs_where_nothing_is_dropped(name: str) -> None:
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
    made = [ATTENTIONS[name](heads(x), 0.0), run(Body(lambda x: ATTENTIONS[name](heads(x), NOTHING_DROPPED)), x, [2])]
    gradients = [torch.autograd.grad(y.float().square().sum(), x)[0] for y in made]
    tolerance = 2e-2 if name == "bfloat16" else 1e-5
    for one, other in (made, gradients):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * one.abs().max().item())


def test_a_dropout_as_text() -> None:
    lines = str(graph_of(nn.Dropout(0.25), torch.randn(4, 6))).splitlines()
    assert lines[1:] == [
        "  dropout.uniform: float32[4, 6] = autopar.uniform.default(%autopar.draws, (4, 6), 'dropout.uniform', 0, 1)",
        "  dropout.ge: bool[4, 6] = aten.ge.Scalar(%dropout.uniform, 0.25)",
        "  dropout.mul: float32[4, 6] = aten.mul.Tensor(%input, %dropout.ge)",
        "  dropout: float32[4, 6] = aten.mul.Scalar(%dropout.mul, 1.3333333333333333)",
    ]


def test_a_graph_without_random_operations_is_left_alone() -> None:
    model = tiny_vit(1)
    x = torch.randn(2, 3, 32, 32)
    assert [value.name for value in graph_of(model, x).inputs] == ["x"]


# -- whole models ----------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """[tokens, samples, channels], and samples times heads; attention that returns its weights and that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2)
        self.attention = nn.MultiheadAttention(32, 4, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x.transpose(0, 1))
        y, weights = self.attention(x, x, x)
        return y.transpose(0, 1) + weights.sum(2, keepdim=True)


def swin() -> nn.Module:
    return timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(2,), num_heads=(2,),
        num_classes=10, drop_rate=0.1, attn_drop_rate=0.1, proj_drop_rate=0.1, drop_path_rate=0.2,
    )  # fmt: skip


IMAGES = torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "torch layers": (Layers, X),
    "swin": (swin, IMAGES),
    "vit with dropped patches": (lambda: tiny_vit(1, patch_drop_rate=0.25, drop_path_rate=0.1), IMAGES),
    "torchvision": (
        lambda: torchvision.models.ConvNeXt(
            [torchvision.models.convnext.CNBlockConfig(8, None, 2)], 0.5, layer_scale=1.0, num_classes=10
        ),
        IMAGES,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_draw_the_same_however_the_batch_is_cut(name: str) -> None:
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    with torch.no_grad():
        whole = run(model, x)
        for sizes in CUTS[1:2]:
            torch.testing.assert_close(run(model, x, sizes), whole, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(whole, run(model, x, step=1), rtol=1e-3)


# -- what has no form ------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 8, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lstm": (Recurrent, "lstm.lstm (aten.lstm.input"),
    "permuted batch": (lambda: Body(lambda x: x[torch.randperm(len(x))]), "randperm (aten.randperm.default"),
    "fixed batch": (lambda: Body(lambda x: x.reshape(8, 4, 32) + torch.rand(8, 4, 32)), "rand (aten.rand.default"),
    "poisson": (lambda: Body(lambda x: torch.poisson(x)), "poisson (aten.poisson.default"),
    "multinomial": (
        lambda: Body(lambda x: torch.multinomial(x[:, :, 0], 1).float()),
        "multinomial (aten.multinomial.default",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_count_samples_is_named_in_one_warning(name: str) -> None:
    make, named = LEFT[name]
    x = X[:, :4]
    with (
        pytest.warns(autopar.PlanDependentRandomWarning) as said,
        autopar.parallelize(make(), 1, x, microbatches=1) as pm,
    ):
        assert not torch.equal(pm(x), pm(x))
    ours = [str(w.message) for w in said if issubclass(w.category, autopar.PlanDependentRandomWarning)]
    assert len(ours) == 1 and named in ours[0] and "1 random operations" in ours[0]

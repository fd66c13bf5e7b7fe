"""Linear layers that add to their weights' sums, against gradients that are moved there."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
import torch.nn.functional as F
from support.effort import only
from support.handmade import even_firsts, in_threads, plan_by_hand
from support.models import Tied, tiny_vit
from torch import nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition

import autopar
from autopar.codegen import compile as compiled
from autopar.codegen.emit import graph_module
from autopar.ir.plan_parts import ZeroStage
from autopar.ops import wgrad_accumulation as linear_wgrad_fused
from autopar.ops.wgrad_accumulation import add_product
from autopar.runtime.params.grad_buffer import GradBuffer, MainGrad

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each product was added to a sum that was there. Compiled as for kernels, but not to machine code."""
    found: list[bool] = []
    add = add_product

    def noted(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, holds: bool) -> None:
        found.append(holds)
        add(total, left, right, holds)

    backend = aot_eager_decomp_partition  # leaves out what nothing reads, as the one that makes kernels does
    monkeypatch.setattr(compiled, "inductor", lambda module, arguments, options: backend(module, arguments))
    monkeypatch.setattr(compiled, "COMPILED_REGIONS", {})
    monkeypatch.setattr(linear_wgrad_fused, "add_product", noted)
    monkeypatch.setattr(linear_wgrad_fused, "OWNERS", WeakValueDictionary())  # but those of other tests' models
    yield found


def run(model: nn.Module, x: torch.Tensor, y: torch.Tensor, compiles: bool, **options: Any) -> list[Any]:
    with autopar.parallelize(
        model, 1, x, loss_fn=F.cross_entropy, optimizer=ADAMW, microbatches=3, compile=compiles, **options
    ) as pm:
        losses = [pm.train_step(x, y).loss for _ in range(2)]
        losses.append(pm.forward_backward(x, y).loss)
        first = pm.gradients()
        losses.append(pm.forward_backward(x[:4], y[:4]).loss)  # also at another size
        gradients = pm.gradients()
        pm.optimizer_step()
        pm.eval()(x)
        pm.train()
        losses.append(pm.train_step(x, y).loss)
        return [losses, first, gradients, dict(pm.state_dict())]


@pytest.mark.parametrize(
    ("precision", "recompute"),
    only([("bf16-params", "all"), ("bf16", "none")], itertools.product(["bf16-params", "bf16"], ["none", "all"])),
)
def test_sums_are_those_of_moved_gradients(precision: Any, recompute: Any, added: list[bool]) -> None:
    torch.manual_seed(0)
    model, x, y = tiny_vit(2), torch.randn(6, 3, 32, 32), torch.randint(0, 10, (6,))
    expected = run(model, x, y, False, precision=precision, recompute=recompute)
    assert not added
    found = run(model, x, y, True, precision=precision, recompute=recompute)
    layers = 2 * 4  # not the head, whose rows of 10 elements tensor cores cannot load
    per_call = [3, 3, 3, 2, 3]  # microbatches
    first = [[False] * layers + [True] * (m - 1) * layers for m in per_call]
    first[3] = [True] * 2 * layers  # the second call to accumulate
    assert added == [holds for call in first for holds in call]
    assert found[0] == pytest.approx(expected[0], abs=1e-2)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            # A gradient of each microbatch was rounded to bfloat16 before it was added.
            assert (ours[name] - tensor).norm() <= 0.06 * tensor.norm() + 1e-3, name
    assert not linear_wgrad_fused.OWNERS


def test_a_weight_that_is_used_twice_has_its_gradient_moved(added: list[bool]) -> None:
    torch.manual_seed(0)
    x, y = torch.randint(0, 32, (6, 5)), torch.randint(0, 32, (6,))
    model = Tied()
    expected = run(model, x, y, False, precision="bf16-params")
    found = run(model, x, y, True, precision="bf16-params")
    assert found[0] == pytest.approx(expected[0], abs=1e-2)
    assert added  # by the other layers


class Between(nn.Module):
    """A layer that reads what a function makes of another one's results, which are read beside it too."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        return self.last(self.second(self.function(first)) + first)


@pytest.mark.parametrize(
    ("function", "layers"),
    [
        (torch.tanh, 2),
        (torch.round, 1),
        (torch.sign, 1),
        (lambda x: torch.div(x, 0.5, rounding_mode="floor"), 1),
        (lambda x: (x > 0).type_as(x), 1),
        (lambda x: x[:, :1].detach().expand_as(x), 1),
        (lambda x: x.pow(0), 1),
        (lambda x: x + (x.round() - x).detach(), 2),
    ],
)
def test_a_layer_whose_input_needs_no_gradient_is_trained(function: Any, layers: int, added: list[bool]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 8), torch.randint(0, 16, (6,))
    model = Between(function)
    expected = run(model, x, y, False, precision="bf16-params")
    found = run(model, x, y, True, precision="bf16-params")
    assert len(added) == layers * (3 + 3 + 3 + 2 + 3)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert (ours[name] - tensor).norm() <= 0.06 * tensor.norm() + 1e-3, name


class Weighed(nn.Module):
    """A linear layer of one output, which has a vector for a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight, self.last = nn.Linear(8, 8), nn.Parameter(torch.randn(8)), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.linear(self.first(x), self.weight))


def test_a_weight_that_is_a_vector_has_its_gradient_moved(added: list[bool]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 8, 8), torch.randint(0, 16, (6,))
    model = Weighed()
    expected = run(model, x, y, False, precision="bf16-params")
    found = run(model, x, y, True, precision="bf16-params")
    assert found[0] == pytest.approx(expected[0], abs=1e-2)
    assert len(added) == 3 + 3 + 3 + 2 + 3  # by the last layer


@pytest.mark.parametrize("closes", [True, False])
def test_empty_weights_and_memory_after_a_model(closes: bool, added: list[bool]) -> None:
    """With a model that was closed, and with one that was only dropped."""
    x, y = torch.randn(6, 8), torch.randint(0, 16, (6,))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 0), nn.Linear(0, 8), nn.Linear(8, 16))
    pm = autopar.parallelize(
        model, 1, x, loss_fn=F.cross_entropy, optimizer=ADAMW, precision="bf16-params", compile=True
    )
    pm.train_step(x, y)
    assert added == [False]  # by the last layer
    owners = [
        weakref.ref(owner.gradients) for owner in linear_wgrad_fused.OWNERS.values() if isinstance(owner, MainGrad)
    ]
    assert len(owners) == 1
    if closes:
        pm.close()
    del pm
    gc.collect()
    assert not linear_wgrad_fused.OWNERS
    assert [owner() for owner in owners] == [None]


@pytest.mark.parametrize("zero", only([1], [0, 1, 2]))
def test_replicas_and_stages_sum_the_same(zero: ZeroStage, added: list[bool]) -> None:
    """In float32, where nothing is rounded between the products and the sums."""
    torch.manual_seed(0)
    model, x, y = tiny_vit(2), torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    plan = plan_by_hand(model, x, 1 if zero == 2 else 2, even_firsts(model, x, 2), dp=2, zero=zero)
    results = []
    for compiles in (False, True):
        pm = in_threads(
            model, plan, x, F.cross_entropy, build=functools.partial(graph_module, compiled=compiles), optimizer=ADAMW
        )
        losses = [pm.train_step(x, y).loss for _ in range(3)]
        results.append((losses, dict(pm.state_dict())))
        assert bool(added) == compiles
    assert results[1][0] == pytest.approx(results[0][0], abs=1e-5)
    for name, tensor in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], tensor, rtol=0, atol=1e-5, msg=name)


def test_products_of_one_dtype_and_of_two() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(4, 6), torch.randn(6, 5)
    for dtype in (torch.float32, torch.bfloat16):
        total = torch.full((4, 5), float("nan"))
        add_product(total, left.to(dtype), right.to(dtype), False)
        once = (left.to(dtype) @ right.to(dtype)).float()
        torch.testing.assert_close(total, once)
        add_product(total, left.to(dtype), right.to(dtype), True)
        torch.testing.assert_close(total, 2 * once)


def test_what_is_lent_is_taken_back() -> None:
    gradients = GradBuffer({}, ())
    assert gradients.main_grad_of("missing") is None
    gradients.close()

"""Averages of weights, kept by timm on every rank, against timm's on one device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import timm.utils
import torch
import torch.nn.functional as F
from support.cases import ADAMW, data
from support.handmade import in_threads, plan_by_hand
from support.models import Normed, Tied
from support.reference import Reference, assert_all_close, assert_close
from torch import nn

import autopar
from autopar.ir.graph import Graph, Weight
from autopar.runtime.optim.ema import with_averages

EMA = functools.partial(timm.utils.ModelEmaV3, decay=0.9)


@pytest.mark.parametrize("options", [{}, {"exclude_buffers": True}, {"foreach": False, "device": "cpu"}])
@pytest.mark.parametrize(("name", "cut"), [("normed", "layers.3.conv1d"), ("tied", "head.linear")])
def test_buffers_and_tied_weights(name: str, cut: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Normed() if name == "normed" else Tied()
    x, y = data(name, 8)
    make = functools.partial(EMA, **options)
    plan = plan_by_hand(model, x, 2, [cut])
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW, ema=make)
    reference = Reference(model, F.cross_entropy, ADAMW)
    expected = make(reference.model)
    for step in range(1, 4):
        reference.forward_backward(x, y, 2)
        reference.step()
        expected.update(reference.model, step=step)
        pm.forward_backward(x, y)
        pm.optimizer_step()
    assert_all_close(pm.ema_state_dict(), dict(expected.module.state_dict()), "average")
    fresh = copy.deepcopy(model)
    fresh.load_state_dict(pm.ema_state_dict())


def test_replicas_show_the_first_ones_averages_and_go_on_with_their_own_buffers() -> None:
    torch.manual_seed(0)
    model = Normed()
    x, y = data("normed", 8)
    pm = in_threads(model, plan_by_hand(model, x, 2, [], dp=2), x, F.cross_entropy, optimizer=ADAMW, ema=EMA)
    other = in_threads(model, plan_by_hand(model, x, 2, [], dp=2), x, F.cross_entropy, optimizer=ADAMW)
    for _ in range(3):
        pm.train_step(x, y)
        other.train_step(x, y)
    alone = copy.deepcopy(model).eval()
    alone.load_state_dict(pm.ema_state_dict())
    with pm.ema_weights(), torch.no_grad():
        assert_close(pm.eval()(x), alone(x), "outputs")
        assert_all_close(pm.state_dict(), pm.ema_state_dict(), "weights")
    pm.train()
    for _ in range(2):
        assert pm.train_step(x, y).loss == other.train_step(x, y).loss
    assert all(torch.equal(a, b) for a, b in zip(pm.state_dict().values(), other.state_dict().values(), strict=True))


def test_weights_come_back_after_an_exception_and_training_waits_until_then() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.randn(4, 8), torch.arange(4)
    pm = in_threads(model, plan_by_hand(model, x, 1, []), x, F.cross_entropy, optimizer=ADAMW, ema=EMA)
    for _ in range(2):
        pm.train_step(x, y)
    before = pm.state_dict()
    with pytest.raises(KeyError), pm.ema_weights():
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(pm.state_dict().values(), before.values(), strict=True))
    calls: list[Callable[[], Any]] = [
        lambda: pm.train_step(x, y), lambda: pm.forward_backward(x, y), pm.optimizer_step,
        lambda: pm.load_state_dict(before), pm.ema_weights().__enter__, lambda: pm.save_checkpoint("x"),
        lambda: pm.load_checkpoint("x"), lambda: pm.measure_memory(x, y),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(autopar.UsageError, match=r"Inside of ema_weights\(\) averages stand in"), pm.ema_weights():
            call()
    assert all(torch.equal(a, b) for a, b in zip(pm.state_dict().values(), before.values(), strict=True))
    assert pm.num_updates == 2 and not pm.gradients()


def test_a_stage_without_parameters() -> None:
    model, x, y = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Tanh()), torch.randn(4, 8), torch.arange(4)
    pm = in_threads(model, plan_by_hand(model, x, 1, ["2.tanh"]), x, F.cross_entropy, optimizer=ADAMW, ema=EMA)
    pm.train_step(x, y)
    assert list(pm.ema_state_dict()) == ["0.weight", "0.bias"]
    with pm.ema_weights():
        assert pm(x).shape == (4, 4)


def test_planning_draws_no_random_numbers_for_the_average() -> None:
    def make(module: nn.Module) -> Any:
        torch.randn(3)
        return EMA(module)

    weights = (Weight("w", "parameter", (100, 2), "float32", True),)
    state = torch.random.get_rng_state()
    graph = with_averages(Graph("m", "train", 1, (), weights, (), (), (), None, None), make)
    assert graph.weights[0].average_bytes == 4 and torch.equal(state, torch.random.get_rng_state())


def test_no_average_was_asked_for() -> None:
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    pm = in_threads(model, plan_by_hand(model, x, 1, []), x, F.cross_entropy, optimizer=ADAMW)
    expected = "The weights of Linear are not averaged: parallelize was given no ema. Pass ema=functools.partial"
    with pytest.raises(autopar.UsageError, match=expected):
        pm.ema_state_dict()
    with pytest.raises(autopar.UsageError, match=expected), pm.ema_weights():
        pass


@pytest.mark.parametrize(
    ("ema", "message"),
    [
        (lambda module: EMA(module, decoy=0.9), "TypeError: .*decoy"),  # type: ignore[call-arg]
        (timm.utils.ModelEmaV2, "too many|unexpected keyword argument 'step'"),
        (lambda module: module, "'Module' object has no attribute 'update'"),
    ],
)
def test_what_cannot_average(ema: Any, message: str) -> None:
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    with pytest.raises(autopar.UsageError, match=rf"ema= cannot average the weights: .*({message})"):
        in_threads(model, plan_by_hand(model, x, 1, []), x, F.cross_entropy, optimizer=ADAMW, ema=ema)

"""Loss scaling in fp16, against torch's autocast and scaler on one device."""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import timm.utils
import torch
import torch.nn.functional as F
from support.cases import ADAMW
from support.handmade import in_threads, plan_by_hand
from support.hardware import slow_compute
from support.models import Autocast, ConvNet, loss_in_bf16, tiny_vit
from support.reference import Reference, samples, unwrapped_state
from torch import nn

import autopar
from autopar.errors import NonFiniteLossWarning
from autopar.ir.plan import Precision
from autopar.ir.plan_parts import ZeroStage


def steep(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients overflow float16 at the first scales."""
    return 30 * F.cross_entropy(output, target)


@dataclass
class Scaled:
    """A model on one device under torch's own autocast and loss scaling, with one limit to its gradients."""

    reference: Reference
    limit: dict[str, float]
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cpu"))
    microbatches: int = 2

    def step(self, x: torch.Tensor, y: torch.Tensor, replicas: int = 1) -> float:
        """The norm of the gradients before they were clipped."""
        reference = self.reference
        for replica, parts in enumerate(reference.replica_parts((x, y), self.microbatches, replicas)):
            with reference.as_replica(replica, replicas):
                for part, target in parts:
                    with torch.autocast("cpu", torch.float16):
                        loss = reference.loss_fn(reference.model(part), target) * (samples(part) / samples(x))
                    self.scaler.scale(loss).backward()
        self.scaler.unscale_(reference.optimizer)
        gradients = list(reference.gradients().values())
        norm = nn.utils.get_total_norm(gradients)
        (name, most), parameters = next(iter(self.limit.items())), list(reference.model.parameters())
        if name == "clip_grad_norm":
            assert norm > most or not isfinite(norm)
            nn.utils.clip_grads_with_norm_(parameters, most, norm)
        else:
            assert max(g.abs().max() for g in gradients) > most or not isfinite(norm)
            nn.utils.clip_grad_value_(parameters, most)
        self.scaler.step(reference.optimizer)
        self.scaler.update()
        reference.optimizer.zero_grad()
        return norm.item()


def assert_goes_on_like(
    pm: autopar.ParallelModel, alone: Scaled, x: torch.Tensor, y: torch.Tensor, replicas: int, steps: int
) -> None:
    """Some steps, of which the first overflows and the last does not, are those of one device."""
    trainable = {name.removeprefix("model.") for name, _ in alone.reference.model.named_parameters()}
    skipped = []
    for step in range(steps):
        state, scale = pm.state_dict(), pm.loss_scale()
        with warnings.catch_warnings():
            warnings.simplefilter("error", NonFiniteLossWarning)
            result = pm.train_step(x, y)
        norm = alone.step(x, y, replicas)
        assert result.skipped is not isfinite(norm), f"step {step}"
        assert alone.scaler.get_scale() == (scale / 2 if result.skipped else scale)
        assert set(pm._call("loss_scale").values()) == {alone.scaler.get_scale()}
        found = pm.state_dict()
        if result.skipped:
            assert result.grad_norm == float("inf")
            assert all(torch.equal(found[name], state[name]) for name in trainable)
        else:
            assert result.grad_norm == pytest.approx(norm, rel=1e-3)
            assert not any(torch.equal(found[name], state[name]) for name in trainable)
        for name, tensor in unwrapped_state(alone.reference).items():
            torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=5e-4)
        skipped.append(result.skipped)
    assert skipped[0] and not skipped[-1]


@pytest.mark.parametrize(("zero", "microbatches"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("limit", [{"clip_grad_norm": 1.0}, {"clip_grad_value": 0.05}])
def test_overflow_is_agreed_and_training_goes_on(limit: dict[str, Any], zero: ZeroStage, microbatches: int) -> None:
    torch.manual_seed(0)
    model, x, y = ConvNet(), torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,))
    plan = plan_by_hand(model, x, microbatches, ["conv.conv2d"], dp=2, zero=zero, precision="fp16")
    pm = in_threads(model, plan, x, steep, optimizer=ADAMW, **limit)
    alone = Scaled(Reference(Autocast(model, torch.float16), steep, ADAMW), limit, microbatches=microbatches)
    assert_goes_on_like(pm, alone, x, y, replicas=2, steps=6)


def test_shards_in_processes_agree_on_an_overflow(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, y = tiny_vit(1), torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    alone = Scaled(Reference(Autocast(model, torch.float16), steep, sgd), {"clip_grad_norm": 1.0})
    with autopar.parallelize(
        model, 2, x, loss_fn=steep, optimizer=sgd, tp=2, microbatches=2, precision="fp16",
        hardware=str(slow_compute(tmp_path)), clip_grad_norm=1.0,
    ) as pm:  # fmt: skip
        layouts = pm._programs.storage.values()
        assert any(layout.splits for layout in layouts) and not all(layout.splits for layout in layouts)
        assert_goes_on_like(pm, alone, x, y, replicas=1, steps=6)


def test_averages_are_of_the_masters() -> None:
    torch.manual_seed(0)
    model, x, y = ConvNet(), torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,))
    average = functools.partial(timm.utils.ModelEmaV3, decay=0.9)
    reference = Reference(Autocast(model, torch.bfloat16), loss_in_bf16, ADAMW)
    expected = average(reference.model)
    plan = plan_by_hand(model, x, 2, ["conv.conv2d"], precision="bf16")
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW, ema=average)
    for step in range(1, 4):
        reference.forward_backward(x, y, 2)
        reference.step()
        expected.update(reference.model, step=step)
        pm.train_step(x, y)
    found = pm.ema_state_dict()
    rounded = []
    for name, tensor in expected.module.state_dict().items():
        own = found[name.removeprefix("model.")]
        assert own.dtype == tensor.dtype
        torch.testing.assert_close(own, tensor, rtol=0, atol=1e-6)
        rounded.append(torch.equal(own, own.bfloat16().to(own.dtype)))
    assert len(rounded) == len(found) and not all(rounded)
    reference.model.load_state_dict(expected.module.state_dict())
    reference.model.eval()
    with pm.ema_weights():
        torch.testing.assert_close(pm.eval()(x), reference.forward(x, 2)[0], rtol=0, atol=1e-6)
    with pytest.raises(AssertionError):  # the copies that programs read are the weights' own again
        torch.testing.assert_close(pm(x), reference.forward(x, 2)[0], rtol=0, atol=1e-6)


def test_gradients_and_losses_are_shown_unscaled() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 4), torch.randn(8, 8), torch.randint(0, 4, (8,))
    expected = copy.deepcopy(model)
    loss = F.cross_entropy(expected(x), y)
    loss.backward()
    with autopar.parallelize(model, 1, x, optimizer=ADAMW, microbatches=2, precision="fp16") as pm:
        result = pm.forward_backward(x, y)
        assert pm.loss_scale() == 65536 and result.loss == pytest.approx(loss.item(), rel=1e-3)
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(pm.gradients()[name], parameter.grad, rtol=5e-3, atol=1e-4)
        assert pm.optimizer_step().grad_norm < 10


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-params"])
def test_an_evaluation_leaves_the_gradients(precision: Precision) -> None:
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(6, 8), torch.randint(0, 4, (6,))
    with autopar.parallelize(model, 1, x, optimizer=ADAMW, microbatches=2, precision=precision) as pm:
        pm.forward_backward(x, y)
        before = {name: gradient.clone() for name, gradient in pm.gradients().items()}
        pm.eval()(x)
        pm.train()
        after = pm.gradients()
        assert before.keys() == after.keys() == dict(model.named_parameters()).keys()
        assert all(torch.equal(after[name], gradient) for name, gradient in before.items())
        pm.forward_backward(x, y)  # adds to them
        torch.testing.assert_close(pm.gradients(), {name: 2 * gradient for name, gradient in before.items()})


def test_the_scale_and_the_masters_are_in_the_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, y = ConvNet(), torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,))
    start = functools.partial(autopar.parallelize, model, 1, x, loss_fn=steep, optimizer=ADAMW, microbatches=2)
    with start(precision="fp16") as pm:
        first = [pm.train_step(x, y) for _ in range(4)]
        assert first[0].skipped and pm.num_updates == 4
        pm.save_checkpoint(tmp_path)
        scale, following = pm.loss_scale(), pm.train_step(x, y)
    with start(precision="fp16") as pm:
        pm.load_checkpoint(tmp_path)
        assert pm.loss_scale() == scale < 65536
        assert pm.train_step(x, y).loss == following.loss
    with start() as pm:  # in float32: the weights are the same
        pm.load_checkpoint(tmp_path)
        assert pm.train_step(x, y).loss == pytest.approx(following.loss, rel=1e-2)


def test_averages_leave_out_skipped_updates() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,))
    averaged: list[int] = []

    class Noted:
        def __init__(self, module: nn.Module) -> None:
            self.module = copy.deepcopy(module)

        def update(self, module: nn.Module, step: int) -> None:
            averaged.append(step)

    with autopar.parallelize(
        ConvNet(), 1, x, loss_fn=steep, optimizer=ADAMW, microbatches=2, precision="fp16", ema=Noted
    ) as pm:
        skipped = []
        for _ in range(6):
            pm.forward_backward(x, y)
            skipped.append(pm.optimizer_step().skipped)
    assert skipped[0] and not skipped[-1]
    assert averaged == [number for number, left_out in enumerate(skipped, 1) if not left_out]

"""Comparisons of a parallel model with the reference: outputs, training steps, state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.ir.pytree import leaves
from support.cases import ADAMW
from support.handmade import plan_by_hand
from support.reference import Reference, assert_all_close, assert_close


def images(batch: int, side: int = 32) -> torch.Tensor:
    return torch.randn(batch, 3, side, side)


def labels(batch: int, classes: int = 10) -> torch.Tensor:
    return torch.randint(0, classes, (batch,))


def images_and_labels(batch: int, side: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return images(batch, side), labels(batch)


def outputs_agree(pm: autopar.ParallelModel, reference: Reference, x: Any) -> None:
    """Check outputs in eval and then in train mode, with the plan's microbatches on both sides."""
    for train in (False, True):
        pm.train(train)
        reference.model.train(train)
        actual = leaves(pm(**x) if isinstance(x, dict) else pm(x))
        for a, b in zip(actual, reference.forward(x, pm.plan.microbatches), strict=True):
            assert_close(a, b, f"output, train={train}")


def step_agrees(pm: autopar.ParallelModel, reference: Reference, x: Any, y: Any, times: int = 1) -> None:
    """Check loss and gradients of ``times`` accumulated calls, then one optimizer step on both sides."""
    for _ in range(times):
        loss = reference.forward_backward(x, y, pm.plan.microbatches)
        assert pm.forward_backward(x, y).loss == pytest.approx(loss, abs=1e-5)
        assert_all_close(pm.gradients(), reference.gradients(), "gradient")
    norm = nn.utils.get_total_norm(reference.gradients().values()).item()
    assert pm.optimizer_step().grad_norm == pytest.approx(norm, rel=1e-4)
    reference.step()
    assert pm.gradients() == {}


def state_agrees(pm: autopar.ParallelModel, reference: Reference, model: nn.Module) -> None:
    """Check weights and buffers, and that the state dict loads into the unmodified model."""
    state = pm.state_dict()
    assert_all_close(state, reference.model.state_dict(), "state")
    fresh = copy.deepcopy(model)
    fresh.load_state_dict(state, strict=True)
    assert_all_close(dict(fresh.state_dict()), state, "loaded")


def three_steps(
    model: nn.Module,
    x: Any,
    y: Any,
    microbatches: int,
    firsts: list[str],
    loss_fn: Any = F.cross_entropy,
    optimizer: Any = ADAMW,
    **plan: Any,
) -> None:
    """Check outputs, three training steps and the state of a plan by hand, on real processes."""
    three_steps_of(plan_by_hand(model, x, microbatches, firsts, **plan), model, x, y, loss_fn, optimizer)


def three_steps_of(
    made: autopar.Plan, model: nn.Module, x: Any, y: Any, loss_fn: Any = F.cross_entropy, optimizer: Any = ADAMW
) -> None:
    """As `three_steps`, but for a given plan."""
    before = {n: t.clone() for n, t in model.state_dict().items()}
    reference = Reference(model, loss_fn, optimizer)
    with autopar.parallelize(model, made.mesh.devices, x, loss_fn=loss_fn, optimizer=optimizer, plan=made) as pm:
        outputs_agree(pm, reference, x)
        for _ in range(3):
            step_agrees(pm, reference, x, y)
        outputs_agree(pm, reference, x)
        state_agrees(pm, reference, model)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def updated_alike(pm: Any, reference: Reference, x: Any, y: Any) -> None:
    """Check loss and gradient norm of one training step."""
    loss = reference.forward_backward(x, y, pm.plan.microbatches, pm.plan.mesh.dp)
    norm = nn.utils.get_total_norm(reference.gradients().values()).item()
    reference.step()
    result = pm.train_step(x, y)
    assert (result.loss, result.grad_norm) == (pytest.approx(loss, abs=1e-5), pytest.approx(norm, rel=1e-4))

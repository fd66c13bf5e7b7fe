"""Gradients that travel between replicas in bfloat16: rounded once on their way, summed once, and half the bytes."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.effort import only
from support.handmade import in_threads, plan_by_hand, ranks_of
from support.models import tiny_vit
from support.parity import images_and_labels
from support.reference import Reference, assert_all_close
from torch import nn

import autopar
from autopar.ir.grad_buckets import NUM_GRAD_SLOTS
from autopar.ir.plan_parts import Precision, ReduceDtype, ZeroStage
from autopar.runtime.params import flat_buckets

SGD = functools.partial(torch.optim.SGD, lr=1.0)
UNIT = 2.0**-8  # distance of neighbouring bfloat16 numbers, relative; a rounding is off by half of it at most


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """More buckets than buffers for them."""
    monkeypatch.setattr(flat_buckets.group_weights, "__defaults__", (2**14,))
    monkeypatch.setattr("autopar.ir.grad_buckets.MAX_BUCKET_BYTES", 2**14)


def assert_rounded(moved: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], what: str) -> None:
    """Check that gradients are off by some roundings, and not by a replica's part that is missing or counts twice.

    Each replica's part is rounded to bfloat16 (by `UNIT` / 2 at most) and so is each partial sum. Parts of few
    replicas are not much larger than their sum: the six roundings of 3 `UNIT` leave room for that.
    """
    assert moved.keys() == exact.keys()
    for name, tensor in exact.items():
        off, norm = (moved[name] - tensor).norm().item(), tensor.norm().item()
        assert off <= 3 * UNIT * norm + 1e-6, f"{what} {name}: {off} of {norm}"


def update(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of a step of `SGD`."""
    return {name: before[name] - tensor for name, tensor in after.items()}


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(
    ("dp", "zero", "padding"),
    only(
        [(2, 0, "padded"), (3, 1, "unpadded"), (3, 2, "padded"), (2, 2, "unpadded")],
        itertools.product((2, 3), (0, 1, 2), ("padded", "unpadded")),
    ),
)
def test_a_step_rounds_and_nothing_else(
    dp: int, zero: ZeroStage, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if padding == "unpadded":
        monkeypatch.setattr(flat_buckets.FlatBucket, "even", False)
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(2), images_and_labels(4 * dp)
    microbatches = 1 if zero == 2 else 2
    plan = plan_by_hand(model, x, microbatches, [], dp=dp, zero=zero, reduce_dtype="bfloat16")
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=SGD)
    reference = Reference(model, F.cross_entropy, SGD)
    for calls in (1, 3):  # also accumulated ones
        reference.model.load_state_dict(pm.state_dict())
        before = pm.state_dict()
        for number in range(calls):
            x, y = images_and_labels(4 * dp)
            reference.forward_backward(x, y, microbatches, dp)
            result = pm.train_step(x, y) if number == calls - 1 else pm.forward_backward(x, y)
        exact = reference.gradients()
        norm = nn.utils.get_total_norm(exact.values()).item()
        assert result.grad_norm == pytest.approx(norm, rel=2 * UNIT)
        assert_rounded(update(before, pm.state_dict()), exact, f"{calls} calls")
        reference.optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_every_stage_rounds_alike(reduce_dtype: ReduceDtype, precision: Precision) -> None:
    """With two replicas to the last bit: each replica's gradients, then the sum of both, and in float32 neither."""
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(2), images_and_labels(8)
    states = []
    for zero in (0, 1, 2):
        plan = plan_by_hand(model, x, 1, [], dp=2, zero=zero, precision=precision, reduce_dtype=reduce_dtype)
        pm = in_threads(model, plan, x, F.cross_entropy, optimizer=SGD)
        pm.train_step(x, y)
        states.append(pm.state_dict())
        if zero == 0:
            pm.load_state_dict(model.state_dict())
            pm.forward_backward(x, y)
            dtype = getattr(torch, reduce_dtype)
            own = [
                {n: p.grad.clone() for n, p in rank.trainable.items() if p.grad is not None} for rank in ranks_of(pm)
            ]
    for name, tensor in model.state_dict().items():
        rounded = (own[0][name].to(dtype) + own[1][name].to(dtype)).float()
        for state in states:
            assert torch.equal(state[name], tensor - rounded), name


class Exact(nn.Module):
    """A layer whose gradients, of inputs and targets that are small whole numbers, bfloat16 represents."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x) for layer in self.layers)  # type: ignore[return-value]


def linear_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).sum() / len(output)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_representable_gradients_are_exact(zero: ZeroStage) -> None:
    torch.manual_seed(0)
    model, x, y = Exact(), torch.randint(-4, 5, (8, 4)).float(), torch.randint(-4, 5, (8, 4)).float()
    plan = plan_by_hand(model, x, 1, [], dp=4, zero=zero, reduce_dtype="bfloat16")
    pm = in_threads(model, plan, x, linear_loss, optimizer=SGD)
    reference = Reference(model, linear_loss, SGD)
    for _ in range(2):
        reference.forward_backward(x, y, 1, 4)
        reference.step()
        pm.train_step(x, y)
        state = pm.state_dict()
        assert all(torch.equal(state[name], t) for name, t in reference.model.state_dict().items())


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_travel_in_half_the_bytes_and_in_a_few_buffers(
    zero: ZeroStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(2), images_and_labels(8)
    plan = plan_by_hand(model, x, 1, [], dp=2, zero=zero, reduce_dtype="bfloat16")
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=SGD)
    rank, calls = ranks_of(pm)[0], Counter[torch.dtype]()
    name = "start_reduce_scatter" if zero else "start_sum"
    start = getattr(rank.transport, name)
    places = set()

    def note(tensor: torch.Tensor, *args: Any) -> Any:
        calls[tensor.dtype] += tensor.numel()
        places.update([tensor.untyped_storage().data_ptr()] if tensor.dtype == torch.bfloat16 else [])
        return start(tensor, *args)

    monkeypatch.setattr(rank.transport, name, note)
    for _ in range(2):
        pm.train_step(x, y)
    buckets = rank.updater.grad_buffer.buckets
    assert len(buckets) > NUM_GRAD_SLOTS
    assert calls[torch.bfloat16] == 2 * sum(b.numel for b in buckets) and not calls[torch.float32]
    assert len(places) == NUM_GRAD_SLOTS
    assert rank.updater.reduce_buffers is not None
    assert rank.updater.reduce_buffers.num_bytes == NUM_GRAD_SLOTS * 2 * max(b.numel for b in buckets)


@pytest.mark.parametrize(("zero", "dp"), only([(1, 2)], [(0, 2), (1, 2), (2, 2), (0, 4), (2, 4)]))
def test_processes_round_and_nothing_else(zero: ZeroStage, dp: int) -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(2), images_and_labels(4 * dp)
    reference = Reference(model, F.cross_entropy, SGD)
    with autopar.parallelize(
        model, dp, x, loss_fn=F.cross_entropy, optimizer=SGD, dp=dp, zero=zero, microbatches=1, reduce_dtype="bfloat16"
    ) as pm:
        assert "gradients reduced in bfloat16" in str(pm.plan) and "bfloat16" in pm.plan.decision
        for _ in range(2):
            before = pm.state_dict()
            reference.model.load_state_dict(before)
            reference.forward_backward(x, y, 1, dp)
            pm.train_step(x, y)
            assert_rounded(update(before, pm.state_dict()), reference.gradients(), f"{dp} processes")
            reference.optimizer.zero_grad()
        for own, predicted in zip(pm.measure_memory(x, y).values(), pm.plan.prediction.peak_bytes, strict=True):
            assert 0.9 * predicted < own < 1.02 * predicted


def test_without_replicas_nothing_is_rounded() -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(2), images_and_labels(4)
    plan = plan_by_hand(model, x, 2, ["blocks.1.norm1.layer_norm"], reduce_dtype="bfloat16")
    assert "bfloat16" not in plan.decision
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=SGD)
    reference = Reference(model, F.cross_entropy, SGD)
    reference.forward_backward(x, y, 2)
    reference.step()
    pm.train_step(x, y)
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")

"""ZeRO-2: gradients live in a bucket until its reduce-scatter, then on the owner of each weight only."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.effort import only
from support.handmade import in_threads, plan_by_hand, ranks_of
from support.hardware import slow_compute
from support.models import TwoHeads, loss_of_some, main_loss, tiny_vit
from support.parity import images_and_labels
from support.reference import Reference, assert_all_close
from torch import nn

import autopar
from autopar.ir.grad_buckets import NUM_GRAD_SLOTS
from autopar.ir.plan_parts import Precision, ZeroStage
from autopar.runtime.params import flat_buckets
from autopar.runtime.params.sharded_grads import ShardedGrads
from autopar.runtime.rank import Rank

# A larger eps than the default: parameters whose true gradient is zero would amplify the order of sums.
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of few weights, so that every slot is used several times in a backward."""
    monkeypatch.setattr(flat_buckets.group_weights, "__defaults__", (2**8,))
    monkeypatch.setattr("autopar.ir.grad_buckets.MAX_BUCKET_BYTES", 2**8)


def sharded_grads(rank: Rank) -> ShardedGrads:
    grads = rank.updater.grad_buffer
    assert isinstance(grads, ShardedGrads)
    return grads


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-params"])
@pytest.mark.parametrize("firsts", [[], ["middle.linear"]], ids=["pp=1", "pp=2"])
@pytest.mark.parametrize("loss_fn", [main_loss, loss_of_some])
def test_the_stage_changes_no_number(loss_fn: Any, firsts: list[str], precision: Precision) -> None:
    """Two replicas add in equal order at every stage. Some steps lack gradients on one of them, or on both."""
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(8, 8)
    make = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5)
    states = []
    for zero in (1, 2):
        plan = plan_by_hand(model, x, 1, firsts, dp=2, zero=zero, precision=precision)
        pm = in_threads(model, plan, x, loss_fn, optimizer=make, clip_grad_norm=0.5)
        for y in ([1] * 8, [1, 1, 1, 1, 0, 1, 1, 1], [0] + [1] * 7, [0] * 8, [2] * 8):
            pm.train_step(x, torch.tensor(y))
        states.append(pm.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    changed = {name for name, t in states[1].items() if not torch.equal(t, model.state_dict()[name])}
    some = {"side.weight", "side.bias", "other.weight", "other.bias"}
    assert changed == set(model.state_dict()) - (some if loss_fn is main_loss else set())


class Branches(nn.Module):
    """Four stages' worth of layers, and a head on the third that the loss may ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(8, 8), nn.Tanh())))
            for count in (1, 3, 2, 1)
        )
        self.other = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.c(self.b(self.a(x)))
        return {"other": self.other(x), "main": self.d(x)}


@pytest.mark.usefixtures("small_buckets")
def test_replicas_with_other_gradients_do_not_wait_for_each_other() -> None:
    """With several stages a rank, a replica that lacks gradients starts its buckets after the same backward.

    The first replica reuses the slot of ``other`` within its third stage. The second one reaches its end only after its
    second stage, for whose slots it waits for the first replica.
    """
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(8, 8)
    firsts = ["b.0.linear", "c.0.linear", "d.0.linear"]
    plan = plan_by_hand(model, x, 1, firsts, "interleaved", dp=2, zero=2, chunks=2)
    pm = in_threads(model, plan, x, loss_of_some, optimizer=ADAMW)
    assert {len(sharded_grads(rank).buckets) for rank in ranks_of(pm)} == {4}
    reference = Reference(model, loss_of_some, ADAMW)
    for y in ([1] * 8, [0] + [1] * 7, [1, 1, 1, 1, 0, 1, 1, 1], [0] * 8):
        loss = reference.forward_backward(x, torch.tensor(y), 1, 2)
        reference.step()
        assert pm.train_step(x, torch.tensor(y)).loss == pytest.approx(loss, abs=1e-5)
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("dp", [2, 3])
def test_calls_accumulate_on_the_owners(dp: int) -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(2), images_and_labels(4 * dp)
    pm = in_threads(model, plan_by_hand(model, x, 1, [], dp=dp, zero=2), x, F.cross_entropy, optimizer=ADAMW)
    reference = Reference(model, F.cross_entropy, ADAMW)
    for _ in range(2):
        for batch in (4, 2, 3):
            x, y = images_and_labels(batch * dp)
            loss = reference.forward_backward(x, y, 1, dp)
            assert pm.forward_backward(x, y).loss == pytest.approx(loss, abs=1e-5)
            assert_all_close(pm.gradients(), reference.gradients(), "gradient")
        for name in dict(model.named_parameters()):
            holders = [
                r.place.replica
                for r in ranks_of(pm)
                if name in r.updater.updated and r.updater.updated[name].grad is not None
            ]
            assert holders == [ranks_of(pm)[0].spec.owners[name]]
        norm = nn.utils.get_total_norm(reference.gradients().values()).item()
        assert pm.optimizer_step().grad_norm == pytest.approx(norm, rel=1e-5)
        reference.step()
    pm.forward_backward(x, y)
    pm.zero_grad()
    assert pm.gradients() == {}
    reference.forward_backward(x, y, 1, dp)
    reference.step()
    pm.train_step(x, y)  # without those that were dropped
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")


@pytest.mark.usefixtures("small_buckets")
def test_memory_is_that_of_owned_gradients_and_of_a_few_buckets() -> None:
    """On a replica of four; the rest is as under ZeRO-1. Nothing grows."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    layer, standing, in_all = 64 * 64 * 4, [], []
    for zero in (1, 2):
        plan = plan_by_hand(model, x, 1, [], dp=4, zero=zero)
        pm = in_threads(model, plan, x, F.mse_loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
        grads = ranks_of(pm)[0].updater.grad_buffer
        largest = max(bucket.num_bytes for bucket in grads.buckets)
        assert 4 * layer <= largest <= 8 * layer
        for _ in range(3):
            pm.train_step(x, y)
            standing.append(grads.num_bytes)
        in_all.append(ranks_of(pm)[0].standing_bytes())
    assert standing[:3] == [16 * layer] * 3
    assert standing[3:] == [16 * layer // 4 + NUM_GRAD_SLOTS * largest] * 3
    assert in_all[0] - in_all[1] == standing[0] - standing[3]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
def test_the_measured_peak_falls_as_predicted(precision: Precision) -> None:
    """Gradients of 120 MiB in buckets of 28, on four processes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for _ in range(120) for layer in (nn.Linear(512, 512), nn.ReLU())), nn.Linear(512, 10)
    )
    x, y = torch.randn(8, 512), torch.randint(0, 10, (8,))
    measured, predicted = [], []
    for zero in (1, 2):
        with autopar.parallelize(
            model, 4, x, optimizer=ADAMW, dp=4, zero=zero, microbatches=1, precision=precision
        ) as pm:
            pm.train_step(x, y)
            peaks, planned = pm.measure_memory(x, y), pm.plan.prediction.peak_bytes
            for own, expected in zip(peaks.values(), planned, strict=True):
                assert 0.98 * expected < own < 1.03 * expected
            measured.append(max(peaks.values()))
            predicted.append(max(planned))
    assert measured[0] - measured[1] == pytest.approx(predicted[0] - predicted[1], rel=0.1)
    assert predicted[0] - predicted[1] > 30 * 2**20


@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    only([({"dp": 2, "tp": 2}, 1)], [({"dp": 2, "tp": 2}, 1), ({"dp": 2, "pp": 2}, 1)]),
)
def test_processes_go_on_under_another_mesh_and_stage(mesh: dict[str, int], microbatches: int, tmp_path: Path) -> None:
    """A checkpoint of ZeRO-2 is one of ZeRO-1 and of no ZeRO, and theirs is one of ZeRO-2."""
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(2), images_and_labels(8)
    reference = Reference(model, F.cross_entropy, ADAMW)
    options: dict[str, Any] = {
        "loss_fn": F.cross_entropy, "optimizer": ADAMW, "hardware": str(slow_compute(tmp_path)), "clip_grad_norm": 1.0
    }  # fmt: skip
    runs: list[tuple[int, dict[str, int], ZeroStage, int]] = [(4, mesh, 2, 1), (2, {"dp": 2}, 1, 2), (1, {}, 0, 4),
                                                              (4, mesh, 2, 1)]  # fmt: skip
    folder = None
    for number, (devices, sizes, zero, cut) in enumerate(runs):
        staged = {"zero": zero} if devices > 1 else {}
        with autopar.parallelize(model, devices, x, microbatches=cut, **sizes, **staged, **options) as pm:
            assert (pm.plan.zero, pm.plan.microbatches) == (zero, cut)
            if folder is not None:
                pm.load_checkpoint(folder)
            for _ in range(2):
                reference.forward_backward(x, y, 1)
                norm = nn.utils.clip_grad_norm_(reference.model.parameters(), 1.0).item()
                reference.step()
                assert pm.train_step(x, y).grad_norm == pytest.approx(norm, rel=1e-4)
            assert_all_close(pm.state_dict(), reference.model.state_dict(), f"state of run {number}")
            folder = tmp_path / str(number)
            pm.save_checkpoint(folder)


def test_gradients_set_by_hand_are_reduced() -> None:
    torch.manual_seed(0)
    model, (x, _) = tiny_vit(1), images_and_labels(4)
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    pm = in_threads(model, plan_by_hand(model, x, 1, [], dp=2, zero=2), x, F.cross_entropy, optimizer=sgd)
    for rank in ranks_of(pm):
        rank.trainable["head.bias"].grad = torch.full_like(rank.trainable["head.bias"], 1.0 + rank.place.replica)
    pm._dispatcher.has_gradients = True
    pm.optimizer_step()
    state = pm.state_dict()
    assert torch.equal(state["head.bias"], model.state_dict()["head.bias"] - 3)
    assert torch.equal(state["head.weight"], model.state_dict()["head.weight"])


def test_a_plan_of_several_microbatches_is_refused() -> None:
    model, (x, _) = tiny_vit(1), images_and_labels(8)
    plan = plan_by_hand(model, x, 2, [], dp=2, zero=2)
    with pytest.raises(
        autopar.PlanError, match="field zero: is 2, which is for one microbatch a step; microbatches is 2"
    ):
        autopar.parallelize(model, 2, x, plan=plan)
    for asked, message in (
        ({"microbatches": 2}, "zero=2 with microbatches=2: ZeRO-2 reduces gradients after every backward"),
        ({"microbatch_size": 2}, "a replica has 2 microbatches, and ZeRO-2 is for one"),
    ):
        with pytest.raises((autopar.UsageError, autopar.InfeasibleError), match=message):
            autopar.plan(model, 2, x, dp=2, zero=2, **asked)  # type: ignore[arg-type]

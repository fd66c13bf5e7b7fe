"""ZeRO-3: parameters live in pieces on the replicas, and are gathered before each use."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from support.handmade import even_firsts, in_threads, plan_by_hand
from support.models import tiny_vit
from support.parity import images_and_labels
from support.reference import Reference, assert_all_close
from torch import nn

from autopar.ir import grad_buckets

# A larger eps than the default: parameters whose true gradient is zero would amplify the order of sums.
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of one block each, so that slots are used several times in a pass."""
    monkeypatch.setattr(grad_buckets.block_groups, "__defaults__", (2**8,))


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("dp", [2, 3])
def test_steps_equal_those_of_one_device(dp: int, pp: int, microbatches: int) -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(5), images_and_labels(6 * dp)
    plan = plan_by_hand(model, x, microbatches, even_firsts(model, x, pp), dp=dp, zero=3)
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW, clip_grad_norm=0.5)
    reference = Reference(model, F.cross_entropy, ADAMW)
    for _ in range(3):
        loss = reference.forward_backward(x, y, microbatches, dp)
        nn.utils.clip_grad_norm_(reference.model.parameters(), 0.5)
        reference.step()
        assert pm.train_step(x, y).loss == pytest.approx(loss, abs=1e-5)
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")
    pm.eval()
    reference.model.eval()
    assert_all_close({"out": pm(x[: dp + 1])}, {"out": reference.model(x[: dp + 1])}, "output")

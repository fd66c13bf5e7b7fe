"""Several chunks on each of several GPUs, over NCCL, against one device. Skips itself where there are fewer."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import effort
from support.handmade import even_firsts, plan_by_hand
from support.models import Tied, UNet, tiny_vit
from support.reference import Reference, assert_all_close
from torch import nn

import autopar
from autopar.errors import CaptureWarning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
SCHEDULES = ["interleaved", "interleaved-overlap"]
CASES = [
    (tiny_vit, (5, 3, 32, 32), (5,), F.cross_entropy),
    (UNet, (5, 3, 8, 8), (5, 1, 8, 8), F.mse_loss),
    (Tied, (5, 5), (5,), F.cross_entropy),
]


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("pp", "chunks"), [(2, 2), (2, 3), pytest.param(4, 2, marks=FOUR)])
@pytest.mark.parametrize("schedule", effort.only(SCHEDULES[:1], SCHEDULES))
@pytest.mark.parametrize(("model", "x", "y", "loss_fn"), effort.only(CASES[:1], CASES))
def test_equals_one_device(
    model: Any,
    x: tuple[int, ...],
    y: tuple[int, ...],
    loss_fn: Any,
    schedule: str,
    pp: int,
    chunks: int,
    captured: bool,
) -> None:
    """Two ranks run five microbatches in another order under each schedule; four do so in the test below."""
    torch.manual_seed(0)
    built: nn.Module = model()
    example = torch.randint(0, 32, x) if len(x) == 2 else torch.randn(x)
    stages = pp * chunks
    plan = plan_by_hand(built, example, 5, even_firsts(built, example, stages), schedule, chunks=chunks)
    reference = Reference(built, loss_fn, ADAMW)
    options: dict[str, Any] = {"cuda_graph": captured, "compile": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        with autopar.parallelize(built, pp, example, loss_fn=loss_fn, optimizer=ADAMW, plan=plan, **options) as pm:
            for batch in (1, 3, 4, 5) * (4 if captured else 1):  # that many microbatches
                inputs = torch.randint(0, 32, (batch, *x[1:])) if len(x) == 2 else torch.randn(batch, *x[1:])
                target = torch.rand(batch, *y[1:]) if len(y) > 1 else torch.randint(0, 10, (batch,))
                expected = reference.forward_backward(inputs, target, 5)
                reference.step()
                assert pm.train_step(inputs, target).loss == pytest.approx(expected, abs=1e-4)
            state = {name: tensor.cpu() for name, tensor in pm.state_dict().items()}
    assert_all_close(state, reference.model.state_dict(), "state")


@FOUR
@pytest.mark.parametrize("schedule", effort.only(SCHEDULES[1:], SCHEDULES))
@pytest.mark.parametrize("microbatches", effort.only([13], [3, 8, 13]))
def test_a_long_pipeline_does_not_halt(microbatches: int, schedule: str) -> None:
    """Sends of four chunks a rank are under way at once, each on a communicator of its own."""
    model = tiny_vit(depth=16, embed_dim=192)
    x, y = torch.randn(26, 3, 32, 32), torch.randint(0, 10, (26,))
    options = {"pp": 4, "schedule": schedule, "chunks": 4, "microbatches": microbatches, "timeout": 60.0}
    with autopar.parallelize(model, 4, x, optimizer=ADAMW, **options) as pm:
        losses = [pm.train_step(x, y).loss for _ in range(10)]
    assert losses[-1] < losses[0]

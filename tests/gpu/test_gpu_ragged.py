"""Parts of unequal size on two GPUs, over NCCL and symmetric memory, compiled and captured, against one GPU."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import effort
from support.ragged import PLANS, ragged_plan, vit

import autopar
from autopar.errors import CaptureWarning
from autopar.tools.parity.compare import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize("transport", ["nccl", "symmetric"])
@pytest.mark.parametrize("precision", effort.only(["bf16"], ["fp32", "bf16", "bf16-params"]))
@pytest.mark.parametrize("name", effort.only(["heads and tokens"], ["tokens", "heads", "heads and tokens"]))
def test_equals_one_gpu(name: str, precision: str, transport: str) -> None:
    model, x = vit().train(), torch.randn(4, 3, 16, 16)
    plan = ragged_plan(model, x, name, precision)
    parity = compare(model, x, devices=2, steps=2, plan=plan, transport=transport, timeout=120.0)
    assert parity.ok, [(row.quantity, row.worst, row.max_absolute) for row in parity.rows if not row.ok]


@pytest.mark.parametrize("transport", ["nccl", "symmetric"])
@pytest.mark.parametrize("name", effort.only(["heads and tokens"], PLANS))
def test_compiled_and_captured_steps_equal_plain_ones(name: str, transport: str) -> None:
    """One of the plans has dropout, for which each rank draws the numbers of its own part."""
    rate = 0.2 if "dropout" in name else 0.0
    x, y = torch.randn(4, 3, 16, 16), torch.randint(0, 6, (4,))
    plan, losses = ragged_plan(vit(rate), x, name, "fp32"), []
    options: list[dict[str, Any]] = [
        {"devices": 1, "microbatches": 2, "compile": False, "cuda_graph": False},
        {"devices": 2, "plan": plan, "transport": transport, "compile": False, "cuda_graph": False},
        {"devices": 2, "plan": plan, "transport": transport, "compile": True, "cuda_graph": True},
    ]
    for given in options:
        devices = given.pop("devices")
        with warnings.catch_warnings():
            warnings.simplefilter("error", CaptureWarning)
            with autopar.parallelize(
                vit(rate), devices, x, loss_fn=F.cross_entropy, optimizer=ADAMW, seed=3, **given
            ) as pm:
                losses.append([pm.train_step(x, y).loss for _ in range(8)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert losses[2] == pytest.approx(losses[0], abs=1e-3)

"""Tensor-parallel GPUs that read each other's buffers: nobody waits inside of a step, buffers grow between steps. Skips
itself where there are fewer than two GPUs."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from support import effort
from support.models import UNet, resnet18, tiny_vit

import autopar
from autopar.errors import CaptureWarning
from autopar.tools.parity.compare import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
TIMEOUT_SECONDS = 120.0  # a rank that waits in vain ends the test


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize("precision", effort.only(["bf16"], ["fp32", "bf16"]))
@pytest.mark.parametrize("model", [tiny_vit, resnet18, UNet])
def test_first_steps_equal_one_gpu(model: Any, precision: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 3, 8, 8) if model is UNet else torch.randn(16, 3, 32, 32)
    # Behind batch norm over few samples of one pixel other roundings grow with each step.
    parity = compare(
        model(), x, devices=2, tp=2, microbatches=2, steps=1, precision=precision, compile=False,
        transport="symmetric", timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert parity.ok, [row for row in parity.rows if not row.ok]


def trained(sizes: list[int], graphs: bool, **constraints: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of steps at these batch sizes, each followed by an evaluation of a batch three times as large."""
    torch.manual_seed(0)
    model = tiny_vit(2)
    batches = {n: (torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,))) for n in sorted({*sizes})}
    losses, outputs = [], []
    with autopar.parallelize(
        model, 2, batches[sizes[0]][0], tp=2, microbatches=1, optimizer=ADAMW, compile=False, cuda_graph=graphs,
        timeout=TIMEOUT_SECONDS, **constraints,
    ) as pm:  # fmt: skip
        outputs.append(pm.eval()(batches[sizes[0]][0]).cpu())
        for n in sizes:
            losses.append(pm.train().train_step(*batches[n]).loss)
            outputs.append(pm.eval()(batches[n][0].repeat(3, 1, 1, 1)).cpu())
    return losses, outputs


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "captured"])
def test_buffers_that_were_outgrown_serve_captured_steps(graphs: bool) -> None:
    sizes = [4] * 5 + [16] * 5 + [4, 16] * 3 + [64] * 5 + [4, 16, 64] * 2
    over_nccl = trained(sizes, False, transport="nccl")
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        over_buffers = trained(sizes, graphs, transport="symmetric")
    assert over_buffers[0] == pytest.approx(over_nccl[0], abs=1e-3)
    for here, there in zip(over_buffers[1], over_nccl[1], strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=1e-2)

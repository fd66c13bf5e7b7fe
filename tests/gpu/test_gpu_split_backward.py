"""Split backwards on GPUs: compiled and captured, bit equal to whole ones. Skips itself with fewer than two."""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import effort
from support.handmade import even_firsts, in_a_v, plan_by_hand
from support.models import resnet18, tiny_vit
from support.schedules import uniform_order
from torch import nn

import autopar
from autopar.errors import CaptureWarning
from autopar.ir.plan import Plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
# Not ResNet compiled: sums of a compiled bias's gradient may be in another order.
CASES = [(tiny_vit, True, "bf16-params", 1), (tiny_vit, True, "bf16-params", 2), (resnet18, False, "fp32", 1)]
CASES += effort.only([], [(tiny_vit, *how, chunks) for how in ((True, "bf16"), (False, "fp32")) for chunks in (1, 2)])


def trained(model: nn.Module, plan: Plan, x: torch.Tensor, y: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """State after five steps, of which the last ones are replayed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        with autopar.parallelize(copy.deepcopy(model), 2, x, optimizer=ADAMW, plan=plan, **options) as pm:
            losses = [pm.train_step(x, y).loss for _ in range(5)]
            state = {name: tensor.cpu() for name, tensor in pm.state_dict().items()}
    return state | {"losses": torch.tensor(losses)}


@pytest.mark.parametrize("transport", effort.only(["auto"], ["auto", "nccl"]))
@pytest.mark.parametrize(("make", "compiled", "precision", "chunks"), CASES)
def test_bit_equal(
    make: Any, compiled: bool, precision: Any, chunks: int, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without it the compiler times configurations of a kernel's sums, and two compilations may choose other ones.
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "1")
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    model, x, y = make(), torch.randn(12, 3, 32, 32), torch.randint(0, 10, (12,))
    whole = plan_by_hand(
        model, x, 6, even_firsts(model, x, 2 * chunks), "interleaved" if chunks > 1 else "1f1b",
        chunks=chunks, precision=precision,
    )  # fmt: skip
    kept = (3 * chunks,) * 2
    plans = [replace(whole, schedule="searched", order=uniform_order(2, chunks, kept))]
    plans += [replace(whole, schedule="zb-h1")] if chunks == 1 else [in_a_v(whole)]
    options = {"compile": compiled, "transport": transport}
    expected = trained(model, whole, x, y, **options)
    for plan in plans:
        found = trained(model, plan, x, y, **options)
        assert not [name for name in expected if not torch.equal(expected[name], found[name])], plan.schedule


@pytest.mark.parametrize("kept", effort.only(["none"], ["none", "all"]))
@pytest.mark.parametrize("microbatches", [1, 3])
def test_zero3_over_nccl(microbatches: int, kept: str) -> None:
    """Gathers and reductions of sharded parameters by NCCL instead of peers' copy engines."""
    torch.manual_seed(0)
    model, x, y = tiny_vit(), torch.randn(12, 3, 32, 32), torch.randint(0, 10, (12,))
    blocks = [f"blocks.{i}" for i in range(4)] if kept == "all" else []
    states = []
    for zero in (0, 3):
        plan = plan_by_hand(model, x, microbatches, [], dp=2, zero=zero, kept=blocks if zero else ())
        states.append(trained(model, plan, x, y, compile=True, transport="nccl"))
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-4, atol=1e-5)

"""Replicas on GPUs over NCCL: in-place collectives, and kernels counted. Skips itself without GPUs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import effort
from support.handmade import plan_by_hand
from support.models import resnet18, tiny_vit
from torch import nn
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar.ir.graph import Weight
from autopar.ir.plan_parts import ZeroStage
from autopar.runtime.params.flat_buckets import flat_buckets
from autopar.runtime.params.grad_buffer import GradBuffer
from autopar.tools.parity.compare import compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)


def need(devices: int) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices")


def large_and_small() -> nn.Module:
    """A weight that no other balances: its bucket is summed owner by owner."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 1536), nn.GELU(), nn.Linear(1536, 10))


@pytest.mark.parametrize("precision", effort.only(["bf16"], ["fp32", "bf16", "fp16"]))
@pytest.mark.parametrize(("pp", "dp"), effort.only([(1, 2)], [(1, 2), (1, 4), (2, 2)]))
@pytest.mark.parametrize("model", [tiny_vit, resnet18, large_and_small])
@pytest.mark.parametrize("zero", effort.only([2], [1, 2, 3]))
def test_equals_one_gpu(
    zero: ZeroStage, model: Any, pp: int, dp: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(pp * dp)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(0)
    x = torch.randn(16, 3, 32, 32)
    # What is rounded otherwise grows without bounds in batch norm over few samples of one pixel, and with each step.
    steady: dict[str, Any] = {"steps": 1, "compile": False} if model is resnet18 else {"steps": 3}
    parity = compare(
        model(), x, devices=pp * dp, microbatches=1 if zero == 2 else 2, precision=precision, pp=pp, dp=dp, tp=1,
        zero=zero, **steady,
    )  # fmt: skip
    assert parity.ok, [row for row in parity.rows if not row.ok]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_that_travel_in_bfloat16(zero: ZeroStage, monkeypatch: pytest.MonkeyPatch) -> None:
    need(2)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    x = torch.randn(16, 3, 32, 32)
    parity = compare(tiny_vit(), x, devices=2, dp=2, microbatches=1, zero=zero, reduce_dtype="bfloat16", steps=3)
    assert parity.ok, [row for row in parity.rows if not row.ok]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_checkpoints_have_all_masters(zero: ZeroStage, tmp_path: Path) -> None:
    need(2)
    torch.manual_seed(0)
    model, x, y = tiny_vit(2), torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    plan = plan_by_hand(model, x, 1 if zero == 2 else 2, [], dp=2, zero=zero, precision="bf16")
    with autopar.parallelize(model, 2, x, loss_fn=F.cross_entropy, optimizer=ADAMW, plan=plan) as pm:
        for _ in range(3):
            pm.train_step(x, y)
        pm.save_checkpoint(tmp_path)
        state = pm.state_dict()
        on = pm.train_step(x, y)
        pm.load_checkpoint(tmp_path)
        again = pm.train_step(x, y)
        assert again.loss == pytest.approx(on.loss, abs=1e-5)
    whole = plan_by_hand(model, x, 2, [], precision="bf16")
    with autopar.parallelize(model, 1, x, loss_fn=F.cross_entropy, optimizer=ADAMW, plan=whole) as alone:
        alone.load_checkpoint(tmp_path)
        assert all(torch.equal(t, state[name]) for name, t in alone.state_dict().items())
        assert alone.train_step(x, y).loss == pytest.approx(on.loss, abs=1e-3)


def test_gradients_move_in_a_few_kernels() -> None:
    """Of 40 parameters one kernel for the first microbatch, two for each later one."""
    weights = [Weight(f"w{i}", "parameter", (64, 32), "bfloat16", True, (f"w{i}",), "float32") for i in range(40)]
    parameters = {w.name: nn.Parameter(torch.zeros(w.shape, device="cuda")) for w in weights}
    copies = {name: nn.Parameter(p.detach().bfloat16()) for name, p in parameters.items()}
    gradients = GradBuffer(parameters, flat_buckets(weights, {}, 1))
    for name, copy in copies.items():
        gradients.watch(name, copy)
    for warm in (True, False):
        counts = []
        for _ in range(3):
            for copy in copies.values():
                copy.grad = torch.ones_like(copy)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
                for name, copy in copies.items():
                    gradients.mark_ready(name, copy.grad)
                gradients.flush()
                torch.cuda.synchronize()
            counts.append(sum(str(e.device_type).endswith("CUDA") for e in profiler.events() or ()))
        assert (parameters["w0"].grad is None) and torch.equal(gradients.views["w7"], torch.full((64, 32), 3.0).cuda())
        gradients.clear()
        if not warm:
            assert counts[0] <= 2 and counts[1] <= 4 and counts[2] <= 4, counts


def test_the_optimizer_is_fused() -> None:
    model, x, y = tiny_vit(1), torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
    with autopar.parallelize(model, 1, x, optimizer=ADAMW, precision="bf16", microbatches=1) as pm:
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            pm.train_step(x, y)
        assert any("_fused_adamw_" in event.name for event in profiler.events() or ())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 2048, 100_003])
def test_adding_in_a_kernel_is_adding(dtype: torch.dtype, numel: int) -> None:
    from autopar.ops.kernels.accumulate import add

    torch.manual_seed(0)
    sums, tensor = torch.randn(numel, device="cuda"), torch.randn(numel, device="cuda").to(dtype)
    expected = sums + tensor.float()
    add(sums, tensor)
    assert torch.equal(sums, expected)


def test_a_transposed_gradient_is_added_where_it_belongs() -> None:
    weight = Weight("w", "parameter", (512, 256), "bfloat16", True, ("w",), "float32")
    parameter = nn.Parameter(torch.zeros(512, 256, device="cuda"))
    copy = nn.Parameter(parameter.detach().bfloat16())
    gradients = GradBuffer({"w": parameter}, flat_buckets([weight], {}, 1))
    gradients.watch("w", copy)
    parts = [torch.randn(512, 256, device="cuda").bfloat16(), torch.randn(256, 512, device="cuda").bfloat16().t()]
    for part in (*parts, parts[0]):
        copy.grad = part.clone(memory_format=torch.preserve_format)
        gradients.mark_ready("w", copy.grad)
        gradients.flush()
    assert torch.equal(gradients.views["w"], parts[0].float() + parts[1].float() + parts[0].float())

"""NCCL on two GPUs against one: numbers, and faults that must not hang. Skips itself where there are fewer."""

from __future__ import annotations

import copy
import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import effort
from support.faults import workers
from support.handmade import even_firsts, plan_by_hand
from support.models import Tied, UNet, resnet18, tiny_vit
from support.reference import Reference, assert_all_close, assert_close
from timm import create_model
from torch import nn

import autopar
from autopar import WorkerError
from autopar.ir.plan_parts import ZeroStage
from autopar.tools.parity.compare import compare
from autopar.train import timm_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
# A larger eps than the default: parameters whose true gradient is zero would amplify the order of atomic sums.
# Fused, as ranks would choose it: what other kernels round otherwise flips rectifiers.
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, fused=True)
FAULT_SECONDS = 15.0


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("kind", ["module", "partial"])
def test_weights_of_a_loss_are_copied_to_its_rank(device: str, kind: str) -> None:
    torch.manual_seed(0)
    model, x, y, weight = tiny_vit(), torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)), torch.rand(10)
    expected = F.cross_entropy(model(x), y, weight).item()
    given = weight.to(device)
    loss_fn = nn.CrossEntropyLoss(given) if kind == "module" else functools.partial(F.cross_entropy, weight=given)
    with autopar.parallelize(model, 2, x, loss_fn=loss_fn, pp=2, microbatches=1) as pm:
        assert pm.forward_backward(x, y).loss == pytest.approx(expected, rel=1e-3)
    assert given.device == torch.device(device) and given.cpu().equal(weight)


@pytest.mark.parametrize(
    ("model", "x", "y", "microbatches", "loss_fn"),
    [
        (tiny_vit, (7, 3, 32, 32), (7,), 4, F.cross_entropy),
        (resnet18, (16, 3, 64, 64), (16,), 4, F.cross_entropy),
        (UNet, (8, 3, 8, 8), (8, 1, 8, 8), 5, F.mse_loss),
        (Tied, (8, 5), (8,), 4, F.cross_entropy),
    ],
)
def test_equals_one_gpu(model: Any, x: tuple, y: tuple, microbatches: int, loss_fn: Any) -> None:
    torch.manual_seed(0)
    built: nn.Module = model()
    inputs = torch.randint(0, 32, x) if len(x) == 2 else torch.randn(x)
    targets = torch.rand(y) if len(y) > 1 else torch.randint(0, 10, y)
    plan = plan_by_hand(built, inputs, microbatches, even_firsts(built, inputs, 2))
    reference = Reference(copy.deepcopy(built).cuda(), loss_fn, ADAMW)
    same_kernels = model is resnet18  # behind its batch norms other roundings become large
    with autopar.parallelize(
        built, 2, inputs, loss_fn=loss_fn, optimizer=ADAMW, plan=plan, compile=not same_kernels
    ) as pm:
        assert pm.machine.backend == "nccl"
        for _ in range(3):
            loss = reference.forward_backward(inputs.cuda(), targets.cuda(), microbatches)
            assert pm.forward_backward(inputs, targets).loss == pytest.approx(loss, abs=1e-5)
            assert_all_close(pm.gradients(), on_cpu(reference.gradients()), "gradient")
            reference.step()
            pm.optimizer_step()
        assert_all_close(pm.state_dict(), on_cpu(reference.model.state_dict()), "state")
        pm.eval()
        reference.model.eval()
        assert_close(pm(inputs).cpu(), reference.forward(inputs.cuda(), microbatches)[0].cpu(), "eval output")


@pytest.mark.parametrize(("zero", "microbatches"), [(0, 4), (1, 4), (2, 1)])
def test_two_replicas_equal_one_gpu(zero: ZeroStage, microbatches: int) -> None:
    torch.manual_seed(0)
    model, x, y = tiny_vit(), torch.randn(14, 3, 32, 32), torch.randint(0, 10, (14,))
    plan = plan_by_hand(model, x, microbatches, [], dp=2, zero=zero)
    reference = Reference(copy.deepcopy(model).cuda(), F.cross_entropy, ADAMW)
    with autopar.parallelize(model, 2, x, optimizer=ADAMW, plan=plan) as pm:
        for _ in range(3):
            loss = reference.forward_backward(x.cuda(), y.cuda(), microbatches, 2)
            norm = nn.utils.get_total_norm(reference.gradients().values()).item()
            reference.step()
            result = pm.train_step(x, y)
            assert (result.loss, result.grad_norm) == (pytest.approx(loss, abs=1e-5), pytest.approx(norm, rel=1e-3))
        assert_all_close(pm.state_dict(), on_cpu(reference.model.state_dict()), "state")


def test_check_agrees_on_convolutions() -> None:
    torch.manual_seed(0)
    parity = compare(resnet18(), torch.randn(16, 3, 64, 64), devices=2, steps=2, microbatches=2)
    assert parity.ok, parity.rows


@pytest.mark.parametrize("precision", effort.only(["bf16"], ["bf16", "fp16"]))
@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
@pytest.mark.parametrize("model", [tiny_vit, resnet18])
def test_mixed_precision_equals_autocast(model: Any, mesh: tuple[int, int, int], precision: str) -> None:
    torch.manual_seed(0)
    pp, tp, dp = mesh
    x = torch.randn(16, 3, 32, 32)
    parity = compare(model(), x, devices=2, steps=2, microbatches=2, precision=precision, pp=pp, tp=tp, dp=dp)
    assert parity.ok, parity.rows


def test_killed_rank_ends_the_others() -> None:
    def slow(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(2)
        return F.cross_entropy(output, target)

    x, y = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    pm = autopar.parallelize(tiny_vit(), 2, x, microbatches=4, loss_fn=slow, optimizer=ADAMW, compile=False)
    first = workers()[0]
    threading.Timer(1.0, os.kill, (first, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"Rank 0 .*SIGKILL"):
        pm.train_step(x, y)
    assert time.monotonic() - start < FAULT_SECONDS
    assert not workers()


def test_exception_ends_all_with_its_cause() -> None:
    def broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ValueError("no loss today")

    x, y = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    pm = autopar.parallelize(
        tiny_vit(), 2, x, microbatches=4, schedule="1f1b", loss_fn=broken, optimizer=ADAMW, compile=False
    )
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"Rank 1 .*1F0.*no loss today"):
        pm.train_step(x, y)
    assert time.monotonic() - start < FAULT_SECONDS
    assert not workers()


def test_checkpoints_go_from_mesh_to_mesh(tmp_path: Path) -> None:
    x, y = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    meshes: list[dict[str, Any]] = [{}, {"pp": 2}, {"tp": 2}, {"dp": 2, "zero": 1}]
    losses = []
    for i, mesh in enumerate(meshes):
        devices = 2 if mesh else 1
        with autopar.parallelize(tiny_vit(2), devices, x, optimizer=ADAMW, microbatches=2, **mesh) as pm:
            pm.train_step(x, y)
            if i > 0:
                pm.load_checkpoint(tmp_path)
            before = on_cpu(pm.state_dict())
            pm.save_checkpoint(tmp_path)
            losses.append([pm.train_step(x, y).loss for _ in range(3)])
            pm.load_checkpoint(tmp_path)
            assert all(torch.equal(t, before[n]) for n, t in on_cpu(pm.state_dict()).items())
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


def losses_on(mesh: dict[str, Any], optimizer: Any = ADAMW, steps: int = 5, **options: Any) -> list[float]:
    """Losses of a few steps of a ViT with dropout on a mesh; one device if it is empty."""
    torch.manual_seed(0)
    model = create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10, drop_rate=0.1, drop_path_rate=0.1
    )
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    factory = optimizer(model) if optimizer is not ADAMW else ADAMW
    with autopar.parallelize(model, 2 if mesh else 1, x, optimizer=factory, seed=3, **mesh, **options) as pm:
        return [pm.train_step(x, y).loss for _ in range(steps)]


def test_dropout_is_the_same_on_every_mesh_and_recomputed() -> None:
    alone = losses_on({}, microbatches=2)
    for mesh in ({"pp": 2, "microbatches": 4}, {"tp": 2, "microbatches": 1}, {"dp": 2, "microbatches": 2}):
        for recompute in ("none", "all"):
            assert losses_on(mesh, recompute=recompute) == pytest.approx(alone, rel=1e-5), (mesh, recompute)
    assert alone[0] != pytest.approx(losses_on({}, microbatches=2, precision="bf16")[0], rel=1e-6)


def test_lamb_updates_whole_parameters() -> None:
    lamb = functools.partial(timm_optimizer, opt="lamb", lr=1e-2, weight_decay=0.02)
    alone = losses_on({}, lamb, microbatches=2)
    for mesh in ({"tp": 2}, {"dp": 2, "zero": 1}):
        assert losses_on(mesh, lamb, microbatches=2) == pytest.approx(alone, rel=1e-4), mesh

"""Training steps as CUDA graphs and under torch.compile against plain ones. Skips itself where there is no GPU."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import effort
from support.handmade import with_levels
from support.models import resnet18, tiny_vit
from timm.scheduler import CosineLRScheduler
from torch import nn

import autopar
from autopar.errors import CaptureWarning
from autopar.ir.plan_parts import StageRecompute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
STEPS = 20
MESHES = [
    pytest.param({"pp": p, "tp": t, "dp": d} | more, id="-".join(map(str, (p, t, d, *more))),
                 marks=pytest.mark.skipif(torch.cuda.device_count() < p * t * d, reason="needs more CUDA devices"))
    for p, t, d, more in [(1, 1, 1, {}), (2, 1, 1, {}), (1, 2, 1, {}), (1, 1, 2, {}), (1, 1, 2, {"zero": 1}),
                          (1, 1, 2, {"zero": 2, "microbatches": 1}), (1, 1, 2, {"reduce_dtype": "bfloat16"}),
                          (2, 1, 1, {"loss_over": "batch"}), (1, 1, 2, {"loss_over": "batch"})]
]  # fmt: skip


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def trained(model: nn.Module, steps: int, **constraints: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of some steps, whose batches alternate between two sizes and whose learning rate changes."""
    torch.manual_seed(1)
    dtype = next(model.parameters()).dtype
    batches = [(torch.randn(n, 3, 32, 32, dtype=dtype), torch.randint(0, 10, (n,))) for n in (16, 16, 8)]
    schedule = functools.partial(CosineLRScheduler, t_initial=steps, warmup_t=3, warmup_lr_init=1e-5)
    arguments = {"optimizer": ADAMW, "microbatches": 4, "clip_grad_norm": 1.0} | constraints
    devices = constraints.get("pp", 1) * constraints.get("tp", 1) * constraints.get("dp", 1)
    losses = []
    with autopar.parallelize(model, devices, batches[0][0], lr_scheduler=schedule, **arguments) as pm:
        for i in range(steps):
            pm.lr_scheduler.step(i)
            losses.append(pm.train_step(*batches[i % 3]).loss)
        return losses, {name: tensor.cpu() for name, tensor in pm.state_dict().items()}


def assert_same(one: Any, other: Any, tolerance: float) -> None:
    assert one[0] == pytest.approx(other[0], abs=tolerance)
    for name, tensor in one[1].items():
        assert (tensor.float() - other[1][name].float()).norm() <= tolerance * (1 + tensor.float().norm()), name


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("precision", effort.only(["bf16"], ["fp32", "bf16"]))
def test_captured_equals_plain(mesh: dict[str, Any], precision: str) -> None:
    torch.manual_seed(0)
    model = tiny_vit()
    plain = trained(model, STEPS, compile=False, cuda_graph=False, precision=precision, **mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        captured = trained(model, STEPS, compile=False, cuda_graph=True, precision=precision, **mesh)
    # cuBLAS has other memory for its partial sums while it is captured, and adds in another order.
    assert_same(captured, plain, 1e-5 if precision == "fp32" else 5e-3)


@pytest.mark.parametrize("model", [tiny_vit, resnet18])
def test_compiled_equals_eager(model: Any) -> None:
    torch.manual_seed(0)
    # Batch norm over two samples of one pixel amplifies what is rounded otherwise.
    built = model().double() if model is resnet18 else model()
    eager = trained(built, 6, compile=False, cuda_graph=False)
    compiled = trained(built, 6, compile=True, cuda_graph=True)
    assert_same(compiled, eager, 1e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_stage_that_recomputes_in_part_is_captured(compiled: bool) -> None:
    torch.manual_seed(0)
    model, x, y = tiny_vit(drop_rate=0.1), torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    plan = autopar.plan(model, 1, x, microbatches=2, recompute="none")
    levels: list[StageRecompute] = ["none", 3, "all"]
    losses = []
    for level in levels:
        options: dict[str, Any] = {"plan": with_levels(plan, [level]), "compile": compiled, "cuda_graph": True}
        with warnings.catch_warnings(), autopar.parallelize(model, 1, x, optimizer=ADAMW, seed=3, **options) as pm:
            warnings.simplefilter("error", CaptureWarning)
            losses.append([pm.train_step(x, y).loss for _ in range(6)])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-3)


def test_an_optimizer_that_cannot_be_captured_stays_outside() -> None:
    torch.manual_seed(0)
    model, sgd = tiny_vit(), functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
    plain = trained(model, 8, compile=False, cuda_graph=False, optimizer=sgd)
    captured = trained(model, 8, compile=False, optimizer=sgd)
    assert_same(captured, plain, 1e-5)


def test_a_loss_that_cannot_be_captured_runs_plainly_and_says_why() -> None:
    def stubborn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(output, target)
        assert loss.item() > 0
        return loss

    torch.manual_seed(0)
    model = tiny_vit()
    plain = trained(model, 8, compile=False, cuda_graph=False, loss_fn=stubborn)
    with pytest.warns(CaptureWarning, match="without CUDA graphs"):
        captured = trained(model, 8, compile=False, loss_fn=stubborn)
    assert_same(captured, plain, 1e-5)
    assert torch.randn(4, device="cuda").isfinite().all()  # a failed capture leaves the generator as it was


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("fast", [False, True], ids=["eager", "compiled"])
def test_tensor_parallelism_over_symmetric_memory_equals_nccl_and_one_gpu(fast: bool) -> None:
    torch.manual_seed(0)
    model = tiny_vit()
    one = trained(model, 6, compile=False, cuda_graph=False)
    over = [trained(model, 6, compile=fast, cuda_graph=fast, tp=2, transport=name) for name in ("nccl", "symmetric")]
    assert_same(over[1], over[0], 1e-5)
    assert_same(over[1], one, 1e-4)


@pytest.mark.parametrize("changed", ["betas", "sizes"])
def test_graphs_give_way_to_others_without_a_warning(changed: str) -> None:
    torch.manual_seed(0)
    model, found = tiny_vit(), []
    sizes = [16, 8, 12, 4, 2, 6] if changed == "sizes" else [16]
    batches = [(torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,))) for n in sizes]

    def cycling(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=100)  # which changes betas

    for graphs in (False, True):
        with (
            warnings.catch_warnings(),
            autopar.parallelize(
                model, 1, batches[0][0], optimizer=ADAMW, microbatches=2, compile=False, cuda_graph=graphs,
                lr_scheduler=cycling if changed == "betas" else None,
            ) as pm,
        ):  # fmt: skip
            warnings.simplefilter("error", CaptureWarning)
            losses = []
            for i in range(30):
                losses.append(pm.train_step(*batches[i % len(batches)]).loss)
                if changed == "betas":
                    pm.lr_scheduler.step()
            found.append(losses)
    assert found[1] == pytest.approx(found[0], abs=1e-4)

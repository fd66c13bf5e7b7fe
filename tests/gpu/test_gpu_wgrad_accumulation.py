"""Linear layers that add to their weights' sums on a GPU, against gradients that are moved there."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from support.models import tiny_vit

import autopar
from autopar.codegen import emit as module
from autopar.ops.wgrad_accumulation import OWNERS, add_product

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 37, 4096])
def test_products_are_added_in_float32(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    left, right = (torch.randn(rows, n, device="cuda", dtype=dtype) for n in (200, 72))
    total = torch.full((200, 72), float("nan"), device="cuda")
    add_product(total, left.t(), right, False)
    exact = left.double().t() @ right.double()
    assert (total - exact).norm() <= 1e-5 * exact.norm()
    add_product(total, left.t(), right, True)
    assert (total - 2 * exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
def test_sums_are_those_of_moved_gradients(precision: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x, y = tiny_vit(2), torch.randn(12, 3, 32, 32).cuda(), torch.randint(0, 10, (12,)).cuda()
    found = []
    for adds in (False, True):
        with monkeypatch.context() as patched:
            if not adds:
                patched.setattr(module, "fuse_wgrad", lambda program, sums: (program, {}))
            with autopar.parallelize(
                model, 1, x, loss_fn=F.cross_entropy, optimizer=ADAMW, microbatches=3, precision=precision,
                compile=True, cuda_graph=captured,
            ) as pm:  # fmt: skip
                assert not OWNERS
                pm.forward_backward(x, y)
                assert bool(OWNERS) == adds
                gradients = pm.gradients()
                pm.optimizer_step()
                found.append((gradients, [pm.train_step(x, y).loss for _ in range(20)]))
    (moved, losses), (added, others) = found
    for name, gradient in moved.items():  # of which each microbatch's was rounded to 8 bits
        assert (added[name] - gradient).norm() <= 2e-2 * gradient.norm() + 1e-5, name
    assert others == pytest.approx(losses, abs=2e-2)
    assert losses[-1] < losses[0] - 0.1

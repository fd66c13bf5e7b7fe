"""precision="bf16-params": bfloat16 copies of the parameters, beside the unmodified model with such copies."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import Tied, resnet18, tiny_vit

import autopar
from autopar import UsageError
from autopar.parity import compare
from autopar.precision import params_to_lower

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_equals_one_device(mesh: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    pp, tp, dp = mesh
    x = torch.randn(8, 3, 32, 32)
    parity = compare(tiny_vit(), x, devices=2, steps=2, microbatches=2, precision="bf16-params", pp=pp, tp=tp, dp=dp)
    assert parity.ok, parity.rows
    assert parity.rows[0].bitwise or tp == 2, parity.rows  # partial sums are rounded on each rank


def test_batch_norm_stays_in_float32() -> None:
    torch.manual_seed(0)
    model, x = resnet18(), torch.randn(8, 3, 32, 32)
    parity = compare(model, x, devices=2, steps=2, microbatches=2, precision="bf16-params")
    assert parity.ok, parity.rows
    with autopar.parallelize(model, 1, x, precision="bf16-params") as pm:
        (variant, *_) = pm._programs.known.values()
        weights = {w.name: w for w in variant.graph.weights}
        lowered = params_to_lower(model)
    assert {name for name, w in weights.items() if w.master} == set(lowered)
    assert (weights["conv1.weight"].dtype, weights["bn1.weight"].dtype) == ("bfloat16", "float32")


def test_tied_weights_have_one_copy() -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randint(0, 32, (8, 5))
    parity = compare(model, x, devices=2, steps=2, microbatches=2, precision="bf16-params", pp=2)
    assert parity.ok, parity.rows


def test_what_is_given_and_kept_is_float32() -> None:
    torch.manual_seed(0)
    model, x, y = tiny_vit(), torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
    with autopar.parallelize(model, 1, x, optimizer=ADAMW, precision="bf16-params", microbatches=1) as pm:
        result = pm.train_step(x, y, return_outputs=True)
        assert result.outputs.dtype == torch.bfloat16
        assert {tensor.dtype for tensor in pm.state_dict().values()} == {torch.float32}
        pm.forward_backward(x, y)
        assert {gradient.dtype for gradient in pm.gradients().values()} == {torch.float32}
    low = {name: p.bfloat16() for name, p in model.named_parameters()}
    loss = F.cross_entropy(torch.func.functional_call(model, low, x.bfloat16()).float(), y)
    assert result.loss == pytest.approx(loss.item(), abs=0.01)


def test_a_model_in_bfloat16_is_refused() -> None:
    model: nn.Module = tiny_vit().bfloat16()
    options: dict[str, Any] = {"precision": "bf16-params"}
    with pytest.raises(UsageError, match="parameters of VisionTransformer are bf16"):
        autopar.parallelize(model, 1, torch.randn(4, 3, 32, 32), **options)

"""precision="bf16-params": bfloat16 copies of the parameters, beside the unmodified model with such copies."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.effort import only
from support.models import Tied, resnet18, tiny_vit
from torch import nn

import autopar
from autopar import TraceError, UsageError
from autopar.tools.parity.compare import compare
from autopar.trace.passes.bf16_params import params_to_lower

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)


@pytest.mark.parametrize(("pp", "tp", "dp"), only([(2, 1, 1)], [(2, 1, 1), (1, 2, 1), (1, 1, 2)]))
def test_equals_one_device(pp: int, tp: int, dp: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 32, 32)
    parity = compare(tiny_vit(), x, devices=2, steps=2, microbatches=2, precision="bf16-params", pp=pp, tp=tp, dp=dp)
    assert parity.ok, parity.rows
    assert parity.rows[0].bitwise or tp == 2, parity.rows  # partial sums are rounded on each rank


@pytest.mark.full
def test_batch_norm_stays_in_float32() -> None:
    torch.manual_seed(0)
    model, x = resnet18(), torch.randn(8, 3, 32, 32)
    parity = compare(model, x, devices=2, steps=2, microbatches=2, precision="bf16-params")
    assert parity.ok, parity.rows
    with autopar.parallelize(model, 1, x, precision="bf16-params") as pm:
        (variant, *_) = pm._programs.specializations.values()
        weights = {w.name: w for w in variant.graph.weights}
        lowered = params_to_lower(model)
    assert {name for name, w in weights.items() if w.master} == set(lowered)
    assert (weights["conv1.weight"].dtype, weights["bn1.weight"].dtype) == ("bfloat16", "float32")


def test_tied_weights_have_one_copy() -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randint(0, 32, (8, 5))
    parity = compare(model, x, devices=2, steps=2, microbatches=2, precision="bf16-params", pp=2)
    assert parity.ok, parity.rows
    with autopar.parallelize(model, 1, x, optimizer=ADAMW, precision="bf16-params") as pm:
        pm.forward_backward(x, torch.randint(0, 32, (8,)))
        copies = pm._ranks.rank.compute_params.copies  # type: ignore[union-attr]
        parameters = dict(model.named_parameters())  # each once, by its first name
        assert copies.keys() == parameters.keys()
        assert {name: (c.shape, c.dtype) for name, c in copies.items()} == {
            name: (p.shape, torch.bfloat16) for name, p in parameters.items()
        }
        assert len({c.data_ptr() for c in copies.values()}) == len(parameters)


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


class Normed(nn.Module):
    """A layer that computes its weight anew before each forward, and keeps it."""

    def __init__(self, parametrized: bool) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm if parametrized else nn.utils.weight_norm
        self.first, self.second = norm(nn.Linear(8, 8)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
@pytest.mark.parametrize("parametrized", [False, True])
def test_weights_that_are_computed_before_each_forward(parametrized: bool, precision: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
    model = Normed(parametrized)
    parity = compare(model, x, devices=1, steps=2, microbatches=2, precision=precision)
    assert parity.ok, parity.rows
    with autopar.parallelize(model, 1, x, optimizer=ADAMW, microbatches=2, precision=precision) as pm:
        assert pm.train_step(x, y).loss == pytest.approx(F.cross_entropy(model(x), y).item(), abs=0.01)
        assert pm.gradients() == {} and pm.state_dict().keys() == model.state_dict().keys()


class Buffered(nn.Module):
    """Adds a buffer to what a layer makes, or scales the output with it."""

    place: torch.Tensor

    def __init__(self, cast: bool, only_last: bool = False) -> None:
        super().__init__()
        self.register_buffer("place", torch.randn(8))
        self.cast, self.only_last = cast, only_last
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        place = self.place.to(x.dtype) if self.cast else self.place
        return self.second(x) * place[:4] if self.only_last else self.second(x + place)


class Masked(nn.Module):
    """Attention with a mask of float32, as torch takes beside bfloat16 queries."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.randn(8, 8))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).expand(2, 8, 8)
        return self.second(F.scaled_dot_product_attention(x, x, x, self.mask))[0]


def test_a_model_that_mixes_its_copies_with_float32_buffers_is_refused() -> None:
    x = torch.randn(8, 8)
    with pytest.raises(UsageError) as caught:
        autopar.parallelize(Buffered(cast=False), 1, x, precision="bf16-params")
    assert str(caught.value) == (
        "second.linear cannot compute with operands of several dtypes: add is float32, second.weight is bfloat16, "
        'second.bias is bfloat16. With precision="bf16-params" parameters and inputs are bfloat16; buffers, and what '
        "the model makes float32 by itself, stay as they are. Cast those in the model, as in buffer.to(x.dtype), or "
        'use precision="bf16".'
    )
    # What torch can compute with is not refused.
    for model in (Buffered(cast=True), Buffered(cast=False, only_last=True), Masked()):
        with autopar.parallelize(model, 1, x, precision="bf16-params") as pm:
            assert pm.eval()(x).shape == (8, 4)


class BiasedAttention(nn.Module):
    """Float32 queries, by a buffer, with a mask of parameters: BEiT's, which torch.export refuses in bfloat16."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))
        self.mask = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x * self.scale).expand(2, 8, 8)
        return F.scaled_dot_product_attention(x, x, x, self.mask)[0]


def test_a_model_that_cannot_be_traced_for_its_dtypes_is_told_of_the_precision() -> None:
    x = torch.randn(8, 8)
    with pytest.raises(TraceError, match=r'precision="bf16-params" parameters .* use precision="bf16"\.$') as caught:
        autopar.plan(BiasedAttention(), 1, x, precision="bf16-params")
    assert "may not branch" not in str(caught.value)
    autopar.plan(BiasedAttention(), 1, x, precision="bf16")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-params"])
def test_a_start_in_inference_mode_leaves_a_model_that_trains(precision: Any) -> None:
    torch.manual_seed(0)
    model, x, y = tiny_vit(1), torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
    losses = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            pm = autopar.parallelize(
                model, 1, x, loss_fn=F.cross_entropy, optimizer=ADAMW, microbatches=2, precision=precision
            )
            pm.eval()(x)
        with pm:
            pm.train()
            losses.append([pm.train_step(x, y).loss for _ in range(2)])
            with mode():
                assert not pm.eval()(x).requires_grad
    assert losses[0] == losses[1]

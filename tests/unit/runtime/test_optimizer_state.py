"""State of optimizers: probed on small parameters, equal to that of real ones, and planned for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import tiny_vit
from torch import nn

import autopar
from autopar.errors import InfeasibleError, UsageError
from autopar.ir.graph import Weight
from autopar.runtime.optim.state_bytes import kept_bytes, state_bytes
from autopar.runtime.spec import Parameters
from autopar.solve.space.constraints import memory_for
from autopar.train import timm_optimizer

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def weight(name: str, *shape: int) -> Weight:
    return Weight(name, "parameter", shape, "float32", True)


def split_by_dims(params: Parameters) -> torch.optim.Optimizer:
    """Momentum of matrices alone."""
    groups = [
        {"params": [p for p in params if (p.ndim > 1) is large], "momentum": 0.9 * large} for large in (True, False)
    ]
    return SGD(groups)


@pytest.mark.parametrize(
    ("make", "matrix", "vector"),
    [
        (SGD, 0.0, 0.0),
        (functools.partial(SGD, momentum=0.9), 4.0, 4.0),
        (functools.partial(torch.optim.AdamW, lr=0.1), 8.0, 8.0),
        (functools.partial(torch.optim.AdamW, lr=0.1, amsgrad=True), 12.0, 12.0),
        (functools.partial(torch.optim.Adagrad, lr=0.1), 4.0, 4.0),
        (split_by_dims, 4.0, 0.0),
    ],
)
def test_bytes_per_element(make: Callable[[Parameters], torch.optim.Optimizer], matrix: float, vector: float) -> None:
    state = torch.random.get_rng_state()
    assert state_bytes(make, [weight("w", 512, 300), weight("b", 512)]) == {"w": matrix, "b": vector}
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_probe_seeds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    state_bytes(functools.partial(torch.optim.AdamW, lr=0.1), [weight("w", 512, 300)])
    assert not seeds


@pytest.mark.parametrize("opt", ["sgd", "adamw", "lion", "lamb", "adafactor", "adopt", "muon", "lookahead_adamw"])
def test_it_is_what_the_model_s_own_parameters_make_it_keep(opt: str) -> None:
    model = tiny_vit(1)
    make = timm_optimizer(model, opt, 1e-3)
    named = dict(model.named_parameters())
    optimizer = make(Parameters(named))
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    kept = sum(kept_bytes(optimizer, parameter) for parameter in model.parameters())
    found = state_bytes(make, [weight(name, *p.shape) for name, p in named.items()])
    total = sum(found[name] * p.numel() for name, p in named.items())
    # Rows and columns of a dim of 192 are three times as many as of one of 64, for nine times the elements.
    assert kept <= total <= 3 * kept if opt == "adafactor" else total == kept > 0


class Picky(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ArithmeticError("no step today")


def test_one_that_fails_is_named() -> None:
    failing = r"Picky fails in a trial on 1 small parameters: ArithmeticError: no step today"
    with pytest.raises(UsageError, match=failing):
        state_bytes(functools.partial(Picky, lr=0.1), [weight("w", 4, 4)])
    with pytest.raises(UsageError, match=r"optimizer=<lambda> returns .*; it must return a torch\.optim\.Optimizer"):
        autopar.plan(nn.Linear(4, 4), 1, torch.randn(4, 4), optimizer=lambda params: 3)  # type: ignore


def test_a_plan_for_less_state_fits_into_less_memory() -> None:
    asked: dict[str, Any] = {"hardware": "h200-nvlink", "microbatches": 1, "batch_size": 8, "recompute": "none"}
    lean = autopar.plan("vit_tiny_patch16_224", 1, optimizer=SGD, **asked)
    need, params = lean.prediction.peak_bytes[0], lean.model.num_params
    memory = memory_for(need)
    assert autopar.plan("vit_tiny_patch16_224", 1, **asked).prediction.peak_bytes[0] == need + 8 * params
    with pytest.raises(InfeasibleError):
        autopar.plan("vit_tiny_patch16_224", 1, **asked, memory=memory)
    assert autopar.plan("vit_tiny_patch16_224", 1, optimizer=SGD, **asked, memory=memory).prediction == lean.prediction

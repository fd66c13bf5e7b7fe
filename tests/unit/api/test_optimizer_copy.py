"""Optimizers like the user's, over the parameters of a rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm.optim
import torch
from torch import nn

from autopar.api.optimizer_copy import optimizer_copy
from autopar.errors import UsageError
from autopar.runtime.spec import Parameters


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def groups(module: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in module.parameters() if p.ndim > 1]
    return [{"params": decayed}, {"params": [module[1].weight], "weight_decay": 0.0, "lr": 1e-3}]  # type: ignore[index]


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=1e-2, betas=(0.8, 0.95), amsgrad=True),
        lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
        lambda params: torch.optim.RMSprop(params, lr=1e-2, centered=True),
        lambda params: timm.optim.Lion(params, lr=1e-3),
    ],
)
def test_updates_are_equal(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    module = model()
    recipe = pickle.loads(pickle.dumps(optimizer_copy(make(groups(module)), module)))
    twin = copy.deepcopy(module)
    one, other = make(groups(module)), recipe(Parameters(dict(twin.named_parameters())))
    for _ in range(3):
        for own, optimizer in ((module, one), (twin, other)):
            own(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, twin.get_parameter(name)), name


def test_a_rank_has_the_parameters_that_it_holds() -> None:
    module = model()
    optimizer = optimizer_copy(torch.optim.SGD(groups(module), lr=0.1), module)(
        Parameters({"1.weight": module.get_parameter("1.weight")})
    )
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1]


def test_lamb_clips_by_the_norm_of_all_ranks() -> None:
    module = model()
    recipe = optimizer_copy(timm.optim.Lamb(module.parameters(), lr=1e-2, max_grad_norm=0.5), module)
    assert recipe.clip_grad_norm == 0.5
    assert recipe(Parameters(dict(module.named_parameters()))).defaults["max_grad_norm"] is None


class Wrapping(torch.optim.SGD):
    """An optimizer that is built from another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, lr=0.1)


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda module: torch.optim.SGD(model().parameters(), lr=0.1), "6 are no parameters of Sequential"),
        (stepped, "has made steps already"),
        (lambda module: Wrapping(torch.optim.SGD(module.parameters(), lr=0.1)), "needs|takes no params"),
    ],
)
def test_refused(make: Callable[[nn.Module], torch.optim.Optimizer], message: str) -> None:
    module = model()
    with pytest.raises(UsageError, match=message):
        optimizer_copy(make(module), module)

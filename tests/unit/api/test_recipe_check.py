"""Callables of users that nothing can train with, refused before anything is planned or started."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.handmade import plan_by_hand
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

import autopar
from autopar import UsageError
from autopar.api import parallelize as api

SGD = functools.partial(torch.optim.SGD, lr=0.1)
MODEL, OTHER = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), nn.Linear(4, 4)
X, Y = torch.randn(4, 8), torch.randint(0, 4, (4,))
PENALTY, WEIGHT, FIRST = nn.Linear(2, 2), torch.ones(4), next(MODEL.parameters())


class Margin(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = nn.Parameter(torch.ones(1))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output - self.margin, target)


class NoState:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...


def of_model(params: Any) -> torch.optim.Optimizer:
    return SGD(MODEL.parameters())


def of_another(optimizer: Any) -> LRScheduler:
    return StepLR(SGD(OTHER.parameters()), 1)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer": ({"optimizer": SGD(OTHER.parameters())}, r"optimizer= is a SGD, which cannot be called\. .*partial"),
    "name": ({"optimizer": "adamw"}, "optimizer= is a str, which cannot be called"),
    "closure": (
        {"optimizer": of_model},
        r"optimizer=of_model returns SGD of 4 tensors, of which 4 are not among the 4 parameters that it was given; "
        r"the first one has shape \[16, 8\]\. Use the callable's argument .*: lambda params: SGD\(params, …\)",
    ),
    "own parameter": (
        {"optimizer": lambda params: SGD([*params, nn.Parameter(torch.ones(3))])},
        r"of which 1 are not among the 4 .* shape \[3\]",
    ),
    "no optimizer": ({"optimizer": lambda params: None}, "returns a NoneType; it must return a torch.optim.Optimizer"),
    "scheduler": ({"lr_scheduler": StepLR(SGD(OTHER.parameters()), 1)}, "lr_scheduler= is a StepLR, which cannot be"),
    "its optimizer": (
        {"lr_scheduler": of_another},
        r"returns a StepLR of another optimizer, a SGD\. Use the callable's argument: lambda optimizer: StepLR\(",
    ),
    "no state": ({"lr_scheduler": NoState}, "a NoState, which has no state_dict, load_state_dict: "),
    "alone": ({"lr_scheduler": functools.partial(StepLR, step_size=1), "optimizer": None}, "needs an optimizer"),
    "loss name": ({"loss_fn": "mse"}, r"loss_fn= is a str, which cannot be called\. It must be loss_fn\(output, targ"),
    "loss class": ({"loss_fn": nn.MSELoss}, r"loss_fn=MSELoss is a class\. Pass an object of it: loss_fn=MSELoss\(\)"),
    "loss parameter": (
        {"loss_fn": Margin()},
        r"loss_fn reads 1 tensor with requires_grad: `margin` \[1\]\. .*Freeze the rest with requires_grad_\(False\)",
    ),
    "method": ({"loss_fn": Margin().forward}, "loss_fn reads 1 tensor with requires_grad: `margin`"),
    "partial": ({"loss_fn": functools.partial(F.cross_entropy, weight=WEIGHT.clone().requires_grad_())}, "`weight`"),
    "global": ({"loss_fn": lambda output, _: output.mean() + PENALTY.weight.sum()}, r"`PENALTY\.weight` \[2, 2\], "),
    "penalty": (
        {"loss_fn": lambda output, target, weight=FIRST: output.mean() + weight.norm()},
        r"`weight` \[16, 8\], the model's 0\.weight\. Ranks have copies",
    ),
    "ema": ({"ema": 0.999}, "ema= is a float, which cannot be called"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_callable_that_nothing_can_train_with(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "start", None)  # no worker starts
    monkeypatch.setattr(api, "prepare", lambda num_threads: None)
    options, message = BAD[case]
    plan = plan_by_hand(MODEL, X, 2, ["2.linear"])
    with pytest.raises(UsageError, match=message):
        autopar.parallelize(MODEL, 2, X, plan=plan, **{"optimizer": SGD, **options})
    if case in ("optimizer", "name", "closure", "own parameter", "no optimizer"):
        with pytest.raises(UsageError, match="optimizer="):
            autopar.plan(MODEL, 2, X, **options)


def test_callables_that_are_as_good_as_the_usual_ones() -> None:
    """A frozen backbone, a wrapped optimizer's scheduler, no scheduler at all, and a frozen teacher."""
    teacher = nn.Linear(8, 4).requires_grad_(False)

    def distill(output: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(output, teacher(target["x"])) * WEIGHT.mean()

    for options in (
        {"optimizer": lambda params: SGD(params[2:])},
        {"lr_scheduler": functools.partial(StepLR, step_size=1)},
        {"lr_scheduler": lambda optimizer: None},
        {"optimizer": torch.optim.AdamW, "loss_fn": distill},
    ):
        given: dict[str, Any] = {"optimizer": SGD, **options}
        with autopar.parallelize(MODEL, 1, X, microbatches=2, **given) as pm:
            before = pm.state_dict()
            pm.train_step(X, {"x": X} if "loss_fn" in options else Y)
            changed = [name for name, tensor in pm.state_dict().items() if not tensor.equal(before[name])]
        assert len(changed) == (2 if options.keys() == {"optimizer"} else 4)


class Named(nn.Linear):
    def forward(self, input: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"logits": super().forward(input)}


def test_the_default_loss_takes_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    with autopar.parallelize(Named(8, 4), 1, X) as pm:
        assert pm(X)["logits"].shape == (4, 4)
    monkeypatch.setattr(api, "plan_for_workers", None)
    with pytest.raises(UsageError, match=r"in training Named returns output\['logits'\]\. Pass a loss_fn for them, "):
        autopar.parallelize(Named(8, 4), 1, X, optimizer=SGD)


def test_an_optimizer_needs_something_to_train() -> None:
    frozen = nn.Sequential(nn.Linear(8, 4)).requires_grad_(False)
    with pytest.raises(UsageError, match="optimizer= has nothing to train: Sequential has no parameter with"):
        autopar.parallelize(frozen, 1, X, optimizer=SGD)
    with autopar.parallelize(frozen, 1, X) as pm:
        assert torch.equal(pm.eval()(X), frozen(X))

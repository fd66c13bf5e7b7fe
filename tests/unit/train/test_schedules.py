"""Learning-rate schedules by name: timm's and torch's, the same on every rank as on one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import timm.scheduler
import torch
import torch.nn.functional as F
from support.handmade import in_threads, plan_by_hand
from torch import nn

import autopar
from autopar.train import schedule

SGD = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    flat = [p for p in parameters if p.ndim < 2]
    return torch.optim.SGD(
        [{"params": flat, "lr_scale": 0.1}, {"params": [p for p in parameters if p.ndim > 1]}], lr=0.5, momentum=0.9
    )


def model_and_data() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4, bias=False)),
        torch.randn(8, 8),
        torch.arange(8) % 4,
    )


@pytest.mark.parametrize("by_updates", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cosine", {"warmup_epochs": 2, "warmup_lr": 1e-3, "min_lr": 1e-4}),
        ("cosine", {"warmup_epochs": 2, "warmup_prefix": True, "cooldown_epochs": 1}),
        ("tanh", {"warmup_epochs": 1}),
        ("step", {"decay_epochs": 2, "decay_rate": 0.3}),
        ("multistep", {"decay_milestones": [1, 3], "decay_rate": 0.3}),
        ("poly", {"decay_rate": 0.5, "noise": [0.2, 0.8]}),
        ("none", {}),
    ],
)
def test_curves_equal_timms_with_two_groups(name: str, options: dict[str, Any], by_updates: bool) -> None:
    model, x, _ = model_and_data()
    made = schedule(name, 5, 3, step_on_epochs=not by_updates, **options)
    plan = plan_by_hand(model, x, 1, ["2.linear"])  # the second stage has no parameter of the first group
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=two_groups, lr_scheduler=made)
    optimizer = two_groups(list(model.parameters()))
    expected, epochs = timm.scheduler.create_scheduler_v2(
        optimizer, name, num_epochs=5, updates_per_epoch=3, step_on_epochs=not by_updates, **options
    )
    assert made.build(two_groups(list(model.parameters())))[1] == epochs
    for update in range(5 * 3):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert pm.learning_rates() == rates == pm.lr_scheduler.get_last_lr()
        assert list(pm._call("learning_rates").values()) == [rates, rates]
        if expected is not None:
            expected.step_update(update + 1)
            expected.step(update // 3 + 1)
        pm.lr_scheduler.step_update(update + 1)
        pm.lr_scheduler.step(update // 3 + 1)


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated")
def test_plateau_goes_by_a_metric() -> None:
    model, x, _ = model_and_data()
    made = schedule("plateau", 9, patience_epochs=1, decay_rate=0.5)
    pm = in_threads(
        model, plan_by_hand(model, x, 1, ["2.linear"]), x, F.cross_entropy, optimizer=SGD, lr_scheduler=made
    )
    rates = []
    for epoch in range(1, 7):
        pm.lr_scheduler.step(epoch, metric=0.5)
        rates += pm.learning_rates()
    assert rates == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]


def test_one_cycle_goes_by_updates_and_stays_at_its_end() -> None:
    model, x, y = model_and_data()
    made = schedule("onecycle", 2, 3, pct_start=0.5)
    pm = in_threads(model, plan_by_hand(model, x, 1, []), x, F.cross_entropy, optimizer=SGD, lr_scheduler=made)
    optimizer = SGD(model.parameters())
    expected = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=6, pct_start=0.5)
    for update in range(1, 8):
        assert pm.learning_rates() == expected.get_last_lr()
        pm.train_step(x, y)
        optimizer.step()
        if update < 6:
            expected.step()
        pm.lr_scheduler.step_update(update)
        pm.lr_scheduler.step(update)  # which is nothing to it


def test_schedulers_of_torch_are_stepped_as_they_are() -> None:
    model, x, y = model_and_data()
    halve = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    pm = in_threads(model, plan_by_hand(model, x, 1, []), x, F.cross_entropy, optimizer=SGD, lr_scheduler=halve)
    pm.train_step(x, y)
    pm.lr_scheduler.step()
    assert pm.learning_rates() == [0.25]
    with pytest.raises(autopar.UsageError, match=r"StepLR has no step_update\(\), which timm's schedulers have"):
        pm.lr_scheduler.step_update(1)
    with pytest.raises(autopar.UsageError, match=r"StepLR\.step\(1, metric=2\) fails: TypeError"):
        pm.lr_scheduler.step(1, metric=2)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (("cosin", 3), {}, "no learning-rate schedule 'cosin'. Did you mean cosine? It is one of cosine, tanh"),
        (("cosine", 3), {"warmup": 1}, "'cosine' has no option 'warmup'. Did you mean warmup_lr?"),
        (("onecycle", 3), {}, "Pass updates_per_epoch="),
        (("cosine", 3), {"step_on_epochs": False}, "over 3 epochs of 0 updates: both must be at least 1"),
        (("cosine", 0), {}, "over 0 epochs"),
        (("cosine", 3), {"warmup_epochs": 3}, "would never reach its peak. Use 2 or less (--warmup-epochs 2), or more"),
        (("constant", 1), {"warmup_epochs": 2}, "'constant' over 1 epoch with warmup_epochs=2"),
        (("onecycle", 3, 4), {"max_lr": 1}, "'onecycle' has no option 'max_lr'"),
        (("onecycle", 3, 4), {"pct_start": 3}, "with pct_start=3: Expected float between 0 and 1"),
        (("cosine", 3), {"min_lr": -1.0}, "with min_lr=-1.0: the options contradict each other."),
    ],
)
def test_bad_schedules(args: tuple, options: dict[str, Any], message: str) -> None:
    with pytest.raises(autopar.UsageError) as caught:
        schedule(*args, **options)
    assert message in str(caught.value)


def test_a_scheduler_that_cannot_be_made() -> None:
    model, x, _ = model_and_data()
    broken = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=[1.0, 2.0], total_steps=3)
    with pytest.raises(autopar.UsageError, match="lr_scheduler= fails for SGD with 1 parameter groups: ValueError"):
        in_threads(model, plan_by_hand(model, x, 1, []), x, F.cross_entropy, optimizer=SGD, lr_scheduler=broken)

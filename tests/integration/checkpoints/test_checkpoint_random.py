"""Random numbers go on after a resume, also those that cannot be counted."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_models import CLASSES, ROWS, as_version_1, small
from torch import nn

import autopar

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Recurrent(nn.Module):
    """An LSTM with dropout, whose random numbers cannot be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


SEQUENCES = torch.randn(8, 5, 8)


def recurrent(devices: int = 1, seed: int = 0, **options: Any) -> autopar.ParallelModel:
    torch.manual_seed(0)
    with pytest.warns(autopar.PlanDependentRandomWarning):
        return autopar.parallelize(Recurrent(), devices, SEQUENCES, seed=seed, **{"optimizer": SGD, **options})


def losses(pm: autopar.ParallelModel, steps: int) -> list[float]:
    return [pm.train_step(SEQUENCES, CLASSES).loss for _ in range(steps)]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.full)])
def test_what_cannot_be_counted_goes_on(devices: int, tmp_path: Path) -> None:
    with recurrent(devices, dp=devices) as pm:
        before = losses(pm, 3)
        pm.save_checkpoint(tmp_path)
        expected = losses(pm, 3)
        draws = torch.rand(2)
        pm.load_checkpoint(tmp_path)
        assert not torch.equal(torch.rand(2), draws)  # the caller's numbers are its own
        assert losses(pm, 3) == expected
    with recurrent(devices, dp=devices) as pm:
        pm.load_checkpoint(tmp_path)
        assert losses(pm, 3) == expected != before


@pytest.mark.parametrize("change", ["seed", "version", pytest.param("mesh", marks=pytest.mark.full)])
def test_under_another_seed_or_mesh_no_run_is_repeated(change: str, tmp_path: Path) -> None:
    """Noise at the rate 0, so that losses depend on the random numbers alone."""
    still: dict[str, Any] = {"optimizer": functools.partial(torch.optim.SGD, lr=0.0)}
    devices, seed = (2 if change == "mesh" else 1), (1 if change == "seed" else 0)
    with recurrent(**still) as pm:
        first = losses(pm, 2)
        pm.save_checkpoint(tmp_path)
        first += losses(pm, 2)
    if change == "version":
        as_version_1(tmp_path)
    with recurrent(devices, seed, dp=devices, **still) as pm:
        start = losses(pm, 4)
        found = []
        for _ in range(2):
            if change == "mesh":
                pm.load_checkpoint(tmp_path)
            else:
                with pytest.warns(autopar.ResumeWarning):
                    pm.load_checkpoint(tmp_path)
            found.append(losses(pm, 4))
    assert found[0] == found[1] and not {*found[0]} & {*first, *start}


def test_a_batch_is_repeated_with_its_numbers_after_a_load_within_an_accumulation(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    with small(model) as pm:
        pm.train_step(ROWS, CLASSES)
        first = pm.forward_backward(ROWS, CLASSES, share=0.5).loss
        pm.save_checkpoint(tmp_path)
        pm.train_step(ROWS, CLASSES, share=0.5)
        pm.load_checkpoint(tmp_path)
        assert pm.forward_backward(ROWS, CLASSES, share=0.5).loss == first


def test_numbers_of_an_evaluation_are_not_repeated(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    with small(model) as pm:
        pm(ROWS)
        pm.save_checkpoint(tmp_path)
        expected = pm.train_step(ROWS, CLASSES).loss
        pm.load_checkpoint(tmp_path)
        assert pm.train_step(ROWS, CLASSES).loss == expected

"""Models whose eval mode cannot be traced, such as detectors that choose boxes in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.training import ADAMW
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.train import Trainer


class Chooser(nn.Module):
    """Outputs in eval mode depend on a number that is taken out of a tensor, and on a weight of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y if self.training else y[: int((y * self.scale).argmax())]


X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
LOADER = DataLoader(TensorDataset(X, Y), 8)


def trained(pm: autopar.ParallelModel) -> list[float]:
    return [pm.train_step(X, Y).loss for _ in range(3)]


def parallel(model: nn.Module) -> autopar.ParallelModel:
    with pytest.warns(
        autopar.EvaluationWarning, match=r"^Cannot .*\. This concerns eval mode alone, in which calls are"
    ):
        return autopar.parallelize(model, 1, X, optimizer=ADAMW, microbatches=2)


def test_it_is_trained_and_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, one = Chooser(), Chooser()
    one.load_state_dict(model.state_dict())
    optimizer = ADAMW(one.parameters())
    expected = []
    for _ in range(3):
        loss = cross_entropy(one(X), Y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    with parallel(model) as pm:
        assert trained(pm) == pytest.approx(expected, abs=1e-6)
        torch.testing.assert_close(dict(pm.state_dict()), dict(one.state_dict()))
        pm.save_checkpoint(tmp_path / "last")
        losses = trained(pm)
    with parallel(Chooser()) as pm:
        pm.load_checkpoint(tmp_path / "last")
        assert trained(pm) == losses


@pytest.mark.parametrize(
    "use",
    [
        lambda pm: pm.eval()(X),
        lambda pm: pm.check_evaluates(),
        lambda pm: Trainer(pm, LOADER, LOADER, epochs=1),
    ],
)
def test_it_is_not_evaluated(use: Callable[[autopar.ParallelModel], object]) -> None:
    with parallel(Chooser()) as pm:
        with pytest.raises(autopar.TraceError, match=r"evaluate the unmodified model with pm\.state_dict\(\)\.$"):
            use(pm)
        pm.train()
        assert len(trained(pm)) == 3

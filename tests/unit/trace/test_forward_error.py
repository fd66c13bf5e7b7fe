"""A forward on fake tensors finds errors that a model raises without torch.export, and changes nothing."""

from __future__ import annotations

import pickle
import random
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from support.traced import Body, X
from torch import nn

from autopar.trace.forward_error import fails_itself, forward_error

points = lru_cache(torch.ones)


def changes_all(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Changes all state that a forward can, and fails."""
    print("once")
    self.draws.append(random.random() + np.random.rand())
    torch.manual_seed(torch.initial_seed() + 1)
    self.made, self.calls, self.training = self.points(4), self.calls + 1, False
    self.norm(x)
    self.norm.running_var = self.norm.running_var + 1
    self.lin.weight.detach().add_(1)
    raise IndexError(f"no {self.calls}")


def test_the_forward_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = Body(changes_all, norm=nn.BatchNorm1d(4))
    model.draws, model.calls, model.points = [], 0, points
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    before = random.getstate(), pickle.dumps(np.random.get_state(legacy=False)), torch.get_rng_state()
    assert repr(forward_error(model, (X,), {})) == "IndexError('no 1')"
    assert random.getstate() == before[0] and pickle.dumps(np.random.get_state(legacy=False)) == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert model.draws == [] and capsys.readouterr() == ("", "")
    for name, module in model.named_modules():
        assert {k: id(v) for k, v in vars(module).items()} == {k: id(v) for k, v in attributes[name].items()}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert type(points(4)) is torch.Tensor


def test_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    model: Any = Body(lambda self, x: seen.extend((self.lin.weight, self.lin.bias, self.held, x)))
    model.held = torch.ones(3)
    assert forward_error(model, (X,), {}) is None
    assert [type(tensor).__name__ for tensor in seen] == ["FakeTensor"] * 4


def fails(self: Body, x: torch.Tensor) -> torch.Tensor:
    raise KeyError("wanted")


def test_only_the_same_error_at_the_same_line_is_the_models() -> None:
    model, errors = Body(fails), {}
    for forward in (model, Body(lambda self, x: {}["wanted"])):
        with pytest.raises(KeyError) as caught:
            forward(X)
        errors[forward] = caught.value
    assert [fails_itself(model, (X,), {}, error) for error in errors.values()] == [True, False]
    assert not fails_itself(Body(lambda self, x: x), (X,), {}, errors[model])


def test_errors_about_data_are_not_the_models() -> None:
    model = Body(lambda self, x: self.lin(x).detach().numpy())
    error = forward_error(model, (X,), {})
    assert error is not None and not fails_itself(model, (X,), {}, error)

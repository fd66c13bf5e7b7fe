"""Python state that a forward changes: random draws and constants are refused, counters are a warning."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.handmade import plan_by_hand
from support.traced import Body, X
from torch import nn

from autopar import TraceError
from autopar.api.program_cache import ProgramCache
from autopar.errors import EvaluationWarning, FrozenNumberWarning
from autopar.trace import lower
from autopar.trace.call import as_call
from autopar.trace.trace import trace


def by_python(self: Body, x: torch.Tensor) -> torch.Tensor:
    return self.lin(x) * (2 if random.random() < 0.5 else 3)


def by_numpy(self: Body, x: torch.Tensor) -> torch.Tensor:
    return self.lin(x) * float(np.random.rand())


def in_eval_only(self: Body, x: torch.Tensor) -> torch.Tensor:
    return self.lin(x) * (1.0 if self.training else random.gauss())


@pytest.mark.parametrize(
    ("forward", "generator"),
    [(by_python, "Python's random"), (by_numpy, "numpy.random"), (in_eval_only, "Python's random")],
)
def test_draws_of_python_are_refused(forward: Callable, generator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "trace", trace)  # the tests' cache of traces does not run the forward
    model = Body(forward)
    plan = plan_by_hand(model, X, 1, [])
    states, refused = (random.getstate(), str(np.random.get_state())), f"draws from {generator}, and .* with torch.rand"
    if forward is in_eval_only:
        with pytest.warns(EvaluationWarning, match=refused):
            ProgramCache(model, plan, as_call(model, X))
    else:
        with pytest.raises(TraceError, match=refused):
            ProgramCache(model, plan, as_call(model, X))
    assert (random.getstate(), str(np.random.get_state())) == states


class Averages(nn.Module):
    """Halves a plain tensor in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.mean = nn.Linear(4, 4), torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.5)
        return self.lin(x) - self.mean


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_constant_that_changes_in_place_is_refused(mode: str) -> None:
    model = Averages()
    with pytest.raises(TraceError, match=r"tensor mean in place at .*register_buffer\(\"mean\", …") as caught:
        trace(model, (X,), mode=mode)  # type: ignore[arg-type]
    assert __file__ in str(caught.value) and "self.mean.mul_(0.5)" in str(caught.value)
    del model.mean
    model.register_buffer("mean", torch.ones(4))
    trace(model, (X,), mode=mode)  # type: ignore[arg-type]


def counts(self: Body, x: torch.Tensor) -> torch.Tensor:
    self.norm.steps += 1  # type: ignore[operator]
    return self.lin(x) * min(1.0, self.norm.steps / 10)  # type: ignore[operator]


def test_a_counter_is_a_warning() -> None:
    model = Body(counts, norm=nn.ReLU())
    model.norm.steps = 3  # type: ignore[assignment]
    message = r"forward of Body changes norm\.steps \(from 3 to 4\) at each call\. The trace keeps the value"
    with pytest.warns(FrozenNumberWarning, match=message) as caught:
        trace(model, (X,))
    assert len(caught) == 1 and model.norm.steps == 3


def keeps_sizes(self: Body, x: torch.Tensor) -> torch.Tensor:
    self.rows, self.empty, self._calls = len(x), len(x) == 0, self._calls + 1  # type: ignore[operator]
    self.first = self.first or 1  # type: ignore[assignment]
    return self.lin(x).reshape(self.rows, -1)


def test_kept_sizes_are_no_warning() -> None:
    model = Body(keeps_sizes)
    model.rows, model.empty, model._calls, model.first, model.limit = 7, True, 0, None, float("nan")  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(model, (X,))
    assert model.rows == 7

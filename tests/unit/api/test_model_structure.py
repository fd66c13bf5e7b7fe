"""A model that changes after it was passed: what counts as a change, and the error at inputs of a new shape."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.handmade import plan_by_hand
from torch import nn
from torch.nn import functional as F

from autopar import UsageError
from autopar.api.model_structure import changes, model_structure
from autopar.api.program_cache import ProgramCache
from autopar.trace import lower
from autopar.trace.call import as_call
from autopar.trace.trace import trace


class Net(nn.Module):
    """Caches a size in its forward, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.c = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 2)
        self.act, self.size, self.limit, self._calls = F.relu, 0, float("nan"), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = len(x)
        return self.c(self.act(self.drop(self.norm(self.a(x)))))


def cache() -> ProgramCache:
    model, x = Net(), torch.randn(4, 3)
    return ProgramCache(model, plan_by_hand(model, x, 1, []), as_call(model, x))


CHANGES: dict[str, tuple[Callable[[Net], object], str]] = {
    "frozen": (
        lambda m: m.requires_grad_(False),
        r"a\.weight\.requires_grad is False, was True; .*; … \(6 changes\)",
    ),
    "half": (lambda m: m.c.half(), r"c\.weight\.dtype is float16, was float32; c\.bias\.dtype"),
    "another module": (lambda m: setattr(m, "c", nn.Identity()), "c is of type Identity, was of type Linear; "),
    "another shape": (lambda m: setattr(m, "c", nn.Linear(4, 5)), r"c\.out_features is 5, was 2; c\.weight\.shape is"),
    "a rate": (lambda m: setattr(m.drop, "p", 0.9), r"drop\.p is 0\.9, was 0\.1\. autopar traces"),
    "equal numbers": (lambda m: setattr(m.drop, "inplace", 0), r"drop\.inplace is 0, was False\. "),
    "a function": (lambda m: setattr(m, "act", F.gelu), "act is gelu, was relu"),
    "a hook": (lambda m: m.c.register_forward_hook(print), r"hooks of c is \[print\], was \[\]\. "),
    "tied": (lambda m: setattr(m.c, "bias", m.a.bias), r"c\.bias is the same tensor as a\.bias, was a tensor; "),
    "a new module": (lambda m: m.add_module("d", nn.ReLU()), "d is of type ReLU, was absent; "),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_model_is_refused_at_a_new_shape(case: str) -> None:
    change, message = CHANGES[case]
    programs = cache()
    change(programs.model)  # type: ignore[arg-type]
    programs.specialize("train", as_call(programs.model, torch.randn(4, 3)))  # traced before
    with pytest.raises(UsageError, match=rf"Net has changed since it was passed: .*{message}") as caught:
        programs.specialize("train", as_call(programs.model, torch.randn(3, 3)))
    assert "of a new shape, here [3, 3]. Leave its modules as they are" in str(caught.value)


def test_values_modes_devices_and_caches_of_a_forward_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "trace", trace)  # the tests' cache of traces does not run the forward
    programs = cache()
    graph = programs.example
    for use in (
        lambda m: m.eval(),
        lambda m: m.norm.eval(),
        lambda m: m(torch.randn(7, 3)),  # `size` becomes 7
        lambda m: m.load_state_dict(Net().state_dict()),
        lambda m: setattr(m, "_calls", 1),
        lambda m: m.to("meta"),
    ):
        use(programs.model)
        assert programs.trace(as_call(programs.model, torch.randn(4, 3)), "train") == graph


def test_an_unchanged_model_has_no_changes() -> None:
    assert changes(model_structure(Net()), model_structure(Net())) == ""


def test_threads_may_bring_new_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "trace", trace)
    programs = cache()
    calls = [as_call(programs.model, torch.randn(n, 3)) for n in (1, 2, 3, 5, 1, 2, 3, 5)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda call: programs.specialize("eval", call), calls))
    assert found[:4] == found[4:] and len(programs.specializations) == 6
    assert all(module.training for module in programs.model.modules())

"""Modes and settings of torch in the caller's process leave one device's results as they are."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace

import pytest
import torch
from support.caller_modes import MODES, PLACES, SETTINGS, Results, assert_equal, results
from support.effort import only
from torch import nn

import autopar
from autopar.runtime.launch.torch_settings import BACKENDS, TorchSettings
from autopar.trace import lower
from autopar.trace.trace import trace

CASES = [(name, place) for name in MODES for place in PLACES] + [(n, place) for n in SETTINGS for place in PLACES[:2]]
# Calls in the mode, and a start in the mode.
KEPT = [case for case in CASES if case[1] == "one step" or case == ("autocast", "everything")]


@functools.cache
def without_mode() -> Results:
    return results(1, torch.enable_grad, "everything")


@pytest.fixture(autouse=True)
def _traces_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's cache would give a trace that was made in another mode."""
    monkeypatch.setattr(lower, "trace", trace)


@pytest.mark.filterwarnings("ignore::autopar.AutocastWarning")
@pytest.mark.parametrize(("name", "place"), only(KEPT, CASES))
def test_one_device_is_not_affected(name: str, place: str) -> None:
    assert_equal(results(1, {**MODES, **SETTINGS}[name], place), without_mode(), f"{name} around {place}")


def test_settings_at_the_start_stay_those_of_the_run() -> None:
    with SETTINGS["default dtype"]():
        model = nn.Linear(8, 4, dtype=torch.float32)
        pm = autopar.parallelize(model, 1, torch.zeros(8, 8, dtype=torch.float32), loss_fn=of_default_dtype)
    with pm:
        assert pm.forward_backward(torch.zeros(8, 8), torch.zeros(8, 4)).loss == 64
    assert torch.get_default_dtype() == torch.float32


def of_default_dtype(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Bits of the default dtype."""
    return output.sum() * 0 + torch.zeros(1).itemsize * 8


def test_a_step_that_raises_leaves_the_caller_in_its_modes() -> None:
    def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert not torch.is_autocast_enabled("cpu") and torch.empty(0, device=None).device.type == "cpu"
        raise ArithmeticError

    pm = autopar.parallelize(nn.Linear(8, 4), 1, torch.zeros(8, 8), loss_fn=fails)
    with torch.autocast("cpu", torch.float16, cache_enabled=False), torch.device("meta"), torch.inference_mode():
        with pytest.raises(ArithmeticError), pytest.warns(autopar.AutocastWarning):
            pm.forward_backward(torch.zeros(8, 8, device="cpu"), torch.zeros(8, device="cpu"))
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16
        assert not torch.is_autocast_cache_enabled() and torch.is_inference_mode_enabled()
        assert torch.empty(0, device=None).is_meta
        assert torch.autocast_decrement_nesting() == 0
        torch.autocast_increment_nesting()


def test_autocast_around_a_call_is_warned_of_once() -> None:
    x, y = torch.zeros(8, 8), torch.zeros(8, dtype=torch.long)
    with autopar.parallelize(nn.Linear(8, 4), 1, x) as pm:
        with torch.autocast("cpu", torch.float16), pytest.warns(autopar.AutocastWarning) as seen:
            pm.forward_backward(x, y)
        assert 'precision="fp16"' in str(seen[0].message) and seen[0].filename == __file__
        with torch.autocast("cpu"), warnings.catch_warnings():
            warnings.simplefilter("error")
            pm.forward_backward(x, y)
    wanted = autopar.parallelize(nn.Linear(8, 4), 1, x, precision="bf16")
    with wanted as pm, torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        pm.forward_backward(x, y)
        pm(x)


def test_float32_precisions_of_either_kind_are_carried_over() -> None:
    before = TorchSettings.current()
    with SETTINGS["float32 precision"]():
        newer = TorchSettings.current()
        assert newer.float32_matmul_precision is None  # torch refuses to read it
        with before.active():
            assert TorchSettings.current() == before and torch.get_float32_matmul_precision() == "highest"
        assert TorchSettings.current() == newer
    with newer.active():
        assert TorchSettings.current() == newer
    assert TorchSettings.current() == before


def test_settings_that_are_set_already_keep_their_spelling() -> None:
    """torch.compile's cache tells "none" from "ieee", which mean the same."""
    before = TorchSettings.current()
    spelled = [backend.fp32_precision for backend in BACKENDS]
    with replace(before, cudnn_benchmark=not before.cudnn_benchmark).active():
        assert [backend.fp32_precision for backend in BACKENDS] == spelled
    assert [backend.fp32_precision for backend in BACKENDS] == spelled and "none" in spelled

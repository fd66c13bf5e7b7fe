"""What a PyTorch user looks for on a parallel model and does not find there."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import ParallelModel, UsageError
from autopar.api.module_attributes import OF_MODEL, OF_RESULT, OF_SCHEDULER
from autopar.api.step_result import StepResult
from autopar.train.run.weights import load_weights, save_weights

X, Y = torch.randn(4, 8), torch.randint(0, 4, (4,))


@pytest.fixture(scope="module")
def pm() -> Iterator[ParallelModel]:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    halve = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    with autopar.parallelize(nn.Linear(8, 4), 1, X, optimizer=sgd, lr_scheduler=halve, microbatches=1) as pm:
        yield pm


def test_every_attribute_of_a_module_is_there_or_explained() -> None:
    ours = set(dir(ParallelModel))
    added = {"smart_apply"}  # by transformers, where another test has imported it
    methods = {name for name in vars(nn.Module) if not name.startswith("_")} - added
    hooks = {name for name in methods if name.startswith("register_") and "hook" in name}
    rare = {"T_destination", "call_super_init", "dump_patches", "extra_repr", "get_extra_state", "set_extra_state"}
    rare |= {"ipu", "mtia", "xpu", "to_empty", "set_submodule", "get_buffer"}
    assert methods - ours - hooks - OF_MODEL.keys() == rare & methods
    assert not ours & OF_MODEL.keys()


def test_a_missing_attribute_says_what_to_use(pm: ParallelModel) -> None:
    of: Any = pm
    for thing, known in ((of, OF_MODEL), (of.lr_scheduler, OF_SCHEDULER), (of.train_step(X, Y), OF_RESULT)):
        for name, advice in known.items():
            assert not hasattr(thing, name) and getattr(thing, name, None) is None
            with pytest.raises(UsageError) as error:
                getattr(thing, name)
            assert str(error.value) == f"{type(thing).__name__} has no attribute {name!r}: {advice}."
            assert isinstance(pickle.loads(pickle.dumps(error.value)), AttributeError)
    with pytest.raises(UsageError, match=r"pm\.state_dict\(\) returns them whole"):
        nn.utils.clip_grad_norm_(of.parameters(), 1.0)
    with pytest.raises(UsageError, match="register forward hooks before parallelize"):
        of.register_full_backward_hook(print)


def test_a_misspelt_attribute_has_a_near_one(pm: ParallelModel) -> None:
    with pytest.raises(AttributeError) as error:
        pm.sate_dict()  # type: ignore[attr-defined]
    assert not isinstance(error.value, UsageError)
    expected = "AttributeError: ParallelModel has no attribute 'sate_dict'. Did you mean state_dict?\n"
    assert "".join(traceback.format_exception(error.value)).endswith(expected)


def test_an_error_inside_a_property_is_not_hidden() -> None:
    def read() -> Any:
        raise AttributeError("inside of the read")

    with pytest.raises(AttributeError, match="inside of the read"):
        _ = StepResult(read).loss


def test_a_model_is_neither_copied_nor_pickled(pm: ParallelModel) -> None:
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps, lambda pm: torch.save(pm, io.BytesIO())):
        with pytest.raises(UsageError, match=r"cannot be pickled or copied: .* Save pm\.state_dict\(\), or all"):
            attempt(pm)
    again = pickle.loads(pickle.dumps(result := pm.train_step(X, Y)))
    assert again.loss == result.loss == copy.deepcopy(result).loss


class Versioned(nn.Linear):
    """As torchvision's MNASNet, loads no weights without a version."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *more: Any) -> None:
        assert metadata.get("version") == 2
        super()._load_from_state_dict(state, prefix, metadata, *more)


def test_state_dicts_have_the_versions_of_modules(tmp_path: Path) -> None:
    model, file = Versioned(8, 4), tmp_path / "model.safetensors"
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with autopar.parallelize(nn.Sequential(model), 1, X, optimizer=sgd, microbatches=1) as pm:
        pm.train_step(X, Y)
        state = pm.state_dict()
    assert not torch.equal(model.weight, state["0.weight"])
    whole = nn.Sequential(model)
    whole.load_state_dict(state)
    assert torch.equal(model.weight, state["0.weight"])
    save_weights(state, file)
    nn.init.zeros_(model.weight)
    load_weights(whole, file)
    assert torch.equal(model.weight, state["0.weight"])


def test_a_parallel_model_is_in_the_mode_of_its_model() -> None:
    """As of a Hugging Face model from ``from_pretrained``."""
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    with autopar.parallelize(model, 1, X) as pm:
        assert not pm.training and pm(X).equal(model(X))
        assert pm.train().training and not pm(X).equal(model(X))

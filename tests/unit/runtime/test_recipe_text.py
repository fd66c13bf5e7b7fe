"""Texts by which ranks compare what they were given: equal in all processes for what is equal."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import UsageError
from autopar.runtime.launch.recipe_text import call_text, check_agreement, value_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (0.1 + 0.2, "0.3"),
        (np.float64(0.5), "0.5"),
        (torch.tensor(0.5), "0.5"),
        (torch.zeros(3), "torch.Tensor"),
        (torch.zeros(1, device="meta"), "torch.Tensor"),
        ([1, (2.0, "a")], "(1, (2, a))"),
        ({"a": 1}, "dict(a=1)"),
        ({0: 1}, "dict(0=1)"),
        (F.cross_entropy, "torch.nn.functional.cross_entropy"),
        (nn.CrossEntropyLoss(), "torch.nn.modules.loss.CrossEntropyLoss"),
        (nn.CrossEntropyLoss().forward, "torch.nn.modules.loss.CrossEntropyLoss.forward"),
        (torch.optim.SGD, "torch.optim.sgd.SGD"),
        (partial(torch.optim.SGD, lr=0.1), "partial(torch.optim.sgd.SGD, lr=0.1)"),
        (object(), "builtins.object"),
    ],
)
def test_a_text_has_names_and_numbers_but_no_addresses(value: object, text: str) -> None:
    assert value_text(value) == text


def test_lambdas_are_told_apart_by_their_lines() -> None:
    one, other = (
        lambda: 0,
        lambda: 0,
    )
    assert value_text(one) != value_text(other) and "<lambda> of line " in value_text(one)
    assert call_text("step", (1, 0.5), {"metric": None}) == "step(1, 0.5, metric=None)"


def test_an_error_lists_what_differs() -> None:
    texts = [["seed 1", "lr 0.1"], ["seed 1", "lr 0.2"]]
    with pytest.raises(UsageError, match=r"^The 2 ranks do not rhyme: rank 1 has lr 0\.2; rank 0 has lr 0\.1\. Try\.$"):
        check_agreement(texts, 1, "rhyme", "Try.")
    check_agreement(texts[:1] * 2, 1, "rhyme", "Try.")

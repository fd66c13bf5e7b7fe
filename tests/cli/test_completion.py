"""Words that shells offer, as their scripts ask for them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import get_args

import pytest

from autopar.cost.hardware.load import hardware_names
from autopar.ir.plan_parts import Balance, CostSource, Precision, Recompute, ReduceDtype
from autopar.tools.cli.completion import literals_of, timm_names


def offered(line: str) -> list[str]:
    """Words that bash gets for the last word of a line; none of them needs torch."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['autopar']; "
        "from autopar.tools.cli.app import app; app(prog_name='autopar')"
    )
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_AUTOPAR_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert not done.stderr, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("autopar pl", ["plan"]),
        ("autopar plan no_model_has_this_name", []),
        ("autopar train resnet10t", ["resnet10t"]),
        ("autopar plan resnet18 --hardware h", ["h100-nvlink", "h200-nvlink"]),
        ("autopar check resnet18 --schedule z", ["zb-h1", "zb-v"]),
        ("autopar simulate plan.json --schedule g", ["gpipe"]),
        ("autopar bench resnet18 --precision bf", ["bf16", "bf16-params"]),
        ("autopar plan resnet18 --j", ["--json"]),
    ],
)
def test_words(line: str, words: list[str]) -> None:
    assert offered(line) == words


def test_all_values_and_names_are_offered() -> None:
    import timm

    assert set(timm_names()) == {*timm.list_models()}
    assert len(hardware_names()) > 1
    fields = {"balance": Balance, "cost": CostSource, "precision": Precision, "recompute": Recompute}
    for name, values in {**fields, "reduce_dtype": ReduceDtype}.items():
        assert literals_of(name) == [*get_args(values)]
    assert {"1f1b", "interleaved", "searched", "auto"} <= {*literals_of("schedule")}

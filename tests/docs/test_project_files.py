"""Files of the root folder are true: what they name exists, and the example of CONTRIBUTING.md works."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import cast

import pytest
import torch
from support import rule_cases
from support.lower_bounds import lower_bounds
from support.rule_oracle import check, example

import autopar
from autopar.api.model_source import ModelSource
from autopar.sharding.lookup import rule_of
from autopar.sharding.rule import Rule, strategies, strategy
from autopar.sharding.table import RULES

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", "SECURITY.md")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    named = {*re.findall(r"`((?:autopar|cost_models|tests)/[\w./-]*)`", text), *re.findall(r"\]\(([\w./-]+)\)", text)}
    assert len(named) > 3
    assert {name for name in named if "ROOM" not in name and not (ROOT / name).exists()} == set()


def test_every_target_of_make_exists() -> None:
    targets = {*re.findall(r"^([\w-]+)(?: [\w-]+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    assert {*re.findall(r"`?make ([\w-]+)", CONTRIBUTING)} <= targets


def test_versions_agree() -> None:
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == [PROJECT["version"]] == [autopar.__version__]


# -- the example of CONTRIBUTING.md ------------------------------------------------------------------------------------


def block(start: str) -> str:
    """The code block that starts with a text."""
    (found,) = re.findall(rf"^```\w*\n( *{re.escape(start)}.*?)^```$", CONTRIBUTING, re.DOTALL | re.MULTILINE)
    return found


def entry() -> tuple[str, str]:
    """Name and rule that the example adds to the table."""
    ((name, rule),) = eval(f"{{{block(chr(34) + 'inner')}}}").items()
    return name, rule


def test_the_rule_of_the_example_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    (call,) = re.findall(r"yield (.+)", block("yield case"))
    this = example(eval(call, dict(vars(rule_cases))))
    assert rule_of(this.op, this.shape_of) is None, "this operation has a rule by now: take another one as example"
    monkeypatch.setitem(cast(dict[str, str], RULES), *entry())
    rule = rule_of(this.op, this.shape_of)
    assert rule is not None and str(rule) == "d0 d1 k, n k -> d0 d1 n"
    for ranks in (2, 4):
        for label in labels(rule, ranks):
            found = strategy(rule, label, ranks)
            assert found is not None
            check(this, rule, found, ranks)


def labels(rule: Rule, ranks: int) -> set[str]:
    """Strategies of a rule, a split of each letter among them."""
    found = {one.label for one in strategies(rule, ranks, dict.fromkeys(rule.free, ()), ())}
    assert len(found) > len(rule.free) - 1
    return found


@pytest.mark.filterwarnings("ignore::autopar.UnknownOpWarning")
def test_the_plan_of_the_example_is_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prototypes.py").write_text(block("import torch"))
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [line.split() for line in block("sharded ").splitlines()[2:]]
    assert sharded() == rows[:1] != rows
    monkeypatch.setitem(cast(dict[str, str], RULES), *entry())
    assert sharded() == rows


def sharded() -> list[list[str]]:
    """Words of the printed plan's rows about shardings."""
    source, x = ModelSource("prototypes:Prototypes"), torch.empty(8, 64, device="meta")
    plan = autopar.plan(source, 2, x, tp=2, hardware="cpu-generic", cost="analytic")
    table = str(plan).partition("\nsharded ")[2].partition("\n\n")[0]
    return [line.split() for line in table.splitlines()[2:]]


# -- lowest versions ---------------------------------------------------------------------------------------------------


def test_the_lowest_versions_are_those_of_pyproject() -> None:
    pins = lower_bounds((ROOT / "pyproject.toml").read_text())
    assert {"torch==2.11", "typer==0.26", "pulp==3.3.1", "plotly==6.0"} <= {*pins}
    assert not [pin for pin in pins if pin.startswith("autopar")]


@pytest.mark.parametrize("wrong", ['["torch"]', '["torch>=2.11", "torch>=2.12"]', '["torch>=2.11,>=2.12"]'])
def test_a_requirement_without_one_lowest_version_is_an_error(wrong: str) -> None:
    text = f'[project]\nname = "autopar"\ndependencies = {wrong}\n[project.optional-dependencies]\n'
    with pytest.raises(ValueError, match=r"torch.* must have one lower bound"):
        lower_bounds(text)

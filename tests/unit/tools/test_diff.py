"""Differences of two plans: settings, cuts and shardings."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import invoke
from support.explained_plans import VIT, by_hand, planned, saved

from autopar.errors import PlanError
from autopar.tools.explain.diff import difference


def test_what_two_plans_decide_otherwise(folder: Path) -> None:
    one, other = planned(VIT.name, 4, ("pp", 4)), planned(VIT.name, 4, ("pp", 2), ("tp", 2), ("microbatches", 4))
    found = difference(one, other)
    settings = {c.name: (c.before, c.after) for c in found.settings}
    assert settings["mesh"] == ("pp 4 × tp 1 × dp 1", "pp 2 × tp 2 × dp 1")
    assert {"precision", "hardware", "devices", "schedule", "chunks a rank"}.isdisjoint(settings)
    assert [c.name for c in found.cuts][-2:] == ["stage 2 begins with", "stage 3 begins with"]
    assert found.cuts[-1].after == "–" and found.cuts[-1].before == one.stages[3].first
    split = {c.name: c.after for c in found.shardings}
    assert split == {**other.shardings, **other.strategies} and all(c.before == "–" for c in found.shardings)
    assert (found.before.step_seconds, found.after.step_seconds) == pytest.approx(
        (one.prediction.step_seconds, other.prediction.step_seconds)
    )
    code, out, error = invoke("explain", saved(one), "--diff", saved(other, "other.json"))
    assert code == 0, error
    assert re.search(r"mesh +pp 4 × tp 1 × dp 1 +pp 2 × tp 2 × dp 1", out), out


def test_moved_cuts_and_operations_are_named() -> None:
    one = by_hand([(1.0, 2.0)] * 2)
    moved = replace(one.stages[1], first="blocks.0.last.linear")
    other = replace(one, stages=(one.stages[0], moved), exceptions={"side.linear": 1})
    assert [(c.name, c.before, c.after) for c in difference(one, other).cuts] == [
        ("stage 1 begins with", "blocks.1.first.linear", "blocks.0.last.linear"),
        ("side.linear", "in its range", "stage 1"),
    ]
    levels = [replace(stage, recompute=level, num_segments=8) for stage, level in zip(one.stages, (3, "all"))]
    some, every = replace(one, stages=tuple(levels)), replace(one, stages=(levels[1], levels[1]))
    assert [(c.name, c.before, c.after) for c in difference(one, some).settings] == [
        ("recomputing", "no stage", "stages 0 (3 of 8 segments), 1")
    ]
    assert [(c.before, c.after) for c in difference(some, every).settings] == [
        ("stages 0 (3 of 8 segments), 1", "every stage")
    ]
    again = difference(one, one)
    assert (again.settings, again.cuts, again.shardings, again.notes) == ((), (), (), ())


def test_plans_of_other_machines_and_precisions_compare() -> None:
    one = by_hand([(1.0, 2.0)] * 2)
    other = replace(one, hardware=replace(one.hardware, name="other"), precision="bf16",
                    model=replace(one.model, fingerprint="4567"))  # fmt: skip
    found = difference(one, other)
    assert "different machines, box with 10.0 GiB and other with 10.0 GiB" in found.notes[0]
    assert {c.name for c in found.settings} == {"hardware", "precision"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 32}, "different batches: field batch is 64 in the first and 32 in the second"),
        ({"name": "n"}, "different models: field model.name is m in the first and n in the second"),
        ({"kwargs": {"depth": 3}}, r"field model.kwargs is \{\} in the first and \{'depth': 3\}"),
        ({"fingerprint": "9"}, "field model.fingerprint is 0123 in the first and 9"),
        ({"num_params": 8}, "field model.num_params is 7 in the first and 8"),
    ],
)
def test_plans_of_other_models_or_batches_do_not(changes: dict[str, Any], message: str) -> None:
    one = by_hand([(1.0, 2.0)] * 2)
    other = replace(one, **changes) if "batch" in changes else replace(one, model=replace(one.model, **changes))
    with pytest.raises(PlanError, match=message):
        difference(one, other)

"""``autopar explain`` as it prints, and files that it refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from support.cli import invoke
from support.explained_plans import VIT, by_hand, planned, saved

from autopar.ir.text import rendered
from autopar.tools.explain.advice import explained
from autopar.tools.report.explain_table import explanation_parts


def test_what_is_printed(folder: Path) -> None:
    code, out, error = invoke("explain", saved(by_hand([(1.0, 2.0), (1.5, 3.0)], microbatches=2, hop_seconds=0.25)))
    assert code == 0, error
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0].startswith("bound by    compute of stage 1 (blocks.1.first … blocks.1.last), 12.5 %")
    rows = [line.split() for line in lines if re.match(r" +\d", line)]
    assert rows[0] == ["0", "0", "6.0", "0.5", "6.0", "12.5"]
    assert rows[2] == ["1", "1", "9.0", "0.5", "3.0", "12.5"]
    assert rows[4][:7] == ["0", "0", "1.00", "GiB", "10", "%", "9.00"]
    assert "in s and % of the step" in out
    assert "512.0 MiB *" in out


def test_every_part_fits_into_80_columns() -> None:
    plan = planned(VIT.name, 8, ("pp", 2), ("tp", 2), ("dp", 2), ("recompute", "all"), ("microbatches", 2))
    parts = explanation_parts(plan, explained(plan), 80)
    narrow = rendered(parts, 80, color=False)
    assert max(map(len, narrow.splitlines())) <= 80 and not re.search(r"\w…", narrow), narrow
    assert re.search("recom- +collec- +trans- +reduc- +opti-\n", narrow), narrow
    wide = rendered(explanation_parts(plan, explained(plan), 120), 120, color=False)
    assert re.search("compute +recomputation +collectives +transfers +bubble +reduction +optimizer +step", wide), wide


def test_stages_that_recompute_are_named(folder: Path) -> None:
    plan = by_hand([(1.0, 2.0)] * 2)
    assert "recomputes" not in invoke("explain", saved(plan))[1]
    some = replace(plan.stages[1], recompute=3, num_segments=8, recompute_seconds=0.5)
    out = invoke("explain", saved(replace(plan, stages=(plan.stages[0], some))))[1]
    assert re.search(r"^recomputes +stages 1 \(3 of 8 segments\)$", out, re.MULTILINE), out


def test_broken_files(folder: Path) -> None:
    Path("cut.json").write_text(by_hand([(1.0, 2.0)]).to_json()[:200])
    for args, message in (
        (["none.json"], "Cannot read plan file none.json"),
        (["cut.json"], "cut.json is not a complete JSON file"),
        ([], "Missing argument 'PLAN.json'"),
    ):
        code, _, error = invoke("explain", *args)
        assert code == 2 and message in error, error

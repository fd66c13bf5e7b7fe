"""The HTML file of ``autopar report``: sections, escaped texts, nothing from a network, nothing else that runs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.explained_plans import by_hand
from support.report_pages import bench_of, full_plan

from autopar.errors import UsageError
from autopar.ir.plan import Plan
from autopar.tools.bench.result import BenchResult
from autopar.tools.bench.row import BenchRow
from autopar.tools.explain.breakdown import breakdown_of
from autopar.tools.explain.why_not_result import WhyNotResult
from autopar.tools.report.html.measured import measured_row
from autopar.tools.report.html.page import page_of, save_page
from autopar.tools.report.html.sections import Measured, ReportInput

HOSTILE = "</script><script>alert(1)</script><img src=http://evil.test/x onerror=alert(2)>[/b]&\u2028'\""
SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def full_page(name: str = "toy_vit") -> str:
    plan = full_plan(name)
    other = by_hand([(2.0, 3.0)] * 2, microbatches=4)
    result = bench_of(plan)
    answers = (WhyNotResult(f"tp={name}", f"slower {name}", other, breakdown_of(other), f"autopar plan {name}"),
               WhyNotResult("tp=3", f"3 does not divide {name}"))  # fmt: skip
    return page_of(ReportInput.of(plan, Measured(result, result.rows[0]), answers))


def markup(page: str) -> str:
    """The page without scripts and styles."""
    return re.sub(r"<style>.*?</style>", "", SCRIPT.sub("", page), flags=re.DOTALL)


def texts(page: str) -> str:
    """Visible texts of the page."""
    return re.sub(r"<[^>]+>", " ", markup(page))


def figures(page: str) -> dict[str, dict]:
    """Figures that the page's second script draws."""
    text = SCRIPT.findall(page)[1].split("const figures = ")[1]
    return json.JSONDecoder().raw_decode(text)[0]


def test_a_full_report_has_all_sections_and_figures() -> None:
    page = full_page()
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    assert titles == ["The plan", "The model on its ranks", "The step over time", "Memory over time",
                      "What bounds the step", "Alternatives", "Why not …", "Measured"]  # fmt: skip
    drawn = figures(page)
    assert list(drawn) == ["model", "timeline", "memory", "breakdown", "alternatives"]
    for name in drawn:
        assert re.search(rf'<div id="{name}" class="plot"[^>]* role="img" aria-label="[^"]{{20,}}"', page)
    ids = re.findall(r'\bid="([^"]+)"', markup(page))
    assert len(ids) == len(set(ids)) and set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)
    said = texts(page)
    for part in ("measured step", "other toy_vit", "3 does not divide toy_vit", "two toys", "what would help"):
        assert part in said, part


def test_a_report_of_a_plan_alone_has_no_measurements_and_no_questions() -> None:
    page = page_of(ReportInput.of(replace(full_plan(), alternatives=(), block_costs=()), None, ()))
    assert list(figures(page)) == ["model", "timeline", "memory", "breakdown"]
    said = texts(page)
    assert "Measured" not in said and "Why not" not in said and "The plan file has no alternatives." in said
    assert "Times of the model&#x27;s blocks are not in this plan file: each bar is a stage." in said


def test_what_an_older_file_lacks_is_said() -> None:
    plan = full_plan()
    old = tuple(replace(row, peak_bytes=None) for row in plan.alternatives)
    result = bench_of(plan, timeline=False)
    page = page_of(ReportInput.of(replace(plan, alternatives=old), Measured(result, result.rows[0]), ()))
    assert "does not have the memory of its alternatives" in texts(page) and "alternatives" not in figures(page)
    assert "The bench file has no measured timeline" in texts(page)


def test_long_tables_are_closed_at_first() -> None:
    page = page_of(ReportInput.of(by_hand([(1.0, 2.0)] * 20), None, ()))
    assert page.count("<details>") == 4 and "<details>" not in full_page()
    assert "Stages: all 20 rows" in page


def test_texts_of_the_plan_cannot_end_a_script_or_become_markup() -> None:
    page = full_page(HOSTILE)
    assert len(SCRIPT.findall(page)) == 2 and page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page and not re.search(r"<[^>]+\son\w+=", markup(page))
    assert figures(page)["model"]["data"][0]["hovertext"][0].startswith(HOSTILE)  # which is set as text
    drawn = [text for figure in figures(page).values() for trace in figure["data"] for text in trace.get("text", [])]
    assert not any("<" in text for text in drawn)


def test_only_the_page_s_own_scripts_may_run_and_nothing_is_loaded() -> None:
    page = full_page()
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', page)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in SCRIPT.findall(page)]
    assert rules["default-src"] == "'none'" and rules["script-src"] == " ".join(f"'sha256-{d}'" for d in digests)
    assert not any("http" in rule for rule in rules.values())
    assert not re.search(r"""\b(?:src|action|data|poster|srcset)\s*=""", markup(page)) and "<link" not in page
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', markup(page)))
    assert "url(" not in page.split("<style>")[1].split("</style>")[0] and "@import" not in page


def test_the_file_stays_small() -> None:
    plan = by_hand([(1.0, 2.0)] * 64, microbatches=64)
    assert len(page_of(ReportInput.of(plan, None, ())).encode()) < 8e6


def test_line_ends_are_those_of_the_digests(tmp_path: Path) -> None:
    save_page("a\nb\n", tmp_path / "r.html")
    assert (tmp_path / "r.html").read_bytes() == b"a\nb\n"
    with pytest.raises(UsageError, match=r"Cannot write the report to .*none/r\.html: No such file"):
        save_page("", tmp_path / "none" / "r.html")


# -- the bench of a plan -------------------------------------------------------------------------------------------


def test_the_row_of_the_plan_is_chosen() -> None:
    plan = full_plan()
    result = bench_of(plan)
    (own,) = result.rows
    other = replace(own, contestant="uniform")
    assert measured_row(plan, replace(result, rows=(other, own)), "b.json") is own
    assert measured_row(plan, replace(result, rows=(other,)), "b.json") is other  # its cuts are the plan's
    slower = replace(plan, prediction=replace(plan.prediction, step_seconds=9.0))
    assert measured_row(slower, result, "b.json") is own  # predictions may change


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (32, 3, 32, 32)}, r"b\.json is of another plan than this file: batch 32 there, 64 here\."),
        ({"precision": "bf16", "model": "resnet50"},
         r"model resnet50 there, toy_vit here; precision bf16 there, fp32 here\. Save the plan that was measured: "
         r"`autopar plan … -o` with the flags of `autopar bench toy_vit --devices 2`\."),
    ],
)  # fmt: skip
def test_a_bench_of_another_setting_is_refused(changes: dict, message: str) -> None:
    plan = full_plan()
    with pytest.raises(UsageError, match=message):
        measured_row(plan, bench_of(plan, **changes), "b.json")


def test_a_bench_of_another_plan_is_refused() -> None:
    plan = full_plan()
    moved = replace(plan, stages=(replace(plan.stages[0], last="blocks.0.other.linear"), plan.stages[1]))
    with pytest.raises(UsageError, match=r"4 microbatches of 16, with other cuts or shardings\."):
        measured_row(moved, bench_of(plan), "b.json")
    with pytest.raises(UsageError, match=r"4 microbatches of 16 there, pp 2, 1f1b, 8 microbatches of 8 here\."):
        measured_row(replace(plan, microbatches=8), bench_of(plan), "b.json")


def test_a_bench_without_a_plan_is_refused() -> None:
    result = replace(bench_of(full_plan()), rows=(BenchRow("autopar", "", "", "", 2, reason="out of memory"),))
    with pytest.raises(UsageError, match=r"No row of b\.json ran a plan: out of memory\."):
        measured_row(full_plan(), result, "b.json")


def test_a_bench_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, result = tmp_path / "b.json", bench_of(full_plan())
    path.write_text(result.to_json())
    assert BenchResult.load(path) == result
    older = json.loads(result.to_json())
    del older["rows"][0]["pipeline"]["timeline"]
    path.write_text(json.dumps(older))
    (row,) = BenchResult.load(path).rows
    assert row.pipeline is not None and row.pipeline.timeline is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "Cannot read bench file .*b.json: No such file"),
        ("{", "is not complete JSON"),
        ("[]", "is no bench file: it has no rows"),
        (full_plan().to_json(), "is no bench file: it has no rows"),
        ('{"rows": 3}', r"is no valid bench file\. Field model: Field required; field "),
        (bench_of(full_plan(), schema_version=9).to_json(), "has schema_version 9, this autopar reads 1"),
    ],
)
def test_other_files_are_no_benches(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "b.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        BenchResult.load(tmp_path / "b.json")


def test_older_plans_are_read() -> None:
    data = json.loads(full_plan().to_json())
    del data["block_costs"]
    for row in data["alternatives"]:
        del row["peak_bytes"]
    plan = Plan.from_json(json.dumps(data))
    assert plan.block_costs == () and plan.alternatives[0].peak_bytes is None

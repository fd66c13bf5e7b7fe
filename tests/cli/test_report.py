"""``autopar report`` as a command: files that it reads and writes, and arguments that it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import invoke
from support.explained_plans import VIT, planned, saved
from support.report_pages import bench_of, full_plan

from autopar.api.model_source import ModelSource
from autopar.ir.plan import Plan
from autopar.tools.cli.models import named_plan


def reported(*args: str) -> str:
    """Page that the command writes to report.html."""
    code, _, error = invoke("report", *args, "-o", "report.html")
    assert code == 0, error
    return Path("report.html").read_text(encoding="utf-8")


def test_the_page_is_named_after_the_plan(folder: Path) -> None:
    code, out, error = invoke("report", saved(full_plan()))
    assert (code, out) == (0, "saved to plan.html\n"), error
    assert Path("plan.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert sorted(path.name for path in folder.iterdir()) == ["plan.html", "plan.json"]


def test_a_bench_adds_the_measured_step(folder: Path) -> None:
    plan = full_plan()
    Path("bench.json").write_text(bench_of(plan).to_json())
    assert "measured step" not in reported(saved(plan))
    page = reported(saved(plan), "--bench", "bench.json")
    assert "measured step" in page and "two toys" in page


def test_questions_are_answered(folder: Path) -> None:
    given = ModelSource(VIT.name, VIT.kwargs)
    plan = named_plan(planned(VIT.name, 2, ("pp", 2), ("microbatches", 4)), given)
    page = reported(saved(plan), "--why-not", "tp=2,microbatches=4", "--why-not", "pp=5")
    assert "asked (why not)" in page and "tp=2,microbatches=4" in page and "pp=5" in page


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.json"], "Cannot read plan file none.json: No such file or directory."),
        (["bench.json"], "bench.json is JSON but not a plan"),
        (["plan.json", "--bench", "plan.json"], "plan.json is no bench file: it has no rows"),
        (["plan.json", "--bench", "other.json"], "other.json is of another plan than this file: batch 32 there, 64"),
        (["plan.json", "-o", "plan.json"], "-o plan.json would write over plan.json. Give another file."),
        (["plan.json", "--bench", "bench.json", "-o", "./bench.json"], "would write over bench.json"),
        (["plan.json", "-o", "none/r.html"], "Cannot write to none/r.html: No such file or directory."),
        (["plan.json", "--hardware", "x.toml"], "--hardware is for --why-not, which is not given."),
        (["plan.json", "--why-not", "tp"], "Cannot read --why-not 'tp'."),
        (["plan.json", "--why-not", "tp=2"], "which autopar does not ship"),
        ([], "Missing argument 'PLAN.json'"),
    ],
)
def test_wrong_arguments_get_one_message(args: list[str], message: str, folder: Path) -> None:
    plan = full_plan()
    plan.save("plan.json")
    Path("bench.json").write_text(bench_of(plan).to_json())
    Path("other.json").write_text(bench_of(plan, shape=(32, 3, 32, 32)).to_json())
    before = sorted(path.name for path in folder.iterdir())
    code, out, error = invoke("report", *args)
    assert code == 2 and message in error and not out, error
    assert sorted(path.name for path in folder.iterdir()) == before and Plan.load("plan.json") == plan


def test_without_plotly_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    code, _, error = invoke("report", saved(full_plan()))
    assert code == 2 and "autopar report needs plotly: pip install 'autopar[report]'." in error
    assert not Path("plan.html").exists()


def test_no_model_is_built_without_a_question(folder: Path) -> None:
    script = (
        "import sys; from autopar.tools.cli.app import app\n"
        "app(['report', 'plan.json'], standalone_mode=False)\n"
        "print([name for name in ('timm', 'torchvision', 'autopar.trace.trace', 'pulp') if name in sys.modules])"
    )
    saved(full_plan())
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "saved to plan.html\n[]\n"

"""Printed plans stay as they are: each file of pinned_plans/ holds commands, and what they print in 100 columns.

A refactor leaves all of them unchanged. Where plans are meant to change, ``pytest tests/cli/test_pinned_plans.py
--full --renew-plans`` writes the files again, and the commit shows the difference. A new case is a file with its
commands, each on a line after ``$``. Other versions of torch and timm may trace other operations: these files are of
`VERSIONS`, and compared with no others.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest
import timm
import torch
from support.effort import only
from typer.testing import CliRunner

from autopar.tools.cli.app import app

VERSIONS = ("2.15", "1.0.31")  # of torch and timm
FOLDER = Path(__file__).with_name("pinned_plans")
QUICK = ("mixer_interleaved_4", "vit_tp_2")
SOLVER_SECONDS = re.compile(r"(certified gap \S+ %,\s+)\d+\.\d\d s")
# How far the bound of an open gap was brought depends on the machine's speed.
OPEN_GAP = re.compile(r"(solver +HiGHS: )(?:feasible|time limit).*\n( +no .* less than ).*\n")


def printed(command: str) -> str:
    """Output and errors of a command, and its exit code where that is not 0.

    The solver's seconds and open gaps are masked.
    """
    _, *args = command.split()
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, args, prog_name="autopar")
    failed = f"exit code {result.exit_code}\n" if result.exit_code else ""
    return OPEN_GAP.sub(r"\1…\n\2…\n", SOLVER_SECONDS.sub(r"\1… s", result.output)) + failed


@pytest.mark.skipif(
    (torch.__version__.rpartition(".")[0], timm.__version__) != VERSIONS, reason="pinned with other versions"
)
@pytest.mark.parametrize("name", only(QUICK, sorted(path.stem for path in FOLDER.iterdir())))
def test_a_plan_is_printed_as_it_was(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = FOLDER / f"{name}.txt"
    pinned = file.read_text()
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ (.*)$", pinned, re.MULTILINE)
    now = "\n".join(f"$ {command}\n{printed(command)}" for command in commands)
    if request.config.getoption("renew_plans"):
        file.write_text(now)
        return
    before, after = (text.splitlines(keepends=True) for text in (pinned, now))
    if changes := "".join(difflib.unified_diff(before, after, "pinned", "now")):
        pytest.fail(changes, pytrace=False)

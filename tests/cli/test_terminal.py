"""Colours, progress and ``--quiet`` in terminals of several kinds, and in pipes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import invoke

ESCAPE = "\x1b"
VARIABLES = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "AUTOPAR_QUIET")
PROGRESS = """
from rich.progress import Progress
from autopar.ir.terminal import progress_console
console = progress_console()
console.print("remark")
with Progress(console=console, disable=not console.is_interactive) as bar:
    bar.update(bar.add_task("bar", total=2), completed=1)
"""


def environment(changes: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in VARIABLES} | changes


def in_terminal(command: list[str], changes: dict[str, str]) -> str:
    """Output of a command in a terminal of its own."""
    master, slave = pty.openpty()
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment(changes))
    os.close(slave)
    chunks: list[bytes] = []
    while True:
        try:
            chunk = os.read(master, 1 << 16)
        except OSError:  # Linux's end of a terminal
            chunk = b""
        if not chunk:
            break
        chunks.append(chunk)
    os.close(master)
    process.wait()
    return b"".join(chunks).decode()


def in_pipe(command: list[str], changes: dict[str, str]) -> str:
    """Output of a command in a pipe."""
    done = subprocess.run(command, env=environment(changes), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout.decode()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("terminal") / "plan.json"
    assert invoke("plan", "test_vit", "--devices", "2", "--hardware", "a100-nvlink", "-o", str(path))[0] == 0
    return str(path)


@pytest.mark.parametrize(
    ("run", "changes", "coloured"),
    [
        (in_terminal, {"TERM": "xterm"}, True),
        (in_terminal, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (in_terminal, {"TERM": "dumb"}, False),
        (in_pipe, {}, False),
        (in_pipe, {"FORCE_COLOR": "1"}, True),
        (in_pipe, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
    ids=["terminal", "NO_COLOR", "dumb", "pipe", "FORCE_COLOR", "both"],
)
def test_colours_of_results_and_errors(run, changes: dict[str, str], coloured: bool, plan: str) -> None:
    command = [sys.executable, "-m", "autopar", "simulate"]
    result, error = run([*command, plan], changes), run([*command, "missing.json"], changes)
    assert "test_vit" in result and "Cannot read plan file missing.json" in error
    assert (ESCAPE in result, ESCAPE in error) == (coloured, coloured)


@pytest.mark.parametrize(
    ("run", "changes", "moves"),
    [
        (in_terminal, {"TERM": "xterm"}, True),
        (in_terminal, {"TERM": "dumb"}, False),
        (in_pipe, {"FORCE_COLOR": "1"}, False),
    ],
    ids=["terminal", "dumb", "FORCE_COLOR in a pipe"],
)
def test_a_bar_moves_only_where_it_can(run, changes: dict[str, str], moves: bool) -> None:
    shown = run([sys.executable, "-c", PROGRESS], changes)
    assert "remark" in shown and ("bar" in shown) == moves
    assert run([sys.executable, "-c", PROGRESS], {**changes, "AUTOPAR_QUIET": "1"}).strip() == ""


def test_a_bar_without_colours(plan: str) -> None:
    shown = in_terminal([sys.executable, "-c", PROGRESS], {"TERM": "xterm-256color", "NO_COLOR": "1"})
    assert "bar" in shown and f"{ESCAPE}[3" not in shown and f"{ESCAPE}[38" not in shown


@pytest.mark.filterwarnings("always::autopar.MicrobatchWarning")
def test_quiet_leaves_the_result_and_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_QUIET", "")
    mesh = ["--devices", "2", "--pp", "2", "--schedule", "1f1b", "--batch", "8", "--microbatches", "5"]
    flags = ["test_vit", *mesh, "--hardware", "a100-nvlink"]
    code, loud, warned = invoke("plan", *flags, "-o", str(tmp_path / "a.json"))
    assert code == 0 and "saved to" in loud and "warning: " in warned
    for words in (["--quiet", "plan", *flags], ["plan", *flags, "--quiet"]):
        code, quiet, error = invoke(*words, "-o", str(tmp_path / "a.json"))
        assert (code, error) == (0, warned)
        assert "saved to" not in quiet
        assert [line[:9] for line in quiet.rstrip().splitlines()] == [
            line[:9] for line in loud[: loud.index("\nsaved to")].rstrip().splitlines()
        ]
    assert os.environ["AUTOPAR_QUIET"] == ""


def test_quiet_keeps_errors() -> None:
    code, out, error = invoke("simulate", "missing.json", "--quiet")
    assert (code, out) == (2, "") and "Cannot read plan file" in error

"""docs/command_line.md lists the exit codes and the environment that there are."""

from __future__ import annotations

import re
from pathlib import Path

from support.cli import invoke

import autopar
from autopar import errors
from autopar.tools.cli.command import INTERRUPTED
from autopar.train.run.interrupt import TERMINATED

PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()


def test_exit_codes_are_one_table() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [(str(code), meaning) for code, meaning in errors.EXIT_CODES.items()]
    helped = re.findall(r"^ +(\d+) +(.+)$", invoke("--help")[1].partition("Exit codes:")[2], re.MULTILINE)
    assert helped == rows


def test_every_exit_code_that_is_used_is_in_the_table() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    raised = [kind for kind in kinds if issubclass(kind, errors.AutoparError)]
    assert {autopar.WorkerError, autopar.UsageError} < {*raised}
    used = {kind.exit_code for kind in raised} | {INTERRUPTED, TERMINATED}
    assert {*errors.EXIT_CODES} == {0} | used

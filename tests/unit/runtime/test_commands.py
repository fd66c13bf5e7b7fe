"""The table of commands, against the methods of a rank and the names that the driver calls."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import autopar.api
from autopar.runtime.commands import COMMANDS, command_named
from autopar.runtime.rank import Rank

# Functions of the driver whose first argument is the name of a command.
CALLERS = {"call", "call_all", "_call", "_train", "_training_request", "BatchRequest"}


def called_names() -> set[str]:
    """Texts that the driver passes to one of `CALLERS`."""
    names = set()
    for path in Path(autopar.api.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
            if name in CALLERS:
                names.add(node.args[0].value)
    return names


def test_the_table_has_the_names_that_the_driver_calls() -> None:
    assert called_names() == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_method_of_a_rank(name: str) -> None:
    assert callable(getattr(Rank, name))


def test_steps_borrow_their_inputs() -> None:
    assert all(command.borrows_inputs for command in COMMANDS.values() if command.is_step)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AssertionError, match="'restart' is no command of a rank"):
        command_named("restart")

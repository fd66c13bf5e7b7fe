"""The status of a long call: when it is shown, as which lines, and who shows it."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from io import StringIO

import pytest
from rich.console import Console

from autopar.ir import status
from autopar.ir.status import CURRENT, Status, doing, showing_status

THREAD = "autopar status"


def waits(*steps: Callable[[], object]) -> Callable[[float], bool]:
    """A wait that takes no time: each call does the next step, and the last one is followed by the end of the call."""
    left: Iterator[Callable[[], object]] = iter(steps)
    asked: list[float] = []

    def wait(seconds: float) -> bool:
        asked.append(seconds)
        assert seconds == (3.0 if len(asked) == 1 else 10.0)
        step = next(left, None)
        if step is not None:
            step()
        return step is None

    return wait


@pytest.fixture(autouse=True)
def usual_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "DELAY_SECONDS", 3.0)


def test_a_call_that_ends_within_the_delay_shows_nothing() -> None:
    out = StringIO()
    for interactive in (False, True):
        console = Console(file=out, force_terminal=interactive, force_interactive=interactive)
        Status(console, "tracing net", waits()).run()
    assert out.getvalue() == ""


def test_lines_are_printed_where_a_line_cannot_be_updated() -> None:
    """A text that has not changed is not printed again."""
    out = StringIO()
    long = "searching meshes: 3 of 57 done, now pp 4 × tp 1 × dp 2, [a] text that is wider than the console"
    shown = Status(Console(file=out, width=40), "tracing net", None)
    shown.wait = waits(lambda: None, lambda: None, lambda: shown.update(long), lambda: None)
    shown.run()
    assert out.getvalue() == f"autopar: tracing net (3 s)\nautopar: {long} (23 s)\n"


def test_a_terminal_has_one_line_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning is printed above it."""
    out = StringIO()
    console = Console(file=out, force_terminal=True, force_interactive=True, width=60)
    shown = Status(console, "tracing net", waits(lambda: None))
    shown.run()
    assert shown.bar is not None
    monkeypatch.setattr(warnings, "showwarning", lambda message, *rest: console.print(message))
    with shown.warnings_above():
        warnings.warn("a warning", stacklevel=1)
    shown.update("searching meshes: 3 of 57 done")
    shown.bar.stop()
    erased = "\x1b[2K"
    assert re.search(f"tracing net .*0:00:03.*{re.escape(erased)}a warning\n.*3 of 57 done", out.getvalue(), re.DOTALL)
    assert out.getvalue().rstrip().endswith(erased)


def test_calls_within_a_call_change_its_text() -> None:
    doing("nothing is shown")
    with showing_status("outer"):
        first = CURRENT.get()
        assert first is not None and first.text == "outer"
        with showing_status("inner"):
            assert CURRENT.get() is first and first.text == "inner"
        doing("last")
        assert first.text == "last"
    assert CURRENT.get() is None


def test_an_interrupt_ends_the_thread() -> None:
    with pytest.raises(KeyboardInterrupt), showing_status("tracing net"):
        assert THREAD in {thread.name for thread in threading.enumerate()}
        raise KeyboardInterrupt
    assert THREAD not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("variables", "quiet"),
    [
        ({}, False),
        ({"RANK": "0", "SLURM_PROCID": "3"}, False),
        ({"RANK": "1"}, True),
        ({"SLURM_PROCID": "1"}, True),
        ({"AUTOPAR_QUIET": "1"}, True),
    ],
    ids=str,
)
def test_the_first_process_shows_it_unless_it_is_quiet(
    variables: dict[str, str], quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "SLURM_PROCID", "AUTOPAR_QUIET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with showing_status("tracing net"):
        shown = CURRENT.get()
        assert shown is not None and shown.console.quiet == quiet
        assert (THREAD in {thread.name for thread in threading.enumerate()}) != quiet

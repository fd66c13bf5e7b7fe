"""Messages that pages quote are those of the package: each fixed part stands in one of its texts."""

from __future__ import annotations

import ast
import builtins
import re
from functools import cache
from pathlib import Path

import pytest

from autopar import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
KIND = re.compile(r"(\w+(?:Error|Warning)): ")
LIMITS = re.findall(r"`((?:\w+Error|\w+Warning): [^`]+)`", (ROOT / "docs" / "limits.md").read_text())
NAMED = re.findall(r"`(\w+(?:Error|Warning))`", PAGE + (ROOT / "docs" / "limits.md").read_text())
TELLING = 20  # characters that the fixed parts of a quoted message have at least
VARIABLE = "…"  # stands for names and numbers


@cache
def texts() -> frozenset[str]:
    """Literal texts of the package, an f-string's between its values, each on one line."""
    found: set[str] = set()
    for path in (ROOT / "autopar").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(" ".join(node.value.split()))
    return frozenset(found)


def fixed_parts(message: str) -> list[str]:
    """Parts of a quoted message between names and numbers."""
    parts = " ".join(KIND.sub("", message, count=1).split()).split(VARIABLE)
    return [part.strip(" .") for part in parts if re.search(r"\w", part)]


def missing(message: str) -> list[str]:
    """Fixed parts of a quoted message that no text of the package has."""
    return [part for part in fixed_parts(message) if not any(part in text for text in texts())]


@pytest.mark.parametrize("message", [*QUOTED, *LIMITS])
def test_the_package_has_every_quoted_message(message: str) -> None:
    assert missing(message) == []


def test_quoted_messages_tell_one_from_another() -> None:
    assert len(QUOTED) >= 25 and len(set(QUOTED)) == len(QUOTED)
    assert [message for message in QUOTED if sum(map(len, fixed_parts(message))) < TELLING] == []


def test_pages_name_errors_that_exist() -> None:
    kinds = {*NAMED, *(match[1] for message in (*QUOTED, *LIMITS) if (match := KIND.match(message)))}
    assert len(kinds) > 10
    assert {kind for kind in kinds if not hasattr(errors, kind) and not hasattr(builtins, kind)} == set()


def test_a_message_that_the_package_lacks_is_found() -> None:
    assert missing("UsageError: … has no model named … (… known).") == []
    assert missing("UsageError: … has no such model as … (… known).") == ["has no such model as"]

"""Parser of the constraints in ``--why-not``, which are validated like the flags of ``autopar plan``."""

from __future__ import annotations

from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from autopar.errors import UsageError, suggest
from autopar.tools.cli.flags import PlanFlags, tensor_sizes

# Hardware is the plan's, pins name stages of one mesh, and no answer times operations.
NOT_ASKED = {"hardware", "pin", "measure_seconds"}
KINDS = {int: "a whole number", str: "a text"}


def parse_constraints(text: str) -> dict[str, Any]:
    """Keyword arguments of `autopar.plan` in a text such as ``pp=2,tp=2``.

    Raises:
        UsageError: no NAME=VALUE, an unknown name (with a near match), a value of the wrong type, or two values for one
            name.
    """
    hints = {name: hint for name, hint in get_type_hints(PlanFlags).items() if name not in NOT_ASKED}
    given: dict[str, Any] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        name = name.removeprefix("--").replace("-", "_")
        if not equals or not name or not value:
            raise UsageError(f"Cannot read --why-not {text!r}. Write NAME=VALUE[,NAME=VALUE ...], such as pp=2,tp=2.")
        if name not in hints:
            hint = suggest(name, hints, cutoff=0.5)
            raise UsageError(f"--why-not {text}: unknown constraint {name!r}.{hint} Known: {', '.join(hints)}.")
        try:
            read = tensor_sizes(value) if name == "tp" else TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            kind = next(words for kind, words in KINDS.items() if hints[name] == kind | None)
            raise UsageError(f"--why-not {text}: {name}={value!r} is not {kind}.") from error
        if given.setdefault(name, read) != read:
            raise UsageError(f"--why-not {text} gives {name} two values, {given[name]} and {read}. Give one.")
    return given

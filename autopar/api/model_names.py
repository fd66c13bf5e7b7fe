"""Names of timm's and torchvision's models, read from the libraries' sources: to import them takes seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from autopar.errors import UsageError, suggest

MODEL_NAMES = "A model is a timm name, torchvision:NAME, or package.module:factory."

# The name of a model in its library's source: in the decorator, or that of the function below all decorators.
REGISTERED: Mapping[str, re.Pattern[str]] = {
    "timm": re.compile(r"^@register_model()\n(?:@.*\n)*def (\w+)", re.MULTILINE),
    "torchvision": re.compile(r'^@register_model\((?:name="(\w+)")?\)\n(?:[@ )].*\n)*def (\w+)', re.MULTILINE),
}


def known_names(library: str) -> set[str]:
    """Names of a library's models; none if it is not installed."""
    found = (REGISTERED[library].findall(source) for source in sources(library))
    return {named or function for pairs in found for named, function in pairs}


def check_known(full_name: str) -> None:
    """Refuse a model's name that is nowhere in its library's sources. Any other one passes: to build it tells.

    Raises:
        UsageError: there is no such name, or the library is not installed.
    """
    first, colon, rest = full_name.partition(":")
    if colon and first not in REGISTERED:  # a factory of the user's
        return
    library, name = (first, rest) if colon and first != "timm" else ("timm", full_name)
    if find_spec(library) is None:
        raise missing_library(f"Model {full_name!r}", library)
    texts = sources(library)
    word = re.compile(rf"\b{re.escape(name.split('.')[0])}\b")  # of timm's, without the tag of its weights
    if texts and not any(word.search(text) for text in texts):
        raise unknown_model(name, sorted(known_names(library)), library)


def sources(library: str) -> list[str]:
    """Texts of the files that define a library's models."""
    spec = find_spec(library)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return [file.read_text(encoding="utf-8") for folder in folders for file in Path(folder, "models").rglob("*.py")]


def unknown_model(name: str, known: list[str], where: str) -> UsageError:
    """The error for an unknown model name."""
    return UsageError(
        f"{where} has no model named {name!r} ({len(known)} known).{suggest(name, known, 3)} {MODEL_NAMES}"
    )


def missing_library(what: str, package: str) -> UsageError:
    """The error for a library that the user's object needs and that is not installed."""
    return UsageError(f"{what} needs {package}: pip install 'autopar[vision]'.")

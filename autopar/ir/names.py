"""Names of operations, values and modules: dotted paths, each unique in a graph."""

from __future__ import annotations

from collections.abc import Container


def unused_name(name: str, taken: Container[str]) -> str:
    """The name, with a number where it is taken: ``relu``, ``relu_1``, ``relu_2``."""
    unique, count = name, 0
    while unique in taken:
        count += 1
        unique = f"{name}_{count}"
    return unique


def inside(path: str, module: str) -> bool:
    """Whether a path is the module or lies in it."""
    return path == module or path.startswith(module + ".")

"""Rooms of the package, their layers, and the imports of each file."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "autopar"
# Room -> layer. A module imports its own room and lower layers only, so the stages of layer 4 never import each other.
# "autopar" is the package itself, with the public names.
LAYERS = {
    "errors": 0,
    "ir": 1,
    "ops": 2, "schedule": 2,
    "sharding": 3,
    "trace": 4, "cost": 4, "solve": 4, "codegen": 4, "runtime": 4,
    "measure": 5,
    "api": 6,
    "train": 7,
    "integrations": 8,
    "autopar": 9,
    "tools": 10,
    "__main__": 11,
}  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    """Room of a file: ``trace`` for autopar/trace/convert.py, ``autopar`` for autopar/__init__.py."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "autopar" if first == "__init__" else first


def module_name(path: Path) -> str:
    """``autopar.trace`` for autopar/trace/__init__.py, ``autopar.trace.lower`` for autopar/trace/lower.py."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names that a file imports, and names such as ``torch.x`` that it uses as attributes."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
    return frozenset(names)

"""The layering of docs/architecture.md, read from the source."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "autopar"

# A module imports lower layers only; those of layer 4 do not know each other.
LAYERS = {
    "errors": 0, "copying": 0, "collectives": 0, "patch_convolution": 0, "philox_kernel": 0, "accumulate_kernel": 0,
    "ir": 1, "pytree": 1, "cost_file": 1, "counter_random": 1, "collective_linear": 1, "accumulating_linear": 1,
    "rules": 2, "shards": 2, "operators": 2, "hardware": 2, "schedule": 2,
    "regions": 3,
    "trace": 4, "profile": 4, "solve": 4, "codegen": 4, "runtime": 4,
}  # fmt: skip
TOP = 5  # everything else: the API, the command line, and what they are made of

# Library -> who may import it.
OWNERS = {
    "torch.fx": {"trace", "codegen"},
    "torch.distributed": {"bench", "profiling", "runtime"},
    "pulp": {"solve"},
    "highspy": {"solve"},
    "time": {"bench", "measuring", "profile", "profiling", "runtime"},
    "multiprocessing": {"runtime"},
    "subprocess": {"bench", "processes", "runtime"},
    "cloudpickle": {"runtime"},
    "networkx": {"ir", "profile", "solve"},
    "typer": {"cli"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def stage(path: Path) -> str:
    """``trace`` for autopar/trace/convert.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, and ``torch.x`` where it is used as an attribute."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return found


def uses(path: Path, library: str) -> bool:
    return any(name == library or name.startswith(f"{library}.") for name in imports(path))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    own = stage(path)
    if own == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "autopar" or len(parts) == 1 or parts[1] == own:
            continue
        layer, other = LAYERS.get(own, TOP), LAYERS.get(parts[1], TOP)
        assert other < layer or layer == other == TOP, f"{own} (layer {layer}) imports {name} (layer {other})"


@pytest.mark.parametrize("library", OWNERS)
def test_libraries_have_owners(library: str) -> None:
    users = {stage(path) for path in FILES if uses(path, library)}
    assert users <= OWNERS[library], f"{library} is imported by {sorted(users - OWNERS[library])}"


def test_reading_a_cost_model_needs_no_torch() -> None:
    for path in (PACKAGE / "__init__.py", PACKAGE / "hardware.py", PACKAGE / "errors.py"):
        assert not uses(path, "torch"), f"{path.name} imports torch"


def test_the_command_line_uses_the_public_side_of_the_stages() -> None:
    for path in FILES:
        for name in imports(path) if stage(path) not in LAYERS else ():
            parts = name.split(".")
            assert parts[0] != "autopar" or not any(p.startswith("_") and p != "__version__" for p in parts), (
                f"{path}: {name}"
            )

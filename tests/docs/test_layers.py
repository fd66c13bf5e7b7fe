"""The layering of docs/architecture.md, read from the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import networkx as nx
import pytest
from support.layers import FILES, LAYERS, PACKAGE, imports, module_name, room

# Library -> who may import it.
OWNERS = {
    "torch.fx": {"trace", "codegen"},
    "torch.distributed": {"measure", "runtime", "tools"},
    "pulp": {"solve"},
    "highspy": {"solve"},
    "time": {"cost", "measure", "runtime", "solve", "tools", "train"},
    "multiprocessing": {"runtime"},
    "subprocess": {"measure", "runtime", "tools"},
    "cloudpickle": {"runtime"},
    "networkx": {"cost", "ir", "solve"},
    "typer": {"tools"},
}


def uses(path: Path, library: str) -> bool:
    return any(name == library or name.startswith(f"{library}.") for name in imports(path))


def test_nothing_lies_loose() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", "errors"}
    assert {room(path) for path in FILES} == set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    own = room(path)
    for name in imports(path):
        first, *rest = name.split(".")
        if first != "autopar" or rest == ["__version__"]:
            continue
        other = rest[0] if rest and rest[0] in LAYERS else "autopar"
        assert other == own or LAYERS[other] < LAYERS[own], f"{own} (layer {LAYERS[own]}) imports {name}"


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checkers count; that of the package's version does not."""
    modules = {module_name(path): path for path in FILES}
    graph = nx.DiGraph()
    for module, path in modules.items():
        for name in imports(path) - {"autopar.__version__"}:
            source = name if name in modules else name.rpartition(".")[0]
            if source in modules and source != module:
                graph.add_edge(module, source)
    assert graph.number_of_edges() > 1000
    assert [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []


@pytest.mark.parametrize("library", OWNERS)
def test_libraries_have_owners(library: str) -> None:
    users = {room(path) for path in FILES if uses(path, library)}
    assert users <= OWNERS[library], f"{library} is imported by {sorted(users - OWNERS[library])}"


def test_reading_a_cost_model_needs_no_torch() -> None:
    for path in (*PACKAGE.glob("*.py"), PACKAGE / "ir" / "hardware.py", *(PACKAGE / "cost" / "hardware").glob("*.py")):
        assert not uses(path, "torch"), f"{path.name} imports torch"


def test_the_command_line_uses_the_public_side_of_the_stages() -> None:
    for path in FILES:
        for name in imports(path) if room(path) == "tools" else ():
            parts = name.split(".")
            assert parts[0] != "autopar" or not any(p.startswith("_") and p != "__version__" for p in parts), (
                f"{path}: {name}"
            )


def test_the_call_chain_names_files_that_exist() -> None:
    chain = ast.get_docstring(ast.parse((PACKAGE / "api" / "__init__.py").read_text())) or ""
    named = set(re.findall(r"\b[a-z]+(?:/[a-z_]+)+(?:\.py|/)", chain))
    assert {"api/parallelize.py", "trace/lower.py", "solve/search.py", "runtime/rank.py"} <= named
    assert not [name for name in named if not (PACKAGE / name).exists()]

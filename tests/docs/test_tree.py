"""The tree of the tests, as tests/conftest.py describes it, read from the source."""

from __future__ import annotations

from pathlib import Path

from support.layers import LAYERS, imports

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
FOLDERS = {"cli", "docs", "gpu", "integration", "support", "unit"}


def test_every_folder_of_units_is_a_room() -> None:
    folders = {path.parent.relative_to(TESTS) for path in FILES if path.parent != TESTS}
    assert {folder.parts[0] for folder in folders} == FOLDERS
    rooms = {folder.parts[1:] for folder in folders if folder.parts[0] == "unit"}
    assert rooms <= {(room,) for room in LAYERS}


def test_helpers_lie_in_support() -> None:
    helpers = {path.relative_to(TESTS) for path in FILES if not path.stem.startswith("test_")}
    assert {str(path) for path in helpers if path.parts[0] != "support"} == {"conftest.py"}
    assert not any(path.stem.startswith("test_") for path in (TESTS / "support").rglob("*.py"))


def test_tests_of_gpus_lie_apart() -> None:
    assert {path.parent.name for path in FILES if path.stem.startswith("test_gpu")} == {"gpu"}


def test_names_are_unique() -> None:
    """Pytest and pickles know a test module by its name alone."""
    names = [path.stem for path in FILES]
    assert sorted(names) == sorted(set(names))


def test_no_test_module_is_imported() -> None:
    modules = {path.stem for path in FILES if path.stem.startswith("test_")} | {"tests"}
    imported = {path.stem: modules & {part for name in imports(path) for part in name.split(".")} for path in FILES}
    assert {name: found for name, found in imported.items() if found} == {}

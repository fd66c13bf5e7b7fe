"""Types of the public names: a script of a user's has all of them, and none has a type that pyright does not know."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import autopar
import autopar.train

SCRIPT = Path(__file__).parents[1] / "support" / "typed_script.py"
# An internal type in a signature, which no user writes: of `ParallelModel` only its constructor has some. And methods
# of a module that a `PreparedModule` refuses.
INTERNAL = re.compile(
    r'is partially unknown\s+(Parameter|Return) type is "[\w |]+"$|^Type of base class|^No docstring|'
    r"^Ambiguous base class override"
)


@pytest.mark.parametrize("module", [autopar, autopar.train], ids=lambda module: module.__name__)
def test_the_strict_script_uses_every_public_name(module: ModuleType) -> None:
    text = SCRIPT.read_text().partition("FOLDER =")[2]
    used = {*re.findall(r"\w+", text)}
    assert {*module.__all__} - used == set()


def homes(module: ModuleType) -> set[str]:
    """Full names under which pyright lists a module's public names."""
    names = set()
    for name in module.__all__:
        found = getattr(module, name)
        home = getattr(found, "__module__", None) or module.__name__
        names |= {f"{module.__name__}.{name}", f"{home}.{getattr(found, '__name__', name)}"}
    return names


@pytest.mark.full  # half a minute of one core
def test_every_public_name_has_a_known_type(tmp_path: Path) -> None:
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent)) or shutil.which("pyright")
    assert pyright is not None
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(Path.home())}
    command = [pyright, "--verifytypes", "autopar", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    public = homes(autopar) | homes(autopar.train)
    listed = [one for one in symbols if any(f"{one['name']}.".startswith(f"{name}.") for name in public)]
    assert len(listed) > 500
    faults = {(one["name"], fault["message"].replace("\xa0", "")) for one in listed for fault in one["diagnostics"]}
    assert sorted(fault for fault in faults if not INTERNAL.search(fault[1])) == []

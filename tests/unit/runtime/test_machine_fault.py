"""Errors whose cause may be the machine point to ``autopar doctor``."""

from __future__ import annotations

import ast
import errno
from pathlib import Path

import pytest
from support.layers import FILES, PACKAGE
from torch._inductor.exc import CppCompileError  # not public, as all errors of torch's compiler

from autopar.runtime.launch.machine_fault import may_be_of_machine

# Begin of each message with the clause, by module. An error that doctor can explain belongs here.
EXPLAINED = {
    "measure/machine/launched.py": ["Rank … failed while measuring"],
    "measure/machine/measure.py": ["Nothing was measured in …", "Rank … failed while measuring"],
    "measure/regions/cache.py": ["Cannot keep measured times in"],
    "measure/regions/region_times.py": ["… What was measured before is kept"],
    "runtime/checkpoint/folder.py": ["Cannot copy the checkpoint in"],
    "runtime/checkpoint/save_load.py": ["……Make room, or choose another folder"],
    "runtime/comm/process_group.py": ["This build of torch has no NCCL", 'transport="symmetric" needs GPUs'],
    "runtime/launch/devices.py": [
        'backend="nccl" needs GPUs',
        "Rank … is number … of its node's",
        "devices=…, but this",
    ],
    "runtime/launch/environment.py": ["Rank … cannot reach", "Rank … did not meet the other"],
    "runtime/launch/failure_watch.py": ["autopar: no rank has said why"],
    "runtime/launch/fork_server.py": ["No worker was started: the fork server", "No worker was started: …. End"],
    "runtime/launch/loopback.py": ["No network interface of this system"],
    "runtime/launch/pool.py": ["… has no room for the tensors", "… … `", " `"],
    "runtime/launch/spmd.py": ["autopar: `"],
    "runtime/launch/start_exchange.py": ["Rank … cannot start", "rank … did not answer within"],
    "solve/backend.py": ["No integer-programming solver"],
}


def messages(path: Path) -> list[str]:
    """Texts with the clause, with … for each value but the clause."""
    found: list[str] = []
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "SEE_DOCTOR" in text else ():
        if not isinstance(node, ast.JoinedStr):
            continue
        names = [ast.unparse(part.value) for part in node.values if isinstance(part, ast.FormattedValue)]
        if "SEE_DOCTOR" in names:
            parts = [part.value if isinstance(part, ast.Constant) else clause(part) for part in node.values]
            found.append("".join(map(str, parts)))
    return found


def clause(part: ast.expr) -> str:
    assert isinstance(part, ast.FormattedValue)
    return "`autopar doctor`" if ast.unparse(part.value) == "SEE_DOCTOR" else "…"


def test_no_error_has_lost_the_clause() -> None:
    own = PACKAGE / "tools"
    shown = {str(path.relative_to(PACKAGE)): messages(path) for path in FILES if not path.is_relative_to(own)}
    shown = {name: texts for name, texts in shown.items() if texts}
    assert shown.keys() == EXPLAINED.keys()
    for name, beginnings in EXPLAINED.items():
        assert len(shown[name]) == len(beginnings), (name, shown[name])
        for beginning in beginnings:
            assert any(text.startswith(beginning) for text in shown[name]), (name, beginning, shown[name])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CppCompileError(["g++"], "no such instruction"), True),
        (OSError(errno.EMFILE, "Too many open files"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
        (ValueError("a loss function's own"), False),
    ],
    ids=["compiler", "files", "disk", "missing file", "user"],
)
def test_faults_of_the_machine(error: Exception, expected: bool) -> None:
    assert may_be_of_machine(error) == expected
    outer = RuntimeError("while the step ran")
    outer.__cause__ = error
    assert may_be_of_machine(outer) == expected

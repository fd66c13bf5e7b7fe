"""Runs `training_worker` once over two and once over four processes, and reads what it found."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.effort import only
from support.forks import SCRIPTS, run_ranks
from support.hardware import slow_compute
from support.training_worker import CASES

WORLDS = (2, 4)


def train_all(folder: Path) -> Mapping[tuple[str, str], list[Any]]:
    """What each rank found in each case under each mesh.

    Args:
        folder: one for all processes of a session; the first that asks runs the cases, others wait.
    """
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        failures = [] if list(folder.glob("*.json")) else train(folder)
    found: dict[tuple[str, str], list[Any]] = {}
    for file in sorted(folder.glob("*.json")):
        name, mesh, _ = file.stem.split("+")
        data = json.loads(file.read_text())
        found.setdefault((name, mesh), []).append(data)
        failures += [f"{file.stem}: {data['error']}"] if data["error"] else []
    assert not failures, "\n".join(failures)
    return found


def train(folder: Path) -> list[str]:
    """Run all cases; what went wrong with each number of ranks."""
    worker, hardware = SCRIPTS / "training_worker.py", str(slow_compute(folder))
    failures = []
    for ranks in WORLDS:
        done = run_ranks(ranks, worker, str(folder), hardware)
        if done.returncode:
            failures.append(done.stderr[-3000:])
    return failures


def cases(kind: str) -> list[Any]:
    """Names and meshes of the cases with averages (``ema``), with a schedule alone, or with neither (``optimizer``)."""
    kinds = {name: "ema" if c.ema else "schedule" if c.schedule else "optimizer" for name, c in CASES.items()}
    cells = {
        (name, "-".join(map(str, mesh))): mesh not in case.later
        for name, case in CASES.items() if kinds[name] == kind for mesh in case.meshes
    }  # fmt: skip
    return only([cell for cell, kept in cells.items() if kept], cells)


def assert_equals_one_device(found: list[Any], quantities: set[str]) -> None:
    """Every quantity of every rank within its tolerance."""
    for rank, data in enumerate(found):
        assert data["worst"].keys() == {"learning rates", "loss", "norm", "weights"} | quantities
        for quantity, excess in data["worst"].items():
            assert excess <= 1, f"rank {rank}: {quantity} is {excess:.2f} times its tolerance off"

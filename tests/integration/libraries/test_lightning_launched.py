"""Fabric and the Trainer under torchrun: each process is a rank, and gets its part of the data."""

from __future__ import annotations

from pathlib import Path

from support.forks import SCRIPTS, run_ranks


def test_every_mesh_has_the_numbers_of_one_process(tmp_path: Path) -> None:
    done = run_ranks(2, SCRIPTS / "lightning_worker.py", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") == 2, done.stdout

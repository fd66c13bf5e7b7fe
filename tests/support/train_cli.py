"""``autopar train`` in a process, and the files that it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

import autopar

ROOT = Path(autopar.__file__).parents[1]
TINY = ["vit_tiny_patch16_224", "--model-kwargs", "depth=2", "patch_size=8", "embed_dim=48", "num_heads=3"]
MAIN = "from autopar.tools.cli.app import main; main()"
# Few images, and every random augmentation.
SHORT = [
    *TINY, "--data", "digits", "--epochs", "2", "--batch-size", "32", "--train-num-samples", "256",
    "--val-num-samples", "99", "--shift", "2", "--reprob", "0.3", "--mixup", "0.4", "--cutmix", "1",
    "--smoothing", "0.1", "--warmup-epochs", "1", "--sched-on-updates", "--clip-grad", "1", "--microbatches", "2",
]  # fmt: skip


def start(folder: Path, *args: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Process with the command in a new process group, as a shell starts it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, *(launcher or ("-c", MAIN)), *args]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """Output and errors of a process; an AssertionError with all its stacks if it runs longer than ``seconds``."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for each in [*psutil.Process(process.pid).children(recursive=True)[::-1], process]:
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGABRT)  # faulthandler prints the stacks
        raise AssertionError("\n".join([f"Not ended after {seconds} s.", *process.communicate(timeout=60)])) from None


def records(path: Path) -> list[dict]:
    """Lines of a JSON log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    """Loss of each step of a run."""
    return [record["loss"] for record in records(folder / "steps.jsonl")]


def contents(folder: Path) -> dict[Path, bytes]:
    """Contents of every file in a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

"""Each example runs to its end as a user would start it, and shows what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_own_model() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "own_model.py"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert losses[-1] < 0.5 * losses[0]
    difference = re.search(r"largest difference between two devices and one: (\S+)", done.stdout)
    assert difference is not None and float(difference[1]) < 1e-5


def test_compare_meshes() -> None:
    script = str(EXAMPLES / "compare_meshes.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run(
        [*command, "test_vit", "--img-size", "160", "--batch", "4", "--steps", "1"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(pp \d × tp \d × dp \d) +\d+ +[\d.]+ ms +[\d.]+ ms +[\d.]+$", done.stdout, re.MULTILINE)
    assert rows == ["pp 1 × tp 1 × dp 2", "pp 2 × tp 1 × dp 1", "pp 1 × tp 2 × dp 1"], done.stdout


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    assert all(f'"{path.name}"' in tested for path in EXAMPLES.glob("*.py"))

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


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    assert all(f'"{path.name}"' in tested for path in EXAMPLES.glob("*.py"))

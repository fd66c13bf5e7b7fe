"""Kernels that make batches of images."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
def test_interpreted_kernels_equal_pillow() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "support.interpreted_images"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]

"""Settings of the whole suite.

- ``support/``: helpers of several test modules, listed in its ``__init__``; no test module imports another.
- ``unit/<room>/``: the rooms of the package; no ranks in other processes.
- ``integration/``: real processes. ``cli/``: the command line. ``docs/``: README, examples, layers, this tree.
- ``gpu/``: left out where there is no CUDA; ``pytest tests/gpu --collect-only`` lists them anywhere.
"""

import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from support import effort, traces

from autopar.ir import status

# As many threads as a worker process gets on 2 cores, so that sums have one order and agree to the last bit.
# Otherwise AdamW would turn the rounding noise of a zero gradient (the key bias of attention) into a full step.
torch.set_num_threads(1)

# Empty: earlier measurements on this machine must not change plans. Processes that tests start inherit it.
os.environ["AUTOPAR_CACHE"] = tempfile.mkdtemp(prefix="autopar-test-cache-")

# Plans by default measure nothing; tests that measure say for how long. Processes that tests start inherit it.
os.environ["AUTOPAR_MEASURE_SECONDS"] = "0"

# A status that says what a long plan does would be part of what commands print, on busy machines alone.
status.DELAY_SECONDS = threading.TIMEOUT_MAX

# The cache of compiled regions outlives a run.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(sys.prefix) / "inductor"))

# Fast runs and CI draw equal examples every time, so that changes are comparable; other full runs draw new ones.
# No example has a deadline: on a busy machine the first ones take longer.
settings.register_profile("fast", derandomize=True, max_examples=20, deadline=None)
settings.register_profile("full", derandomize=bool(os.environ.get("CI")), deadline=None)

collect_ignore = [] if torch.cuda.is_available() else ["gpu"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="run everything: whole matrices, and all random examples that tests ask for"
    )
    parser.addoption("--renew-plans", action="store_true", help="write the files of pinned_plans/ from today's plans")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # not one of xdist's workers, which inherit it
        os.environ[traces.VARIABLE] = tempfile.mkdtemp(prefix="autopar-test-traces-")
    traces.share()
    if config.getoption("full"):
        os.environ[effort.VARIABLE] = "1"
    settings.load_profile("full" if effort.full() else "fast")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[traces.VARIABLE])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that are marked full, except in a full run."""
    later = [item for item in items if item.get_closest_marker("full")] if not effort.full() else []
    if later:
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folder that is the working directory of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path

"""Settings of the whole suite."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# As many as a worker process gets on 2 cores: sums are then ordered alike, and numbers agree to the last bit.
# Parameters whose true gradient is zero (the key bias of attention) would otherwise carry rounding noise through AdamW.
torch.set_num_threads(1)

# What was measured on this machine before must not decide on plans here; processes that tests start inherit it.
os.environ["AUTOPAR_CACHE"] = tempfile.mkdtemp(prefix="autopar-test-cache-")

# New examples at every run find more; a change is judged by the same ones each time.
settings.register_profile("CI", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("CI")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], list[Any]]:
    """For each case and mesh of `training_worker`, what each rank found; it runs once, for all files that ask."""
    from trained import train_all

    return train_all(Path(tmp_path_factory.mktemp("training")))

"""Cost models that make the planner do what a test is about."""

from __future__ import annotations

import re
from pathlib import Path

from autopar.cost.hardware.load import cost_model_dir


def slow_compute(folder: Path) -> Path:
    """A cost model in which moving data costs nothing, so that the solver splits whatever can be split."""
    text = (cost_model_dir() / "cpu-generic.toml").read_text()
    head, *tables = re.split(r"(?m)^(?=\[(?:link|collective)\])", text)
    changed = "".join(tables)
    changed = re.sub(r"(latency = \{ value = )[\d.e-]+", r"\g<1>0", changed, count=len(tables))
    bandwidth = r'(bandwidth = \{ value = )[\d.e-]+(, unit = )"[^"]+"'
    changed = re.sub(bandwidth, r'\g<1>1000\2"PB/s"', changed, count=len(tables))
    file = folder / "slow-compute.toml"
    file.write_text(head + changed)
    return file

"""A cost model that makes the planner choose tensor parallelism."""

from __future__ import annotations

import re
from pathlib import Path

from autopar.cost.hardware.load import cost_model_dir


def slow_compute(folder: Path) -> Path:
    """File of a cost model with free communication, under which the solver shards every operation that it can."""
    text = (cost_model_dir() / "cpu-generic.toml").read_text()
    head, *tables = re.split(r"(?m)^(?=\[(?:link|collective)\])", text)
    changed = "".join(tables)
    changed = re.sub(r"(latency = \{ value = )[\d.e-]+", r"\g<1>0", changed, count=len(tables))
    bandwidth = r'(bandwidth = \{ value = )[\d.e-]+(, unit = )"[^"]+"'
    changed = re.sub(bandwidth, r'\g<1>1000\2"PB/s"', changed, count=len(tables))
    file = folder / "slow-compute.toml"
    file.write_text(head + changed)
    return file

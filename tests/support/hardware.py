"""Cost models made from shipped ones: with free communication, and with another network."""

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


def with_network(folder: Path, name: str, base: str, network: str) -> Path:
    """File of a shipped cost model with another network.

    Args:
        base: name of the shipped cost model.
        network: fields of ``[network]``, such as ``ports = 1, bandwidth = 12.5 GB/s, leaf.oversubscription = 8 1``.
    """
    lines = []
    for field in network.split(", "):
        key, value = field.split(" = ")
        number, _, unit = value.partition(" ")
        sourced = (
            f'{{ value = {number}, unit = "{unit}", error = 0.3, date = 2026-11-26, source = "assumption: a test" }}'
        )
        lines.append(f"{key} = {sourced if unit else number}")
    text = re.sub(r"(?ms)^\[network\].*?(?=^\[|\Z)", "", (cost_model_dir() / f"{base}.toml").read_text())
    file = folder / f"{name}.toml"
    file.write_text("\n".join([text.replace(f'"{base}"', f'"{name}"', 1), "[network]", *lines, ""]))
    return file

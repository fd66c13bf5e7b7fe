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
    text = re.sub(r"(?ms)^\[network\].*?(?=^\[|\Z)", "", (cost_model_dir() / f"{base}.toml").read_text())
    file = folder / f"{name}.toml"
    file.write_text(text.replace(f'"{base}"', f'"{name}"', 1) + network_table(network))
    return file


def network_table(network: str) -> str:
    """Table ``[network]`` of a cost model; argument as in `with_network`."""
    lines = ["", "[network]"]
    for field in network.split(", "):
        key, value = field.split(" = ")
        number, _, unit = value.partition(" ")
        about = f'unit = "{unit}", error = 0.3, date = 2026-11-26, source = "assumption: an example"'
        lines.append(f"{key} = {{ value = {number}, {about} }}" if unit else f"{key} = {number}")
    return "\n".join([*lines, ""])


def nodes_of_two(folder: Path) -> Path:
    """File of a cost model of nodes of two devices under which the solver shards every operation that it can."""
    file = slow_compute(folder)
    text = re.sub(r"(?m)^devices_per_node = .*", "devices_per_node = 2", file.read_text())
    file.write_text(text + network_table("ports = 1, bandwidth = 1000 PB/s, latency = 0 us"))
    return file

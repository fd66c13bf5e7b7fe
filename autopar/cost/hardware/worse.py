"""The machine with the numbers of one part of a step worse by their errors, which shows how far they move a step.

Needs no torch. A number's error is the relative one that its file gives; a rate is divided by 1 + error, a time is
multiplied. Numbers of one part are worse together, since one fit or one assumption gave them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import log2
from types import MappingProxyType

from autopar.cost.hardware.network import LEVELS
from autopar.ir.hardware import COMPUTE_KINDS, Efficiency, Hardware, Launch, Link
from autopar.ir.network import Network, Port

# By how much a collective may be off when a group has twice as many ranks as were measured: on 4 x NVIDIA H200
# all-reduces took 6 to 17 % less than the constants of 2 ranks say (`Hardware.node_link`).
DOUBLED_GROUP_ERROR = 0.17
# Error of memory kernels besides the errors of their numbers, since torch may fuse in another way than is priced: found
# from steps that were predicted before they were measured (docs/benchmarks.md).
FUSION_ERROR = 0.36


def largest_error(hardware: Hardware, *paths: str) -> float:
    """The largest error among the numbers of these paths, and in tables of these paths; 0 if there are none."""
    return max((e.error for path, e in hardware.errors.items() if is_under(path, paths)), default=0.0)


def is_measured(hardware: Hardware, part: str) -> bool:
    """Whether a measurement is behind a part."""
    return any(e.is_measured for path, e in hardware.errors.items() if is_under(path, paths_behind(hardware, part)))


def is_under(path: str, tables: tuple[str, ...]) -> bool:
    """Whether a path is one of ``tables``, or in one of them."""
    return any(path == table or path.startswith(f"{table}.") for table in tables)


def paths_behind(hardware: Hardware, part: str) -> tuple[str, ...]:
    """Tables and numbers of a cost model file that a part of a step is priced by."""
    if part in OTHER_PARTS:
        return OTHER_PARTS[part][1]
    kind, dtype = part.split()
    return (f"efficiency.{kind}.{dtype}",) if (kind, dtype) in hardware.dtype_efficiency else (f"efficiency.{kind}",)


def worse(hardware: Hardware, part: str) -> Hardware:
    """The machine with the numbers behind a part worse by their errors.

    Args:
        part: one of `OTHER_PARTS`, or kind and dtype of operations, such as ``matmul bfloat16``.
    """
    if part in OTHER_PARTS:
        return OTHER_PARTS[part][0](hardware)
    kind, dtype = part.split()
    assert kind in COMPUTE_KINDS, part
    curve = hardware.dtype_efficiency.get((kind, dtype)) or hardware.efficiency[kind]
    (path,) = paths_behind(hardware, part)
    known = {**hardware.dtype_efficiency, (kind, dtype): worse_curve(hardware, curve, path, f"peak_flops.{dtype}")}
    return replace(hardware, dtype_efficiency=known)


def worse_curve(hardware: Hardware, curve: Efficiency, path: str, peak: str) -> Efficiency:
    """An efficiency worse by its errors; peak and asymptote are one fit."""
    return Efficiency(
        curve.asymptote / (1 + largest_error(hardware, peak, f"{path}.asymptote")),
        curve.half_flops * (1 + largest_error(hardware, f"{path}.half")),
        curve.bytes_per_second / (1 + largest_error(hardware, f"{path}.bandwidth")),
        None if curve.backward is None else worse_curve(hardware, curve.backward, f"{path}.backward", peak),
    )


def worse_memory(hardware: Hardware) -> Hardware:
    error = max(FUSION_ERROR, largest_error(hardware, "memory.bandwidth", "memory.efficiency"))
    half = hardware.memory_half_bytes * (1 + largest_error(hardware, "memory.half"))
    return replace(hardware, memory_efficiency=hardware.memory_efficiency / (1 + error), memory_half_bytes=half)


def worse_launch(hardware: Hardware) -> Hardware:
    launch = hardware.launch
    seconds = {name: getattr(launch, name) * (1 + largest_error(hardware, f"launch.{name}")) for name in vars(launch)}
    return replace(hardware, launch=Launch(**seconds))


def worse_update(hardware: Hardware) -> Hardware:
    error = largest_error(hardware, "optimizer")
    return replace(hardware, optimizer_bytes_per_second=hardware.optimizer_bytes_per_second / (1 + error))


def worse_link(hardware: Hardware, link: Link, path: str) -> Link:
    latency, bandwidth = (largest_error(hardware, f"{path}.{name}") for name in ("latency", "bandwidth"))
    return Link(link.latency_seconds * (1 + latency), link.bytes_per_second / (1 + bandwidth))


def worse_links(hardware: Hardware) -> Hardware:
    """Links within a node; a group of more ranks than were measured is further off."""
    link, collective = hardware.link, hardware.collective
    groups = {
        (kind, ranks): worse_link(hardware, group, f"collective.{kind}.{ranks}")
        for (kind, ranks), group in hardware.group_collective.items()
    }
    for kind in {kind for kind, _ in groups}:
        most = max(ranks for known, ranks in groups if known == kind)
        if most < hardware.devices_per_node:
            slower, doublings = groups[kind, most], log2(hardware.devices_per_node / most)
            rate = slower.bytes_per_second / (1 + DOUBLED_GROUP_ERROR * doublings)
            groups[kind, hardware.devices_per_node] = replace(slower, bytes_per_second=rate)
    return replace(
        hardware,
        link=None if link is None else worse_link(hardware, link, "link"),
        collective=None if collective is None else worse_link(hardware, collective, "collective"),
        group_collective=groups,
    )


def worse_port(hardware: Hardware, port: Port, path: str) -> Port:
    latency, bandwidth, hop = (largest_error(hardware, f"{path}.{n}") for n in ("latency", "bandwidth", "hop"))
    return Port(
        port.latency_seconds * (1 + latency), port.bytes_per_second / (1 + bandwidth), port.hop_seconds * (1 + hop)
    )


def worse_network(hardware: Hardware) -> Hardware:
    network = hardware.network
    if network is None:
        return hardware
    oversubscription, latency = (
        largest_error(hardware, *(f"network.{level}.{name}" for level in LEVELS))
        for name in ("oversubscription", "latency")
    )
    return replace(
        hardware,
        network=Network(
            worse_port(hardware, network.port, "network"),
            network.ports,
            {kind: worse_port(hardware, p, f"network.{kind}") for kind, p in network.collectives.items()},
            tuple(
                replace(
                    level,
                    oversubscription=level.oversubscription * (1 + oversubscription),
                    latency_seconds=level.latency_seconds * (1 + latency),
                )
                for level in network.levels
            ),
        ),
    )


def worse_overlap(hardware: Hardware) -> Hardware:
    contention, path = hardware.replica_contention, "overlap.replica_"
    latency, bandwidth = (largest_error(hardware, f"{path}{name}") for name in ("latency", "bandwidth"))
    slower = Link(contention.latency_seconds * (1 + latency), contention.bytes_per_second / (1 + bandwidth))
    hidden = hardware.overlap_efficiency / (1 + largest_error(hardware, "overlap.layers"))
    return replace(hardware, replica_contention=slower, overlap_efficiency=hidden)


Worse = Callable[[Hardware], Hardware]
# Parts of a step other than kinds of operations: the machine with their numbers worse, and paths of these numbers.
OTHER_PARTS: Mapping[str, tuple[Worse, tuple[str, ...]]] = MappingProxyType(
    {
        "memory": (worse_memory, ("memory.bandwidth", "memory.efficiency", "memory.half")),
        "launch": (worse_launch, ("launch",)),
        "update": (worse_update, ("optimizer",)),
        "links": (worse_links, ("link", "collective")),
        "network": (worse_network, ("network",)),
        "overlap": (worse_overlap, ("overlap",)),
    }
)

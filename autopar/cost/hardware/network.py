"""Reads ``[link]`` and ``[network]`` of a cost model: connections inside a node and between nodes.

Numbers have unit, source, date and error as all others; here they are shortened::

    [link]
    bandwidth = 12 GB/s    # of a message, one direction
    latency = 30 us
    ports = 2              # messages that a node carries at that bandwidth at the same time; by default any number
    peer_access = false    # devices cannot reach each other's memory; by default they can

    [network]
    bandwidth = 50 GB/s    # of a port, one direction
    latency = 35 us        # of a message, or of a collective over two nodes
    hop = 4 us             # that each further hop of a ring or tree adds to a collective; by default nothing
    ports = 8              # of a node, which its ranks share; by default one for each device

    [network.all-reduce]   # or another kind of collective, by default as [network]: what a port carries in it
    bandwidth = 46 GB/s
    latency = 40 us
    hop = 5 us             # by default that of [network]

    [network.rail]         # or [network.leaf], or none: nodes behind one layer of switches
    nodes = 32
    oversubscription = 2   # bandwidth of the group's ports by that of its uplinks
    latency = 38 us        # of what leaves the group

    [network.pod]          # groups of such groups

A node with one Ethernet card has ``ports = 1``. Behind a leaf switch are all ports of its nodes; a rail switch has the
ports of one number of all its nodes, so that traffic between ports of two numbers leaves the group.
"""

from __future__ import annotations

from math import inf
from typing import get_args

from autopar.cost.hardware.cost_file import Table
from autopar.ir.hardware import Link
from autopar.ir.network import CollectiveKind, Level, Network, Port

LEVELS = ("leaf", "rail", "pod")  # from small to large


def read_link(table: Table) -> Link:
    """Latency and bandwidth of a link."""
    return Link(table.number("latency", "seconds", zero=True), table.number("bandwidth", "bytes per second"))


def read_link_ports(table: Table) -> float:
    """Messages that a node carries at the link's bandwidth at the same time."""
    return table.whole("ports", 1) if table.has("ports") else inf


def read_peer_access(table: Table) -> bool:
    """Whether devices of a node reach each other's memory."""
    return table.flag("peer_access") if table.has("peer_access") else True


def read_network(table: Table) -> Network:
    """The network between nodes; raises HardwareError with file and field."""
    names = [name for name in LEVELS if table.has(name)]
    if "leaf" in names and "rail" in names:
        raise table.fail("rail", "contradicts network.leaf: ports of a node have one switch or several. Give one.")
    port = read_port(table, 0.0)
    network = Network(
        port=port,
        ports=table.whole("ports", 1) if table.has("ports") else inf,
        collectives={
            kind: read_kind_port(table.table(kind), port.hop_seconds)
            for kind in get_args(CollectiveKind)
            if table.has(kind)
        },
        levels=tuple(read_level(name, table.table(name)) for name in names),
    )
    for name, smaller, level in zip(names[1:], network.levels, network.levels[1:]):
        if level.nodes % smaller.nodes or level.nodes == smaller.nodes:
            raise table.table(name).fail(
                "nodes", f"is {level.nodes}; it must be a multiple of the {smaller.nodes} nodes of network.{names[0]}."
            )
    return network


def read_port(table: Table, hop_seconds: float) -> Port:
    """Latency, bandwidth and time of a hop of a port; ``hop_seconds`` where the table has none."""
    return Port(
        table.number("latency", "seconds", zero=True),
        table.number("bandwidth", "bytes per second"),
        table.number("hop", "seconds", zero=True) if table.has("hop") else hop_seconds,
    )


def read_kind_port(table: Table, hop_seconds: float) -> Port:
    """The port of one kind of collective."""
    port = read_port(table, hop_seconds)
    table.finish()
    return port


def read_level(name: str, table: Table) -> Level:
    """A group of nodes, of one of `LEVELS`."""
    level = Level(
        table.whole("nodes", 2),
        table.number("oversubscription", "ratio"),
        table.number("latency", "seconds", zero=True),
        rails=name == "rail",
    )
    if level.oversubscription < 1:
        raise table.fail("oversubscription", f"is {level.oversubscription:g}; it must be at least 1, full bisection.")
    table.finish()
    return level

"""The network between nodes: ports of a node, shared by its ranks, and switches above them, shared by nodes.

Ranks fill nodes in order. A rank uses one port at most. Ranks of a node that send at the same time share its ports, and
all groups of a mesh axis communicate at the same time. So eight groups with one member on each node and one group with
eight members on each node have the same bandwidth for the bytes that leave a node.

Source: NCCL connects nodes by rings in the order of their ranks, each channel through the port next to its GPU. It
pipelines chunks, so that the slowest link decides. Hops of the latency as in its src/graph/tuning.cc: rings, and trees
for all-reduces.
Error: an all-reduce over two nodes by a tree sends half of what a ring sends, which is not counted. Traffic of other
axes, and of other jobs, is not counted either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, log2
from typing import Literal

CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]


@dataclass(frozen=True)
class Port:
    """A connection of a node to the network; ``bytes_per_second`` counts one direction.

    Args:
        latency_seconds: of a message, or of a collective over two nodes.
        hop_seconds: added to a collective for each further hop of its ring or tree.
    """

    latency_seconds: float
    bytes_per_second: float
    hop_seconds: float = 0.0


@dataclass(frozen=True)
class Level:
    """A group of ``nodes`` nodes behind switches whose uplinks the traffic shares that leaves the group.

    Args:
        oversubscription: bandwidth of the group's ports by that of its uplinks; 1 is full bisection.
        latency_seconds: of a message that leaves the group.
        rails: ports of one number have a switch of their own, so traffic between ports of two numbers leaves the group.
    """

    nodes: int
    oversubscription: float
    latency_seconds: float
    rails: bool = False

    def uplink_share(self, step: float) -> float:
        """Bandwidth of the uplinks that a node has whose traffic leaves the group, by that of its ports.

        Args:
            step: nodes from sender to receiver. If they are fewer than ``nodes``, only so many nodes send outside.
        """
        return self.nodes / (self.oversubscription * min(step, self.nodes))


@dataclass(frozen=True)
class Network:
    """The network between nodes.

    Args:
        ports: of a node; infinite where each device has one.
        collectives: what a port carries in a collective of this kind; by default as ``port``, which is for messages.
        levels: from the smallest group of nodes to the largest.
    """

    port: Port
    ports: float = inf
    collectives: Mapping[CollectiveKind, Port] = field(default_factory=dict)
    levels: tuple[Level, ...] = ()

    def group_port(self, kind: CollectiveKind, ranks: int, stride: int, devices_per_node: int) -> Port:
        """The port that explains a group's collectives, with the bytes that a rank of a ring sends.

        Args:
            stride: distance from one rank of the group to the next.
        """
        port, last_node = self.collectives.get(kind, self.port), (ranks - 1) * stride // devices_per_node
        members, step = members_per_node(ranks, stride, devices_per_node), max(1.0, stride // devices_per_node)
        nodes = last_node + 1 if stride < devices_per_node else ranks
        rings = float(members)
        if kind == "all-to-all":  # each member sends by itself, and all but what stays on its node
            rings, step = (ranks - 1) / (ranks - members), inf
        crossed = [level for level in self.levels if last_node >= level.nodes]
        share = self.sender_share(devices_per_node, devices_per_node, [level.uplink_share(step) for level in crossed])
        latency = max([port.latency_seconds, *(level.latency_seconds for level in crossed)])
        hops = num_hops(kind, nodes) - num_hops(kind, 2)
        return Port(latency + hops * port.hop_seconds, port.bytes_per_second * share * rings)

    def message_port(self, src_rank: int, dst_rank: int, senders: int, devices_per_node: int) -> Port:
        """The port that explains a message between two nodes.

        Args:
            senders: ranks of the sender's node that send to other nodes at the same time.
        """
        (src_node, src), (dst_node, dst) = (divmod(rank, devices_per_node) for rank in (src_rank, dst_rank))
        ports = min(self.ports, devices_per_node)
        other_rail = src * ports // devices_per_node != dst * ports // devices_per_node
        latency, uplinks = self.port.latency_seconds, []
        for level in self.levels:
            changes_rail = level.rails and other_rail
            if changes_rail or src_node // level.nodes != dst_node // level.nodes:
                latency = max(latency, level.latency_seconds)
                uplinks.append(level.uplink_share(inf if changes_rail else abs(dst_node - src_node)))
        return Port(latency, self.port.bytes_per_second * self.sender_share(senders, devices_per_node, uplinks))

    def busiest_port_seconds(self, seconds: Sequence[float], devices_per_node: int) -> float:
        """Seconds for which the busiest port is in use in one direction.

        Args:
            seconds: for each rank, those in which one port would carry what it sends to other nodes, or receives.
        """
        ports = min(self.ports, devices_per_node)
        nodes = range(0, len(seconds), devices_per_node)
        return max(*seconds, *(sum(seconds[node : node + devices_per_node]) / ports for node in nodes))

    def sender_share(self, senders: int, devices_per_node: int, uplinks: Sequence[float]) -> float:
        """Share of a port's bandwidth that each sender of a node has, at most 1.

        Args:
            senders: ranks of the node that send at the same time.
            uplinks: of the levels that are crossed, their `Level.uplink_share`.
        """
        ports = min(self.ports, devices_per_node) / senders
        return min(1.0, *(ports * share for share in (1.0, *uplinks)))


def members_per_node(ranks: int, stride: int, devices_per_node: int) -> int:
    """Members of a group of ranks at equal distances on its fullest nodes."""
    return min(ranks, max(1, devices_per_node // stride))


def num_hops(kind: CollectiveKind, nodes: int) -> int:
    """Hops between nodes, one after another: of a tree up and down, of a ring, or of messages that all send at once."""
    return {
        "all-reduce": 2 * ceil(log2(nodes)), "all-gather": nodes - 1, "reduce-scatter": nodes - 1, "all-to-all": 1,
    }[kind]  # fmt: skip

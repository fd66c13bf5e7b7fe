"""Constants of ``[network]``, fitted to points between nodes by the formulas of `autopar.ir.network`.

A message and its answer take the latency twice. ``ports`` is the ratio of what all ranks of a node and one rank send
in messages. What a port carries in a kind of collective is fitted to groups with one rank on each node. Levels get
their oversubscription from messages of all ranks that cross them; groups that do are not fitted.

Error: the 90th percentile over points of which bytes take at least half of the time, groups with all ranks included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from autopar.ir.hardware import Link, ring_link, ring_share
from autopar.ir.network import CollectiveKind, Level, Network, Port, num_hops
from autopar.measure.device import ProfileSetting
from autopar.measure.machine.cases import COLLECTIVES
from autopar.measure.machine.constants import Constant, fitted_constant
from autopar.measure.machine.curves import FitErrors
from autopar.measure.machine.least_squares import FitRow, fit_coefficients
from autopar.measure.machine.points import MeasuredPoint


def network_constants(
    points: Sequence[MeasuredPoint], setting: ProfileSetting, known: Sequence[Constant]
) -> list[Constant]:
    """All constants of the network; none if there are no points between nodes.

    Args:
        known: constants of collectives inside a node.
    Raises:
        UsageError: times do not grow with sizes.
    """
    points = [p for p in points if p.case.nodes > 1]
    messages = [p for p in points if p.kind == "point-to-point" and not p.case.variant]
    if not messages:
        return []
    ports = num_ports(messages, setting.devices)
    constants = message_constants(messages, ports, setting)
    values = {c.path: c.value for c in (*known, *constants)}
    levels: list[Level] = []
    for name in dict.fromkeys(p.case.variant for p in points if p.case.variant):
        per_sender = values["network", "bandwidth"] * min(1.0, ports / setting.devices)
        level, level_constants = fit_level(name, [p for p in points if p.case.variant == name], per_sender)
        levels.append(level)
        constants += level_constants
    network = Network(Port(0.0, 1.0), ports, levels=tuple(levels))
    for kind in COLLECTIVES:
        inside = None
        if setting.devices > 1:
            group = "collective", kind, str(setting.devices)
            inside = Link(values[*group, "latency"], values[*group, "bandwidth"])
        constants += kind_constants(kind, [p for p in points if p.kind == kind], network, inside, setting.devices)
    return constants


def num_ports(messages: Sequence[MeasuredPoint], devices: int) -> float:
    """Ports of a node, as many as its ranks together send more than one rank; infinite where they are no limit."""
    one, all_ranks = (
        fit_coefficients("network point-to-point", message_rows([p for p in messages if p.ranks == ranks], inf), 1)
        for ranks in (2, 2 * devices)
    )
    ports = max(1, round(devices * one[1] / all_ranks[1]))
    return ports if ports < devices else inf


def message_rows(messages: Sequence[MeasuredPoint], ports: float) -> list[FitRow]:
    """Rows of the fit of messages: columns are 2 latencies and the bytes of those that share a port.

    Long messages weigh more: short ones vary with what else the network and its buffers do.
    """
    longest = max(p.value for p in messages)
    return [
        FitRow((2.0, p.num_bytes * max(1.0, p.ranks / p.case.nodes / ports)), 0, p.value, p.value / longest)
        for p in messages
    ]


def message_errors(rows: Sequence[FitRow], latency: float, per_byte: float) -> FitErrors:
    """Relative errors of a fit of messages; those are large of which bytes take at least half of the time."""
    parts = [(row.columns[0] * latency, row.columns[1] * per_byte) for row in rows]
    values = tuple(abs(sum(part) / row.seconds - 1) for part, row in zip(parts, rows, strict=True))
    return FitErrors(values, tuple(start <= carried for start, carried in parts), 2)


def message_constants(messages: Sequence[MeasuredPoint], ports: float, setting: ProfileSetting) -> list[Constant]:
    """Latency and bandwidth of a port, and the number of ports where all devices of the node were measured."""
    rows = message_rows(messages, ports)
    latency, per_byte = fit_coefficients("network point-to-point", rows, growth=1)
    errors = message_errors(rows, latency, per_byte)
    constants = [
        fitted_constant(("network", "latency"), latency, "seconds", errors),
        fitted_constant(("network", "bandwidth"), 1 / per_byte, "bytes per second", errors),
    ]
    if ports < inf or setting.devices == setting.node_devices:
        constants.append(fitted_constant(("network", "ports"), min(ports, setting.devices), "count", errors))
    return constants


def fit_level(name: str, points: Sequence[MeasuredPoint], per_sender: float) -> tuple[Level, list[Constant]]:
    """A level, and the constants of its latency and oversubscription.

    Args:
        points: messages between two groups of nodes.
        per_sender: bytes per second of a rank while all ranks of its node send, within the level's group.
    """
    rows = message_rows(points, inf)
    latency, per_byte = fit_coefficients("network point-to-point", rows, growth=1)
    errors = message_errors(rows, latency, per_byte)
    level = Level(points[0].case.nodes // 2, max(1.0, per_byte * per_sender), latency)
    return level, [
        fitted_constant(("network", name, "latency"), latency, "seconds", errors),
        fitted_constant(("network", name, "oversubscription"), level.oversubscription, "ratio", errors),
    ]


def kind_constants(
    kind: CollectiveKind, points: Sequence[MeasuredPoint], network: Network, inside: Link | None, devices: int
) -> list[Constant]:
    """Latency, time of a hop and bandwidth of a port in one kind of collective.

    They are fitted to groups with one rank on each node that cross no level. The time of a hop is left out if these
    have two nodes alone.

    Args:
        network: with ports that carry a byte per second, without latency.
        inside: link of a group of all ranks of a node.
        devices: of each node.
    """
    fitted = [p for p in points if p.ranks == p.case.nodes and all(p.ranks <= level.nodes for level in network.levels)]
    rows, longest = [], max(p.value for p in fitted)
    for p in fitted:
        share = network.group_port(kind, p.ranks, devices, devices).bytes_per_second
        hops = num_hops(kind, p.ranks) - num_hops(kind, 2)
        sent = ring_share(kind, p.ranks) * p.num_bytes / share
        rows.append(FitRow((1.0, hops, sent), 0, p.value, p.value / longest))
    latency, hop, per_byte = fit_coefficients(f"network {kind}", rows, growth=2)
    network = replace(network, port=Port(latency, 1 / per_byte, hop))
    values, large = [], []
    for p in points:
        apart = p.ranks == p.case.nodes
        port = network.group_port(kind, p.ranks, devices if apart else 1, devices)
        link = ring_link(port, None if apart else inside)
        seconds = link.seconds(ring_share(kind, p.ranks) * p.num_bytes)
        values.append(abs(seconds / p.value - 1))
        large.append(2 * link.latency_seconds <= seconds)
    errors = FitErrors(tuple(values), tuple(large), 3)
    constants = [
        fitted_constant(("network", kind, "latency"), latency, "seconds", errors),
        fitted_constant(("network", kind, "bandwidth"), 1 / per_byte, "bytes per second", errors),
    ]
    if any(p.case.nodes > 2 for p in fitted):
        constants.append(fitted_constant(("network", kind, "hop"), hop, "seconds", errors))
    return constants

"""Points between nodes: which cases there are, and that fits find the network that made the points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from math import inf
from pathlib import Path

import pytest
from support.machine_points import CAPTURED, point

from autopar.cost.hardware.load import load_hardware
from autopar.ir.hardware import Hardware, Link
from autopar.ir.network import CollectiveKind, Level, Network, Port
from autopar.measure.device import ProfileSetting
from autopar.measure.machine.cases import COLLECTIVES, Case, cases
from autopar.measure.machine.collectives import rank_groups
from autopar.measure.machine.constants import Constant
from autopar.measure.machine.fit_constants import fit
from autopar.measure.machine.points import MeasuredPoint, point_data, point_from
from autopar.measure.machine.preserved import preserved_sections
from autopar.measure.machine.write_cost_model import RawMeasurements, cost_model_text

SETTING = ProfileSetting("NVIDIA Toy", "cuda", "2.15", 0, 4, 4, nodes=8)
PORT = Port(30e-6, 20e9)
KINDS: dict[CollectiveKind, Port] = {
    kind: Port((number + 2) * 1e-5, (number + 16) * 1e9, 5e-6) for number, kind in enumerate(COLLECTIVES)
}


def machine(network: Network) -> Hardware:
    inside = {(kind, ranks): Link(1e-5, 300e9) for kind in COLLECTIVES for ranks in (2, 4)}
    return replace(load_hardware("h200-nvlink"), devices_per_node=4, network=network, group_collective=inside)


def measured(hardware: Hardware, nodes: int = 8, **levels: int) -> tuple[MeasuredPoint, ...]:
    return tuple(point(case, hardware, CAPTURED) for case in cases("cuda", 4, nodes, levels))


def constants(points: Sequence[MeasuredPoint], setting: ProfileSetting = SETTING) -> dict[tuple[str, ...], Constant]:
    return {c.path[1:]: c for c in fit(points, setting) if c.path[0] == "network"}


def test_cases_between_nodes() -> None:
    names = [
        case.name for case in cases("cpu", 2, 6, {"leaf": 3, "pod": 6}) if case.nodes > 1 and case.sizes == (1024,)
    ]
    assert names == [
        "point-to-point 1024 2 ranks over 2 nodes", "point-to-point 1024 4 ranks over 2 nodes",
        "point-to-point leaf 1024 12 ranks over 6 nodes",
        *(f"{kind} 1024 {ranks} ranks over {nodes} nodes"
          for kind in COLLECTIVES for nodes in (2, 4, 6) for ranks in (nodes, 2 * nodes)),
    ]  # fmt: skip
    assert not [case for case in cases("cpu", 2) if case.nodes > 1]
    local = [case for case in cases("cpu", 2, 6) if case.nodes == 1]
    assert local == list(cases("cpu", 2)) == list(cases("cpu", 2, 6)[: len(local)])
    alone = [case.name for case in cases("cpu", 1, 2) if case.nodes > 1 and case.sizes == (1024,)]
    assert alone == [f"{kind} 1024 2 ranks over 2 nodes" for kind in ("point-to-point", *COLLECTIVES)]


def test_names_of_cases_between_nodes_are_read() -> None:
    for case in (case for case in cases("cuda", 4, 8, {"leaf": 4}) if case.nodes > 1):
        record = point_data(point(case, machine(Network(PORT)), CAPTURED))
        assert point_from(record).case == case
    with pytest.raises(ValueError, match="not the name of a all-reduce case"):
        Case.from_name("all-reduce", "all-reduce 1024 4 ranks over 2 nodes", "", 8)


@pytest.mark.parametrize(
    ("case", "groups"),
    [
        (Case("all-reduce", "", "", (1,), 2), ((0, 1),)),
        (Case("all-reduce", "", "", (1,), 2, nodes=2), ((0, 4), (1, 5), (2, 6), (3, 7))),
        (Case("all-reduce", "", "", (1,), 8, nodes=2), ((0, 1, 2, 3, 4, 5, 6, 7),)),
        (Case("point-to-point", "", "", (1,), 2, nodes=2), ((0, 4),)),
        (Case("point-to-point", "", "", (1,), 8, nodes=2), ((0, 4), (1, 5), (2, 6), (3, 7))),
        (Case("point-to-point", "leaf", "", (1,), 16, nodes=4), tuple((i, i + 8) for i in range(8))),
    ],
)
def test_groups_that_measure_at_the_same_time(case: Case, groups: tuple[tuple[int, ...], ...]) -> None:
    assert rank_groups(case, 4) == groups


@pytest.mark.parametrize("ports", [1, 2, 3, 4])
def test_the_fit_finds_the_network(ports: int, tmp_path: Path) -> None:
    hardware = machine(Network(PORT, ports, KINDS, (Level(4, 4.0, 50e-6),)))
    points = measured(hardware, leaf=4)
    path = tmp_path / "m.toml"
    fitted = fit(points, SETTING)
    text = cost_model_text("toy", RawMeasurements(SETTING, points), fitted, date(2026, 11, 25))
    path.write_text(text.replace("[network.leaf]", "[network.leaf]\nnodes = 4"))
    found = load_hardware(path)
    assert found.network is not None and found.network.ports == ports
    for case, seconds in ((p.case, p.value) for p in points if p.case.nodes > 1):
        # The uplinks of a leaf limit its messages alone: a ring leaves it from one node.
        assert point(case, found, CAPTURED).value == pytest.approx(seconds, rel=1e-2), case.name
    port = found.network.collectives["reduce-scatter"]
    assert (port.latency_seconds, port.bytes_per_second, port.hop_seconds) == pytest.approx(
        (4e-5, 18e9, 5e-6), rel=1e-2
    )
    (level,) = found.network.levels
    assert (level.oversubscription, level.latency_seconds) == pytest.approx((4.0, 50e-6), rel=1e-2)
    assert "measured: 4 x NVIDIA Toy, torch 2.15, `autopar profile` on 8 such nodes; 12 points" in text


def test_links_inside_a_node_count_in_the_error_only() -> None:
    """Groups with all ranks are limited by them, groups with one rank of each node are what is fitted."""
    fast = machine(Network(PORT, 4, KINDS))
    slow = replace(fast, group_collective={key: Link(1e-5, 30e9) for key in fast.group_collective})
    before, after = (constants(measured(hardware)) for hardware in (fast, slow))
    assert after["all-reduce", "bandwidth"].value == pytest.approx(before["all-reduce", "bandwidth"].value)
    assert after["all-reduce", "bandwidth"].error < 0.02
    alone = {case for case in cases("cuda", 4, 8) if case.nodes > 1 and case.ranks == case.nodes}
    bent = [replace(p, value=p.value if p.case in alone or p.case.nodes == 1 else 2 * p.value) for p in measured(fast)]
    found = constants([p for p in bent if p.kind != "point-to-point" or p.ranks == 2 or p.case.nodes == 1] + [
        p for p in measured(fast) if p.kind == "point-to-point" and p.ranks > 2
    ])  # fmt: skip
    assert found["all-reduce", "bandwidth"].value == pytest.approx(before["all-reduce", "bandwidth"].value)
    assert found["all-reduce", "bandwidth"].error == pytest.approx(0.5, rel=0.02)


def test_two_nodes_say_nothing_of_further_hops() -> None:
    found = constants(measured(machine(Network(PORT, 2, KINDS)), nodes=2), replace(SETTING, nodes=2))
    assert ("all-reduce", "bandwidth") in found and ("all-reduce", "hop") not in found


def test_ports_that_were_not_all_used_are_not_counted() -> None:
    points = measured(machine(Network(PORT, inf, KINDS)))
    assert constants(points)["ports",].value == 4
    assert ("ports",) not in constants(points, replace(SETTING, node_devices=8))  # half of the devices took part


def test_ranks_of_one_device_each(tmp_path: Path) -> None:
    hardware = replace(machine(Network(PORT, 1, KINDS)), devices_per_node=1)
    points = [point(case, hardware, CAPTURED) for case in cases("cuda", 1, 4)]
    setting = replace(SETTING, devices=1, node_devices=1, nodes=4)
    path = tmp_path / "m.toml"
    path.write_text(
        cost_model_text("toy", RawMeasurements(setting, tuple(points)), fit(points, setting), date(2026, 11, 25))
    )
    found = load_hardware(path)
    assert (found.link, found.devices_per_node) == (None, 1)
    assert found.network is not None and found.network.ports == 1
    for p in points:
        if p.case.nodes > 1:
            assert point(p.case, found, CAPTURED).value == pytest.approx(p.value, rel=1e-2), p.name


NETWORK = """
[link]
ports = 2

[network]
ports = 3
bandwidth = { value = 50, unit = "GB/s", error = 0.3, date = 2026-11-20, source = "assumption: a \\"port\\" per GPU" }
latency = { value = 35, unit = "us", error = 0.5, date = 2026-11-20, source = "assumption: more than inside" }
hop = { value = 4, unit = "us", error = 0.5, date = 2026-11-20, source = "assumption: NCCL" }

[network.rail]
nodes = 4
latency = { value = 45, unit = "us", error = 0.5, date = 2026-11-20, source = "assumption: a switch more" }
oversubscription = { value = 2, unit = "1", error = 0.5, date = 2026-11-20, source = "assumption: half" }
"""


@pytest.mark.parametrize("nodes", [2, 8])
def test_measurements_take_the_place_of_what_was_assumed(nodes: int, tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    head = 'name = "m"\ndevice_type = "cuda"\nlink_name = "my wire"\ndevices_per_node = 4\n'
    path.write_text(head + NETWORK)
    kept = preserved_sections(path, "cuda")
    assert kept.levels == {"rail": 4}
    setting = replace(SETTING, nodes=nodes)
    points = measured(machine(Network(PORT, 2, KINDS, (Level(4, 8.0, 50e-6, rails=True),))), nodes, **kept.levels)
    fitted = fit(points, setting)
    raw = RawMeasurements(setting, points)
    path.write_text(cost_model_text("m", raw, fitted, date(2026, 11, 25), kept.without({c.path for c in fitted})))
    found = load_hardware(path)
    assert found.network is not None and (found.network.ports, found.link_ports) == (2, 2)
    assert found.network.port.bytes_per_second == pytest.approx(20e9, rel=1e-2)
    (level,) = found.network.levels
    # Of two nodes none lies behind another switch, and nothing is known of further hops.
    assert (level.nodes, level.rails) == (4, True)
    assert level.oversubscription == pytest.approx(8.0 if nodes == 8 else 2.0, rel=1e-2)
    assert found.network.port.hop_seconds == (0.0 if nodes == 8 else pytest.approx(4e-6))
    assert found.network.collectives["all-reduce"].hop_seconds == pytest.approx(5e-6 if nodes == 8 else 4e-6)


def test_devices_without_peer_access(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    points = measured(machine(Network(PORT)))
    for peers in (False, True):
        setting = replace(SETTING, peer_access=peers)
        path.write_text(
            cost_model_text("m", RawMeasurements(setting, points), fit(points, setting), date(2026, 11, 25))
        )
        assert load_hardware(path).peer_access == peers

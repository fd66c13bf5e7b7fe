"""The network of a machine: ports that ranks of a node share, levels that nodes share, and the file that says so."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.hardware.load import cost_model_dir, load_hardware
from autopar.errors import HardwareError
from autopar.ir.hardware import Hardware, Link, ring_share
from autopar.ir.mesh import Mesh
from autopar.ir.network import CollectiveKind, Level, Network, Port
from autopar.ir.placement import Placement
from autopar.solve.space.constraints import hop_link

H200 = load_hardware("h200-nvlink")
GB, US = 10**9, 1e-6


def machine(network: Network, inside: float = 1e15) -> Hardware:
    """Nodes of 8 devices whose links inside a node are so fast."""
    link = Link(0.0, inside)
    return replace(H200, link=link, collective=link, group_collective={}, network=network)


def assert_close(link: Link, latency: float, gigabytes: float) -> None:
    assert (link.latency_seconds, link.bytes_per_second) == (latency, pytest.approx(gigabytes * 1e9))


def rate(hardware: Hardware, kind: CollectiveKind, ranks: int, stride: int) -> float:
    return hardware.group_link(kind, ranks, stride).bytes_per_second


@pytest.mark.parametrize("ports", [1, 2, 4, 8, inf])
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter"])
def test_equal_bytes_between_nodes_take_equal_time(kind: CollectiveKind, ports: float) -> None:
    """tp 8 × dp 8 and dp 64: eight groups with a rank on each node, each with an eighth of the model, and one group."""
    hardware = machine(Network(Port(1e-5, 1e9), ports))
    node = min(ports, 8) * 1e9
    assert 8 * rate(hardware, kind, 8, 8) == pytest.approx(node)
    assert rate(hardware, kind, 64, 1) == pytest.approx(node)
    assert 2 * rate(hardware, kind, 32, 2) == pytest.approx(node)
    model = 64 * GB
    whole, eighth = hardware.collective_seconds(kind, model, 64, 1), hardware.collective_seconds(kind, model / 8, 8, 8)
    # A ring of 64 sends 63/64 of its tensor out of each node, rings of 8 send 7/8 of theirs.
    assert whole - 1e-5 == pytest.approx((eighth - 1e-5) * (63 / 64) / (7 / 8))


@pytest.mark.parametrize(
    ("kind", "ranks", "stride", "gigabytes"),
    [
        ("all-reduce", 64, 1, 4), ("all-reduce", 2, 8, 1 / 2), ("all-reduce", 32, 2, 2), ("all-reduce", 16, 4, 1),
        ("all-reduce", 12, 1, 4), ("all-gather", 5, 12, 1 / 2), ("all-reduce", 4, 3, 1),
        # Each rank sends 56 of the 63 parts that are not its own out of its node, over half a port.
        ("all-to-all", 64, 1, 63 / 56 / 2), ("all-to-all", 8, 8, 1 / 2),
    ],
)  # fmt: skip
def test_ranks_of_a_node_share_its_ports(kind: CollectiveKind, ranks: int, stride: int, gigabytes: float) -> None:
    assert rate(machine(Network(Port(0, 1e9), 4)), kind, ranks, stride) == pytest.approx(gigabytes * 1e9)


def test_half_the_ports_take_twice_as_long() -> None:
    for ranks, stride in ((64, 1), (8, 8)):
        one, two, eight = (
            machine(Network(Port(0, 1e9), p)).collective_seconds("all-gather", GB, ranks, stride) for p in (1, 2, 8)
        )
        assert one == pytest.approx(2 * two) == pytest.approx(8 * eight)


def test_links_inside_a_node_limit_a_ring_through_it() -> None:
    hardware = machine(Network(Port(1e-5, 50e9)), inside=300e9)
    assert rate(hardware, "all-reduce", 64, 1) == 300e9
    assert rate(hardware, "all-reduce", 8, 8) == 50e9
    slow = replace(hardware, collective=Link(3e-5, 300e9))
    assert [slow.group_link("all-reduce", *group).latency_seconds for group in ((64, 1), (8, 8))] == [3e-5, 1e-5]


@pytest.mark.parametrize(
    ("ports", "gather_rate"),
    [(8, 278e9), (4, 200e9), (1, 50e9)],  # of NVLink, which is slower than 8 ports; of the ports
)
def test_a_tensor_parallel_group_over_two_nodes(ports: int, gather_rate: float) -> None:
    hardware, size = machine(Network(Port(35e-6, 50e9, 4e-6), ports), inside=278e9), 103e6
    for kind in ("all-gather", "reduce-scatter"):
        assert hardware.collective_seconds(kind, size, 16) == pytest.approx(35e-6 + 15 / 16 * size / gather_rate)
    # Each of 8 ranks of a node sends 8 of its 15 parts of a 16th of a 16th of the tensor to the other node.
    sent = 8 * 8 * size / 16 / 16
    assert hardware.collective_seconds("all-to-all", size, 16) == pytest.approx(35e-6 + sent / (ports * 50e9))


@pytest.mark.parametrize(
    ("kind", "nodes", "hops"),
    [("all-reduce", 2, 0), ("all-reduce", 5, 4), ("all-reduce", 8, 4), ("all-gather", 2, 0), ("all-gather", 8, 6),
     ("reduce-scatter", 3, 1), ("all-to-all", 8, 0)],
)  # fmt: skip
def test_further_nodes_add_hops(kind: CollectiveKind, nodes: int, hops: int) -> None:
    hardware = machine(Network(Port(1e-5, 1e9, 1e-6)))
    for ranks, stride in ((nodes, 8), (8 * nodes, 1)):
        assert hardware.collective_seconds(kind, 0, ranks, stride) == pytest.approx(1e-5 + hops * 1e-6)


def test_a_kind_has_a_port_of_its_own() -> None:
    hardware = machine(Network(Port(1e-5, 1e9), 4, {"all-reduce": Port(2e-5, 5e8)}))
    assert hardware.group_link("all-reduce", 2, 8) == Link(2e-5, 2.5e8)
    assert hardware.group_link("all-gather", 2, 8) == Link(1e-5, 5e8)
    assert hardware.message_link(0, 8) == Link(1e-5, 1e9)


LEAF = Level(4, 2.0, 5e-5)


@pytest.mark.parametrize(
    ("kind", "ranks", "stride", "port", "latency"),
    [
        ("all-reduce", 4, 8, 1, 1e-5),  # within a leaf
        ("all-reduce", 8, 8, 1, 5e-5),  # of four nodes one sends to the next leaf, over half as many uplinks
        ("all-reduce", 4, 16, 1, 5e-5),  # two
        ("all-reduce", 4, 24, 2 / 3, 5e-5),  # three
        ("all-reduce", 4, 32, 1 / 2, 5e-5),  # all
        ("all-reduce", 4, 80, 1 / 2, 5e-5),
        ("all-to-all", 8, 8, 1 / 2, 5e-5),
    ],
)
def test_groups_that_leave_a_leaf_share_its_uplinks(
    kind: CollectiveKind, ranks: int, stride: int, port: float, latency: float
) -> None:
    for level in (LEAF, replace(LEAF, rails=True)):  # NCCL's rings stay on their rail
        hardware = machine(Network(Port(1e-5, 1e9), levels=(level,)))
        assert_close(hardware.group_link(kind, ranks, stride), latency, port)
    one_port = machine(Network(Port(1e-5, 1e9), 1, levels=(LEAF,)))
    assert rate(one_port, kind, ranks, stride) == pytest.approx(port * 1e9 / 8)


def test_the_slowest_level_decides() -> None:
    hardware = machine(Network(Port(1e-5, 1e9), levels=(LEAF, Level(16, 8.0, 9e-5))))
    assert [hardware.group_link("all-to-all", nodes, 8) for nodes in (4, 16, 32)] == [
        Link(1e-5, 1e9), Link(5e-5, 5e8), Link(9e-5, 1.25e8),
    ]  # fmt: skip


def test_full_bisection_is_no_limit() -> None:
    network = Network(Port(1e-5, 1e9))
    flat, tall = machine(network), machine(replace(network, levels=(Level(4, 1.0, 1e-5), Level(8, 1.0, 1e-5))))
    for ranks, stride in ((4, 8), (64, 8), (256, 1), (4, 100)):
        assert flat.group_link("all-reduce", ranks, stride) == tall.group_link("all-reduce", ranks, stride)


@pytest.mark.parametrize(
    ("mesh", "hop", "gigabytes"),
    [
        (Mesh(4, 1, 8), (0, 1), 1 / 4),  # eight senders, two ports
        (Mesh(8, 1, 4), (1, 2), 1 / 2),  # four
        (Mesh(32), (7, 8), 1),  # one
        (Mesh(16, 1, 2), (3, 4), 1),  # two
        (Mesh(2, 2, 8), (0, 1), 1 / 4),
        (Mesh(4, 1, 6), (0, 1), 1 / 3),  # ranks 2 to 5 have their partners on the next node, and 6 and 7 of stage 1
        (Mesh(8, 1, 4), (0, 2), 1 / 4),  # over a stage: all ranks of a node send
        (Mesh(8, 1, 4), (3, 4), 1 / 4),  # between other nodes: gradients to the one before from four, too
        (Mesh(8, 1, 4), (4, 3), 1 / 4),
        (Mesh(8, 1, 4), (7, 8), 1 / 4),  # to the next chunk, on the first rank
    ],
)
def test_senders_of_a_node_share_its_ports(mesh: Mesh, hop: tuple[int, int], gigabytes: float) -> None:
    hardware = machine(Network(Port(1e-5, 1e9), 2))
    assert_close(hop_link(hardware, mesh, *hop), 1e-5, gigabytes)


def test_the_first_and_the_last_rank_of_several_chunks_share_a_port() -> None:
    hardware = machine(Network(Port(1e-5, 1e9), 1))
    assert_close(hop_link(hardware, Mesh(16), 7, 8), 1e-5, 1)  # one stage a rank: activations only
    interleaved, v = Placement(16, 2), Placement(16, 2, is_v=True)
    assert_close(hop_link(hardware, Mesh(16), 7, 8, interleaved), 1e-5, 1 / 2)  # and gradients from rank 0 to rank 15
    assert_close(hop_link(hardware, Mesh(16), 7, 8, v), 1e-5, 1)  # none from there in a V
    assert_close(hop_link(hardware, Mesh(32), 15, 16), 1e-5, 1 / 2)  # activations, and gradients to the node before


def test_senders_inside_a_node_share_what_its_file_says() -> None:
    hardware = replace(machine(Network(Port(1e-5, 1e9))), link=Link(3e-5, 12e9))
    assert hop_link(hardware, Mesh(8), 0, 1) == Link(3e-5, 12e9)
    shared = replace(hardware, link_ports=4)
    assert_close(hop_link(shared, Mesh(8), 0, 1), 3e-5, 12 * 4 / 7)
    assert hop_link(shared, Mesh(2, 1, 4), 0, 1) == Link(3e-5, 12e9)
    assert shared.collective_seconds("all-reduce", GB, 8) == hardware.collective_seconds("all-reduce", GB, 8)


def test_messages_between_rails_leave_them() -> None:
    rails = machine(Network(Port(1e-5, 1e9), 8, levels=(Level(4, 16.0, 5e-5, rails=True),)))
    assert rails.message_link(3, 11, 8) == Link(1e-5, 1e9)
    assert rails.message_link(3, 12, 8) == Link(5e-5, 1e9 / 16)
    assert rails.message_link(3, 12, 2) == Link(5e-5, 1e9 / 4)  # a quarter of the senders
    assert rails.message_link(3, 35, 8) == Link(5e-5, 1e9 / 16)
    pairs = machine(Network(Port(1e-5, 1e9), 4, levels=(Level(4, 16.0, 5e-5, rails=True),)))
    assert pairs.message_link(2, 11, 1) == Link(1e-5, 1e9)  # devices 2 and 3 have one port
    assert pairs.message_link(3, 12, 1) == Link(5e-5, 1e9 / 4)


def test_messages_between_leaves_share_their_uplinks() -> None:
    hardware = machine(Network(Port(1e-5, 1e9), levels=(replace(LEAF, oversubscription=8.0),)))
    assert hop_link(hardware, Mesh(4, 1, 8), 0, 1) == Link(1e-5, 1e9)
    assert hop_link(hardware, Mesh(8, 1, 8), 3, 4) == Link(5e-5, 5e8)  # one node of four sends
    assert hop_link(hardware, Mesh(4, 4, 8), 0, 1) == Link(5e-5, 1.25e8)


NETWORKS = st.builds(
    lambda ports, hop, nodes, oversubscription, rails: Network(
        Port(1e-5, 1e9, hop), ports, {}, (Level(nodes, oversubscription, 2e-5, rails),)
    ),
    st.sampled_from([1, 3, 8, inf]), st.sampled_from([0.0, 1e-6]), st.integers(2, 8), st.floats(1, 8), st.booleans(),
)  # fmt: skip
KINDS = st.sampled_from(["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])


@given(NETWORKS, KINDS, st.integers(2, 64), st.integers(1, 40), st.floats(0, 1e10), st.floats(1, 10))
def test_times_grow_with_bytes_and_nodes(
    network: Network, kind: CollectiveKind, ranks: int, stride: int, num_bytes: float, factor: float
) -> None:
    hardware = machine(network)
    seconds = hardware.collective_seconds(kind, num_bytes, ranks, stride)
    assert seconds <= hardware.collective_seconds(kind, num_bytes * factor, ranks, stride)
    link = hardware.group_link(kind, ranks, stride)
    assert link.bytes_per_second > 0
    if stride >= 8 and kind != "all-to-all":  # an all-to-all's parts become smaller
        assert seconds <= hardware.collective_seconds(kind, num_bytes, 2 * ranks, stride)
        assert link.bytes_per_second >= hardware.group_link(kind, 2 * ranks, stride).bytes_per_second
    if (ranks - 1) * stride < 8:  # as without a network
        assert seconds == pytest.approx(ring_share(kind, ranks) * num_bytes / 1e15)


def entry(value: float, unit: str) -> str:
    return f'{{ value = {value}, unit = "{unit}", error = 0.1, date = 2026-11-25, source = "measured: here" }}'


A100 = (cost_model_dir() / "a100-nvlink.toml").read_text()
PLAIN = f"[network]\nbandwidth = {entry(25, 'GB/s')}\nlatency = {entry(35, 'us')}\n"


def level(nodes: int, oversubscription: float = 2) -> str:
    text = f"oversubscription = {entry(oversubscription, '1')}\nlatency = {entry(40, 'us')}"
    return f"nodes = {nodes}\n{text}\n"


def with_network(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(re.sub(r"(?s)# Between nodes.*", "", A100) + text)
    return path


def test_a_file_without_ports_has_one_for_each_device(tmp_path: Path) -> None:
    assert load_hardware(with_network(tmp_path, PLAIN)).network == Network(Port(35 * US, 25e9))


def test_a_file_with_all_of_it(tmp_path: Path) -> None:
    text = f"{PLAIN}ports = 4\nhop = {entry(4, 'us')}\n[network.all-to-all]\nbandwidth = {entry(20, 'GB/s')}\n"
    text += f"latency = {entry(50, 'us')}\n[network.all-gather]\nbandwidth = {entry(22, 'GB/s')}\n"
    text += f"latency = {entry(45, 'us')}\nhop = {entry(0, 'us')}\n[network.rail]\n{level(4)}[network.pod]\n{level(8)}"
    path = with_network(tmp_path, text)
    path.write_text(path.read_text().replace("[link]\n", "[link]\nports = 2\npeer_access = false\n"))
    found = load_hardware(path)
    assert found.network == Network(
        Port(35 * US, 25e9, 4 * US),
        4,
        {"all-to-all": Port(50 * US, 20e9, 4 * US), "all-gather": Port(45 * US, 22e9, 0.0)},
        (Level(4, 2.0, 40 * US, rails=True), Level(8, 2.0, 40 * US)),
    )
    assert (found.link_ports, found.peer_access) == (2, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ports = 0", r"field network\.ports is 0; it must be at least 1\."),
        ("ports = 1.5", r"field network\.ports is 1\.5; it must be a whole number\."),
        ("ports = 16", r"network\.ports is 16; a node has 8 devices, each of which uses one port at most\. Describe"),
        ("port = 1", r"field network\.port is unknown\. Did you mean ports\?"),
        (f"[network.spine]\n{level(4)}", r"field network\.spine is unknown\."),
        (
            f"[network.leaf]\n{level(4)}[network.rail]\n{level(4)}",
            r"rail contradicts network\.leaf: ports of a node have one",
        ),
        (f"[network.leaf]\n{level(1)}", r"network\.leaf\.nodes is 1; it must be at least 2"),
        (
            f"[network.leaf]\n{level(4, 0.5)}",
            r"leaf\.oversubscription is 0\.5; it must be at least 1",
        ),
        (f"[network.leaf]\n{level(4)}rails = true\n", r"field network\.leaf\.rails is unknown"),
        (
            f"[network.leaf]\n{level(4)}[network.pod]\n{level(6)}",
            r"network\.pod\.nodes is 6; it must be a multiple of the 4 nodes of network\.leaf\.",
        ),
        (f"[network.all-reduce]\nbandwidth = {entry(1, 'GB/s')}\n", r"network\.all-reduce\.latency is missing"),
    ],
)
def test_a_broken_network_is_told_its_field(tmp_path: Path, text: str, message: str) -> None:
    path = with_network(tmp_path, PLAIN + text)
    with pytest.raises(HardwareError, match=message) as caught:
        load_hardware(path)
    assert str(path) in str(caught.value)


def test_a_broken_link_is_told_its_field(tmp_path: Path) -> None:
    path = with_network(tmp_path, PLAIN)
    for field, message in (
        ("peer_access = 1", r"field link\.peer_access is 1; it must be true or false\."),
        ("ports = true", r"field link\.ports is True; it must be a whole number\."),
    ):
        path.write_text(A100.replace("[link]\n", f"[link]\n{field}\n"))
        with pytest.raises(HardwareError, match=message):
            load_hardware(path)


def test_the_shipped_networks() -> None:
    for name, gigabytes in (("a100-nvlink", 25), ("h100-nvlink", 50), ("h200-nvlink", 50)):
        network = load_hardware(name).network
        assert network is not None and (network.ports, network.port.bytes_per_second) == (8, gigabytes * 1e9)
        assert load_hardware(name).peer_access
    assert load_hardware("rtx4090-pcie").network is None and not load_hardware("rtx4090-pcie").peer_access

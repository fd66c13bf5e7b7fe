"""`autopar profile` as torchrun and srun start it: ranks of several nodes measure the network between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.effort import only
from support.faults import free_port
from support.forks import Done, forked
from support.machine_points import point

from autopar.cost.hardware.load import load_hardware
from autopar.ir.hardware import ExecutionMode, Hardware
from autopar.measure.device import ProfileSetting
from autopar.measure.machine.cases import COLLECTIVES, POINT_KINDS, cases
from autopar.measure.machine.points import save_points
from autopar.measure.machine.write_cost_model import raw_points
from autopar.runtime.launch.devices import cpu_name

SIZES = (2**10, 2**16, 2**20)
SCRIPT = f"""
import sys
from dataclasses import replace
from autopar.measure.machine import cases, collectives
collectives.REPEAT_FACTOR["cpu"] = 1
cases.SIZES["cpu"] = replace(cases.CPU, network={SIZES})
from autopar.tools.cli.app import main
sys.argv = ["autopar", "profile", *sys.argv[1:]]
main()
"""


# The same, and few and small shapes for what is measured inside a node.
SMALL = SCRIPT.replace(
    "cases.CPU, ",
    """cases.CPU, dtypes=("float32",), slow_dtypes=(), memory=(2**14, 2**19, 2**22),
    matmul=((16, 64, 64), (197, 192, 576), (394, 384, 1152)), optimizer=(2**20, 2**22), message=(2**10, 2**18, 2**22),
    attention=((1, 3, 49, 64), (4, 6, 197, 64)), convolution=((1, 16, 16, 16, 3, 1, 1), (4, 64, 64, 28, 3, 1, 1)),
    depthwise=((1, 96, 96, 14, 7, 1, 96), (4, 96, 96, 28, 7, 1, 96)), """,
)


def measured_before(folder: Path, devices: int, nodes: int) -> None:
    """A script of the command, and points of the first node, so that the command measures the network alone."""
    (folder / "script.py").write_text(SCRIPT)
    setting = ProfileSetting(cpu_name(), "cpu", torch.__version__, 1, devices, devices, nodes)
    machine = load_hardware("cpu")
    points = [point(case, machine, ExecutionMode()) for case in cases("cpu", devices)]
    save_points(folder / "m.toml.part", setting, points)


def variables(launcher: str) -> list[dict[str, str]]:
    """Variables of two ranks on two nodes."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if launcher == "srun":
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
        return [meeting | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"} for rank in range(2)]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    return [meeting | world | {"RANK": str(rank)} for rank in range(2)]


def network_names(path: Path) -> list[str]:
    raw = raw_points(path)
    assert raw is not None
    return [p.name for p in raw.points if p.case.nodes > 1]


@pytest.mark.parametrize("launcher", only(["torchrun"], ["torchrun", "srun"]))
def test_two_nodes_of_one_rank(launcher: str, tmp_path: Path) -> None:
    measured_before(tmp_path, 1, 2)
    done = forked(tmp_path / "script.py", ["-o", "m.toml", "--anyway"], variables(launcher), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("saved to m.toml") == 1 and "autopar plan MODEL --devices 2" in done.stdout
    found = load_hardware(tmp_path / "m.toml")
    assert (found.devices_per_node, found.link) == (1, None)
    assert found.network is not None and found.network.ports == 1
    assert found.network.collectives.keys() == set(COLLECTIVES)
    assert found.transfer_seconds(10**6, 0, 1) > 0
    kinds = ("point-to-point", *COLLECTIVES)
    assert network_names(tmp_path / "m.toml") == [f"{k} {n} 2 ranks over 2 nodes" for k in kinds for n in SIZES]


def test_an_error_of_rank_0_ends_all(tmp_path: Path) -> None:
    """It is told once, and no rank waits."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = forked(tmp_path / "script.py", ["-o", "none/m.toml"], variables("torchrun"), tmp_path)
    assert done.returncode == 2 and done.stderr.count("Cannot write to none/m.toml") == 1, done.stderr


def test_nodes_with_unequal_ranks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    uneven = variables("srun")
    for each in uneven:
        each |= {"SLURM_LOCALID": "1"}
    done = forked(tmp_path / "script.py", ["-o", "m.toml"], uneven, tmp_path)
    expected = "needs equally many ranks on each of 2 nodes, filled in order; rank 0 of 2 is number 1 of its node's 1."
    assert done.returncode == 2 and expected in " ".join(done.stderr.split()), done.stderr


FAILING = """
from autopar.measure.machine import collectives
build = collectives.COMMUNICATION_BUILDERS["all-gather"]

def broken(case, worker, communicator):
    if worker.rank == 1:
        raise RuntimeError("no card today")
    return build(case, worker, communicator)

collectives.COMMUNICATION_BUILDERS["all-gather"] = broken
"""


@pytest.mark.full
def test_a_rank_that_fails_is_named_and_points_are_kept(tmp_path: Path) -> None:
    measured_before(tmp_path, 1, 2)
    (tmp_path / "script.py").write_text(FAILING + SCRIPT)
    done = forked(tmp_path / "script.py", ["-o", "m.toml", "--anyway"], variables("torchrun"), tmp_path)
    errors = " ".join(done.stderr.split())
    assert done.returncode == 1 and "Rank 1 failed while measuring all-gather 1024 2 ranks over 2 nodes" in errors
    assert "no card today" in errors and not (tmp_path / "m.toml").exists()
    assert "all-reduce 1048576 2 ranks over 2 nodes" in (tmp_path / "m.toml.part").read_text()


def torchruns(
    folder: Path, address: str, prefixes: Sequence[Sequence[str]], arguments: Sequence[str], **environment: str
) -> list[Done]:
    """Two agents of torchrun with two processes each.

    Args:
        prefixes: commands that start the agents.
    """
    port = str(free_port())
    common = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    agents = [
        subprocess.Popen(
            [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
             "--nproc-per-node=2", f"--master-addr={address}", f"--master-port={port}", "script.py", *arguments],
            cwd=folder, env=common | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for node, prefix in enumerate(prefixes)
    ]  # fmt: skip
    try:
        outputs = [agent.communicate(timeout=500) for agent in agents]
    finally:
        for agent in agents:
            with suppress(ProcessLookupError):
                agent.kill()
    return [Done(agent.args, agent.returncode, *output) for agent, output in zip(agents, outputs, strict=True)]


def check_network(folder: Path, done: Sequence[Done]) -> Hardware:
    """The machine that two nodes of two ranks have written; rank 0 alone says so."""
    assert [run.returncode for run in done] == [0, 0], "".join(run.stderr[-3000:] for run in done)
    assert [run.stdout.count("saved to m.toml") for run in done] == [1, 0]
    found = load_hardware(folder / "m.toml")
    assert found.devices_per_node == 2 and found.link is not None and found.network is not None
    groups = [f"{kind} {size} {ranks} ranks over 2 nodes" for kind in COLLECTIVES for ranks in (2, 4) for size in SIZES]
    messages = [f"point-to-point {size} {ranks} ranks over 2 nodes" for ranks in (2, 4) for size in SIZES]
    assert network_names(folder / "m.toml") == messages + groups
    text = (folder / "m.toml").read_text()
    assert "torch" in text and "`autopar profile` on 2 such nodes" in text
    return found


@pytest.mark.full
def test_two_agents_of_torchrun_with_two_ranks_each(tmp_path: Path) -> None:
    """They measure all that a cost model needs, and after that the network again alone."""
    (tmp_path / "script.py").write_text(SMALL)
    flags = ["-o", "m.toml", "--anyway"]
    found = check_network(tmp_path, torchruns(tmp_path, "127.0.0.1", [[], []], flags))
    before = raw_points(tmp_path / "m.toml")
    assert before is not None and {p.kind for p in before.points} == set(POINT_KINDS) - {"overlap"}
    assert "overlap" not in (tmp_path / "m.toml").read_text()
    again = check_network(tmp_path, torchruns(tmp_path, "127.0.0.1", [[], []], [*flags, "--only", "network"]))
    after = raw_points(tmp_path / "m.toml")
    assert after is not None and (again.link, again.group_collective) == (found.link, found.group_collective)
    changed = [p.case for p, q in zip(before.points, after.points, strict=True) if p != q]
    assert changed == [p.case for p in before.points if p.case.nodes > 1]


LEVEL = """
name = "mine"
link_name = "my wire"
device_type = "cpu"
devices_per_node = 1

[network]
bandwidth = { value = 50, unit = "GB/s", error = 0.3, date = 2026-11-20, source = "assumption: a port" }
latency = { value = 35, unit = "us", error = 0.5, date = 2026-11-20, source = "assumption: a port" }

[network.leaf]
nodes = 2
latency = { value = 45, unit = "us", error = 0.5, date = 2026-11-20, source = "assumption: a switch more" }
oversubscription = { value = 9, unit = "1", error = 0.5, date = 2026-11-20, source = "assumption: a ninth" }
"""


@pytest.mark.full
def test_four_nodes_measure_the_level_above_them(tmp_path: Path) -> None:
    measured_before(tmp_path, 1, 4)
    (tmp_path / "m.toml").write_text(LEVEL)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    ranks = [meeting | world | {"RANK": str(rank)} for rank in range(4)]
    done = forked(tmp_path / "script.py", ["-o", "m.toml", "--anyway"], ranks, tmp_path)
    assert done.returncode == 0, done.stderr
    names = network_names(tmp_path / "m.toml")
    assert [name for name in names if "leaf" in name] == [
        f"point-to-point leaf {n} 4 ranks over 4 nodes" for n in SIZES
    ]
    assert "all-gather 1024 4 ranks over 4 nodes" in names
    found = load_hardware(tmp_path / "m.toml")
    assert found.name == "mine" and found.network is not None
    assert [level.nodes for level in found.network.levels] == [2]
    level = found.network.levels[0].oversubscription  # loopback of a busy machine may look oversubscribed
    assert 1 <= level != 9 and "assumption: a switch" not in (tmp_path / "m.toml").read_text()


SHAPED = 200e6 / 8  # bytes per second
NAMES = [f"autopar-{os.getpid()}-{node}" for node in range(2)]
ADDRESSES = ["10.213.77.1", "10.213.77.2"]


def root_command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@pytest.fixture
def shaped_link() -> Iterator[list[list[str]]]:
    """Commands that run another one in two network namespaces, between which 200 Mbit/s pass in each direction."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces need ip and tc (iproute2)")
    made: list[str] = []
    try:
        try:
            for name in NAMES:
                root_command("ip", "netns", "add", name)
                made.append(name)
            root_command(
                "ip", "link", "add", "cable", "netns", NAMES[0], "type", "veth", "peer", "cable", "netns", NAMES[1]
            )
            for name, address in zip(NAMES, ADDRESSES):
                inside = ("ip", "netns", "exec", name)
                root_command(*inside, "ip", "address", "add", f"{address}/24", "dev", "cable")
                root_command(*inside, "ip", "link", "set", "cable", "up")
                root_command(*inside, "ip", "link", "set", "lo", "up")
                shape = ("rate", "200mbit", "burst", "32kb", "latency", "100ms")
                root_command(*inside, "tc", "qdisc", "add", "dev", "cable", "root", "tbf", *shape)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces with a shaped link here: {error.stderr.strip()}")
        yield [["ip", "netns", "exec", name] for name in NAMES]
    finally:
        for name in made:
            root_command("ip", "netns", "delete", name)


@pytest.mark.full
def test_the_bandwidth_of_a_shaped_link_is_found(shaped_link: list[list[str]], tmp_path: Path) -> None:
    measured_before(tmp_path, 2, 2)
    flags = ["-o", "m.toml", "--anyway"]
    done = torchruns(tmp_path, ADDRESSES[0], shaped_link, flags, GLOO_SOCKET_IFNAME="cable")
    found = check_network(tmp_path, done)
    assert found.network is not None and found.network.ports == 1
    assert found.network.port.bytes_per_second == pytest.approx(SHAPED, rel=0.25)
    # Gloo makes a reduce-scatter an all-reduce. Its other collectives leave a link idle at times.
    lowest = {"all-reduce": 0.75, "all-gather": 0.4, "reduce-scatter": 0.375, "all-to-all": 0.2}
    shares = {kind: port.bytes_per_second / SHAPED for kind, port in found.network.collectives.items()}
    assert all(lowest[kind] <= share <= 1.25 for kind, share in shares.items()), shares
    # What the planner makes of it: both ranks of a node share the card.
    assert found.group_link("all-reduce", 4, 1).bytes_per_second == pytest.approx(SHAPED, rel=0.25)
    assert found.group_link("all-reduce", 2, 2).bytes_per_second == pytest.approx(SHAPED / 2, rel=0.25)
    assert found.message_link(0, 2, senders=2).bytes_per_second == pytest.approx(SHAPED / 2, rel=0.25)

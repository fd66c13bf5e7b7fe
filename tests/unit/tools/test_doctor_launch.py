"""Launcher, addresses and environment on the page of `autopar doctor`."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from support.layers import FILES

from autopar.tools.doctor import host, launcher, variables
from autopar.tools.doctor.finding import Finding, Subject

SUBJECT = Subject((), 2, None, Path())
OF_LAUNCHERS = re.compile(r"SLURM_|TORCHELASTIC_|GROUP_|(?:LOCAL_)?(?:RANK|WORLD_SIZE)$|MASTER_")
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Sets the variables of a launcher, and no other ones."""
    import os

    def use(**changes: str) -> None:
        for name in [name for name in os.environ if OF_LAUNCHERS.match(name)]:
            monkeypatch.delenv(name)
        for name, value in changes.items():
            monkeypatch.setenv(name, value)

    use()
    return use


@pytest.fixture
def taken_port():
    """A port that another process would find taken."""
    with socket.create_server(("", 0)) as server:
        yield str(server.getsockname()[1])


def found() -> dict[str, Finding]:
    return {finding.name: finding for finding in launcher.launcher(SUBJECT)}


def test_a_plain_script(environment, taken_port: str) -> None:
    assert found()["launcher"].value.startswith("none: a plain script")
    environment(MASTER_PORT=taken_port)
    assert found()["torchrun's port"].value == (
        f"{taken_port} is taken: torchrun needs --standalone or another --master-port"
    )


@pytest.mark.parametrize(
    ("changes", "status", "value", "remedy"),
    [
        ({"RANK": "1"}, "slow", "RANK=1 is ignored, since WORLD_SIZE is not set", "Unset"),
        ({"WORLD_SIZE": "8"}, "slow", "WORLD_SIZE=8 is ignored, since RANK is not set", "Unset"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "broken", "RANK='8' and WORLD_SIZE='8' are not those", "Unset them"),
        ({"RANK": "1", "WORLD_SIZE": "8"}, "broken", "MASTER_ADDR is not set; MASTER_PORT is not set", "Unset"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "broken", "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2", "Unset"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, "broken", "LOCAL_WORLD_SIZE=4 is more than WORLD_SIZE=2", "Unset"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "broken", "MASTER_PORT=99999 is no port", "Unset"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "two"}, "broken", "a variable of the launcher is no number", "Unset"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"},
            "broken", "srun started 4 tasks, but MASTER_ADDR does not say where they meet", "export MASTER_ADDR=",
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            "slow", "none, in a job of 4 tasks", "srun python",
        ),
    ],
)  # fmt: skip
def test_contradictions(environment, changes: dict[str, str], status: str, value: str, remedy: str) -> None:
    environment(**changes)
    finding = found()["launcher"]
    assert finding.status == status and value in finding.value and remedy in finding.remedy


def test_the_port_of_rank_0_must_be_free(environment, taken_port: str) -> None:
    environment(**TORCHRUN, MASTER_PORT=taken_port)
    assert found()["launcher"].value.startswith("torchrun: rank 0 of 2, number 0 of 2 on its node, 1 node, meeting at")
    assert (found()["MASTER_ADDR"].status, found()["MASTER_PORT"].status) == ("ok", "broken")
    environment(**(TORCHRUN | {"RANK": "1", "LOCAL_RANK": "1"}), MASTER_PORT=taken_port)
    assert "MASTER_PORT" not in found()


def test_the_store_of_torchrun_must_answer(environment, taken_port: str) -> None:
    environment(**TORCHRUN, MASTER_PORT=taken_port, TORCHELASTIC_USE_AGENT_STORE="True")
    assert found()["MASTER_PORT"].value == f"{taken_port} is served by torchrun"
    with socket.create_server(("", 0)) as server:
        free = str(server.getsockname()[1])
    environment(**TORCHRUN, MASTER_PORT=free, TORCHELASTIC_USE_AGENT_STORE="True")
    assert found()["MASTER_PORT"].status == "broken"


def test_names_that_do_not_resolve(environment, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert [f.status for f in host.host_name(SUBJECT)] == ["slow"]
    environment(**TORCHRUN, MASTER_PORT="29511")
    assert [f.status for f in host.host_name(SUBJECT)] == ["broken"]
    assert "does not resolve" in found()["MASTER_ADDR"].value


def test_ports_in_use_are_subtracted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text("32768\t33000\n")
    (tmp_path / "tcp").write_text(
        "  sl  local_address rem_address   st\n   0: 0100007F:8000 00000000:0000 0A\n"
        "   1: 0100007F:0016 00000000:0000 0A\n"
    )
    monkeypatch.setattr(host, "PORT_RANGE", tmp_path / "range")
    monkeypatch.setattr(host, "SOCKETS", (tmp_path / "tcp", tmp_path / "tcp6"))
    (finding,) = host.ports(SUBJECT)
    assert (finding.status, finding.value) == ("slow", "232 free of 32,768 to 33,000")


def test_a_store_answers_at_the_loopback_interface() -> None:
    (finding,) = host.loopback(SUBJECT)
    assert finding.status == "ok" and "127.0.0.1" in finding.value


# -- variables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "status", "text"),
    [
        ("NCCL_P2P_DISABLE", "1", "slow", "1: NCCL copies through host memory"),
        ("NCCL_P2P_DISABLE", "0", "ok", "0: NCCL copies through host memory"),
        ("CUDA_LAUNCH_BLOCKING", "1", "slow", "1: waits for each kernel"),
        ("CUDA_LAUNCH_BLOCKING", "0", "ok", "0: waits for each kernel"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", "slow", "detail: checks of collectives"),
        ("CUDA_VISIBLE_DEVICES", "", "ok", "empty: GPUs that this process sees"),
        ("NCCL_IB_HCA", "mlx5", "ok", "mlx5: a setting of NCCL"),
        ("AUTOPAR_CACHES", "/tmp", "slow", "/tmp: autopar reads no variable of this name"),
    ],
)
def test_variables(name: str, value: str, status: str, text: str) -> None:
    (finding,) = variables.on_variable(name, value)
    assert (finding.status, finding.value) == (status, text)
    if name == "AUTOPAR_CACHES":
        assert "Did you mean AUTOPAR_CACHE?" in finding.remedy


def test_other_variables_are_not_shown() -> None:
    assert list(variables.on_variable("API_KEY", "secret")) == []


def test_all_variables_of_autopar_are_known() -> None:
    read = {name for path in FILES for name in re.findall(r'"(AUTOPAR_[A-Z_]+)"', path.read_text())}
    assert {"AUTOPAR_CACHE", "AUTOPAR_QUIET"} <= read <= variables.EFFECTS.keys()

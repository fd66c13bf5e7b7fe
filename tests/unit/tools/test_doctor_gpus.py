"""GPUs and their links on the page of `autopar doctor`, from what nvidia-smi and timed transfers say."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost.hardware.load import load_hardware
from autopar.errors import WorkerError
from autopar.tools.doctor import devices, links, nvidia_smi, transfers
from autopar.tools.doctor.finding import Finding, Gpu, Subject
from autopar.tools.doctor.gpu_processes import PRODUCT, LoadedGpu, SeenGpus
from autopar.tools.doctor.nvidia_smi import GpuState, SmiError, link_rates, parsed_states, topology
from autopar.tools.doctor.transfers import FailedTransfer, PairTransfers, Transfer, TransferTask

GIB, MIB = 2**30, 2**20
H200 = load_hardware("h200-nvlink")
QUERY = (
    "0, GPU-6f7bd0b5-5f0c-2a68-2a5b-000000000000, NVIDIA H200, 580.159.04, 345, 1980, 76.52, 700.00, 700.00, 28, "
    "0x0000000000000001, 4, 0, Disabled, Default\n"
    "1, GPU-6f7bd0b5-5f0c-2a68-2a5b-000000000001, NVIDIA H200, 580.159.04, 1755, 1980, 698.91, 700.00, 700.00, 61, "
    "0x0000000000000004, 98304, 0, Disabled, Default\n"
)
CONSUMER = (
    "0, GPU-1, NVIDIA GeForce RTX 4090, 550.54.15, 210, 3105, 18.03, 450.00, 450.00, 33, 0x0000000000000001, 1, [N/A], "
    "[N/A], Default\n"
)
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNODE\tSYS\t0-31\t0\t\tN/A\n"
    "GPU2\tSYS\tNODE\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n  NIC0: mlx5_0\n"
)
LINKS = (
    "GPU 0: NVIDIA H200 (UUID: GPU-6f7bd0b5-5f0c-2a68-2a5b-000000000000)\n"
    "\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
    "GPU 1: NVIDIA H200 (UUID: GPU-6f7bd0b5-5f0c-2a68-2a5b-000000000001)\n"
    "\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
)
NO_LINKS = (
    "GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)\n"
    "NVML: Unable to retrieve NVLink information as all links are inActive\n"
)


def gpus(number: int, peers: bool = True) -> tuple[Gpu, ...]:
    everyone = frozenset(range(number))
    return tuple(
        Gpu(i, "NVIDIA H200", f"GPU-{i}", 141 * GIB, everyone - {i} if peers else frozenset()) for i in range(number)
    )


def subject(number: int, peers: bool = True) -> Subject:
    return Subject(gpus(number, peers), max(2, number), H200, Path())


def state(**changes: object) -> GpuState:
    return replace(parsed_states(QUERY)[0], **changes)


# -- nvidia-smi --------------------------------------------------------------------------------------------------------


def test_states_are_in_base_units() -> None:
    idle, busy = parsed_states(QUERY)
    assert (idle.index, idle.name, idle.driver) == (0, "NVIDIA H200", "580.159.04")
    assert (busy.clock_hertz, busy.max_clock_hertz) == (1755e6, 1980e6)
    assert (busy.power_watts, busy.power_limit_watts, busy.celsius) == (698.91, 700.0, 61.0)
    assert (busy.used_bytes, busy.reasons) == (96 * GIB, nvidia_smi.POWER_CAP)
    assert idle.throttles == busy.throttles == ()
    assert replace(idle, reasons=0x48).throttles == ("hardware slowdown", "hardware thermal slowdown")


def test_numbers_that_a_gpu_does_not_have_are_none() -> None:
    (one,) = parsed_states(CONSUMER)
    assert (one.uncorrected_errors, one.mig, one.celsius) == (0, False, 33.0)
    assert parsed_states(CONSUMER.replace("18.03", "[Not Supported]"))[0].power_watts is None


def test_another_output_is_an_error() -> None:
    with pytest.raises(SmiError, match="printed 'No devices were found' for 15 fields"):
        parsed_states("No devices were found\n")


def test_topology_names_the_connection_of_each_pair() -> None:
    assert topology(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "NODE"}
    assert topology("") == {}


def test_rates_of_links() -> None:
    rates = link_rates(LINKS)
    assert {gpu: list(own) for gpu, own in rates.items()} == {0: [26.562e9] * 2, 1: [26.562e9, 0.0]}
    assert link_rates(NO_LINKS) == {0: []}


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command nvidia-smi in front of the PATH, to be written by the test."""
    command = tmp_path / nvidia_smi.COMMAND
    command.touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return command


def test_older_drivers_know_the_reasons_by_another_name(smi: Path) -> None:
    smi.write_text(
        '#!/bin/sh\ncase "$*" in *event_reasons*) echo \'Field "x" is not a valid field to query.\'; exit 2;; esac\n'
        f"printf '{CONSUMER}'\n"
    )
    assert nvidia_smi.states()[0].name == "NVIDIA GeForce RTX 4090"


def test_errors_of_the_command(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.write_text("#!/bin/sh\necho NVIDIA-SMI has failed because it could not communicate with the driver.; exit 9\n")
    with pytest.raises(SmiError, match="nvidia-smi says: NVIDIA-SMI has failed"):
        nvidia_smi.states()
    smi.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(nvidia_smi, "LIMIT_SECONDS", 0.05)
    with pytest.raises(SmiError, match="did not answer"):
        nvidia_smi.states()


# -- GPUs --------------------------------------------------------------------------------------------------------------


def test_torch_sees_fewer_gpus_than_nvidia_smi(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.write_text(f"#!/bin/sh\nprintf '{QUERY}'\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver, found = devices.presence(SeenGpus((), "The NVIDIA driver on your system is too old"))
    assert (driver.section, driver.value) == ("versions", "580.159.04")
    assert found.status == "broken" and "sees 2 GPUs and torch none" in found.value
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [finding.status for finding in devices.presence(SeenGpus(()))] == ["ok", "absent"]
    seen = [finding.value for finding in devices.presence(SeenGpus(gpus(2)))]
    assert seen[1] == "2 × NVIDIA H200, 141.0 GiB each"


@pytest.mark.parametrize(
    ("changes", "status", "value", "remedy"),
    [
        ({}, "ok", "28 °C, power limit 700 W, 4.00 MiB in use", ""),
        ({"celsius": None, "power_limit_watts": None, "used_bytes": None}, "ok", "NVIDIA H200", ""),
        ({"compute_mode": "Prohibited"}, "broken", "compute mode Prohibited", "-c 0"),
        ({"uncorrected_errors": 3}, "broken", "3 uncorrected memory errors", "Restart"),
        ({"reasons": 0x40}, "slow", "hardware thermal slowdown", "cooling"),
        ({"used_bytes": 90.0 * GIB}, "slow", "90.0 GiB in use", "Other processes"),
        ({"power_limit_watts": 400.0}, "slow", "400 W, 4.00 MiB in use; 700 W by default", "-pl 700"),
        ({"compute_mode": "Exclusive_Process"}, "slow", "one process at a time", "-c 0"),
        ({"mig": True}, "slow", "divided by MIG", "-mig 0"),
    ],
)
def test_idle_gpus(changes: dict[str, object], status: str, value: str, remedy: str) -> None:
    finding = devices.idle_finding(gpus(1)[0], state(**changes))
    assert finding.status == status and value in finding.value and remedy in finding.remedy


def loaded(share: float, **changes: object) -> LoadedGpu:
    """A GPU with a share of the rate that the cost model expects."""
    tokens, in_features, out_features = PRODUCT.sizes
    flops = 2.0 * tokens * in_features * out_features
    num_bytes = 2.0 * (tokens * in_features + in_features * out_features + tokens * out_features)
    seconds = H200.op_seconds("matmul", flops, num_bytes, "bfloat16") / share
    return LoadedGpu(1, flops, num_bytes, seconds, state(clock_hertz=1755e6, power_watts=690.0, **changes))


@pytest.mark.parametrize(
    ("gpu", "status", "remedy"),
    [
        (loaded(1.1), "ok", ""),
        (loaded(0.75), "ok", ""),
        (loaded(0.6), "slow", "locked clocks"),
        (loaded(0.6, reasons=nvidia_smi.POWER_CAP), "slow", "power limit holds"),
        (loaded(1.0, reasons=nvidia_smi.POWER_CAP), "ok", ""),
        (loaded(1.0, reasons=0x80), "slow", "cooling and power supply"),
    ],
)
def test_gpus_at_work(gpu: LoadedGpu, status: str, remedy: str) -> None:
    finding = devices.work_finding(gpu, H200)
    assert (finding.name, finding.status) == ("GPU 1 at work", status) and remedy in finding.remedy
    assert "1,755 of 1,980 MHz, 690 of 700 W, 28 °C" in finding.value and "cost model" in finding.value
    assert finding.rate is not None and finding.rate.predicted is not None and finding.rate.unit == "FLOP/s"
    assert devices.work_finding(gpu, None).status == ("slow" if gpu.state and gpu.state.throttles else "ok")


def test_a_gpu_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(entry, payload, world, limit, on_result) -> None:
        assert (payload, world) == (("GPU-0", "GPU-1"), 2)
        on_result(loaded(1.0))
        raise WorkerError("AcceleratorError: CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(devices, "run_in_processes", fail)
    first, second = devices.gpus_at_work(subject(2))
    assert (first.status, first.name, second.status) == ("broken", "GPU 0 at work", "ok")
    assert "illegal memory access" in first.value


# -- links -------------------------------------------------------------------------------------------------------------


def test_peer_access() -> None:
    assert [f.status for f in links.peer_access(subject(2))] == ["ok"]
    (without,) = links.peer_access(subject(3, peers=False))
    assert without.status == "slow" and "not between GPUs 0–1, 0–2, 1–2" in without.value
    (as_modelled,) = links.peer_access(replace(subject(2, peers=False), hardware=load_hardware("rtx4090-pcie")))
    assert as_modelled.status == "ok" and "as the cost model says" in as_modelled.value
    assert list(links.peer_access(subject(1))) == []


def test_nvlinks() -> None:
    full = {gpu: [26.562e9] * 18 for gpu in range(2)}
    assert links.link_finding(full, H200).value == "18 links of 26.6 GB/s on each GPU"
    lost = links.link_finding({**full, 1: [26.562e9] * 17 + [0.0]}, H200)
    assert lost.status == "slow" and "GPU 1 has 17" in lost.value
    none = {0: (), 1: ()}
    assert links.link_finding(none, H200).status == "slow"
    assert links.link_finding(none, load_hardware("rtx4090-pcie")).status == "absent"


def test_nvlink_lines_are_those_of_the_gpus_that_torch_sees(smi: Path) -> None:
    smi.write_text(
        f"#!/bin/sh\ncase $1 in topo) printf '{TOPOLOGY}';; nvlink) printf '{LINKS}';; *) printf '{QUERY}';; esac\n"
    )
    own = tuple(replace(gpu, uuid=one.uuid) for gpu, one in zip(gpus(2), parsed_states(QUERY)))
    connection, link = links.nvlink(replace(subject(2), gpus=own))
    assert connection.value == "NV18 (1 pair)"
    assert link.status == "slow" and link.value == "2 links of 26.6 GB/s, but GPU 1 has 1"


def transfer(transport: transfers.Transport, share: float, pair: tuple[int, int] = (0, 1)) -> PairTransfers:
    """A transfer with a share of the rate that the cost model expects."""
    assert H200.link is not None
    num_bytes = 64 * MIB
    return PairTransfers(pair, (Transfer(transport, num_bytes, H200.link.seconds(num_bytes) / share),))


def found(results: list[PairTransfers], number: int = 2, peers: bool = True) -> dict[str, Finding]:
    return {finding.name: finding for finding in links.transfer_findings(subject(number, peers), results)}


def test_rates_are_compared_for_the_transport_that_ranks_use() -> None:
    fast, slow = transfer("symmetric memory", 0.9), transfer("symmetric memory", 0.6)
    assert found([fast])["symmetric memory"].status == "ok"
    finding = found([slow])["symmetric memory"]
    assert finding.status == "slow" and "nvidia-smi nvlink --status" in finding.remedy
    assert finding.rate is not None and finding.rate.measured == pytest.approx(0.6 * (finding.rate.predicted or 0.0))
    assert "64.0 MiB between GPUs" in finding.value
    assert found([transfer("NCCL", 0.1)])["NCCL"].status == "ok"
    assert found([transfer("NCCL", 0.1)], peers=False)["NCCL"].status == "slow"


def test_fast_pairs_share_a_line() -> None:
    pairs = [(0, 1), (0, 2), (1, 2)]
    results = [transfer("symmetric memory", share, pair) for share, pair in zip((1.0, 0.5, 0.8), pairs)]
    shown = found(results, number=3)
    assert {name: finding.status for name, finding in shown.items()} == {
        "symmetric memory 0–2": "slow", "symmetric memory": "ok",
    }  # fmt: skip
    assert shown["symmetric memory"].value.startswith("2 pairs, up to ")


def test_after_a_transport_that_fails_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[TransferTask] = []

    def run(entry, task, world, limit, on_result) -> None:
        tasks.append(task)
        for transport in task.transports:
            if transport == "NCCL":
                raise WorkerError("DistBackendError: NCCL error: unhandled system error")
            on_result(Transfer(transport, 64 * MIB, 1e-3))

    monkeypatch.setattr(transfers, "run_in_processes", run)
    result = transfers.pair_transfers(gpus(3), (0, 2))
    assert [task.devices for task in tasks] == [("cuda:0", "cuda:2")] * 2
    assert [transfer.transport for transfer in result.transfers] == ["Gloo", "symmetric memory"]
    assert result.failed == (FailedTransfer("NCCL", "DistBackendError: NCCL error: unhandled system error"),)
    (finding,) = (f for f in links.transfer_findings(subject(3), [result]) if f.status == "broken")
    assert finding.name == "NCCL" and "NCCL_DEBUG=INFO" in finding.remedy


def test_pairs_are_given_up_after_some_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, int]] = []

    def fail(gpus: tuple[Gpu, ...], pair: tuple[int, int]) -> PairTransfers:
        tried.append(pair)
        return PairTransfers(pair, (), (FailedTransfer("NCCL", "no answer within 40 s"),))

    monkeypatch.setattr(links, "pair_transfers", fail)
    *_, last = links.transfers(subject(8))
    assert len(tried) == links.MAX_FAILED and last.value == "25 pairs not tried, after 3 that failed"


def test_one_device_sends_nothing() -> None:
    (finding,) = links.transfers(replace(subject(1), devices=1))
    assert finding.status == "absent"

"""The page of `autopar doctor`: probes that fail, requests, planning, and how the page is printed."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost.hardware.load import load_hardware
from autopar.errors import SEE_DOCTOR, HardwareError, UsageError, WorkerError
from autopar.ir.text import rendered
from autopar.measure.workers import WorkersExit
from autopar.tools.doctor import compiler, devices, host, in_processes, page, planning, versions
from autopar.tools.doctor.attempt import MAX_REASON, TookTooLongError, findings_of, reason, within
from autopar.tools.doctor.finding import SECTIONS, Finding, Gpu, Probe, Rate, Subject
from autopar.tools.doctor.page import Page, Request, checked_machine
from autopar.tools.report.doctor_table import doctor_parts

SUBJECT = Subject((), 2, load_hardware("cpu-generic"), Path())
GPU = Gpu(0, "NVIDIA H200", "GPU-0", 2**37, frozenset())
PAGE = Page(
    (
        Finding("versions", "torch", "ok", "2.11.0+cu130"),
        Finding("links", "Gloo", "slow", "853.0 MB/s", "Measure it: `autopar profile`.", Rate(853e6, 1.9e9, "B/s")),
        Finding("limits", "/dev/shm", "broken", "64.0 MiB free of 64.0 MiB", "docker run --shm-size=8g"),
        Finding("compile", "CUDA graph", "absent", "no GPU"),
        Finding("variables", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "ok", "1: a setting of torch's NCCL backend"),
    )
)
PRINTED = """\
versions
ok      torch               2.11.0+cu130

links
slow    Gloo                853.0 MB/s
                            → Measure it: `autopar profile`.

limits
broken  /dev/shm            64.0 MiB free of 64.0 MiB
                            → docker run --shm-size=8g

compile
–       CUDA graph          no GPU

variables
ok      TORCH_NCCL_ASYNC_ERROR_HANDLING  1: a setting of torch's NCCL backend

2 ok, 1 slow, 1 broken"""


# -- one probe ---------------------------------------------------------------------------------------------------------


def probe(run, limit_seconds: float = 10.0) -> Probe:
    return Probe("limits", "memory", run, "Free memory.", limit_seconds)


def test_a_probe_that_raises_is_a_broken_finding() -> None:
    def fail(subject: Subject) -> Iterable[Finding]:
        yield Finding("limits", "memory", "ok", "1 GiB")
        raise KeyError("MemTotal")

    (finding,) = findings_of(probe(fail), SUBJECT)
    assert finding == Finding("limits", "memory", "broken", "KeyError: 'MemTotal'", "Free memory.")


def test_a_probe_that_hangs_is_given_up() -> None:
    released = threading.Event()

    def hang(subject: Subject) -> Iterable[Finding]:
        released.wait()
        return ()

    (finding,) = findings_of(probe(hang, limit_seconds=0.05), SUBJECT)
    assert finding.status == "broken" and "no answer within" in finding.value
    released.set()
    with pytest.raises(TookTooLongError):
        within(0.01, lambda: released.clear() or released.wait(0.5))


def test_reasons_are_one_line() -> None:
    assert reason(UsageError(f"No solver. Install one. {SEE_DOCTOR}")) == "No solver. Install one"
    assert reason(OSError("a\n  b")) == "OSError: a b"
    assert reason(MemoryError()) == "MemoryError"
    assert len(reason(ValueError("x" * 10_000))) == MAX_REASON


def test_a_finding_has_a_remedy_where_it_is_a_fault() -> None:
    for status, remedy in (("ok", "do"), ("absent", "do"), ("slow", ""), ("broken", "")):
        with pytest.raises(AssertionError):
            Finding("limits", "memory", status, "1 GiB", remedy)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rate", "text", "is_slow"),
    [
        (Rate(350.2e9, 341e9, "B/s"), "350.2 GB/s, cost model 341.0 GB/s", False),
        (Rate(1.3e9, 2e9, "B/s"), "1.30 GB/s, cost model 2.00 GB/s", True),
        (Rate(4.3e12, None, "B/s"), "4,300.0 GB/s", False),
        (Rate(745e12, 652e12, "FLOP/s"), "745.0 TFLOP/s, cost model 652.0 TFLOP/s", False),
        (Rate(12.5e3, None, "B/s"), "12.5 kB/s", False),
    ],
)
def test_rates(rate: Rate, text: str, is_slow: bool) -> None:
    assert (rate.text, rate.is_slow) == (text, is_slow)


@pytest.mark.parametrize(
    ("ended", "failure"),
    [
        (WorkersExit((0, 0), ("nothing", "nothing"), False), None),
        (WorkersExit((None, None), ("", ""), True), "no answer within 40 s"),
        (WorkersExit((0, 1), ("", "OSError: refused."), False), "OSError: refused"),
        (WorkersExit((-11,), ("NCCL",), False), "the process was killed by SIGSEGV after: NCCL"),
    ],
)
def test_failures_of_processes(ended: WorkersExit, failure: str | None) -> None:
    assert in_processes.failure_of(ended, 40.0) == failure


# -- requests ----------------------------------------------------------------------------------------------------------


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--run-folder .*missing is no folder"):
        checked_machine(Request(tmp_path / "missing"))
    with pytest.raises(HardwareError, match="No cost model is named 'h20'"):
        checked_machine(Request(tmp_path, hardware="h20"))
    with pytest.raises(UsageError, match=r"--devices 3, but torch sees 2 GPUs\. Give 2 at most"):
        page.num_devices(Request(devices=3), 2)
    with pytest.raises(UsageError, match="--devices 99, but there is no GPU"):
        page.num_devices(Request(devices=99), 0)
    assert [page.num_devices(Request(), gpus) for gpus in (0, 1, 8)] == [2, 1, 8]
    assert page.num_devices(Request(devices=4), 0) == 4


def test_cost_models_by_default() -> None:
    names = [getattr(page.default_hardware(gpus), "name", "") for gpus in ((), (GPU,), (replace(GPU, name="T4"),))]
    assert names == ["cpu-generic", "h200-nvlink", "a100-nvlink"]


# -- the whole page ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what computes or starts processes."""
    monkeypatch.setattr(in_processes, "start_server", lambda: None)
    monkeypatch.setattr(page.launcher, "PROBES", ())
    monkeypatch.setattr(devices, "PROCESSOR", Probe("devices", "processor", lambda subject: (), "None."))


def test_without_worker_processes_the_rest_is_checked(quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise WorkerError(f"No worker was started: out of memory. {SEE_DOCTOR}")

    monkeypatch.setattr(in_processes, "result_in_process", fail)
    result = checked_machine(Request(tmp_path))
    by_name = {finding.name: finding for finding in result.findings}
    assert by_name["worker processes"].value == "No worker was started: out of memory"
    assert by_name["all else"].value == "not checked, since worker processes do not start"
    assert by_name["write"].status != "broken" and result.exit_code == 1
    order = [SECTIONS.index(finding.section) for finding in result.findings]
    assert order == sorted(order)


def test_without_torch_the_rest_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = checked_machine(Request(tmp_path))
    broken = [finding for finding in result.findings if finding.status == "broken"]
    assert [finding.name for finding in broken] == ["import of torch"] and broken[0].remedy == versions.TORCH_REMEDY
    assert {"open files", "ports", "write", "all else"} <= {finding.name for finding in result.findings}


def test_a_driver_that_hangs_leaves_the_rest(quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang() -> None:
        raise WorkerError("no answer within 60 s")

    monkeypatch.setattr(devices, "seen_gpus", hang)
    for module in (devices, compiler, planning, page.disk):
        monkeypatch.setattr(module, "PROBES", ())
    monkeypatch.setattr("autopar.tools.doctor.links.transfer_probe", lambda devices: devices_probe(devices))
    monkeypatch.setattr(host, "START", Probe("launch", "worker processes", lambda subject: [OK], "None."))
    seen: list[str] = []
    result = checked_machine(Request(tmp_path, devices=3), seen.append)
    by_name = {finding.name: finding for finding in result.findings}
    assert by_name["GPUs"].status == "broken" and "no answer" in by_name["GPUs"].value
    assert by_name["transfers"].value == "3 CPU processes"
    assert seen[0] == "torch" and "links: transfers" in seen


OK = Finding("launch", "worker processes", "ok", "one answers")


def devices_probe(devices: int) -> Probe:
    def run(subject: Subject) -> list[Finding]:
        assert subject.device_type == "cpu" and subject.comparable is not None
        return [Finding("links", "transfers", "ok", f"{devices} CPU processes")]

    return Probe("links", "transfers", run, "None.")


# -- planning and compilation ------------------------------------------------------------------------------------------


def test_cost_models_of_other_machines() -> None:
    def shown(name: str, gpus: tuple[Gpu, ...]) -> Finding:
        (finding,) = planning.cost_model(replace(SUBJECT, hardware=load_hardware(name), gpus=gpus))
        return finding

    assert shown("cpu-generic", ()).value.startswith("cpu-generic, from data sheets and assumptions")
    assert shown("h200-nvlink", (GPU,)).value == "h200-nvlink, measured: NVIDIA H200"
    assert "this machine has no GPU" in shown("h200-nvlink", ()).value
    other = shown("a100-nvlink", (replace(GPU, name="Tesla T4"),))
    assert other.status == "slow" and "(by default for unknown GPUs), and this machine has Tesla T4" in other.value
    with pytest.raises(HardwareError):
        list(planning.cost_model(replace(SUBJECT, hardware=None)))


def test_measured_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache" / "autopar"))
    assert [f.value for f in planning.measured_times(SUBJECT)] == [f"none in {tmp_path / 'cache' / 'autopar'} yet"]
    folder = tmp_path / "cache" / "autopar" / "times" / "a"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number}.json").write_text("{}" * 512)
        os.utime(folder / f"{number}.json", (0, time.time() - 3.5 * planning.DAY_SECONDS))
    (finding,) = planning.measured_times(SUBJECT)
    assert finding.value.startswith("3 regions, the last measured 3 days ago; 3.00 KiB in")
    monkeypatch.setenv("AUTOPAR_CACHE", "/proc/version/cache")
    assert [f.status for f in planning.measured_times(SUBJECT)] == ["slow"]


def test_another_solver_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "result_in_process", lambda entry, payload, limit: "CBC")
    assert [f.status for f in planning.solver(SUBJECT)] == ["slow"]


def test_without_a_c_compiler_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "result_in_process", None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    (finding,) = compiler.compilation(SUBJECT)
    assert finding.status == "slow" and "no-such-compiler" in finding.value and "apt install g++" in finding.remedy


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    assert [f.status for f in compiler.triton_kernels(SUBJECT)] == ["absent"]
    assert [f.status for f in compiler.triton_kernels(replace(SUBJECT, gpus=(GPU,)))] == ["slow"]


# -- how it is printed -------------------------------------------------------------------------------------------------


def test_the_page_at_80_columns() -> None:
    assert rendered(doctor_parts(PAGE), 80, color=False) == PRINTED


def test_status_words_have_colours() -> None:
    lines = rendered(doctor_parts(PAGE), 80, color=True).splitlines()
    assert lines[4].startswith("\x1b[33mslow") and lines[8].startswith("\x1b[31mbroken")


def test_long_values_stay_in_their_column() -> None:
    long = Finding("limits", "memory", "slow", "word " * 40, "remedy " * 40)
    lines = rendered(doctor_parts(Page((long,))), 80, color=False).splitlines()[2:-2]
    assert all(len(line) <= 80 and line.startswith(" " * 28) for line in lines)


def test_slow_is_no_failure() -> None:
    assert Page(PAGE.findings[:2]).exit_code == 0 and PAGE.exit_code == 1
    assert PAGE.counts == {"ok": 2, "slow": 1, "broken": 1, "absent": 1}

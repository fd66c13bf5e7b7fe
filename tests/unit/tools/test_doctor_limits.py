"""Limits of the system, versions, and the run folder's disk, on the page of `autopar doctor`."""

from __future__ import annotations

import resource
import shutil
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from math import inf
from pathlib import Path

import psutil
import pytest

from autopar.tools.doctor import disk, limits, versions
from autopar.tools.doctor.cgroups import GroupLimits, group_limits
from autopar.tools.doctor.finding import Subject

GIB = 2**30
Usage = namedtuple("Usage", "total used free")
UNLIMITED = GroupLimits(inf, inf, inf)


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return Subject((), 2, None, tmp_path)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch):
    """Sets the limits of the process's control group."""

    def use(limits_of_group: GroupLimits) -> None:
        monkeypatch.setattr(limits, "group_limits", lambda: limits_of_group)

    use(UNLIMITED)
    return use


def write(mount: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text)


# -- control groups ----------------------------------------------------------------------------------------------------


def test_limits_of_version_2_are_the_tightest_of_all_groups_around(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("0::/slice/job\n")
    write(
        tmp_path / "mount",
        {
            "slice/job/memory.max": "max\n", "slice/memory.max": "8589934592\n", "slice/job/cpu.max": "150000 100000\n",
            "slice/cpu.max": "max 100000\n", "slice/job/pids.max": "512\n", "pids.max": "1024\n",
        },
    )  # fmt: skip
    assert group_limits(tmp_path / "self", tmp_path / "mount") == GroupLimits(8 * GIB, 1.5, 512)


def test_limits_of_version_1_lie_in_a_folder_for_each_controller(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:pids:/docker/abc\n0::/\n")
    write(
        tmp_path / "mount",
        {  # a container's own group is mounted as the root
            "memory/memory.limit_in_bytes": "4294967296\n", "cpu/cpu.cfs_quota_us": "50000\n",
            "cpu/cpu.cfs_period_us": "100000\n", "pids/docker/abc/pids.max": "max\n",
        },
    )  # fmt: skip
    assert group_limits(tmp_path / "self", tmp_path / "mount") == GroupLimits(4 * GIB, 0.5, inf)
    (tmp_path / "mount/cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert group_limits(tmp_path / "self", tmp_path / "mount").processors == inf


def test_without_control_groups_nothing_is_limited(tmp_path: Path) -> None:
    assert group_limits(tmp_path / "none", tmp_path) == UNLIMITED


# -- limits ------------------------------------------------------------------------------------------------------------


def test_memory(subject: Subject, group, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = namedtuple("memory", "total available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(16 * GIB, 12 * GIB))
    assert [f.status for f in limits.memory(subject)] == ["ok"]
    group(GroupLimits(4.0 * GIB, inf, inf))
    *_, limit = limits.memory(subject)
    assert (limit.status, limit.value) == ("slow", "4.00 GiB for this container or job") and "--memory" in limit.remedy
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(16 * GIB, GIB))
    assert next(iter(limits.memory(subject))).status == "slow"


@pytest.mark.parametrize(
    ("usage", "status"),
    [
        (Usage(8 * GIB, 0, 8 * GIB), "ok"),
        (Usage(64 * 2**20, 0, 64 * 2**20), "slow"),  # Docker's default
        (Usage(8 * GIB, 8 * GIB, 4096), "broken"),
    ],
)
def test_shared_memory(usage: Usage, status: str, subject: Subject, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(limits, "SHARED_FOLDER", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    shared, files = limits.shared_memory(subject)
    assert shared.status == status and files.status == "ok"
    assert ("--shm-size" in shared.remedy) == (status != "ok")


@pytest.mark.parametrize(("limit", "status"), [(65536, "ok"), (1024, "slow"), (64, "broken"), (-1, "ok")])
def test_open_files(limit: int, status: str, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    soft = resource.RLIM_INFINITY if limit < 0 else limit
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, 524288))
    (finding,) = limits.open_files(subject)
    assert finding.status == status and ("ulimit -n 65536" in finding.remedy) == (status != "ok")


def test_locked_memory_counts_with_infiniband(subject: Subject, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8 * 2**20, 8 * 2**20))
    monkeypatch.setattr(limits, "INFINIBAND", tmp_path)
    assert [f.status for f in limits.locked_memory(subject)] == ["ok"]
    (tmp_path / "mlx5_0").mkdir()
    assert [f.status for f in limits.locked_memory(subject)] == ["slow"]


@pytest.mark.parametrize(("left", "status"), [(inf, "ok"), (5000, "ok"), (1000, "slow"), (20, "broken")])
def test_processes(left: float, status: str, subject: Subject, group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "own_threads", lambda: 300)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    group(GroupLimits(inf, inf, left + 300))
    (finding,) = limits.processes(subject)
    assert finding.status == status and ("--pids-limit" in finding.remedy) == (status != "ok")


def test_threads_of_this_process_count() -> None:
    assert limits.own_threads() >= psutil.Process().num_threads()


def test_processor_time(subject: Subject, group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.launch.devices.num_processors", lambda: 16)
    assert [f.value for f in limits.processor_time(subject)] == ["all of 16 processors"]
    group(GroupLimits(inf, 2.5, inf))
    (finding,) = limits.processor_time(subject)
    assert (finding.status, finding.value) == ("slow", "2.5 of 16 processors") and "taskset -c 0-1" in finding.remedy


# -- disk --------------------------------------------------------------------------------------------------------------


def test_disk_is_measured_and_left_empty(subject: Subject) -> None:
    space, write_speed = disk.disk(subject)
    assert space.name == "space" and str(subject.run_folder) in write_speed.value
    assert write_speed.rate is not None and write_speed.rate.measured > 0 and write_speed.rate.predicted is None
    assert list(subject.run_folder.iterdir()) == []


def test_nothing_is_left_of_a_write_that_fails(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        disk.write_seconds(str(subject.run_folder))
    assert list(subject.run_folder.iterdir()) == []


def test_slow_and_full_disks(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(100 * GIB, 99 * GIB, GIB))
    monkeypatch.setattr(disk, "write_seconds", lambda folder: 8.0)
    assert [f.status for f in disk.disk(subject)] == ["slow", "slow"]

    def refuse(folder: str) -> float:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write_seconds", refuse)
    *_, finding = disk.disk(subject)
    assert (
        finding.status == "broken" and "No space left on device" in finding.value and "--run-folder" in finding.remedy
    )


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "bounds", "status", "value"),
    [
        ("2.11.0+cu130", ">=2.11", "ok", "2.11.0+cu130"),
        ("2.15.0", ">=2.11", "ok", "2.15.0"),
        ("2.12.1", ">=2.11", "ok", "2.12.1; autopar was tried with 2.11.0 and 2.15.0"),
        ("2.16.0", ">=2.11", "ok", "2.16.0, newer than 2.15.0, the newest that autopar was tried with"),
        ("2.9.1", ">=2.11", "broken", "2.9.1, and autopar needs at least 2.11"),
        ("2.11", ">=2.11.0", "ok", "2.11; autopar was tried with 2.11.0 and 2.15.0"),
        ("4.0", "<4,>=3.3", "broken", "4.0, and autopar needs less than 4"),
    ],
)
def test_versions_against_bounds(found: str, bounds: str, status: str, value: str) -> None:
    finding = versions.against_bounds("torch", found, bounds, "pip install -U torch")
    assert (finding.status, finding.value) == (status, value)


def test_bounds_are_those_of_the_package() -> None:
    bounds = versions.required()
    assert bounds["torch"] == ">=2.11" and bounds["pulp"].startswith("<4,>=3.") and bounds["timm"].startswith(">=")
    assert "scikit-learn" not in bounds


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    assert versions.package("timm", ">=1").status == "absent"
    assert versions.package("pulp", "<4,>=3.3").remedy == "pip install 'pulp<4,>=3.3'"


def test_packages_without_faults_share_a_line(subject: Subject) -> None:
    names = [finding.name for finding in versions.package_versions(subject)]
    assert names == ["autopar", "Python", "torch", "torchvision", "timm", "other packages"]


def test_a_folder_without_metadata_has_no_bounds(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "requires", missing)
    *_, last = versions.package_versions(subject)
    assert (last.name, last.status) == ("requirements", "absent")

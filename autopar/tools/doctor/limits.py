"""Limits of the system: memory, shared memory, open files, locked memory, processes, processor time."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from math import inf
from pathlib import Path

import psutil

from autopar.ir.units import BYTES, text
from autopar.tools.doctor.cgroups import group_limits
from autopar.tools.doctor.finding import Finding, Probe, Subject

SHARED_FOLDER, INFINIBAND = Path("/dev/shm"), Path("/sys/class/infiniband")
# Docker's default of 64 MiB is too small for the images of a few loader processes, or for NCCL without peer access.
ENOUGH_SHARED_BYTES, MIN_SHARED_BYTES = 2**30, 32 * 2**20
MESSAGE_BYTES = 64 * 2**20  # of the file in memory by which tensors travel to ranks
# A rank opens about a hundred files, a loader process holds one or two for each batch that it makes ahead.
ENOUGH_FILES, MIN_FILES = 4096, 256
# torch starts a few threads for each rank, and each counts as a process; loaders start a process each.
ENOUGH_PROCESSES, MIN_PROCESSES = 2048, 128
LOW_MEMORY_SHARE = 0.1  # of the physical memory


def memory(subject: Subject) -> Iterator[Finding]:
    """Findings on the memory that is free, and on a container's limit, which the planner does not know."""
    del subject
    physical, limit = psutil.virtual_memory(), group_limits().memory_bytes
    value = f"{text(physical.available, BYTES)} free of {text(physical.total, BYTES)}"
    if physical.available < LOW_MEMORY_SHARE * physical.total:
        yield Finding(
            "limits", "memory", "slow", value, "End other processes: a rank that has no memory left is killed."
        )
    else:
        yield Finding("limits", "memory", "ok", value)
    if limit < physical.total:
        remedy = (
            "CPU processes are planned for a share of the physical memory: pass a share of the limit as --memory "
            "(memory=), or raise it (docker run --memory, sbatch --mem)."
        )
        yield Finding("limits", "memory limit", "slow", f"{text(limit, BYTES)} for this container or job", remedy)


def shared_memory(subject: Subject) -> Iterator[Finding]:
    """Findings on /dev/shm, and on files in memory as the runtime makes them."""
    from autopar.runtime.launch.shared_memory import allocate, shared_file

    del subject
    if SHARED_FOLDER.is_dir():
        usage = shutil.disk_usage(SHARED_FOLDER)
        value = f"{text(usage.free, BYTES)} free of {text(usage.total, BYTES)}"
        remedy = "Give more: docker run --shm-size=8g (or --ipc=host), in Kubernetes an emptyDir of medium Memory."
        if usage.free < MIN_SHARED_BYTES:
            remedy += " If it is full, remove files there that no process uses."
            yield Finding("limits", "/dev/shm", "broken", value, remedy)
        elif usage.total < ENOUGH_SHARED_BYTES:
            yield Finding("limits", "/dev/shm", "slow", f"{value}: loader processes and NCCL may run out", remedy)
        else:
            yield Finding("limits", "/dev/shm", "ok", value)
    with os.fdopen(shared_file(), "wb") as file:
        allocate(file.fileno(), MESSAGE_BYTES)
    yield Finding(
        "limits", "files in memory", "ok", f"{text(MESSAGE_BYTES, BYTES)} allocated, as messages to ranks are"
    )


def open_files(subject: Subject) -> Iterator[Finding]:
    """Finding on the number of files that a process may open."""
    del subject
    limit, hard = (endless(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    raised = f"ulimit -n {min(hard, 65536):.0f}"
    if limit >= ENOUGH_FILES:
        yield Finding("limits", "open files", "ok", f"{count(limit)} for each process")
        return
    remedy = f"Raise the limit before the start: {raised} (docker run --ulimit nofile=65536, LimitNOFILE= of systemd)."
    status = "broken" if limit < MIN_FILES else "slow"
    yield Finding("limits", "open files", status, f"{count(limit)}: ranks and loader processes may run out", remedy)


def locked_memory(subject: Subject) -> Iterator[Finding]:
    """Finding on the memory that a process may lock, which counts for RDMA."""
    del subject
    limit = endless(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    value = "unlimited" if limit == inf else text(limit, BYTES)
    if limit == inf or not INFINIBAND.is_dir() or not any(INFINIBAND.iterdir()):
        yield Finding("limits", "locked memory", "ok", value)
        return
    remedy = (
        "NCCL registers memory with this machine's InfiniBand: ulimit -l unlimited (docker run --ulimit memlock=-1)."
    )
    yield Finding("limits", "locked memory", "slow", value, remedy)


def processes(subject: Subject) -> Iterator[Finding]:
    """Finding on the number of processes and threads that can still be started."""
    del subject
    # The kernel does not hold root to its limit.
    of_user = inf if os.geteuid() == 0 else endless(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    limit, remedy = min(
        (of_user, "ulimit -u 65536"), (group_limits().processes, "docker run --pids-limit=-1, or TasksMax= of systemd")
    )
    running = own_threads()
    value = "unlimited" if limit == inf else f"{limit:,.0f} processes and threads, {running:,} run now"
    if limit - running >= ENOUGH_PROCESSES:
        yield Finding("limits", "processes", "ok", value)
        return
    status = "broken" if limit - running < MIN_PROCESSES else "slow"
    yield Finding("limits", "processes", status, value, f"Raise the limit: {remedy}.")


def own_threads() -> int:
    """Number of threads of this user's processes."""
    owner, total = os.getuid(), 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids, threads = process.info["uids"], process.info["num_threads"]
        total += threads or 0 if uids is not None and uids.real == owner else 0
    return total


def processor_time(subject: Subject) -> Iterator[Finding]:
    """Finding on a container's share of processor time, by which ranks do not choose their number of threads."""
    from autopar.runtime.launch.devices import num_processors

    del subject
    share, usable = group_limits().processors, num_processors()
    if share >= usable:
        yield Finding("limits", "processor time", "ok", f"all of {usable} processors")
        return
    remedy = (
        "Ranks start a thread for each processor that they see, and wait for their share: let them see no more "
        f"(docker run --cpuset-cpus instead of --cpus, or taskset -c 0-{max(0, int(share) - 1)})."
    )
    yield Finding("limits", "processor time", "slow", f"{share:.1f} of {usable} processors", remedy)


def endless(limit: int) -> float:
    """A limit of `resource` as a number; infinite for none."""
    return inf if limit == resource.RLIM_INFINITY else float(limit)


def count(limit: float) -> str:
    """A limit as text."""
    return "unlimited" if limit == inf else f"{limit:,.0f}"


PROBES = (
    Probe("limits", "memory", memory, "Free memory.", needs_torch=False),
    Probe("limits", "shared memory", shared_memory, "Give the machine or container more memory."),
    Probe("limits", "open files", open_files, "Raise the limit of open files.", needs_torch=False),
    Probe("limits", "locked memory", locked_memory, "Raise the limit of locked memory.", needs_torch=False),
    Probe("limits", "processes", processes, "Raise the limit of processes.", needs_torch=False),
    Probe("limits", "processor time", processor_time, "Give the container more processors."),
)

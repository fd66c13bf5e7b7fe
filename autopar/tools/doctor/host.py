"""This host as a place of ranks: its name, the loopback interface, free ports, and the start of worker processes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.ir.units import TIME, text
from autopar.tools.doctor.finding import Finding, Probe, Subject

if TYPE_CHECKING:
    from autopar.measure.workers import Emit

LAUNCHERS = frozenset({"RANK", "SLURM_PROCID"})  # variables of torchrun and srun
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
SOCKETS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
MIN_PORTS, ENOUGH_PORTS = 64, 1024  # each pair of ranks has a few connections
START_LIMIT_SECONDS, SLOW_START_SECONDS = 60.0, 20.0
LOOPBACK_REMEDY = "Bring the interface of 127.0.0.1 up (ip link set lo up), and let processes connect to it."
START_REMEDY = (
    "The ranks of a plain script cannot start: end other processes, raise the limits below 'limits', and look at what "
    "python -c 'import autopar.runtime.launch.preload' prints."
)


def address_of(host: str) -> str:
    """First address of a host. Raises OSError if its name does not resolve."""
    return str(socket.getaddrinfo(host, None)[0][4][0])


def host_name(subject: Subject) -> Iterator[Finding]:
    """Finding on this host's name, by which ranks on other nodes find it."""
    del subject
    name = socket.gethostname()
    try:
        address = address_of(name)
    except OSError as error:
        remedy = f"Add a line with its address and {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME to its interface."
        # The ranks of a plain script meet at the loopback interface.
        status = "broken" if LAUNCHERS & os.environ.keys() else "slow"
        yield Finding("launch", "host name", status, f"{name} does not resolve: {error.strerror}", remedy)
        return
    yield Finding("launch", "host name", "ok", f"{name} is {address}")


def loopback(subject: Subject) -> Iterator[Finding]:
    """Finding on the loopback interface, where a plain script's ranks meet. Raises what fails there."""
    from autopar.runtime.launch.loopback import HOST, loopback_store, loopback_variables

    del subject
    interfaces, store = loopback_variables({}), loopback_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    yield Finding("launch", "loopback", "ok", f"a store at {HOST}:{store.port} answers over {min(interfaces.values())}")


def ports(subject: Subject) -> Iterator[Finding]:
    """Finding on the ports that the system hands out to connections."""
    del subject
    if not PORT_RANGE.exists():
        yield Finding("launch", "ports", "absent", f"the system has no {PORT_RANGE}")
        return
    first, last = map(int, PORT_RANGE.read_text().split())
    used = {port for path in SOCKETS if path.exists() for port in local_ports(path.read_text())}
    free = last - first + 1 - sum(first <= port <= last for port in used)
    value = f"{free:,} free of {first:,} to {last:,}"
    if free >= ENOUGH_PORTS:
        yield Finding("launch", "ports", "ok", value)
        return
    remedy = (
        "End processes with many connections, or widen the range: sysctl net.ipv4.ip_local_port_range='15000 60999'."
    )
    yield Finding("launch", "ports", "broken" if free < MIN_PORTS else "slow", value, remedy)


def local_ports(table: str) -> Iterator[int]:
    """Local ports in a table of the kernel, whose second column is ADDRESS:PORT in hexadecimal."""
    for line in table.splitlines()[1:]:
        yield int(line.split()[1].rpartition(":")[2], 16)


def worker_processes(subject: Subject) -> Iterator[Finding]:
    """Finding on the start of a worker process, as a plain script starts its ranks."""
    from autopar.tools.doctor.in_processes import result_in_process

    del subject
    start = time.perf_counter()
    result_in_process(f"{__name__}:answer", None, START_LIMIT_SECONDS)
    seconds = time.perf_counter() - start
    value = f"one answers after {text(seconds, TIME)}"
    if seconds > SLOW_START_SECONDS:
        remedy = (
            "The import of torch takes this long: install it on a local disk, and end other processes that compute."
        )
        yield Finding("launch", "worker processes", "slow", value, remedy)
    else:
        yield Finding("launch", "worker processes", "ok", value)


def answer(payload: None, emit: Emit) -> None:
    """Emit the payload, which shows that this process runs."""
    emit(payload)


PROBES = (
    Probe("launch", "host name", host_name, "Add this host to /etc/hosts: its name server does not answer."),
    Probe("launch", "loopback", loopback, LOOPBACK_REMEDY),
    Probe("launch", "ports", ports, "Look at the ports in use: ss -s.", needs_torch=False),
)
START = Probe("launch", "worker processes", worker_processes, START_REMEDY, limit_seconds=150.0)

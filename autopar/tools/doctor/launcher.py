"""Launcher of this process: the variables of torchrun and Slurm, and the address where their ranks meet."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping

from autopar.errors import UsageError
from autopar.ir.units import plural
from autopar.tools.doctor.finding import Finding, Probe, Subject
from autopar.tools.doctor.host import address_of

CONNECT_SECONDS = 3.0
TORCHRUN_PORT, MAX_PORT = "29500", 2**16
UNSET_REMEDY = "Unset them to run without a launcher, or start the script with torchrun or srun."


def launcher(subject: Subject) -> Iterator[Finding]:
    """Findings on the variables of torchrun and Slurm, as the runtime reads them."""
    from autopar.runtime.launch.devices import slurm_hint
    from autopar.runtime.launch.environment import launched, meeting_point

    del subject
    try:
        launch = launched()
    except UsageError as error:
        value, _, remedy = str(error).partition(". ")
        yield Finding("launch", "launcher", "broken", value, remedy or UNSET_REMEDY)
        return
    except ValueError as error:
        yield Finding("launch", "launcher", "broken", f"a variable of the launcher is no number: {error}", UNSET_REMEDY)
        return
    if launch is None:
        yield from without_launcher(os.environ, slurm_hint().strip())
        return
    place = f"rank {launch.rank} of {launch.world}, number {launch.local_rank} of {launch.local_world} on its node"
    where = f"{launch.launcher}: {place}, {plural(launch.num_nodes, 'node')}, meeting at {meeting_point(launch)}"
    faults = contradictions(os.environ)
    if faults:
        yield Finding("launch", "launcher", "broken", f"{where}: {'; '.join(faults)}", UNSET_REMEDY)
    else:
        yield Finding("launch", "launcher", "ok", where)
    yield from meeting(*meeting_point(launch).rsplit(":", 1), serves=launch.rank == 0)


def without_launcher(environ: Mapping[str, str], hint: str) -> Iterator[Finding]:
    """Findings on a plain script's environment.

    Args:
        hint: remedy for a Slurm job in which python runs once; else empty.
    """
    if hint and environ.get("SLURM_NTASKS", "1") != "1":
        yield Finding("launch", "launcher", "slow", f"none, in a job of {environ['SLURM_NTASKS']} tasks", hint)
    elif ("RANK" in environ) != ("WORLD_SIZE" in environ):
        given, missing = ("RANK", "WORLD_SIZE") if "RANK" in environ else ("WORLD_SIZE", "RANK")
        value = f"none: {given}={environ[given]} is ignored, since {missing} is not set"
        yield Finding("launch", "launcher", "slow", value, UNSET_REMEDY)
    else:
        yield Finding("launch", "launcher", "ok", "none: a plain script starts its ranks itself")
    port = environ.get("MASTER_PORT", TORCHRUN_PORT)
    if port.isdecimal() and 0 < int(port) < MAX_PORT:
        remark = "" if is_free(int(port)) else ": torchrun needs --standalone or another --master-port"
        yield Finding("launch", "torchrun's port", "ok", f"{port} is {'taken' if remark else 'free'}{remark}")


def contradictions(environ: Mapping[str, str]) -> list[str]:
    """Faults in torchrun's variables of a process, in words; empty under srun."""
    if "RANK" not in environ:
        return []
    faults = [f"{name} is not set" for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    local_world = int(environ.get("LOCAL_WORLD_SIZE", world))
    local_rank = int(environ.get("LOCAL_RANK", rank))
    if local_rank >= local_world:
        faults.append(f"LOCAL_RANK={local_rank} is not below LOCAL_WORLD_SIZE={local_world}")
    if local_world > world:
        faults.append(f"LOCAL_WORLD_SIZE={local_world} is more than WORLD_SIZE={world}")
    port = environ.get("MASTER_PORT", TORCHRUN_PORT)
    if not port.isdecimal() or not 0 < int(port) < MAX_PORT:
        faults.append(f"MASTER_PORT={port} is no port")
    return faults


def meeting(host: str, port: str, serves: bool) -> Iterator[Finding]:
    """Findings on the address of the launcher's store: whether its name resolves, and whether its port is free.

    Args:
        serves: whether this process will open the port, unless torchrun's agent has.
    """
    try:
        address = address_of(host)
    except OSError as error:
        remedy = "Set MASTER_ADDR to a name or address that all nodes resolve, or add it to /etc/hosts."
        yield Finding("launch", "MASTER_ADDR", "broken", f"{host} does not resolve: {error.strerror}", remedy)
        return
    yield Finding("launch", "MASTER_ADDR", "ok", f"{host} is {address}")
    if not port.isdecimal() or not 0 < int(port) < MAX_PORT:
        return  # one of the contradictions
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            remedy = "torchrun serves the store there: open the port in the firewall, or start the run again."
            yield Finding("launch", "MASTER_PORT", "broken", f"{host}:{port} cannot be reached: {error}", remedy)
            return
        yield Finding("launch", "MASTER_PORT", "ok", f"{port} is served by torchrun")
    elif serves and is_free(int(port)):
        yield Finding("launch", "MASTER_PORT", "ok", f"{port} is free")
    elif serves:
        remedy = "Another job uses it: set MASTER_PORT to a free port, the same on all ranks."
        yield Finding("launch", "MASTER_PORT", "broken", f"{port} is taken", remedy)


def is_free(port: int) -> bool:
    """Whether this process could serve a port on all interfaces.

    Raises:
        OSError: it could not for another reason than that the port is taken.
    """
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True


PROBES = (Probe("launch", "launcher", launcher, UNSET_REMEDY),)

"""Fork server: a process that has imported torch and the runtime and forks worker processes on request.

A fresh interpreter needs seconds to import torch, a fork needs milliseconds. `multiprocessing.forkserver` is no
alternative: its processes import the caller's ``__main__`` again, and plain scripts have no guard against that.

The caller and its server share one socket, the control socket. A request is one message on it: a byte and open files.
After the fork each file is open only in the processes that use it, so that the end of a process closes its files:

==========================  ==================  ==========================  ====================
file                        caller              server                      fork
==========================  ==================  ==========================  ====================
control socket              its end             its end                     closed
report pipe of one fork     reading end         writing end                 closed
request, current directory  closed once sent    closed after the fork       closed once applied
stdin, stdout, stderr       its own             closed after the fork       0, 1, 2
``files`` of the request    unchanged           closed after the fork       open, numbers passed on
==========================  ==================  ==========================  ====================

The report pipe carries the fork's process id and later its exit code; it closes if the server ends first. The server
ends when the control socket closes or the caller is gone; the kernel then kills the forks that still run. A fork
differs from a fresh interpreter in the state that the imports have read: see `surroundings`.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from autopar.errors import SEE_DOCTOR, WorkerError
from autopar.runtime.launch.loopback import loopback_variables
from autopar.runtime.launch.shared_memory import shared_file

# On other systems, libraries may not survive a fork. There each server becomes the process that it was asked to start.
FORKS = sys.platform == "linux"
MAX_LINES = 20  # of the server's stderr, in an error
MODULES = ("autopar.runtime.launch.preload",)
# Variables that no import reads. A launcher sets some for each process, torch sets one at first use, pytest one for
# each test. The folders of PYTHONPATH are in `sys.path`, which a request carries.
READ_LATE = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHINDUCTOR_CACHE_DIR", "PYTEST_CURRENT_TEST", "PYTHONPATH",
})  # fmt: skip


@dataclass(frozen=True)
class Request:
    """State of the caller that a fork takes over. ``call`` is a pickled pair: a callable and its arguments."""

    call: bytes
    environment: Mapping[str, str]
    path: Sequence[str]
    umask: int
    signal_mask: set[int]


class ForkServer:
    """Handle of a server. Once this handle and the handles of all forks are gone, server and forks are killed."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = MODULES) -> None:
        """Start the server and return immediately; the server imports ``modules`` meanwhile."""
        self.surroundings = surroundings(environment)
        self.control, theirs = socket.socketpair()
        # -P: modules come from the caller's path only, not from the current directory.
        command = [sys.executable, "-P", "-m", "autopar.runtime.launch"]
        arguments = [str(theirs.fileno()), str(os.getpid()), f"{FORKS:d}", *modules]
        # Notebooks do not show the stderr of processes.
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        with theirs:
            self.process = subprocess.Popen(
                [*command, *arguments],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # keeps no pipe of the caller open
                stderr=self.errors,
                start_new_session=True,  # keeps the terminal's Ctrl-C away
            )
        self._finalizer = weakref.finalize(self, end, self.control, self.process, self.errors)

    def start(
        self,
        target: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str],
        files: Sequence[int] = (),
        stdout: int = 1,
        stderr: int = 2,
    ) -> Process:
        """Start a process in a new session. It calls ``target(*arguments, *files)`` and exits.

        Args:
            target: importable by its name in the new process.
            files: open files that the process inherits, under other numbers.

        Raises:
            WorkerError: the server has ended, or cannot fork.
        """
        streams = [None, *(file if is_open(file) else None for file in (stdout, stderr))]  # no stdin
        umask = os.umask(0o077)  # the only portable way to read the mask
        os.umask(umask)
        mask = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])}
        request = Request(pickle.dumps((target, arguments)), dict(environment), list(sys.path), umask, mask)
        report, theirs = Pipe(duplex=False)
        with theirs, os.fdopen(shared_file(), "w+b") as content, Path(os.devnull).open("r+b") as nothing:
            pickle.dump(request, content)
            content.seek(0)
            folder = os.open(".", os.O_RDONLY)
            opened = [nothing.fileno() if stream is None else stream for stream in streams]
            with suppress(BrokenPipeError, ConnectionResetError):  # the report pipe tells that the server has ended
                socket.send_fds(self.control, [b"f"], [theirs.fileno(), content.fileno(), folder, *opened, *files])
            os.close(folder)
        try:
            answer = report.recv()
        except EOFError:
            ending = how_ended(self.process.wait())
            self.errors.seek(0)
            lines = self.errors.read().splitlines()[-MAX_LINES:]
            said = "\n".join(["Its last lines:", *lines]) if lines else "It has printed nothing."
            raise WorkerError(
                f"No worker was started: the fork server has ended, {ending}. Call autopar.parallelize again, which "
                f"starts another server. {SEE_DOCTOR} {said}"
            ) from None
        if isinstance(answer, OSError):
            raise WorkerError(
                f"No worker was started: {answer}. End other processes or raise the limit. {SEE_DOCTOR}"
            ) from answer
        if answer == self.process.pid:  # the server has become the process: its handle must not kill it
            self._finalizer.detach()
            self.errors.close()
        return Process(self, answer, report)


class Process:
    """A started process, with a part of the interface of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int, report: Connection) -> None:
        self.server, self.pid, self.report = server, pid, report
        self.owner = os.getpid()  # a fork of the caller must not end a process that the caller still uses
        self.returncode: int | None = None
        self.cause = ""

    def wait(self, timeout: float | None = None) -> int | None:
        """Exit code, negative for a signal; None in a fork of the caller.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None and self.owner == os.getpid():
            if not self.report.poll(timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            try:
                self.returncode = self.report.recv()
            except EOFError:
                self.returncode = self.server.process.wait()
                if self.pid != self.server.process.pid:  # else the server has become this process
                    self.cause = f", because the fork server ended ({how_ended(self.returncode)})"
                    self.returncode = -signal.SIGKILL
        return self.returncode

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.owner == os.getpid() and self.poll() is None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def ending(self) -> str:
        """Way in which the process ended, as text."""
        assert self.returncode is not None
        return how_ended(self.returncode) + self.cause


current: ForkServer | None = None


def fork_server(environment: Mapping[str, str]) -> ForkServer:
    """Fork server of this process for an environment; started if the current server is gone or has another one."""
    global current
    if (
        current is None
        or not FORKS
        or current.surroundings != surroundings(environment)
        or current.process.poll() is not None
    ):
        current = ForkServer(environment)
    return current


def prepare(num_threads: int) -> None:
    """Start the server for workers with ``num_threads`` threads; its imports overlap with this process's work."""
    if FORKS:
        fork_server(worker_environment(num_threads))


def surroundings(environment: Mapping[str, str]) -> Any:
    """State that a fork inherits from its server and that no request can change. One server serves one such state.

    Libraries read most variables when they are loaded (OMP_*, MKL_*, LD_*, PYTHON*, MALLOC_*, PYTORCH_*, …). So all
    variables count except those in `READ_LATE`.
    """
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    processors = os.sched_getaffinity(0) if sys.platform == "linux" else None
    early = {name: value for name, value in environment.items() if name not in READ_LATE}
    return os.getpid(), os.geteuid(), os.getegid(), limits, processors, early


def worker_environment(num_threads: int) -> dict[str, str]:
    """Environment of workers that import from this process's path, each with ``num_threads`` CPU threads."""
    path = os.pathsep.join(p or str(Path.cwd()) for p in sys.path)
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(num_threads)}
    return os.environ | loopback_variables(os.environ) | own


def how_ended(code: int) -> str:
    """Meaning of an exit code, as text."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def end(control: socket.socket, process: subprocess.Popen[bytes], errors: IO[str]) -> None:
    """End a server without users. In a fork of the caller, which has no such child, only its files close."""
    control.close()
    errors.close()
    process.kill()
    process.wait()

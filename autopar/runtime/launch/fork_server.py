"""Fork server: a process that has torch and the runtime imported, and forks worker processes on request.

A fresh interpreter needs seconds to import torch, a fork needs milliseconds. `multiprocessing.forkserver` cannot serve
here: its processes import the caller's ``__main__`` again, and plain scripts have no guard against that.

The caller and its server share one socket, the control socket. A request is one message on it: a byte and open files.
After the fork each file is open where it is needed and nowhere else, so that the end of any process closes its files:

==========================  ==================  ==========================  ====================
file                        caller              server                      fork
==========================  ==================  ==========================  ====================
control socket              its end             its end                     closed
report pipe of one fork     reading end         writing end                 closed
request, current directory  closed once sent    closed after the fork       closed once applied
stdin, stdout, stderr       its own             closed after the fork       0, 1, 2
``files`` of the request    as the caller likes closed after the fork       open, numbers passed on
==========================  ==================  ==========================  ====================

The report pipe brings the fork's process id and, when it has ended, its exit code; it closes if the server ends first.
The server ends when the control socket closes or its caller is gone; the kernel then kills the forks that are left.
A fork differs from a fresh interpreter in what was read at the import: see `surroundings`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from autopar.errors import WorkerError
from autopar.runtime.launch.shared_memory import shared_file

# Elsewhere, system libraries do not survive a fork: there, each server becomes what it was asked to fork.
FORKS = sys.platform == "linux"
MODULES = ("torch.optim", "torch.distributed", "autopar.runtime.launch.worker")
# Variables that no import reads. A launcher sets them for each process, torch at first use, pytest for each test; and
# what PYTHONPATH leads to is in `sys.path`, which a request carries.
READ_LATE = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHINDUCTOR_CACHE_DIR", "PYTEST_CURRENT_TEST", "PYTHONPATH",
})  # fmt: skip
CHECK_SECONDS = 1.0  # between two looks whether the caller lives: its forks may hold copies of the control socket
LEAVE_SECONDS = 3.0  # for forks to end by themselves when the caller is gone
MAX_FILES = 16  # of one request
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True)
class Request:
    """State of the caller that a fork takes over. ``call`` is a pickled callable and its arguments."""

    call: bytes
    environment: Mapping[str, str]
    path: Sequence[str]
    umask: int
    signal_mask: set[int]


# -- in the caller -----------------------------------------------------------------------------------------------------


class ForkServer:
    """Handle of a server; the server ends when the handle and those of all its forks are gone."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = MODULES) -> None:
        """Start the server and return: it imports ``modules`` in the meantime."""
        self.surroundings = surroundings(environment)
        self.control, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(os.getpid()), f"{FORKS:d}", *modules]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "autopar.runtime.launch", *arguments],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a pipe of the caller must not stay open here; stderr tells of a bad import
                start_new_session=True,  # keeps the terminal's Ctrl-C away
            )
        self._finalizer = weakref.finalize(self, end, self.control, self.process, os.getpid())

    def start(
        self,
        target: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str],
        files: Sequence[int] = (),
        stdin: int | None = None,
        stdout: int = 1,
        stderr: int = 2,
    ) -> Process:
        """Start a process that calls ``target(*arguments, *files)`` and exits, in a session of its own.

        Args:
            target: importable there by its name.
            files: that it inherits, under other numbers.
            stdin: nothing by default.

        Raises:
            WorkerError: the server has ended, or cannot fork.
        """
        streams = [file if file is not None and is_open(file) else None for file in (stdin, stdout, stderr)]
        umask = os.umask(0o077)  # there is no other way to read it
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
            raise WorkerError(
                f"No worker was started: the fork server has ended, {how_ended(self.process.wait())}. Unless somebody "
                "killed it, it has printed the reason. Call autopar.parallelize again, which starts another server."
            ) from None
        if isinstance(answer, OSError):
            raise WorkerError(f"No worker was started: {answer}. End other processes or raise the limit.") from answer
        if answer == self.process.pid:  # the server has become the process, which others wait for
            self._finalizer.detach()
        return Process(self, answer, report)


class Process:
    """A started process, with the part of the interface of `subprocess.Popen` that is used."""

    def __init__(self, server: ForkServer, pid: int, report: Connection) -> None:
        self.server, self.pid, self.report = server, pid, report
        self.owner = os.getpid()  # a fork of the caller must not end what the caller still uses
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

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def ending(self) -> str:
        """How it ended, in words."""
        assert self.returncode is not None
        return how_ended(self.returncode) + self.cause


current: ForkServer | None = None


def fork_server(environment: Mapping[str, str]) -> ForkServer:
    """Server of this process for such an environment, started if there is none, or only one for another."""
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
    """Start the server for workers with so many threads; it imports what they need while this process goes on."""
    if FORKS:
        fork_server(worker_environment(num_threads))


def surroundings(environment: Mapping[str, str]) -> Any:
    """State of a process that a fork has from its server and cannot be given: one server serves one such state.

    Most variables are read when a library is loaded (OMP_*, MKL_*, LD_*, PYTHON*, MALLOC_*, PYTORCH_*, …), so that all
    count but those which are known to be read late.
    """
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    processors = os.sched_getaffinity(0) if sys.platform == "linux" else None
    early = {name: value for name, value in environment.items() if name not in READ_LATE}
    return os.getpid(), os.geteuid(), os.getegid(), limits, processors, early


def worker_environment(num_threads: int) -> dict[str, str]:
    """Environment of processes that import what this one does, each with so many threads on CPU."""
    path = os.pathsep.join(p or str(Path.cwd()) for p in sys.path)
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(num_threads)}


def how_ended(code: int) -> str:
    """Meaning of an exit code."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def end(control: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    """Have a server end, and wait until it has. In a fork of its caller, only give the socket back."""
    if owner == os.getpid():
        with suppress(OSError):  # it has ended already
            control.shutdown(socket.SHUT_RDWR)  # reaches the server although forks may hold copies of the socket
    control.close()
    try:
        process.wait(2 * LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# -- in the server -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve: ``python -m autopar.runtime.launch FD PID FORKS MODULE…``. Goes on as a request asks, in its fork."""
    control, caller, forks, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to the pages of all objects, and so copy them
    become(serve(socket.socket(fileno=int(control)), int(caller), forks == "1"))


def serve(control: socket.socket, caller: int, forks: bool) -> list[int]:
    """Files of a request, in the process that is to carry it out; never returns in the server."""
    server = os.getpid()
    reports: dict[int, Connection] = {}
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    while True:
        ready, _, _ = select.select([control, woken], [], [], CHECK_SECONDS)
        if woken in ready:
            woken.recv(4096)
            report_ends(reports)
        files = received(control) if control in ready else []
        if (control in ready and not files) or os.getppid() != caller:
            leave(reports)
        if not files:
            continue
        try:
            fork = os.fork() if forks else 0
        except OSError as error:
            with Connection(files[0], readable=False) as report:
                report.send(error)
        else:
            if not fork:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (control, woken, waker, *reports.values()):
                    other.close()
                if forks:
                    die_with(server)
                    os.close(files.pop(0))
                    os.setsid()
                else:  # the report pipe stays open, for its closing to report this process's end
                    with Connection(os.dup(files.pop(0)), readable=False) as report:
                        report.send(server)
                return files
            reports[fork] = Connection(files[0], readable=False)
            with suppress(OSError):  # the caller has given the request up
                reports[fork].send(fork)
        for file in files[1:]:
            os.close(file)


def received(control: socket.socket) -> list[int]:
    """Files of the next request; none when the caller is gone."""
    _, files, _, _ = socket.recv_fds(control, 1, MAX_FILES)
    for file in files:
        os.set_inheritable(file, False)
    return list(files)


def report_ends(reports: dict[int, Connection]) -> None:
    """Tell the caller of each fork that has ended, and forget it."""
    while reports:
        fork, status = os.waitpid(-1, os.WNOHANG)
        if not fork:
            return
        with reports.pop(fork) as report, suppress(OSError):  # nobody may listen any more
            report.send(os.waitstatus_to_exitcode(status))


def leave(reports: dict[int, Connection]) -> NoReturn:
    """End the server; forks have a moment to end before it, by the closing of their files."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while reports and time.monotonic() < deadline:
        time.sleep(0.01)
        report_ends(reports)
    os._exit(0)


def die_with(server: int) -> None:
    """Have the kernel kill this fork when the server ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it ended before
        os._exit(1)


def become(files: list[int]) -> None:
    """Take over the caller's state and do what it asks for."""
    content, folder, *streams = files[:5]
    with os.fdopen(content, "rb") as file:
        request: Request = pickle.load(file)
    os.fchdir(folder)
    os.close(folder)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.umask(request.umask)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.path[:] = request.path
    if "numpy.random" in sys.modules:  # Python's own generator is seeded again by the fork, torch's by the worker
        sys.modules["numpy.random"].seed()
    signal.pthread_sigmask(signal.SIG_SETMASK, request.signal_mask)
    target, arguments = pickle.loads(request.call)
    target(*arguments, *files[5:])

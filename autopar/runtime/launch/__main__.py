"""Main loop of the fork server (see `fork_server`): ``python -m autopar.runtime.launch FD PID FORKS MODULE…``."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

from autopar.runtime.launch.fork_server import Request

CHECK_SECONDS = 1.0  # between checks that the caller lives: forks of the caller may hold copies of the control socket
LEAVE_SECONDS = 3.0  # time for forks to end by themselves once the caller is gone
MAX_FILES = 16  # open files per request
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def main() -> None:
    """Import the modules and serve requests; in a fork, carry out the request."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a job; this one ends with its caller
    control, caller, forks, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would write to the pages of all objects, which copies the pages
    become(serve(socket.socket(fileno=int(control)), int(caller), forks == "1"))


def serve(control: socket.socket, caller: int, forks: bool) -> list[int]:
    """Open files of a request, in the process that carries out the request. Never returns in the server."""
    server = os.getpid()
    reports: dict[int, Connection] = {}
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
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
                for number in (signal.SIGCHLD, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                for other in (control, woken, waker, *reports.values()):
                    other.close()
                if forks:
                    die_with(server)
                    os.close(files.pop(0))
                    os.setsid()
                else:  # the report pipe stays open: its closing reports the end of this process
                    with Connection(os.dup(files.pop(0)), readable=False) as report:
                        report.send(server)
                return files
            reports[fork] = Connection(files[0], readable=False)
            with suppress(OSError):  # the caller has abandoned the request
                reports[fork].send(fork)
        for file in files[1:]:
            os.close(file)


def received(control: socket.socket) -> list[int]:
    """Open files of the next request; empty if the caller is gone."""
    _, files, _, _ = socket.recv_fds(control, 1, MAX_FILES)
    for file in files:
        os.set_inheritable(file, False)
    return list(files)


def report_ends(reports: dict[int, Connection]) -> None:
    """Send the exit code of each fork that has ended to the caller, and drop the fork's report pipe."""
    while reports:
        fork, status = os.waitpid(-1, os.WNOHANG)
        if not fork:
            return
        with reports.pop(fork) as report, suppress(OSError):  # the caller may have closed its end
            report.send(os.waitstatus_to_exitcode(status))


def leave(reports: dict[int, Connection]) -> NoReturn:
    """End the server. Forks first get `LEAVE_SECONDS` to notice that their files have closed and to end."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while reports and time.monotonic() < deadline:
        time.sleep(0.01)
        report_ends(reports)
    os._exit(0)


def die_with(server: int) -> None:
    """Have the kernel kill this fork when the server ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # the server ended before prctl
        os._exit(1)


def become(files: list[int]) -> None:
    """Take over the caller's state and call the target of the request."""
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
    if "numpy.random" in sys.modules:  # the fork reseeds Python's own generator, the worker reseeds torch's
        sys.modules["numpy.random"].seed()
    atexit.register(gc.unfreeze)  # an ordinary exit collects all objects
    signal.pthread_sigmask(signal.SIG_SETMASK, request.signal_mask)
    target, arguments = pickle.loads(request.call)
    target(*arguments, *files[5:])


if __name__ == "__main__":
    main()

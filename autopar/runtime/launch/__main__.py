"""``python -m autopar.runtime.launch FD PID FORKS MODULE…``: the fork server that `fork_server.py` describes."""

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

CHECK_SECONDS = 1.0  # between two looks whether the caller lives: its forks may hold copies of the control socket
LEAVE_SECONDS = 3.0  # for forks to end by themselves when the caller is gone
MAX_FILES = 16  # of one request
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def main() -> None:
    """Serve; in a fork, do what the request asks for."""
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
    atexit.register(gc.unfreeze)  # an ordinary exit collects everything
    signal.pthread_sigmask(signal.SIG_SETMASK, request.signal_mask)
    target, arguments = pickle.loads(request.call)
    target(*arguments, *files[5:])


if __name__ == "__main__":
    main()

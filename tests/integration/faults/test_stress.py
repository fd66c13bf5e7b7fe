"""Faults of random kinds at random moments of training runs.

A run with a fault ends soon, with one error that names rank and cause, or goes on; it leaves no process, port, shared
memory or temporary file. The next run goes on from the last checkpoint. In the end the losses are those of a run
without faults, to the last bit.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import psutil
import pytest
from support.faults import WORKER, wait_for
from support.forks import run_script, server
from support.stress_run import CHECKPOINT, JOURNAL, LOSSES, TIMEOUT_SECONDS, Injected

SCRIPT = Path(__file__).parents[2] / "support" / "stress_run.py"
MARKER = "AUTOPAR_STRESS"  # variable by which the processes of a run are found
FAULTS_PER_TRAINING = 5
AT_ONCE = 3  # some faults are waits
END_SECONDS = 15.0  # from a fault to the end of the last process
RUN_SECONDS = 180.0  # of a run without a fault, on a busy machine
STOP_SECONDS = TIMEOUT_SECONDS + 2.0
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "ctrl-c": signal.SIGINT, "sigterm": signal.SIGTERM}
FROM_OUTSIDE = (*SIGNALS, "broken pipe")
FROM_INSIDE = ("raise", "full disk", "no space", "slow disk")
PHASES = ("start", "load", "step", "evaluation", "save", "close")


@dataclass(frozen=True)
class Draw:
    """A fault of one run.

    Args:
        phase: phase in which a fault from outside happens, ``delay_seconds`` after its ``occurrence``-th begin.
        victim: "main" (the script; torchrun's agent), "server" (the pool's fork server) or a rank.
        injected: a fault from inside.
    """

    kind: str = "none"
    phase: str = "step"
    occurrence: int = 1
    delay_seconds: float = 0.0
    victim: str = "main"
    injected: Injected = field(default_factory=Injected)

    def __str__(self) -> str:
        if self.kind in FROM_INSIDE:
            return f"{self.kind} on rank {self.injected.rank} in call {self.injected.call}"
        when = f"{self.delay_seconds * 1000:.0f} ms after the begin of {self.phase} {self.occurrence}"
        return f"{self.kind} of {self.victim if self.victim in ('main', 'server') else f'rank {self.victim}'} {when}"

    @staticmethod
    def random(choose: random.Random, launcher: str, phases: tuple[str, ...]) -> Draw:
        kind = choose.choice([*FROM_OUTSIDE, *FROM_INSIDE, "kill"])
        if kind in FROM_INSIDE:
            rank = 1 if kind in ("raise", "full disk") else choose.randrange(2)  # rank 1 always computes a loss
            return Draw(kind, injected=Injected(kind, rank, choose.randrange(8), choose.randrange(4096, 16384)))
        phase, delay_seconds = choose.choice(phases), choose.choice([0.0, 0.01, 0.1]) * choose.random()
        victims = ["0", "1"] if kind == "stop" else ["0", "1", "main", *["server"] * (launcher == "pool")]
        victim = choose.choice(victims) if kind in ("kill", "stop") else "main"
        return Draw(kind, phase, choose.randint(1, 2 if phase in ("step", "save") else 1), delay_seconds, victim)


class Main(Protocol):
    """Main process of a run."""

    pid: int

    def poll(self) -> int | None: ...


class Run:
    """A training run in a folder, with all of its processes."""

    def __init__(self, folder: Path, launcher: str, axis: str, draw: Draw) -> None:
        self.folder, self.launcher, self.draw = folder, launcher, draw
        self.id = f"{folder}-{time.monotonic_ns()}"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        (folder / JOURNAL).write_text("")
        environment = os.environ | {MARKER: self.id, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        arguments = [axis, json.dumps(asdict(draw.injected))]
        output, out = os.pipe()
        errors, err = os.pipe()
        if launcher == "pool":
            self.main: Main = server().start(
                run_script, str(SCRIPT), arguments, str(folder), environment=environment, stdout=out, stderr=err
            )
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            self.main = subprocess.Popen(
                [*torchrun, str(SCRIPT), *arguments],
                cwd=folder, env=environment, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
        os.close(out)
        os.close(err)
        self.text = ""
        self.readers = [
            threading.Thread(target=self.read_errors, args=(errors,)),
            threading.Thread(target=self.read_output, args=(output,)),
        ]
        for reader in self.readers:
            reader.start()

    def read_errors(self, file: int) -> None:
        with os.fdopen(file, errors="replace") as lines:
            for line in lines:
                self.text += line

    def read_output(self, file: int) -> None:
        with os.fdopen(file) as lines:
            for _ in lines:
                if self.draw.kind == "broken pipe" and self.reached():
                    return

    def reached(self) -> bool:
        """Whether the phase of the fault has begun, or the run has ended."""
        ranks = 2 if self.launcher == "torchrun" else 1  # each writes its phases
        phases = (self.folder / JOURNAL).read_text().split()
        return phases.count(self.draw.phase) > ranks * (self.draw.occurrence - 1) or self.main.poll() is not None

    def processes(self) -> list[psutil.Process]:
        """All living processes of the run."""
        found = []
        for process in psutil.process_iter():
            try:
                own = process.pid == self.main.pid or process.environ().get(MARKER) == self.id
                if own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def is_victim(self, process: psutil.Process) -> bool:
        if process.pid == self.main.pid or self.draw.victim == "main":
            return process.pid == self.main.pid and self.draw.victim == "main"
        if self.draw.victim == "server":
            return "autopar.runtime.launch" in process.cmdline() and not process.name().startswith(WORKER)
        if self.launcher == "pool":
            return process.name() == f"{WORKER}{self.draw.victim}"
        return process.environ().get("RANK") == self.draw.victim

    def victims(self) -> list[int]:
        """Process id of the fault's victim, if it has started."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                found += [process.pid] * self.is_victim(process)
        return found

    def cause_fault(self) -> bool:
        """Cause the fault from outside; False if the run or its victim had ended before."""
        ended = lambda: self.main.poll() is not None  # noqa: E731
        victim: list[int] = []
        wait_for(lambda: bool(victim.extend(self.victims()) or victim or ended()), RUN_SECONDS)
        wait_for(self.reached, RUN_SECONDS)
        time.sleep(self.draw.delay_seconds)
        if ended() or (self.draw.kind != "broken pipe" and not send(victim[0], SIGNALS[self.draw.kind])):
            return False
        if self.draw.kind == "stop":
            time.sleep(STOP_SECONDS)
            send(victim[0], signal.SIGCONT)
        return True

    def finish(self, seconds: float) -> int:
        """Exit code, once all processes have ended; at the latest ``seconds`` after the last new phase."""
        phases, deadline = "", time.monotonic() + seconds
        while self.main.poll() is None or self.processes():
            now = (self.folder / JOURNAL).read_text()
            if now != phases:
                phases, deadline = now, time.monotonic() + seconds
            if time.monotonic() > deadline:
                left = [f"{p.pid} {p.name()} {p.status()} {' '.join(p.cmdline())[-80:]}" for p in self.processes()]
                for process in self.processes():
                    process.kill()
                raise AssertionError(f"not ended {seconds:.0f} s after the fault: {left}\n{self.text[-4000:]}")
            time.sleep(0.05)
        for reader in self.readers:
            reader.join()
        code = self.main.poll()
        assert code is not None
        return code

    @property
    def temporary_files(self) -> list[str]:
        """Names of temporary files that are left.

        Without folders that torchrun leaves, and without the empty file with a name of eight letters that Python leaves
        if it is killed while it tests whether TMPDIR can be written to.
        """
        left = [path for path in self.temporary.iterdir() if not path.name.startswith("torchelastic_")]
        return [path.name for path in left if len(path.name) != 8 or path.stat().st_size]

    @property
    def losses(self) -> list[float]:
        return json.loads((self.folder / LOSSES).read_text())


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False if the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def expected_error(draw: Draw) -> str:
    """Pattern of the error with which a run may end after a fault; a fault that no pattern allows must not end it."""
    rank = draw.injected.rank if draw.kind in FROM_INSIDE else draw.victim
    if draw.kind == "kill":
        killed = rf"[Rr]ank\W+{rank}[\s\S]*SIGKILL"
        return {"main": "", "server": "fork server|SIGKILL"}.get(draw.victim, killed)
    return {
        "stop": r"[Rr]ank\W+\d[\s\S]*(no reply|[Tt]imed out|[Cc]onnection closed)",
        "ctrl-c": "KeyboardInterrupt|SIGINT",
        "sigterm": "",
        "broken pipe": "Broken ?[Pp]ipe",
        "raise": rf"[Rr]ank\W+{rank}[\s\S]*a fault of the loss",
    }.get(draw.kind, r"(?!)")


def endure(folder: Path, launcher: str, axis: str, draw: Draw, truth: list[float]) -> str:
    """Do a run with a fault in a folder; returns how it ended. A run that reaches its end leaves no checkpoint."""
    run = Run(folder, launcher, axis, draw)
    outside = draw.kind in FROM_OUTSIDE
    hit = run.cause_fault() if outside else True
    # Who plans notices the end of torchrun with the first connection, that of its reader with the first line.
    unnoticed = draw.kind == "broken pipe" or (launcher == "torchrun" and draw.victim == "main")
    plans_on = unnoticed and draw.phase == "start"
    goes_on = plans_on or draw.kind == "stop" or draw.victim == "server"  # perhaps
    code = run.finish(END_SECONDS if outside and hit and not goes_on else RUN_SECONDS)
    assert code == 0 or re.search(expected_error(draw), run.text), f"exit code {code}: {run.text[-4000:]}"
    assert not run.temporary_files, run.temporary_files
    if code == 0:
        assert run.losses == truth
        shutil.rmtree(folder / CHECKPOINT)
    return f"exit code {code}" if hit else f"exit code {code}, missed"


def uninterrupted(folder: Path, launcher: str, axis: str) -> list[float]:
    """Losses of a training that goes on in a folder, without faults from now on."""
    run = Run(folder, launcher, axis, Draw())
    assert run.finish(RUN_SECONDS) == 0, run.text[-4000:]
    assert not run.temporary_files
    return run.losses


def train(folder: Path, launcher: str, axis: str, choose: random.Random, truth: list[float]) -> None:
    """A training with several faults, and in the end the losses of a run without faults."""
    for number in range(FAULTS_PER_TRAINING):
        phases = tuple(p for p in PHASES if p != "load" or (folder / CHECKPOINT / "checkpoint.json").exists())
        draw = Draw.random(choose, launcher, phases)
        start, ending = time.monotonic(), "FAILED"
        try:
            ending = endure(folder, launcher, axis, draw, truth)
        finally:
            seconds = time.monotonic() - start
            print(f"{folder.name} {launcher} {axis} fault {number}, {seconds:4.1f} s, {ending}: {draw}", flush=True)
    assert uninterrupted(folder, launcher, axis) == truth


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_faults_at_random_moments(tmp_path: Path) -> None:
    in_ci = "CI" in os.environ
    seed = int(os.environ.get("AUTOPAR_STRESS_SEED") or (0 if in_ci else random.randrange(1 << 32)))
    trainings = int(os.environ.get("AUTOPAR_STRESS_DRAWS") or (120 if in_ci else 200)) // FAULTS_PER_TRAINING
    print(f"AUTOPAR_STRESS_SEED={seed}")
    before = set(Path("/dev/shm").iterdir())
    kinds = [(launcher, axis) for launcher in ("pool", "torchrun") for axis in ("pp", "dp", "tp")]
    truths = {kind: uninterrupted(tmp_path / "-".join(kind), *kind) for kind in kinds}
    failures = []

    def result(number: int) -> None:
        choose = random.Random(seed * 1000 + number)
        launcher, axis = choose.choice(["pool", "pool", "pool", "torchrun"]), choose.choice(["pp", "dp", "tp"])
        try:
            train(tmp_path / f"training-{number}", launcher, axis, choose, truths[launcher, axis])
        except AssertionError as error:
            failures.append(f"training {number}: {error}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(result, range(trainings)))
    assert not failures, f"seed {seed}, {len(failures)} of {trainings} trainings:\n" + "\n\n".join(failures)
    assert set(Path("/dev/shm").iterdir()) <= before

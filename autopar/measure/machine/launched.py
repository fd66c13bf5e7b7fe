"""Measures cases where torchrun or srun has started the processes: each is a rank and measures.

Rank 0 chooses the cases and keeps the points. The other ranks wait for its choice and measure along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.errors import SEE_DOCTOR, UsageError, WorkerError
from autopar.measure.device import ProfileSetting
from autopar.measure.machine.cases import Case
from autopar.measure.machine.collectives import CONTROL_BACKEND, TIMEOUT
from autopar.measure.machine.points import MeasuredPoint, append_point, save_points
from autopar.measure.machine.worker import measure_cases
from autopar.measure.workers import WorkerContext
from autopar.runtime.comm.protocols import TransportError
from autopar.runtime.launch.devices import Machine
from autopar.runtime.launch.environment import Launched, launcher_store


@dataclass
class LaunchedRanks:
    """This rank as a worker among those of a launcher; ``waiting`` while the others wait for rank 0's cases."""

    worker: WorkerContext
    waiting: bool = True

    def measure(
        self,
        setting: ProfileSetting,
        cases: Sequence[Case],
        file: Path,
        points: Sequence[MeasuredPoint],
        progress: Callable[[int, str], None],
    ) -> None:
        """Measure cases with all ranks and keep the points; called on rank 0.

        Raises:
            WorkerError: a rank failed, or one case took too long. The points so far are in the file.
        """
        save_points(file, setting, points)
        numbers = {case: number for number, case in enumerate(cases)}
        self.waiting = False
        broadcast_cases(cases)
        self.run(
            cases,
            lambda case: progress(numbers[case], case.name),
            lambda point: append_point(file, point),
            f" The points so far are in {file}; run the same command again to go on.",
        )
        progress(len(cases), "")

    def follow(self) -> None:
        """Measure rank 0's cases on another rank.

        Raises:
            WorkerError: a rank failed, or one case took too long.
        """
        cases = broadcast_cases(None)
        if cases is not None:
            self.run(cases, lambda case: None, lambda point: None, "")

    def run(
        self,
        cases: Sequence[Case],
        on_case: Callable[[Case], None],
        on_point: Callable[[MeasuredPoint], None],
        remedy: str,
    ) -> None:
        """Measure cases; an error names the rank and the case."""
        present = ""

        def begin(case: Case) -> None:
            nonlocal present
            present = case.name
            on_case(case)

        try:
            measure_cases(self.worker, cases, begin, on_point)
        except (RuntimeError, TransportError) as error:
            reason = str(error).splitlines()[0]
            raise WorkerError(
                f"Rank {self.worker.rank} failed while measuring {present or 'nothing yet'}: "
                f"{type(error).__name__}: {reason}.{remedy} {SEE_DOCTOR}"
            ) from error


@contextmanager
def launched_ranks(machine: Machine, launched: Launched) -> Iterator[LaunchedRanks]:
    """Within ``with``, the launcher's ranks; all of them enter and leave.

    If rank 0 leaves without cases, the others have nothing to measure.

    Raises:
        UsageError: other ranks did not connect in time, or ranks do not fill equal nodes in order.
    """
    device = torch.device(machine.device_of(launched.rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    machine.limit_threads()
    store = dist.PrefixStore("profile", launcher_store(launched))
    dist.init_process_group(
        CONTROL_BACKEND, store=store, rank=launched.rank, world_size=launched.world, timeout=TIMEOUT
    )
    try:
        check_nodes(launched)
        ranks = LaunchedRanks(WorkerContext(launched.rank, launched.world, device, launched.num_nodes))
        try:
            yield ranks
        finally:
            if launched.rank == 0 and ranks.waiting:
                broadcast_cases(None)
    finally:
        dist.destroy_process_group()


def check_nodes(launched: Launched) -> None:
    """Refuse nodes with different numbers of ranks, or ranks that do not fill nodes in order; all ranks call.

    Raises:
        UsageError: says how the ranks lie.
    """
    places: list[tuple[int, int]] = [(0, 0)] * launched.world
    dist.all_gather_object(places, (launched.local_rank, launched.local_world))
    per_node = launched.devices_per_node
    wrong = [r for r, place in enumerate(places) if place != (r % per_node, per_node)]
    if wrong:
        local_rank, local_world = places[wrong[0]]
        raise UsageError(
            f"autopar profile needs equally many ranks on each of {launched.num_nodes} nodes, filled in order; rank "
            f"{wrong[0]} of {launched.world} is number {local_rank} of its node's {local_world}. Start {per_node} "
            "on each node, with srun by --distribution=block."
        )


def broadcast_cases(cases: Sequence[Case] | None) -> Sequence[Case] | None:
    """Rank 0's cases, on all ranks; None if there is nothing to measure."""
    choice = [cases]
    dist.broadcast_object_list(choice, src=0)
    return choice[0]

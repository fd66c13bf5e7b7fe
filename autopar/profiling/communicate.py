"""Messages and collectives between processes, as the runtime makes them of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.profiling.cases import Case
from autopar.profiling.clock import Run, Timing, inner_runs, sample, timed, timed_captured
from autopar.profiling.points import Part

TIMEOUT = timedelta(minutes=5)
ROW = 4  # runs that tell how many make a repeat
CONTROL = "gloo"  # of meetings and results: waits on the host and leaves GPUs alone


@dataclass
class Seat:
    """A process among those that measure; the default group carries control alone, groups of devices come when used."""

    rank: int
    world: int
    device: torch.device
    groups: dict[int, Any] = field(default_factory=dict)

    def meet(self) -> None:
        """Wait for all others."""
        dist.barrier()

    def gathered(self, own: Any) -> list[Any]:
        """What all ranks have, in order."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, own)
        return found

    def group(self, ranks: int) -> Any:
        """The group of the first so many ranks; all ranks call this at the same point."""
        if ranks not in self.groups:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            self.groups[ranks] = dist.new_group(list(range(ranks)), timeout=TIMEOUT, backend=backend)
        return self.groups[ranks]


def communication(case: Case, seat: Seat) -> Timing | None:
    """Time of a message or a collective, on GPUs in a CUDA graph as in training steps: launched one by one, small ones
    take the host's time. None on ranks that have no part in it, which wait for the others.
    """
    group, taking_part = seat.group(case.ranks), seat.rank < case.ranks
    run: Run = RUNS[case.kind](case, seat, group) if taking_part else lambda: None
    for _ in range(2):
        run()
    # All ranks of the group take as many, though their clocks differ.
    inner = inner_runs(max(seat.gathered(sample([run], ROW, seat.device))), seat.device)
    if not taking_part:
        return None
    in_graph = seat.device.type == "cuda"
    found = timed_captured([run], seat.device, inner) if in_graph else timed([run], seat.device, inner)
    return Timing(found.seconds / 2, found.spread) if case.kind == "point-to-point" else found


def parts_of(case: Case) -> tuple[Part, ...]:
    """The bytes of the whole tensor on one rank, as `autopar.hardware.Hardware.collective_seconds` counts them."""
    return (Part(0.0, float(case.sizes[0])),)


def tensor(case: Case, seat: Seat) -> Tensor:
    """As many float32 as make the bytes, in equal rows for the ranks."""
    return torch.zeros(case.ranks, max(1, case.sizes[0] // 4 // case.ranks), device=seat.device)


def to_and_fro(case: Case, seat: Seat, group: Any) -> Run:
    """A message from the first rank to the second and back."""
    whole = tensor(case, seat)

    def run() -> None:
        if seat.rank == 0:
            dist.send(whole, 1, group=group)
            dist.recv(whole, 1, group=group)
        else:
            dist.recv(whole, 0, group=group)
            dist.send(whole, 0, group=group)

    return run


def all_reduce(case: Case, seat: Seat, group: Any) -> Run:
    whole = tensor(case, seat)
    return lambda: dist.all_reduce(whole, group=group)


def all_gather(case: Case, seat: Seat, group: Any) -> Run:
    whole = tensor(case, seat)
    own = whole[:1].clone()
    return lambda: dist.all_gather_into_tensor(whole, own, group=group)


def reduce_scatter(case: Case, seat: Seat, group: Any) -> Run:
    whole = tensor(case, seat)
    own = torch.empty_like(whole[:1])
    return lambda: dist.reduce_scatter_tensor(own, whole, group=group)


def all_to_all(case: Case, seat: Seat, group: Any) -> Run:
    whole = tensor(case, seat)
    received = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(received, whole, group=group)


RUNS: Mapping[str, Callable[[Case, Seat, Any], Run]] = {
    "point-to-point": to_and_fro, "all-reduce": all_reduce, "all-gather": all_gather,
    "reduce-scatter": reduce_scatter, "all-to-all": all_to_all,
}  # fmt: skip

"""Messages and collectives between processes, by the runtime's own communicators: where GPUs reach each other's memory
they pass through it, elsewhere torch.distributed carries them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.measure.machine.async_tp import both_ways, layer_parts, symmetric_buffer_bytes
from autopar.measure.machine.cases import Case
from autopar.measure.machine.clock import Run, Timing, inner_runs, sample, timed_captured, timed_rows
from autopar.measure.machine.points import Part
from autopar.ops.collectives import Communicator, register
from autopar.runtime.comm.mesh_groups import GroupCommunicator
from autopar.runtime.comm.symmetric_collectives import SymmetricBufferPool, SymmetricCommunicator
from autopar.runtime.comm.symmetric_p2p import gather_peer_access, have_peer_access

TIMEOUT = timedelta(minutes=5)
ROW = 4  # runs that tell how many make a repeat
WAKING = {"cpu": 10, "cuda": 1}  # times longer repeats than of kernels: threads that wait for sockets wake irregularly
CONTROL = "gloo"  # of meetings and results: waits on the host and leaves GPUs alone


@dataclass
class WorkerContext:
    """A process among those that measure; the default group carries control alone, others come when they are used."""

    rank: int
    world: int
    device: torch.device
    communicators: dict[int, GroupCommunicator | SymmetricCommunicator] = field(default_factory=dict)

    def meet(self) -> None:
        """Wait for all others."""
        dist.barrier()

    def gathered(self, own: Any) -> list[Any]:
        """What all ranks have, in order."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, own)
        return found

    def communicator(self, ranks: int) -> GroupCommunicator | SymmetricCommunicator:
        """That of the first so many ranks; all ranks call this at the same point, and only these use it."""
        if ranks not in self.communicators:
            members, cuda = tuple(range(ranks)), self.device.type == "cuda"
            group = dist.new_group(list(members), timeout=TIMEOUT, backend="nccl" if cuda else "gloo")
            found = GroupCommunicator("measured", members, self.rank, group)
            near = cuda and have_peer_access(gather_peer_access(self.device, self.world, None)[:ranks])
            self.communicators[ranks] = found.symmetric(self.device) if near else found
            register(axis_of(ranks), self.communicators[ranks])
        return self.communicators[ranks]


def axis_of(ranks: int) -> str:
    """What the operators call the first so many ranks."""
    return f"measured.{ranks}"


def communication(case: Case, seat: WorkerContext) -> Timing | None:
    """Time of a message, a collective, or a layer with one, on GPUs in a CUDA graph as in training steps: launched one
    by one, small ones take the host's time. None on ranks that have no part in it, which wait for the others.
    """
    communicator, taking_part = seat.communicator(case.ranks), seat.rank < case.ranks
    if taking_part:
        communicator.reserve(symmetric_buffer_bytes(case) if case.kind == "overlap" else case.ranks * case.sizes[0])
    run: Run = RUNS[case.kind](case, seat, communicator) if taking_part else lambda: None
    for _ in range(2):
        run()
    # All ranks of the group take as many, though their clocks differ.
    inner = WAKING[seat.device.type] * inner_runs(max(seat.gathered(sample([run], ROW, seat.device))), seat.device)
    if not taking_part:
        return None
    in_graph = seat.device.type == "cuda"
    found = timed_captured([run], seat.device, inner) if in_graph else timed_rows([run], seat.device, inner)
    return Timing(found.seconds / 2, found.spread) if case.kind == "point-to-point" else found


def parts_of(case: Case) -> tuple[Part, ...]:
    """The bytes of the whole tensor on one rank, as `autopar.ir.hardware.Hardware.collective_seconds` counts them."""
    if case.kind == "overlap":
        return layer_parts(case)
    return (Part(0.0, float(case.sizes[0])),)


def tensor(case: Case, seat: WorkerContext) -> Tensor:
    """As many float32 as make the bytes, in equal rows for the ranks."""
    return torch.zeros(case.ranks, max(1, case.sizes[0] // 4 // case.ranks), device=seat.device)


def to_and_fro(case: Case, seat: WorkerContext, communicator: Any) -> Run:
    """A message from the first rank to the second and back."""
    whole, other = tensor(case, seat), 1 - seat.rank
    if isinstance(communicator, SymmetricCommunicator):
        assert isinstance(communicator.buffer, SymmetricBufferPool)
        handle = communicator.buffer.handle
        there = handle.get_buffer(other, whole.shape, whole.dtype)

        def give() -> None:
            there.copy_(whole)
            handle.put_signal(other, 0)

        def take() -> None:
            handle.wait_signal(other, 0)
    else:

        def give() -> None:
            dist.send(whole, other, group=communicator.group)

        def take() -> None:
            dist.recv(whole, other, group=communicator.group)

    def run() -> None:
        for step in (give, take) if seat.rank == 0 else (take, give):
            step()

    return run


def all_reduce(case: Case, seat: WorkerContext, communicator: Communicator) -> Run:
    whole = tensor(case, seat)
    return lambda: communicator.all_reduce(whole)


def all_gather(case: Case, seat: WorkerContext, communicator: Communicator) -> Run:
    own = tensor(case, seat)[0].clone()
    return lambda: communicator.all_gather(own)


def reduce_scatter(case: Case, seat: WorkerContext, communicator: Communicator) -> Run:
    whole = tensor(case, seat)
    return lambda: communicator.reduce_scatter(whole)


def all_to_all(case: Case, seat: WorkerContext, communicator: Communicator) -> Run:
    whole = tensor(case, seat)
    return lambda: communicator.all_to_all(whole)


def layer(case: Case, seat: WorkerContext, communicator: Communicator) -> Run:
    return both_ways(case, axis_of(communicator.ranks), seat.device)


RUNS: Mapping[str, Callable[[Case, WorkerContext, Any], Run]] = {
    "point-to-point": to_and_fro, "all-reduce": all_reduce, "all-gather": all_gather,
    "reduce-scatter": reduce_scatter, "all-to-all": all_to_all, "overlap": layer,
}  # fmt: skip

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

from autopar.measure.machine.async_tp import layer_op_counts, layer_workload, symmetric_buffer_bytes
from autopar.measure.machine.cases import Case
from autopar.measure.machine.points import OpCounts
from autopar.measure.timer import Timing, Workload, inner_runs, mean_seconds, time_captured, time_repeats
from autopar.ops.collectives import Communicator, register
from autopar.runtime.comm.mesh_groups import GroupCommunicator
from autopar.runtime.comm.symmetric_collectives import SymmetricBufferPool, SymmetricCommunicator
from autopar.runtime.comm.symmetric_p2p import gather_peer_access, have_peer_access

TIMEOUT = timedelta(minutes=5)
PROBE_RUNS = 4  # runs that tell how many make a repeat
REPEAT_FACTOR = {
    "cpu": 10,
    "cuda": 1,
}  # times longer repeats than of kernels: threads that wait for sockets wake irregularly
CONTROL_BACKEND = "gloo"  # of meetings and results: waits on the host and leaves GPUs alone


@dataclass
class MeasuringRank:
    """A process among those that measure; the default group carries control alone, others come when they are used."""

    rank: int
    world: int
    device: torch.device
    communicators: dict[int, GroupCommunicator | SymmetricCommunicator] = field(default_factory=dict)

    def barrier(self) -> None:
        """Wait for all others."""
        dist.barrier()

    def all_gather_objects(self, own: Any) -> list[Any]:
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
            register(axis_name(ranks), self.communicators[ranks])
        return self.communicators[ranks]


def axis_name(ranks: int) -> str:
    """What the operators call the first so many ranks."""
    return f"measured.{ranks}"


def time_communication(case: Case, worker: MeasuringRank) -> Timing | None:
    """Time of a message, a collective, or a layer with one, on GPUs in a CUDA graph as in training steps: launched one
    by one, small ones take the host's time. None on ranks that have no part in it, which wait for the others.
    """
    communicator, taking_part = worker.communicator(case.ranks), worker.rank < case.ranks
    if taking_part:
        communicator.reserve(symmetric_buffer_bytes(case) if case.kind == "beside" else case.ranks * case.sizes[0])
    run: Workload = COMMUNICATION_BUILDERS[case.kind](case, worker, communicator) if taking_part else lambda: None
    for _ in range(2):
        run()
    # All ranks of the group take as many, though their clocks differ.
    inner = REPEAT_FACTOR[worker.device.type] * inner_runs(
        max(worker.all_gather_objects(mean_seconds([run], PROBE_RUNS, worker.device))), worker.device
    )
    if not taking_part:
        return None
    in_graph = worker.device.type == "cuda"
    found = time_captured([run], worker.device, inner) if in_graph else time_repeats([run], worker.device, inner)
    return Timing(found.seconds / 2, found.spread) if case.kind == "point-to-point" else found


def communication_op_counts(case: Case) -> tuple[OpCounts, ...]:
    """The bytes of the whole tensor on one rank, as `autopar.ir.hardware.Hardware.collective_seconds` counts them."""
    if case.kind == "beside":
        return layer_op_counts(case)
    return (OpCounts(0.0, float(case.sizes[0])),)


def message_tensor(case: Case, worker: MeasuringRank) -> Tensor:
    """As many float32 as make the bytes, in equal rows for the ranks."""
    return torch.zeros(case.ranks, max(1, case.sizes[0] // 4 // case.ranks), device=worker.device)


def ping_pong(case: Case, worker: MeasuringRank, communicator: Any) -> Workload:
    """A message from the first rank to the second and back."""
    whole, other = message_tensor(case, worker), 1 - worker.rank
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
        for step in (give, take) if worker.rank == 0 else (take, give):
            step()

    return run


def all_reduce(case: Case, worker: MeasuringRank, communicator: Communicator) -> Workload:
    whole = message_tensor(case, worker)
    return lambda: communicator.all_reduce(whole)


def all_gather(case: Case, worker: MeasuringRank, communicator: Communicator) -> Workload:
    own = message_tensor(case, worker)[0].clone()
    return lambda: communicator.all_gather(own)


def reduce_scatter(case: Case, worker: MeasuringRank, communicator: Communicator) -> Workload:
    whole = message_tensor(case, worker)
    return lambda: communicator.reduce_scatter(whole)


def all_to_all(case: Case, worker: MeasuringRank, communicator: Communicator) -> Workload:
    whole = message_tensor(case, worker)
    return lambda: communicator.all_to_all(whole)


def async_tp_layer(case: Case, worker: MeasuringRank, communicator: Communicator) -> Workload:
    return layer_workload(case, axis_name(communicator.ranks), worker.device)


COMMUNICATION_BUILDERS: Mapping[str, Callable[[Case, MeasuringRank, Any], Workload]] = {
    "point-to-point": ping_pong, "all-reduce": all_reduce, "all-gather": all_gather,
    "reduce-scatter": reduce_scatter, "all-to-all": all_to_all, "beside": async_tp_layer,
}  # fmt: skip

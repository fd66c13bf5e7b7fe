"""Times of messages and collectives between worker processes, through the runtime's own communicators.

Ranks that have peer access use symmetric memory; others use torch.distributed.
"""

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
from autopar.measure.workers import WorkerContext
from autopar.ops.collectives import Communicator, register
from autopar.runtime.comm.axis_communicators import GroupCommunicator
from autopar.runtime.comm.symmetric_collectives import SymmetricBufferPool, SymmetricCommunicator
from autopar.runtime.comm.symmetric_p2p import gather_peer_access, have_peer_access

TIMEOUT = timedelta(minutes=5)
PROBE_RUNS = 4  # runs whose time decides how many make a repeat
# Factor by which repeats are longer than repeats of kernels: threads that wait for sockets wake irregularly.
REPEAT_FACTOR = {"cpu": 10, "cuda": 1}
CONTROL_BACKEND = "gloo"  # of barriers and results: it waits on the host and leaves GPUs alone


@dataclass
class RankGroups:
    """Communicators between workers, created when they are first used. The default group carries control alone."""

    worker: WorkerContext
    communicators: dict[tuple[tuple[int, ...], ...], GroupCommunicator | SymmetricCommunicator | None] = field(
        default_factory=dict
    )

    def all_gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        values: list[Any] = [None] * self.worker.world
        dist.all_gather_object(values, value)
        return values

    def communicator(self, case: Case) -> GroupCommunicator | SymmetricCommunicator | None:
        """The communicator of this rank's group of a case; None outside of its groups. A collective call."""
        groups = rank_groups(case, self.worker.per_node)
        if groups not in self.communicators:
            rank, device = self.worker.rank, self.worker.device
            cuda = device.type == "cuda"
            access = gather_peer_access(device, self.worker.world, None) if cuda and case.nodes == 1 else []
            communicator: GroupCommunicator | SymmetricCommunicator | None = None
            for members in groups:  # all ranks create all groups
                group = dist.new_group(list(members), timeout=TIMEOUT, backend="nccl" if cuda else "gloo")
                if rank not in members:
                    continue
                if access and have_peer_access(access[: len(members)]):
                    communicator = SymmetricCommunicator(rank, len(members), SymmetricBufferPool(rank, device, group))
                else:
                    communicator = GroupCommunicator("measured", members, rank, group)
            if communicator is not None and case.nodes == 1:
                register(axis_name(case.ranks), communicator)
            self.communicators[groups] = communicator
        return self.communicators[groups]


def rank_groups(case: Case, per_node: int) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that run a case at the same time. Ranks fill nodes in order.

    Args:
        per_node: ranks of each node.
    """
    if case.nodes == 1:
        return (tuple(range(case.ranks)),)
    members = case.ranks // case.nodes
    if case.kind == "point-to-point":
        half = case.nodes // 2
        senders = [node * per_node + i for node in range(half) for i in range(members)]
        return tuple((rank, rank + half * per_node) for rank in senders)
    if members > 1:
        return (tuple(range(case.ranks)),)
    return tuple(tuple(range(i, case.nodes * per_node, per_node)) for i in range(per_node))


def axis_name(ranks: int) -> str:
    """The axis by which operators find the communicator of the first ``ranks`` ranks."""
    return f"measured.{ranks}"


def time_communication(case: Case, groups: RankGroups) -> Timing | None:
    """Time of a message, a collective, or a linear layer with one; None on ranks outside the groups, which wait.

    GPUs launch it from a CUDA graph, as training steps do. Launched from Python, the time of a small one would be the
    host's.
    """
    worker, communicator = groups.worker, groups.communicator(case)
    run: Workload = do_nothing
    if communicator is not None:
        communicator.reserve(symmetric_buffer_bytes(case) if case.kind == "overlap" else case.ranks * case.sizes[0])
        leaves_node = case.kind == "point-to-point" and case.nodes > 1
        run = (acknowledged_message if leaves_node else COMMUNICATION_BUILDERS[case.kind])(case, worker, communicator)
    for _ in range(2):
        run()
    # Clocks differ, and all ranks of the group must run equally often: the slowest rank's time decides.
    probe_seconds = max(groups.all_gather_objects(mean_seconds([run], PROBE_RUNS, worker.device)))
    if communicator is None:
        return None
    inner = REPEAT_FACTOR[worker.device.type] * inner_runs(probe_seconds, worker.device)
    time = time_captured if worker.device.type == "cuda" else time_repeats
    timing = time([run], worker.device, inner=inner)
    there_and_back = case.kind == "point-to-point" and case.nodes == 1
    return Timing(timing.seconds / 2, timing.spread) if there_and_back else timing


def do_nothing() -> None:
    """Work of ranks outside of a case's groups."""


def communication_op_counts(case: Case) -> tuple[OpCounts, ...]:
    """Bytes of the whole tensor on one rank, as `autopar.ir.hardware.Hardware.collective_seconds` counts them; for
    linear layers also their products."""
    if case.kind == "overlap":
        return layer_op_counts(case)
    return (OpCounts(0.0, float(case.sizes[0])),)


def message_tensor(case: Case, worker: WorkerContext) -> Tensor:
    """A float32 tensor of ``case.sizes[0]`` bytes, shape [ranks, n]."""
    return torch.zeros(case.ranks, max(1, case.sizes[0] // 4 // case.ranks), device=worker.device)


def ping_pong(case: Case, worker: WorkerContext, communicator: Any) -> Workload:
    """A message from rank 0 to rank 1 and back."""
    tensor, peer = message_tensor(case, worker), 1 - worker.rank
    if isinstance(communicator, SymmetricCommunicator):
        assert isinstance(communicator.buffer, SymmetricBufferPool)
        handle = communicator.buffer.handle
        peer_buffer = handle.get_buffer(peer, tensor.shape, tensor.dtype)

        def send() -> None:
            peer_buffer.copy_(tensor)
            handle.put_signal(peer, 0)

        def receive() -> None:
            handle.wait_signal(peer, 0)
    else:

        def send() -> None:
            dist.send(tensor, peer, group=communicator.group)

        def receive() -> None:
            dist.recv(tensor, peer, group=communicator.group)

    def run() -> None:
        for step in (send, receive) if worker.rank == 0 else (receive, send):
            step()

    return run


def acknowledged_message(case: Case, worker: WorkerContext, communicator: Any) -> Workload:
    """A message to the partner on another node, which answers with a few bytes.

    All messages go one way, so that those of several senders share what carries them.
    """
    message, answer = message_tensor(case, worker), torch.zeros(1, device=worker.device)
    sender, receiver = communicator.members
    group = communicator.group

    def run() -> None:
        if worker.rank == sender:
            dist.send(message, receiver, group=group)
            dist.recv(answer, receiver, group=group)
        else:
            dist.recv(message, sender, group=group)
            dist.send(answer, sender, group=group)

    return run


def all_reduce(case: Case, worker: WorkerContext, communicator: Communicator) -> Workload:
    tensor = message_tensor(case, worker)
    return lambda: communicator.all_reduce(tensor)


def all_gather(case: Case, worker: WorkerContext, communicator: Communicator) -> Workload:
    shard = message_tensor(case, worker)[0].clone()
    return lambda: communicator.all_gather(shard)


def reduce_scatter(case: Case, worker: WorkerContext, communicator: Communicator) -> Workload:
    tensor = message_tensor(case, worker)
    return lambda: communicator.reduce_scatter(tensor)


def all_to_all(case: Case, worker: WorkerContext, communicator: Communicator) -> Workload:
    tensor = message_tensor(case, worker)
    return lambda: communicator.all_to_all(tensor)


def async_tp_layer(case: Case, worker: WorkerContext, communicator: Communicator) -> Workload:
    return layer_workload(case, axis_name(communicator.ranks), worker.device)


COMMUNICATION_BUILDERS: Mapping[str, Callable[[Case, WorkerContext, Any], Workload]] = {
    "point-to-point": ping_pong, "all-reduce": all_reduce, "all-gather": all_gather,
    "reduce-scatter": reduce_scatter, "all-to-all": all_to_all, "overlap": async_tp_layer,
}  # fmt: skip

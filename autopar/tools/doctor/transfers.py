"""Transfers between two processes, by the runtime's communicators: what arrives, and how long a message takes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist

from autopar.errors import WorkerError
from autopar.measure.machine.cases import MIB, Case
from autopar.measure.machine.collectives import CONTROL_BACKEND, TIMEOUT, RankGroups, rank_groups, time_communication
from autopar.measure.workers import Emit, WorkerContext
from autopar.runtime.comm.axis_communicators import GroupCommunicator
from autopar.runtime.comm.symmetric_collectives import SymmetricBufferPool, SymmetricCommunicator
from autopar.tools.doctor.finding import Gpu
from autopar.tools.doctor.in_processes import run_in_processes

Transport = Literal["Gloo", "NCCL", "symmetric memory"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
PAIR = (0, 1)  # ranks
MESSAGE_BYTES = {"cpu": 4 * MIB, "cuda": 64 * MIB}  # sizes to which cost models are fitted
LIMIT_SECONDS = 40.0  # for all transports of a pair
PERIOD = 1000  # of the numbers that are sent: small ones, whose sums are exact


@dataclass(frozen=True)
class TransferTask:
    """Transports that two processes try in this order, each on its device."""

    devices: tuple[str, str]
    transports: tuple[Transport, ...]


@dataclass(frozen=True)
class Transfer:
    """A message by a transport, and its median seconds from one process to the other."""

    transport: Transport
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class FailedTransfer:
    """A transport that did not work between two devices."""

    transport: Transport
    reason: str


@dataclass(frozen=True)
class PairTransfers:
    """Transfers between two devices by all transports."""

    pair: tuple[int, int]
    transfers: tuple[Transfer, ...]
    failed: tuple[FailedTransfer, ...] = ()


def transports(gpus: tuple[Gpu, ...], pair: tuple[int, int]) -> tuple[Transport, ...]:
    """Transports that two devices can use. Gloo carries control messages between the hosts of GPUs."""
    if not gpus:
        return ("Gloo",)
    first, second = (gpus[index] for index in pair)
    are_peers = second.index in first.peers and first.index in second.peers
    return TRANSPORTS if are_peers else TRANSPORTS[:2]


def pair_transfers(gpus: tuple[Gpu, ...], pair: tuple[int, int]) -> PairTransfers:
    """Transfers between two devices. After a transport that fails, new processes try the others."""
    devices = tuple(f"cuda:{index}" if gpus else "cpu" for index in pair)
    done: list[Transfer] = []
    failures: list[FailedTransfer] = []
    waiting: list[Transport] = list(transports(gpus, pair))
    while waiting:
        try:
            task = TransferTask((devices[0], devices[1]), tuple(waiting))
            run_in_processes(f"{__name__}:run", task, len(PAIR), LIMIT_SECONDS, done.append)
            break
        except WorkerError as error:
            succeeded = {transfer.transport for transfer in done}
            waiting = [transport for transport in waiting if transport not in succeeded]
            failures += [FailedTransfer(transport, str(error)) for transport in waiting[:1]]
            waiting = waiting[1:]
    return PairTransfers(pair, tuple(done), tuple(failures))


# -- in the two processes ------------------------------------------------------------------------------------------


def run(task: TransferTask, emit: Emit) -> None:
    """Try the transports; rank 0 emits the `Transfer` of each."""
    rank = int(os.environ["RANK"])
    device = torch.device(task.devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(CONTROL_BACKEND, timeout=TIMEOUT)
    for transport in task.transports:
        worker = WorkerContext(rank, len(PAIR), torch.device("cpu") if transport == "Gloo" else device)
        case = Case("point-to-point", sizes=(MESSAGE_BYTES[worker.device.type],), ranks=len(PAIR))
        communicator = communicator_of(transport, worker)
        check_arrival(communicator, worker, case.sizes[0])
        groups = RankGroups(worker, {rank_groups(case, worker.per_node): communicator})
        timing = time_communication(case, groups)
        assert timing is not None
        seconds = max(groups.all_gather_objects(timing.seconds))
        if rank == 0:
            emit(Transfer(transport, case.sizes[0], seconds))
    dist.barrier()


def communicator_of(transport: Transport, worker: WorkerContext) -> GroupCommunicator | SymmetricCommunicator:
    """The runtime's communicator of both processes."""
    group = dist.new_group(list(PAIR), timeout=TIMEOUT, backend="gloo" if transport == "Gloo" else "nccl")
    if transport == "symmetric memory":
        return SymmetricCommunicator(worker.rank, worker.world, SymmetricBufferPool(worker.rank, worker.device, group))
    return GroupCommunicator("checked", PAIR, worker.rank, group)


def check_arrival(
    communicator: GroupCommunicator | SymmetricCommunicator, worker: WorkerContext, num_bytes: int
) -> None:
    """Sum numbers of both processes, and compare the sum.

    Raises:
        WorkerError: it is wrong, as behind an IOMMU that misdirects peer access.
    """
    communicator.reserve(worker.world * num_bytes)
    numbers = torch.arange(num_bytes // 4, device=worker.device).remainder_(PERIOD).float()
    total = numbers * (worker.rank + 1)
    communicator.all_reduce(total)
    wrong = int((total != numbers * 3).sum())
    if wrong:
        raise WorkerError(f"{wrong:,} of {numbers.numel():,} numbers arrived wrong")

"""Transport between processes: Gloo on CPU, NCCL or symmetric memory on GPUs.

In training steps on one host, tensors are copied into the peer's memory and signalled (`symmetric_p2p`). Elsewhere NCCL
carries them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import SEE_DOCTOR, UsageError
from autopar.runtime.comm.protocols import (
    CHECKPOINT_SECONDS,
    GatherHandle,
    MessageBytes,
    P2PChannel,
    RecvHandle,
    SendHandle,
    SymmetricBuffer,
    TransportError,
    TransportName,
)
from autopar.runtime.comm.symmetric_collectives import SymmetricBufferPool
from autopar.runtime.comm.symmetric_p2p import PeerAccess, SymmetricMemory, gather_peer_access, have_peer_access

NO_SYMMETRIC_MEMORY = (
    'transport="symmetric" needs GPUs of one host that can write into each other\'s memory (over NVLink, say), all '
    f"visible to every rank. Leave it out: NCCL carries the tensors then. {SEE_DOCTOR}"
)


def check_default_group(rank: int, world: int, device: torch.device) -> None:
    """Check that the caller's default process group has the ranks and a backend that a run needs.

    Args:
        rank, world: this process's rank and the number of ranks, by the launcher.
        device: device of the rank.

    Raises:
        UsageError: the group has other ranks, or no backend that autopar can use.
    """
    remedy = "Call torch.distributed.init_process_group() without arguments, or leave the group to autopar.parallelize."
    if (dist.get_rank(), dist.get_world_size()) != (rank, world):
        raise UsageError(
            f"This process is rank {dist.get_rank()} of {dist.get_world_size()} in the default process group, but rank "
            f"{rank} of {world} for the launcher (RANK, WORLD_SIZE). {remedy}"
        )
    backends = dist.get_backend_config()
    if "gloo" not in backends and "nccl" not in backends:
        raise UsageError(f"The default process group has the backends {backends}, neither Gloo nor NCCL. {remedy}")
    if device.type == "cuda" and not dist.is_nccl_available():
        raise UsageError(f'This build of torch has no NCCL for GPUs. Pass backend="gloo" to run on CPU. {SEE_DOCTOR}')


class ProcessGroupTransport:
    """torch.distributed: Gloo with tags, or NCCL with a process group per directed pair and channel index.

    NCCL connects two peers inside their first transfer and blocks the host until both are there. So the constructor
    connects every pair before any schedule runs, in the same order on all ranks.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        pairs: Collection[tuple[int, int, int]],
        rank_sets: Iterable[tuple[int, ...]],
        timeout_seconds: float,
        transport: TransportName = "auto",
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ) -> None:
        """Connect all pairs and groups.

        Args:
            pairs: (src, dst, channel index) of all rank pairs that will ever exchange tensors; equal on all ranks.
            rank_sets: rank sets that run collectives, some perhaps twice; in equal order on all ranks.
            timeout_seconds: longest wait for a peer in a step.
            transport: carries the tensors of training steps between stages on GPUs.
            checkpoint_seconds: longest wait for a peer in a save or load.

        Raises:
            UsageError: ``transport`` is "symmetric", and a rank lacks peer access to another one.
        """
        self.rank, self.device = rank, device
        self.timeout_seconds, self.checkpoint_seconds = timeout_seconds, checkpoint_seconds
        # The default group may be the caller's and have any backends, so each group names its own.
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.posts_early = self.backend == "gloo"
        self.opened: list[Any] = []  # process groups, as they were made
        self.groups: dict[tuple[int, ...], Any] = {}
        self.pair_groups: dict[tuple[int, int, int], Any] = {}
        self.cpu_group: Any = None
        self.checkpoint_group: Any = None
        self.peer_access: Sequence[PeerAccess] = ()  # by rank; empty where symmetric memory is not to be used
        self.symmetric_memory: SymmetricMemory | None = None
        try:
            self.open(pairs, rank_sets, transport)
        except BaseException:
            self.close()
            raise

    def open(
        self, pairs: Collection[tuple[int, int, int]], rank_sets: Iterable[tuple[int, ...]], transport: TransportName
    ) -> None:
        """Make process groups and symmetric memory; arguments and errors as in the constructor."""
        # init_device_mesh (torch 2.11 to 2.15) would give the groups of mesh axes torch's timeout of half an hour
        # instead of the run's.
        self.groups = {ranks: self.new_group(ranks) for ranks in dict.fromkeys(rank_sets)}
        # Flags travel between hosts over Gloo. A Gloo group of some ranks only would hang if the default NCCL group is
        # bound to a device: the other ranks wait for a split of its communicator that members of a Gloo group never
        # join (torch 2.11).
        if self.backend == "nccl":
            self.cpu_group = self.new_group(backend="gloo")
            self.pair_groups = {edge: self.new_group(edge[:2]) for edge in sorted(pairs)}
            self.connect()
        # Files are written and read for longer than a step may take.
        self.checkpoint_group = self.new_group(backend="gloo", seconds=self.checkpoint_seconds)
        world = dist.get_world_size()
        if self.cpu_group is not None and world > 1 and transport != "nccl":
            self.peer_access = gather_peer_access(self.device, world, self.cpu_group)
        near = bool(self.peer_access) and have_peer_access(self.peer_access)
        if transport == "symmetric" and world > 1 and not near:
            raise UsageError(NO_SYMMETRIC_MEMORY)
        if near and pairs:
            self.symmetric_memory = SymmetricMemory(self.rank, world, self.device, self.cpu_group)

    def new_group(
        self, ranks: Sequence[int] | None = None, backend: str | None = None, seconds: float | None = None
    ) -> Any:
        """New process group, by default of all ranks, over the backend of this rank's device and with its timeout."""
        timeout = timedelta(seconds=self.timeout_seconds if seconds is None else seconds)
        members = ranks if ranks is None else list(ranks)
        group = dist.new_group(members, timeout=timeout, backend=backend or self.backend)
        self.opened.append(group)
        return group

    def open_channel(self, incoming: MessageBytes, outgoing: MessageBytes, outlives_step: bool) -> P2PChannel:
        memory = self.symmetric_memory
        return self if memory is None else memory.open(incoming, outgoing, is_shared=not outlives_step)

    def connect(self) -> None:
        """Exchange one number in every group and over every pair."""
        token = torch.zeros(1, device=self.device)
        for ranks, group in self.groups.items():
            if self.rank in ranks:
                dist.all_reduce(token, group=group)
        for (src, dst, _), group in self.pair_groups.items():
            if self.rank == src:
                dist.send(token, dst, group=group)
            elif self.rank == dst:
                dist.recv(token, src, group=group)
        torch.cuda.synchronize(self.device)

    def send(self, tensor: torch.Tensor, dst: int, tag: int, channel: int = 0) -> SendHandle:
        return start_send(tensor, dst, tag, self.pair_groups.get((self.rank, dst, channel)))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int, channel: int = 0) -> RecvHandle:
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        return start_receive(buffer, src, tag, self.pair_groups.get((src, self.rank, channel)))

    def send_flags(self, flags: Sequence[bool], dst: int, tag: int) -> SendHandle:
        return start_send(torch.tensor(flags, dtype=torch.uint8, device="cpu"), dst, tag, self.cpu_group)

    def receive_flags(self, count: int, src: int, tag: int) -> RecvHandle:
        return start_receive(torch.empty(count, dtype=torch.uint8, device="cpu"), src, tag, self.cpu_group)

    def start_sum(self, tensor: torch.Tensor, ranks: Sequence[int], root: int | None = None) -> SendHandle:
        group = self.groups[tuple(ranks)]
        over = f"over ranks {list(ranks)}"
        if root is None:
            return launch_async(lambda: dist.all_reduce(tensor, group=group, async_op=True), f"a sum {over}")
        return launch_async(
            lambda: dist.reduce(tensor, root, group=group, async_op=True), f"a sum {over} on rank {root}"
        )

    def start_broadcast(self, tensor: torch.Tensor, ranks: Sequence[int], root: int) -> SendHandle:
        group = self.groups[tuple(ranks)]
        return launch_async(
            lambda: dist.broadcast(tensor, root, group=group, async_op=True), f"a broadcast over ranks {list(ranks)}"
        )

    def start_reduce_scatter(self, flat: torch.Tensor, ranks: Sequence[int]) -> SendHandle:
        group, segment = self.groups[tuple(ranks)], segment_of(flat, ranks, self.rank)
        return launch_async(
            lambda: dist.reduce_scatter_tensor(segment, flat, group=group, async_op=True),
            f"a reduce-scatter over ranks {list(ranks)}",
        )

    def start_all_gather(self, flat: torch.Tensor, ranks: Sequence[int]) -> SendHandle:
        group, segment = self.groups[tuple(ranks)], segment_of(flat, ranks, self.rank)
        return launch_async(
            lambda: dist.all_gather_into_tensor(flat, segment, group=group, async_op=True),
            f"an all-gather over ranks {list(ranks)}",
        )

    def start_gather(self, flat: torch.Tensor, ranks: Sequence[int], root: int) -> GatherHandle:
        group = self.groups[tuple(ranks)]
        rows = [torch.empty_like(flat) for _ in ranks] if self.rank == root else []
        handle = launch_async(
            lambda: dist.gather(as_bytes(flat), [as_bytes(r) for r in rows] or None, root, group, async_op=True),
            f"a gather over ranks {list(ranks)} on rank {root}",
        )

        def wait_rows() -> list[torch.Tensor]:
            handle()
            return rows

        return wait_rows

    def start_scatter(
        self, flat: torch.Tensor, rows: Sequence[torch.Tensor], ranks: Sequence[int], root: int
    ) -> SendHandle:
        group = self.groups[tuple(ranks)]
        parts = [as_bytes(row) for row in rows] if self.rank == root else None
        return launch_async(
            lambda: dist.scatter(as_bytes(flat), parts, root, group, async_op=True),
            f"a scatter over ranks {list(ranks)} from rank {root}",
            rows,
        )

    def symmetric_buffer(self, ranks: Sequence[int]) -> SymmetricBuffer | None:
        if not self.peer_access or not have_peer_access([self.peer_access[rank] for rank in ranks]):
            return None
        return SymmetricBufferPool(list(ranks).index(self.rank), self.device, self.groups[tuple(ranks)])

    def sum_flags(self, flags: Sequence[bool], ranks: Sequence[int]) -> list[int]:
        counts = torch.tensor(flags, dtype=torch.int32, device=self.device)
        group = self.groups[tuple(ranks)]
        launch_async(
            lambda: dist.all_reduce(counts, group=group, async_op=True), f"a sum of flags over ranks {list(ranks)}"
        )()
        return counts.tolist()

    def close(self) -> None:
        """Destroy the groups that this transport created; the default process group stays."""
        self.symmetric_memory = None
        destroy_groups(self.opened)


def destroy_groups(groups: Iterable[Any]) -> None:
    """Destroy process groups."""
    for group in groups:
        with suppress(ValueError):  # the user has destroyed the default group, and with it all others
            dist.destroy_process_group(group)


def segment_of(flat: torch.Tensor, ranks: Sequence[int], rank: int) -> torch.Tensor:
    """A rank's segment of a row [ranks * segment]."""
    assert flat.numel() % len(ranks) == 0, f"{flat.numel()} elements for {len(ranks)} ranks"
    return flat.view(len(ranks), -1)[list(ranks).index(rank)]


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """A view in a dtype that every backend moves."""
    return flat.view(torch.uint8)


def launch_async(call: Callable[[], Any], what: str, kept: Any = None) -> SendHandle:
    """Launch an asynchronous call of torch.distributed; calling the handle waits for it.

    Args:
        what: name of the call, for errors.
        kept: tensors to keep alive until the handle is gone: Gloo does not hold references to tensors that it sends.

    Raises:
        TransportError: the call does not start; raised by the handle, it does not finish.
    """
    try:
        work = call()
    except RuntimeError as error:
        raise TransportError(f"{what} did not start: {error}") from error

    def handle(_kept: Any = kept) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise TransportError(f"{what} did not finish: {error}") from error

    return handle


def start_send(tensor: torch.Tensor, dst: int, tag: int, group: Any) -> SendHandle:
    """Start a send; calling the handle waits for it."""
    return launch_async(lambda: dist.isend(tensor, dst, group=group, tag=tag), f"a send to rank {dst}", tensor)


def start_receive(buffer: torch.Tensor, src: int, tag: int, group: Any) -> RecvHandle:
    """Start a receive; calling the handle waits for it and returns the buffer."""
    handle = launch_async(lambda: dist.irecv(buffer, src, group=group, tag=tag), f"a receive from rank {src}")

    def receive() -> torch.Tensor:
        handle()
        return buffer

    return receive

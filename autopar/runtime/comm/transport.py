"""How tensors travel between ranks: threads of one process, Gloo on CPU, NCCL on GPUs."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from autopar.errors import UsageError
from autopar.runtime.comm.symmetric_collectives import SymmetricBuffer, SymmetricBufferPool
from autopar.runtime.comm.symmetric_p2p import (
    MessageBytes,
    PeerAccess,
    RecvHandle,
    SendHandle,
    SymmetricMemory,
    gather_peer_access,
    have_peer_access,
)

TransportName = Literal["auto", "nccl", "symmetric"]
GatherHandle = Callable[[], list[torch.Tensor]]


class TransportError(RuntimeError):
    """A peer is gone or silent. Rarely the cause of a failure: another rank failed first."""


class P2PChannel(Protocol):
    """Moves the tensors of a schedule from rank to rank.

    Sends are asynchronous and in order for each directed pair and lane. ``posts_early`` says whether a receive may be
    posted while other work runs, which is free with Gloo and costs multiprocessors with NCCL.
    """

    posts_early: bool

    def send(self, tensor: torch.Tensor, dst: int, tag: int, channel: int = 0) -> SendHandle:
        """Start sending a contiguous tensor; calling the delivery waits until it is sent, which keeps it until then."""
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int, channel: int = 0) -> RecvHandle:
        """Start receiving; calling the receipt waits and returns the tensor."""
        ...


class Transport(P2PChannel, Protocol):
    """Moves tensors between ranks, and what hosts ask each other."""

    rank: int

    def open_channel(self, incoming: MessageBytes, outgoing: MessageBytes) -> P2PChannel:
        """What moves the tensors of one kind of training step, which are these; all ranks call."""
        ...

    def send_flags(self, flags: Sequence[bool], dst: int, tag: int) -> SendHandle:
        """Start sending what the host of ``dst`` must know, without waiting for any device."""
        ...

    def receive_flags(self, count: int, src: int, tag: int) -> RecvHandle:
        """Start receiving flags, as a tensor on the CPU."""
        ...

    def start_sum(self, tensor: torch.Tensor, ranks: Sequence[int], root: int | None = None) -> SendHandle:
        """Start summing a contiguous tensor over ``ranks`` in place, on all of them or only on ``root``, whose peers
        are left with anything; calling the delivery waits for it.

        Every one of the ranks makes the same calls (of all collectives) in the same order.
        """
        ...

    def start_broadcast(self, tensor: torch.Tensor, ranks: Sequence[int], root: int) -> SendHandle:
        """Start copying a contiguous tensor from ``root`` over those of the other ranks."""
        ...

    def start_reduce_scatter(self, flat: torch.Tensor, ranks: Sequence[int]) -> SendHandle:
        """Start summing a contiguous row, of as many equal segments as there are ranks, so that each of the ranks gets
        the sum of its segment, in place; the other segments are left with anything.
        """
        ...

    def start_all_gather(self, flat: torch.Tensor, ranks: Sequence[int]) -> SendHandle:
        """Start filling such a row on all ranks with the segment that each of them has in it; the inverse."""
        ...

    def start_gather(self, flat: torch.Tensor, ranks: Sequence[int], root: int) -> GatherHandle:
        """Start bringing every rank's contiguous row, all of one size, to ``root``; calling the result waits and
        returns them in the order of ``ranks``, or nothing on the other ranks.
        """
        ...

    def start_scatter(
        self, flat: torch.Tensor, rows: Sequence[torch.Tensor], ranks: Sequence[int], root: int
    ) -> SendHandle:
        """Start filling ``flat`` with the row that ``root`` has for this rank; the inverse of `start_gather`.

        ``rows`` matter on ``root`` only, one for each of the ranks.
        """
        ...

    def symmetric_buffer(self, ranks: Sequence[int]) -> SymmetricBuffer | None:
        """Memory of some ranks that all of them read and write, where there is such; all of them call."""
        ...

    def sum_flags(self, flags: Sequence[bool], ranks: Sequence[int]) -> list[int]:
        """On how many of the ranks each flag is set; waits for all of them."""
        ...

    def close(self) -> None:
        """Give up what this transport made; the process group stays."""
        ...


NO_SYMMETRIC_MEMORY = (
    'transport="symmetric" needs GPUs of one host that can write into each other\'s memory (over NVLink, say), all '
    "visible to every rank. Leave it out: NCCL carries the tensors then."
)


class ProcessGroupTransport:
    """torch.distributed point to point: Gloo with tags, or NCCL with a communicator per directed pair and
    lane.

    NCCL connects two peers inside their first transfer and blocks the host until both are there, so every pair is
    connected here, in one order on all ranks, before any schedule runs.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        pairs: Collection[tuple[int, int, int]],
        rank_sets: Collection[tuple[int, ...]],
        existing: Mapping[tuple[int, ...], Any],
        timeout_seconds: float,
        transport: TransportName = "auto",
    ) -> None:
        """Connect all pairs and groups.

        Args:
            edges: (src, dst, lane) of every directed pair of ranks that will ever exchange tensors; equal on all ranks.
            shared: the rank sets that sum or broadcast; equal on all ranks.
            made: rank sets that have a process group already, and that group where this rank is in it; equal sets in
                equal order on all ranks.
            timeout_seconds: longest wait for a peer.
            transport: what carries the tensors of training steps between stages on GPUs.

        Raises:
            UsageError: symmetric memory is asked for where a rank cannot reach another's.
        """
        timeout = timedelta(seconds=timeout_seconds)
        self.rank, self.device = rank, device
        self.posts_early = dist.get_backend() == "gloo"
        alone = sorted(set(rank_sets) - set(existing))
        self.created_groups: dict[tuple[int, ...], Any] = {r: dist.new_group(list(r), timeout=timeout) for r in alone}
        self.groups: dict[tuple[int, ...], Any] = {**existing, **self.created_groups}
        self.pair_groups: dict[tuple[int, int, int], Any] = {}
        # Flags of transfers travel from host to host. A Gloo group of some ranks only would hang in a default NCCL
        # group that is bound to a device: those that are not in it wait for a split of the communicator that the
        # others, being Gloo, never join (torch 2.11).
        self.cpu_group: Any = None
        if dist.get_backend() == "nccl":
            self.cpu_group = dist.new_group(backend="gloo", timeout=timeout)
            self.pair_groups = {edge: dist.new_group(list(edge[:2]), timeout=timeout) for edge in sorted(pairs)}
            self.connect()
        world = dist.get_world_size()
        self.peer_access: Sequence[PeerAccess] = ()  # of each rank, where symmetric memory may be used
        if self.cpu_group is not None and world > 1 and transport != "nccl":
            self.peer_access = gather_peer_access(device, world, self.cpu_group)
        near = bool(self.peer_access) and have_peer_access(self.peer_access)
        if transport == "symmetric" and world > 1 and not near:
            raise UsageError(NO_SYMMETRIC_MEMORY)
        self.symmetric_memory = SymmetricMemory(rank, world, device, self.cpu_group) if near and pairs else None

    def open_channel(self, incoming: MessageBytes, outgoing: MessageBytes) -> P2PChannel:
        return self.symmetric_memory.open(incoming, outgoing) if self.symmetric_memory is not None else self

    def connect(self) -> None:
        """Exchange one number in every group and over every channel."""
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
        return start_send(torch.tensor(flags, dtype=torch.uint8), dst, tag, self.cpu_group)

    def receive_flags(self, count: int, src: int, tag: int) -> RecvHandle:
        return start_receive(torch.empty(count, dtype=torch.uint8), src, tag, self.cpu_group)

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
        group, own = self.groups[tuple(ranks)], segment_of(flat, ranks, self.rank)
        return launch_async(
            lambda: dist.reduce_scatter_tensor(own, flat, group=group, async_op=True),
            f"a reduce-scatter over ranks {list(ranks)}",
        )

    def start_all_gather(self, flat: torch.Tensor, ranks: Sequence[int]) -> SendHandle:
        group, own = self.groups[tuple(ranks)], segment_of(flat, ranks, self.rank)
        return launch_async(
            lambda: dist.all_gather_into_tensor(flat, own, group=group, async_op=True),
            f"an all-gather over ranks {list(ranks)}",
        )

    def start_gather(self, flat: torch.Tensor, ranks: Sequence[int], root: int) -> GatherHandle:
        group = self.groups[tuple(ranks)]
        rows = [torch.empty_like(flat) for _ in ranks] if self.rank == root else []
        delivery = launch_async(
            lambda: dist.gather(as_bytes(flat), [as_bytes(r) for r in rows] or None, root, group, async_op=True),
            f"a gather over ranks {list(ranks)} on rank {root}",
        )

        def gathering() -> list[torch.Tensor]:
            delivery()
            return rows

        return gathering

    def start_scatter(
        self, flat: torch.Tensor, rows: Sequence[torch.Tensor], ranks: Sequence[int], root: int
    ) -> SendHandle:
        group = self.groups[tuple(ranks)]
        given = [as_bytes(row) for row in rows] if self.rank == root else None
        return launch_async(
            lambda: dist.scatter(as_bytes(flat), given, root, group, async_op=True),
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
        self.symmetric_memory = None
        groups = [*self.created_groups.values(), *self.pair_groups.values()]
        if self.cpu_group is not None:
            groups.append(self.cpu_group)
        for group in groups:
            dist.destroy_process_group(group)


def segment_of(flat: torch.Tensor, ranks: Sequence[int], rank: int) -> torch.Tensor:
    """A rank's segment of a row that has an equal one for each of the ranks."""
    assert flat.numel() % len(ranks) == 0, f"{flat.numel()} elements for {len(ranks)} ranks"
    return flat.view(len(ranks), -1)[list(ranks).index(rank)]


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that every backend moves."""
    return flat.view(torch.uint8)


def launch_async(call: Callable[[], Any], what: str, kept: Any = None) -> SendHandle:
    """A transfer that was started; the delivery waits for it.

    Args:
        kept: what must live until then; Gloo reads a tensor that it sends whether or not anybody else still has it.
    """
    try:
        work = call()
    except RuntimeError as error:
        raise TransportError(f"{what} did not start: {error}") from error

    def delivery(_kept: Any = kept) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise TransportError(f"{what} did not finish: {error}") from error

    return delivery


def start_send(tensor: torch.Tensor, dst: int, tag: int, group: Any) -> SendHandle:
    """Start a send; the delivery waits for it."""
    return launch_async(lambda: dist.isend(tensor, dst, group=group, tag=tag), f"a send to rank {dst}", tensor)


def start_receive(buffer: torch.Tensor, src: int, tag: int, group: Any) -> RecvHandle:
    """Start a receive; the receipt waits for it and returns the buffer."""
    delivery = launch_async(lambda: dist.irecv(buffer, src, group=group, tag=tag), f"a receive from rank {src}")

    def receipt() -> torch.Tensor:
        delivery()
        return buffer

    return receipt


@dataclass
class InProcessMailboxes:
    """What the ranks of one process share: a mailbox for each sender, receiver and subject."""

    timeout_seconds: float = 60.0
    boxes: dict[tuple[int, int, Hashable], queue.SimpleQueue] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def mailbox(self, src: int, dst: int, subject: Hashable) -> queue.SimpleQueue:
        with self.lock:
            return self.boxes.setdefault((src, dst, subject), queue.SimpleQueue())


class LocalTransport:
    """Ranks that are threads of one process, or a single rank without peers."""

    posts_early = True

    def __init__(self, rank: int, mailboxes: InProcessMailboxes) -> None:
        self.rank, self.mailboxes = rank, mailboxes
        self.num_collectives: Counter[tuple[int, ...]] = Counter()  # collectives of each rank set

    def open_channel(self, incoming: MessageBytes, outgoing: MessageBytes) -> P2PChannel:
        return self

    def next_collective(self, ranks: Sequence[int]) -> Hashable:
        """What tells the messages of the next collective from those of all others."""
        self.num_collectives[tuple(ranks)] += 1
        return tuple(ranks), self.num_collectives[tuple(ranks)]

    def send(self, tensor: torch.Tensor, dst: int, tag: Hashable, channel: int = 0) -> SendHandle:
        self.mailboxes.mailbox(self.rank, dst, tag).put(tensor.clone())
        return lambda: None  # a send is a copy

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: Hashable, channel: int = 0
    ) -> RecvHandle:
        box = self.mailboxes.mailbox(src, self.rank, tag)

        def receipt() -> torch.Tensor:
            try:
                tensor = box.get(timeout=self.mailboxes.timeout_seconds)
            except queue.Empty:
                raise TransportError(
                    f"waiting for rank {src}: nothing came in {self.mailboxes.timeout_seconds} s"
                ) from None
            assert tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype
            return tensor

        return receipt

    def send_flags(self, flags: Sequence[bool], dst: int, tag: int) -> SendHandle:
        return self.send(torch.tensor(flags, dtype=torch.uint8), dst, tag)

    def receive_flags(self, count: int, src: int, tag: int) -> RecvHandle:
        return self.receive([count], torch.uint8, src, tag)

    def start_sum(self, tensor: torch.Tensor, ranks: Sequence[int], root: int | None = None) -> SendHandle:
        subject = self.next_collective(ranks)
        for dst in ranks if root is None else [root]:
            self.send(tensor, dst, subject)
        if root not in (None, self.rank):
            return lambda: None
        receipts = [self.receive(tensor.shape, tensor.dtype, src, subject) for src in ranks]

        def delivery() -> None:
            tensor.copy_(torch.stack([receipt() for receipt in receipts]).sum(0))

        return delivery

    def start_broadcast(self, tensor: torch.Tensor, ranks: Sequence[int], root: int) -> SendHandle:
        subject = self.next_collective(ranks)
        if self.rank == root:
            for dst in ranks:
                self.send(tensor, dst, subject)
        receipt = self.receive(tensor.shape, tensor.dtype, root, subject)

        def delivery() -> None:
            tensor.copy_(receipt())

        return delivery

    def start_reduce_scatter(self, flat: torch.Tensor, ranks: Sequence[int]) -> SendHandle:
        subject = self.next_collective(ranks)
        for dst in ranks:
            self.send(segment_of(flat, ranks, dst), dst, subject)
        own = segment_of(flat, ranks, self.rank)
        receipts = [self.receive(own.shape, own.dtype, src, subject) for src in ranks]

        def delivery() -> None:
            own.copy_(torch.stack([receipt() for receipt in receipts]).sum(0))

        return delivery

    def start_all_gather(self, flat: torch.Tensor, ranks: Sequence[int]) -> SendHandle:
        subject = self.next_collective(ranks)
        own = segment_of(flat, ranks, self.rank)
        for dst in ranks:
            self.send(own, dst, subject)
        receipts = [self.receive(own.shape, own.dtype, src, subject) for src in ranks]

        def delivery() -> None:
            for src, receipt in zip(ranks, receipts, strict=True):
                segment_of(flat, ranks, src).copy_(receipt())

        return delivery

    def start_gather(self, flat: torch.Tensor, ranks: Sequence[int], root: int) -> GatherHandle:
        subject = self.next_collective(ranks)
        self.send(flat, root, subject)
        receipts = [self.receive(flat.shape, flat.dtype, src, subject) for src in ranks] if self.rank == root else []
        return lambda: [receipt() for receipt in receipts]

    def start_scatter(
        self, flat: torch.Tensor, rows: Sequence[torch.Tensor], ranks: Sequence[int], root: int
    ) -> SendHandle:
        subject = self.next_collective(ranks)
        if self.rank == root:
            for dst, row in zip(ranks, rows, strict=True):
                self.send(row, dst, subject)
        receipt = self.receive(flat.shape, flat.dtype, root, subject)

        def delivery() -> None:
            flat.copy_(receipt())

        return delivery

    def symmetric_buffer(self, ranks: Sequence[int]) -> SymmetricBuffer | None:
        return None

    def sum_flags(self, flags: Sequence[bool], ranks: Sequence[int]) -> list[int]:
        counts = torch.tensor(flags, dtype=torch.int32)
        self.start_sum(counts, ranks)()
        return counts.tolist()

    def close(self) -> None:
        """Nothing to release."""

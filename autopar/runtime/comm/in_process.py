"""Transport between ranks that are threads of one process, and of a single rank."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from autopar.runtime.comm.process_group import segment_of
from autopar.runtime.comm.protocols import (
    GatherHandle,
    MessageBytes,
    P2PChannel,
    RecvHandle,
    SendHandle,
    SymmetricBuffer,
    TransportError,
)


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

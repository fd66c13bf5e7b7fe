"""Transport between ranks that are threads of one process, or of a single rank."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

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
    """Mailboxes that the ranks of one process share: one for each sender, receiver and subject."""

    timeout_seconds: float = 60.0
    boxes: dict[tuple[int, int, Hashable], queue.SimpleQueue] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def mailbox(self, src: int, dst: int, subject: Hashable) -> queue.SimpleQueue:
        with self.lock:
            return self.boxes.setdefault((src, dst, subject), queue.SimpleQueue())


class LocalTransport:
    """Transport of ranks that are threads of one process, or of a single rank without peers."""

    posts_early = True
    checkpoint_group = None

    def __init__(self, rank: int, mailboxes: InProcessMailboxes) -> None:
        self.rank, self.mailboxes = rank, mailboxes
        self.num_collectives: Counter[tuple[int, ...]] = Counter()  # so far, by rank set

    def open_channel(self, incoming: MessageBytes, outgoing: MessageBytes, outlives_step: bool) -> P2PChannel:
        return self

    def next_collective(self, ranks: Sequence[int]) -> Hashable:
        """Subject of the next collective's messages, equal on all of its ranks."""
        self.num_collectives[tuple(ranks)] += 1
        return tuple(ranks), self.num_collectives[tuple(ranks)]

    def send(self, tensor: torch.Tensor, dst: int, tag: Hashable, channel: int = 0) -> SendHandle:
        self.mailboxes.mailbox(self.rank, dst, tag).put(tensor.clone())
        return lambda: None  # a send is a copy

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: Hashable, channel: int = 0
    ) -> RecvHandle:
        box = self.mailboxes.mailbox(src, self.rank, tag)

        def handle() -> torch.Tensor:
            try:
                tensor = box.get(timeout=self.mailboxes.timeout_seconds)
            except queue.Empty:
                raise TransportError(
                    f"waiting for rank {src}: nothing came in {self.mailboxes.timeout_seconds} s"
                ) from None
            assert tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype
            return tensor

        return handle

    def send_flags(self, flags: Sequence[bool], dst: int, tag: int) -> SendHandle:
        return self.send(torch.tensor(flags, dtype=torch.uint8, device="cpu"), dst, tag)

    def receive_flags(self, count: int, src: int, tag: int) -> RecvHandle:
        return self.receive([count], torch.uint8, src, tag)

    def start_exchange(
        self, parts: Mapping[int, torch.Tensor], sources: Sequence[int], like: torch.Tensor, ranks: Sequence[int]
    ) -> GatherHandle:
        """Start one collective of some ranks: send each rank its part, and receive one like ``like`` from each source.

        Every collective is one such exchange. Calling the handle waits and returns the parts in the sources' order.
        """
        subject = self.next_collective(ranks)
        for dst, part in parts.items():
            self.send(part, dst, subject)
        receives = [self.receive(like.shape, like.dtype, src, subject) for src in sources]
        return lambda: [receive() for receive in receives]

    def start_sum(self, tensor: torch.Tensor, ranks: Sequence[int], root: int | None = None) -> SendHandle:
        readers = ranks if root is None else [root]
        sources = ranks if self.rank in readers else ()
        return partial(sum_into, tensor, self.start_exchange(dict.fromkeys(readers, tensor), sources, tensor, ranks))

    def start_broadcast(self, tensor: torch.Tensor, ranks: Sequence[int], root: int) -> SendHandle:
        parts = dict.fromkeys(ranks, tensor) if self.rank == root else {}
        return partial(copy_into, [tensor], self.start_exchange(parts, [root], tensor, ranks))

    def start_reduce_scatter(self, flat: torch.Tensor, ranks: Sequence[int]) -> SendHandle:
        segments = {rank: segment_of(flat, ranks, rank) for rank in ranks}
        own = segments[self.rank]
        return partial(sum_into, own, self.start_exchange(segments, ranks, own, ranks))

    def start_all_gather(self, flat: torch.Tensor, ranks: Sequence[int]) -> SendHandle:
        segments = [segment_of(flat, ranks, rank) for rank in ranks]
        own = segment_of(flat, ranks, self.rank)
        return partial(copy_into, segments, self.start_exchange(dict.fromkeys(ranks, own), ranks, own, ranks))

    def start_gather(self, flat: torch.Tensor, ranks: Sequence[int], root: int) -> GatherHandle:
        return self.start_exchange({root: flat}, ranks if self.rank == root else (), flat, ranks)

    def start_scatter(
        self, flat: torch.Tensor, rows: Sequence[torch.Tensor], ranks: Sequence[int], root: int
    ) -> SendHandle:
        parts = dict(zip(ranks, rows, strict=True)) if self.rank == root else {}
        return partial(copy_into, [flat], self.start_exchange(parts, [root], flat, ranks))

    def symmetric_buffer(self, ranks: Sequence[int]) -> SymmetricBuffer | None:
        return None

    def sum_flags(self, flags: Sequence[bool], ranks: Sequence[int]) -> list[int]:
        counts = torch.tensor(flags, dtype=torch.int32, device="cpu")
        self.start_sum(counts, ranks)()
        return counts.tolist()


def sum_into(total: torch.Tensor, parts: GatherHandle) -> None:
    """Wait for parts, and overwrite ``total`` with their sum, if there are any."""
    if summands := parts():
        total.copy_(torch.stack(summands).sum(0))


def copy_into(targets: Sequence[torch.Tensor], parts: GatherHandle) -> None:
    """Wait for parts, and copy each into its target."""
    for target, part in zip(targets, parts(), strict=True):
        target.copy_(part)

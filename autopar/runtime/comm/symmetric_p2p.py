"""Point-to-point over NVLink: a copy engine writes into the peer's symmetric memory, which the peer reads in place.

Each message has a slot and a signal in the receiver's buffer. A slot is free again in the next step, because all ranks
sum their losses in between. Schedules whose messages are read after other steps have buffers of their own.
"""

from __future__ import annotations

import socket
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Not public in torch 2.11 and 2.15, and the only way to memory that peers write and signal without a NCCL kernel.
from torch.distributed import _symmetric_memory as symmetric_memory

from autopar.ir.comm_sizes import MESSAGE_ALIGNMENT, message_bytes
from autopar.runtime.comm.protocols import MessageBytes, RecvHandle, SendHandle

SIGNAL_BYTES = 4
BYTES_IN_USE = Counter[torch.device]()  # of symmetric memory, which torch's allocator does not count


class SymmetricMemory:
    """Buffer that this rank's peers write into; grows when a step needs more. Equal sizes on all ranks."""

    def __init__(self, rank: int, world: int, device: torch.device, cpu_group: Any) -> None:
        """Nothing is allocated yet.

        Args:
            cpu_group: a Gloo group of all ranks.
        """
        self.rank, self.world, self.device, self.cpu_group = rank, world, device, cpu_group
        self.streams: dict[int, torch.cuda.Stream] = {}
        self.buffer: torch.Tensor | None = None
        self.handle: Any = None  # to the buffers of all ranks, and to their signals

    def open(self, incoming: MessageBytes, outgoing: MessageBytes, is_shared: bool = True) -> SymmetricChannel:
        """Channel with room for the messages of one bound schedule; all ranks call.

        Every message has its own slot and signal, so none is overwritten within its step. The next step may overwrite
        it: between two steps all ranks sum their losses, and each rank has read all its messages by then.

        Args:
            is_shared: whether other steps use the same buffer.
        """
        sizes = torch.zeros(self.world + 1, dtype=torch.int64, device="cpu")
        for (src, _), num_bytes in incoming.items():
            sizes[src] += message_bytes(num_bytes)
        sizes[self.world] = max((sum(peer == p for peer, _ in incoming) for p in range(self.world)), default=0)
        rows = [torch.empty_like(sizes) for _ in range(self.world)]
        dist.all_gather(rows, sizes, group=self.cpu_group)
        table = torch.stack(rows)
        num_bytes, num_signals = int(table[:, :-1].sum(1).max()), int(table[:, -1].max())
        if is_shared:
            self.reserve(num_bytes, num_signals)
            assert self.buffer is not None
            buffer, handle = self.buffer, self.handle
        else:
            buffer, handle = self.allocate(num_bytes, num_signals)
        starts = table[:, :-1].cumsum(1) - table[:, :-1]  # [dst, src]
        received = message_slots(incoming, {src: int(starts[self.rank, src]) for src in range(self.world)})
        sent = message_slots(outgoing, {dst: int(starts[dst, self.rank]) for dst in range(self.world)})
        return SymmetricChannel(self, received, sent, buffer, handle)

    def reserve(self, num_bytes: int, num_signals: int) -> None:
        """Have a shared buffer of at least so many bytes, with so many signals from each peer."""
        enough = self.handle is not None and self.handle.signal_pad_size >= num_signals * self.world * SIGNAL_BYTES
        if enough and self.buffer is not None and self.buffer.numel() >= num_bytes:
            return
        self.buffer, self.handle = self.allocate(num_bytes, num_signals)

    def allocate(self, num_bytes: int, num_signals: int) -> tuple[torch.Tensor, Any]:
        """New buffer with so many signals from each peer, and the handle to the buffers of all ranks; all call."""
        pad_bytes = num_signals * self.world * SIGNAL_BYTES
        symmetric_memory.set_signal_pad_size(max(pad_bytes, symmetric_memory.get_signal_pad_size()))
        return allocate(num_bytes, self.device, dist.group.WORLD)

    def stream(self, dst: int) -> torch.cuda.Stream:
        """Side stream for copies to a peer."""
        if dst not in self.streams:
            self.streams[dst] = torch.cuda.Stream(self.device)
        return self.streams[dst]


class SymmetricChannel:
    """Channel of one bound schedule: (byte in the receiver's buffer, signal) of each message, by (peer, tag)."""

    posts_early = False

    def __init__(
        self,
        memory: SymmetricMemory,
        received: Mapping[tuple[int, int], tuple[int, int]],
        sent: Mapping[tuple[int, int], tuple[int, int]],
        buffer: torch.Tensor,
        handle: Any,
    ) -> None:
        self.memory, self.received, self.sent = memory, received, sent
        self.buffer, self.handle = buffer, handle

    def send(self, tensor: torch.Tensor, dst: int, tag: int, channel: int = 0) -> SendHandle:
        offset, signal = self.sent[dst, tag]
        remote = self.handle.get_buffer(dst, tensor.shape, tensor.dtype, offset // tensor.itemsize)
        current, stream = torch.cuda.current_stream(self.memory.device), self.memory.stream(dst)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            remote.copy_(tensor)
            self.handle.put_signal(dst, signal)
            done = stream.record_event()

        def handle(_kept: torch.Tensor = tensor) -> None:
            torch.cuda.current_stream(self.memory.device).wait_event(done)

        return handle

    def receive(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int, channel: int = 0) -> RecvHandle:
        offset, signal = self.received[src, tag]

        def handle() -> torch.Tensor:
            self.handle.wait_signal(src, signal)
            return self.handle.get_buffer(self.memory.rank, tuple(shape), dtype, offset // dtype.itemsize)

        return handle


def allocate(num_bytes: int, device: torch.device, group: Any) -> tuple[torch.Tensor, Any]:
    """Memory of this rank that the group's ranks can reach, [num_bytes] uint8, and the handle to theirs; all call."""
    buffer = symmetric_memory.empty(max(num_bytes, MESSAGE_ALIGNMENT), dtype=torch.uint8, device=device)
    count_until_freed(buffer)
    return buffer, symmetric_memory.rendezvous(buffer, group)


def count_until_freed(buffer: torch.Tensor) -> None:
    """Count a buffer's bytes until its memory is freed."""
    storage = buffer.untyped_storage()
    BYTES_IN_USE[buffer.device] += storage.nbytes()
    weakref.finalize(storage, BYTES_IN_USE.subtract, {buffer.device: storage.nbytes()})


def reserved_bytes(device: torch.device) -> int:
    """Bytes of symmetric memory on a device now; torch's allocator does not count them."""
    return BYTES_IN_USE[device]


def message_slots(messages: MessageBytes, starts: Mapping[int, int]) -> dict[tuple[int, int], tuple[int, int]]:
    """(byte in the receiver's buffer, signal) of each message, in the order of tags; equal on both ends.

    Args:
        starts: byte at which the messages between a peer and this rank begin, by peer.
    """
    slots: dict[tuple[int, int], tuple[int, int]] = {}
    ends, counts = dict(starts), dict.fromkeys(starts, 0)
    for peer, tag in sorted(messages):
        slots[peer, tag] = ends[peer], counts[peer]
        ends[peer] += message_bytes(messages[peer, tag])
        counts[peer] += 1
    return slots


@dataclass(frozen=True)
class PeerAccess:
    """Host and index of a rank's GPU, and the GPUs of this host that it can read and write."""

    host: str
    index: int
    peers: frozenset[int]


def gather_peer_access(device: torch.device, world: int, cpu_group: Any) -> list[PeerAccess]:
    """Peer access of every rank; all ranks call.

    Args:
        cpu_group: a Gloo group of all ranks.
    """
    other_gpus = [i for i in range(torch.cuda.device_count()) if i != device.index]
    peers = frozenset(i for i in other_gpus if torch.cuda.can_device_access_peer(device, i))
    access: list[Any] = [None] * world
    dist.all_gather_object(access, PeerAccess(socket.gethostname(), device.index, peers), group=cpu_group)
    return access


def have_peer_access(group: Sequence[PeerAccess]) -> bool:
    """Whether each of these ranks can write into the memory of all others."""
    indices = {access.index for access in group}
    distinct = len(indices) == len(group)  # indices are equal where each rank sees only its own GPU
    return (
        distinct
        and len({access.host for access in group}) == 1
        and all(indices - {access.index} <= access.peers for access in group)
    )

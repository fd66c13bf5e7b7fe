"""How tensors travel between ranks: threads of one process, Gloo on CPU, NCCL on GPUs."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

Receipt = Callable[[], torch.Tensor]
Delivery = Callable[[], None]


class TransportError(RuntimeError):
    """A peer is gone or silent. Rarely the cause of a failure: another rank failed first."""


class Transport(Protocol):
    """Moves tensors between ranks.

    Sends are asynchronous and in order for each directed pair. ``posts_early`` says whether a receive may be posted
    while other work runs, which is free with Gloo and costs multiprocessors with NCCL.
    """

    rank: int
    posts_early: bool

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Delivery:
        """Start sending a contiguous tensor; calling the delivery waits until it is sent, which keeps it until then."""
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int) -> Receipt:
        """Start receiving; calling the receipt waits and returns the tensor."""
        ...

    def send_flags(self, flags: Sequence[bool], dst: int, tag: int) -> Delivery:
        """Start sending what the host of ``dst`` must know, without waiting for any device."""
        ...

    def receive_flags(self, count: int, src: int, tag: int) -> Receipt:
        """Start receiving flags, as a tensor on the CPU."""
        ...

    def all_reduce(self, tensor: torch.Tensor, ranks: Collection[int]) -> None:
        """Sum a tensor over ``ranks`` in place; every one of them makes the same calls in the same order."""
        ...

    def close(self) -> None:
        """Give up what this transport made; the process group stays."""
        ...


class ProcessGroupTransport:
    """torch.distributed point to point: Gloo with tags, or NCCL with a communicator per directed pair.

    NCCL connects two peers inside their first transfer and blocks the host until both are there, so every pair is
    connected here, in one order on all ranks, before any schedule runs.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        edges: Collection[tuple[int, int]],
        shared: Collection[tuple[int, ...]],
        timeout_seconds: float,
    ) -> None:
        """Connect all pairs.

        Args:
            edges: (src, dst) ranks of every directed pair that will ever exchange tensors; equal on all ranks.
            shared: the rank sets that all-reduce; equal on all ranks.
            timeout_seconds: longest wait for a peer.
        """
        timeout = timedelta(seconds=timeout_seconds)
        self.rank, self.device = rank, device
        self.posts_early = dist.get_backend() == "gloo"
        self.groups: dict[Collection[int], Any] = {
            ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in sorted(shared)
        }
        self.channels: dict[tuple[int, int], Any] = {}
        self.hosts: Any = None  # the group for flags; the default one if that is Gloo
        if dist.get_backend() == "nccl":
            self.hosts = dist.new_group(backend="gloo", timeout=timeout)
            self.channels = {edge: dist.new_group(list(edge), timeout=timeout) for edge in sorted(edges)}
            self.connect()

    def connect(self) -> None:
        """Exchange one number over every channel."""
        token = torch.zeros(1, device=self.device)
        for (src, dst), group in self.channels.items():
            if self.rank == src:
                dist.send(token, dst, group=group)
            elif self.rank == dst:
                dist.recv(token, src, group=group)
        dist.all_reduce(token)
        torch.cuda.synchronize(self.device)

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Delivery:
        return start_send(tensor, dst, tag, self.channels.get((self.rank, dst)))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int) -> Receipt:
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        return start_receive(buffer, src, tag, self.channels.get((src, self.rank)))

    def send_flags(self, flags: Sequence[bool], dst: int, tag: int) -> Delivery:
        return start_send(torch.tensor(flags, dtype=torch.uint8), dst, tag, self.hosts)

    def receive_flags(self, count: int, src: int, tag: int) -> Receipt:
        return start_receive(torch.empty(count, dtype=torch.uint8), src, tag, self.hosts)

    def all_reduce(self, tensor: torch.Tensor, ranks: Collection[int]) -> None:
        try:
            dist.all_reduce(tensor, group=self.groups[tuple(ranks)])
        except RuntimeError as error:
            raise TransportError(f"all-reduce over ranks {list(ranks)}: {error}") from error

    def close(self) -> None:
        for group in (*self.groups.values(), *self.channels.values(), *([self.hosts] if self.hosts else [])):
            dist.destroy_process_group(group)


def start_send(tensor: torch.Tensor, dst: int, tag: int, group: Any) -> Delivery:
    """Start a send; the delivery waits for it. Gloo keeps the tensor until then, whether or not it has arrived."""
    try:
        work = dist.isend(tensor, dst, group=group, tag=tag)
    except RuntimeError as error:
        raise TransportError(f"sending to rank {dst}: {error}") from error

    def delivery(kept: torch.Tensor = tensor) -> None:
        try:
            work.wait()  # type: ignore[union-attr]
        except RuntimeError as error:
            raise TransportError(f"a send to rank {dst} did not finish: {error}") from error

    return delivery


def start_receive(buffer: torch.Tensor, src: int, tag: int, group: Any) -> Receipt:
    """Start a receive; the receipt waits for it and returns the buffer."""
    try:
        work = dist.irecv(buffer, src, group=group, tag=tag)
    except RuntimeError as error:
        raise TransportError(f"receiving from rank {src}: {error}") from error

    def receipt() -> torch.Tensor:
        try:
            work.wait()  # type: ignore[union-attr]
        except RuntimeError as error:
            raise TransportError(f"waiting for rank {src}: {error}") from error
        return buffer

    return receipt


def init_process_group(
    backend: str, rank: int, world: int, device: torch.device, timeout_seconds: float, store: dist.Store
) -> None:
    """Join the default process group; the ranks find each other in ``store``."""
    # Each directed pair has a communicator of its own here, so what NCCL warns about cannot happen.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if backend == "nccl" else None,
    )


@dataclass
class Hub:
    """What the ranks of one process share: mailboxes, and a meeting point for each set of ranks."""

    timeout_seconds: float = 60.0
    boxes: dict[tuple[int, int, int], queue.SimpleQueue] = field(default_factory=dict)
    barriers: dict[tuple[int, ...], threading.Barrier] = field(default_factory=dict)
    sums: dict[tuple[int, ...], dict[int, torch.Tensor]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def box(self, src: int, dst: int, tag: int) -> queue.SimpleQueue:
        with self.lock:
            return self.boxes.setdefault((src, dst, tag), queue.SimpleQueue())

    def meeting(self, ranks: tuple[int, ...]) -> tuple[threading.Barrier, dict[int, torch.Tensor]]:
        with self.lock:
            barrier = self.barriers.setdefault(ranks, threading.Barrier(len(ranks)))
            return barrier, self.sums.setdefault(ranks, {})


class LocalTransport:
    """Ranks that are threads of one process, or a single rank without peers."""

    posts_early = True

    def __init__(self, rank: int, hub: Hub) -> None:
        self.rank, self.hub = rank, hub

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Delivery:
        self.hub.box(self.rank, dst, tag).put(tensor.clone())
        return lambda: None  # a send is a copy

    def receive(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int) -> Receipt:
        box = self.hub.box(src, self.rank, tag)

        def receipt() -> torch.Tensor:
            try:
                tensor = box.get(timeout=self.hub.timeout_seconds)
            except queue.Empty:
                raise TransportError(f"waiting for rank {src}: nothing came in {self.hub.timeout_seconds} s") from None
            assert tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype
            return tensor

        return receipt

    def send_flags(self, flags: Sequence[bool], dst: int, tag: int) -> Delivery:
        return self.send(torch.tensor(flags, dtype=torch.uint8), dst, tag)

    def receive_flags(self, count: int, src: int, tag: int) -> Receipt:
        return self.receive([count], torch.uint8, src, tag)

    def all_reduce(self, tensor: torch.Tensor, ranks: Collection[int]) -> None:
        if len(ranks) == 1:
            return
        barrier, parts = self.hub.meeting(tuple(ranks))
        parts[self.rank] = tensor.clone()
        barrier.wait(self.hub.timeout_seconds)
        total = torch.stack([parts[r] for r in sorted(ranks)]).sum(0)
        barrier.wait(self.hub.timeout_seconds)
        tensor.copy_(total)

    def close(self) -> None:
        """Nothing to release."""

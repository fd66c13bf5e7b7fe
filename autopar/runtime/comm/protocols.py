"""How tensors travel between ranks: the protocols, and the types that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import torch

TransportName = Literal["auto", "nccl", "symmetric"]
MessageBytes = Mapping[tuple[int, int], int]  # (peer, tag) -> bytes
SendHandle = Callable[[], None]
RecvHandle = Callable[[], torch.Tensor]
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


class FlagChannel(Protocol):
    """Moves flags between the hosts of ranks, without waiting for any device."""

    def send_flags(self, flags: Sequence[bool], dst: int, tag: int) -> SendHandle:
        """Start sending flags to the host of ``dst``."""
        ...

    def receive_flags(self, count: int, src: int, tag: int) -> RecvHandle:
        """Start receiving flags; calling the handle waits and returns a CPU tensor [count]."""
        ...

    def sum_flags(self, flags: Sequence[bool], ranks: Sequence[int]) -> list[int]:
        """Number of the ranks on which each flag is set; waits for all of them."""
        ...


class Transport(P2PChannel, FlagChannel, Protocol):
    """Moves tensors between ranks, and what hosts ask each other."""

    rank: int

    def open_channel(self, incoming: MessageBytes, outgoing: MessageBytes) -> P2PChannel:
        """What moves the tensors of one kind of training step, which are these; all ranks call."""
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

    def close(self) -> None:
        """Give up what this transport made; the process group stays."""
        ...


class SymmetricBuffer(Protocol):
    """Memory of each rank of an axis that all of them can read."""

    @property
    def num_bytes(self) -> int:
        """How much there is on each."""
        ...

    def reserve(self, num_bytes: int) -> None:
        """Have at least so much on each; all ranks call with the same size, between steps."""
        ...

    def view(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor at the start of a rank's."""
        ...

    def barrier(self) -> None:
        """What ranks wrote before is there for all, and what they read has been read."""
        ...

"""Protocols of communication between ranks, and the types that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:  # names of transports are checked before torch is imported
    import torch

TransportName = Literal["auto", "nccl", "symmetric"]
CHECKPOINT_SECONDS = 3600.0  # default of the longest wait for a rank in a save or load
MessageBytes = Mapping[tuple[int, int], int]  # (peer, tag) -> bytes
SendHandle = Callable[[], None]  # waits for an asynchronous call
RecvHandle = Callable[[], "torch.Tensor"]  # waits and returns the received tensor
GatherHandle = Callable[[], "list[torch.Tensor]"]  # waits and returns a tensor of each rank


class TransportError(RuntimeError):
    """A peer is gone or silent. Rarely the cause of a failure: usually another rank failed first."""


class P2PChannel(Protocol):
    """Moves the tensors of a schedule from rank to rank.

    Sends are asynchronous, and in order for each directed pair and channel index. ``posts_early`` says whether a
    receive may be posted while other work runs: this is free with Gloo and costs multiprocessors with NCCL.
    """

    posts_early: bool

    def send(self, tensor: torch.Tensor, dst: int, tag: int, channel: int = 0) -> SendHandle:
        """Start sending a contiguous tensor. The handle keeps the tensor alive; calling it waits for the send."""
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int, channel: int = 0) -> RecvHandle:
        """Start receiving; calling the handle waits and returns the tensor."""
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
    """Moves tensors and flags between ranks, and runs collectives over rank sets."""

    rank: int

    @property
    def checkpoint_group(self) -> Any:
        """Gloo group of all ranks for saves and loads, with a longer timeout; None where ranks are no processes."""
        ...

    def open_channel(self, incoming: MessageBytes, outgoing: MessageBytes, outlives_step: bool) -> P2PChannel:
        """Channel for the tensors of one bound schedule, whose sizes are given; all ranks call.

        Args:
            outlives_step: whether received tensors are read after other schedules have run.
        """
        ...

    def start_sum(self, tensor: torch.Tensor, ranks: Sequence[int], root: int | None = None) -> SendHandle:
        """Start an all-reduce of a contiguous tensor over ``ranks`` in place, or a reduce to ``root``.

        A reduce leaves the tensors of the other ranks undefined. All of the ranks start the same collectives in the
        same order; calling the handle waits.
        """
        ...

    def start_broadcast(self, tensor: torch.Tensor, ranks: Sequence[int], root: int) -> SendHandle:
        """Start a broadcast of a contiguous tensor from ``root``, in place."""
        ...

    def start_reduce_scatter(self, flat: torch.Tensor, ranks: Sequence[int]) -> SendHandle:
        """Start a reduce-scatter in place.

        Args:
            flat: contiguous, [ranks * segment]; each rank gets the sum of its segment, the others are undefined then.
        """
        ...

    def start_all_gather(self, flat: torch.Tensor, ranks: Sequence[int]) -> SendHandle:
        """Start an all-gather in place: each rank's segment of ``flat``, [ranks * segment], goes to all ranks."""
        ...

    def start_gather(self, flat: torch.Tensor, ranks: Sequence[int], root: int) -> GatherHandle:
        """Start gathering every rank's contiguous row, all of one size, on ``root``.

        Calling the handle waits and returns the rows in the order of ``ranks``; none on other ranks than ``root``.
        """
        ...

    def start_scatter(
        self, flat: torch.Tensor, rows: Sequence[torch.Tensor], ranks: Sequence[int], root: int
    ) -> SendHandle:
        """Start filling ``flat`` with ``root``'s row for this rank; the inverse of `start_gather`.

        Args:
            rows: one row for each of the ranks, on ``root``; elsewhere unused.
        """
        ...

    def symmetric_buffer(self, ranks: Sequence[int]) -> SymmetricBuffer | None:
        """Symmetric buffer of some ranks, or None where their GPUs lack peer access; all of them call."""
        ...


class SymmetricBuffer(Protocol):
    """Memory of each rank of a group that all its ranks can read and write."""

    @property
    def num_bytes(self) -> int:
        """Bytes on each rank."""
        ...

    def reserve(self, num_bytes: int) -> None:
        """Have at least so many bytes on each rank; all ranks call with the same size, between steps."""
        ...

    def view(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """A tensor in a rank's memory, ``offset`` bytes after its start."""
        ...

    def barrier(self) -> None:
        """Wait until all ranks have finished their earlier writes and reads."""
        ...

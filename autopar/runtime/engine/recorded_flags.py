"""What hosts ask each other during a step, remembered: a step that is captured for replay cannot ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from autopar.runtime.comm.protocols import (
    GatherHandle,
    MessageBytes,
    P2PChannel,
    RecvHandle,
    SendHandle,
    SymmetricBuffer,
    Transport,
)

RecorderMode = Literal["live", "record", "replay"]


class FlagRecorder:
    """A transport in front of another one, to which it passes everything on.

    Flags (which gradients there are) are the only messages that steer a rank's host. They follow from the programs and
    from what ``loss_fn`` reads, so they are the same in every step of a kind. While the mood is "record", answers are
    written down in the order in which they come; while it is "replay" they are read from there and nothing is sent.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.posts_early = transport.rank, transport.posts_early
        self.mode: RecorderMode = "live"
        self.flags: list[list[int]] = []
        self.position = 0

    def record(self) -> None:
        """Write down the answers from here on."""
        self.mode, self.flags = "record", []

    def replay(self, flags: list[list[int]]) -> None:
        """Answer from what was noted."""
        self.mode, self.flags, self.position = "replay", flags, 0

    def stop(self) -> list[list[int]]:
        """Ask again from here on; what was noted."""
        self.mode = "live"
        return self.flags

    def replayed(self) -> torch.Tensor:
        """The next of the noted answers."""
        self.position += 1
        return torch.tensor(self.flags[self.position - 1])

    def recorded(self, flags: torch.Tensor) -> torch.Tensor:
        """An answer that has come, noted if it is to be."""
        if self.mode == "record":
            self.flags.append(flags.tolist())
        return flags

    def send_flags(self, flags: Sequence[bool], dst: int, tag: int) -> SendHandle:
        return (lambda: None) if self.mode == "replay" else self.transport.send_flags(flags, dst, tag)

    def receive_flags(self, count: int, src: int, tag: int) -> RecvHandle:
        if self.mode == "replay":
            return self.replayed
        receipt = self.transport.receive_flags(count, src, tag)
        return lambda: self.recorded(receipt())

    def sum_flags(self, flags: Sequence[bool], ranks: Sequence[int]) -> list[int]:
        if self.mode == "replay":
            return self.replayed().tolist()
        return self.recorded(torch.tensor(self.transport.sum_flags(flags, ranks))).tolist()

    def open_channel(self, incoming: MessageBytes, outgoing: MessageBytes) -> P2PChannel:
        return self.transport.open_channel(incoming, outgoing)

    def send(self, tensor: torch.Tensor, dst: int, tag: int, channel: int = 0) -> SendHandle:
        return self.transport.send(tensor, dst, tag, channel)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int, channel: int = 0) -> RecvHandle:
        return self.transport.receive(shape, dtype, src, tag, channel)

    def start_sum(self, tensor: torch.Tensor, ranks: Sequence[int], root: int | None = None) -> SendHandle:
        return self.transport.start_sum(tensor, ranks, root)

    def start_reduce_scatter(self, flat: torch.Tensor, ranks: Sequence[int]) -> SendHandle:
        return self.transport.start_reduce_scatter(flat, ranks)

    def start_all_gather(self, flat: torch.Tensor, ranks: Sequence[int]) -> SendHandle:
        return self.transport.start_all_gather(flat, ranks)

    def start_broadcast(self, tensor: torch.Tensor, ranks: Sequence[int], root: int) -> SendHandle:
        return self.transport.start_broadcast(tensor, ranks, root)

    def start_gather(self, flat: torch.Tensor, ranks: Sequence[int], root: int) -> GatherHandle:
        return self.transport.start_gather(flat, ranks, root)

    def start_scatter(
        self, flat: torch.Tensor, rows: Sequence[torch.Tensor], ranks: Sequence[int], root: int
    ) -> SendHandle:
        return self.transport.start_scatter(flat, rows, ranks, root)

    def symmetric_buffer(self, ranks: Sequence[int]) -> SymmetricBuffer | None:
        return self.transport.symmetric_buffer(ranks)

    def close(self) -> None:
        self.transport.close()

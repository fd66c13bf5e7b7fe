"""Flags that hosts exchange during a step, recorded so that a captured step need not exchange them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from autopar.runtime.comm.protocols import FlagChannel, RecvHandle, SendHandle

RecorderMode = Literal["live", "record", "replay"]


class FlagRecorder:
    """A flag channel that records and replays the flags of another one.

    Flags (which gradients exist) are the only messages that steer a rank's host. They follow from the programs and
    from what ``loss_fn`` reads, so all steps of one signature exchange equal flags. Mode "record" keeps a copy of the
    received flags in their order. Mode "replay" returns these copies and sends nothing.
    """

    def __init__(self, channel: FlagChannel) -> None:
        self.channel = channel
        self.mode: RecorderMode = "live"
        self.flags: list[list[int]] = []
        self.position = 0

    def record(self) -> None:
        """Record the flags that are received from now on."""
        self.mode, self.flags = "record", []

    def replay(self, flags: list[list[int]]) -> None:
        """Return recorded flags from now on."""
        self.mode, self.flags, self.position = "replay", flags, 0

    def stop(self) -> list[list[int]]:
        """The recorded flags; from now on flags are exchanged live."""
        self.mode = "live"
        return self.flags

    def replayed(self) -> torch.Tensor:
        """The next recorded flags."""
        self.position += 1
        return torch.tensor(self.flags[self.position - 1], device="cpu")

    def recorded(self, flags: torch.Tensor) -> torch.Tensor:
        """Received flags, of which mode "record" keeps a copy."""
        if self.mode == "record":
            self.flags.append(flags.tolist())
        return flags

    def send_flags(self, flags: Sequence[bool], dst: int, tag: int) -> SendHandle:
        return (lambda: None) if self.mode == "replay" else self.channel.send_flags(flags, dst, tag)

    def receive_flags(self, count: int, src: int, tag: int) -> RecvHandle:
        if self.mode == "replay":
            return self.replayed
        receive = self.channel.receive_flags(count, src, tag)
        return lambda: self.recorded(receive())

    def sum_flags(self, flags: Sequence[bool], ranks: Sequence[int]) -> list[int]:
        if self.mode == "replay":
            return self.replayed().tolist()
        return self.recorded(torch.tensor(self.channel.sum_flags(flags, ranks), device="cpu")).tolist()

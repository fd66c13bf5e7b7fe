"""Random numbers of code that shares its process with the user's script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RandomState:
    """Random state of a rank or a probe in the process of the user's script. Neither affects the other's draws.

    Seeds the CPU's generator and that of ``device``, if it is a GPU: `torch.manual_seed` would seed all GPUs.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.devices = [device] if self.on_gpu else []
        with torch.random.fork_rng(self.devices):
            torch.default_generator.manual_seed(seed)
            if self.on_gpu:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            self.states = self.current()

    def current(self) -> list[torch.Tensor]:
        """Random states of the process: the CPU's, then the GPU's."""
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self.devices)]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the process draws from this state; the state continues in the next context."""
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.states[0])
            for state, device in zip(self.states[1:], self.devices):
                torch.cuda.set_rng_state(state, device)
            try:
                yield
            finally:
                self.states = self.current()

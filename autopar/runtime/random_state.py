"""Random generators of a rank, and random numbers of code that shares its process with the user's script."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """Random states of the process: the CPU's, then that of ``device`` if it is a GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_generator_states(states: Sequence[torch.Tensor], device: torch.device) -> None:
    """Continue from `generator_states`."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the CPU's generator and that of ``device``, if it is a GPU: `torch.manual_seed` would seed all GPUs."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def seed_of(*numbers: int) -> int:
    """A seed that differs wherever one of the numbers differs."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7])


class RandomState:
    """Random state of a rank or a probe in the process of the user's script. Neither affects the other's draws."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(self.devices):
            seed_generators(seed, device)
            self.states = generator_states(device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the process draws from this state; the state continues in the next context."""
        with torch.random.fork_rng(self.devices):
            set_generator_states(self.states, self.device)
            try:
                yield
            finally:
                self.states = generator_states(self.device)

"""Memory of each pipeline position by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.plan import Plan

BUFFERS = "buffers"  # inputs and peer-access buffers: on GPUs only


@dataclass(frozen=True)
class PositionMemory:
    """A rank's predicted peak and its parts, byte.

    ``weight_bytes`` includes gradients and optimizer state, ``in_flight_bytes`` are the activations of microbatches in
    flight, ``transient_bytes`` the working set. ``spare_bytes`` is negative if the peak does not fit. Parts are None in
    plans written by hand.
    """

    peak_bytes: int
    capacity_bytes: int
    spare_bytes: int
    weight_bytes: int | None = None
    in_flight_bytes: int | None = None
    transient_bytes: int | None = None
    buffer_bytes: int = 0

    @property
    def share(self) -> float:
        """Peak as a share of the capacity."""
        return self.peak_bytes / self.capacity_bytes if self.capacity_bytes else 0.0

    @property
    def by_name(self) -> Mapping[str, int]:
        """Bytes by printed name; empty if the parts are unknown."""
        if self.weight_bytes is None or self.in_flight_bytes is None or self.transient_bytes is None:
            return {}
        return {
            "weights + state": self.weight_bytes,
            "activations": self.in_flight_bytes,
            "transient": self.transient_bytes,
            BUFFERS: self.buffer_bytes,
        }

    @property
    def largest(self) -> str:
        """Name of the largest part; empty if the parts are unknown."""
        return max(self.by_name, key=self.by_name.__getitem__, default="")


def memory_of(plan: Plan, position: int) -> PositionMemory:
    """Memory of the fullest rank at a position."""
    peak = max(plan.prediction.peak_bytes[rank] for rank in plan.mesh.ranks(position))
    capacity = plan.hardware.memory_bytes
    memories = [s.memory for s in plan.stages[position :: plan.mesh.pp] if s.memory is not None]
    if len(memories) < plan.chunks:
        return PositionMemory(peak, capacity, capacity - peak)
    weights, transient = sum(m.weight_bytes for m in memories), sum(m.transient_bytes for m in memories)
    buffers = sum(m.buffer_bytes for m in memories)
    in_flight = max(0, peak - weights - transient - buffers)
    return PositionMemory(peak, capacity, capacity - peak, weights, in_flight, transient, buffers)

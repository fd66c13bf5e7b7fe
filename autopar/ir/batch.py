"""How a replica's batch is cut into microbatches: as `torch.chunk` cuts."""

from __future__ import annotations


def microbatch_size(batch: int, microbatches: int) -> int:
    """Samples of the largest microbatch; at least 1, of an empty batch too."""
    return max(1, -(-batch // microbatches))


def microbatch_sizes(batch: int, microbatches: int) -> list[int]:
    """Samples of each microbatch: equal but for the last, and maybe fewer than asked for."""
    size = microbatch_size(batch, microbatches)
    return [min(size, batch - start) for start in range(0, batch, size)]

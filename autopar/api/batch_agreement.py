"""Checks that the ranks of a launcher make one call, with batches that belong together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.api.batch import shards_of
from autopar.errors import UsageError
from autopar.ir.mesh import Mesh

SAMPLED_ELEMENTS = 1024  # elements of a sample that `fingerprint` reads, evenly spaced
HASH_FACTOR = 6364136223846793005  # multiplier of Knuth's MMIX generator: spreads any change over all bits


def check_not_refused(refusals: Sequence[str], own: Exception | None, what: str) -> None:
    """Raise if any rank has refused its part of a call.

    Args:
        refusals: message of each rank's error; empty where there is none.
        own: this rank's error.
        what: what was refused, for the message.

    Raises:
        UsageError: another rank has refused; or the own error.
    """
    if own is not None:
        raise own
    rank = next((rank for rank, text in enumerate(refusals) if text), None)
    if rank is not None:
        raise UsageError(f"Rank {rank} refused {what}, so nothing has changed on any rank: {refusals[rank]}")


def check_batch_sizes(batches: Sequence[tuple[int, int]], data_size: int) -> None:
    """Compare the sizes of the ranks' batches.

    Args:
        batches: (data rank, samples) of each rank.

    Raises:
        UsageError: the numbers of samples differ.
    """
    if len({size for _, size in batches}) > 1:
        listed = ", ".join(f"{size} on data rank {number}" for number, size in sorted(set(batches)))
        raise UsageError(
            f"The ranks were given batches of different sizes: {listed}. Each call takes an equal part of the global "
            f"batch on every data rank (pm.data_rank of pm.data_size={data_size}), and the same part on all ranks that "
            "share a data rank."
        )


def check_same_samples(fingerprints: Sequence[int], mesh: Mesh, when: str = "") -> None:
    """Compare the samples of the ranks of each tensor-parallel group, all of which need the same ones.

    Args:
        fingerprints: `fingerprint` of each rank's inputs and targets; 0 where a rank has nothing to compare.
        when: text that names the batch in the message, if it is not the current one.

    Raises:
        UsageError: two ranks of a group have different samples; names them.
    """
    for group in {tuple(shards_of(rank, mesh)) for rank in range(len(fingerprints))}:
        own = [(fingerprints[rank], rank) for rank in group if fingerprints[rank]]
        other = next((rank for value, rank in own if value != own[0][0]), None)
        if other is not None:
            raise UsageError(
                f"Ranks {own[0][1]} and {other} were given different inputs or targets{when}, but share each operation "
                f"(tp={mesh.tp}) and need the same. Each call takes part pm.data_rank of pm.data_size={mesh.dp} of the "
                "global batch: let samplers shard by these two, not by rank and world size."
            )


def fingerprint(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """A whole number, never 0, that differs between batches: a hash of some elements of each tensor.

    Elements come from the first and the last sample. The hash is computed on the tensors' device without waiting for
    it, and is the same on each type of device.

    Args:
        leaves: tensors on one device, [batch, ...] or of any shape with fewer than two dims.

    Returns:
        int64, shape [].
    """
    total = torch.ones((), dtype=torch.int64, device=leaves[0].device)
    for leaf in leaves:
        ends = [leaf[0], leaf[-1]] if leaf.ndim > 1 and len(leaf) else [leaf]
        parts = [end.detach().reshape(-1) for end in ends]
        parts = [part[:: -(-len(part) // SAMPLED_ELEMENTS) or 1].contiguous().view(torch.uint8) for part in parts]
        content = torch.cat(parts).to(torch.int64)
        # Multiplication by an odd factor loses no bits; int64 overflow wraps around on every device.
        factors = torch.arange(len(content), device=leaf.device) * 2 + 1
        total = (total * HASH_FACTOR + (content * factors * factors).sum()) | 1
    return total

"""Sizes of the symmetric memory through which GPUs of one host exchange tensors."""

from __future__ import annotations

MESSAGE_ALIGNMENT = 256  # byte; every message starts at a multiple
# Larger buckets are exchanged in parts. The barriers and the sum of a part wait until matrix products leave the
# multiprocessors. The limit is so high that buckets of 1.3 GB (a model of 7 G parameters) are exchanged whole.
MAX_SYMMETRIC_BUFFER_BYTES = 2**31
SEGMENT_PADDING_BYTES = 64  # byte per rank, since segments are padded to equal length


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least the value."""
    return -(-value // multiple) * multiple


def message_bytes(num_bytes: int) -> int:
    """Bytes of symmetric memory that a point-to-point message takes: its size rounded up to `MESSAGE_ALIGNMENT`."""
    return round_up(num_bytes, MESSAGE_ALIGNMENT)


def replica_buffer_bytes(largest_bytes: int, ranks: int) -> int:
    """Bytes of symmetric memory that each replica reserves for the gradient reduction.

    Args:
        largest_bytes: size of the largest gradient bucket, byte.
        ranks: number of replicas.
    """
    return min(largest_bytes, MAX_SYMMETRIC_BUFFER_BYTES) + ranks * SEGMENT_PADDING_BYTES

"""Sizes of the memory that GPUs of one host write into and read of each other."""

from __future__ import annotations

MESSAGE_ALIGNMENT = 256  # byte, of every message
# Larger buckets pass in pieces. A piece's barriers and sum wait for the matrix products that multiprocessors are at, so
# buckets of 1.3 GB, those of a model of 7 G parameters, pass whole.
MAX_SYMMETRIC_BUFFER_BYTES = 2**31
SEGMENT_PADDING_BYTES = 64  # for each rank: segments are of equal length there


def message_bytes(num_bytes: int) -> int:
    """The bytes that a message takes up."""
    return -(-num_bytes // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT


def replica_buffer_bytes(largest_bytes: int, ranks: int) -> int:
    """What replicas that sum their gradients reserve on each, for a largest bucket."""
    return min(largest_bytes, MAX_SYMMETRIC_BUFFER_BYTES) + ranks * SEGMENT_PADDING_BYTES

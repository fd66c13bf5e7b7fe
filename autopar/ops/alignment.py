"""Alignment of matrices in memory, on which the speed of their products depends."""

from __future__ import annotations

from autopar.ir.graph import DTYPE_BYTES

# NVIDIA's "Matrix Multiplication Background User's Guide": tensor cores need rows that begin at multiples of 16 bytes,
# and reach full speed at multiples of 128.
TENSOR_CORE_BYTES, FULL_SPEED_BYTES = 16, 128


def is_aligned(row_length: int, dtype: str, multiple: int = TENSOR_CORE_BYTES) -> bool:
    """Whether dense rows of so many elements begin at multiples of so many bytes."""
    return row_length * DTYPE_BYTES[dtype] % multiple == 0

"""Layouts of the values that inductor stores between its kernels.

Inductor gives a value the layout of most of what it reads. Of a batch norm's gradient it decides when it meets the
first sum over it. What it reads may have no layout yet then, and counts as contiguous: beside images in channels last
the vote is a tie, which contiguous wins. Each kernel of such a norm's backward reads across rows, and the sum over it
is not split: 1.2 ms for 64 images of 512 channels and 56 by 56 positions, on 64 of an H200's 132 processors (MaxViT).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def likely_layouts() -> Iterator[None]:
    """Within it, a value without a layout counts with the one that it would get, and may still get another."""
    # Not public in torch 2.11 to 2.15. Their import brings in the whole compiler.
    from torch._inductor.ir import ComputedBuffer, FlexibleLayout
    from torch._inductor.virtualized import V

    order_of = ComputedBuffer.get_fill_order
    counted: dict[int, ComputedBuffer] = {}  # by identity; their order is asked for once

    def get_fill_order(self: ComputedBuffer) -> list[int] | None:
        for name in self.get_read_names():
            buffer: Any = V.graph.try_get_buffer(name)
            is_undecided = isinstance(buffer, ComputedBuffer) and isinstance(buffer.layout, FlexibleLayout)
            if is_undecided and id(buffer) not in counted:
                counted[id(buffer)] = buffer
                if (order := buffer.get_fill_order()) is not None:
                    buffer.layout.stride = FlexibleLayout.fill_ordered(buffer.get_size(), order)
        return order_of(self)

    with patch.object(ComputedBuffer, "get_fill_order", get_fill_order):
        yield

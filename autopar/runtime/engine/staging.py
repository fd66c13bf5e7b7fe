"""A step's inputs on their way to the device, while earlier steps still compute there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from autopar.ir.pytree import tree_map
from autopar.runtime.engine.executor import StepData


class Staging:
    """Copies inputs and targets to a GPU on a stream of their own.

    A copy from pageable memory in the stream that computes would have the host wait for all that was launched before,
    and launch nothing meanwhile. All microbatches are copied before the first one runs: for that the device needs room
    for the whole batch, and for the next one's while this one computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def staged(self, data: StepData) -> Iterator[StepData]:
        """The same data on the device: what runs on the current stream from now on finds it there.

        When ``with`` ends nothing reads the sources any more; what was launched inside may still go on.
        """
        if self.stream is None:
            yield data
            return
        consumer = torch.cuda.current_stream(self.device)
        moved: dict[int, torch.Tensor] = {}  # what several microbatches read travels once

        def there(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device == self.device or leaf.is_meta:
                return leaf
            if id(leaf) not in moved:
                moved[id(leaf)] = leaf.to(self.device, non_blocking=True)
                moved[id(leaf)].record_stream(consumer)  # keeps its memory from the next batch until it was read
            return moved[id(leaf)]

        with torch.cuda.stream(self.stream):
            inputs, targets = tree_map(there, (data.inputs, data.targets))
        consumer.wait_stream(self.stream)
        yield replace(data, inputs=inputs, targets=targets)
        if moved:
            self.stream.synchronize()

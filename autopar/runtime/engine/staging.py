"""Staging: a step's inputs are copied to the device on a side stream, while earlier steps still compute there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from autopar.ir.pytree import tree_map
from autopar.runtime.engine.records import StepData


class Staging:
    """Copies inputs and targets to a GPU on a side stream.

    A copy from pageable memory in the compute stream would block the host until all earlier work is done. All
    microbatches are copied before the first one runs. So the device needs memory for the whole batch, and for the next
    batch while this one computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def staged(self, data: StepData) -> Iterator[StepData]:
        """Context with the data on the device, ready for work that is launched on the current stream.

        At its end nothing reads the host's tensors any more; work that was launched inside may still run.
        """
        if self.stream is None:
            yield data
            return
        consumer = torch.cuda.current_stream(self.device)
        moved: dict[int, torch.Tensor] = {}  # a tensor of several microbatches is copied once

        def to_device(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device == self.device or leaf.is_meta:
                return leaf
            if id(leaf) not in moved:
                moved[id(leaf)] = leaf.to(self.device, non_blocking=True)
                moved[id(leaf)].record_stream(consumer)  # its memory is not reused before the consumer has read it
            return moved[id(leaf)]

        with torch.cuda.stream(self.stream):
            inputs, targets = tree_map(to_device, (data.inputs, data.targets))
        consumer.wait_stream(self.stream)
        yield replace(data, inputs=inputs, targets=targets)
        if moved:
            self.stream.synchronize()

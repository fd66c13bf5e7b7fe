"""One worker process that times regions, forward and backward, alone or together with others on the same machine.

Regions run as a rank runs them: with compute copies of weights, and gradients added to the main gradients.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from autopar.codegen.compile import gradient_of
from autopar.codegen.emit import graph_module
from autopar.ir.graph import Value, Weight
from autopar.ir.hardware import ExecutionMode
from autopar.ir.program import Program
from autopar.ir.tensor_axes import TensorAxes
from autopar.measure.regions.cache import RegionTimes
from autopar.measure.regions.timed_regions import RegionTask
from autopar.measure.timer import time_sustained
from autopar.measure.workers import Emit
from autopar.ops.collectives import register, unregister
from autopar.runtime.memory.host_malloc import disable_malloc_trim
from autopar.runtime.params.compute_copies import ComputeParams
from autopar.runtime.params.flat_buckets import flat_buckets
from autopar.runtime.params.grad_buffer import GradBuffer

AXIS = "measured"
WEIGHT_STD = 0.02  # standard deviation of weights, as at initialisation


def run(task: RegionTask, emit: Emit) -> None:
    """Emit the `RegionTimes` of each region, in order; None for a region that does not fit in memory."""
    device = torch.device(task.device_type)
    task.settings.apply()
    if device.type == "cpu":
        torch.set_num_threads(task.threads)
        disable_malloc_trim()  # as ranks do
    for program, axes in task.regions:
        print(f"{len(program.ops)} operations of {program.batch} samples", flush=True)
        try:
            times = time_region(program, axes, task.execution_mode, device)
        except torch.OutOfMemoryError:
            times = None
        emit(times)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def time_region(program: Program, axes: TensorAxes, mode: ExecutionMode, device: torch.device) -> RegionTimes:
    """Times of a region.

    Args:
        axes: tensor axes, whose collectives take no time here.
    Raises:
        torch.OutOfMemoryError: the region does not fit in the device's memory.
    Error: caches may hold other data than in a step, and the rest of the step does not run at the same time.
    Source: Alpa (OSDI 2022, section 5) profiles compiled stages; here each region of a stage is profiled.
    """
    keys = {axis.name: f"{AXIS} {axis.name}" for axis in axes}
    for axis in axes:
        register(keys[axis.name], NullCommunicator(axis.ranks))
    # A CUDA graph cannot be captured on the default stream, and autograd runs a leaf on the stream of its first use.
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    try:
        with stream:
            region = RegionRun(program, mode.compiled, device, keys)
            try:
                forward = time_sustained(region.forward, device, mode.captured)
                both = (
                    time_sustained(region.forward_backward, device, mode.captured) if region.has_backward else forward
                )
            finally:
                region.gradients.close()
    finally:
        for key in keys.values():
            unregister(key)
    backward = max(0.0, both.seconds - forward.seconds)
    return RegionTimes(forward.seconds, backward, max(forward.spread, both.spread))


class RegionRun:
    """A region with random weights, inputs and gradients of its outputs.

    Args:
        compiled: whether it runs through torch.compile.
        keys: of the communicators of its tensor axes.
    """

    def __init__(self, program: Program, compiled: bool, device: torch.device, keys: Mapping[str, str]) -> None:
        weights = {w.name: random_weight(w, device) for w in program.weights}
        trained = {w.name: weights[w.name] for w in program.weights if w.requires_grad}
        assert all(isinstance(p, nn.Parameter) for p in trained.values())
        buckets = flat_buckets([w for w in program.weights if w.requires_grad], {}, 1)
        self.gradients = GradBuffer(trained, buckets)  # type: ignore[arg-type]
        copies = ComputeParams(weights, self.gradients.watch)
        read_params = weights | dict(copies.copies_for(program))
        self.module = graph_module(
            program, read_params, device, keys, copies.wait_for, self.gradients.main_grad_of, compiled=compiled
        )
        values = {v.name: v for v in program.values}
        self.arguments = [random_tensor(values[name], device) for name in program.arguments]
        for name, argument in zip(program.arguments, self.arguments):
            argument.requires_grad_(values[name].requires_grad)
        sent = [(k, e.value) for k, e in enumerate(program.sends) if e.value.requires_grad]
        self.output_grads = [(k, random_tensor(gradient_of(v) if compiled else v, device)) for k, v in sent]
        self.has_backward = bool(sent) and (any(x.requires_grad for x in self.arguments) or bool(trained))

    def forward(self) -> tuple[Tensor, ...]:
        """The outputs for one microbatch; autograd keeps the saved tensors as long as they are referenced."""
        return self.module(*map(Received.apply, self.arguments))

    def forward_backward(self) -> None:
        """Forward and backward of one microbatch, whose gradients are added to the main gradients.

        Small ones are dropped: a rank adds those of all regions in one call after the backward.
        """
        results = self.forward()
        pairs = [(results[k], gradient) for k, gradient in self.output_grads if results[k].requires_grad]
        torch.autograd.backward([result for result, _ in pairs], [gradient for _, gradient in pairs])
        for bucket in self.gradients.flush_large():
            self.gradients.ready[bucket].clear()


class Received(torch.autograd.Function):
    """A value of another region, whose gradient is dropped: autograd would copy it if its layout is not the value's."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # type: ignore[override]
        return None


def random_weight(weight: Weight, device: torch.device) -> Tensor:
    """A weight with plausible values in the dtype in which the rank stores it."""
    value = Value(weight.name, weight.shape, weight.stored_dtype, weight.value.stride)
    if weight.kind == "parameter":
        return nn.Parameter(random_tensor(value, device, WEIGHT_STD), weight.requires_grad)
    tensor = random_tensor(value, device)
    return tensor.abs() + 1 if tensor.is_floating_point() else tensor  # buffers may be variances, which are positive


def random_tensor(value: Value, device: torch.device, scale: float = 1.0) -> Tensor:
    """A tensor of normal numbers; of zeros if integer, which are valid indices of any table; of True if boolean."""
    dtype = getattr(torch, value.dtype)
    stored_shape = [size if stride else 1 for size, stride in zip(value.shape, value.stride)]  # before expand
    tensor = torch.empty_strided(stored_shape, value.stride, dtype=dtype, device=device)
    numbers = dtype.is_floating_point or dtype.is_complex
    return (tensor.normal_(0.0, scale) if numbers else tensor.fill_(dtype is torch.bool)).expand(value.shape)


class NullCommunicator:
    """Rank 0 of several ranks without peers, whose collectives take no time: the cost model prices them.

    An `autopar.ops.collectives.Communicator`; received tensors are uninitialised.
    """

    def __init__(self, ranks: int) -> None:
        self.rank, self.ranks = 0, ranks

    def reserve(self, num_bytes: int) -> None:
        """Do nothing: there is no buffer."""

    def all_reduce(self, tensor: Tensor, overlapped: bool = False) -> None:
        """Leave the tensor as it is."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty((self.ranks, *tensor.shape))

    def reduce_scatter(self, stacked: Tensor, overlapped: bool = False) -> Tensor:
        return stacked.new_empty(stacked.shape[1:])

    def all_to_all(self, stacked: Tensor) -> Tensor:
        return stacked.new_empty(stacked.shape)

    def peer_order(self) -> list[int]:
        return list(range(1, self.ranks))

    def publish(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty((self.ranks, *tensor.shape))

    def unpublish(self) -> None:
        """Do nothing: no peer reads the shard."""

    def push_shard(self, rank: int, stacked: Tensor) -> None:
        """Do nothing: there is no peer."""

    def reduce_pushed(self, stacked: Tensor) -> Tensor:
        return stacked.new_empty(stacked.shape[1:])

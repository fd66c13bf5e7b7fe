"""A piece's forward and backward on a device, run as a rank runs them: weights with copies, gradients added to sums."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from autopar.codegen.emit import graph_module
from autopar.ir.graph import Value, Weight
from autopar.ir.hardware import ExecutionMode
from autopar.ir.layout import TP
from autopar.ir.program import Program
from autopar.measure.regions.cache import Times
from autopar.measure.regions.null_communicator import NullCommunicator
from autopar.measure.regions.steady import timed_steadily
from autopar.ops.collectives import register, unregister
from autopar.runtime.params.compute_copies import ComputeParams
from autopar.runtime.params.flat_buckets import flat_buckets
from autopar.runtime.params.grad_buffer import GradBuffer

AXIS = "measured"
SMALL_WEIGHTS = 0.02  # standard deviation, as models begin with


def times_of(program: Program, ranks: int, way: ExecutionMode, device: torch.device) -> Times:
    """Time a piece.

    Args:
        ranks: of the tensor-parallel axis, whose collectives take no time here.
    Raises:
        torch.OutOfMemoryError: the device has no room for it.
    Error: data that is in a cache in a step may not be here and the other way round; the rest of a step is not running.
    Source: stages profiled as compiled (Alpa, OSDI 2022, section 5), here region by region.
    """
    register(AXIS, NullCommunicator(ranks))
    # A graph cannot be captured on the default stream, and leaves of autograd stay with the stream of their first use.
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    try:
        with stream:
            running = Running(program, way.compiled, device)
            try:
                forward = timed_steadily(running.forward, device, way.captured)
                both = timed_steadily(running.both, device, way.captured) if running.trains else forward
            finally:
                running.gradients.close()
    finally:
        unregister(AXIS)
    backward = max(0.0, both.seconds - forward.seconds)
    return Times(forward.seconds, backward, max(forward.spread, both.spread))


class Running:
    """A piece with weights, inputs and the gradients that come back to it."""

    def __init__(self, program: Program, compiled: bool, device: torch.device) -> None:
        weights = {w.name: filled_weight(w, device) for w in program.weights}
        trained = {w.name: weights[w.name] for w in program.weights if w.requires_grad}
        assert all(isinstance(p, nn.Parameter) for p in trained.values())
        buckets = flat_buckets([w for w in program.weights if w.requires_grad], {}, 1)
        self.gradients = GradBuffer(trained, buckets)  # type: ignore[arg-type]
        copies = ComputeParams(weights, self.gradients.watch)
        held = weights | dict(copies.copies_for(program))
        self.module = graph_module(
            program, held, device, {TP: AXIS}, copies.waits, self.gradients.main_grad_of, compiled=compiled
        )
        values = {v.name: v for v in program.values}
        self.arguments = [filled(values[name], device) for name in program.arguments]
        self.wanted = [values[name].requires_grad for name in program.arguments]
        self.made = [(k, filled(e.value, device)) for k, e in enumerate(program.sends) if e.value.requires_grad]
        self.trains = bool(self.made) and (any(self.wanted) or bool(trained))

    def forward(self) -> tuple[Tensor, ...]:
        """One microbatch's, with what the backward needs kept until the result is given up."""
        given = zip(self.arguments, self.wanted)
        return self.module(*(x.detach().requires_grad_() if wanted else x for x, wanted in given))

    def both(self) -> None:
        """Forward and backward of a microbatch that is not the step's first."""
        results = self.forward()
        came = [(results[k], gradient) for k, gradient in self.made if results[k].requires_grad]
        torch.autograd.backward([result for result, _ in came], [gradient for _, gradient in came])
        self.gradients.flush()


def filled_weight(weight: Weight, device: torch.device) -> Tensor:
    """Values as a trained model may have them, in the dtype in which they are stored."""
    value = Value(weight.name, weight.shape, weight.stored_dtype, weight.value.stride)
    if weight.kind == "parameter":
        return nn.Parameter(filled(value, device, SMALL_WEIGHTS), weight.requires_grad)
    tensor = filled(value, device)
    return tensor.abs() + 1 if tensor.is_floating_point() else tensor  # variances are positive


def filled(value: Value, device: torch.device, scale: float = 1.0) -> Tensor:
    """Normal numbers; zeros of whole ones, which index every table, and True."""
    dtype = getattr(torch, value.dtype)
    own = [size if stride else 1 for size, stride in zip(value.shape, value.stride)]  # before it was expanded
    tensor = torch.empty_strided(own, value.stride, dtype=dtype, device=device)
    numbers = dtype.is_floating_point or dtype.is_complex
    return (tensor.normal_(0.0, scale) if numbers else tensor.fill_(dtype is torch.bool)).expand(value.shape)

"""The program of one stage: its operations, and the tensors that enter and leave it.

Each tensor goes straight from the stage that produces it to every stage that reads it. Skips, fan-out and several
outputs therefore need no special case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import Mode, Op, Value, Weight, refs


@dataclass(frozen=True)
class Edge:
    """A tensor that stage ``src`` sends straight to stage ``dst``; its gradient, if it has one, travels back."""

    value: Value
    src: int
    dst: int


@dataclass(frozen=True)
class Convolution:
    """Arguments of a convolution, per dim."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class DeferredWgrad:
    """A linear layer or convolution whose backward leaves the gradient of its weight for later.

    Args:
        weight: its name.
        grad_slot, x_slot: arguments of the program whose gradients are the gradient of the layer's output and the
            layer's input; of a linear layer [rows, out] and [rows, in].
        accumulates: whether one GEMM adds the gradient to the main gradient, as in compiled programs.
        convolution: of a convolution.
        bias: name of a convolution's bias whose gradient is deferred too, or "".
    """

    weight: str
    grad_slot: Value
    x_slot: Value
    accumulates: bool
    convolution: Convolution | None = None
    bias: str = ""

    @property
    def slots(self) -> tuple[Value, Value]:
        return self.grad_slot, self.x_slot

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights whose gradients are deferred."""
        return (self.weight, self.bias) if self.bias else (self.weight,)


@dataclass(frozen=True)
class Program:
    """The forward pass of one stage for one microbatch shape.

    Its function takes ``arguments`` and returns ``results``, both tuples of tensors.

    Args:
        outputs: the model's flattened outputs (references or constants) on the last stage, empty elsewhere.
        segments: positions of the operations that each begin a checkpoint segment, and the end of the last segment. A
            training step keeps only the inputs of a segment and recomputes it in the backward. Operations outside of
            segments run once; with no positions, all do.
        output_boundaries: positions of operations that lead to other model outputs than the operations before them. A
            loss that leaves an output out gives no gradient, which is not zeros, to weights that lead to no other
            output.
        shapes_differ: whether the ranks of the tensor axis run programs of the same operations but other shapes.
        deferred: layers of a split backward (`autopar.codegen.fusions.split_backward`).
    """

    stage: int
    mode: Mode
    batch: int
    inputs: tuple[Value, ...]
    receives: tuple[Edge, ...]
    weights: tuple[Weight, ...]
    ops: tuple[Op, ...]
    sends: tuple[Edge, ...]
    outputs: tuple[Any, ...] = ()
    out_spec: Any = None
    segments: tuple[int, ...] = ()
    output_boundaries: tuple[int, ...] = ()
    shapes_differ: bool = False
    deferred: tuple[DeferredWgrad, ...] = ()

    def __post_init__(self) -> None:
        assert all(e.dst == self.stage and e.src < self.stage for e in self.receives)
        assert all(e.src == self.stage and e.dst > self.stage for e in self.sends)
        assert list(self.segments) == sorted({*self.segments} & {*range(len(self.ops) + 1)}), "segments out of order"
        assert len(self.segments) != 1, "a segment has no end"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the tensors that the program takes: model inputs, received values, then slots."""
        return tuple(v.name for v in (*self.inputs, *(e.value for e in self.receives), *self.slots))

    @property
    def slots(self) -> tuple[Value, ...]:
        """Slots of layers that leave the gradients of their weights for later."""
        return tuple(slot for layer in self.deferred for slot in layer.slots)

    @property
    def values(self) -> tuple[Value, ...]:
        """Everything except weights that the operations can read."""
        made = (v for op in self.ops for v in op.outputs)
        return (*self.inputs, *(e.value for e in self.receives), *self.slots, *made)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of values and weights by name."""
        return {v.name: v.shape for v in (*self.values, *self.weights)}

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the tensors that the program returns: sent values, then model outputs, each once."""
        return tuple(dict.fromkeys([*(e.value.name for e in self.sends), *refs(self.outputs)]))


def input_names(programs: Iterable[Program]) -> tuple[str, ...]:
    """The model inputs that a rank's programs read, each once."""
    return tuple(dict.fromkeys(value.name for program in programs for value in program.inputs))

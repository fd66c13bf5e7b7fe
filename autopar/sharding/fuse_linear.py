"""Linear layers that can be fused with the collective before or after them (async tensor parallelism).

The fused operators of `autopar.ops.async_tp` overlap the collective with a matrix product that does not need its
result. Pipelined ones need equal parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Op, Ref
from autopar.sharding.reshard import ReshardStep, reshard_step

LINEAR = "aten.linear.default"
FIRST_DIM = (0, 1)  # dim and outer


@dataclass(frozen=True)
class FusableLinear:
    """A linear layer and a collective, one the only reader of the other, and the operator that replaces both."""

    layer: Op
    collective: Op
    operator: str

    @property
    def first(self) -> Op:
        """The operation whose result the other one reads."""
        return self.layer if self.operator == "pipelined_linear_reduce_scatter" else self.collective


def find_fusable(ops: Sequence[Op], kept: Collection[str]) -> Iterator[FusableLinear]:
    """The pairs of linear layer and collective that one operator can replace; each operation is in one pair at most.

    Args:
        kept: values that operations other than ``ops`` read too.
    """
    readers = Counter(name for op in ops for name in op.reads)
    producer = {op.outputs[0].name: op for op in ops if op.outputs}
    fused: set[str] = set()
    for op in ops:
        x, *others = op.args or (None,)
        if not isinstance(x, Ref) or x in others or x.name not in producer or readers[x.name] != 1 or x.name in kept:
            continue
        first = producer[x.name]
        if is_layer(op) and (name := before_layer(reshard_step(first), first.outputs[0].requires_grad)):
            fused.add(op.name)
            yield FusableLinear(op, first, name)
        elif is_layer(first) and first.name not in fused and (name := after_layer(reshard_step(op))):
            yield FusableLinear(first, op, name)


def is_layer(op: Op) -> bool:
    """Whether an operation is a linear layer of real rows; gradients of complex numbers have conjugates."""
    return op.target == LINEAR and len(op.outputs[0].shape) > 1 and "complex" not in op.outputs[0].dtype


def before_layer(step: ReshardStep | None, trained: bool) -> str | None:
    """The operator that replaces a step and the layer that reads its result; None where none does.

    Such a step brings a tensor to all ranks, and each rank has a summand of its gradient.
    """
    if step is None or not trained:
        return None
    if step.name == "sum_gradient":
        return "linear_with_async_grad_allreduce"
    if step.name != "all_gather" or step.args[-1] is not True:  # whether the gradient is partial
        return None
    pipelined = step.args[:2] == FIRST_DIM and not step.ragged
    return "pipelined_all_gather_linear" if pipelined else "all_gather_linear"


def after_layer(step: ReshardStep | None) -> str | None:
    """As `before_layer`, for a step that reads the layer's output."""
    if step is None or step.name != "reduce_scatter" or step.args[:2] != FIRST_DIM or step.ragged:
        return None
    return "pipelined_linear_reduce_scatter"

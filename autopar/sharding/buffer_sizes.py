"""Symmetric memory that the collectives of an axis need, in the buffers that its ranks write and read of each other.

| collective | elements of each buffer, of a whole tensor |
|---|---|
| all-reduce | all, or a segment for each rank: segments are of equal length, so rounded up |
| all-gather | a part |
| reduce-scatter | all |
| all-to-all | a part |

Ragged parts are padded to the largest, so that all ranks reserve alike.

An operator of `autopar.ops.collectives` runs one of them for the tensor and one for its gradient, which has the same
dtype (`autopar.sharding.reshard.COLLECTIVES`); ``pad``, ``first_rank`` and ``share_gradient`` run none. An operator of
`autopar.ops.async_tp` needs no more than the two operations that it replaces:

| operator | forward | backward | replaces |
|---|---|---|---|
| all_gather_linear | all-gather | reduce-scatter | all_gather with a partial gradient |
| linear_with_async_grad_allreduce | | all-reduce | sum_gradient |
| pipelined_all_gather_linear | all ranks' rows | reduce-scatter | all_gather with a partial gradient |
| pipelined_linear_reduce_scatter | all ranks' rows | all ranks' rows, or all-gather | reduce_scatter |

All ranks' rows (``publish``, ``push_shard``) are the whole tensor: more than an all-gather needs, and as much as the
reduce-scatter of the other direction. Both directions therefore count wherever there is a gradient, even in programs
that only evaluate. The runtime reserves the buffers between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

from autopar.ir.comm_sizes import round_up
from autopar.ir.graph import DTYPE_BYTES, Op, Value
from autopar.ir.network import CollectiveKind
from autopar.ir.program import Program
from autopar.ops.collectives import part_size
from autopar.sharding.exchanges import exchanges
from autopar.sharding.reshard import ReshardStep, reshard_step

# Elements of each rank's buffer, from the elements of the whole tensor and the number of ranks.
BUFFER_NUMEL: Mapping[CollectiveKind, Callable[[int, int], int]] = {
    "all-reduce": round_up,
    "all-gather": lambda whole, ranks: whole // ranks,
    "reduce-scatter": lambda whole, ranks: whole,
    "all-to-all": lambda whole, ranks: whole // ranks,
}
PART_RESULTS = ("reduce_scatter", "all_to_all", "shard")


def symmetric_buffer_bytes(op: Op, axis: str, ranks: int) -> Iterator[int]:
    """Buffer bytes of an operation that communicates over an axis: forward, then backward if there is a gradient."""
    step = reshard_step(op)
    if step is not None and axis in step.args:
        yield from collective_buffer_bytes(step, op, ranks)


def exchange_buffer_bytes(op: Op, part: Value, axis: str) -> Iterator[int]:
    """Buffer bytes of the collectives inside of an operation over an axis; arguments as of `exchanges`."""
    for exchange in exchanges(op, part) if axis in op.args else ():
        ranks = op.args[-2]
        yield BUFFER_NUMEL[exchange.kind](exchange.numel, ranks) * exchange.itemsize


def program_exchange_bytes(program: Program, axis: str) -> Iterator[int]:
    """Buffer bytes of the collectives inside of a program's operations over an axis."""
    values = {value.name: value for value in program.values}
    for op in program.ops:
        if op.reads and op.reads[0] in values:
            yield from exchange_buffer_bytes(op, values[op.reads[0]], axis)


def collective_buffer_bytes(step: ReshardStep, op: Op, ranks: int) -> Iterator[int]:
    """Buffer bytes of a reshard step for the tensor, and for its gradient if it has one."""
    (result,) = op.outputs
    whole = prod(result.shape) * (ranks if step.name in PART_RESULTS else 1)
    for word, ragged in op.kwargs:
        outer = step.args[3 if word == "dst_ragged" else 1]
        own, largest = (outer * part_size(ranks, (*ragged[:2], rank)) for rank in (ragged[2], 0))
        is_part = step.name in PART_RESULTS and word != "src_ragged"
        whole = whole // own * largest if is_part else whole // (outer * ragged[0]) * largest * ranks
    for kind in (step.forward, step.backward if result.requires_grad else None):
        if kind is not None:
            yield BUFFER_NUMEL[kind](whole, ranks) * DTYPE_BYTES[result.dtype]

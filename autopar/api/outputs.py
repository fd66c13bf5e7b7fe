"""Outputs of a batch, joined from those of its microbatches.

The graphs of the batch and of its microbatches show how (`autopar.sharding.batch_join`): samples are concatenated in
the dim in which they lie, sums over samples are added, means are weighted by samples, and what does not depend on the
batch is taken once. Anything else is an error, raised before anything runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from autopar.errors import MixedSamplesWarning, UsageError, caller_level
from autopar.ir.graph import Graph, Ref
from autopar.ir.pytree import path_text
from autopar.ir.units import plural
from autopar.sharding.batch_join import Join, joins, may_mix_samples
from autopar.sharding.outputs import Outputs

REMEDY = "Return one row per sample, or plan with microbatches=1 and dp=1."


def single_output(graph: Graph) -> Outputs:
    """The outputs of a batch that runs as one microbatch: those of the microbatch."""
    leaves = (Join("same") if isinstance(output, Ref) else output for output in graph.outputs)
    return Outputs((graph.batch,), tuple(leaves), graph.out_spec)


def join_outputs(whole: Graph, parts: Sequence[Graph]) -> Outputs:
    """How to join the outputs of microbatches.

    Args:
        whole: graph of the batch.
        parts: the graph of each microbatch.

    Raises:
        UsageError: an output for the batch does not follow from those for the microbatches.
    """
    distinct = {part.batch: part for part in parts}.values()
    followed = [(part, joins(whole, part)) for part in distinct]
    for part in distinct:
        if part.out_spec != whole.out_spec:
            raise UsageError(
                f"The outputs of {len(parts)} microbatches of {whole.model} cannot be joined: it returns "
                f"{plural(len(whole.outputs), 'value')} for the batch of {whole.batch} and "
                f"{plural(len(part.outputs), 'value')} for a microbatch of {part.batch}. {REMEDY}"
            )
    leaves = []
    for number, output in enumerate(whole.outputs):
        if not isinstance(output, Ref):
            leaves.append(output)  # what the model returns for the batch, a number from its shape included
            continue
        first = followed[0][1][output.name]
        for part, joined in followed:
            fits = joined[output.name] == first and part.outputs[number] == output
            if not fits or first.kind in ("index", "unknown"):
                raise UsageError(refusal(whole, part, number, joined[output.name], len(parts)))
        leaves.append(first)
    return Outputs(tuple(part.batch for part in parts), tuple(leaves), whole.out_spec)


def warn_of_mixed_samples(part: Graph, batch: int, trace_whole: Callable[[], Graph]) -> None:
    """Warn of outputs that mix the samples of a batch, such as similarities of all pairs or rows less their mean:
    microbatches have other ones.

    The batch is traced only where outputs are not one row per sample, or may mix samples as far as ``part`` shows.

    Args:
        part: training graph of a microbatch.
        batch: samples of a step.
        trace_whole: traces the batch.
    """
    tensors = [part.readable[output.name] for output in part.outputs if isinstance(output, Ref)]
    has_rows = all(v.shape[:1] == (part.batch,) and part.batch not in v.shape[1:] for v in tensors)
    if part.batch == batch or (has_rows and not may_mix_samples(part)):
        return
    try:
        whole = trace_whole()
    except UsageError:  # a model that takes no such batch has no outputs of it, which others could differ from
        return
    joined = joins(whole, part)
    for number, output in enumerate(whole.outputs):
        how = joined[output.name] if isinstance(output, Ref) else None
        if how is not None and how.kind == "unknown":
            through = f" through {how.op}" if how.op else ""
            warnings.warn(
                f"Output {path_text(whole.out_spec, number)} of {whole.model} seems to mix the samples of a batch: "
                f"autopar cannot follow them{through}. A step of {batch} samples computes it, and the loss, for "
                f"microbatches of {part.batch} alone. For the loss of the batch, return one row per sample and compare "
                'the rows in loss_fn under loss_over="batch", or plan with microbatches=1 and dp=1.',
                MixedSamplesWarning,
                stacklevel=caller_level(),
            )


def refusal(whole: Graph, part: Graph, number: int, join: Join, count: int) -> str:
    """The error message for an output that cannot be joined."""

    def text(graph: Graph) -> str:
        output = graph.outputs[number]
        value = graph.readable[output.name] if isinstance(output, Ref) else None
        return f"{value.dtype}{list(value.shape)}" if value else repr(output)

    reason = f", since autopar cannot follow the samples through {join.op}" if join.op else ""
    return (
        f"Output {path_text(whole.out_spec, number)} of {whole.model} is {text(whole)} for the batch of {whole.batch} "
        f"and {text(part)} for a microbatch of {part.batch}. The outputs of {count} microbatches cannot be joined"
        f"{reason}. {REMEDY}"
    )

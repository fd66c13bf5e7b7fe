"""From a model to the graph that is priced, split and run: the trace, and every rewrite of it in order."""

from __future__ import annotations

from torch import nn

from autopar.batching import Call
from autopar.ir import Graph, Mode, Precision
from autopar.precision import in_precision
from autopar.trace import trace


def lowered(model: nn.Module, call: Call, mode: Mode, name: str, precision: Precision | None = None) -> Graph:
    """The graph of a model called with a microbatch in one mode.

    Args:
        precision: to compute in; the model's own if None.

    Raises:
        TraceError: the model cannot be traced.
        UsageError: it cannot compute in this precision.
    """
    return in_precision(trace(model, call.args, call.kwargs, mode, name), precision)

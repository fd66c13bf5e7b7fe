"""Plans made by hand: cuts exactly where a test wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from autopar.batching import as_call
from autopar.ir import HardwareInfo, InputInfo, Mesh, ModelInfo, Plan, Prediction, SolverInfo, Stage
from autopar.trace import trace


def plan_by_hand(model: nn.Module, x: Any, microbatches: int, firsts: Sequence[str], schedule: str = "1f1b") -> Plan:
    """A plan whose stages start at the model's first operation and at each operation of ``firsts``."""
    call = as_call(model, x)
    microbatch = call.first(-(-call.batch // microbatches))
    graph = trace(model, microbatch.args, microbatch.kwargs)
    names = [op.name for op in graph.ops]
    starts = [0, *(names.index(first) for first in firsts), len(names)]
    stages = tuple(
        Stage(names[low], names[high - 1], (i,), 0, 1.0, 2.0, 0, 0)
        for i, (low, high) in enumerate(zip(starts, starts[1:]))
    )
    inputs = tuple(InputInfo(v.name, (call.batch, *v.shape[1:]), v.dtype) for v in graph.inputs)
    return Plan(
        model=ModelInfo(type(model).__name__, graph.fingerprint, graph.num_params, inputs),
        batch=call.batch,
        mesh=Mesh(len(stages)),
        schedule=schedule,  # type: ignore[arg-type]
        microbatches=microbatches,
        stages=stages,
        prediction=Prediction(1.0, 1.0, 0.0, (0,) * len(stages), 1.0),
        solver=SolverInfo("by hand", "by hand", 0.0, 0.0),
        hardware=HardwareInfo("none", "none", "none", 1),
    )


def even_firsts(model: nn.Module, x: Any, stages: int) -> list[str]:
    """Operations that start the second and later stages when each stage gets as many operations."""
    call = as_call(model, x).first(2)
    graph = trace(model, call.args, call.kwargs)
    return [graph.ops[len(graph.ops) * s // stages].name for s in range(1, stages)]

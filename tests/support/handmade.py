"""Plans whose cuts a test gives, run in threads of this process or program by program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopar.api.model import ParallelModel
from autopar.api.options import Options
from autopar.api.program_cache import ProgramCache
from autopar.api.rank_specs import rank_specs
from autopar.codegen.emit import graph_module
from autopar.ir.graph import Graph, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.placement import placement_of
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import (
    HardwareInfo,
    InputInfo,
    ModelInfo,
    Precision,
    Prediction,
    ReduceDtype,
    SolverInfo,
    Stage,
    StageRecompute,
    ZeroStage,
)
from autopar.ir.program import Program
from autopar.runtime.comm.in_process import InProcessMailboxes, LocalTransport
from autopar.runtime.launch.devices import this_machine
from autopar.runtime.rank import Rank
from autopar.runtime.spec import RankSpec, TrainingRecipe
from autopar.trace import lower
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model
from autopar.trace.trace import weight_tensors

NOTHING: Mapping[str, str] = MappingProxyType({})


def plan_by_hand(
    model: nn.Module,
    x: Any,
    microbatches: int,
    firsts: Sequence[str],
    schedule: str = "1f1b",
    dp: int = 1,
    zero: ZeroStage = 0,
    tp: int = 1,
    strategies: Mapping[str, str] = NOTHING,
    shardings: Mapping[str, str] = NOTHING,
    precision: Precision = "fp32",
    chunks: int = 1,
    reduce_dtype: ReduceDtype = "float32",
    dp_shard: int = 0,
    kept: Sequence[str] = (),
    tp_axes: tuple[int, ...] = (),
) -> Plan:
    """Plan whose stages start at the model's first operation and at each operation of ``firsts``.

    Args:
        tp_axes: sizes of several tensor axes, in place of ``tp``.
        kept: blocks that are gathered once a step under ZeRO-3.
    """
    call = as_call(model, x)
    microbatch = call.first(-(-(call.batch // dp) // microbatches))
    graph = lower_model(model, microbatch, "train", "", precision)
    names = [op.name for op in graph.ops]
    starts = [0, *(names.index(first) for first in firsts), len(names)]
    assert (len(starts) - 1) % chunks == 0, f"{len(starts) - 1} stages in {chunks} chunks"
    mesh = Mesh((len(starts) - 1) // chunks, prod(tp_axes) if tp_axes else tp, dp, tp_axes)
    placement = placement_of(schedule, mesh.pp, chunks)
    stages = tuple(
        Stage(names[low], names[high - 1], mesh.ranks(placement.position(i)), 0, 1.0, 2.0, 0, 0)
        for i, (low, high) in enumerate(pairwise(starts))
    )
    inputs = tuple(InputInfo(v.name, (call.batch, *v.shape[1:]), v.dtype) for v in graph.inputs)
    return Plan(
        model=ModelInfo(type(model).__name__, graph.fingerprint, graph.num_params, inputs),
        batch=call.batch,
        mesh=mesh,
        schedule=schedule,  # type: ignore[arg-type]
        microbatches=microbatches,
        stages=stages,
        prediction=Prediction(1.0, 1.0, 0.0, (0,) * mesh.devices, 1.0),
        solver=SolverInfo("by hand", "by hand", 0.0, 0.0),
        hardware=HardwareInfo("none", "none", "none", 1),
        zero=zero,
        dp_shard=dp_shard,
        param_blocks=dict.fromkeys(kept, "kept"),
        strategies=dict(strategies),
        shardings=dict(shardings),
        precision=precision,
        chunks=chunks,
        reduce_dtype=reduce_dtype,
    )


def in_a_v(whole: Plan) -> Plan:
    """The plan under ZB-V, which runs stages on other ranks."""
    place = placement_of("zb-v", whole.mesh.pp, whole.chunks).position
    stages = tuple(replace(stage, ranks=whole.mesh.ranks(place(i))) for i, stage in enumerate(whole.stages))
    return replace(whole, schedule="zb-v", stages=stages)


def with_levels(plan: Plan, levels: Sequence[StageRecompute]) -> Plan:
    """The plan with another recomputation of each stage."""
    stages = zip(plan.stages, levels, strict=True)
    return replace(plan, stages=tuple(replace(stage, recompute=level) for stage, level in stages))


def even_firsts(model: nn.Module, x: Any, stages: int) -> list[str]:
    """First operations of the second and later stages, such that stages have about equal numbers of operations.

    Cuts avoid colocated operations.
    """
    call = as_call(model, x).first(2)
    graph = lower.trace(model, call.args, call.kwargs)
    place = {op.name: i for i, op in enumerate(graph.ops)}
    spans = [(min(place[n] for n in names), max(place[n] for n in names)) for names in graph.colocated]
    free = [i for i in range(1, len(graph.ops)) if not any(low < i <= high for low, high in spans)]
    chosen: list[int] = []
    for s in range(1, stages):
        later = [i for i in free if i > max(chosen, default=0)][: len(free) - (stages - s - 1)]
        chosen.append(min(later, key=lambda i: abs(i - len(graph.ops) * s / stages)))
    return [graph.ops[i].name for i in chosen]


class ThreadRanks:
    """Ranks of a model that are threads of this process."""

    def __init__(
        self,
        specs: Sequence[RankSpec],
        tensors: Mapping[str, torch.Tensor],
        timeout_seconds: float = 30.0,
        axes: Callable[[int], Mapping[str, str]] = lambda rank: NOTHING,
    ) -> None:
        mailboxes = InProcessMailboxes(timeout_seconds)
        copies = [
            {w.name: spec.local_part(w.name, tensors[w.name].detach()).clone() for w in spec.weights} for spec in specs
        ]
        self.ranks = [
            Rank(spec, weights, LocalTransport(spec.rank, mailboxes), axes(spec.rank))
            for spec, weights in zip(specs, copies)
        ]
        self.numbers = range(len(self.ranks))
        self.call_seconds = 0.0
        self.failed: str | None = None

    def call(self, name: str, arguments: Mapping[int, tuple]) -> dict[int, Any]:
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            running = [threads.submit(getattr(rank, name), *arguments[i]) for i, rank in enumerate(self.ranks)]
            return {rank: future.result() for rank, future in enumerate(running)}

    def close(self) -> None:
        """Do nothing: there are no processes."""


def ranks_of(pm: Any) -> list[Rank]:
    """Ranks of a model of `in_threads`."""
    return pm._ranks.ranks


def in_threads(
    model: nn.Module,
    plan: Plan,
    x: Any,
    loss_fn: Any,
    build: Any = graph_module,
    axes: Callable[[int], Mapping[str, str]] = lambda rank: NOTHING,
    **options: Any,
) -> ParallelModel:
    """Model as `autopar.parallelize` returns it for a plan, its ranks being threads.

    Args:
        build: makes a module from a stage's program.
        axes: keys of a rank's communicators by mesh axis.
        options: fields of `TrainingRecipe`.
    """
    programs = ProgramCache(model, plan, as_call(model, x))
    machine = this_machine(plan.mesh.devices, "gloo")
    recipe, settings = TrainingRecipe(loss_fn, **options), Options(compile=False, cuda_graph=False)
    specs = [replace(spec, build=build) for spec in rank_specs(programs, machine, recipe, settings)]
    ranks: Any = ThreadRanks(specs, weight_tensors(model, programs.example), axes=axes)
    return ParallelModel(model, plan, programs, ranks, machine, specs[0])


def run_in_one_process(
    graph: Graph, programs: Sequence[Program], weights: Mapping[str, torch.Tensor], *leaves: Any
) -> list:
    """Flattened outputs of a graph's programs, run one after the other without transport.

    Each tensor that crosses a cut is checked against the trace: shape, dtype, and whether it requires a gradient.
    """
    inputs = {leaf.name: value for leaf, value in zip(graph.leaves, leaves, strict=True) if isinstance(leaf, Ref)}
    sent: dict[tuple[str, int], torch.Tensor] = {}
    results: dict[str, torch.Tensor] = {}
    for program in programs:
        module = graph_module(program, weights, torch.device("cpu"))
        received = [sent[e.value.name, e.dst] for e in program.receives]
        results = dict(zip(program.results, module(*(inputs[v.name] for v in program.inputs), *received), strict=True))
        for edge in program.sends:
            tensor = sent[edge.value.name, edge.dst] = results[edge.value.name]
            assert tuple(tensor.shape) == edge.value.shape and str(tensor.dtype) == f"torch.{edge.value.dtype}"
            if graph.mode == "train":
                assert tensor.requires_grad == edge.value.requires_grad, f"{edge.value.name} requires grad"
    return [results[leaf.name] if isinstance(leaf, Ref) else leaf for leaf in programs[-1].outputs]

"""From a decision to a plan: ranges of operations, rows per stage, predicted step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.cost_graph import CostGraph
from autopar.ir.graph import Op
from autopar.ir.layout import REPLICATED, compressed
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import (
    Alternative,
    HardwareInfo,
    Message,
    Prediction,
    SolverInfo,
    Stage,
    StageMemory,
    StageRecompute,
)
from autopar.solve.cuts.evaluate import rank_costs, stage_costs, stages_holding
from autopar.solve.cuts.problem import CutProblem
from autopar.solve.cuts.step_time import Decision, Setting, messages, order_of, step_time, transfer_seconds
from autopar.solve.result.block_costs import block_costs


@dataclass(frozen=True)
class OpRanges:
    """Stage s runs the operations ``starts[s]`` up to the next start, but for ``exceptions``."""

    starts: tuple[int, ...]
    exceptions: Mapping[str, int]


def make_plan(
    setting: Setting,
    decision: Decision,
    solver: SolverInfo,
    alternatives: tuple[Alternative, ...],
    bound_by: str,
    seconds_without_limit: float | None,
) -> Plan:
    """The plan in which every group runs on its stage."""
    problem, priced, stage_of = decision.problem, decision.priced, decision.stage_of
    ops, costs = setting.graph.as_traced.ops, stage_costs(problem, stage_of)
    found = op_ranges(ops, problem.cost, stage_of)
    step = step_time(setting, problem, stage_of)
    ends = (*found.starts[1:], len(ops))
    sent = messages(problem, stage_of)
    placement = problem.placement
    numel = {w.name: w.numel for w in setting.graph.weights if w.kind == "parameter"}
    storage = {name: str(layout) for name, layout in priced.storage.items() if layout != REPLICATED}
    return Plan(
        model=setting.model,
        batch=setting.constraints.batch,
        mesh=problem.mesh,
        schedule=problem.schedule,
        chunks=problem.chunks,
        order=order_of(setting, problem, stage_of),
        microbatches=problem.microbatches,
        stages=tuple(
            Stage(
                first=ops[found.starts[s]].name,
                last=ops[ends[s] - 1].name,
                ranks=problem.mesh.ranks(placement.position(s)),
                params=sum(numel.get(w.name, 0) for w in problem.cost.weights if s in stages_holding(w, stage_of)),
                forward_seconds=c.forward_seconds,
                backward_seconds=c.backward_seconds,
                send_bytes=sum(n for (src, dst), n in sent.items() if src == s < dst and placement.are_apart(s, dst)),
                peak_bytes=c.memory_bytes,
                recompute=recompute_level(problem, stage_of, s, c.recomputed_below),
                collective_seconds=c.collective_seconds,
                optimizer_seconds=c.optimizer_seconds,
                memory=StageMemory(c.weight_bytes, c.held_bytes, c.transient_bytes, c.buffer_bytes),
                num_segments=len(problem.cost.segments_on(stage_of, s)),
                recompute_seconds=c.recompute_seconds,
                wgrad_seconds=c.wgrad_seconds,
            )
            for s, c in enumerate(costs)
        ),
        prediction=Prediction(
            step_seconds=step.seconds,
            samples_per_second=setting.constraints.batch / step.seconds if step.seconds else 0.0,
            bubble_fraction=step.bubble_fraction,
            peak_bytes=tuple(
                c.memory_bytes for p, c in enumerate(rank_costs(problem, costs)) for _ in problem.mesh.ranks(p)
            ),
            reduce_seconds=step.reduce_seconds,
            optimizer_seconds=step.optimizer_seconds,
            port_seconds=step.port_seconds,
        ),
        solver=solver,
        hardware=HardwareInfo(
            name=setting.hardware.name,
            device=setting.hardware.device,
            link=setting.hardware.link_name,
            memory_bytes=setting.hardware.memory_bytes,
            device_type=setting.hardware.device_type,
        ),
        exceptions=found.exceptions,
        shardings=compressed(storage, [w.name for w in setting.graph.weights]),
        strategies=compressed(priced.strategies, [*(op.name for op in setting.graph.ops), *priced.strategies]),
        zero=problem.replicas.zero,
        dp_shard=problem.replicas.dp_shard,
        param_blocks={
            weight.block: "kept" if weight.block in priced.kept else "gathered"
            for weight in problem.cost.weights
            if weight.block
        },
        blocks=priced.blocks(),
        block_costs=block_costs(setting.graph, decision, costs),
        alternatives=alternatives,
        bound_by=bound_by,
        seconds_without_limit=seconds_without_limit,
        messages=tuple(
            Message(src, dst, num_bytes, transfer_seconds(setting, problem, (src, dst), num_bytes))
            for (src, dst), num_bytes in sorted(sent.items())
        ),
    )


def recompute_level(problem: CutProblem, stage_of: Sequence[int], stage: int, below: int) -> StageRecompute:
    """The recomputation of a stage whose segments with a number below the given one recompute."""
    segments = problem.cost.segments_on(stage_of, stage)
    count = sum(own < below for own in segments)
    return count if 0 < count < len(segments) else "all" if below else "none"


def op_ranges(ops: Sequence[Op], cost: CostGraph, stage_of: Sequence[int]) -> OpRanges:
    """The ranges of operations, one per stage, from which the fewest operations are excepted."""
    home = {op: stage_of[g] for g, group in enumerate(cost.groups) for op in group.ops}
    stages, size = max(stage_of) + 1, len(ops)
    # best[i]: most operations at home among the first i, if the stages so far end there; entered[s][i]: where s starts.
    best: list[float] = [0.0] + [float("-inf")] * size
    entered: list[list[int]] = []
    for s in range(stages):
        reached, starts = [float("-inf")] * (size + 1), [0] * (size + 1)
        running, start = float("-inf"), 0
        for i, op in enumerate(ops):
            if best[i] >= running:
                running, start = best[i], i
            running += home[op.name] == s
            reached[i + 1], starts[i + 1] = running, start
        best = reached
        entered.append(starts)
    bounds = [size]
    for starts in reversed(entered):
        bounds.append(starts[bounds[-1]])
    edges = tuple(reversed(bounds))
    exceptions = {
        op.name: home[op.name] for s in range(stages) for op in ops[edges[s] : edges[s + 1]] if home[op.name] != s
    }
    return OpRanges(edges[:-1], exceptions)

"""From an assignment of groups to a plan: ranges of operations, rows per stage, predicted step, what bounds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.hardware import Hardware
from autopar.ir import (
    Alternative,
    CostGraph,
    Graph,
    HardwareInfo,
    Mesh,
    ModelInfo,
    Plan,
    Prediction,
    ScheduleName,
    SolverInfo,
    Stage,
)
from autopar.ir.units import plural
from autopar.schedule import Timeline, generate, simulate
from autopar.solve.constraints import microbatch_factors
from autopar.solve.evaluate import StageCost, stage_costs
from autopar.solve.problem import CutProblem


@dataclass(frozen=True)
class Setting:
    """What all candidates of one search share."""

    graph: Graph
    hardware: Hardware
    model: ModelInfo
    batch: int
    schedule: ScheduleName


@dataclass(frozen=True)
class OpRanges:
    """Stage s runs the operations ``starts[s]`` up to the next start, but for ``exceptions``."""

    starts: tuple[int, ...]
    exceptions: Mapping[str, int]


def make_plan(
    setting: Setting,
    problem: CutProblem,
    stage_of: Sequence[int],
    solver: SolverInfo,
    alternatives: tuple[Alternative, ...],
    bound_by: str,
) -> Plan:
    """The plan in which every group runs on its stage."""
    ops, costs = setting.graph.ops, stage_costs(problem, stage_of)
    found = op_ranges(setting.graph, problem.cost, stage_of)
    timeline = simulated(setting, problem, stage_of)
    seconds = step_seconds(timeline, costs)
    ends = (*found.starts[1:], len(ops))
    return Plan(
        model=setting.model,
        batch=setting.batch,
        mesh=Mesh(pp=problem.stages),
        schedule=setting.schedule,
        microbatches=problem.microbatches,
        stages=tuple(
            Stage(
                first=ops[found.starts[s]].name,
                last=ops[ends[s] - 1].name,
                ranks=(s,),
                params=sum(w.numel for w in problem.cost.weights if any(stage_of[g] == s for g in w.groups)),
                forward_seconds=c.forward_seconds,
                backward_seconds=c.backward_seconds,
                send_bytes=sum(sent for (src, dst), sent in messages(problem.cost, stage_of).items() if src == s < dst),
                peak_bytes=c.memory_bytes,
            )
            for s, c in enumerate(costs)
        ),
        prediction=Prediction(
            step_seconds=seconds,
            samples_per_second=setting.batch / seconds if seconds else 0.0,
            bubble_fraction=timeline.bubble_fraction,
            peak_bytes=tuple(c.memory_bytes for c in costs),
            error=setting.hardware.error,
        ),
        solver=solver,
        hardware=HardwareInfo(
            setting.hardware.name, setting.hardware.device, setting.hardware.link_name, setting.hardware.memory_bytes
        ),
        exceptions=found.exceptions,
        alternatives=alternatives,
        bound_by=bound_by,
    )


def op_ranges(graph: Graph, cost: CostGraph, stage_of: Sequence[int]) -> OpRanges:
    """The ranges of operations, one per stage, from which the fewest operations are excepted."""
    home = {op: stage_of[g] for g, group in enumerate(cost.groups) for op in group.ops}
    stages, size = max(stage_of) + 1, len(graph.ops)
    # best[i]: most operations at home among the first i, if the stages so far end there; entered[s][i]: where s starts.
    best: list[float] = [0.0] + [float("-inf")] * size
    entered: list[list[int]] = []
    for s in range(stages):
        reached, starts = [float("-inf")] * (size + 1), [0] * (size + 1)
        running, start = float("-inf"), 0
        for i, op in enumerate(graph.ops):
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
        op.name: home[op.name] for s in range(stages) for op in graph.ops[edges[s] : edges[s + 1]] if home[op.name] != s
    }
    return OpRanges(edges[:-1], exceptions)


def messages(cost: CostGraph, stage_of: Sequence[int]) -> Mapping[tuple[int, int], int]:
    """Bytes per microbatch from stage to stage, sent straight: activations forward, their gradients backward."""
    sent: dict[tuple[int, int], int] = {}
    for flow in cost.flows:
        src = stage_of[flow.producer]
        for dst in sorted({stage_of[c] for c in flow.consumers} - {src}):
            sent[src, dst] = sent.get((src, dst), 0) + flow.num_bytes
            if flow.requires_grad:
                sent[dst, src] = sent.get((dst, src), 0) + flow.num_bytes
    return sent


def simulated(setting: Setting, problem: CutProblem, stage_of: Sequence[int]) -> Timeline:
    """The step without the optimizer, simulated with the stages' own times and the batch's own microbatches."""
    costs = stage_costs(problem, stage_of)
    return simulate(
        generate(setting.schedule, problem.stages, problem.microbatches),
        [c.forward_seconds for c in costs],
        [c.backward_seconds for c in costs],
        {
            pair: setting.hardware.transfer_seconds(num_bytes, *pair)
            for pair, num_bytes in messages(problem.cost, stage_of).items()
        },
        microbatch_factors(setting.batch, problem.microbatches),
    )


def step_seconds(timeline: Timeline, costs: Sequence[StageCost]) -> float:
    """Time of a whole step: the pipeline, then the slowest optimizer."""
    return timeline.step_seconds + max(c.optimizer_seconds for c in costs)


def bound_by(problem: CutProblem, stage_of: Sequence[int], timeline: Timeline, free_seconds: float | None) -> str:
    """What keeps the step from being shorter, in one sentence.

    Args:
        free_seconds: the step of the best plan without a memory limit, if it is another one.
    """
    costs = stage_costs(problem, stage_of)
    seconds = [c.seconds for c in costs]
    slowest = max(range(problem.stages), key=seconds.__getitem__)
    own = costs[slowest]
    members = [g for g, s in enumerate(stage_of) if s == slowest and problem.cost.groups[g].ops]
    first, last = (problem.cost.groups[g].module or problem.cost.groups[g].name for g in (members[0], members[-1]))
    where = f"stage {slowest} ({first} … {last})" if first != last else f"stage {slowest} ({first})"
    over = seconds[slowest] / (sum(seconds) / len(seconds)) - 1 if sum(seconds) else 0.0
    bubble = timeline.bubble_fraction
    if own.transfer_seconds > own.forward_seconds + own.backward_seconds:
        what = f"transfers behind {where}, {100 * own.transfer_seconds / own.seconds:.0f} % of its time"
    elif bubble > 0.5:
        microbatches = plural(problem.microbatches, "microbatch", "es")
        what = f"bubble of {problem.stages} stages with {microbatches}; compute of {where}"
    else:
        what = f"compute of {where}"
    if problem.stages > 1:
        what += f", {100 * over:.1f} % over the mean; bubble {100 * bubble:.0f} %"
    if free_seconds is not None:
        full = max(range(problem.stages), key=lambda s: costs[s].memory_bytes)
        what = (
            f"memory of stage {full}, without whose limit the step would take {free_seconds * 1e3:,.1f} ms; then {what}"
        )
    return what

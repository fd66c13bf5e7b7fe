"""The pipeline bubble of a measured step, and its lower bound by simulation."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

from autopar.ir.microbatches import microbatch_sizes
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import SPLIT
from autopar.runtime.engine.records import ActionTiming
from autopar.schedule.generate import generate
from autopar.schedule.simulate import simulate

SpansByRank = Mapping[int, tuple[ActionTiming, ...]]


def bubble_bound_seconds(plan: Plan, spans: SpansByRank) -> float:
    """Seconds of a simulated step with free transfers, and each stage's measured times on its slowest rank."""

    def per_action(rank: int, stage: int, kind: str) -> float:
        actions = (s for s in spans[rank] if s.action.kind == kind and s.action.chunk == stage)
        return mean(s.end_seconds - s.start_seconds for s in actions)

    def per_stage(kind: str) -> list[float]:
        return [max(per_action(rank, number, kind) for rank in stage.ranks) for number, stage in enumerate(plan.stages)]

    if plan.schedule in SPLIT:
        wgrad = per_stage("W")
        backward = [i + w for i, w in zip(per_stage("I"), wgrad, strict=True)]
    else:
        wgrad, backward = None, per_stage("B")
    count = len(microbatch_sizes(plan.batch // plan.mesh.dp, plan.microbatches))
    schedule = generate(plan.schedule, plan.placement, count, plan.order)
    return simulate(schedule, per_stage("F"), backward, wgrad_seconds=wgrad).step_seconds


def bubble_share(spans: SpansByRank, step_seconds: float) -> float:
    """Share of the ranks' time in which no action ran: waiting, exposed transfers, gradient reduction, the update."""
    busy = sum(s.end_seconds - s.start_seconds for rank_spans in spans.values() for s in rank_spans)
    return 1 - busy / (len(spans) * step_seconds)

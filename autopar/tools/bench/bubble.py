"""How much of a step is bubble: from measured actions, and at the least."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

from autopar.ir.microbatches import microbatch_sizes
from autopar.ir.plan import Plan
from autopar.runtime.engine.executor import ActionTiming
from autopar.schedule.generate import generate
from autopar.schedule.simulate import simulate

Spans = Mapping[int, tuple[ActionTiming, ...]]


def bubble_bound_seconds(plan: Plan, spans: Spans) -> float:
    """Simulated step with the measured forward and backward of each stage's slowest rank, and free transfers."""

    def per_action(rank: int, stage: int, kind: str) -> float:
        own = (s for s in spans[rank] if s.action.kind == kind and s.action.chunk == stage)
        return mean(s.end_seconds - s.start_seconds for s in own)

    forward, backward = (
        [max(per_action(rank, number, kind) for rank in stage.ranks) for number, stage in enumerate(plan.stages)]
        for kind in ("F", "B")
    )
    count = len(microbatch_sizes(plan.batch // plan.mesh.dp, plan.microbatches))
    return simulate(generate(plan.schedule, plan.mesh.pp, count, plan.chunks), forward, backward).step_seconds


def bubble_share(spans: Spans, step_seconds: float) -> float:
    """Part of the ranks' time in which no action ran: waiting, transfers that are not hidden, sums and the update."""
    busy = sum(s.end_seconds - s.start_seconds for own in spans.values() for s in own)
    return 1 - busy / (len(spans) * step_seconds)

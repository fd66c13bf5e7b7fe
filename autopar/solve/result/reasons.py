"""Attributes a step's time: what bounds a plan, and why alternatives are slower."""

from __future__ import annotations

from autopar.solve.cuts.evaluate import rank_costs, stage_costs
from autopar.solve.cuts.step_time import Decision, Setting, StepTime, step_time
from autopar.solve.result.step_breakdown import NOTABLE, Slowest, StepBreakdown, bound_text, excess_text, memory_text
from autopar.solve.space.candidates import Candidate, evaluate_cuts, without_limit
from autopar.solve.space.points import point_of


def parts(decision: Decision, step: StepTime, batch: int) -> StepBreakdown:
    """Breakdown of the step on the mean rank; waiting for transfers is part of the bubble."""
    problem = decision.problem
    idle = step.bubble_fraction * step.pipeline_seconds
    microbatches = batch / problem.replicas.dp / problem.cost.batch
    collectives = decision.priced.collective_seconds * microbatches / problem.pp
    again = sum(c.recompute_seconds for c in stage_costs(problem, decision.stage_of)) * microbatches / problem.pp
    return StepBreakdown(
        compute_seconds=step.pipeline_seconds - idle - collectives - again,
        recompute_seconds=again,
        collective_seconds=collectives,
        transfer_seconds=0.0,
        bubble_seconds=idle,
        reduce_seconds=step.reduce_seconds,
        optimizer_seconds=step.optimizer_seconds,
    )


def why_slower(candidate: Candidate, chosen: StepBreakdown, batch: int) -> str:
    """Where a candidate spends its additional time, in a few words."""
    if candidate.step is None:
        return candidate.note
    return excess_text(parts(candidate.decision, candidate.step, batch), chosen)


def bound_by(setting: Setting, decision: Decision, free_seconds: float | None) -> str:
    """Sentence that names what bounds the step, given the result of `seconds_without_limit`."""
    problem, stage_of = decision.problem, decision.stage_of
    step = step_time(setting, problem, stage_of)
    spent = parts(decision, step, setting.constraints.batch)
    costs = stage_costs(problem, stage_of)
    seconds = [c.seconds for c in costs]
    slowest = max(range(problem.stages), key=seconds.__getitem__)
    own = costs[slowest]
    over = seconds[slowest] / (sum(seconds) / len(seconds)) - 1 if sum(seconds) else 0.0
    share = own.transfer_seconds / own.seconds if own.seconds else 0.0
    where = Slowest(stage_text(decision, slowest), over, share)
    waits = step.pipeline_seconds == step.port_seconds > 0
    what = bound_text(spent, where, problem.mesh, problem.stages, problem.microbatches, waits)
    if free_seconds is None:
        return what
    peaks = [c.memory_bytes for c in rank_costs(problem, costs)]
    return memory_text(problem.mesh, problem.chunks, peaks, free_seconds, what)


def stage_text(decision: Decision, stage: int) -> str:
    """A stage by its number and its first and last module."""
    groups = decision.problem.cost.groups
    members = [groups[g] for g, s in enumerate(decision.stage_of) if s == stage and groups[g].ops]
    first, last = (group.module or group.name for group in (members[0], members[-1]))
    return f"stage {stage} ({first} … {last})" if first != last else f"stage {stage} ({first})"


def seconds_without_limit(setting: Setting, decision: Decision) -> float | None:
    """The step of the best contiguous cuts without the memory limit, where that is notably faster."""
    step_seconds = step_time(setting, decision.problem, decision.stage_of).seconds
    free = evaluate_cuts(setting, point_of(decision), decision.priced, without_limit(decision.problem))
    return free.seconds if free.seconds < (1 - NOTABLE) * step_seconds else None

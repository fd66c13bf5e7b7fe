"""Where a step's time goes, and so why a plan is as fast as it is and others are slower."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.units import TIME, percent, plural, text
from autopar.solve.assemble import Decision, Setting, StepTime, step_time
from autopar.solve.candidates import Candidate, judged, point_of, without_limit
from autopar.solve.evaluate import rank_costs, stage_costs

# The least relative gain of lifting the memory limit that makes memory what bounds a plan, and the least share of a
# step that is worth a word.
NOTABLE = 0.01


def parts(decision: Decision, step: StepTime, batch: int) -> Mapping[str, float]:
    """The step in seconds by what a rank does in it: they sum to it."""
    problem = decision.problem
    idle = step.bubble_fraction * step.pipeline_seconds
    microbatches = batch / problem.dp / problem.cost.batch
    collectives = decision.priced.collective_seconds * microbatches / problem.pp
    again = sum(c.recompute_seconds for c in stage_costs(problem, decision.stage_of)) * microbatches / problem.pp
    return {
        "compute": step.pipeline_seconds - idle - collectives - again,
        "recomputation": again,
        "bubble": idle,
        "collectives": collectives,
        "reduction": step.reduce_seconds,
        "optimizer": step.optimizer_seconds,
    }


def why_slower(candidate: Candidate, chosen: Mapping[str, float], batch: int) -> str:
    """What a candidate spends its additional time on, in a few words."""
    if candidate.step is None:
        return candidate.note
    own = parts(candidate.decision, candidate.step, batch)
    excess = {name: own[name] - chosen[name] for name in own}
    ranked = sorted((name for name in excess if excess[name] > 0), key=lambda name: -excess[name])
    said = [name for name in ranked[:2] if excess[name] >= excess[ranked[0]] / 2]
    if candidate.seconds <= sum(chosen.values()) or not said:
        return ""
    words = {
        "compute": f"compute {text(excess['compute'], TIME)} more",
        "recomputation": f"recomputation {text(own['recomputation'], TIME)}",
        "bubble": f"bubble {percent(candidate.step.bubble_fraction, 0)}",
        "collectives": f"collectives {text(own['collectives'], TIME)}",
        "reduction": f"reduction {text(own['reduction'], TIME)} exposed",
        "optimizer": f"optimizer {text(own['optimizer'], TIME)}",
    }
    return ", ".join(words[name] for name in said)


def bound_by(setting: Setting, decision: Decision) -> str:
    """What keeps the step from being shorter, in one sentence."""
    problem, stage_of = decision.problem, decision.stage_of
    step = step_time(setting, problem, stage_of)
    spent = parts(decision, step, setting.constraints.batch)
    costs = stage_costs(problem, stage_of)
    seconds = [c.seconds for c in costs]
    slowest = max(range(problem.stages), key=seconds.__getitem__)
    where, own = stage_text(decision, slowest), costs[slowest]
    over = seconds[slowest] / (sum(seconds) / len(seconds)) - 1 if sum(seconds) else 0.0
    largest = max(spent, key=lambda name: spent[name])
    if own.transfer_seconds > own.forward_seconds + own.backward_seconds:
        what = f"transfers behind {where}, {100 * own.transfer_seconds / own.seconds:.0f} % of its time"
    elif largest == "reduction":
        what = f"reduction of gradients over {problem.dp} replicas; compute of {where}"
    elif largest == "collectives":
        what = f"collectives of {problem.tp} tensor-parallel ranks; compute of {where}"
    elif step.bubble_fraction > 0.5:
        microbatches = plural(problem.microbatches, "microbatch", "es")
        what = f"bubble of {problem.stages} stages with {microbatches}; compute of {where}"
    else:
        what = f"compute of {where}"
    if problem.stages > 1:
        what += f", {100 * over:.1f} % over the mean; bubble {percent(step.bubble_fraction, 0)}"
    for name in ("recomputation", "collectives", "reduction"):
        if spent[name] > NOTABLE * step.seconds:
            what += f"; {name} {percent(spent[name] / step.seconds, 0)} of the step"
    free_seconds = seconds_without_limit(setting, decision, step.seconds)
    if free_seconds is not None:
        ranks = rank_costs(problem, costs)
        full = max(range(problem.pp), key=lambda p: ranks[p].memory_bytes)
        whose = f"rank {problem.mesh.ranks(full)[0]}" if problem.chunks > 1 else f"stage {full}"
        what = f"memory of {whose}, without whose limit the step would take {free_seconds * 1e3:,.1f} ms; then {what}"
    return what


def stage_text(decision: Decision, stage: int) -> str:
    """A stage by its number and its first and last module."""
    groups = decision.problem.cost.groups
    members = [groups[g] for g, s in enumerate(decision.stage_of) if s == stage and groups[g].ops]
    first, last = (group.module or group.name for group in (members[0], members[-1]))
    return f"stage {stage} ({first} … {last})" if first != last else f"stage {stage} ({first})"


def seconds_without_limit(setting: Setting, decision: Decision, step_seconds: float) -> float | None:
    """The step of the best contiguous cuts without the memory limit, where that is notably faster."""
    free = judged(setting, point_of(decision), decision.priced, without_limit(decision.problem))
    return free.seconds if free.seconds < (1 - NOTABLE) * step_seconds else None

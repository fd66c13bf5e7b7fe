"""By how much a plan's predicted step may be off: each part of the step by the errors of the numbers that price it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import hypot

from autopar.api.planning.costs import PlanCosts, Sharded
from autopar.cost.groups.cost_graph import with_weight_sharing
from autopar.cost.hardware.worse import OTHER_PARTS, is_measured, worse
from autopar.cost.ops.op_cost import Pricing, compute_dtype, op_costs, op_kind
from autopar.cost.ops.overlap import with_exposed_collectives
from autopar.ir.hardware import Hardware, StepCalibration
from autopar.ir.plan_parts import COMMUNICATION, Basis, PriceSource, StepPart
from autopar.solve.result.make_plan import Decision, Setting, step_time

# Error of compute whose operations were timed, where the machine's file has no measured steps: of 22 plans in
# docs/benchmarks/h200-x1-calibration.json and cpu-x2-calibration.json 20 were within it.
TIMED_OPS_ERROR = 0.14


def step_parts(setting: Setting, costs: PlanCosts, decision: Decision, source: PriceSource) -> tuple[StepPart, ...]:
    """Parts of a decision's step, with the share of the step by which each may be off.

    Source: the step is priced again with the numbers behind each part worse by their errors, so that what overlaps
        with something longer counts only as far as it is exposed then.
    """
    errors = part_errors(setting, costs, decision)
    return parts_of(errors, costs.hardware, costs.hardware.calibration.get(source), source)


def parts_of(
    errors: Mapping[str, float], hardware: Hardware, calibration: StepCalibration | None, source: PriceSource
) -> tuple[StepPart, ...]:
    """Parts with these errors; measured steps narrow those of compute that they cover, and nothing else.

    Args:
        errors: of `part_errors`.
        calibration: measured steps of the machine.
    """
    parts = [StepPart(name, e, "measured" if is_measured(hardware, name) else "assumed") for name, e in errors.items()]
    communication = [part for part in parts if part.name in COMMUNICATION]
    compute = [part for part in parts if part not in communication]
    if source == "measured":
        error, basis = (TIMED_OPS_ERROR, "measured") if calibration is None else (calibration.error, "steps")
        return *scaled(compute, error, basis), *communication
    covered = [part for part in compute if calibration is not None and part.name in calibration.covers]
    if calibration is None or calibration.error >= total_error(covered):
        return tuple(parts)
    others = [part for part in parts if part not in covered]
    return *scaled(covered, calibration.error, "steps"), *others


def scaled(parts: Sequence[StepPart], error: float, basis: Basis) -> list[StepPart]:
    """Parts with errors in the same proportions that make this one together."""
    total = total_error(parts)
    return [replace(part, error=part.error * error / total, basis=basis) for part in parts]


def total_error(parts: Iterable[StepPart]) -> float:
    """Relative error of a step with these parts, whose errors count as independent of each other."""
    return hypot(*(part.error for part in parts))


def part_errors(setting: Setting, costs: PlanCosts, decision: Decision) -> dict[str, float]:
    """Relative change of a plan's step if the numbers behind a part of it were worse by their errors, by part."""
    problem = decision.problem
    own = costs.timed(dict(decision.priced.strategies), problem.tp)
    before = group_seconds(own, costs.hardware, decision)
    step = step_time(setting, problem, decision.stage_of).seconds
    found: dict[str, float] = {}
    for part in (*kinds_of_ops(own), *OTHER_PARTS):
        hardware = worse(costs.hardware, part)
        after = group_seconds(own, hardware, decision)
        longer = [b / a if a else 1.0 for a, b in zip(before, after, strict=True)]
        groups = tuple(
            replace(g, forward_seconds=g.forward_seconds * n, backward_seconds=g.backward_seconds * n)
            for g, n in zip(problem.cost.groups, longer, strict=True)
        )
        sharing = replace(costs.sharing(problem.tp, problem.dp, decision.zero), storage=decision.priced.storage)
        cost = with_weight_sharing(replace(problem.cost, groups=groups), own.graph, sharing, hardware)
        changed = replace(setting, hardware=hardware)
        seconds = step_time(changed, replace(problem, cost=cost), decision.stage_of).seconds
        if seconds > step:
            found[part] = seconds / step - 1
    return found


def kinds_of_ops(own: Sharded) -> list[str]:
    """Kinds and dtypes of a model's operations that have an efficiency, such as ``matmul bfloat16``."""
    kinds = ((op_kind(op, own.graph, own.facts.ops[op.name].forward_flops), op) for op in own.graph.ops)
    return sorted({f"{kind} {compute_dtype(op, own.graph)}" for kind, op in kinds if kind != "memory"})


def group_seconds(own: Sharded, hardware: Hardware, decision: Decision) -> list[float]:
    """Seconds of each group's operations for one microbatch, by the cost model alone."""
    pricing = Pricing(own.graph, own.facts, hardware, decision.size, decision.problem.tp)
    costs = with_exposed_collectives(pricing, op_costs(pricing))
    seconds = {name: cost.forward_seconds + cost.backward_seconds for name, cost in costs.items()}
    return [sum(seconds[name] for name in group.ops) for group in decision.problem.cost.groups]

"""By how much a plan's predicted step may be off: each part of the step by the errors of the numbers that price it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import hypot

from autopar.api.planning.costs import MeasuredConfig, PlanCosts, Sharded
from autopar.cost.groups.cost_graph import with_weight_sharing
from autopar.cost.hardware.worse import OTHER_PARTS, is_measured, worse
from autopar.cost.ops.op_cost import UNMEASURED, Factors, Pricing, compute_dtype, op_costs, op_kind
from autopar.cost.ops.overlap import with_exposed_collectives
from autopar.ir.hardware import Hardware, StepCalibration
from autopar.ir.plan_parts import COMMUNICATION, TIMED, Basis, PriceSource, StepPart
from autopar.solve.cuts.step_time import Decision, Setting, step_time

# Error of compute whose operations were timed, where the machine's file has no measured steps: of 22 plans in
# docs/benchmarks/h200-x1-calibration.json and cpu-x2-calibration.json 20 were within it.
TIMED_OPS_ERROR = 0.14


def step_parts(setting: Setting, costs: PlanCosts, decision: Decision, source: PriceSource) -> tuple[StepPart, ...]:
    """Parts of a decision's step, with the share of the step by which each may be off.

    Source: the step is priced again with the numbers behind each part worse by their errors, so that what overlaps
        with something longer counts only as far as it is exposed then.
    """
    if source != "mixed":
        errors = part_errors(setting, costs, decision)
        return parts_of(errors, costs.hardware, costs.hardware.calibration.get(source), source)
    errors = part_errors(setting, costs, decision, costs.factors.get(MeasuredConfig.of(decision), {}))
    timed_error = errors.pop(TIMED, 0.0)
    parts = parts_of(errors, costs.hardware, costs.hardware.calibration.get("analytic"), "analytic")
    return (*parts, StepPart(TIMED, timed_error, "measured")) if timed_error else parts


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


def timed_ops_error(hardware: Hardware) -> float:
    """Relative error of compute whose operations were timed."""
    calibration = hardware.calibration.get("measured")
    return TIMED_OPS_ERROR if calibration is None else calibration.error


def narrowing(setting: Setting, costs: PlanCosts, decision: Decision) -> Mapping[str, float]:
    """Share of the error of each part that measured steps leave, for a decision by the cost model alone."""
    errors = part_errors(setting, costs, decision)
    parts = parts_of(errors, costs.hardware, costs.hardware.calibration.get("analytic"), "analytic")
    return {part.name: part.error / errors[part.name] for part in parts}


def part_errors(
    setting: Setting, costs: PlanCosts, decision: Decision, timed: Collection[str] = ()
) -> dict[str, float]:
    """Relative change of a plan's step if the numbers behind a part of it were worse by their errors, by part.

    Args:
        timed: names of operations that were timed. They are a part of their own.
    """
    problem = decision.problem
    config = MeasuredConfig.of(decision)
    own, factors = costs.timed(config), costs.factors_near(config)
    before = op_seconds(own, costs.hardware, config, factors)
    step = step_time(setting, problem, decision.stage_of).seconds
    found: dict[str, float] = {}
    for part in (*kinds_of_ops(own), *OTHER_PARTS, *([TIMED] if timed else [])):
        hardware = costs.hardware if part == TIMED else worse(costs.hardware, part)
        ratio = 1 + timed_ops_error(hardware) if part == TIMED else 1.0
        after = op_seconds(own, hardware, config, factors) | {name: ratio * before[name] for name in timed}
        longer = [sum_ratio(group.ops, before, after) for group in problem.cost.groups]
        groups = tuple(
            replace(
                g,
                forward_seconds=(g.forward_seconds - g.forward_exchange_seconds) * n,
                backward_seconds=(g.backward_seconds - g.backward_exchange_seconds) * n,
                forward_exchange_seconds=0.0,
                backward_exchange_seconds=0.0,
            )
            for g, n in zip(problem.cost.groups, longer, strict=True)
        )
        sharing = costs.sharing(problem.tensor_axes, problem.replicas)
        sharing = replace(sharing, storage=decision.priced.storage, kept=decision.priced.kept)
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


def op_seconds(own: Sharded, hardware: Hardware, config: MeasuredConfig, factors: Factors) -> dict[str, float]:
    """Seconds of each operation for one microbatch, forward and backward."""
    pricing = Pricing(own.graph, own.facts, hardware, config.size, config.axes)
    scaled = {name: cost.scaled_by(factors.get(name, UNMEASURED)) for name, cost in op_costs(pricing).items()}
    costs = with_exposed_collectives(pricing, scaled)
    return {name: cost.forward_seconds + cost.backward_seconds for name, cost in costs.items()}


def sum_ratio(ops: Iterable[str], before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Seconds of a group's operations after a change over those before; 1 where they take none."""
    total = sum(before[name] for name in ops)
    return sum(after[name] for name in ops) / total if total else 1.0

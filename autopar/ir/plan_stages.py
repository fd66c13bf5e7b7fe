"""The stage of every operation of a graph under a plan, with the checks that the plan fits the graph."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Op
from autopar.ir.plan_parts import PlanView


def stage_of_ops(plan: PlanView, graph: Graph) -> Mapping[str, int]:
    """The stage of every operation of the training graph that the plan was made for.

    Raises:
        PlanError: the plan belongs to another model, or its stages do not cover the graph in order.
    """
    check_model(plan, graph)
    traced = graph.as_traced
    bounds = stage_bounds(plan, traced)
    stage_of = {op.name: i for i, (low, high) in enumerate(bounds) for op in traced.ops[low : high + 1]}
    for name, number in plan.exceptions.items():
        if name not in stage_of:
            raise PlanError(f"Plan field exceptions: the model has no operation {name!r}.")
        stage_of[name] = number
    stage_of |= stages_of_copies(stage_of, graph)
    check_order(stage_of, graph)
    return stage_of


def stages_of_copies(stage_of: Mapping[str, int], graph: Graph) -> Mapping[str, int]:
    """Stages of copies for the sake of layouts: where what they read is made, or else where it is read first."""

    def stage(op: Op) -> int:
        if op.name in stage_of:
            return stage_of[op.name]
        if (maker := graph.producer.get(op.reads[0])) is not None:
            return stage(maker)
        readers = (reader for reader in graph.ops if op.outputs[0].name in reader.reads)
        return min(stage_of[reader.name] for reader in readers if reader.name in stage_of)

    return {op.name: stage(op) for op in graph.ops if op.is_layout_copy}


def check_model(plan: PlanView, graph: Graph) -> None:
    """Raise a PlanError where the plan is for another model than the graph's."""
    if plan.model.fingerprint != graph.fingerprint:
        raise PlanError(
            f"The plan is for another model: field model.fingerprint is {plan.model.fingerprint} "
            f"({plan.model.name}, {plan.model.num_params:,} parameters), this model has {graph.num_params:,} "
            f"parameters and fingerprint {graph.fingerprint}. Plan again for this model."
        )


def stage_bounds(plan: PlanView, graph: Graph) -> list[tuple[int, int]]:
    """Positions of each stage's first and last operation.

    Raises:
        PlanError: a stage names an unknown operation, or the stages do not cover the graph one after the other.
    """
    position = {op.name: i for i, op in enumerate(graph.ops)}
    for i, stage in enumerate(plan.stages):
        for name, op in (("first", stage.first), ("last", stage.last)):
            if op not in position:
                raise PlanError(f"Plan field stages.{i}.{name}: the model has no operation {op!r}.")
    bounds = [(position[s.first], position[s.last]) for s in plan.stages]
    if bounds[0][0] != 0 or bounds[-1][1] != len(graph.ops) - 1:
        raise PlanError(
            "Plan field stages: the first stage must start at the model's first operation "
            f"({graph.ops[0].name}) and the last end at its last ({graph.ops[-1].name})."
        )
    for i, (low, high) in enumerate(bounds):
        if low > high:
            raise PlanError(f"Plan field stages.{i}: first ({plan.stages[i].first}) comes after last.")
    for i, ((_, end), (start, _)) in enumerate(pairwise(bounds)):
        if start != end + 1:
            raise PlanError(
                f"Plan field stages.{i + 1}.first: {plan.stages[i + 1].first} does not follow "
                f"stages.{i}.last ({plan.stages[i].last}); the next operation is {graph.ops[end + 1].name}."
                if end + 1 < len(graph.ops)
                else f"Plan field stages.{i}.last: nothing is left for stage {i + 1}."
            )
    return bounds


def check_order(stage_of: Mapping[str, int], graph: Graph) -> None:
    """Raise a PlanError where an operation reads from a later stage, or colocated operations are apart."""
    for op in graph.ops:
        for read in op.reads:
            source = graph.producer.get(read)
            if source is not None and stage_of[source.name] > stage_of[op.name]:
                raise PlanError(
                    f"Plan fields stages and exceptions: {op.name} on stage {stage_of[op.name]} reads {read}, "
                    f"which stage {stage_of[source.name]} makes later."
                )
    for names in graph.colocated:
        if len({stage_of[n] for n in names}) > 1:
            raise PlanError(f"Plan field stages: {', '.join(names[:4])} update the same state and need one stage.")

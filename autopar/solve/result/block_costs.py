"""Times and parameters of the model's blocks on their stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.blocks import picture_blocks
from autopar.ir.cost_graph import Group
from autopar.ir.graph import Graph
from autopar.ir.plan_parts import BlockCost
from autopar.solve.cuts.evaluate import StageCost, stages_holding
from autopar.solve.cuts.step_time import Decision


def block_costs(graph: Graph, decision: Decision, costs: Sequence[StageCost]) -> tuple[BlockCost, ...]:
    """The blocks of every stage, in execution order. On each stage they sum up to the stage.

    Args:
        costs: of the stages.
    """
    problem, stage_of, cost = decision.problem, decision.stage_of, decision.problem.cost.once
    names = dict(zip((op.name for op in graph.ops), picture_blocks(graph), strict=True))
    places = [(s, block_of(group, names)) for s, group in zip(stage_of, cost.groups, strict=True)]
    graphs = [cost.recomputed_up_to(c.recomputed_below) if c.recomputed_below else cost for c in costs]
    numel = {weight.name: weight.numel for weight in graph.weights if weight.kind == "parameter"}
    params = dict.fromkeys(places, 0)
    for weight in cost.weights:
        for stage in stages_holding(weight, stage_of):
            params[next(places[g] for g in weight.groups if stage_of[g] == stage)] += numel.get(weight.name, 0)
    found = []
    for stage, name in sorted(params, key=lambda place: place[0]):  # on a stage, blocks stay in execution order
        groups = [graphs[stage].groups[g] for g, place in enumerate(places) if place == (stage, name)]
        forward, backward = sum(g.forward_seconds for g in groups), sum(map(problem.backward_seconds, groups))
        if forward or backward or params[stage, name]:
            found.append(BlockCost(name, stage, params[stage, name], forward, backward))
    return tuple(found)


def block_of(group: Group, names: Mapping[str, str]) -> str:
    """Block of a group's first operation that the model has; the group's own name if it has only others.

    Args:
        names: block of each operation of the model. Of tensor-parallel ranks, groups have inserted operations too.
    """
    return next((names[op] for op in (group.name, *group.ops) if op in names), group.name)

"""Segments of the programs that ranks run: those that the planner counts."""

from __future__ import annotations

import pytest
import timm
import torch
from support.handmade import even_firsts, plan_by_hand, with_levels
from support.models import tiny_vit

from autopar.api.planning.costs import PlanCosts
from autopar.api.recompute import with_recompute_segments
from autopar.codegen.split import split
from autopar.cost.hardware.load import load_hardware
from autopar.ir.layout import TP
from autopar.ir.plan_parts import Replicas
from autopar.ir.tensor_axes import mesh_axes
from autopar.sharding.shard_graph import shard_graph
from autopar.trace.trace import trace


@pytest.mark.full
@pytest.mark.parametrize("name", ["resnet50", "swin_tiny_patch4_window7_224"])
def test_sharded_stages_have_the_segments_that_were_planned(name: str) -> None:
    """At some of these cuts a tensor is gathered on both stages, and other segments would be better."""
    small = tiny_vit()
    plan = with_levels(plan_by_hand(small, x := torch.randn(2, 3, 32, 32), 1, even_firsts(small, x, 2)), ["all", "all"])
    with torch.device("meta"):
        model, images = timm.create_model(name), torch.empty(8, 3, 224, 224)
    graph = trace(model, (images,))
    costs = PlanCosts(graph, load_hardware("h200-nvlink"))
    priced = costs.priced(mesh_axes((2,)), Replicas(), 8, 2, 0)
    assert priced is not None and priced.strategies
    whole = costs.sharded(mesh_axes((2,)), 8, priced.strategy_index).graph
    for cut in range(3, priced.cost.loss, 14):
        stage_of = [int(g >= cut) for g in range(len(priced.cost.groups))]
        groups = costs.unsharded_costs(8).groups
        by_name = {op: stage_of[g] for g, group in enumerate(groups) for op in group.ops}
        local = shard_graph(graph, priced.strategies, priced.storage, {TP: 2}, by_name)
        programs = with_recompute_segments(split(local, by_name, 2), local, whole, plan, planned=True)
        counts = [len(priced.cost.segments_on(stage_of, stage)) for stage in range(2)]
        assert [len(program.segments) - 1 for program in programs] == counts, cut

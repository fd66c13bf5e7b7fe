"""Plans on several tensor axes: the outer axis' sharding against all of them, prices of links, and what is printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import autopar
from autopar.api.planning.costs import PlanCosts, Sharded, apply_strategies
from autopar.cost.hardware.load import load_hardware
from autopar.cost.ops.op_cost import Pricing, op_costs
from autopar.ir.hardware import Hardware
from autopar.ir.tensor_axes import TensorAxes, mesh_axes
from autopar.solve.shardings.solve import solve_shardings
from autopar.trace.trace import trace

IMAGES = torch.randn(64, 3, 64, 64)
AXES = mesh_axes((2, 2))
H200 = load_hardware("h200-nvlink")
MACHINES = {
    "one node": H200,
    "the outer axis between nodes": replace(load_hardware("a100-nvlink"), devices_per_node=2),
    "slow links": load_hardware("rtx4090-pcie"),
}
SHAPES = {"square": (2048, 1024, 1024), "wide": (1024, 512, 4096), "few rows": (32, 4096, 4096)}


class Layers(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def vit() -> VisionTransformer:
    return VisionTransformer(img_size=64, patch_size=4, num_classes=8, embed_dim=1024, depth=2, num_heads=8)


def costs_of(machine: Hardware, rows: int, width: int, hidden: int) -> PlanCosts:
    return PlanCosts(trace(Layers(width, hidden), (torch.randn(rows, width),), mode="train"), machine)


def every_outer(costs: PlanCosts, axes: TensorAxes, size: int) -> Iterator[Sharded]:
    """The model under every combination of strategies of its groups on the outer axis."""
    groups = costs.strategy_graph(axes[:-1], size).groups
    for picks in product(*(range(len(group.strategies)) for group in groups)):
        yield costs.sharded(axes[:-1], size, picks)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_sharding_of_the_outer_axis_is_better(shape: str, machine: str) -> None:
    rows, width, hidden = SHAPES[shape]
    costs = costs_of(MACHINES[machine], rows, width, hidden)

    def seconds(outside: Sharded) -> float:
        return solve_shardings(costs.strategies_inside(AXES, rows, outside), 1).objective_seconds

    found, best = seconds(costs.outer(AXES, rows)), min(map(seconds, every_outer(costs, AXES, rows)))
    assert found == pytest.approx(best, rel=1e-9)


def test_a_plan_on_two_axes_says_what_each_splits(tmp_path: Path) -> None:
    plan = autopar.plan(
        vit(), 4, torch.randn(64, 3, 64, 64), tp=(2, 2), hardware="h200-nvlink", cost="analytic", microbatches=1
    )
    assert plan.mesh.tp_axes == (2, 2) and plan.solver.method == "cuts"
    text = " ".join(str(plan).split())
    assert "mesh pp 1 × tp (2 × 2) × dp 1" in text and "over axes tp0 of 2, tp1 of 2" in text
    assert "attn.qkv tp0 rows by head / 2, tp1 rows by head / 2" in text and "over tp0" in text and "over tp1" in text
    assert plan.strategies["blocks.*.attn.qkv.linear"] == "tp0:nx3 tp1:nx3"
    assert plan.shardings["blocks.*.attn.qkv.weight"] == "tp0:0x3 tp1:0x3"
    assert any(name.endswith((".all_reduce", ".reduce_scatter")) for name in plan.strategies)
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan


def test_a_number_leaves_the_axes_open() -> None:
    plan = autopar.plan(
        vit(), 4, torch.randn(64, 3, 64, 64), tp=4, hardware="h200-nvlink", cost="analytic", microbatches=1
    )
    labels = {str(plan.mesh), *(own.label for own in plan.alternatives)}
    assert any("tp (2 × 2)" in label for label in labels) and any("tp 4" in label for label in labels)


def test_the_outer_axis_is_priced_on_its_link() -> None:
    """Ranks of the inner axis are neighbours: only what the outer axis moves crosses nodes."""
    graph = trace(Layers(1024, 4096), (torch.randn(64, 1024),), mode="train")
    apart = MACHINES["the outer axis between nodes"]
    seconds: dict[str, float] = {}
    for axis in ("tp0", "tp1"):
        labels = {"fc1.linear": f"{axis}:n", "fc2.linear": f"{axis}:k"}
        own = apply_strategies(graph, labels, AXES, apart)
        costs = op_costs(Pricing(own.graph, own.facts, apart, 64, AXES))
        seconds[axis] = costs["fc2.linear.all_reduce"].forward_seconds
    num_bytes = 64 * 1024 * 4
    assert seconds == {
        "tp0": apart.collective_seconds("all-reduce", num_bytes, 2, 2),
        "tp1": apart.collective_seconds("all-reduce", num_bytes, 2, 1),
    }
    assert seconds["tp0"] > 1.5 * seconds["tp1"]

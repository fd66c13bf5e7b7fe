"""The height of one picture as a choice: the program against every sharding of a small network of convolutions."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from support.graphs import MACHINE
from support.priced import price
from torch import nn

from autopar.cost.groups.weight_memory import Sharing
from autopar.cost.ops.op_cost import Pricing
from autopar.cost.ops.op_stats import graph_stats
from autopar.cost.strategies.describe import AxisSharding, block_shardings
from autopar.cost.strategies.enumerate import strategy_graph
from autopar.ir.graph import Graph
from autopar.ir.hardware import Link
from autopar.ir.strategies import StrategyGraph
from autopar.ir.tensor_axes import mesh_axes
from autopar.sharding.shard_graph import shard_graph, storage
from autopar.solve.shardings.cost import sharding_cost
from autopar.solve.shardings.solve import solve_shardings
from autopar.solve.shardings.variables import agrees
from autopar.trace.trace import trace

RANKS = 2
FAST = replace(MACHINE, peak_flops={"float32": 1e9}, memory_bytes_per_second=1e12, collective=Link(1e-6, 1e9))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.down, self.head = nn.Conv2d(8, 16, 3, 2, padding=1), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.norm(self.enter(x)))).mean((2, 3)))


@cache
def traced() -> Graph:
    with torch.device("meta"):
        return trace(Network(), (torch.empty(1, 3, 64, 48),), {}, mode="train", name="network")


@cache
def choices() -> StrategyGraph:
    return strategy_graph(Pricing(traced(), graph_stats(traced()), FAST, 1, mesh_axes((RANKS,))))


def chosen_names(picks: tuple[int, ...]) -> dict[str, str]:
    return {group.name: group.strategies[k].name for group, k in zip(choices().groups, picks)}


@pytest.mark.parametrize("memory_price", [0.0, 1e-9])
def test_the_program_finds_the_best_of_all_shardings(memory_price: float) -> None:
    def value(picks: tuple[int, ...]) -> float:
        cost = sharding_cost(choices(), picks, 1)
        return cost.seconds + cost.step_seconds + memory_price * cost.memory_bytes

    every = [p for p in product(*(range(len(g.strategies)) for g in choices().groups)) if agrees(choices(), p)]
    found = solve_shardings(choices(), 1, memory_price, gap=0.0)
    assert value(found.strategy_index) == pytest.approx(min(map(value, every)), rel=1e-6)
    names = chosen_names(found.strategy_index)
    assert {names[group] for group in ("enter.conv2d", "norm.batch_norm", "down.conv2d")} == {"y0"}


def test_its_price_is_that_of_the_graph_that_each_rank_runs() -> None:
    graph, picks = traced(), solve_shardings(choices(), 1).strategy_index
    labels = dict(pair for group, k in zip(choices().groups, picks) for pair in group.strategies[k].labels)
    stored = storage(graph, labels, {"tp": RANKS})
    local = shard_graph(graph, labels, stored, {"tp": RANKS}, dict.fromkeys((op.name for op in graph.ops), 0))
    whole = price(graph, graph_stats(graph), FAST, 1)
    cost = price(local, graph_stats(local), FAST, 1, Sharing(tp=RANKS, storage=stored), whole.groups)
    found = sharding_cost(choices(), picks, 1)
    assert found.seconds == pytest.approx(sum(group.seconds for group in cost.groups), rel=0.01)
    saved = sum(group.saved_bytes for group in cost.groups) + sum(tensor.num_bytes for tensor in cost.saved)
    alone = sum(group.saved_bytes for group in whole.groups) + sum(tensor.num_bytes for tensor in whole.saved)
    assert saved / alone == pytest.approx(1 / RANKS, rel=0.1)
    exchanged = sum(group.collective_seconds for group in cost.groups)
    assert 0 < exchanged < 0.5 * found.seconds
    pricing = Pricing(graph, graph_stats(graph), FAST, 1, mesh_axes((RANKS,)))
    rows = [row for block in block_shardings([AxisSharding(pricing, local, stored)])
            for row in block.rows.items()]  # fmt: skip
    assert dict(rows) == dict.fromkeys(("enter", "norm", "down"), "height / 2") | dict(rows[3:])


def test_a_halo_wider_than_a_neighbours_part_is_no_choice() -> None:
    with torch.device("meta"):
        wide = trace(nn.Conv2d(3, 8, 19, padding=9), (torch.empty(1, 3, 32, 8),), {}, mode="train", name="wide")
    for ranks, offered in ((2, True), (4, False)):
        found = strategy_graph(Pricing(wide, graph_stats(wide), FAST, 1, mesh_axes((ranks,)))).groups[0].strategies
        assert ("y0" in {choice.name for choice in found}) == offered

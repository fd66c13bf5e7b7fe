"""Shardings: the integer program against brute force, and what it finds for a transformer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.strategy_graphs import BOTH, Machine, strategy_graphs, vit_strategies

from autopar.ir.layout import REPLICATED
from autopar.ir.strategies import ReshardingCost, ShardingStrategy, StrategyGraph
from autopar.solve.backend import SolverName
from autopar.solve.shardings.cost import ObjectiveWeights
from autopar.solve.shardings.program import edges, sharding_program
from autopar.solve.shardings.solve import Shardings, pareto, solve_shardings, work_bound_seconds


def allowed(graph: StrategyGraph) -> list[tuple[int, ...]]:
    """Every choice of all groups where kinds are alike and shared weights are stored in one layout."""
    found = []
    for picks in product(*(range(len(g.strategies)) for g in graph.groups)):
        alike = len({(g.kind, k) for g, k in zip(graph.groups, picks)}) == len({g.kind for g in graph.groups})
        stored = {
            (w, g.strategies[k].weight_layouts[i]) for g, k in zip(graph.groups, picks) for i, w in enumerate(g.weights)
        }
        if alike and len(stored) == len({w for w, _ in stored}):
            found.append(picks)
    return found


def chosen_and_converted(
    graph: StrategyGraph, picks: tuple[int, ...]
) -> tuple[list[ShardingStrategy], list[ReshardingCost]]:
    chosen = [g.strategies[k] for g, k in zip(graph.groups, picks)]
    made = {v: layout for g, c in zip(graph.groups, chosen) for v, layout in zip(g.makes, c.output_layouts)}
    read = {(v, layout) for g, c in zip(graph.groups, chosen) for v, layout in zip(g.reads, c.input_layouts)}
    return chosen, [graph.resharding[v, made[v], layout] for v, layout in read if made[v] != layout]


def microbatch_seconds(graph: StrategyGraph, picks: tuple[int, ...]) -> float:
    chosen, converted = chosen_and_converted(graph, picks)
    return sum(c.forward_seconds + c.backward_seconds for c in (*chosen, *converted))


def memory(graph: StrategyGraph, picks: tuple[int, ...], in_flight: int) -> int:
    chosen, converted = chosen_and_converted(graph, picks)
    weights = sum(c.weight_bytes for c in chosen)
    return weights + in_flight * sum(c.saved_bytes for c in (*chosen, *converted))


@given(
    strategy_graphs(), st.integers(1, 4), st.integers(1, 3), st.sampled_from((0.0, 1e-4, 1e-2)),
    st.sampled_from(["HiGHS"] * 9 + ["CBC"]),
)  # fmt: skip
@settings(max_examples=examples(150))
def test_the_optimum_equals_brute_force(
    graph: StrategyGraph, microbatches: int, in_flight: int, price: float, solver: SolverName
) -> None:
    found = solve_shardings(graph, microbatches, price, in_flight, solver, gap=0.0)

    def value(picks: tuple[int, ...]) -> float:
        step = sum(g.strategies[k].step_seconds for g, k in zip(graph.groups, picks))
        return microbatch_seconds(graph, picks) + step / microbatches + price * memory(graph, picks, in_flight)

    options = allowed(graph)
    best = min(map(value, options))
    assert found.strategy_index in options
    assert value(found.strategy_index) == pytest.approx(best, rel=1e-5)
    assert found.objective_seconds == pytest.approx(value(found.strategy_index), rel=1e-12)
    assert found.bound_seconds == pytest.approx(best, rel=1e-5)
    least = min(microbatch_seconds(graph, picks) for picks in options)
    assert work_bound_seconds(graph) == pytest.approx(least, rel=1e-5)
    assert found.seconds == pytest.approx(microbatch_seconds(graph, found.strategy_index), rel=1e-12)
    assert found.memory_bytes == memory(graph, found.strategy_index, in_flight)


# -- a transformer -------------------------------------------------------------------------------------------------


def labels(graph: StrategyGraph, found: Shardings, block: int) -> dict[str, str]:
    """Name of the choice of every group of a block."""
    pairs = zip(graph.groups, found.strategy_index)
    return {g.name.split(".")[2]: g.strategies[k].name for g, k in pairs if g.name.startswith(f"blocks.{block}.")}


def all_reduces(graph: StrategyGraph, found: Shardings) -> tuple[int, int]:
    """Number of all-reduces of the whole model, forward and backward."""
    chosen = [g.strategies[k] for g, k in zip(graph.groups, found.strategy_index)]
    made = {v: layout for g, c in zip(graph.groups, chosen) for v, layout in zip(g.makes, c.output_layouts)}
    read = {(v, layout) for g, c in zip(graph.groups, chosen) for v, layout in zip(g.reads, c.input_layouts)}
    forward = sum(c.name == "row" for c in chosen)
    return forward, sum(made[v] == REPLICATED and layout == BOTH for v, layout in read)


def test_without_token_splits_the_optimum_is_column_and_row() -> None:
    graph = vit_strategies(4, tokens=False)
    found = solve_shardings(graph, 8)
    for block in range(4):
        assert labels(graph, found, block) == {
            "norm1": "replicated", "qkv": "column", "attend": "heads", "proj": "row",
            "norm2": "replicated", "fc1": "column", "fc2": "row",
        }  # fmt: skip
    assert all_reduces(graph, found) == (2 * 4, 2 * 4)
    assert found.bound_seconds == pytest.approx(found.objective_seconds, rel=2e-4)
    # Four all-reduces of 0.3 ms a block, its linears and attention halved, its norms whole; stem, head, loss.
    assert found.seconds == pytest.approx(4 * (4.2e-3 / 2 + 0.3e-3 + 4 * 0.3e-3) + 1e-3 + 1e-4 + 1e-5)


def test_dear_collectives_leave_everything_replicated() -> None:
    graph = vit_strategies(4, Machine(all_reduce=3e-3), tokens=False)
    found = solve_shardings(graph, 8)
    assert set(found.strategy_index) == {0}
    assert found.step_seconds == 0


def with_whole_linears(graph: StrategyGraph) -> StrategyGraph:
    """Graph without the strategies that split linears by tokens."""
    kept = (
        replace(g, strategies=tuple(c for c in g.strategies if c.name != "tokens" or "norm" in g.name))
        for g in graph.groups
    )
    return replace(graph, groups=tuple(kept))


def test_tokens_are_gathered_and_scattered_around_the_linears_where_that_is_cheaper() -> None:
    """An all-reduce is a reduce-scatter and an all-gather; between them the norms run on split tokens."""
    graph = with_whole_linears(vit_strategies(4))
    found = solve_shardings(graph, 32)
    assert labels(graph, found, 1) == {
        "norm1": "tokens", "qkv": "column", "attend": "heads", "proj": "row scatter",
        "norm2": "tokens", "fc1": "column", "fc2": "row scatter",
    }  # fmt: skip
    assert all_reduces(graph, found) == (0, 0)
    dear = with_whole_linears(vit_strategies(4, Machine(gather=0.3e-3)))
    assert labels(dear, solve_shardings(dear, 32), 1)["norm1"] == "replicated"
    assert all_reduces(dear, solve_shardings(dear, 32)) == (8, 8)


def test_with_many_microbatches_tokens_stay_split_and_are_exchanged_around_attention() -> None:
    graph = vit_strategies(4)
    found = solve_shardings(graph, 64)
    assert Counter(labels(graph, found, 2).values()) == {"tokens": 6, "heads": 1}


def test_the_program_does_not_grow_with_depth() -> None:
    """From 3 blocks on: the ends of a chain of blocks and its middle are all there is."""
    sizes = {
        blocks: (
            len(edges(graph, ObjectiveWeights(8))),
            len(sharding_program(graph, ObjectiveWeights(8)).lp.variables()),
        )
        for blocks in (3, 40)
        for graph in (vit_strategies(blocks),)
    }
    assert sizes[3] == sizes[40]


def test_a_model_whose_blocks_share_no_kind_has_the_same_optimum() -> None:
    graph = vit_strategies(12)
    alone = replace(graph, groups=tuple(replace(g, kind=i) for i, g in enumerate(graph.groups)))
    ours, theirs = solve_shardings(graph, 8), solve_shardings(alone, 8)
    assert theirs.objective_seconds == pytest.approx(ours.objective_seconds, rel=2e-4)
    assert theirs.bound_seconds == pytest.approx(theirs.objective_seconds, rel=2e-4)


def test_out_of_time_everything_is_replicated_with_an_honest_bound() -> None:
    found = solve_shardings(vit_strategies(4), 8, time_limit_seconds=0.0)
    assert set(found.strategy_index) == {0}
    assert 0 < found.bound_seconds < 0.9 * found.objective_seconds


@given(strategy_graphs())
@settings(max_examples=examples(60))
def test_pareto_runs_from_the_fastest_to_the_least_memory(graph: StrategyGraph) -> None:
    found = list(pareto(graph, 2, 2))
    assert found[0].objective_seconds == pytest.approx(solve_shardings(graph, 2, in_flight=2).objective_seconds)
    for faster, smaller in pairwise(found):
        assert smaller.memory_bytes < faster.memory_bytes
        assert smaller.seconds + smaller.step_seconds / 2 >= (faster.seconds + faster.step_seconds / 2) * (1 - 1e-3)
    assert found[-1].memory_bytes == min(memory(graph, picks, 2) for picks in allowed(graph))


def test_pareto_of_a_transformer() -> None:
    """Dear collectives: replicated is fastest, and sharding buys memory."""
    graph = vit_strategies(4, Machine(all_reduce=2e-3, gather=1e-3, all_to_all=1e-3), tokens=False)
    found = list(pareto(graph, 8))
    assert [f"{f.seconds * 1e3:.2f} ms, {f.memory_bytes / 2**20:.0f} MiB" for f in found] == [
        "19.11 ms, 1572 MiB",
        "42.71 ms, 1068 MiB",
    ]
    assert work_bound_seconds(graph) == pytest.approx(found[0].seconds, rel=1e-4)

"""Chooses the sharding strategy of every group, with a proven bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pulp

from autopar.ir.strategies import StrategyGraph
from autopar.solve.backend import SolverName, default_solver, run
from autopar.solve.shardings.cost import ObjectiveWeights, sharding_cost
from autopar.solve.shardings.program import constraints, sharding_program
from autopar.solve.shardings.variables import agrees

# Prices of memory that `pareto` tries. At 1, halving the memory of the fastest sharding is worth half of its time.
# At the last one a thousandth of the memory is worth all of the time.
PRICES = (0.0625, 0.25, 1.0, 4.0, 16.0, 1000.0)
# Relative gap at which the solver may stop.
CLOSE = 1e-6


@dataclass(frozen=True)
class Shardings:
    """Strategy of every group.

    ``seconds`` are compute and conversions of one microbatch, ``step_seconds`` are spent once a step, and
    ``memory_bytes`` is what the whole model holds on one rank of every stage together. ``objective_seconds`` is
    seconds + step_seconds / microbatches + memory_price · memory_bytes, and ``bound_seconds`` a proven lower bound of
    it, over all shardings in which groups of one kind share their choice.
    """

    strategy_index: tuple[int, ...]
    seconds: float
    step_seconds: float
    memory_bytes: int
    objective_seconds: float
    bound_seconds: float


def solve_shardings(
    graph: StrategyGraph,
    microbatches: float,
    memory_price: float = 0.0,
    in_flight: int = 1,
    solver: SolverName | None = None,
    time_limit_seconds: float = 10.0,
    gap: float = 1e-4,
) -> Shardings:
    """Fastest strategy of every group, or cheapest if memory has a price.

    Variables, for a kind of groups and its choice k, an edge (all values that one kind makes and the same kinds read,
    in the same layouts) and its reader j, layouts A and B that some choice makes and reads: x[kind, k] binary;
    continuous e_j[A, B] (made in A, read by j in B) and s[A, B] (converted from A to B for any reader).

    =====================================================  =======================================================
    Σ_k x[kind, k] = 1                                     `new_strategy_vars`
    Σ_{k: stores_g = L} x[g, k] = Σ_{k: stores_h = L}      `add_agreement`, every weight, every pair of its readers g
    x[h, k]                                                and h, every layout L
    Σ_B e_j[A, B] = Σ_{k: gives = A} x[producer, k]        `occurrence` by `linearize_product`; where both are
    Σ_A e_j[A, B] = Σ_{k: takes = B} x[reader, k]          one kind: e_j[A, B] = Σ_{k: gives = A, takes = B} x[k]
    s[A, B] >= e_j[A, B]                                   `constraints`
    minimise Σ x · (seconds + step seconds / m             `strategy_costs`, summed over the groups of a kind
    + price · (weight bytes + in flight · saved bytes))
    + Σ s[A, B] · (conversion seconds                      `sharding_program`, summed over the values of an edge
    + price · in flight · saved bytes)
    =====================================================  =======================================================

    If the time limit ends the search with nothing better, everything is replicated and the bound says how far that may
    be off.

    Args:
        memory_price: seconds per byte.
        in_flight: microbatches whose activations are held simultaneously.
        solver: "HiGHS" or "CBC"; by default the first that is installed.
    """
    prices = ObjectiveWeights(microbatches, memory_price, in_flight)
    program = sharding_program(graph, prices)
    outcome = run(program.lp, solver or default_solver(), gap, time_limit_seconds)
    options = [(0,) * len(graph.groups)] + [program.strategy_vars.solution()] * outcome.found
    costs = {index: sharding_cost(graph, index, in_flight) for index in options if agrees(graph, index)}
    assert costs, "groups that replicate everything store a weight in different layouts"

    def objective(index: tuple[int, ...]) -> float:
        cost = costs[index]
        return cost.seconds + cost.step_seconds / microbatches + memory_price * cost.memory_bytes

    best = min(costs, key=objective)
    # Needs no solver: every group at its cheapest, no conversions.
    floor = sum(min(map(prices.of, group.strategies)) for group in graph.groups)
    bound = min(max(outcome.bound * program.seconds, floor), objective(best))
    cost = costs[best]
    return Shardings(best, cost.seconds, cost.step_seconds, cost.memory_bytes, objective(best), bound)


def pareto(graph: StrategyGraph, microbatches: int, in_flight: int = 1) -> Iterator[Shardings]:
    """Shardings from the fastest to the one with the least memory, each found when it is asked for.

    Memory is given a rising price; a sharding that needs no less memory than the one before is left out. Only
    shardings that are best at some price can appear: not every trade, but the ends and a few between.
    """
    last = solve_shardings(graph, microbatches, 0.0, in_flight, gap=CLOSE)
    yield last
    unit = last.objective_seconds / last.memory_bytes if last.memory_bytes else 0.0
    for price in PRICES if unit else ():
        found = solve_shardings(graph, microbatches, price * unit, in_flight, gap=CLOSE)
        if found.memory_bytes < last.memory_bytes:
            yield found
            last = found


def work_bound_seconds(graph: StrategyGraph) -> float:
    """A lower bound of compute and conversions of one microbatch, whatever the sharding costs once a step, by the
    prices of single strategies, which the whole sharded graph may undercut: see `proven_work_seconds`."""
    return solve_shardings(graph, float("inf"), gap=CLOSE).bound_seconds


def proven_work_seconds(graph: StrategyGraph) -> float:
    """A lower bound of compute and conversions of one microbatch as the whole sharded graph is priced, under every
    sharding in which groups of one kind share their strategy."""
    least, prices = with_least_prices(graph), ObjectiveWeights(float("inf"))
    # Layouts and kinds are the same, so that conversions and constraints are.
    least.derived.update(constraints=constraints(graph, prices), conversions=graph.derived["conversions"])
    return _relaxed_seconds(least, prices)


def any_sharding_seconds(graph: StrategyGraph, microbatches: float) -> float:
    """As `proven_work_seconds`, with a share of what is spent once a step, whatever the strategies, of which groups of
    one kind need not share any.

    A pipeline that takes at least ``passes`` seconds for each second of a microbatch, see `least_passes`, takes no less
    than passes · `any_sharding_seconds` (pp · passes): one of its pp ranks spends an even share or more once a step.
    """
    kinds = replace(graph, groups=tuple(replace(group, kind=kind) for kind, group in enumerate(graph.groups)))
    return _relaxed_seconds(with_least_prices(kinds), ObjectiveWeights(microbatches))


def with_least_prices(graph: StrategyGraph) -> StrategyGraph:
    """The graph with strategies that take no ``context_seconds``."""
    groups = (replace(group, strategies=tuple(choice.least for choice in group.strategies)) for group in graph.groups)
    return replace(graph, groups=tuple(groups))


def _relaxed_seconds(graph: StrategyGraph, prices: ObjectiveWeights) -> float:
    """The bound that the program's relaxation gives."""
    program = sharding_program(graph, prices)
    decisions = [x for x in program.strategy_vars.x.values() if x.isInteger()]
    for x in decisions:
        x.cat = pulp.LpContinuous
    outcome = run(program.lp, default_solver(), 0.0, 10.0)
    for x in decisions:
        x.cat = pulp.LpInteger
    return outcome.bound * program.seconds


def least_passes(microbatches: float, pp: int, chunks: int) -> float:
    """Seconds of a pipeline, at least, for each second of one microbatch on all stages.

    Source: with stages of t seconds, no step is shorter than microbatches · t[s] + the t before s, for every s. The
        largest of these is least where all are equal: t[s] = t[s − 1] · (1 − 1/microbatches). With several stages a
        rank, a rank is busy for an even share of all microbatches, and one microbatch passes all stages.
    """
    if chunks > 1:
        return max(microbatches / pp, 1.0)
    return 1 / (1 - (1 - 1 / max(1.0, microbatches)) ** pp)

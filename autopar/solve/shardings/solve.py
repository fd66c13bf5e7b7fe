"""Chooses the sharding strategy of every group, with a proven bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pulp

from autopar.ir.plan_parts import SolverInfo
from autopar.ir.strategies import StrategyGraph
from autopar.solve.backend import SOLVER_TOLERANCE, SolverName, default_solver, run
from autopar.solve.shardings.cost import ObjectiveWeights, sharding_cost
from autopar.solve.shardings.program import sharding_program
from autopar.solve.shardings.variables import agrees

# Prices of memory that `pareto` tries. At 1, halving the memory of the fastest sharding is worth half of its time.
# At the last one a thousandth of the memory is worth all of the time.
PRICES = (0.0625, 0.25, 1.0, 4.0, 16.0, 1000.0)


@dataclass(frozen=True)
class Shardings:
    """Strategy of every group.

    ``seconds`` are compute and conversions of one microbatch, ``step_seconds`` are spent once a step, and
    ``memory_bytes`` is what the whole model holds on one rank of every stage together. ``objective_seconds`` is
    seconds + step_seconds / microbatches + memory_price · memory_bytes.

    ``bound_seconds`` is a proven lower bound of ``seconds`` and ``objective_bound_seconds`` of the objective, over all
    shardings in which groups of one kind share their choice.
    """

    strategy_index: tuple[int, ...]
    seconds: float
    step_seconds: float
    memory_bytes: int
    objective_seconds: float
    bound_seconds: float
    objective_bound_seconds: float
    microbatches: int
    memory_price: float
    solver: SolverInfo


@dataclass(frozen=True)
class Effort:
    """Solver and its limits."""

    solver: SolverName
    time_limit_seconds: float = 10.0
    gap: float = 1e-6


@dataclass(frozen=True)
class Solution:
    """Best strategies, their objective, its proven lower bound, and the solver's wall time."""

    strategy_index: tuple[int, ...]
    objective_seconds: float
    bound_seconds: float
    solver_seconds: float


def solve_shardings(
    graph: StrategyGraph,
    microbatches: int,
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
    s[A, B] >= e_j[A, B]                                   `resharding_costs`
    minimise Σ x · (seconds + step seconds / m             `strategy_costs`, summed over the groups of a kind
    + price · (weight bytes + in flight · saved bytes))
    + Σ s[A, B] · (conversion seconds                      `resharding_costs`, summed over the values of an edge
    + price · in flight · saved bytes)
    =====================================================  =======================================================

    If the time limit ends the search with nothing better, everything is replicated and the gap says how far that may
    be off.

    Args:
        memory_price: seconds per byte.
        in_flight: microbatches whose activations are held simultaneously.
        solver: "HiGHS" or "CBC"; by default the first that is installed.
    """
    effort = Effort(solver or default_solver(), time_limit_seconds, gap)
    bound = work_bound_seconds(graph, effort)
    return _priced(graph, microbatches, ObjectiveWeights(microbatches, memory_price, in_flight), effort, bound)


def pareto(
    graph: StrategyGraph,
    microbatches: int,
    in_flight: int = 1,
    solver: SolverName | None = None,
    time_limit_seconds: float = 10.0,
    gap: float = 1e-6,
    bound_seconds: float | None = None,
) -> Iterator[Shardings]:
    """Shardings from the fastest to the one with the least memory, each found when it is asked for.

    Memory is given a rising price; a sharding that needs no less memory than the one before is left out. Only
    shardings that are best at some price can appear: not every trade, but the ends and a few between.

    Args:
        bound_seconds: of `work_bound_seconds`, where that is known.
    """
    effort = Effort(solver or default_solver(), time_limit_seconds, gap)
    bound = work_bound_seconds(graph, effort) if bound_seconds is None else bound_seconds
    last = _priced(graph, microbatches, ObjectiveWeights(microbatches, 0.0, in_flight), effort, bound)
    yield last
    unit = last.objective_seconds / last.memory_bytes if last.memory_bytes else 0.0
    for price in PRICES if unit else ():
        prices = ObjectiveWeights(microbatches, price * unit, in_flight)
        found = _priced(graph, microbatches, prices, effort, bound)
        if found.memory_bytes < last.memory_bytes:
            yield found
            last = found


def work_bound_seconds(graph: StrategyGraph, effort: Effort | None = None) -> float:
    """A lower bound of compute and conversions of one microbatch, whatever the sharding costs once a step, by the
    prices of single strategies, which the whole sharded graph may undercut: see `proven_work_seconds`."""
    return _search(graph, ObjectiveWeights(float("inf")), effort or Effort(default_solver())).bound_seconds


def proven_work_seconds(graph: StrategyGraph) -> float:
    """A lower bound of compute and conversions of one microbatch as the whole sharded graph is priced, under every
    sharding in which groups of one kind share their strategy."""
    return _relaxed_seconds(graph, float("inf"))


def any_sharding_seconds(graph: StrategyGraph, microbatches: float) -> float:
    """As `proven_work_seconds`, with a share of what is spent once a step, whatever the strategies, of which groups of
    one kind need not share any.

    A pipeline that takes at least ``passes`` seconds for each second of a microbatch, see `least_passes`, takes no less
    than passes · `any_sharding_seconds` (pp · passes): one of its pp ranks spends an even share or more once a step.
    """
    kinds = replace(graph, groups=tuple(replace(group, kind=kind) for kind, group in enumerate(graph.groups)))
    return _relaxed_seconds(kinds, microbatches)


def _relaxed_seconds(graph: StrategyGraph, microbatches: float) -> float:
    """The bound that the program's relaxation gives, where strategies take no ``context_seconds``."""
    groups = (replace(group, strategies=tuple(choice.least for choice in group.strategies)) for group in graph.groups)
    program = sharding_program(replace(graph, groups=tuple(groups)), ObjectiveWeights(microbatches))
    for x in program.strategy_vars.x.values():
        x.cat = pulp.LpContinuous
    return run(program.lp, default_solver(), 0.0, 10.0).bound * program.seconds


def least_passes(microbatches: float, pp: int, chunks: int) -> float:
    """Seconds of a pipeline, at least, for each second of one microbatch on all stages.

    Source: with stages of t seconds, no step is shorter than microbatches · t[s] + the t before s, for every s. The
        largest of these is least where all are equal: t[s] = t[s − 1] · (1 − 1/microbatches). With several stages a
        rank, a rank is busy for an even share of all microbatches, and one microbatch passes all stages.
    """
    if chunks > 1:
        return max(microbatches / pp, 1.0)
    return 1 / (1 - (1 - 1 / max(1.0, microbatches)) ** pp)


def _priced(
    graph: StrategyGraph, microbatches: int, prices: ObjectiveWeights, effort: Effort, bound_seconds: float
) -> Shardings:
    """The best sharding at these prices, with what it costs."""
    found = _search(graph, prices, effort)
    cost = sharding_cost(graph, found.strategy_index, prices.in_flight)
    objective, bound = found.objective_seconds, found.bound_seconds
    gap = max(0.0, (objective - bound) / objective) if objective else 0.0  # the bound is rounded
    status = "optimal" if gap <= effort.gap + SOLVER_TOLERANCE else "time limit"
    return Shardings(
        strategy_index=found.strategy_index,
        seconds=cost.seconds,
        step_seconds=cost.step_seconds,
        memory_bytes=cost.memory_bytes,
        objective_seconds=found.objective_seconds,
        bound_seconds=min(bound_seconds, cost.seconds),
        objective_bound_seconds=found.bound_seconds,
        microbatches=microbatches,
        memory_price=prices.memory_price,
        solver=SolverInfo(effort.solver, status, gap, found.solver_seconds, method="shardings"),
    )


def _search(graph: StrategyGraph, prices: ObjectiveWeights, effort: Effort) -> Solution:
    """The solver's solution, or everything replicated if that is no worse."""
    program = sharding_program(graph, prices)
    outcome = run(program.lp, effort.solver, effort.gap, effort.time_limit_seconds)
    options = [(0,) * len(graph.groups)] + [program.strategy_vars.solution()] * outcome.found
    options = [indices for indices in options if agrees(graph, indices)]
    assert options, "groups that replicate everything store a weight in different layouts"
    best = min(options, key=lambda indices: _objective(graph, indices, prices))
    objective = _objective(graph, best, prices)
    # Needs no solver: every group at its cheapest, no conversions.
    floor = sum(min(map(prices.of, group.strategies)) for group in graph.groups)
    bound = min(max(outcome.bound * program.seconds, floor), objective)
    return Solution(best, objective, bound, outcome.seconds)


def _objective(graph: StrategyGraph, indices: Sequence[int], prices: ObjectiveWeights) -> float:
    cost = sharding_cost(graph, indices, prices.in_flight)
    return cost.seconds + cost.step_seconds / prices.microbatches + prices.memory_price * cost.memory_bytes

"""The integer program of shardings: its size follows the number of kinds, not the depth of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulp

from autopar.ir.layout import Layout
from autopar.ir.strategies import ReshardingCost, StrategyGraph
from autopar.solve.shardings.cost import ObjectiveWeights, resharding_cost, value_edges
from autopar.solve.shardings.variables import Expr, StrategyVars, choices_by, linearize_product, new_strategy_vars


@dataclass(frozen=True)
class KindLayouts:
    """A kind of group, and the layout of one of its tensors under each of its choices."""

    kind: int
    layouts: tuple[Layout, ...]


@dataclass(frozen=True)
class Edge:
    """All values that one kind makes alike and the same kinds read alike, as one.

    ``prices`` of each pair (made, read) that can occur and costs something are summed over these values.
    """

    producer: KindLayouts
    readers: tuple[KindLayouts, ...]
    prices: Mapping[tuple[Layout, Layout], float]


Conversions = Mapping[tuple[KindLayouts, tuple[KindLayouts, ...]], Mapping[tuple[Layout, Layout], list[ReshardingCost]]]


@dataclass(frozen=True)
class ShardingProgram:
    """The program and its decision variables; its objective counts in ``seconds``, so that it is near one."""

    lp: pulp.LpProblem
    strategy_vars: StrategyVars
    seconds: float


def layout_pairs(producer: KindLayouts, reader: KindLayouts) -> dict[tuple[Layout, Layout], tuple[int, ...]]:
    """The pairs (made, read) that can occur; with the choices that lead to them where both are of one kind."""
    if producer.kind != reader.kind:
        return {(made, read): () for made in choices_by(producer.layouts) for read in choices_by(reader.layouts)}
    found: dict[tuple[Layout, Layout], tuple[int, ...]] = {}
    for k, pair in enumerate(zip(producer.layouts, reader.layouts, strict=True)):
        found[pair] = (*found.get(pair, ()), k)
    return found


def edges(graph: StrategyGraph, prices: ObjectiveWeights) -> tuple[Edge, ...]:
    """The values of the model, those at the same place of a repeated block collapsed into one."""
    found: Conversions = graph.remember("conversions", lambda: conversions(graph))
    return tuple(
        Edge(*ends, {pair: price for pair, costs in paid.items() if (price := sum(map(prices.of_resharding, costs)))})
        for ends, paid in found.items()
    )


def conversions(graph: StrategyGraph) -> Conversions:
    """Producer and readers of each edge, and for each pair of layouts the resharding costs of its values."""
    found: dict[tuple[KindLayouts, tuple[KindLayouts, ...]], dict[tuple[Layout, Layout], list[ReshardingCost]]] = {}
    for wire in value_edges(graph):
        producer = KindLayouts(graph.groups[wire.producer].kind, wire.layouts)
        readers = tuple(dict.fromkeys(KindLayouts(graph.groups[r.group].kind, r.layouts) for r in wire.consumers))
        if (producer, readers) not in found:
            found[producer, readers] = {pair: [] for reader in readers for pair in layout_pairs(producer, reader)}
        for (made, read), costs in found[producer, readers].items():
            costs.append(resharding_cost(graph, wire.value, made, read))
    return found


@dataclass(frozen=True)
class Constraints:
    """Variables and constraints of a graph, and of each edge the amounts s[A, B] by their pair of layouts."""

    lp: pulp.LpProblem
    strategy_vars: StrategyVars
    reshardings: tuple[Mapping[tuple[Layout, Layout], Expr], ...]


def sharding_program(graph: StrategyGraph, prices: ObjectiveWeights) -> ShardingProgram:
    """The program that finds the cheapest choice for every kind; all programs of a graph share their variables."""
    priced, made = edges(graph, prices), constraints(graph, prices)
    unit = sum(prices.of(group.strategies[0]) for group in graph.groups) or 1.0
    resharding = Expr()
    for edge, amounts in zip(priced, made.reshardings):
        for pair, amount in amounts.items():
            resharding += edge.prices[pair] / unit * amount
    made.lp.setObjective(strategy_costs(graph, made.strategy_vars, prices, unit) + resharding)
    return ShardingProgram(made.lp, made.strategy_vars, unit)


def strategy_costs(graph: StrategyGraph, variables: StrategyVars, prices: ObjectiveWeights, unit: float) -> Expr:
    """Σ x[kind, k] · Σ over the groups of the kind of (seconds + step seconds / m + price · memory)."""
    costs = dict.fromkeys(variables.x, 0.0)
    for group in graph.groups:
        for k, choice in enumerate(group.strategies):
            costs[group.kind, k] += prices.of(choice) / unit
    return pulp.lpSum(cost * variables.x[pair] for pair, cost in costs.items())


def constraints(graph: StrategyGraph, prices: ObjectiveWeights) -> Constraints:
    """The constraints of a graph, made once. Whether a pair of layouts costs anything may depend on memory."""
    key = "constraints with memory" if prices.memory_price else "constraints"
    return graph.remember(key, lambda: _constraints(graph, edges(graph, prices)))


def _constraints(graph: StrategyGraph, priced: Sequence[Edge]) -> Constraints:
    """The constraints of all kinds and edges, with s[A, B] >= e_j[A, B] for every reader j."""
    lp = pulp.LpProblem("shardings")
    variables = new_strategy_vars(graph, lp)
    reshardings = []
    for number, edge in enumerate(priced):
        needed: dict[tuple[Layout, Layout], list[Expr]] = {}
        for j, reader in enumerate(edge.readers):
            for pair, amount in occurrence(variables, lp, f"e_{number}_{j}", edge.producer, reader).items():
                if pair in edge.prices:
                    needed.setdefault(pair, []).append(amount)
        once = {pair: amounts[0] for pair, amounts in needed.items()}
        for i, (pair, amounts) in enumerate(needed.items()):
            if len(amounts) > 1:
                once[pair] = Expr(lp.add_variable(f"s_{number}_{i}", 0))
                for amount in amounts:
                    lp.addConstraint(amount - once[pair] <= 0)
        reshardings.append(once)
    return Constraints(lp, variables, tuple(reshardings))


def occurrence(
    variables: StrategyVars, lp: pulp.LpProblem, name: str, producer: KindLayouts, reader: KindLayouts
) -> dict[tuple[Layout, Layout], Expr]:
    """e_j[A, B]: 1 where the value is made in layout A and this reader reads it in B.

    Σ_B e_j[A, B] = Σ x[producer, k] over gives[k] = A, and Σ_A e_j[A, B] = Σ x[reader, k] over takes[k] = B. A kind
    that reads what it makes (one block's output is the next one's input) needs no variable: e_j[A, B] is the sum of
    its x[k] with gives[k] = A and takes[k] = B.
    """
    if producer.kind == reader.kind:
        return {
            pair: variables.among(producer.kind, choices) for pair, choices in layout_pairs(producer, reader).items()
        }
    made = {a: variables.among(producer.kind, choices) for a, choices in choices_by(producer.layouts).items()}
    read = {b: variables.among(reader.kind, choices) for b, choices in choices_by(reader.layouts).items()}
    return linearize_product(lp, name, made, read)

"""Shardings for the chosen mesh, of which each stage may have its own, and a bound over all of them."""

from __future__ import annotations

from functools import partial
from itertools import count

from autopar.api.planning.costs import PlanCosts
from autopar.cost.strategies.enumerate import with_hidden_exchange, with_replicas
from autopar.solve.cuts.step_time import Decision
from autopar.solve.search import Refined
from autopar.solve.shardings.solve import any_sharding_seconds, least_passes, solve_shardings


def refine(costs: PlanCosts, decision: Decision) -> Refined:
    """The shardings of a decision's mesh and microbatches for rising prices of memory, and the best one with what
    replicas exchange, which the search prices shardings without; and a bound of the step over all shardings.

    On several tensor axes they are those of the innermost one, and there is no bound.

    Error: every pass of the pipeline counts as often as the slowest stage's. Where operations were timed there is no
        bound, since their times under other shardings are estimates.
    """
    cuts, axes = decision.problem, decision.problem.tensor_axes
    graph = costs.strategy_graph(axes, decision.size)
    assert [g.name for g in graph.groups] == [g.name for g in cuts.cost.groups], "other groups than those that were cut"
    sharing = costs.sharing(axes, cuts.replicas)
    passes = least_passes(cuts.microbatches, cuts.pp, cuts.chunks)
    outer = costs.outer(axes, decision.size).graph
    replicas = with_replicas(graph, outer, sharing, costs.hardware)
    found = solve_shardings(replicas, round(cuts.pp * passes))
    hidden = with_hidden_exchange(graph, outer, sharing, costs.hardware)
    bound = None if costs.factors or len(axes) > 1 else passes * any_sharding_seconds(hidden, cuts.pp * passes)
    priced = partial(costs.priced_strategies, axes=axes, replicas=cuts.replicas, size=decision.size)
    levels = (costs.sharding(axes, decision.size, cuts.microbatches, level) for level in count())
    indices = [decision.priced.strategy_index, found.strategy_index]
    indices += [own.strategy_index for own in iter(lambda: next(levels), None)]
    return Refined(graph, tuple(map(priced, dict.fromkeys(indices))), priced, bound)

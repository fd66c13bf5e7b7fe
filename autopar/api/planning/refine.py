"""The sharding decided again for the chosen mesh, with what replicas exchange."""

from __future__ import annotations

from autopar.api.planning.costs import PlanCosts
from autopar.cost.strategies.enumerate import with_replicas
from autopar.solve.result.make_plan import Decision
from autopar.solve.search import Refined
from autopar.solve.shardings.solve import least_passes, lower_bound_seconds, solve_shardings


def refine(costs: PlanCosts, decision: Decision) -> Refined:
    """The best sharding for a decision's mesh and microbatches, if it is another one, and a bound of all.

    The search prices shardings without the reduction of replicas' gradients.

    Error: strategies are priced as in `autopar.cost.strategies.group_cost`; every pass of the pipeline counts as often
        as the slowest stage's.
    """
    cuts = decision.problem
    graph = costs.strategy_graph(cuts.tp, decision.size)
    assert [g.name for g in graph.groups] == [g.name for g in cuts.cost.groups], "other groups than those that were cut"
    sharing = costs.sharing(cuts.tp, cuts.dp, decision.zero)
    graph = with_replicas(graph, costs.graph, sharing, costs.hardware)
    passes = least_passes(cuts.microbatches, cuts.pp, cuts.chunks)
    found = solve_shardings(graph, round(cuts.pp * passes))
    bound = lower_bound_seconds(found, cuts.pp, passes)
    if found.strategy_index == decision.priced.strategy_index:
        return Refined(None, bound)
    of = found.strategy_index, cuts.tp, cuts.dp, decision.zero, decision.size
    return Refined(costs.priced_strategies(*of), bound)

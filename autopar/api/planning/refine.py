"""The sharding decided again for the chosen mesh, with what replicas exchange."""

from __future__ import annotations

from autopar.api.planning.costs import PlanCosts
from autopar.cost.groups.weight_memory import Sharing
from autopar.cost.strategies.enumerate import with_replicas
from autopar.solve.cuts.problem import Priced
from autopar.solve.result.make_plan import Decision
from autopar.solve.shardings.solve import solve_shardings


def refine(costs: PlanCosts, decision: Decision) -> Priced | None:
    """The best sharding for a decision's mesh and microbatches, if it is another one.

    The search prices shardings without the reduction of replicas' gradients.

    Error: strategies are priced as in `autopar.cost.strategies.group_cost`; every pass of the pipeline counts as often
        as the slowest stage's.
    """
    cuts = decision.problem
    graph = costs.strategy_graph(cuts.tp, decision.size)
    assert [g.name for g in graph.groups] == [g.name for g in cuts.cost.groups], "other groups than those that were cut"
    sharing = Sharing(cuts.tp, cuts.dp, decision.zero, reduce_dtype=cuts.reduce_dtype)
    graph = with_replicas(graph, costs.graph, sharing, costs.hardware)
    found = solve_shardings(graph, cuts.microbatches + cuts.pp - 1).strategy_index
    if found == decision.priced.strategy_index:
        return None
    return costs.priced_strategies(found, cuts.tp, cuts.dp, decision.zero, decision.size)

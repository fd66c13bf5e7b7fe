"""Cuts and shardings decided again in one integer program, with a bound that certifies the result.

The search decides them one after the other: the fastest sharding first, then its cuts, and smaller and slower
shardings if memory does not suffice. For models up to `MAX_PLACEMENTS` the joint program then decides both together.
Larger models keep their cuts and get the best sharding for them. In both cases the printed gap is against a bound that
holds for all shardings and cuts.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.api.planning.costs import PlanCosts
from autopar.cost.groups.weight_memory import Sharing
from autopar.cost.strategies.enumerate import with_replicas
from autopar.solve.joint.problem import Assignment, JointProblem, joint_seconds, stage_loads
from autopar.solve.joint.solve import Joint, solve_joint
from autopar.solve.result.make_plan import Decision
from autopar.solve.search import Refined
from autopar.solve.shardings.solve import lower_bound_seconds, solve_shardings

# Largest number of strategies of all groups, times stages. Below it one core took 1.8 s for ViT-L on 4 stages (2,452),
# 2.8 s for Swin-T on 2 (1,124) and 1.1 s for ResNet-18 on 4 (640). ViT-S on 8 stages (2,504) took over 7 s.
MAX_PLACEMENTS = 2500
# A safety limit: all of the above ended long before it.
JOINT_SECONDS = 20.0


def refine(costs: PlanCosts, decision: Decision) -> Refined | None:
    """The best shardings and cuts together; if the model is too large, the best shardings for the decision's cuts.

    Returns:
        None if the joint program cannot express the decision, or the time limit ended the solver.

    Error: strategies are priced as in `autopar.cost.strategies.group_cost`. Memory leaves out received tensors and the
        working set; the search keeps its own decision if the solution does not fit after all. The program has no
        stages that recompute. If some may, the gap is against the optimum without a memory limit, which no plan beats.
    """
    problem = joint_problem(costs, decision)
    current = Assignment(decision.priced.strategy_index, decision.stage_of)
    loads = stage_loads(problem, current)
    if problem.capacity_bytes is not None and max(load.memory_bytes for load in loads) > problem.capacity_bytes:
        return None
    joint = solve_placement(replace(problem, capacity_bytes=None), current) if decision.problem.may_recompute else None
    bound = joint.bound_seconds if joint is not None else 0.0
    if joint is None or not within_capacity(problem, joint):
        joint = solve_placement(problem, current)
    if joint is None:
        return None
    if decision.problem.may_recompute:
        seconds = joint.objective_seconds
        gap = (seconds - bound) / seconds if seconds else 0.0
        joint = replace(joint, bound_seconds=bound, solver=replace(joint.solver, gap=gap))
    before, priced = joint_seconds(problem, loads), decision.priced
    if joint.strategy_index != current.strategy_index:
        priced = costs.priced_strategies(
            joint.strategy_index, problem.ranks, decision.problem.dp, decision.zero, decision.size
        )
    return Refined(priced, joint.stage_of, joint.solver, (before - joint.bound_seconds) / before if before else 0.0)


def within_capacity(problem: JointProblem, joint: Joint) -> bool:
    """Whether every stage of a solution fits into memory."""
    loads = stage_loads(problem, Assignment(joint.strategy_index, joint.stage_of))
    return problem.capacity_bytes is None or max(load.memory_bytes for load in loads) <= problem.capacity_bytes


def solve_placement(problem: JointProblem, current: Assignment) -> Joint | None:
    """The joint optimum, or for large models the best sharding by itself with a bound that holds for all cuts.

    None if the time limit ended the joint program.
    """
    placements = sum(len(group.strategies) for group in problem.graph.groups) * problem.stages
    if problem.stages > 1 and placements <= MAX_PLACEMENTS:
        joint = solve_joint(problem, current)
        return joint if isinstance(joint, Joint) and joint.solver.status == "optimal" else None
    shardings = solve_shardings(problem.graph, problem.microbatches + problem.stages - 1)
    bound = lower_bound_seconds(problem.graph, shardings, problem.stages, problem.microbatches)
    step = joint_seconds(problem, stage_loads(problem, Assignment(shardings.strategy_index, current.stage_of)))
    gap = (step - bound) / step if step else 0.0
    method = "shardings" if problem.stages == 1 else "shardings then cuts"
    status = shardings.solver.status if gap <= problem.gap else f"{shardings.solver.status} for the shardings"
    solver = replace(shardings.solver, gap=gap, method=method, status=status)
    return Joint(shardings.strategy_index, current.stage_of, step, bound, solver)


def joint_problem(costs: PlanCosts, decision: Decision) -> JointProblem:
    """The joint program for a decision: its mesh, microbatches and memory, with all strategies and cuts open."""
    cuts = decision.problem
    graph = costs.strategy_graph(cuts.tp, decision.size)
    assert [g.name for g in graph.groups] == [g.name for g in cuts.cost.groups], "other groups than those that were cut"
    sharing = Sharing(cuts.tp, cuts.dp, decision.zero, reduce_dtype=cuts.reduce_dtype)
    return JointProblem(
        graph=with_replicas(graph, costs.graph, sharing, costs.hardware),
        stages=cuts.stages,
        microbatches=cuts.microbatches,
        capacity_bytes=cuts.capacity_bytes,
        in_flight=cuts.in_flight,
        boundary=cuts.boundary,
        ranks=cuts.tp,
        pins=cuts.pins,
        colocated=cuts.cost.colocated,
        time_limit_seconds=min(cuts.time_limit_seconds, JOINT_SECONDS),
        gap=cuts.gap,
    )

"""Plans by measured times: the most promising configurations are timed, until the best plan is among them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

from autopar.api.planning.costs import MeasuredConfig, PlanCosts, apply_strategies, sorted_labels
from autopar.cost.ops.op_cost import MeasuredRegions
from autopar.errors import MeasuringWarning
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.units import plural
from autopar.measure.regions.region_times import RegionTimer
from autopar.solve.result.make_plan import Decision
from autopar.solve.space.candidates import Candidate

# Largest ratio of a predicted step to the best one's at which a configuration is timed too: of other meshes, and of the
# same mesh with other microbatches. Factors borrowed from another configuration are seldom further off.
CLOSE_MESH, CLOSE_SIZE = 1.1, 1.05
MAX_ROUNDS = 30

Retrace = Callable[[int], Graph]


def plan_with_measurements(
    costs: PlanCosts, search: Callable[..., Plan], timer: RegionTimer, retrace: Retrace
) -> Plan | None:
    """The best plan by measured times.

    A configuration that has not been measured is priced with the factors of the nearest measured one. Each round times
    one configuration, that of the chosen plan first and then those of close candidates, and searches again.

    Args:
        costs: costs of the search, by the cost model alone; measurements are stored in it.
        search: `autopar.solve.search.search` with all arguments but ``listen`` and ``slack``.
        retrace: returns the training graph for a microbatch size.

    Returns:
        None if a measurement is missing and may not be made.

    Raises:
        WorkerError: a measurement failed.
    """
    explored: list[tuple[Sequence[Candidate], Decision]] = []
    for _ in range(MAX_ROUNDS):
        plan = search(listen=lambda candidates, decision: explored.append((candidates, decision)), slack=CLOSE_MESH - 1)
        missing = next((c for c in configs_to_measure(*explored.pop()) if c not in costs.factors), None)
        if missing is None:
            return plan
        times = time_operations(costs, missing, timer, retrace)
        if times is None:
            return None
        costs.use_measurements(missing, times)
    warnings.warn(
        f"After {MAX_ROUNDS} measurements of {plan.model.name} the search still finds others to make: this plan is "
        "priced by those that were most like it.",
        MeasuringWarning,
        stacklevel=2,
    )
    return plan


def configs_to_measure(candidates: Sequence[Candidate], decision: Decision) -> Iterator[MeasuredConfig]:
    """Configurations to time before a decision holds: its own, then those of candidates that may be faster."""
    yield MeasuredConfig(decision.problem.tp, decision.size, sorted_labels(decision.priced.strategies))
    fitting = sorted((c for c in candidates if c.step is not None), key=lambda c: c.seconds)
    meshes: set[Mesh] = set()
    for candidate in fitting:
        mesh = candidate.point.mesh
        limit = CLOSE_SIZE if mesh in meshes else CLOSE_MESH
        if candidate.seconds <= limit * fitting[0].seconds:
            yield MeasuredConfig(mesh.tp, candidate.decision.size, sorted_labels(candidate.priced.strategies))
        meshes.add(mesh)


def time_operations(
    costs: PlanCosts, config: MeasuredConfig, timer: RegionTimer, retrace: Retrace
) -> MeasuredRegions | None:
    """Groups of operations that were timed together, with their seconds; None if they may not be timed."""
    labels = dict(config.labels)
    graph = costs.timed(labels, config.tp).graph

    def at_size() -> Graph:
        again = retrace(config.size)
        return again if config.tp == 1 else apply_strategies(again, labels, config.tp, costs.hardware).graph

    sharded = f", split over {config.tp} ranks" if config.tp > 1 else ""
    what = f"{costs.graph.model} with {plural(config.size, 'sample')}{sharded}"
    region_times = timer.times(graph, config.tp, config.size, at_size, what)
    if region_times is None:
        return None
    return [(ops, times.forward_seconds, times.backward_seconds) for ops, times in region_times]

"""Plans by measured times: what looks best is measured, until what looks best has been."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

from autopar.api.planning.costs import MeasuredConfig, PlanCosts, apply, labels_of
from autopar.cost.ops.op_cost import MeasuredRegions
from autopar.errors import MeasuringWarning
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.units import plural
from autopar.measure.regions.region_times import RegionTimer
from autopar.solve.result.make_plan import Decision
from autopar.solve.space.candidates import Candidate

# What is measured of other meshes, and of each mesh with other microbatches: steps predicted to take at most that many
# times the best one's. What an unmeasured configuration borrows from another one is seldom further off.
CLOSE_MESH, CLOSE_SIZE = 1.1, 1.05
MAX_ROUNDS = 30

Retrace = Callable[[int], Graph]


def plan_with_measurements(
    costs: PlanCosts, search: Callable[..., Plan], timekeeper: RegionTimer, retrace: Retrace
) -> Plan | None:
    """The best plan by measured times.

    A configuration that has not been measured is priced with the factors of the measured one that is most like it. The
    chosen one is measured, then others that come close, and the search runs again with what that says.

    Args:
        costs: of the search, with prices of the cost model alone; they keep what is measured.
        search: as `autopar.solve.search`, of which ``listen`` and ``slack`` are open.
        retrace: the training graph with another number of samples.
    Returns:
        None where a measurement is missing and may not be made.
    Raises:
        WorkerError: a measurement failed.
    """
    heard: list[tuple[Sequence[Candidate], Decision]] = []
    for _ in range(MAX_ROUNDS):
        plan = search(listen=lambda candidates, decision: heard.append((candidates, decision)), slack=CLOSE_MESH - 1)
        missing = next((c for c in wanted(*heard.pop()) if c not in costs.factors), None)
        if missing is None:
            return plan
        times = measured(costs, missing, timekeeper, retrace)
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


def wanted(candidates: Sequence[Candidate], decision: Decision) -> Iterator[MeasuredConfig]:
    """What has to be known for a decision: its own configuration, and what may turn out to be faster."""
    yield MeasuredConfig(decision.problem.tp, decision.size, labels_of(decision.priced.strategies))
    fitting = sorted((c for c in candidates if c.step is not None), key=lambda c: c.seconds)
    meshes: set[Mesh] = set()
    for candidate in fitting:
        mesh = candidate.point.mesh
        limit = CLOSE_SIZE if mesh in meshes else CLOSE_MESH
        if candidate.seconds <= limit * fitting[0].seconds:
            yield MeasuredConfig(mesh.tp, candidate.decision.size, labels_of(candidate.priced.strategies))
        meshes.add(mesh)


def measured(
    costs: PlanCosts, wanted: MeasuredConfig, timekeeper: RegionTimer, retrace: Retrace
) -> MeasuredRegions | None:
    """Operations that were timed together, with their seconds; None where they may not be timed."""
    labels = dict(wanted.labels)
    graph = costs.measured(labels, wanted.tp).graph

    def at_size() -> Graph:
        again = retrace(wanted.size)
        return again if wanted.tp == 1 else apply(again, labels, wanted.tp, costs.hardware).graph

    sharded = f", split over {wanted.tp} ranks" if wanted.tp > 1 else ""
    what = f"{costs.graph.model} with {plural(wanted.size, 'sample')}{sharded}"
    found = timekeeper.times(graph, wanted.tp, wanted.size, at_size, what)
    return None if found is None else [(ops, times.forward_seconds, times.backward_seconds) for ops, times in found]

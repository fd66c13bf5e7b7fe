"""Plans by measured times: of all promising configurations, or of the regions on which the choice hangs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from autopar.api.planning.costs import MeasuredConfig, PlanCosts, apply_strategies, sorted_labels
from autopar.api.planning.error_band import narrowing
from autopar.api.planning.undecided import ConfigRegion, RegionPrices, measured_ops, rivals_of
from autopar.cost.ops.op_cost import MeasuredRegions
from autopar.errors import MeasuringWarning, TraceError, caller_level
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import Measuring
from autopar.ir.units import plural
from autopar.measure.regions.cache import RegionTimes
from autopar.measure.regions.region_times import RegionTimer, WantedRegion, cache_key, have_same_ops
from autopar.measure.regions.timed_regions import TimedRegion, timed_regions
from autopar.solve.cuts.step_time import Decision, Setting
from autopar.solve.result.alternatives import mesh_label
from autopar.solve.space.candidates import Candidate
from autopar.solve.space.points import point_of

# Largest ratio of a predicted step to the best one's at which a configuration is timed too: of other meshes, and of the
# same mesh with other microbatches. Factors borrowed from another configuration are seldom further off.
CLOSE_MESH, CLOSE_SIZE = 1.1, 1.05
MAX_ROUNDS = 30
MAX_CHOICES = 4  # plans by `plan_where_undecided`, each of which may ask for other regions

Retrace = Callable[[int], Graph]


def plan_with_measurements(costs: PlanCosts, search: Callable[..., Plan], timer: RegionTimer, retrace: Retrace) -> Plan:
    """The best plan by measured times.

    A configuration that has not been measured is priced with the factors of the nearest measured one. Each round times
    one configuration, that of the chosen plan first and then those of close candidates, and searches again.

    Args:
        costs: costs of the search, by the cost model alone; measurements are stored in it.
        search: `autopar.solve.search.search` with all arguments but ``listen`` and ``slack``.
        retrace: returns the training graph for a microbatch size.

    Raises:
        WorkerError: a measurement failed.
    """
    explored: list[tuple[Sequence[Candidate], Decision]] = []
    for _ in range(MAX_ROUNDS):
        plan = search(listen=lambda candidates, decision: explored.append((candidates, decision)), slack=CLOSE_MESH - 1)
        missing = next((c for c in configs_to_measure(*explored.pop()) if c not in costs.factors), None)
        if missing is None:
            return plan
        costs.use_measurements(missing, time_operations(costs, missing, timer, retrace))
    warnings.warn(
        f"After {MAX_ROUNDS} measurements of {plan.model.name} the search still finds others to make: this plan is "
        "priced by those that were most like it.",
        MeasuringWarning,
        stacklevel=caller_level(),
    )
    return plan


def configs_to_measure(candidates: Sequence[Candidate], decision: Decision) -> Iterator[MeasuredConfig]:
    """Configurations to time before a decision holds: its own, then those of candidates that may be faster."""
    yield MeasuredConfig.of(decision)
    fitting = sorted((c for c in candidates if c.step is not None), key=lambda c: c.seconds)
    meshes: set[Mesh] = set()
    for candidate in fitting:
        mesh = candidate.point.mesh
        limit = CLOSE_SIZE if mesh in meshes else CLOSE_MESH
        if candidate.seconds <= limit * fitting[0].seconds:
            yield MeasuredConfig(mesh.tensor_axes, candidate.decision.size, sorted_labels(candidate.priced.strategies))
        meshes.add(mesh)


def time_operations(costs: PlanCosts, config: MeasuredConfig, timer: RegionTimer, retrace: Retrace) -> MeasuredRegions:
    """Groups of operations that were timed together, with their seconds."""
    graph = costs.timed(config).graph
    sharded = f", split over {config.tp} ranks" if config.tp > 1 else ""
    what = f"{costs.graph.model} with {plural(config.size, 'sample')}{sharded}"
    samples = costs.graph.batch
    regions = tuple(timed_regions(graph))

    @cache
    def at_size() -> Sequence[TimedRegion]:
        sized = tuple(timed_regions(graph_at_size(costs, config, retrace))) if config.size != samples else regions
        assert have_same_ops(regions, sized), "the graph has other regions at another batch size"
        return sized

    keys = [cache_key(region, config.axes, samples, config.size) for region in regions]
    wanted = {
        key: WantedRegion(key, config.axes, config.size, lambda number=number: at_size()[number])
        for number, key in enumerate(keys)
    }
    return measured_ops(regions, keys, timer.times(list(wanted.values()), what))


def graph_at_size(costs: PlanCosts, config: MeasuredConfig, retrace: Retrace) -> Graph:
    """The graph of a configuration, traced with its samples."""
    again = retrace(config.size)
    if not config.axes:
        return again
    return apply_strategies(again, dict(config.labels), config.axes, costs.hardware).graph


def plan_where_undecided(
    setting: Setting, costs: PlanCosts, search: Callable[..., Plan], timer: RegionTimer, retrace: Retrace
) -> Plan:
    """The best plan, by measured times of the regions whose errors could turn the choice, as far as the budget allows.

    The first plan is by the cost model alone. Each further one uses the times of the regions that the one before hung
    on, and all times of it and its rivals that earlier plans have left. An operation without times in a configuration
    is priced with its factor in the nearest one in which it has times, and by the cost model if it has none at all.

    Args:
        setting, costs, search, retrace: as in `plan_with_measurements`.
    """
    explored: list[tuple[Sequence[Candidate], Decision]] = []

    def plan_again() -> Plan:
        return search(listen=lambda candidates, decision: explored.append((candidates, decision)), slack=CLOSE_MESH - 1)

    plan = first = plan_again()
    candidates, decision = explored[-1]
    before = mesh_label(point_of(decision))
    prices = RegionPrices(setting, costs, narrowing(setting, costs, decision))
    at_size = regions_at_size(costs, prices, retrace)
    configs: dict[MeasuredConfig, None] = {}
    regions: set[str] = set()
    times: dict[str, RegionTimes | None] = {}
    num_earlier, has_rivals = 0, bool(rivals_of(decision, candidates))
    for _ in range(MAX_CHOICES):
        choice = prices.undecided(decision, candidates)
        configs |= dict.fromkeys(choice.configs)
        unknown = dict.fromkeys(key for config in choice.configs for key in prices.keys(config) if key not in times)
        earlier = {key: known for key in unknown if (known := timer.cache.get(key)) is not None}
        wanted = [at_size(region) for region in choice.regions if region.key in unknown.keys() - earlier.keys()]
        made = {**earlier, **timer.times(wanted, costs.graph.model)}
        regions |= earlier.keys() | {region.key for region in choice.regions}
        if not any(made.values()):
            break
        num_earlier += len(earlier)
        times |= made
        for config in configs:
            costs.use_measurements(config, prices.measured(config, times))
        plan = plan_again()
        candidates, decision = explored[-1]
    if not times and not timer.budget_seconds:
        return plan
    after = mesh_label(point_of(decision))
    if after == before and plan.decision != first.decision:
        after += " with other cuts or shardings"
    measuring = Measuring(
        len(regions), sum(own is not None for own in times.values()), num_earlier,
        timer.spent_seconds, timer.budget_seconds, before, after, has_rivals,
    )  # fmt: skip
    return replace(plan, solver=replace(plan.solver, measuring=measuring))


def regions_at_size(costs: PlanCosts, prices: RegionPrices, retrace: Retrace) -> Callable[[ConfigRegion], WantedRegion]:
    """A function that returns a region to be timed. A configuration's graph is traced with its samples once; a model
    that cannot be traced with them, or has other operations then, is warned of."""

    @cache
    def traced(config: MeasuredConfig) -> Sequence[TimedRegion]:
        known = prices.timed_regions(config)
        if config.size == costs.graph.batch:
            return known
        problem = "has other operations than the traced model"
        try:
            found = tuple(timed_regions(graph_at_size(costs, config, retrace)))
        except TraceError as error:
            found, problem = (), f"cannot be traced ({error})"
        if have_same_ops(known, found):
            return found
        what = f"{costs.graph.model} with {plural(config.size, 'sample')} {problem}"
        warnings.warn(f"{what}: priced by the cost model.", MeasuringWarning, stacklevel=caller_level())
        return ()

    def at_size(region: ConfigRegion) -> WantedRegion:
        config, number = region.config, region.number
        return WantedRegion(region.key, config.axes, config.size, lambda: next(iter(traced(config)[number:]), None))

    return at_size

"""Regions whose errors may turn the choice between a plan and its rivals.

A region has one price wherever it runs with the same samples, so its error shifts two plans that run it equally long by
the same time. Prices of different regions count as wrong independently of each other, as those of one kind of operation
at other samples or on more ranks may be. A rival stays slower where the errors in the time that only one of the two
plans spends are smaller than the difference of their steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot

from autopar.api.planning.costs import MeasuredConfig, PlanCosts
from autopar.api.planning.error_band import kinds_of_ops, op_seconds, timed_ops_error
from autopar.cost.hardware.worse import worse
from autopar.cost.ops.collective_cost import is_collective
from autopar.cost.ops.op_cost import MeasuredRegions
from autopar.ir.mesh import Mesh
from autopar.ir.tensor_axes import TensorAxes
from autopar.measure.regions.cache import RegionTimes
from autopar.measure.regions.region_times import cache_key
from autopar.measure.regions.timed_regions import TimedRegion, timed_regions
from autopar.solve.cuts.step_time import Decision, Setting, step_time
from autopar.solve.shardings.solve import least_passes
from autopar.solve.space.candidates import Candidate
from autopar.solve.space.points import point_of

MAX_RIVALS = 8  # plans that are compared with the chosen one: the fastest of so many meshes and microbatches
MEASURABLE = ("memory", "launch")  # parts of a step, besides the kinds of operations, that timing a region replaces


@dataclass(frozen=True)
class ConfigRegion:
    """Equal regions of a model in one configuration.

    Args:
        key: name in the cache of measured times.
        number: of the first of them, in the order of `timed_regions`.
        seconds: of one microbatch, forward and backward, without collectives.
        error_seconds: by which that may be off.
    """

    key: str
    config: MeasuredConfig
    number: int
    seconds: float
    error_seconds: float

    @property
    def error(self) -> float:
        """Relative error."""
        return self.error_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class PlanLoad:
    """Regions of a plan, and how many seconds of its step each takes.

    Args:
        seconds: of a step by the region's key.
    """

    step_seconds: float
    regions: Mapping[str, ConfigRegion]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Undecided:
    """The choice between a plan and its rivals: regions in the order in which they are timed, none where no error can
    turn the choice; and the configurations of all of these plans."""

    regions: Sequence[ConfigRegion]
    configs: Collection[MeasuredConfig]


def undecided(winner: PlanLoad, rivals: Iterable[PlanLoad]) -> Sequence[ConfigRegion]:
    """Regions of a plan and of the rivals that may be faster, in the order in which they are timed.

    Regions come in the order of their error in the time in which the plan and these rivals differ, summed over the
    rivals; then of their error in the plan's step. The list is empty where no rival may be faster.
    """
    regions: dict[str, ConfigRegion] = {}
    swings: dict[str, float] = {}
    for rival in rivals:
        known = {**winner.regions, **rival.regions}
        shifts = {
            key: region.error * (rival.seconds.get(key, 0.0) - winner.seconds.get(key, 0.0))
            for key, region in known.items()
        }
        longer, shorter = (sum(max(0.0, sign * shift) for shift in shifts.values()) for sign in (1, -1))
        swing = hypot(longer, shorter)
        if not swing or swing < rival.step_seconds - winner.step_seconds:
            continue
        regions |= known
        for key, shift in shifts.items():
            swings[key] = swings.get(key, 0.0) + abs(shift)
    own = {key: region.error * winner.seconds.get(key, 0.0) for key, region in regions.items()}
    return sorted(regions.values(), key=lambda region: (-swings[region.key], -own[region.key]))


def rivals_of(decision: Decision, candidates: Iterable[Candidate]) -> Sequence[Decision]:
    """The fastest other plan of each mesh and microbatch, fastest first."""
    chosen, fastest = point_of(decision), dict[tuple[Mesh, int], Candidate]()
    fitting = (c for c in candidates if c.step is not None and c.point != chosen)
    for candidate in sorted(fitting, key=lambda c: c.seconds):
        fastest.setdefault((candidate.point.mesh, candidate.problem.cost.batch), candidate)
    return [candidate.decision for candidate in list(fastest.values())[:MAX_RIVALS]]


class RegionPrices:
    """Prices of a model's regions, and the errors of these prices.

    Args:
        narrowing: of `autopar.api.planning.error_band.narrowing`.
    """

    def __init__(self, setting: Setting, costs: PlanCosts, narrowing: Mapping[str, float]) -> None:
        self.setting, self.costs, self.narrowing = setting, costs, narrowing
        self.cut: dict[tuple[TensorAxes, tuple[tuple[str, str], ...]], Sequence[TimedRegion]] = {}

    def undecided(self, decision: Decision, candidates: Iterable[Candidate]) -> Undecided:
        """The choice between a decision and the candidates, by the present prices."""
        priced: dict[MeasuredConfig, Mapping[str, ConfigRegion]] = {}

        def load(of: Decision) -> PlanLoad:
            config, problem = MeasuredConfig.of(of), of.problem
            if config not in priced:
                priced[config] = self.regions(config)
            microbatches = self.setting.constraints.batch / problem.replicas.dp / of.size
            passes = least_passes(microbatches, problem.pp, problem.chunks)
            seconds = {key: passes * region.seconds for key, region in priced[config].items()}
            return PlanLoad(step_time(self.setting, problem, of.stage_of).seconds, priced[config], seconds)

        regions = undecided(load(decision), [load(rival) for rival in rivals_of(decision, candidates)])
        return Undecided(regions, priced.keys())

    def regions(self, config: MeasuredConfig) -> Mapping[str, ConfigRegion]:
        """Regions of a configuration by key."""
        costs = self.costs
        own, factors = costs.timed(config), costs.factors_near(config)
        timed = costs.factors.get(config, {})
        before = op_seconds(own, costs.hardware, config, factors)
        worsened = {
            part: op_seconds(own, worse(costs.hardware, part), config, factors)
            for part in (*kinds_of_ops(own), *MEASURABLE)
        }
        collectives = {op.name for op in own.graph.ops if is_collective(op)}
        found: dict[str, ConfigRegion] = {}
        for number, (key, region) in enumerate(zip(self.keys(config), self.timed_regions(config), strict=True)):
            ops = [name for name in region.ops if name not in collectives]
            seconds = sum(before[name] for name in ops)
            if all(name in timed for name in ops):
                error_seconds = timed_ops_error(costs.hardware) * seconds
            else:
                error_seconds = hypot(
                    *(
                        self.narrowing.get(part, 1.0) * (sum(after[name] for name in ops) - seconds)
                        for part, after in worsened.items()
                    )
                )
            equal = found.get(key, ConfigRegion(key, config, number, 0.0, 0.0))
            found[key] = ConfigRegion(
                key, config, equal.number, equal.seconds + seconds, equal.error_seconds + error_seconds
            )
        return found

    def measured(self, config: MeasuredConfig, times: Mapping[str, RegionTimes | None]) -> MeasuredRegions:
        """As `measured_ops`, of a configuration's regions."""
        return measured_ops(self.timed_regions(config), self.keys(config), times)

    def keys(self, config: MeasuredConfig) -> Sequence[str]:
        """Names in the cache of a configuration's regions, in order."""
        traced = self.costs.graph.batch
        return [cache_key(region, config.axes, traced, config.size) for region in self.timed_regions(config)]

    def timed_regions(self, config: MeasuredConfig) -> Sequence[TimedRegion]:
        """Regions of a configuration, in order, with the samples of the traced graph."""
        key = config.axes, config.labels
        if key not in self.cut:
            self.cut[key] = tuple(timed_regions(self.costs.timed(config).graph))
        return self.cut[key]


def measured_ops(
    regions: Sequence[TimedRegion], keys: Sequence[str], times: Mapping[str, RegionTimes | None]
) -> MeasuredRegions:
    """Operations of those regions that have times, with their seconds.

    Args:
        keys: of the regions.
        times: by key.
    """
    found = ((region.ops, times.get(key)) for region, key in zip(regions, keys, strict=True))
    return [(ops, own.forward_seconds, own.backward_seconds) for ops, own in found if own is not None]

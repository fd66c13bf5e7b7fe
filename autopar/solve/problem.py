"""The question put to the solver: a priced model, the stages to fill, and what bounds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.hardware import Link
from autopar.ir import Balance, CostGraph, SolverInfo

# Weight of the traffic against the largest load when stages are balanced by something other than time: small enough to
# decide between equal loads only, large enough to be above the solver's tolerances.
TIE_BREAK = 1e-3


@dataclass(frozen=True)
class CutProblem:
    """Which stage runs which group of ``cost``.

    ``boundary[s]`` is the link from stage s to s + 1 and ``in_flight[s]`` the number of microbatches whose activations
    stage s holds at most. ``pins`` fixes groups to stages. ``gap`` is the relative distance from the optimum at which
    the solver may stop.
    """

    cost: CostGraph
    stages: int
    microbatches: int
    capacity_bytes: int | None
    in_flight: tuple[int, ...]
    boundary: tuple[Link, ...]
    balance: Balance = "time"
    pins: Mapping[int, int] = field(default_factory=dict)
    time_limit_seconds: float = 60.0
    gap: float = 1e-3

    def __post_init__(self) -> None:
        assert self.stages >= 1 and self.microbatches >= 1
        assert len(self.in_flight) == self.stages, "one in_flight per stage"
        assert len(self.boundary) == self.stages - 1, "one link between neighbouring stages"
        assert all(0 <= group < self.cost.loss for group in self.pins), "a pinned group does not exist"
        assert all(0 <= stage < self.stages for stage in self.pins.values()), "a pin's stage does not exist"


@dataclass(frozen=True)
class Cuts:
    """The stage of every group.

    ``objective_seconds`` is the solver's objective at these cuts and ``bound_seconds`` a proven lower bound of it: the
    step time for balance "time", otherwise the largest load, expressed as its share of the compute time.
    ``stage_seconds`` is always the time of one microbatch on each stage, its transfers to the next one included.
    """

    stage_of: tuple[int, ...]
    objective_seconds: float
    bound_seconds: float
    stage_seconds: tuple[float, ...]
    solver: SolverInfo


@dataclass(frozen=True)
class Objective:
    """Coefficients of what is minimised.

    With load_s the balanced quantity of stage s and x_s the transfer time of the boundary behind it:
    t_s = load_s + transfer · x_s, and the value is slowest · max t_s + total · Σ t_s + traffic · Σ x_s
    + optimizer · max (optimizer seconds).
    """

    slowest: float
    total: float
    transfer: float
    traffic: float
    optimizer: float


def objective_of(problem: CutProblem) -> Objective:
    """What the problem's balance asks to minimise.

    Source: a 1F1B or GPipe step of m microbatches takes (m − 1) · max t + Σ t.
    """
    if problem.balance == "time":
        return Objective(slowest=problem.microbatches - 1, total=1.0, transfer=1.0, traffic=0.0, optimizer=1.0)
    return Objective(slowest=1.0, total=0.0, transfer=0.0, traffic=TIE_BREAK, optimizer=0.0)


def group_loads(cost: CostGraph, balance: Balance) -> tuple[float, ...]:
    """What each group adds to its stage's load, in seconds.

    Parameters, FLOPs and layer counts are scaled so that all loads sum to the compute time of a microbatch; a
    parameter that several groups share counts for the first of them.
    """
    seconds = tuple(group.seconds for group in cost.groups)
    if balance == "time":
        return seconds
    raw = [0.0] * len(cost.groups)
    if balance == "flops":
        raw = [group.flops for group in cost.groups]
    for holding in cost.weights:
        first = min(holding.groups)
        if balance == "params":
            raw[first] += holding.numel
        elif balance == "uniform" and holding.numel:
            raw[first] = 1.0
    scale = (sum(seconds) or 1.0) / (sum(raw) or 1.0)
    return tuple(scale * r for r in raw)

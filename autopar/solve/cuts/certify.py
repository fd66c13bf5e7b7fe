"""A lower bound of the simulated step over all contiguous cuts of one order, and the cuts that reach it.

A simulated step is the longest of many paths of dependencies, and each is linear in the stages' times. The program
starts with few of these rows; those that its solution violates are added, first to its relaxation and then to the whole
program, until the step that it predicts is the simulated one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from autopar.ir.microbatches import microbatch_factors
from autopar.schedule.simulate import Pipelined, critical_path
from autopar.solve.backend import SolverName, value_of
from autopar.solve.cuts.buffers import incoming_bytes
from autopar.solve.cuts.evaluate import floor_seconds, fullest_bytes, objective_seconds, rank_costs, stage_costs
from autopar.solve.cuts.merge import Merged
from autopar.solve.cuts.problem import CutProblem, objective_of
from autopar.solve.cuts.program import (
    CLOSE,
    Numbers,
    Quantity,
    Windows,
    cut_program,
    freed_per_second,
    pinned_windows,
)
from autopar.solve.cuts.step_time import Setting, network_between, ranks_between_nodes, step_time_of

# Solutions that are tried one after the other, each with the rows that the last one violates.
MAX_ROUNDS, MAX_TRIED = 60, 30
# Rounds in which the bound of a relaxation has to rise by half of the gap.
PATIENCE = 5
# Windows are narrowed again where that left no more than this share of them, of so many stages at most: two programs
# per stage.
SHRUNK, MAX_NARROWED = 0.7, 16
ROUNDING = 1e-6
# Candidates of the largest program that is relaxed, and solved whole with one stage a rank and with several. An even
# share of the work bounds larger ones. Interleaved stages leave wide windows: 8 stages of 150 groups prove nothing in
# 10 s that the relaxation does not.
MAX_RELAXED, MAX_SINGLE, MAX_INTERLEAVED = 20_000, 1500, 100

# Weights of a row, and the seconds that are free of it.
PortRow = tuple[Numbers, float]


def cuts_seconds(setting: Setting, problem: CutProblem, stage_of: Sequence[int]) -> float:
    """The value that is minimised, at given cuts: the simulated step, or the largest load for other balances. Infinite
    where a rank is too full."""
    costs = stage_costs(problem, stage_of)
    if problem.capacity_bytes is not None and fullest_bytes(problem, costs) > problem.capacity_bytes:
        return float("inf")
    if problem.balance != "time":
        return objective_seconds(problem, costs)
    return step_time_of(setting, problem, stage_of, costs).seconds


@dataclass
class Certificate:
    """Best cuts known, and a bound that no contiguous cuts of this order undercut.

    Args:
        seconds: of the best cuts known of any order; infinite without any.
        stage_of: these cuts, if they were found here.
        bound_seconds: infinite where it is proven that there are no cuts.
    """

    seconds: float
    stage_of: tuple[int, ...] | None = None
    bound_seconds: float = 0.0


def certify(
    setting: Setting,
    traced: Merged,
    merged: Merged,
    seconds: float,
    solver: SolverName,
    time_limit_seconds: float,
) -> Certificate:
    """The best cuts that are contiguous in one order of the groups, with a bound.

    Args:
        traced, merged: the problem in the order in which it runs, and in the one that is searched.
        seconds: of the best cuts known; only better ones are looked for.
    """
    found = Certificate(seconds)
    search = Search(setting, traced, merged, found, solver, monotonic() + time_limit_seconds)
    windows = pinned_windows(merged.problem)
    search.prove(search.even_share_seconds)
    while windows is not None and search.relax(windows):
        narrower = search.narrow(windows)
        if narrower is not None and width(narrower) >= SHRUNK * width(windows):
            if width(narrower) <= (MAX_SINGLE if merged.problem.chunks == 1 else MAX_INTERLEAVED):
                search.solve()
            return found
        windows = narrower
    if windows is None:
        search.prove(float("inf"))
    return found


def width(windows: Windows) -> int:
    """Number of candidates for where stages begin, besides one for each."""
    return sum(windows[1]) - sum(windows[0])


@dataclass
class Search:
    """State of `certify`. ``limit_seconds``: what the windows leave out costs at least that. ``ports`` are rows of the
    program, ``other_ports`` those that it has not taken."""

    setting: Setting
    traced: Merged
    merged: Merged
    found: Certificate
    solver: SolverName
    end: float
    rows: dict[tuple[str, frozenset[tuple[tuple[int, Quantity], float]]], Numbers] = field(default_factory=dict)
    limit_seconds: float = float("inf")

    def __post_init__(self) -> None:
        problem = self.problem = self.merged.problem
        stages = range(problem.stages)
        self.unit = sum(group.seconds for group in problem.cost.groups) * problem.microbatches / problem.pp or 1.0
        self.sizes = microbatch_factors(self.setting.constraints.batch // problem.replicas.dp, problem.microbatches)
        self.ports: list[PortRow] = []
        self.other_ports = port_rows(self.setting, problem, sum(self.sizes))
        if problem.balance != "time":
            for s in stages:
                self.keep("pipeline", {(s, Quantity.LOAD): 1.0})
        else:
            for position in range(problem.pp):  # the path through all actions of each rank
                seconds = [1.0 + problem.stages * (problem.placement.position(s) == position) for s in stages]
                self.keep("pipeline", self.path(seconds, seconds, {}))
                self.keep("tail", self.tail(position))

    def start(self, windows: Windows) -> bool:
        """Make the program of some windows; whether there is one."""
        made = cut_program(self.problem, self.unit, windows)
        if made is None:
            return False
        self.program = made
        for (kind, _), weights in self.rows.items():
            made.add(kind, weights)
        for weights, free in self.ports:
            made.add("pipeline", weights, free)
        traffic = objective_of(self.problem).traffic
        base = made.weighted({(s, Quantity.TRAFFIC): traffic for s in range(self.problem.stages - 1)})
        self.objective = made.pipeline + made.tail + base
        made.lp.setObjective(self.objective)
        return True

    @property
    def even_share_seconds(self) -> float:
        """Bound of the step: every rank does its share of the work, and one microbatch passes all stages. Of other
        balances: an even share of the load."""
        cost, pp = self.problem.cost, self.problem.pp
        if self.problem.balance != "time":
            return floor_seconds(self.problem)
        work, update = sum(g.seconds for g in cost.groups), sum(w.optimizer_seconds for w in cost.weights)
        return max(sum(self.sizes) / pp, max(self.sizes)) * work + update / pp

    @property
    def closed(self) -> bool:
        """Whether the bound is within the problem's gap of the best cuts."""
        return self.found.bound_seconds >= (1 - self.problem.gap) * self.found.seconds

    @property
    def left_seconds(self) -> float:
        """Seconds until the time limit."""
        return self.end - monotonic()

    # -- rows ------------------------------------------------------------------------------------------------------

    def keep(self, kind: str, weights: Numbers) -> bool:
        """Take a row for every program, unless it was taken before."""
        key = kind, frozenset(weights.items())
        known = key in self.rows or not weights
        if not known:
            self.rows[key] = weights
        return not known

    def add(self, kind: str, weights: Numbers) -> bool:
        """Take a row, for this program too."""
        if new := self.keep(kind, weights):
            self.program.add(kind, weights)
        return new

    def path(
        self, forward: Sequence[float], backward: Sequence[float], transfers: dict[tuple[int, int], float]
    ) -> Numbers:
        """Weights of the critical path under the given durations."""
        problem = self.problem
        if problem.is_split:
            return self.busiest_rank(forward, backward, transfers)
        path = critical_path(Pipelined(problem.schedule, problem.placement), forward, backward, transfers, self.sizes)
        weights: dict[tuple[int, Quantity], float] = {}
        for s in range(problem.stages):
            weights[s, Quantity.FORWARD], weights[s, Quantity.BACKWARD] = path.forward[s], path.backward[s]
            if problem.may_recompute:
                weights[s, Quantity.AGAIN] = path.backward[s]
            if s < problem.stages - 1:
                weights[s, Quantity.SENT] = path.transfers.get((s, s + 1), 0.0)
                weights[s, Quantity.RETURNED] = path.transfers.get((s + 1, s), 0.0)
        return weights

    def busiest_rank(
        self, forward: Sequence[float], backward: Sequence[float], transfers: dict[tuple[int, int], float]
    ) -> Numbers:
        """Weights of a bound that holds in any order of split backwards: the rank that is busy longest, after the first
        microbatch has passed the stages before its first one."""
        problem, first, total = self.problem, self.sizes[0], sum(self.sizes)
        rows = list[dict[tuple[int, Quantity], float]]()
        for position in range(problem.pp):
            row = dict[tuple[int, Quantity], float]()
            for s in range(position):
                row[s, Quantity.FORWARD], row[s, Quantity.SENT] = first, first
            for s in problem.stages_at(position):
                row[s, Quantity.FORWARD] = row.get((s, Quantity.FORWARD), 0.0) + total
                row[s, Quantity.BACKWARD] = total
                if problem.may_recompute:
                    row[s, Quantity.AGAIN] = total
            rows.append(row)

        def seconds(row: Numbers) -> float:
            known = {Quantity.FORWARD: forward, Quantity.BACKWARD: backward}
            sent = {Quantity.SENT: [transfers.get((s, s + 1), 0.0) for s in range(problem.stages)]}
            return sum(w * (known | sent)[q][s] for (s, q), w in row.items() if q is not Quantity.AGAIN)

        return max(rows, key=seconds)

    def tail(self, position: int, reduce: bool = False, gather: bool = False) -> Numbers:
        """Weights of the seconds after the pipeline.

        Args:
            reduce, gather: count the part of that collective that the passes do not hide.
        """
        weights: dict[tuple[int, Quantity], float] = {}
        for s in self.problem.stages_at(position):
            weights[s, Quantity.UPDATE] = 1.0
            if not (reduce or gather):
                weights[s, Quantity.EXPOSED] = 1.0
            if reduce:
                weights[s, Quantity.REDUCE] = 1.0
                if self.problem.may_recompute:
                    weights[s, Quantity.AGAIN] = -1.0
            if gather:
                weights[s, Quantity.GATHER] = 1.0
        return weights

    def memory(self, position: int, held: Sequence[int]) -> Numbers:
        """Memory of ranks that hold so many microbatches of each of their stages, without working sets; what a stage
        recomputes frees some.

        Error: high by weights that two stages of a rank read.
        """
        problem, weights = self.problem, dict[tuple[int, Quantity], float]()
        freed = freed_per_second(problem) if problem.may_recompute else 0.0
        capacity = float(problem.capacity_bytes or 1)
        for s, n in zip(problem.stages_at(position), held, strict=True):
            weights[s, Quantity.STANDING], weights[s, Quantity.HELD] = 1.0, float(n)
            if freed == float("inf"):
                return {}
            if freed:
                weights[s, Quantity.AGAIN] = -n * freed * self.unit / capacity
        return weights

    def add_violated(self, amounts: Numbers) -> bool:
        """Add the rows that the amounts of a solution violate; whether there are any."""
        problem, pipeline, tail = self.problem, self.program.pipeline, self.program.tail
        stages, added = range(problem.stages), False

        def exceeds(weights: Numbers, limit: float) -> bool:
            return sum(w * amounts.get(key, 0.0) for key, w in weights.items()) > limit

        if problem.balance == "time":
            seconds, after = (value_of(part) * self.unit for part in (pipeline, tail))
            slack = CLOSE * (seconds + after)
            forward = [max(0.0, amounts[s, Quantity.FORWARD]) for s in stages]
            backward = [max(0.0, amounts[s, Quantity.BACKWARD] + amounts.get((s, Quantity.AGAIN), 0.0)) for s in stages]
            transfers = {(s, s + 1): max(0.0, amounts[s, Quantity.SENT]) for s in stages[:-1]}
            transfers |= {(s + 1, s): max(0.0, amounts[s, Quantity.RETURNED]) for s in stages[:-1]}
            if exceeds(weights := self.path(forward, backward, transfers), seconds + slack):
                added |= self.add("pipeline", weights)
            for position in range(problem.pp):
                own = problem.stages_at(position)
                again = sum(amounts.get((s, Quantity.AGAIN), 0.0) for s in own)
                reduce = sum(amounts[s, Quantity.REDUCE] for s in own) > again
                gather = sum(amounts[s, Quantity.GATHER] for s in own) > 0
                if (reduce or gather) and exceeds(weights := self.tail(position, reduce, gather), after + slack):
                    added |= self.add("tail", weights)
        if problem.may_recompute:
            for s in stages:
                added |= self.program.recompute(s)
        if problem.chunks > 1 and problem.capacity_bytes is not None:
            for position in range(problem.pp):
                for held in problem.in_flight_profiles[position]:
                    weights = self.memory(position, held)
                    if exceeds(self.in_bytes(weights), problem.capacity_bytes * (1 + CLOSE)):
                        added |= self.add("memory", weights)
        return added

    def add_ports(self, amounts: Numbers) -> bool:
        """Add the rows of ports that the amounts of a solution violate; whether there are any. They come when other
        rows are no help: under them the bound does not rise before other paths are longer."""
        limit = value_of(self.program.pipeline) * self.unit * (1 + CLOSE)
        found = [row for row in self.other_ports if sum(w * amounts[key] for key, w in row[0].items()) - row[1] > limit]
        for weights, free in found:
            self.program.add("pipeline", weights, free)
        self.ports += found
        self.other_ports = [row for row in self.other_ports if row not in found]
        return bool(found)

    def in_bytes(self, weights: Numbers) -> Numbers:
        """Weights of a memory row, for seconds and bytes instead of their units."""
        scale = (self.problem.capacity_bytes or 1) / self.unit
        return {key: w * (1.0 if key[1].is_bytes else scale) for key, w in weights.items()}

    # -- solutions -------------------------------------------------------------------------------------------------

    def prove(self, seconds: float) -> None:
        """Take in a bound of what the windows leave."""
        self.found.bound_seconds = max(self.found.bound_seconds, min(seconds, self.limit_seconds))

    def relax(self, windows: Windows) -> bool:
        """Add rows while the relaxation's solution violates any; whether better cuts may be left, and time."""
        if width(windows) > MAX_RELAXED or self.left_seconds <= 0:
            return False
        if not self.start(windows):
            self.prove(float("inf"))
            return False
        bounds: list[float] = []
        for _ in range(MAX_ROUNDS):
            outcome = self.program.solve(False, self.solver, 0.0, max(1.0, self.left_seconds))
            self.prove(float("inf") if outcome.infeasible else outcome.bound * self.unit)
            if self.closed or not outcome.found or self.left_seconds <= 0:
                return False
            bounds.append(outcome.bound)
            stalls = len(bounds) > PATIENCE and bounds[-1] <= (1 + self.problem.gap / 2) * bounds[-1 - PATIENCE]
            amounts = self.program.solved_amounts()
            if (stalls or not self.add_violated(amounts)) and not self.add_ports(amounts):
                break
        return True

    def limit(self) -> None:
        """Ask for cuts that are better than the best known by more than the gap."""
        self.limit_seconds = min(self.limit_seconds, (1 - self.problem.gap) * self.found.seconds)
        if self.limit_seconds < float("inf"):
            self.program.lp.addConstraint(self.objective <= self.limit_seconds / self.unit)

    def narrow(self, windows: Windows) -> Windows | None:
        """Where stages begin in any better cuts, by the relaxation; None if there are none."""
        program, (first, last) = self.program, ([*windows[0]], [*windows[1]])
        self.limit()
        if self.limit_seconds == float("inf") or self.problem.stages > MAX_NARROWED:
            return windows
        for s in range(1, self.problem.stages):
            for bound, sign in ((first, 1), (last, -1)):
                program.lp.setObjective(sign * program.begin(s))
                outcome = program.solve(False, self.solver, 0.0, max(1.0, self.left_seconds))
                if outcome.infeasible:
                    return None
                if outcome.found:
                    begin = sign * value_of(program.lp.objective)
                    bound[s] = math.ceil(begin - ROUNDING) if sign > 0 else math.floor(begin + ROUNDING)
        program.lp.setObjective(self.objective)
        return (first, last) if all(low <= high for low, high in zip(first, last)) else None

    def solve(self) -> None:
        """Try the best whole solutions until none can be better than the best cuts known by more than the gap."""
        program = self.program
        for _ in range(MAX_TRIED):
            if self.left_seconds <= 0:
                return
            outcome = program.solve(True, self.solver, self.problem.gap / 2, self.left_seconds)
            self.prove(float("inf") if outcome.infeasible else outcome.bound * self.unit)
            if not outcome.found:
                return
            units = program.solved_units()
            stage_of = self.merged.expand(units)
            seconds = cuts_seconds(self.setting, self.traced.problem, self.traced.units(stage_of))
            if seconds < self.found.seconds:
                self.found.seconds, self.found.stage_of = seconds, stage_of
            amounts = program.solved_amounts()
            if not self.add_violated(amounts):
                self.add_ports(amounts)
            program.refuse(units, range(self.problem.stages) if seconds < float("inf") else self.too_full(stage_of))
            if self.closed:
                return
            self.limit()

    def too_full(self, stage_of: Sequence[int]) -> set[int]:
        """Stages of which cuts are over the capacity: those of the fullest rank, and of the one that receives most, as
        places for messages are as large on every rank."""
        problem, units = self.traced.problem, self.traced.units(stage_of)
        ranks, incoming = rank_costs(problem, stage_costs(problem, units)), incoming_bytes(problem, units)
        fullest = max(range(problem.pp), key=lambda p: ranks[p].memory_bytes)
        receives = max(range(problem.pp), key=lambda p: sum(incoming[s] for s in problem.stages_at(p)))
        return {*problem.stages_at(fullest), *(problem.stages_at(receives) if problem.places else ())}


def port_rows(setting: Setting, problem: CutProblem, microbatches: float) -> list[PortRow]:
    """Weights of the seconds for which the ports of each node are in use in a direction by messages between stages, and
    the latencies in them, in which they are not."""
    hardware, rows = setting.hardware, dict[tuple[int, int], dict[tuple[int, Quantity], float]]()
    if (network := network_between(hardware, problem.mesh)) is None or problem.balance != "time":
        return []
    for s, link in enumerate(problem.boundary):
        # What one sender takes of a node's ports, by what its message takes.
        share = microbatches * link.bytes_per_second / (network.ports * network.port.bytes_per_second)
        for src, dst, quantity in ((s, s + 1, Quantity.SENT), (s + 1, s, Quantity.RETURNED)):
            for direction, ranks in enumerate(ranks_between_nodes(hardware, problem, src, dst)):
                for node, count in Counter((ranks // hardware.devices_per_node).tolist()).items():
                    rows.setdefault((node, direction), {})[s, quantity] = count * share
    return [(row, sum(w * problem.boundary[s].latency_seconds for (s, _), w in row.items())) for row in rows.values()]

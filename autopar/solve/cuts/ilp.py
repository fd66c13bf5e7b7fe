"""The integer program: variables, one function per family of constraints, and two objectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import pulp

from autopar.ir.cost_graph import ResidentTensor, TensorEdge
from autopar.solve.cuts.problem import CutProblem, group_loads, objective_of, update_seconds
from autopar.solve.cuts.ranges import Ranges, ancestors

Expr = pulp.LpAffineExpression


@dataclass(frozen=True)
class Program:
    """The program under construction, and its decision variables.

    ``before[v, s]`` is 1 where group v is on a stage up to s; only pairs that the ranges leave open are in it. Times
    are counted in ``seconds`` and memory in ``num_bytes``, so that the solver sees numbers near one. ``one`` is fixed
    at 1 and carries every constant: PuLP passes HiGHS no constant of the objective, and rows without a variable
    are treated differently by different solvers.
    """

    problem: CutProblem
    ranges: Ranges
    lp: pulp.LpProblem
    one: pulp.LpVariable
    before: Mapping[tuple[int, int], pulp.LpVariable]
    seconds: float
    num_bytes: float

    def upto(self, group: int, stage: int) -> Expr:
        """y[v, s]: 1 if the group is on a stage up to this one."""
        if (group, stage) in self.before:
            return Expr(self.before[group, stage])
        return Expr(self.one if stage >= self.ranges.latest[group] else None)

    def inside(self, group: int, stage: int) -> Expr:
        """w[v, s] = y[v, s] − y[v, s−1]: 1 if the group is on the stage."""
        return self.upto(group, stage) - self.upto(group, stage - 1)

    def candidates(self, stage: int) -> list[int]:
        """Groups that can be on the stage."""
        return [v for v in range(len(self.problem.cost.groups)) if self.ranges.can_be_on(v, stage)]

    def variable(self, name: str, upper: float | None = None) -> Expr:
        """A new continuous variable from 0."""
        return Expr(self.lp.add_variable(name, 0, upper))

    def require(self, expression: Expr) -> None:
        """Add expression <= 0."""
        if len(expression):
            self.lp.addConstraint(expression <= 0)


def new_program(problem: CutProblem, ranges: Ranges, num_bytes: float) -> Program:
    """A program with its binaries and the constraints that every assignment obeys: order and occupancy."""
    lp = pulp.LpProblem("cuts")
    before = {
        (v, s): lp.add_variable(f"y_{v}_{s}", cat="Binary")
        for v in range(len(problem.cost.groups))
        for s in range(ranges.earliest[v], ranges.latest[v])
    }
    seconds = sum(group_loads(problem.cost, problem.balance)) / problem.stages or 1.0
    one = lp.add_variable("one", 1, 1)
    program = Program(problem, ranges, lp, one, before, seconds, num_bytes)
    add_monotone(program)
    add_order(program)
    add_occupancy(program)
    return program


def add_monotone(program: Program) -> None:
    """y[v, s] <= y[v, s+1]."""
    for v, s in program.before:
        if (v, s + 1) in program.before:
            program.require(program.upto(v, s) - program.upto(v, s + 1))


def add_order(program: Program) -> None:
    """y[consumer, s] <= y[producer, s] for every flow: nothing is read before the stage that makes it."""
    for producer, consumer in sorted({(f.producer, c) for f in program.problem.cost.edges for c in f.consumers}):
        for s in range(program.problem.stages - 1):
            if (consumer, s) in program.before or (producer, s) in program.before:
                program.require(program.upto(consumer, s) - program.upto(producer, s))


def add_occupancy(program: Program) -> None:
    """Σ_v w[v, s] >= 1 over the groups that have operations."""
    for s in range(program.problem.stages):
        real = (v for v in program.candidates(s) if v != program.problem.cost.loss)
        program.require(program.one - pulp.lpSum(program.inside(v, s) for v in real))


def crossings(program: Program) -> list[list[tuple[TensorEdge, Expr]]]:
    """For each boundary s the flows that may cross it, with x[f, s] >= y[producer, s] − y[consumer, s].

    x is 1 if the producer is on a stage up to s and a consumer on a later one; its cost makes it no larger.
    """
    cost, ranges = program.problem.cost, program.ranges
    above = ancestors(cost)
    found: list[list[tuple[TensorEdge, Expr]]] = [[] for _ in program.problem.boundary]
    for number, flow in enumerate(cost.edges):
        # A consumer that feeds another one is never later than it.
        ends = [c for c in flow.consumers if not any(above[d, c] for d in flow.consumers)]
        if not flow.num_bytes:
            continue
        for s in range(ranges.earliest[flow.producer], max(ranges.latest[c] for c in ends)):
            if ranges.latest[flow.producer] <= s < max(ranges.earliest[c] for c in ends):
                found[s].append((flow, Expr(program.one)))
                continue
            crosses = program.variable(f"x_{number}_{s}", 1)
            for c in ends:
                program.require(program.upto(flow.producer, s) - program.upto(c, s) - crosses)
            found[s].append((flow, crosses))
    return found


def transfer_times(program: Program, crossing: Sequence[Sequence[tuple[TensorEdge, Expr]]]) -> list[Expr]:
    """Time of both transfers over each boundary; zero after the last stage.

    Σ_f x[f, s] · bytes/β + α · a[s] forward, the same over flows with a gradient backward; a[s] >= x[f, s], and
    a[s] = 1 where the flows connect all groups: then two non-empty stages always have a flow between them. The solver
    does not see that by itself (ViT-like chain, 8 stages, 1 microbatch: 7.7 s without, 2.3 s with).
    """
    sent = [flow for flow in program.problem.cost.edges if flow.num_bytes]
    certain = {"F": _connect(program, sent), "B": _connect(program, [flow for flow in sent if flow.requires_grad])}
    times = []
    for s, link in enumerate(program.problem.boundary):
        time = Expr()
        for way in ("F", "B"):
            flows = [(flow, x) for flow, x in crossing[s] if way == "F" or flow.requires_grad]
            anything = Expr(program.one) if certain[way] else program.variable(f"a{way}_{s}", 1)
            for _, x in flows if not certain[way] else ():
                program.require(x - anything)
            time += link.latency_seconds / program.seconds * anything
            time += pulp.lpSum(flow.num_bytes / link.bytes_per_second / program.seconds * x for flow, x in flows)
        times.append(time)
    return [*times, Expr()]


def _connect(program: Program, flows: Sequence[TensorEdge]) -> bool:
    """Whether the flows connect all groups, whatever their direction."""
    graph = nx.Graph((f.producer, c) for f in flows for c in f.consumers)
    return len(graph) == len(program.problem.cost.groups) and nx.is_connected(graph)


def resident_vars(
    program: Program, prefix: str, holdings: Iterable[ResidentTensor]
) -> list[list[tuple[ResidentTensor, Expr]]]:
    """For each stage the holdings it may have to keep, with h[k, s] >= w[v, s] for every group v of holding k."""
    found: list[list[tuple[ResidentTensor, Expr]]] = [[] for _ in range(program.problem.stages)]
    for number, holding in enumerate(holdings):
        for s in range(program.problem.stages):
            possible = [v for v in holding.groups if program.ranges.can_be_on(v, s)]
            if any(program.ranges.earliest[v] == program.ranges.latest[v] for v in possible):
                found[s].append((holding, Expr(program.one)))
            elif len(possible) == 1:
                found[s].append((holding, program.inside(possible[0], s)))
            elif possible:
                keeps = program.variable(f"{prefix}_{number}_{s}", 1)
                for v in possible:
                    program.require(program.inside(v, s) - keeps)
                found[s].append((holding, keeps))
    return found


@dataclass(frozen=True)
class RecomputeVars:
    """Recompute variables of one stage: r is 1 if it recomputes, u[v] = r · w[v] for each group v that may be on it."""

    stage: Expr
    groups: Mapping[int, Expr]


NEVER = RecomputeVars(Expr(), {})


def recomputations(program: Program) -> list[RecomputeVars]:
    """For each stage r[s] binary and u[v, s] with u <= r, u <= w, u >= w + r − 1; zero where that cannot be needed."""
    found = []
    for s in range(program.problem.stages):
        if not may_overflow(program, s):
            found.append(NEVER)
            continue
        stage, groups = Expr(program.lp.add_variable(f"r_{s}", cat="Binary")), {}
        for v in program.candidates(s):
            if program.ranges.earliest[v] == program.ranges.latest[v]:
                groups[v] = stage
                continue
            inside, both = program.inside(v, s), program.variable(f"u_{v}_{s}", 1)
            program.require(both - stage)
            program.require(both - inside)
            program.require(inside + stage - program.one - both)
            groups[v] = both
        found.append(RecomputeVars(stage, groups))
    return found


def may_overflow(program: Program, stage: int) -> bool:
    """Whether a stage may be open to recompute and everything that can be on it, without that, exceeds the capacity."""
    problem = program.problem
    if not problem.may_recompute or problem.capacity_bytes is None:
        return False
    cost, here = problem.cost, set(program.candidates(stage))
    groups = [cost.groups[v] for v in here]
    weights = sum(w.num_bytes for w in cost.weights if here & {*w.groups})
    alive = sum(g.saved_bytes for g in groups) + sum(a.num_bytes for a in cost.saved if here & {*a.groups})
    alive += sum(flow.num_bytes for flow in cost.edges) if stage else 0
    alive += sum(flow.num_bytes for flow in cost.edges)  # sent
    working = max((max(g.transient_bytes, g.workspace_bytes) for g in groups), default=0)
    most = weights + problem.in_flight[stage] * alive + working
    most += problem.fixed_bytes(stage) + 2 * problem.places * sum(flow.num_bytes for flow in cost.edges)
    return most > problem.capacity_bytes


def add_memory(
    program: Program,
    weights: Sequence[Sequence[tuple[ResidentTensor, Expr]]],
    crossing: Sequence[Sequence[tuple[TensorEdge, Expr]]],
    again: Sequence[RecomputeVars],
    limit: Expr,
) -> None:
    """Weights + in flight · (saved + shared saved + received) + working set of every stage <= limit.

    Σ_k h[k, s]·bytes + n_s · (Σ_v w[v, s]·saved_v + Σ_a h[a, s]·bytes + Σ_f x[f, s−1]·bytes) + τ_s + fixed <= limit,
    τ_s >= w[v, s]·transient_v − ρ[v, s], where ρ is what was freed before the backward of v (`working_set`).
    Where it may recompute, u[v, s]·(kept_v − saved_v) is added to the saved bytes and u[v, s]·segment_v to τ_s's
    bounds, and h[a, s] is replaced by q[a, s] >= h[a, s] − r[s].

    What a stage saves of what it has received is there once: − n_s · Σ_f z[f, s]·bytes (`saved_again`); what it sent
    stays too, unless it is saved: + n_s · Σ_f o[f, s]·bytes (`sent`). τ_s is at least any workspace, w[v, s]·bytes.

    Error: low as that of `Intervals.always`.
    """
    cost = program.problem.cost
    shared = resident_vars(program, "s", cost.saved)
    for s in range(program.problem.stages):
        redone = again[s].groups
        groups = [(v, cost.groups[v]) for v in program.candidates(s)]
        keeps = shared[s]
        if redone:
            keeps = [(holding, program.variable(f"q_{k}_{s}", 1)) for k, (holding, _) in enumerate(shared[s])]
            for (_, h), (_, q) in zip(shared[s], keeps, strict=True):
                program.require(h - again[s].stage - q)
        working = working_set(program, s, redone)
        alive = program.problem.in_flight[s] / program.num_bytes
        program.require(
            pulp.lpSum(program.problem.standing_bytes(k) / program.num_bytes * h for k, h in weights[s])
            + pulp.lpSum(alive * group.saved_bytes * program.inside(v, s) for v, group in groups)
            + pulp.lpSum(
                alive * (cost.groups[v].kept_bytes - cost.groups[v].saved_bytes) * u for v, u in redone.items()
            )
            + pulp.lpSum(alive * holding.num_bytes * q for holding, q in keeps)
            - pulp.lpSum(alive * num_bytes * both for num_bytes, both in saved_again(program, s, crossing, redone))
            + received_bytes(program, s, crossing)
            + pulp.lpSum(alive * num_bytes * x for num_bytes, x in sent(program, s, crossing, again[s]))
            + working
            + program.problem.fixed_bytes(s) / program.num_bytes * program.one
            - limit
        )


def saved_again(
    program: Program, stage: int, crossing: Sequence[Sequence[tuple[TensorEdge, Expr]]], redone: Mapping[int, Expr]
) -> list[tuple[int, Expr]]:
    """Flows, in bytes, that a stage may receive and save, each with z[f, s] <= x[f, s−1] and
    z <= Σ_g w[g, s] over the groups g that save it and do not run again."""
    found = []
    for number, (flow, crosses) in enumerate(crossing[stage - 1] if stage else ()):
        possible = [g for g in flow.saved_by if program.ranges.can_be_on(g, stage)]
        if possible:
            both = program.variable(f"z_{number}_{stage}", 1)
            program.require(both - crosses)
            saves = (program.inside(g, stage) - redone.get(g, Expr()) for g in possible)
            program.require(both - pulp.lpSum(saves))
            found.append((flow.num_bytes, both))
    return found


def sent(
    program: Program, stage: int, crossing: Sequence[Sequence[tuple[TensorEdge, Expr]]], again: RecomputeVars
) -> Iterator[tuple[int, Expr]]:
    """Flows, in bytes, that a stage may send, each with o[f, s] >= x[f, s] − y[g, s], g being the first group that
    saves it: where that is on a stage up to this one, it is among what is saved. A stage that recomputes saves none:
    o[f, s] >= x[f, s] + r[s] − 1."""
    for number, (flow, crosses) in enumerate(crossing[stage] if stage < program.problem.stages - 1 else ()):
        if flow.saved_by:
            alone = program.variable(f"o_{number}_{stage}", 1)
            program.require(crosses - program.upto(flow.saved_by[0], stage) - alone)
            if again.groups:
                program.require(crosses + again.stage - program.one - alone)
            yield flow.num_bytes, alone
        else:
            yield flow.num_bytes, crosses


def received_bytes(program: Program, stage: int, crossing: Sequence[Sequence[tuple[TensorEdge, Expr]]]) -> Expr:
    """n_s · Σ_f x[f, s−1]·bytes; where messages lie in memory that peers reach, each of m microbatches with its own,
    m · (Σ_f x[f, s−1]·bytes + Σ_f x[f, s]·bytes over flows with a gradient)."""
    problem = program.problem
    before = crossing[stage - 1] if stage else ()
    behind = crossing[stage] if stage < problem.stages - 1 else ()
    times = problem.kept_received * problem.in_flight[stage] + problem.places
    received = pulp.lpSum(times * flow.num_bytes / program.num_bytes * x for flow, x in before)
    gradients = ((flow, x) for flow, x in behind if flow.requires_grad and problem.places)
    return received + pulp.lpSum(problem.places * flow.num_bytes / program.num_bytes * x for flow, x in gradients)


def working_set(program: Program, stage: int, redone: Mapping[int, Expr]) -> Expr:
    """τ of one stage with its bounds; see `add_memory`.

    ρ[v, s] <= ρ[v', s] + w[v', s]·saved_v' + Σ_a e[a, v', s]·bytes, v' being the next group after v; e says that v' is
    the first group of the stage that keeps the shared tensor a: e <= w[v', s] and e <= 1 − w[g, s] for a's groups g
    before v'.

    Args:
        redone: u of the groups that may run again there, which then keep no shared tensor.
    """
    cost, size = program.problem.cost, program.num_bytes
    ends = last_uses(program, stage, redone)
    working, gone = program.variable(f"w_{stage}"), Expr()
    for v in reversed(program.candidates(stage)):
        group, inside = cost.groups[v], program.inside(v, stage)
        need = group.transient_bytes / size * inside
        freed = group.saved_bytes / size * inside
        freed += pulp.lpSum(num_bytes / size * ending for num_bytes, ending in ends.get(v, ()))
        if v in redone:
            need += group.segment_bytes / size * redone[v]
            freed += (group.kept_bytes - group.saved_bytes) / size * redone[v]
        if group.transient_bytes or v in redone:
            program.require(need - gone - working)
        if group.workspace_bytes:
            program.require(group.workspace_bytes / size * inside - working)
        released = program.variable(f"p_{v}_{stage}")
        program.require(released - gone - freed)
        gone = released
    return working


def last_uses(program: Program, stage: int, redone: Mapping[int, Expr]) -> Mapping[int, list[tuple[int, Expr]]]:
    """For each group the shared tensors, in bytes, of which its backward may be the stage's last that needs them, with
    e of `working_set`."""
    found: defaultdict[int, list[tuple[int, Expr]]] = defaultdict(list)
    for number, a in enumerate(program.problem.cost.saved):
        possible = [v for v in sorted(a.groups) if program.ranges.can_be_on(v, stage)]
        for position, v in enumerate(possible):
            ending = program.inside(v, stage) - redone.get(v, Expr())
            if position:
                first = program.variable(f"e_{number}_{v}_{stage}", 1)
                program.require(first - ending)
                for g in possible[:position]:
                    program.require(first + program.inside(g, stage) - program.one)
                ending = first
            found[v].append((a.num_bytes, ending))
    return found


def add_time_objective(
    program: Program,
    weights: Sequence[Sequence[tuple[ResidentTensor, Expr]]],
    transfers: Sequence[Expr],
    again: Sequence[RecomputeVars],
) -> None:
    """Minimise A · T + B · Σ t_s + C · Σ x_s + D · O with T >= t_s and O >= Σ_k h[k, s] · update_k of every stage.

    t_s = Σ_v w[v, s]·load_v + Σ_v u[v, s]·forward_v + transfers after s where the balance is time; coefficients:
    `objective_of`; a weight's update is its optimizer and the reduction of its gradient.
    """
    o = objective_of(program.problem)
    loads = group_loads(program.problem.cost, program.problem.balance)
    slowest, optimizer, repeated = program.variable("T"), program.variable("O"), Expr()
    for s in range(program.problem.stages):
        load = pulp.lpSum(loads[v] / program.seconds * program.inside(v, s) for v in program.candidates(s))
        if program.problem.balance == "time":
            forward = program.problem.cost.groups
            more = pulp.lpSum(forward[v].forward_seconds / program.seconds * u for v, u in again[s].groups.items())
            load, repeated = load + more, repeated + more
        program.require(load + o.transfer * transfers[s] - slowest)
        if o.optimizer:
            steps = pulp.lpSum(update_seconds(w) / program.seconds * h for w, h in weights[s])
            program.require(steps - optimizer)
    # Every group is on exactly one stage, so the loads sum to a constant.
    everything = sum(loads) / program.seconds * program.one + repeated + o.transfer * pulp.lpSum(transfers)
    program.lp.setObjective(
        o.slowest * slowest + o.total * everything + o.traffic * pulp.lpSum(transfers) + o.optimizer * optimizer
    )


def time_program(problem: CutProblem, ranges: Ranges) -> Program:
    """The program that finds the cuts of least time within the capacity."""
    program = new_program(problem, ranges, float(problem.capacity_bytes or 1))
    weights = resident_vars(program, "h", problem.cost.weights)
    crossing, again = crossings(program), recomputations(program)
    if problem.capacity_bytes is not None:
        add_memory(program, weights, crossing, again, Expr(program.one))
    add_time_objective(program, weights, transfer_times(program, crossing), again)
    return program


def memory_program(problem: CutProblem, ranges: Ranges) -> Program:
    """The program that finds the cuts whose fullest stage is emptiest; its objective is in units of ``num_bytes``."""
    program = new_program(problem, ranges, float(problem.capacity_bytes or 1))
    weights = resident_vars(program, "h", problem.cost.weights)
    fullest = program.variable("M")
    add_memory(program, weights, crossings(program), recomputations(program), fullest)
    program.lp.setObjective(fullest)
    return program

"""The joint integer program: the program of the cuts, with a choice for every group on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pulp

from autopar.ir.layout import Layout
from autopar.ir.strategies import ReshardingCost, ShardingStrategy
from autopar.solve.cuts.ilp import Program, crossings, new_program, transfer_times
from autopar.solve.cuts.ranges import Ranges
from autopar.solve.joint.problem import JointProblem, local_bytes, relaxed
from autopar.solve.shardings.cost import Consumer, ValueEdge, resharding_cost, value_edges
from autopar.solve.shardings.variables import Expr, StrategyVars, choices_by, linearize_product, new_strategy_vars

# (group, choice, stage) -> w, 1 where the group runs this choice on this stage.
Placed = Mapping[tuple[int, int, int], Expr]
# Costs of resharding on one stage, and the expression that is 1 where it happens.
Converted = list[tuple[ReshardingCost, Expr]]


@dataclass(frozen=True)
class JointProgram:
    """The program under construction. ``cuts`` holds the variables of the relaxed cut problem, and its units."""

    problem: JointProblem
    cuts: Program
    strategy_vars: StrategyVars
    placed: Placed

    def kind(self, group: int) -> int:
        """The kind whose choice the group runs."""
        return self.strategy_vars.graph.groups[group].kind

    def stages_of(self, group: int) -> range:
        """The stages that the group can be on."""
        return range(self.cuts.ranges.earliest[group], self.cuts.ranges.latest[group] + 1)

    def among(self, group: int, choices: Sequence[int], stage: int) -> Expr:
        """1 if the group runs one of these choices on the stage."""
        return pulp.lpSum(self.placed[group, k, stage] for k in choices)

    def on(self, stage: int) -> list[tuple[ShardingStrategy, Expr]]:
        """Every choice that can be run on the stage, and whether it is."""
        groups = self.problem.graph.groups
        return [(groups[v].strategies[k], w) for (v, k, s), w in self.placed.items() if s == stage]


def joint_program(problem: JointProblem, ranges: Ranges) -> JointProgram:
    """The program that finds the choices and the cuts of least step time within the capacity."""
    cuts = new_program(relaxed(problem), ranges, float(problem.capacity_bytes or 1))
    graph = problem.graph
    if not problem.share_kinds:
        graph = replace(graph, groups=tuple(replace(g, kind=v) for v, g in enumerate(graph.groups)))
    variables = new_strategy_vars(graph, cuts.lp)
    program = JointProgram(problem, cuts, variables, placements(cuts, variables))
    add_together(program)
    converted = conversions(program)
    if problem.capacity_bytes is not None:
        add_capacity(program, converted)
    add_step_time(program, converted)
    return program


def placements(cuts: Program, variables: StrategyVars) -> Placed:
    """w[v, k, s], with Σ_s w[v, k, s] = x[v, k] and Σ_k w[v, k, s] = y[v, s] − y[v, s−1]."""
    found: dict[tuple[int, int, int], Expr] = {}
    for v, group in enumerate(variables.graph.groups):
        chosen = {k: Expr(variables.x[group.kind, k]) for k in range(len(group.strategies))}
        stages = range(cuts.ranges.earliest[v], cuts.ranges.latest[v] + 1)
        inside = {s: cuts.inside(v, s) for s in stages}
        for (k, s), w in linearize_product(cuts.lp, f"w_{v}", chosen, inside).items():
            found[v, k, s] = w
    return found


def add_together(program: JointProgram) -> None:
    """y[u, s] = y[v, s] for groups that must share a stage."""
    cuts = program.cuts
    for first, *others in program.problem.colocated:
        for other in others:
            for s in range(program.problem.stages - 1):
                cuts.require(cuts.upto(first, s) - cuts.upto(other, s))
                cuts.require(cuts.upto(other, s) - cuts.upto(first, s))


def add_capacity(program: JointProgram, converted: Sequence[Converted]) -> None:
    """Σ w[v, k, s] · (weight bytes + n_s · saved bytes) + n_s · Σ c[f, A, B, s] · saved bytes <= capacity, n_s
    microbatches in flight."""
    unit = program.cuts.num_bytes
    for s, alive in enumerate(program.problem.in_flight):
        need = [(choice.weight_bytes + alive * choice.saved_bytes, w) for choice, w in program.on(s)]
        need += ((alive * cost.saved_bytes, c) for cost, c in converted[s])
        program.cuts.require(pulp.lpSum(num_bytes / unit * w for num_bytes, w in need) - program.cuts.one)


def conversions(program: JointProgram) -> list[Converted]:
    """c[f, A, B, s] of every stage with its costs, c[f, A, B, s] >= e_j[A, B, s] for every reader j.

    c is 1 where a reader on stage s reads in layout B what was made in layout A.
    """
    graph = program.problem.graph
    found: list[Converted] = [[] for _ in range(program.problem.stages)]
    for number, wire in enumerate(value_edges(graph)):
        needed: dict[tuple[Layout, Layout, int], list[Expr]] = {}
        for j, reading in enumerate(wire.consumers):
            for key, amount in reading_of(program, f"c_{number}_{j}", wire, reading).items():
                needed.setdefault(key, []).append(amount)
        for i, ((made, read, s), amounts) in enumerate(needed.items()):
            cost = resharding_cost(graph, wire.value, made, read)
            if not cost.seconds and not cost.saved_bytes:
                continue
            once = amounts[0]
            if len(amounts) > 1:
                once = program.cuts.variable(f"c_{number}__{i}")
                for amount in amounts:
                    program.cuts.require(amount - once)
            found[s].append((cost, once))
    return found


def reading_of(
    program: JointProgram, name: str, wire: ValueEdge, reading: Consumer
) -> dict[tuple[Layout, Layout, int], Expr]:
    """e_j[A, B, s]: 1 where the value is made in layout A and reader j is on stage s and reads it in B.

    Σ_{B, s} e_j[A, B, s] = Σ_{k: gives = A} x[producer, k] and Σ_A e_j[A, B, s] = Σ_{k: takes = B} w[j, k, s]. Where
    producer and reader share a choice, e_j[A, B, s] is the sum of w[j, k, s] over gives[k] = A, takes[k] = B.
    """
    group = reading.group
    if program.kind(wire.producer) == program.kind(group):
        pairs: dict[tuple[Layout, Layout], list[int]] = {}
        for k, pair in enumerate(zip(wire.layouts, reading.layouts, strict=True)):
            pairs.setdefault(pair, []).append(k)
        return {
            (made, read, s): program.among(group, choices, s)
            for (made, read), choices in pairs.items()
            for s in program.stages_of(group)
        }
    made = {a: program.strategy_vars.among(program.kind(wire.producer), c) for a, c in choices_by(wire.layouts).items()}
    read = {
        (b, s): program.among(group, choices, s)
        for b, choices in choices_by(reading.layouts).items()
        for s in program.stages_of(group)
    }
    return {(a, b, s): amount for (a, (b, s)), amount in linearize_product(program.cuts.lp, name, made, read).items()}


def wide_transfers(program: JointProgram) -> list[Expr]:
    """Time over each boundary, both ways, of what is sent in a larger layout than its smallest; zero after the last.

    r[f, b, s] >= Σ_{k: local bytes >= b, s' <= s} w[producer, k, s'] − y[consumer, s]: 1 where a value is made in a
    layout of b bytes or more and crosses boundary s. Each size pays what it has more than the next smaller one.
    """
    problem, cuts = program.problem, program.cuts
    times = [Expr() for _ in range(problem.stages)]
    for number, wire in enumerate(value_edges(problem.graph)):
        full = problem.graph.value_bytes[wire.value]
        by_choice = [local_bytes(full, made, problem.ranks) for made in wire.layouts]
        sizes = sorted(set(by_choice))
        ends = [cuts.ranges.latest[reading.group] for reading in wire.consumers]
        for smaller, size in pairwise(sizes):
            wide = [k for k, num_bytes in enumerate(by_choice) if num_bytes >= size]
            made = Expr()
            for s in range(cuts.ranges.earliest[wire.producer], max(ends)):
                if s in program.stages_of(wire.producer):
                    made = made + program.among(wire.producer, wide, s)
                crosses = cuts.variable(f"r_{number}_{size}_{s}")
                for reading in wire.consumers:
                    cuts.require(made - cuts.upto(reading.group, s) - crosses)
                rate = problem.boundary[s].bytes_per_second * cuts.seconds
                times[s] += 2 * (size - smaller) / rate * crosses
    return times


def add_step_time(program: JointProgram, converted: Sequence[Converted]) -> None:
    """Minimise (m − 1)·T + Σ t[s] + O with T >= t[s] and O >= Σ w[v, k, s] · step seconds.

    t[s] = Σ w[v, k, s] · seconds + conversions on s + transfers after s.
    """
    cuts = program.cuts
    narrow = transfer_times(cuts, crossings(cuts))
    wide = wide_transfers(program)
    slowest, step, total = cuts.variable("T"), cuts.variable("O"), Expr()
    for s in range(program.problem.stages):
        choices = program.on(s)
        time = pulp.lpSum(choice.seconds / cuts.seconds * w for choice, w in choices)
        time += pulp.lpSum(cost.seconds / cuts.seconds * c for cost, c in converted[s])
        time += narrow[s] + wide[s]
        cuts.require(time - slowest)
        cuts.require(pulp.lpSum(choice.step_seconds / cuts.seconds * w for choice, w in choices) - step)
        total += time
    cuts.lp.setObjective((program.problem.microbatches - 1) * slowest + total + step)

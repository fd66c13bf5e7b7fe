"""Which stages recompute: the integer program against brute force, and plans under a memory limit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_solve import memory, problems
from test_solve import step_seconds as seconds_at_once

from autopar.errors import InfeasibleError, UsageError
from autopar.hardware import Link
from autopar.ir import CostGraph, Flow, Group
from autopar.solve import CutProblem, solve_cuts
from autopar.solve.contiguous import contiguous_cuts, least_memory_cuts
from autopar.solve.evaluate import stage_costs

# -- the integer program -------------------------------------------------------------------------------------------


@st.composite
def open_problems(draw: st.DrawFn) -> CutProblem:
    """A small problem whose stages may recompute, with a limit that often binds."""
    problem, number = draw(problems()), st.integers(0, 6)
    groups = tuple(replace(g, kept_bytes=draw(number), segment_bytes=draw(number)) for g in problem.cost.groups)
    limit = draw(st.integers(5, 80))
    cost = replace(problem.cost, groups=groups, together=())
    return replace(problem, cost=cost, capacity_bytes=limit, recompute="auto")


def brute_force(problem: CutProblem) -> float | None:
    """Least step time over all assignments and all choices of stages that recompute, or None where none fits."""
    cost, last = problem.cost, problem.stages - 1
    best = None
    for stage in product(range(problem.stages), repeat=cost.loss):
        stage_of = (*stage, last)
        if (
            set(stage) != set(range(problem.stages))
            or any(stage_of[f.producer] > stage_of[c] for f in cost.flows for c in f.consumers)
            or any(stage_of[g] != s for g, s in problem.pins.items())
        ):
            continue
        for flags in product([False, True], repeat=problem.stages):
            chosen = with_flags(problem, stage_of, flags)
            needs = [memory(p, stage_of)[s] for s, p in enumerate(chosen)]
            if max(needs) <= (problem.capacity_bytes or 0):
                value = seconds_at_once(mixed(problem, stage_of, flags), stage_of)
                best = value if best is None else min(best, value)
    return best


def with_flags(problem: CutProblem, stage_of: tuple[int, ...], flags: tuple[bool, ...]) -> list[CutProblem]:
    """For each stage the problem whose memory it has."""
    groups = tuple(
        replace(g, saved_bytes=g.kept_bytes, transient_bytes=g.transient_bytes + g.segment_bytes)
        for g in problem.cost.groups
    )
    again = replace(problem, cost=replace(problem.cost, groups=groups, saved=()))
    return [again if flag else problem for flag in flags]


def mixed(problem: CutProblem, stage_of: tuple[int, ...], flags: tuple[bool, ...]) -> CutProblem:
    """The problem with the forward run twice where a group's stage recomputes."""
    groups = tuple(
        replace(g, backward_seconds=g.backward_seconds + flags[s] * g.forward_seconds)
        for g, s in zip(problem.cost.groups, stage_of)
    )
    return replace(problem, cost=replace(problem.cost, groups=groups))


@given(open_problems())
@settings(max_examples=150, deadline=None)
def test_the_optimum_equals_brute_force(problem: CutProblem) -> None:
    expected = brute_force(problem)
    if expected is None:
        with pytest.raises((InfeasibleError, UsageError)):
            solve_cuts(problem)
        return
    cuts = solve_cuts(problem)
    assert cuts.objective_seconds == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert cuts.bound_seconds == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert max(c.memory_bytes for c in stage_costs(problem, cuts.stage_of)) <= (problem.capacity_bytes or 0)

"""Costs of intervals, made for all intervals at once, equal those of any assignment of groups to stages."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cut_problems import cost_graphs
from support.effort import examples

from autopar.ir.cost_graph import Group, ResidentTensor
from autopar.ir.hardware import Link
from autopar.ir.placement import Placement
from autopar.ir.plan_parts import INTERLEAVED, Replicas
from autopar.schedule.generate import in_flight_profiles
from autopar.solve.cuts.dynamic_programme import stage_intervals
from autopar.solve.cuts.evaluate import assignment_costs, interval_costs
from autopar.solve.cuts.problem import Axis, CutProblem
from autopar.solve.cuts.program import steepest

MIB = 2**20


@st.composite
def chunked_problems(draw: st.DrawFn) -> tuple[CutProblem, tuple[int, ...]]:
    """A problem with buckets, replicas, tensor parallelism, chunks and peers, and contiguous stages of its groups."""
    cost, number = draw(cost_graphs(8)), st.integers(0, 30)

    def weight(w: ResidentTensor) -> ResidentTensor:
        gradient, seconds = draw(number) * MIB, [draw(number) * 1e-3 for _ in range(3)]
        return replace(
            w, num_bytes=w.num_bytes + gradient, gradient_bytes=gradient, wgrad_bytes=draw(st.booleans()) * gradient,
            copy_bytes=draw(st.integers(0, 1)), flattened_grad_bytes=draw(number), reduce_seconds=seconds[0],
            gather_seconds=seconds[1], contention_seconds=seconds[2], num_buckets=draw(number) / 8,
        )  # fmt: skip

    def group(g: Group) -> Group:
        collective = draw(number) * 1e-3
        return replace(
            g, symmetric_buffer_bytes=draw(number), forward_collective_seconds=collective, kept_bytes=draw(number)
        )

    cost = replace(cost, weights=tuple(map(weight, cost.weights)), groups=tuple(map(group, cost.groups)))
    chunks = draw(st.integers(1, max(1, cost.loss // 2)))
    pp = draw(st.integers(1 + (chunks > 1), max(1 + (chunks > 1), cost.loss // chunks)))
    stages, microbatches = pp * chunks, draw(st.integers(1, 4))
    cuts = st.sets(st.integers(1, cost.loss - 1), min_size=stages - 1, max_size=stages - 1)
    ends = sorted(draw(cuts)) if stages > 1 else []
    profiles = tuple(in_flight_profiles(INTERLEAVED[0], p, Placement(pp, chunks), microbatches) for p in range(pp))
    peers: frozenset[Axis] = frozenset({"pp", "tp", "dp"}) if draw(st.booleans()) else frozenset()
    problem = CutProblem(
        cost, stages, microbatches, None, tuple(draw(st.integers(1, 3)) for _ in range(stages)),
        tuple(Link(draw(st.integers(0, 3)) * 1e-3, 1e3) for _ in range(stages - 1)), tp=2,
        replicas=Replicas(draw(st.integers(1, 2))), chunks=chunks, peers=peers,
        in_flight_profiles=profiles if chunks > 1 else (), input_bytes=draw(number), reserve_bytes=draw(number),
        balance=draw(st.sampled_from(["time", "params", "uniform"])),
    )  # fmt: skip
    return problem, tuple(sum(g >= end for end in ends) for g in range(len(cost.groups)))


@given(chunked_problems(), st.booleans())
@settings(max_examples=examples(1000, 100))
def test_intervals_cost_what_assignments_cost(case: tuple[CutProblem, tuple[int, ...]], recompute: bool) -> None:
    problem, stage_of = case
    problem = problem.recomputing if recompute else problem
    for found, expected in zip(interval_costs(problem, stage_of), assignment_costs(problem, stage_of), strict=True):
        for f in fields(expected):
            value = getattr(expected, f.name)
            assert getattr(found, f.name) == pytest.approx(value, rel=1e-9, abs=1e-12), f.name
            assert type(getattr(found, f.name)) is type(value) or isinstance(value, int | float)


@given(chunked_problems(), st.data())
@settings(max_examples=examples(300, 60))
def test_the_reach_is_that_of_the_times_of_all_intervals(
    case: tuple[CutProblem, tuple[int, ...]], data: st.DataObject
) -> None:
    problem, stage_of = case
    pinned = data.draw(st.sets(st.integers(0, problem.cost.loss - 1), max_size=2))
    ways = stage_intervals(replace(problem, pins={group: stage_of[group] for group in pinned}))
    stage, size = data.draw(st.integers(0, problem.stages - 1)), len(problem.cost.groups)
    seconds = ways.times(stage, (slice(0, size + 1), slice(0, size + 1))).stage_seconds
    # Ceilings at the times themselves, where rounding would show.
    ceiling = data.draw(st.sampled_from(sorted({0.0, *seconds[np.isfinite(seconds)].tolist()})))
    allowed, reach = seconds <= ceiling, ways.reach(stage, ceiling)
    for cut in range(size + 1):
        ends, begins = np.flatnonzero(allowed[:, cut]), np.flatnonzero(allowed[cut])
        assert reach.first_end[cut] == min(ends, default=size + 1) and reach.last_end[cut] == max(ends, default=-1)
        assert reach.first_begin[cut] == min(begins, default=size + 1)
        assert reach.last_begin[cut] == max(begins, default=-1)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
@settings(max_examples=examples(100))
def test_a_separable_bound_is_one_and_exact_where_it_is_wanted(ends: int, begins: int, data: st.DataObject) -> None:
    numbers, first = st.integers(0, 5), data.draw(st.integers(0, 3))  # that end is behind the first begin
    least = np.array([[data.draw(numbers) if j + first > i else np.inf for i in range(begins)] for j in range(ends)])
    j, i = data.draw(st.integers(0, ends - 1)), data.draw(st.integers(0, begins - 1))
    found = steepest(least, np.eye(ends)[j], np.eye(begins)[i])
    assert (found.end[:, None] - found.begin <= least + 1e-6).all()
    if np.isfinite(least[j, i]):
        assert found.end[j] - found.begin[i] == pytest.approx(least[j, i], abs=1e-6)

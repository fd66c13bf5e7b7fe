"""Cuts: the integer program against brute force, bounds, and messages."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pulp
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.cut_problems import (
    brute_force,
    contiguous,
    cost_graphs,
    group,
    memory,
    problems,
    setting_of,
    step_seconds,
    with_link,
)
from support.effort import examples

from autopar.cost.hardware.load import load_hardware
from autopar.errors import InfeasibleError, UsageError
from autopar.ir.cost_graph import CostGraph, Group, ResidentTensor, TensorEdge
from autopar.ir.hardware import Link
from autopar.ir.mesh import Mesh
from autopar.ir.network import Network, Port
from autopar.ir.placement import Placement
from autopar.ir.plan_parts import Balance, Replicas
from autopar.solve.backend import SolverName, default_solver, solve_example
from autopar.solve.cuts.dynamic_programme import contiguous_cuts
from autopar.solve.cuts.evaluate import objective_seconds, stage_costs
from autopar.solve.cuts.intervals import interval_sums
from autopar.solve.cuts.merge import in_every_order, merge
from autopar.solve.cuts.problem import CutProblem, Cuts
from autopar.solve.cuts.solve import solve_cuts
from autopar.solve.cuts.step_time import step_time
from autopar.solve.space.constraints import boundary_links

MIB = 2**20
NVLINK = Link(27e-6, 250e9)
GAP = 1e-5

# -- random models -------------------------------------------------------------------------------------------------


def solved(problem: CutProblem, solver: SolverName | None = None, link: Link = NVLINK) -> Cuts:
    return solve_cuts(setting_of(problem, link), with_link(problem, link), solver=solver)


links = st.sampled_from([Link(0.0, 1e12), Link(1e-3, 1e3), Link(3e-3, 1e3)])


@given(problems(), links)
@settings(max_examples=examples(250))
def test_the_optimum_equals_brute_force(problem: CutProblem, link: Link) -> None:
    problem = with_link(problem, link)
    try:
        units = merge(problem)
        assume(problem.capacity_bytes is None or len(in_every_order(problem)) == 1)  # see the error of `solve_cuts`
        expected = brute_force(problem, link)
    except UsageError:
        units = expected = None
    if expected is None:
        with pytest.raises((InfeasibleError, UsageError)):
            solved(problem, link=link)
        return
    cuts = solved(problem, link=link)
    assert cuts.seconds == pytest.approx(expected, rel=2 * GAP, abs=1e-9)
    assert step_seconds(problem, cuts.stage_of, link) == pytest.approx(cuts.seconds, rel=1e-12)
    assert cuts.bound_seconds == pytest.approx(expected, rel=2 * GAP, abs=1e-9)
    if problem.capacity_bytes is not None:
        assert units is not None
        assert max(memory(units.problem, units.units(cuts.stage_of))) <= problem.capacity_bytes


@given(cost_graphs(), st.integers(4, 12), st.integers(0, 1), st.sampled_from([2, 3]))
@settings(max_examples=examples(100))
def test_over_one_port_nothing_undercuts_the_bound(cost: CostGraph, microbatches: int, latency: int, node: int) -> None:
    network = Network(Port(latency * 1e-3, 200.0), 1)
    machine = replace(load_hardware("cpu-generic"), link=Link(0.0, 1e12), devices_per_node=node, network=network)
    problem = CutProblem(
        cost, 4, microbatches, None, (1,) * 4, boundary_links(machine, Mesh(2, 1, 2), Placement(2, 2)),
        replicas=Replicas(2), chunks=2, schedule="interleaved", in_flight_profiles=(((1, 1),),) * 2, gap=GAP,
    )  # fmt: skip
    setting = replace(setting_of(problem, Link(0.0, 1e12)), hardware=machine)
    steps = [step_time(setting, problem, stage_of).seconds for stage_of in contiguous(problem)]
    assume(steps)
    cuts = solve_cuts(setting, problem)
    assert cuts.seconds == pytest.approx(min(steps), rel=2 * GAP, abs=1e-9)
    assert cuts.bound_seconds <= min(steps) * (1 + 1e-9)


@given(problems(), st.sampled_from(["params", "flops", "uniform"]))
@settings(max_examples=examples(60))
def test_other_balances_equal_brute_force(problem: CutProblem, balance: Balance) -> None:
    cost = replace(problem.cost, colocated=())  # what must share a stage counts as one layer
    problem = replace(with_link(problem, NVLINK), cost=cost, capacity_bytes=None, balance=balance)
    try:
        values = [objective_seconds(problem, stage_costs(problem, s)) for s in contiguous(problem)]
    except UsageError:  # pins of one unit to two stages
        values = []
    if not values:
        with pytest.raises((InfeasibleError, UsageError)):
            solved(problem)
        return
    cuts = solved(problem)
    assert cuts.seconds == pytest.approx(min(values), rel=2 * GAP, abs=1e-9)
    assert cuts.bound_seconds <= cuts.seconds


@given(cost_graphs(), st.integers(1, 5), st.integers(1, 2))
@settings(max_examples=examples(100))
def test_contiguous_cuts_are_the_best_of_their_kind(cost: CostGraph, microbatches: int, boundaries: int) -> None:
    stages = min(boundaries + 1, cost.loss)
    free = replace(cost, colocated=(), weights=tuple(replace(w, optimizer_seconds=0.0) for w in cost.weights))
    problem = chain_problem(free, stages, microbatches)
    found = contiguous_cuts(problem)
    assert found is not None
    size = cost.loss + 1
    every = (
        tuple(sum(i >= c for c in cuts) for i in range(size))
        for cuts in product(range(1, cost.loss), repeat=stages - 1)
        if list(cuts) == sorted(set(cuts))
    )

    def value(stage_of: tuple[int, ...]) -> float:
        return objective_seconds(problem, stage_costs(problem, stage_of))

    assert value(found) == pytest.approx(min(map(value, every)), rel=1e-12)


def test_contiguous_cuts_trade_the_slowest_stage_for_traffic() -> None:
    """Cutting first balances best, last sends least, in the middle is fastest: 42, 51 and 41.5 ms."""
    times, sizes = (12, 2.5, 10.5, 1), (2000, 500, 1, 1)
    groups = tuple(Group(f"g{i}", (f"g{i}",), "", t * 1e-3) for i, t in enumerate(times))
    flows = tuple(TensorEdge(f"t{i}", i, (i + 1,), size, False) for i, size in enumerate(sizes))
    cost = CostGraph("trade", 1, (*groups, Group("loss", (), "")), flows)
    problem = chain_problem(cost, 2, 2, boundary=(Link(0.0, 1e6),))
    found = contiguous_cuts(problem)
    assert found is not None
    assert found == (0, 0, 1, 1, 1)
    assert objective_seconds(problem, stage_costs(problem, found)) == pytest.approx(41.5e-3)


def test_interval_sums_count_a_holding_once() -> None:
    sums = interval_sums(4, [(5.0, (1, 3)), (2.0, (0,))])
    assert sums[:, 0].tolist() == [0, 2, 7, 7, 7]
    assert sums[:, 2].tolist() == [0, 0, 0, 0, 5]
    assert sums[1, 1] == 0


# -- models with names ---------------------------------------------------------------------------------------------


def chain_problem(cost: CostGraph, stages: int, microbatches: int = 8, **rest: object) -> CutProblem:
    defaults: dict[str, object] = {
        "capacity_bytes": None,
        "in_flight": tuple(min(microbatches, stages - s) for s in range(stages)),
        "boundary": (NVLINK,) * (stages - 1),
    }
    return CutProblem(cost, stages, microbatches, **(defaults | rest))  # pyright: ignore[reportArgumentType]


def vit_like(num_blocks: int) -> CostGraph:
    """A chain of transformer blocks of 7 groups with their residuals, between a patch embedding and a head."""
    names = ("norm1", "qkv", "attend", "proj", "norm2", "fc1", "fc2")
    times = (0.15, 0.9, 0.6, 0.35, 0.15, 1.2, 1.15)
    groups = [group("patch_embed", 0.3, saved_bytes=50 * MIB)]
    flows: list[TensorEdge] = []
    weights: list[ResidentTensor] = []
    saved: list[ResidentTensor] = []
    tensor, residual = 12 * MIB, 0
    for b in range(num_blocks):
        first = len(groups)
        for k, (name, time) in enumerate(zip(names, times)):
            groups.append(group(f"blocks.{b}.{name}", time, saved_bytes=30 * MIB, transient_bytes=40 * MIB, flops=time))
            if name != "attend":
                weights.append(ResidentTensor(f"blocks.{b}.{name}.weight", 48 * MIB, (first + k,), 3 * MIB, 3e-5))
        wide = {1: 3, 5: 4}
        flows.append(TensorEdge(f"x{b}", residual, (first, first + 3), tensor, True))
        for k in range(6):
            readers = (first + 4, first + 6) if k == 3 else (first + k + 1,)
            flows.append(TensorEdge(f"t{b}.{k}", first + k, readers, wide.get(k, 1) * tensor, True))
        saved.append(ResidentTensor(f"x{b}", tensor, (first, first + 3)))
        residual = first + 6
    head = len(groups)
    groups += [group("head", 0.05), Group("loss", (), "", 1e-5, 1e-5)]
    flows += [
        TensorEdge("tokens", residual, (head,), tensor, True),
        TensorEdge("logits", head, (head + 1,), 64000, True),
    ]
    return CostGraph("vit", 16, tuple(groups), tuple(flows), tuple(weights), tuple(saved))


def balanced(problem: CutProblem, cuts: Cuts) -> float:
    seconds = [cost.seconds for cost in stage_costs(problem, cuts.stage_of)]
    return max(seconds) / (sum(seconds) / len(seconds))


@pytest.mark.parametrize("stages", [4, 8])
@pytest.mark.parametrize("solver", ["HiGHS", "CBC"])
def test_vit_with_24_blocks_is_certified(stages: int, solver: SolverName) -> None:
    problem = chain_problem(vit_like(24), stages, 32, capacity_bytes=60 * 2**30)
    cuts = solved(problem, solver)
    assert len(problem.cost.groups) == 171
    assert (cuts.solver.name, cuts.solver.status) == (solver, "optimal")
    assert 0 <= cuts.solver.gap <= 1.01e-3
    assert cuts.bound_seconds <= cuts.seconds
    assert balanced(problem, cuts) <= 1.03


def test_out_of_time_known_cuts_stand_in_with_an_honest_gap() -> None:
    problem = chain_problem(vit_like(24), 8, 1, time_limit_seconds=0.0, gap=0.0)
    cuts = solved(problem)
    assert cuts.solver.status == "time limit"
    assert cuts.seconds == pytest.approx(step_seconds(problem, cuts.stage_of, NVLINK))
    assert 0 < cuts.bound_seconds < cuts.seconds
    assert 0 < cuts.solver.gap < 0.01


def test_cuts_lie_inside_blocks_where_that_balances() -> None:
    problem = chain_problem(vit_like(3), 2)
    cuts = solved(problem)
    names = [g.name for g in vit_like(3).groups]
    assert names[cuts.stage_of.index(1)] == "blocks.1.fc1"
    assert balanced(problem, cuts) == pytest.approx(1.009, abs=0.001)


def test_a_slow_link_moves_the_cut_to_where_little_crosses() -> None:
    cost = CostGraph(
        "hourglass", 1,
        (group("a", 4), group("b", 4), group("c", 4), group("d", 5), Group("loss", (), "")),
        tuple(TensorEdge(n, i, (i + 1,), size, True) for i, (n, size) in enumerate(zip("abcd", (90, 60, 1, 1)))),
    )  # fmt: skip
    fast, slow = (solved(chain_problem(cost, 2), link=Link(0.0, rate)) for rate in (1e9, 5e3))
    assert (fast.stage_of, slow.stage_of) == ((0, 0, 1, 1, 1), (0, 0, 0, 1, 1))


def test_a_boundary_without_gradients_has_one_transfer() -> None:
    cost = CostGraph(
        "frozen", 1,
        (group("a", 1), group("b", 1), group("c", 1), group("d", 1), Group("loss", (), "")),
        tuple(TensorEdge(n, i, (i + 1,), 1, n != "c") for i, n in enumerate("abcd")),
    )  # fmt: skip
    cuts = solved(chain_problem(cost, 2, 1), link=Link(5e-3, 1e9))
    assert cuts.stage_of == (0, 0, 0, 1, 1)
    assert cuts.seconds == pytest.approx(12e-3 + 5e-3, rel=1e-6)
    assert cuts.bound_seconds == pytest.approx(cuts.seconds, rel=1.1e-3)


def test_parallel_branches_may_leave_the_order_of_the_groups() -> None:
    groups = (group("stem", 0), group("left", 6), group("right", 1), group("left2", 6), group("join", 5))
    flows = (
        TensorEdge("s", 0, (1, 2), 1, True),
        TensorEdge("l", 1, (3,), 1, True),
        TensorEdge("r", 2, (4,), 1, True),
        TensorEdge("l2", 3, (4,), 1, True),
        TensorEdge("out", 4, (5,), 1, True),
    )
    cost = CostGraph("branches", 1, (*groups, Group("loss", (), "")), flows)
    assert solved(chain_problem(cost, 3, pins={2: 2}), link=Link(0.0, 1e9)).stage_of == (0, 0, 2, 1, 2, 2)
    assert solved(chain_problem(cost, 3, pins={2: 0}), link=Link(0.0, 1e9)).stage_of == (0, 0, 0, 1, 2, 2)


@pytest.mark.parametrize(
    ("balance", "first_of_second"),
    [("time", "fast2"), ("params", "slow"), ("flops", "fast3"), ("uniform", "fast2")],
)
def test_balances(balance: Balance, first_of_second: str) -> None:
    names = ("slow", "fast1", "fast2", "fast3")
    groups = tuple(group(n, t, flops=f) for n, t, f in zip(names, (4, 3, 3, 4), (1.0, 1.0, 1.0, 9.0)))
    groups = (group("stem", 0.1), *groups)
    flows = tuple(TensorEdge(f"t{i}", i, (i + 1,), 8, True) for i in range(5))
    weights = tuple(ResidentTensor(f"w{i}", 4 * n, (i + 1,), n) for i, n in enumerate((10, 10, 10, 10)))
    weights = (*weights, ResidentTensor("embedding", 4000, (0,), 1000))
    if balance == "uniform":
        weights = weights[:4]
    cost = CostGraph("lopsided", 1, (*groups, Group("loss", (), "")), flows, weights)
    cuts = solved(chain_problem(cost, 2, balance=balance))
    assert cost.groups[cuts.stage_of.index(1)].name == first_of_second
    assert cuts.solver.balance == balance


def test_groups_that_share_state_stay_together_with_what_lies_between() -> None:
    cost = replace(vit_like(1), colocated=((2, 4),))
    cuts = solved(chain_problem(cost, 3))
    assert len({cuts.stage_of[g] for g in (2, 3, 4)}) == 1
    assert set(cuts.stage_of) == {0, 1, 2}


# -- refusals ------------------------------------------------------------------------------------------------------


def message(problem: CutProblem, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        solved(problem)
    return str(caught.value)


def test_too_many_stages() -> None:
    assert message(chain_problem(vit_like(1), 12), InfeasibleError) == (
        "No plan has 12 stages: vit can be cut into 9 pieces at most. Use pp=9 or less."
    )


def test_too_little_memory_names_the_stage_what_fills_it_and_what_would_fit() -> None:
    problem = chain_problem(vit_like(8), 4, capacity_bytes=1 * 2**30)
    text = message(problem, InfeasibleError)
    assert text == (
        "No plan fits: stage 3 needs 1.71 GiB, rank 3 has 1.00 GiB (97 % of 1.03 GiB). Largest: weights with gradients "
        "and optimizer state (960.0 MiB), activations of 1 microbatch in flight (726.0 MiB, 222.0 MiB of them in "
        "blocks.5). The smallest memory that holds these 4 stages is 1.76 GiB per device. Use more devices, or more "
        '(smaller) microbatches than 8, or devices with memory="2GiB" (--memory 2GiB).'
    )
    enough = replace(problem, capacity_bytes=int(1.75 * 2**30))
    assert max(memory(enough, solved(enough).stage_of)) <= 1.75 * 2**30
    assert "needs 1.71 GiB, rank 3 has 1.62 GiB" in message(
        replace(problem, capacity_bytes=int(1.62 * 2**30)), InfeasibleError
    )


def test_pins_against_the_order() -> None:
    assert message(chain_problem(vit_like(2), 2, pins={3: 1, 9: 0}), UsageError) == (
        "Pins contradict the model's order: blocks.1.qkv is pinned to stage 0, and reads what comes from "
        "blocks.0.attend, pinned to stage 1. Pin blocks.0.attend to stage 0 or earlier, or blocks.1.qkv to stage 1 "
        "or later."
    )


def test_pins_that_empty_a_stage() -> None:
    assert message(chain_problem(vit_like(1), 3, pins={8: 1}), UsageError) == (
        "The pins leave a stage of 3 without operations: head to 1. Use fewer stages or remove a pin."
    )


def test_pins_against_shared_state() -> None:
    cost = replace(vit_like(1), colocated=((2, 4),))
    assert message(chain_problem(cost, 2, pins={2: 0, 3: 1}), UsageError) == (
        "Pins contradict each other: blocks.0.qkv is pinned to stage 0 and blocks.0.attend to stage 1, but they update "
        "the same state and must share a stage. Pin both to one stage."
    )


SOLVING = """
import pulp
from autopar.solve.backend import run

for cat in ("Binary", "Continuous"):
    x = [pulp.LpVariable(f"x{i}", lowBound=0, upBound=1, cat=cat) for i in range(4)]
    lp = pulp.LpProblem("knapsack", pulp.LpMinimize)
    lp += pulp.lpSum((i + 1) * v for i, v in enumerate(x))
    lp += pulp.lpSum(x) >= 1.5
    assert run(lp, "HiGHS", gap=0.0, time_limit_seconds=5.0).found
"""


def test_the_solver_says_nothing() -> None:
    """In a process of its own, for a banner is written once in each."""
    solved = subprocess.run([sys.executable, "-c", SOLVING], capture_output=True, text=True, timeout=120)
    assert (solved.returncode, solved.stdout, solved.stderr) == (0, "", "")


def test_cbc_stands_in_where_highs_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_solver() == solve_example() == "HiGHS"
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    assert default_solver() == solve_example() == "CBC"
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "available", lambda self: False)
    with pytest.raises(UsageError, match="No integer-programming solver is installed"):
        default_solver()


def test_a_solver_that_is_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.solve.backend.value_of", lambda expression: 11.0)
    with pytest.raises(UsageError, match=r"HiGHS solves a program of three variables wrongly: 11\.0 instead of 7\.0"):
        solve_example()

"""``cost="auto"``: which regions are timed, for how long, and what their times do to the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from support.measured import images, plan, vit

import autopar
from autopar.api.options import Options
from autopar.api.planning.costs import MeasuredConfig
from autopar.api.planning.plan import PlanRequest, lower_example, plan_graph
from autopar.api.planning.undecided import ConfigRegion, PlanLoad, undecided
from autopar.cost.hardware.load import load_hardware
from autopar.errors import MeasuringWarning, TraceError, UsageError
from autopar.ir.graph import Graph
from autopar.ir.hardware import ExecutionMode
from autopar.ir.plan_parts import TIMED, Measuring
from autopar.ir.table import measuring_rows
from autopar.measure.device import region_setting
from autopar.measure.regions import region_times
from autopar.measure.regions.cache import RegionTimes, TimesCache
from autopar.measure.regions.region_times import RegionTimer, WantedRegion
from autopar.measure.regions.timed_regions import TimedRegion, timed_regions
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model

CPU = load_hardware("cpu-generic")


# -- the order -------------------------------------------------------------------------------------------------------


def region(key: str, error: float) -> ConfigRegion:
    """A region of one second that may be off by ``error`` seconds."""
    return ConfigRegion(key, MeasuredConfig((), 8), 0, 1.0, error)


ERRORS = {"exact": 0.0, "close": 0.1, "far": 0.5}


def load(step_seconds: float, **seconds: float) -> PlanLoad:
    return PlanLoad(step_seconds, {key: region(key, ERRORS[key]) for key in seconds}, seconds)


@pytest.mark.parametrize(
    ("rivals", "order"),
    [
        ([], []),
        ([load(10.1, exact=4.0, close=4.0, far=1.0)], []),  # they spend the same time, so errors shift both
        ([load(10.1, exact=8.0, close=4.0, far=1.0)], []),  # they differ in a time that is known
        ([load(10.3, exact=4.0, close=8.0, far=1.0)], ["close", "far", "exact"]),  # 0.4 s; own error 0.5 s, 0 s
        ([load(10.5, exact=4.0, close=8.0, far=1.0)], []),
        ([load(10.5, exact=4.0, close=8.0, far=3.0)], ["far", "close", "exact"]),  # 1.4 s together
        ([load(10.5, exact=4.0, close=0.0, far=3.0)], ["far", "close", "exact"]),  # 1 s and, independent, 0.4 s
        ([load(11.05, exact=4.0, close=0.0, far=3.0)], ["far", "close", "exact"]),
        ([load(11.1, exact=4.0, close=0.0, far=3.0)], []),
        # 0.3 s twice, 0.5 s once
        (
            [load(10.2, exact=4.0, close=7.0, far=1.0), load(10.1, exact=4.0, close=7.0, far=2.0)],
            ["close", "far", "exact"],
        ),
    ],
)  # fmt: skip
def test_regions_that_may_turn_the_choice_come_first(rivals: list[PlanLoad], order: list[str]) -> None:
    winner = load(10.0, exact=4.0, close=4.0, far=1.0)
    assert [own.key for own in undecided(winner, rivals)] == order


# -- the budget ------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass only where a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(region_times, "monotonic", clock)
    return clock


class Runs:
    """In place of processes: each region takes ``seconds`` to time, and the ones in ``failing`` end the process."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.seconds, self.failing, self.spread = clock, 10.0, set[str](), 0.0
        self.starts: list[int] = []
        self.slow = 1.0

    def __call__(
        self, timer: RegionTimer, programs: Mapping[str, Any], keep: Any, what: str, limit: float = inf
    ) -> str:
        end = self.clock.now + limit
        self.starts.append(len(programs))
        for key, (program, axes) in programs.items():
            if self.clock.now + self.seconds > end:
                self.clock.now = end
                return ""
            self.clock.now += self.seconds
            if key in self.failing:
                return "The process ended."
            seconds = 1e-6 * len(program.ops) * program.batch * (self.slow if program.batch >= 8 and not axes else 1.0)
            keep(key, RegionTimes(seconds, 2 * seconds, self.spread))
        return ""


@pytest.fixture
def runs(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs(clock)
    monkeypatch.setattr(RegionTimer, "measure_programs", lambda *given: runs(*given))
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return runs


def distinct_regions() -> list[TimedRegion]:
    regions = timed_regions(lower_model(vit(), as_call(vit(), images(4)), "train", "vit"))
    return list({own.text: own for own in regions}.values())


def wanted(regions: list[TimedRegion], clock: Clock, trace_seconds: float = 0.0) -> Iterator[WantedRegion]:
    def traced(own: TimedRegion) -> TimedRegion:
        clock.now += trace_seconds
        return own

    for number, own in enumerate(regions):
        yield WantedRegion(f"region {number}", (), 4, lambda own=own: traced(own))


def timer(tmp_path: Path, budget_seconds: float) -> RegionTimer:
    setting = region_setting("cpu", ExecutionMode(), 2)
    return RegionTimer(setting, TimesCache(tmp_path, setting.text), lambda done, total, what: None, budget_seconds)


@pytest.mark.parametrize(
    ("budget", "trace_seconds", "timed", "spent", "starts"),
    [
        (0.0, 0.0, [], 0.0, []),
        (9.0, 0.0, [], 9.0, [3]),
        (25.0, 0.0, [0, 1], 25.0, [3]),
        (100.0, 0.0, [0, 1, 2], 30.0, [3]),
        (36.0, 10.0, [0], 36.0, [2]),  # after half of it, what was traced is timed
        (46.0, 10.0, [0], 46.0, [3]),
        (100.0, 30.0, [0, 1], 110.0, [2]),  # a trace that has begun ends
    ],
)
def test_as_many_regions_as_the_budget_allows(
    clock: Clock, runs: Runs, tmp_path: Path, budget: float, trace_seconds: float, timed: list[int], spent: float,
    starts: list[int],
) -> None:  # fmt: skip
    own = timer(tmp_path, budget)
    found = own.times(list(wanted(distinct_regions(), clock, trace_seconds)), "vit")
    assert list(found) == [f"region {number}" for number in timed]
    assert (own.spent_seconds, own.left_seconds, runs.starts) == (spent, max(0.0, budget - spent), starts)
    assert all(own.cache.get(key) == times for key, times in found.items())


def test_a_second_call_has_what_is_left(clock: Clock, runs: Runs, tmp_path: Path) -> None:
    own, regions = timer(tmp_path, 35.0), list(wanted(distinct_regions(), clock))
    assert len(own.times(regions[:2], "vit")) == 2 and own.left_seconds == 15.0
    assert list(own.times(regions[2:], "vit")) == ["region 2"] and own.left_seconds == 5.0
    assert own.times([], "vit") == {} and own.left_seconds == 5.0


def test_a_region_that_fails_takes_no_other_with_it(clock: Clock, runs: Runs, tmp_path: Path) -> None:
    own, regions = timer(tmp_path, 100.0), distinct_regions()
    runs.failing = {region_times.cache_key(regions[1], (), 4, 4)}
    with pytest.warns(
        MeasuringWarning, match=r"1 region of vit cannot be timed: priced by the cost model\. The process"
    ):
        found = own.times(list(wanted(regions, clock)), "vit")
    assert [times is not None for times in found.values()] == [True, False, True] and runs.starts == [3, 1]
    runs.failing = {region_times.cache_key(own, (), 4, 4) for own in regions}
    with pytest.warns(MeasuringWarning, match="3 regions of vit cannot be timed"):
        assert set(timer(tmp_path / "other", 100.0).times(list(wanted(regions, clock)), "vit").values()) == {None}


def test_unsteady_times_do_not_count(clock: Clock, runs: Runs, tmp_path: Path) -> None:
    own, runs.spread = timer(tmp_path, 100.0), 0.9
    with pytest.warns(
        MeasuringWarning, match="Times of 3 regions of vit lie up to 90 % apart.*: priced by the cost model"
    ) as said:
        found = own.times(list(wanted(distinct_regions(), clock)), "vit")
    assert set(found.values()) == {None} and own.cache.is_empty
    assert [warning.filename for warning in said] == [__file__]  # the user's line


@pytest.mark.filterwarnings("ignore::autopar.errors.CacheWarning")
def test_a_cache_that_cannot_be_written_to_is_said(clock: Clock, runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "times").write_text("in the way")
    with pytest.warns(MeasuringWarning, match="Cannot keep measured times in .*Set AUTOPAR_CACHE"):
        assert timer(tmp_path, 100.0).times(list(wanted(distinct_regions(), clock)), "vit") == {}


# -- plans -----------------------------------------------------------------------------------------------------------

LARGE = vit(), 2, images(4096)  # whose microbatches may have many sizes


def automatic(budget: float, **options: Any) -> tuple[autopar.Plan, Measuring]:
    found = autopar.plan(*LARGE, measure_seconds=budget, **options)
    assert found.solver.measuring is not None
    return found, found.solver.measuring


def test_times_of_some_regions_are_merged_into_prices(runs: Runs) -> None:
    """The step is of both kinds of prices, and so is its error; the next plan times the other regions."""
    analytic = autopar.plan(*LARGE, cost="analytic", dp=2)
    found, said = automatic(15.0, dp=2)
    assert (said.num_timed, said.num_earlier, said.seconds, said.budget_seconds) == (1, 0, 15.0, 15.0)
    assert said.num_regions == 12 and said.before == said.after == "pp 1 × tp 1 × dp 2, m 1"
    assert found.decision == analytic.decision and found.prediction.step_seconds != analytic.prediction.step_seconds
    assert found.hardware.cost == "mixed" and found.solver.other_meshes is None
    errors = {part.name: part for part in found.prediction.parts}
    before = {part.name: part for part in analytic.prediction.parts}
    assert errors[TIMED].basis == "measured" and 0.08 < errors[TIMED].error < 0.14 * 2 / 3 + 0.01
    # Two of three blocks are in the region that was timed; the last one's is compiled with the head.
    assert errors["attention float32"].error == pytest.approx(before["attention float32"].error / 3, rel=0.2)
    assert errors["matmul float32"].error < before["matmul float32"].error / 2
    assert found.prediction.error < analytic.prediction.error
    text = " ".join(str(found).split())
    assert "some operations timed" in text and "timed operations ±9" in text
    assert "measured 1 of 12 regions in 15 s of a 15 s budget; the choice stayed pp 1 × tp 1 × dp 2, m 1 " in text
    again, later = automatic(1000.0, dp=2)
    assert later.num_earlier >= 1 and later.num_timed == later.num_regions and again.hardware.cost == "measured"


def test_the_choice_changes_where_times_say_so_and_a_second_plan_is_equal(runs: Runs) -> None:
    runs.slow = 50.0
    found, said = automatic(1000.0, zero=0)
    assert said.num_timed == said.num_regions and found.hardware.cost != "analytic"
    assert said.before == "pp 1 × tp 1 × dp 2, m 1" and said.after.startswith("pp 1 × tp 2 × dp 1, m ")
    text = " ".join(str(found).split())
    assert f"the choice changed from {said.before} to {said.after}" in text
    starts = list(runs.starts)
    for budget in (1000.0, 0.0):
        again, later = automatic(budget, zero=0)
        assert again == replace(found, solver=again.solver) and later.num_earlier == later.num_timed == said.num_timed
        assert f"measured {said.num_timed} of {said.num_regions} regions, all of them earlier; the" in " ".join(
            str(again).split()
        )
    assert runs.starts == starts


def test_a_model_that_is_traced_with_some_samples_alone(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other samples cannot be timed, which is said; the plan is made all the same."""
    traced = PlanRequest.graph

    def fail(request: PlanRequest, size: int) -> Graph:
        raise TraceError("Cannot trace so few.")

    def other_ops(request: PlanRequest, size: int) -> Graph:
        return traced(replace(request, model=vit(class_token=False, global_pool="avg")), size)

    options = Options(dp=2, measure_seconds=1000.0)
    call = as_call(vit(), images(4096))
    request = PlanRequest(vit(), call, 2, options, "vit")
    graph = lower_example(request)
    for retrace, problem in ((fail, "cannot be traced .Cannot trace so few"), (other_ops, "has other operations")):
        monkeypatch.setattr(PlanRequest, "graph", retrace)
        with pytest.warns(MeasuringWarning, match=f"vit with 2,048 samples {problem}.*: priced by") as said_where:
            found = plan_graph(request, graph, CPU)
        assert {warning.filename for warning in said_where} == {__file__}
        said = found.solver.measuring
        assert said is not None and 0 < said.num_timed < said.num_regions


def test_nothing_is_timed_where_no_error_can_turn_the_choice(runs: Runs) -> None:
    text = " ".join(str(plan(measure_seconds=100.0, dp=2, microbatches=1)).split())
    assert "measured no operations: their errors cannot turn the choice" in text
    only = autopar.plan(vit(), 1, images(16), measure_seconds=100.0, microbatches=1)
    assert only.solver.measuring is not None and not only.solver.measuring.has_rivals
    assert "measured no operations: no other plan fits" in " ".join(str(only).split())
    assert runs.starts == []


def test_nothing_is_said_where_nothing_may_be_timed(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget, by the cost model, and for a device that is not here."""
    absent = {"hardware": "h200-nvlink", "measure_seconds": 100}
    cases: list[dict[str, Any]] = [{"measure_seconds": 0}, {"cost": "analytic"}, absent]
    for options in cases:
        found = autopar.plan(*LARGE, **options)
        assert found.solver.measuring is None and "measured  " not in str(found)
    monkeypatch.delenv("AUTOPAR_MEASURE_SECONDS")
    assert autopar.plan(*LARGE).solver.measuring is None, "processors are timed where it is asked for"
    monkeypatch.setenv("AUTOPAR_MEASURE_SECONDS", "100")
    assert autopar.plan(*LARGE).solver.measuring is not None and runs.starts != []


def test_rows_about_measuring() -> None:
    said = Measuring(5, 3, 1, 12.4, 30.0, "dp 2", "dp 2")
    assert measuring_rows(None) == []
    assert measuring_rows(said) == [
        ("measured", "3 of 5 regions, 1 of them earlier, in 12 s of a 30 s budget; the choice stayed dp 2")
    ]
    assert measuring_rows(replace(said, num_timed=0, num_earlier=0)) == [
        ("measured", "0 of 5 regions in 12 s of a 30 s budget; the choice stayed dp 2")
    ]


# -- wrong requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, "10", True, inf, float("nan")])
def test_a_wrong_budget(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"measure_seconds=.* must be a number of seconds of at least 0"):
        plan(measure_seconds=wrong)


@pytest.mark.parametrize("wrong", ["-1", "soon", "nan"])
def test_a_wrong_budget_in_the_environment(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("AUTOPAR_MEASURE_SECONDS", wrong)
    with pytest.raises(UsageError, match=f"AUTOPAR_MEASURE_SECONDS={wrong} must be a number of seconds of at least 0"):
        plan()
    assert plan(measure_seconds=0).hardware.cost == "analytic"


def test_a_budget_for_another_source_of_costs() -> None:
    with pytest.raises(UsageError, match=r"measure_seconds=10 .*cost='analytic' measures nothing\. Leave one out"):
        plan(cost="analytic", measure_seconds=10)
    with pytest.raises(UsageError, match=r"cost='measured' takes as long as it needs"):
        plan(cost="measured", measure_seconds=10.0)

"""Operations timed on the device at hand: pieces of graphs, the cache, and plans that trust what was measured."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layers import FILES, PACKAGE, imports, module_name
from support.measured import images, plan, vit
from torch import nn

import autopar
from autopar.api.model_source import ModelSource
from autopar.api.planning.costs import MeasuredConfig, PlanCosts, apply_strategies
from autopar.api.planning.plan import example_call
from autopar.cost.hardware.load import load_hardware
from autopar.cost.ops.op_cost import Pricing, measured_factors
from autopar.cost.ops.op_stats import graph_stats
from autopar.errors import CacheWarning, MeasuringWarning, UsageError
from autopar.ir.graph import Graph
from autopar.ir.hardware import ExecutionMode, Link
from autopar.ir.plan_parts import Replicas
from autopar.ir.tensor_axes import mesh_axes
from autopar.measure.device import SOURCES, region_setting, source_digest, source_files
from autopar.measure.regions import region_times as making
from autopar.measure.regions.cache import RegionTimes, TimesCache
from autopar.measure.regions.region_times import RegionTimer, region_timer_for
from autopar.measure.regions.timed_regions import timed_regions
from autopar.measure.regions.timing import RegionRun, time_region
from autopar.tools.explain.why_not import Query, ReplanContext, answers
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model

CPU = load_hardware("cpu-generic")
ONE = torch.device("cpu")


def traced(batch: int = 4, model: nn.Module | None = None) -> Graph:
    model = model or vit()
    return lower_model(model, as_call(model, images(batch)), "train", "vit")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Instead of processes: a microsecond for each sample and operation; what was timed, in words."""
    runs: list[str] = []

    def run(self: RegionTimer, programs: Mapping[str, Any], keep: Any, what: str, limit: float) -> str:
        runs.extend([what] * bool(programs))
        for key, (program, _) in programs.items():
            seconds = 1e-6 * len(program.ops) * program.batch
            keep(key, RegionTimes(seconds, 2 * seconds, 0.01))
        return ""

    monkeypatch.setattr(RegionTimer, "measure_programs", run)
    yield runs


# -- pieces ----------------------------------------------------------------------------------------------------------


def test_pieces_cover_a_graph_and_equal_blocks_are_equal() -> None:
    graph = traced()
    pieces = list(timed_regions(graph))
    assert [name for piece in pieces for name in piece.ops] == [op.name for op in graph.ops]
    assert len(pieces) == 4 and len({piece.text for piece in pieces}) == 3  # before, between products of blocks, behind
    assert pieces[1].text == pieces[2].text and "blocks" not in pieces[1].text


def test_probabilities_and_names_of_random_operations_do_not_make_blocks_differ() -> None:
    _, first, *others, _ = (p.text for p in timed_regions(traced(model=vit(depth=4, drop_path_rate=0.3))))
    assert len(others) == 2 and len(set(others)) == 1 and first != others[0]  # the first block drops nothing


def test_another_batch_or_width_is_another_piece() -> None:
    texts = {piece.text for piece in timed_regions(traced())}
    assert texts.isdisjoint(piece.text for piece in timed_regions(traced(8)))


# -- timing ----------------------------------------------------------------------------------------------------------


def test_a_piece_runs_as_on_a_rank_and_adds_to_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.params.grad_buffer.MAX_DEFERRED_BYTES", 0)
    piece = next(p for p in timed_regions(traced()) if any("blocks.1" in name for name in p.ops))
    running = RegionRun(piece.program, compiled=False, device=ONE, keys={})
    running.forward_backward()
    once = {name: view.clone() for name, view in running.gradients.views.items()}
    running.forward_backward()
    assert len(once) == sum(w.requires_grad for w in piece.program.weights) == 12
    for name, view in running.gradients.views.items():
        assert once[name].abs().max() > 0
        torch.testing.assert_close(view, 2 * once[name], msg=name)
    running.gradients.close()


class TokensLast(nn.Module):
    """Tokens of the first block's input are contiguous, channels are not; of its gradient it is the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU()))) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("compiled", [False, True])
def test_no_gradient_between_pieces_is_copied(compiled: bool) -> None:
    piece = next(p for p in timed_regions(traced(4, TokensLast())) if p.program.receives)
    (edge,) = piece.program.receives
    assert edge.value.stride == (1024, 16, 1)
    running = RegionRun(piece.program, compiled, ONE, {})
    for _ in range(2):
        running.forward_backward()
    with torch.profiler.profile() as profile:
        running.forward_backward()
    events = profile.events() or []
    assert any("AccumulateGrad" in event.name for event in events)
    parents = {event.cpu_parent.name for event in events if event.name == "aten::copy_" and event.cpu_parent}
    assert not any("AccumulateGrad" in name or "CompiledFunctionBackward" in name for name in parents)
    running.gradients.close()


def test_times_of_a_piece_whole_and_split_over_ranks() -> None:
    graph = traced()
    free = replace(CPU, collective=Link(0.0, 1e15))
    priced = PlanCosts(graph, free).priced(mesh_axes((2,)), Replicas(), 4, 1, 0)
    assert priced is not None
    split = apply_strategies(graph, priced.strategies, mesh_axes((2,)), free).graph
    assert any("autopar." in op.target for op in split.ops)
    for number, local in ((1, graph), (2, split)):
        piece = max(timed_regions(local), key=lambda piece: len(piece.ops))
        found = time_region(piece.program, mesh_axes((number,)), ExecutionMode(), ONE)
        # On processors that others use, the difference that a backward is may be lost in what is then called unsteady.
        assert found.forward_seconds > 0
        assert found.backward_seconds > 0 or found.spread > making.MAX_STEADY_SPREAD


def test_a_compiled_piece() -> None:
    found = time_region(next(iter(timed_regions(traced(2)))).program, (), ExecutionMode(compiled=True), ONE)
    assert found.forward_seconds > 0


def test_factors_make_prices_what_was_measured() -> None:
    graph = traced()
    facts = graph_stats(graph)
    measured = [(piece.ops, 0.5, 0.25) for piece in timed_regions(graph)]
    costs = PlanCosts(graph, CPU)
    before = costs.unsharded_costs(4)
    costs.use_measurements(MeasuredConfig((), 4), measured)
    after = costs.unsharded_costs(4)
    assert [group.ops for group in after.groups] == [group.ops for group in before.groups]
    assert sum(g.forward_seconds for g in after.groups) == pytest.approx(0.5 * 4)
    assert sum(g.backward_seconds for g in after.groups) == pytest.approx(0.25 * 4)
    assert measured_factors(Pricing(graph, facts, CPU, 4), measured).keys() == {op.name for op in graph.ops}


# -- the cache -------------------------------------------------------------------------------------------------------


def test_what_was_measured_is_known_in_its_setting_alone(tmp_path: Path) -> None:
    setting = region_setting("cpu", ExecutionMode(), 2)
    cache = TimesCache(tmp_path, setting.text)
    assert cache.is_empty and cache.get("a") is None
    cache.put("a", RegionTimes(1.0, 2.0, 0.1))
    assert TimesCache(tmp_path, setting.text).get("a") == RegionTimes(1.0, 2.0, 0.1)
    unlike = (
        {"torch": "1.13"},
        {"driver": "1"},
        {"execution_mode": ExecutionMode(compiled=True)},
        {"execution_mode": ExecutionMode(captured=True)},
    )
    for other in (replace(setting, **change) for change in unlike):
        assert TimesCache(tmp_path, other.text).is_empty
    assert f"device: {setting.device}" in (cache.folder / "setting.txt").read_text()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of autopar's sources."""
    return shutil.copytree(PACKAGE, tmp_path / "autopar", ignore=shutil.ignore_patterns("__pycache__"))


def test_code_that_makes_or_times_regions_is_in_the_key(package: Path) -> None:
    digest = source_digest.__wrapped__
    before = digest(package)
    assert region_setting("cpu", ExecutionMode(), 2).source == before == source_digest()
    for name in ("tools/cli/app.py", "solve/search.py", "cost/ops/op_cost.py", "runtime/rank.py", "ir/plan.py"):
        (package / name).write_text("# other\n")
        assert digest(package) == before, name
    for name in (
        "codegen/emit.py", "ops/kernels/philox.py", "trace/passes/autocast.py", "sharding/table.py",
        "measure/regions/timing.py", "measure/timer.py", "runtime/params/grad_buffer.py", "ir/layout.py",
    ):  # fmt: skip
        with (package / name).open("a") as file:
            file.write("\n")
        assert digest(package) != before, name
        before = digest(package)
    (package / "codegen" / "emit.py").rename(package / "codegen" / "emitted.py")
    assert digest(package) != before


# Modules that a worker imports and whose code changes no time: names, prices and errors; the start of processes; and
# collectives, of which a `NullCommunicator` takes the place.
NO_MATTER = {
    "autopar.ir.activation",
    "autopar.ir.network",
    "autopar.ir.units",
    "autopar.errors",
    "autopar.runtime.launch.fork_server",
    "autopar.runtime.launch.shared_memory",
    *(
        f"autopar.ir.{name}"
        for name in (
            "comm_sizes",
            "cost_graph",
            "grad_buckets",
            "hardware",
            "mesh",
            "names",
            "placement",
            "plan_parts",
        )
    ),
    "autopar.measure.workers",
    "autopar.runtime.launch.loopback",
    *(
        f"autopar.runtime.comm.{name}"
        for name in (
            "protocols",
            "replica_collectives",
            "symmetric_collectives",
        )
    ),
    "autopar.runtime.comm.symmetric_p2p",
}


def test_all_that_a_worker_imports_is_in_the_key() -> None:
    assert all((PACKAGE / name).exists() for name in SOURCES)
    counted = {module_name(path) for path in source_files(PACKAGE)}
    modules = {module_name(path): path for path in FILES}
    reached, front = set[str](), {"autopar.measure.regions.timing"}
    while front:
        reached |= front
        names = {name for module in front for name in imports(modules[module])}
        front = (names | {name.rpartition(".")[0] for name in names}).intersection(modules) - reached - {"autopar"}
    packages = {module for module in reached if modules[module].stem == "__init__"}
    assert reached - counted - packages == NO_MATTER


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"forward_seconds": -1.0, "backward_seconds": 0.0, "spread": 0.0}'])
def test_a_damaged_file_is_said_and_made_anew(tmp_path: Path, broken: str) -> None:
    cache = TimesCache(tmp_path, "here")
    cache.put("a", RegionTimes(1.0, 2.0, 0.1))
    cache.path("a").write_text(broken)
    with pytest.warns(
        CacheWarning, match=r"a\.json holds no measured times .* it is removed, and measured again"
    ) as said:
        assert cache.get("a") is None
    assert [warning.filename for warning in said] == [__file__] and not cache.path("a").exists()


def test_a_shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are for all users, and one that only another user may read stays."""
    umask = os.umask(0o022)
    cache = TimesCache(tmp_path, "here")
    cache.put("a", RegionTimes(1.0, 2.0, 0.1))
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in cache.folder.iterdir()} == {0o644}

    def private(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", private)
    with pytest.warns(CacheWarning, match=r"a\.json cannot be read \(Permission denied\): it is measured again"):
        assert cache.get("a") is None
    assert cache.path("a").exists()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "times").write_text("in the way")
    with pytest.raises(UsageError, match=r"Cannot keep measured times in .*Set AUTOPAR_CACHE .* or plan with cost="):
        TimesCache(tmp_path, "here").put("a", RegionTimes(1.0, 2.0, 0.1))


def write_for_ever(folder: str, seconds: float) -> None:
    cache = TimesCache(Path(folder), "here")
    while True:
        cache.put("a", RegionTimes(seconds, seconds, 0.0))


def test_writers_that_are_killed_leave_a_whole_file(tmp_path: Path) -> None:
    cache = TimesCache(tmp_path, "here")
    cache.put("a", RegionTimes(1.0, 1.0, 0.0))
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_for_ever, args=(str(tmp_path), float(k + 1))) for k in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        for _ in range(20):
            found = cache.get("a")
            assert found is not None and found.forward_seconds in (1.0, 2.0, 3.0)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    found = cache.get("a")
    assert found is not None and found.forward_seconds in (1.0, 2.0, 3.0)


# -- plans -----------------------------------------------------------------------------------------------------------


def test_a_measured_plan_predicts_what_was_measured(timed: list[str]) -> None:
    found = plan(cost="measured", dp=2, microbatches=1)
    assert found.hardware.cost == "measured" and "operations timed" in " ".join(str(found).split())
    seconds = 3e-6 * 8 * len(traced().ops)
    stage = found.stages[0]
    assert stage.forward_seconds + stage.backward_seconds == pytest.approx(seconds)
    assert timed == ["VisionTransformer with 8 samples"]


def test_a_second_plan_measures_nothing_and_auto_takes_what_there_is(timed: list[str]) -> None:
    assert plan(dp=2).hardware.cost == "analytic"
    first = plan(cost="measured", dp=2)
    count = len(timed)
    for cost in ("measured", "auto"):
        again = plan(cost=cost, dp=2)
        assert again == replace(first, solver=again.solver)  # but for how long it took
    assert len(timed) == count
    assert plan(cost="analytic", dp=2).hardware.cost == "analytic"
    other = plan(cost="auto", tp=2)  # of which nothing is known
    assert other.hardware.cost == "analytic" and other.prediction == plan(cost="analytic", tp=2).prediction


def test_measurements_decide(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large microbatches are made slow: the plan then has smaller ones, of which it is known how fast they are."""

    def run(self: RegionTimer, programs: Mapping[str, Any], keep: Any, what: str, limit: float) -> str:
        for key, (program, _) in programs.items():
            keep(key, RegionTimes(1e-3 * program.batch**2, 1e-3 * program.batch**2, 0.0))
        return ""

    monkeypatch.setattr(RegionTimer, "measure_programs", run)
    found = {cost: autopar.plan(vit(), 2, images(4096), dp=2, cost=cost) for cost in ("analytic", "measured")}
    sizes = {cost: found[cost].microbatch_size for cost in found}
    assert sizes["measured"] < sizes["analytic"]
    seconds = found["measured"].stages[0].forward_seconds
    assert seconds == pytest.approx(4e-3 * sizes["measured"] ** 2)


def test_a_damaged_cache_is_measured_again(timed: list[str], folder: Path) -> None:
    plan(cost="measured", dp=2, microbatches=1)
    for path in (folder / "times").rglob("*.json"):
        path.write_text("torn")
    with pytest.warns(CacheWarning):
        assert plan(cost="measured", dp=2, microbatches=1).hardware.cost == "measured"
    assert len(timed) == 2


def test_of_processes_at_the_same_time_the_slowest_counts() -> None:
    fast, slow = RegionTimes(1.0, 3.0, 0.2), RegionTimes(2.0, 2.5, 0.1)
    assert making.slowest([fast, slow]) == making.slowest([slow, fast]) == slow
    assert making.slowest([fast, None]) is None


def test_unsteady_times_are_said_and_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: RegionTimer, programs: Mapping[str, Any], keep: Any, what: str, limit: float) -> str:
        for key in programs:
            keep(key, RegionTimes(1e-3, 1e-3, 0.9))
        return ""

    monkeypatch.setattr(RegionTimer, "measure_programs", run)
    with pytest.warns(MeasuringWarning, match="Times of 3 regions of .* lie up to 90 % apart.* are not kept"):
        plan(cost="measured", dp=2, microbatches=1)
    assert not list(folder.rglob("*.json"))


def test_what_finds_no_room_is_priced_by_the_cost_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: RegionTimer, programs: Mapping[str, Any], keep: Any, what: str, limit: float) -> str:
        for key in programs:
            keep(key, None)
        return ""

    monkeypatch.setattr(RegionTimer, "measure_programs", run)
    with pytest.warns(MeasuringWarning, match="3 regions of .* need more memory than the device has free"):
        found = plan(cost="measured", dp=2, microbatches=1)
    analytic = plan(cost="analytic", dp=2, microbatches=1)
    assert found.prediction.step_seconds == pytest.approx(analytic.prediction.step_seconds)


# -- wrong requests --------------------------------------------------------------------------------------------------


def test_an_unknown_source_of_costs() -> None:
    with pytest.raises(UsageError, match=r"cost='messured' is unknown\. It is one of analytic, measured, auto"):
        plan(cost="messured")


def test_a_device_that_is_not_here() -> None:
    with pytest.raises(UsageError, match=r"cost model h200-nvlink is of NVIDIA H200.* and there is no GPU here"):
        plan(cost="measured", hardware="h200-nvlink")
    assert plan(cost="auto", hardware="h200-nvlink").hardware.cost == "analytic"


def test_a_launchers_ranks_measure_as_many_processes_as_share_a_host(
    timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan(cost="measured", dp=2).hardware.cost == "measured"
    launcher = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    for name, number in launcher.items():
        monkeypatch.setenv(name, number)
    for module in ("autopar.runtime.launch.devices", "autopar.measure.device"):
        monkeypatch.setattr(f"{module}.num_processors", lambda: 6)
    timer = region_timer_for("measured", None, CPU, 4, None)
    assert timer is not None and (timer.setting.processes, timer.setting.threads) == (2, torch.get_num_threads())
    # Processes that call autopar.plan do so each by itself.
    with pytest.raises(UsageError, match=r"torchrun's processes would each measure.*parallelize, .* -o plan\.json"):
        plan(cost="measured", dp=2)
    with pytest.raises(UsageError, match=r"measure_seconds=10 in autopar\.plan: torchrun's processes"):
        plan(measure_seconds=10, dp=2)
    assert plan(cost="auto", dp=2).hardware.cost == "analytic"


# -- what else reads plans -------------------------------------------------------------------------------------------


@pytest.mark.full
def test_explain_compares_prices_of_one_kind(timed: list[str], folder: Path) -> None:
    """A question about a measured plan is answered by measurements, or the answer says that it is not."""
    source = ModelSource("test_vit")
    found = autopar.plan(source, 2, batch_size=16, cost="measured", dp=2)
    call = example_call(source.build("meta"), None, 16, None)
    rebuilt = ReplanContext(source.name, {}, source.build("meta"), {}, call, CPU, "cpu-generic")
    questions = [Query("dp=2", {"dp": 2}), Query("tp=2", {"tp": 2})]
    same, unknown = answers(found, rebuilt, questions)
    assert "that is the plan in the file" in same.text
    assert "by the cost model, which does not compare with the file's: there operations were timed" in unknown.text
    analytic = autopar.plan(source, 2, batch_size=16, cost="analytic", dp=2)
    (alike,) = answers(analytic, rebuilt, questions[:1])
    assert "that is the plan in the file" in alike.text

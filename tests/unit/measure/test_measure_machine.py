"""`autopar profile`: fits find the constants that made the points, files refit, runs go on, bad input is refused."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import torch
from support.machine_points import CAPTURED, point
from typer.testing import CliRunner

from autopar.api.options import Options
from autopar.cost.hardware.cost_file import UNITS
from autopar.cost.hardware.load import cost_model_dir, hardware_names, load_hardware
from autopar.cost.ops.overlap import OVERLAP_WINDOWS
from autopar.errors import HardwareError, UsageError
from autopar.ir.hardware import Efficiency, ExecutionMode, Launch, Link
from autopar.measure import timer
from autopar.measure.device import ProfileSetting
from autopar.measure.machine.async_tp import ASYNC_TP_OPS
from autopar.measure.machine.cases import COLLECTIVES, Case, cases, group_sizes
from autopar.measure.machine.fit_constants import fit
from autopar.measure.machine.points import MeasuredPoint, load_points, save_points
from autopar.measure.machine.preserved import preserved_sections
from autopar.measure.machine.write_cost_model import RawMeasurements, cost_model_text, raw_points
from autopar.runtime.launch.devices import Machine
from autopar.tools.cli.app import app

SETTING = ProfileSetting("NVIDIA Toy", "cuda", "2.15", 0, 4, 8)
MACHINE = replace(
    load_hardware("h200-nvlink"),
    peak_flops={"float32": 5e13, "bfloat16": 8e14, "float16": 8e14, "float64": 5e13},
    memory_bytes_per_second=4.3e12,
    memory_efficiency=0.9,
    launch=Launch(8e-6, 5e-6, 2e-6),
    memory_half_bytes=2e5,
    efficiency={
        "matmul": Efficiency(0.8, 5e8),
        "attention": Efficiency(0.5, 2e9, 2e12, Efficiency(0.3, 4e9, 1e12)),
        "convolution": Efficiency(0.6, 1e9, backward=Efficiency(0.4, 2e9, 5e12)),
        "depthwise": Efficiency(0.02, 1e8, backward=Efficiency(0.01, 1e8)),
    },
    dtype_efficiency={
        ("matmul", "bfloat16"): Efficiency(0.7, 3e8),
        ("attention", "float16"): Efficiency(0.3, 1e8, backward=Efficiency(0.6, 1e8)),
        ("convolution", "float32"): Efficiency(7.0, 2e9, 4e12, Efficiency(5.0, 2e9)),  # TF32, unlike matmuls
    },
    group_collective={
        (kind, ranks): Link(1e-5 * ranks, 1e11 * (number + 1))
        for number, kind in enumerate(COLLECTIVES)
        for ranks in (2, 4)
    },
)


@pytest.fixture(scope="module")
def points() -> tuple[MeasuredPoint, ...]:
    return tuple(point(case, MACHINE, CAPTURED) for case in cases("cuda", 4))


@pytest.fixture(scope="module")
def made(points: tuple[MeasuredPoint, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "toy.toml"
    path.write_text(cost_model_text("toy", RawMeasurements(SETTING, points), fit(points, SETTING), date(2026, 11, 22)))
    return path


def test_the_file_prices_as_the_machine_that_was_measured(points: tuple[MeasuredPoint, ...], made: Path) -> None:
    found = load_hardware(made)
    assert (found.name, found.device, found.devices_per_node) == ("toy", "NVIDIA Toy", 8)
    assert found.memory_bytes == pytest.approx(MACHINE.memory_bytes)
    assert (found.launch.plain, found.launch.compiled) == pytest.approx((8e-6, 5e-6))
    for case, measured in zip(cases("cuda", 4), points, strict=True):
        if case.kind != "capacity":
            assert point(case, found, CAPTURED).value == pytest.approx(measured.value, rel=2e-3), case.name


def test_asymptotes_are_relative_to_the_peak_of_matmuls(points: tuple[MeasuredPoint, ...], made: Path) -> None:
    found = load_hardware(made)
    assert found.peak_flops["float32"] == pytest.approx(5e13 * 0.8, rel=1e-3)
    convolution = found.dtype_efficiency["convolution", "float32"]
    assert convolution.asymptote == pytest.approx(7.0 / 0.8, rel=1e-2)
    assert convolution.bytes_per_second == pytest.approx(4e12, rel=1e-2)
    assert convolution.backward is not None and convolution.backward.bytes_per_second > 1e14  # it hides its traffic
    assert found.dtype_efficiency["matmul", "float32"].backward is None


def test_a_dtype_that_was_not_measured_is_an_assumption(points: tuple[MeasuredPoint, ...], made: Path) -> None:
    """It is priced as the measured dtype that reaches the least of its peak."""
    found = load_hardware(made).dtype_efficiency
    assert found["convolution", "float64"] == found["convolution", "float16"]
    assert found["attention", "float64"] == found["attention", "float16"]
    (constant,) = [c for c in fit(points, SETTING) if c.path == ("efficiency", "attention", "float64", "half")]
    assert (constant.num_points, constant.error) == (0, 0.5)
    assert constant.assumption.startswith("as in float16")


def test_small_points_weigh_less_than_large_ones(points: tuple[MeasuredPoint, ...]) -> None:
    """A step is made of large kernels: small ones that take twice as long do not move what is said of these."""
    small = {"matmul forward float32 64x256x256", "matmul backward float32 64x256x256"}
    bent = [replace(p, value=2 * p.value) if p.name in small else p for p in points]
    before, after = ({c.path: c for c in fit(own, SETTING)} for own in (points, bent))
    path = ("efficiency", "matmul", "float32", "asymptote")
    assert after[path].value == pytest.approx(before[path].value, rel=0.02)
    assert before[path].error_of_all < 0.01 < after[path].error < after[path].error_of_all / 2


def test_what_products_hide_of_collectives(points: tuple[MeasuredPoint, ...], made: Path) -> None:
    assert set(ASYNC_TP_OPS) == set(OVERLAP_WINDOWS)
    assert load_hardware(made).overlap_efficiency == pytest.approx(MACHINE.overlap_efficiency, rel=1e-2)

    def share(fused_value: Callable[[MeasuredPoint], float]) -> float:
        """Fitted with other seconds of the fused operators."""
        changed = [replace(p, value=fused_value(p)) if p.case.fusion == "fused" else p for p in points]
        return next(c.value for c in fit(changed, SETTING) if c.path == ("overlap", "layers"))

    assert share(lambda p: 2 * p.value) == 0 and share(lambda p: p.value / 2) == 1
    alone = [p for p in points if p.case.fusion != "fused"]
    with pytest.raises(
        UsageError, match=r"needs overlap all_gather_linear fused bfloat16 .*, of which .* --only overlap"
    ):
        fit(alone, SETTING)
    without = fit([p for p in points if p.kind != "overlap"], SETTING)
    assert not any(c.path[0] == "overlap" for c in without)


EARLIER_WORDS = {
    "overlap": "beside",
    "all_gather_linear": "gathered_linear",
    "linear_with_async_grad_allreduce": "summed_linear",
    "pipelined_all_gather_linear": "gathered_rows_linear",
    "pipelined_linear_reduce_scatter": "scattered_rows_linear",
    "unfused": "apart",
    "fused": "joined",
}


def test_files_with_earlier_names_are_read(points: tuple[MeasuredPoint, ...], made: Path, tmp_path: Path) -> None:
    """Cost models and interrupted runs of users; reading them again gives present names."""

    def earlier(text: str) -> str:
        return re.sub(r"[\w-]+", lambda word: EARLIER_WORDS.get(word[0], word[0]), text)

    model, part = tmp_path / "m.toml", tmp_path / "m.toml.part"
    model.write_text(earlier(made.read_text()))
    assert "beside gathered_linear apart" in model.read_text() and "overlap" not in model.read_text()
    assert raw_points(model) == RawMeasurements(SETTING, points)
    assert load_hardware(model) == load_hardware(made)
    save_points(part, SETTING, points)
    part.write_text(earlier(part.read_text()))
    assert load_points(part, SETTING).points == points


def test_a_measured_number_takes_the_place_of_a_kept_one(points: tuple[MeasuredPoint, ...], tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text((cost_model_dir() / "h200-nvlink.toml").read_text().replace("value = 0.57", "value = 0.11"))
    before, constants = load_hardware(path), fit(points, SETTING)
    assert before.overlap_efficiency == 0.11
    kept = preserved_sections(path, "cuda").without({c.path for c in constants})
    assert set(kept.tables["overlap"]) == {"replica_latency", "replica_bandwidth"}
    path.write_text(cost_model_text("toy", RawMeasurements(SETTING, points), constants, date(2026, 11, 22), kept))
    after = load_hardware(path)
    assert after.overlap_efficiency == pytest.approx(MACHINE.overlap_efficiency, rel=1e-2)
    assert after.replica_contention == before.replica_contention


def test_layer_norms_leave_the_bandwidth_as_it_is(points: tuple[MeasuredPoint, ...]) -> None:
    slow = [replace(p, value=3 * p.value) if "layer_norm" in p.name else p for p in points]
    before, after = ({c.path: c for c in fit(own, SETTING)} for own in (points, slow))
    path = ("memory", "efficiency")
    assert after[path].value == before[path].value
    assert "layer_norm by itself takes up to 1 times" in before[path].note
    assert "layer_norm by itself takes up to 3 times" in after[path].note


def test_a_fit_that_no_point_tests_has_a_large_error(points: tuple[MeasuredPoint, ...]) -> None:
    one = [p for p in points if p.kind != "depthwise" or p.name.endswith("float32 64x96x96x56x7x1x96")]
    errors = {c.path: c.error for c in fit(one, SETTING)}
    assert errors["efficiency", "depthwise", "float32", "asymptote"] == 0.5
    assert errors["efficiency", "matmul", "float32", "asymptote"] < 0.01


def measured_files() -> list[Path]:
    paths = [cost_model_dir() / f"{name}.toml" for name in hardware_names()]
    return [path for path in paths if raw_points(path) is not None]


def check_refit(path: Path) -> None:
    data, raw = tomllib.loads(path.read_text()), raw_points(path)
    assert raw is not None
    for constant in fit(raw.points, raw.setting):
        entry = data
        for key in constant.path:
            entry = entry[key]
        if constant.quantity == "count":
            assert entry == constant.value
            continue
        value = entry["value"] * UNITS[constant.quantity][entry["unit"]]
        assert value == pytest.approx(constant.value, rel=1e-4, abs=1e-12), constant.path
        assert entry["error"] == pytest.approx(constant.error, rel=1e-2), constant.path


def test_ranks_that_communicate_run_equally_often_whatever_their_clocks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for seconds in (1e-6, 10.0):  # of a run, as two ranks find it
        runs: list[None] = []
        monkeypatch.setattr(timer, "single_run_seconds", lambda run, device, seconds=seconds: seconds)
        timer.time_repeats([lambda runs=runs: runs.append(None)], torch.device("cpu"), inner=3)
        counts.append(len(runs))
    assert counts == [3 * timer.REPEATS] * 2


def test_long_runs_are_timed_seldom_and_short_ones_on_all_their_data(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, expected in ((1.0, {0}), (1e-3, {0, 1, 2})):
        touched: list[int] = []
        monkeypatch.setattr(timer, "single_run_seconds", lambda run, device, seconds=seconds: seconds)
        timer.time_eager([lambda k=k, touched=touched: touched.append(k) for k in range(3)], torch.device("cpu"))
        assert set(touched) == expected
        assert len(touched) == (1 + timer.LONG_RUN_REPEATS if seconds == 1.0 else 3 + 4 * timer.REPEATS)


def test_every_measured_file_refits_to_its_constants(made: Path) -> None:
    for path in (made, *measured_files()):
        check_refit(path)


def test_a_changed_constant_does_not_refit(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "changed.toml"
    path.write_text(made.read_text().replace("plain = { value = 8,", "plain = { value = 9,"))
    with pytest.raises(AssertionError, match="launch"):
        check_refit(path)


@pytest.mark.parametrize(
    "kind", ["capacity", "launch", "matmul", "attention", "depthwise", "memory", "optimizer", "all-to-all"]
)
def test_a_kind_without_points(points: tuple[MeasuredPoint, ...], kind: str) -> None:
    with pytest.raises(UsageError, match=rf"needs {kind}.*--only {kind}"):
        fit([p for p in points if p.kind != kind], SETTING)


def test_one_device_has_no_links(points: tuple[MeasuredPoint, ...], tmp_path: Path) -> None:
    setting, path = replace(SETTING, devices=1), tmp_path / "one.toml"
    alone = tuple(p for p in points if p.ranks == 1)
    path.write_text(cost_model_text("one", RawMeasurements(setting, alone), fit(alone, setting), date(2026, 11, 22)))
    assert (load_hardware(path).link, load_hardware(path).devices_per_node) == (None, 1)


def test_a_way_that_does_not_exist_is_an_assumption(points: tuple[MeasuredPoint, ...]) -> None:
    own = [p for p in points if not p.name.startswith("launch ca")]
    (captured,) = [c for c in fit(own, replace(SETTING, device_type="cpu")) if c.path == ("launch", "captured")]
    assert (captured.value, captured.num_points) == (5e-6, 0)
    assert captured.assumption.startswith("as compiled")


@pytest.mark.parametrize(("devices", "sizes"), [(1, ()), (2, (2,)), (6, (2, 4, 6)), (8, (2, 4, 8))])
def test_group_sizes(devices: int, sizes: tuple[int, ...]) -> None:
    assert group_sizes(devices) == sizes


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_names_of_cases_differ(device_type: str) -> None:
    names = [case.name for case in cases(device_type, 4)]
    assert len(set(names)) == len(names) > 100


def test_kept_points(points: tuple[MeasuredPoint, ...], tmp_path: Path) -> None:
    path = tmp_path / "m.part"
    assert load_points(path, SETTING).points == ()
    save_points(path, SETTING, points[:3])
    assert load_points(path, SETTING).points == points[:3]
    text = path.read_text()
    path.write_text(text[:-9])  # the last line was being written
    kept = load_points(path, SETTING)
    assert kept.points == points[:2]
    assert "last line was cut off" in kept.note
    path.write_text(text[:9])
    assert "first line" in load_points(path, SETTING).note
    other = load_points(path, replace(SETTING, torch="2.16"))
    assert other.points == ()
    path.write_text(text)
    other = load_points(path, replace(SETTING, torch="2.16"))
    assert (other.points, "torch 2.15 instead of 2.16" in other.note) == ((), True)
    for broken in (text.replace('"kind"', '"knd"'), text.replace('"value": ', '"value": -'), "what?\n"):
        path.write_text(broken)
        with pytest.raises(UsageError, match=r"Cannot read the points kept in .*m.part.*Remove that file"):
            load_points(path, SETTING)


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """`autopar profile` in a folder of its own, where measuring takes no time; the names that each run measured."""
    monkeypatch.chdir(tmp_path)
    runs: list[list[str]] = []
    machine = replace(load_hardware("cpu-generic"), memory_bytes=2**33)

    def fake(
        setting: ProfileSetting,
        todo: Sequence[Case],
        file: Path,
        known: Sequence[MeasuredPoint],
        progress: Callable[[int, str], None],
    ) -> None:
        runs.append([case.name for case in todo])
        loose = {"memory gelu float32 1024"} if len(runs) == 1 else set()
        new = [point(case, machine, ExecutionMode()) for case in todo]
        save_points(file, setting, [*known, *(replace(p, spread=0.9) if p.name in loose else p for p in new)])

    monkeypatch.setattr("autopar.measure.machine.measure.measure", fake)
    return runs


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        app, ["profile", *arguments, "--devices", "2", "--backend", "gloo"], prog_name="autopar"
    )
    return result.exit_code, " ".join(result.output.split())


def test_json(faked: list[list[str]]) -> None:
    values = []
    for more in (["--only", "launch"], ["--anyway"]):
        arguments = ["profile", "-o", "m.toml", "--devices", "2", "--backend", "gloo", "--json", *more]
        values.append(json.loads(CliRunner().invoke(app, arguments, prog_name="autopar").stdout))
    partly, whole = values
    assert list(partly) == list(whole) == ["file", "part", "missing", "constants"]
    assert (partly["file"], partly["part"], partly["constants"]) == (None, "m.toml.part", [])
    assert "matmul" in partly["missing"] and len(faked) == 2
    assert (whole["file"], whole["part"], whole["missing"]) == ("m.toml", None, [])
    assert {"path", "value", "quantity", "error", "num_points", "error_of_all", "assumption", "note"} == {
        key for constant in whole["constants"] for key in constant
    }


def test_the_command(faked: list[list[str]], tmp_path: Path) -> None:
    code, out = run("-o", "m.toml")
    assert code == 2
    assert "1 measurement of " in out
    assert "memory gelu float32 1024 90%" in out
    assert not (tmp_path / "m.toml").exists()
    code, out = run("-o", "m.toml", "--name", "mine")  # only what spread is measured again
    assert (code, faked[1]) == (0, ["memory gelu float32 1024"])
    assert "plan with it: autopar plan MODEL --devices 2 --hardware m.toml" in out
    assert not (tmp_path / "m.toml.part").exists()
    assert load_hardware("m.toml").name == "mine"
    check_refit(tmp_path / "m.toml")
    code, out = run("-o", "m.toml", "--only", "launch,optimizer")
    assert code == 0
    assert {name.split()[0] for name in faked[2]} == {"launch", "optimizer"}


CARRIED = """
[network]
bandwidth = { value = 50, unit = "GB/s", error = 0.3, date = 2026-11-20, source = "assumption: a \\"port\\" per GPU" }
latency = { value = 35, unit = "us", error = 0.5, date = 2026-11-20, source = "assumption: more than inside" }

[reserve]
memory = { value = 38, unit = "MB", error = 0.4, date = 2026-11-21, source = "measured: peaks" }

[beside]  # the earlier name of [overlap]
replica_latency = { value = 86, unit = "us", error = 0.3, date = 2026-11-21, source = "measured: steps" }
replica_bandwidth = { value = 6200, unit = "GB/s", error = 0.5, date = 2026-11-21, source = "measured: steps" }
layers = { value = 57, unit = "%", error = 0.2, date = 2026-11-23, source = "measured: a step" }

[calibration]
covers = ["matmul float32"]
analytic = { value = 7, unit = "%", error = 0.0, date = 2026-11-21, source = "measured: autopar bench --calibrate" }
"""


def test_what_is_not_measured_is_kept(faked: list[list[str]], tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    shipped = (cost_model_dir() / "cpu-generic.toml").read_text()
    path.write_text(shipped.replace('"loopback"', '"my wire"') + CARRIED)
    before = load_hardware(path)
    code, out = run("-o", "m.toml", "--anyway")
    numbers = "[overlap] replica_latency and replica_bandwidth and layers"
    assert code == 0 and f"kept as they were: [reserve] memory, {numbers}" in " ".join(out.split())
    assert "[overlap]" in path.read_text() and "[beside]" not in path.read_text()
    after = load_hardware(path)
    assert (after.name, after.link_name, after.devices_per_node) == ("cpu-generic", "my wire", 64)
    assert (after.network, after.calibration) == (before.network, before.calibration)
    assert after.calibration["analytic"].covers == ("matmul float32",)
    assert (after.reserve_bytes, after.replica_contention, after.overlap_efficiency) == (
        38_000_000,
        Link(86 * 1e-6, 6200e9),
        57 * 1e-2,
    )
    assert after.device != before.device and tomllib.loads(path.read_text())["raw"]["devices"] == 2
    assert tomllib.loads(path.read_text())["network"] == tomllib.loads(CARRIED)["network"]
    assert run("-o", "m.toml", "--anyway", "--name", "mine")[0] == 0
    assert load_hardware(path).name == "mine"
    path.write_text(path.read_text().replace("\nanalytic = ", "\nstp = "))
    measured = len(faked)
    code, out = run("-o", "m.toml")
    assert code == 2 and "calibration.analytic is missing" in out and len(faked) == measured


def test_a_file_of_another_type_of_device_leaves_nothing(faked: list[list[str]], tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text((cost_model_dir() / "h200-nvlink.toml").read_text())
    assert run("-o", "m.toml", "--anyway")[0] == 0
    found = load_hardware(path)
    assert (found.name, found.network, found.devices_per_node) == ("m", None, 2)


def test_anyway(faked: list[list[str]], tmp_path: Path) -> None:
    assert run("--anyway")[0] == 0
    assert load_hardware("machine.toml").device_type == "cpu"
    assert len(faked) == 1


def test_a_part_of_the_kinds_writes_no_file(faked: list[list[str]], tmp_path: Path) -> None:
    code, out = run("-o", "m.toml", "--only", "launch")
    assert (code, (tmp_path / "m.toml").exists()) == (0, False)
    assert "m.toml needs capacity, matmul, attention" in out
    assert {name.split()[0] for name in faked[0]} == {"launch"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "none/m.toml"), "Cannot write to none/m.toml"),
        (("-o", "m.txt"), "-o m.txt must end in .toml"),
        (("--only", "matmull"), "Did you mean matmul?"),
        (("--only", ","), "names no kind"),
        (("--name", " "), "--name is empty"),
    ],
)
def test_wrong_usage(faked: list[list[str]], arguments: tuple[str, ...], message: str) -> None:
    code, out = run(*arguments)
    assert (code, faked) == (2, [])
    assert message in out


def test_a_cost_model_with_broken_points(faked: list[list[str]], tmp_path: Path) -> None:
    assert run("-o", "m.toml", "--anyway")[0] == 0
    path = tmp_path / "m.toml"
    path.write_text(
        path.read_text().replace("ranks = 2, flops", "rank = 2, flops", 1).replace('"ranks": 2', '"rank": 2', 1)
    )
    with pytest.raises(HardwareError, match=r"Cannot read the measurements in .*m.toml: KeyError"):
        raw_points(path)
    assert raw_points(cost_model_dir() / "cpu-generic.toml") is None


@pytest.mark.parametrize(
    ("options", "device_type", "way"),
    [
        (Options(), "cuda", ExecutionMode(compiled=True, captured=True)),
        (Options(), "cpu", ExecutionMode()),
        (Options(compile=True), "cpu", ExecutionMode(compiled=True)),
        (Options(cuda_graph=False), "cuda", ExecutionMode(compiled=True)),
        (Options(cuda_graph=False, compile=False), "cuda", ExecutionMode()),
        (Options(compile=False), "cuda", ExecutionMode(captured=True)),
    ],
)
def test_the_way_that_a_run_will_use(options: Options, device_type: str, way: ExecutionMode) -> None:
    assert options.execution_mode(device_type) == way


@pytest.mark.parametrize(("gpu", "warned"), [("NVIDIA H200", False), ("NVIDIA H100 80GB HBM3", True), ("Toy", True)])
def test_another_gpu_than_the_cost_models(recwarn: pytest.WarningsRecorder, gpu: str, warned: bool) -> None:
    hardware, gpus = load_hardware("h200-nvlink"), ["NVIDIA H200", gpu]
    if warned:
        with pytest.warns(UserWarning, match=f"describes {hardware.device}, and this run has {gpu}"):
            Machine("nccl", "cuda", 1, None).warn_of_other_gpus(hardware, gpus)
    else:
        Machine("nccl", "cuda", 1, None).warn_of_other_gpus(hardware, gpus)
        assert len(recwarn) == 0

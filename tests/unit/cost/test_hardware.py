"""Cost models: what ships, what a number means, and what a broken file is told."""

import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost.hardware.load import cost_model_dir, hardware_names, load_hardware
from autopar.cost.hardware.worse import is_measured, worse
from autopar.cost.ops.kernel_shapes import FORWARD
from autopar.errors import HardwareError
from autopar.ir.hardware import Efficiency, ExecutionMode, Hardware, Launch, Link, StepCalibration
from autopar.ir.network import Network, Port

CPU = (cost_model_dir() / "cpu-generic.toml").read_text()
MACHINE = Hardware(
    name="toy",
    device="toy",
    device_type="cpu",
    memory_bytes=2**30,
    peak_flops={"float32": 1e12},
    memory_bytes_per_second=1e9,
    launch=Launch(1e-6, 5e-7, 1e-7),
    efficiency={"matmul": Efficiency(0.5, 1e6)},
    memory_efficiency=0.5,
    memory_half_bytes=0.0,
    optimizer_bytes_per_second=0.5e9,
    devices_per_node=4,
    link=Link(1e-5, 1e10),
    link_name="wire",
    network=Network(Port(1e-4, 1e9)),
    collective=Link(2e-5, 1e8),
)


def present(link: Link | None) -> Link:
    assert link is not None
    return link


def numbers(table: dict, path: str = ""):
    """(path, entry) of every number in a file."""
    for key, value in table.items():
        if key != "raw" and isinstance(value, dict):
            if "value" in value:
                yield f"{path}{key}", value
            else:
                yield from numbers(value, f"{path}{key}.")


def test_the_shipped_machines():
    assert hardware_names() == ("a100-nvlink", "cpu", "cpu-generic", "h100-nvlink", "h200-nvlink", "rtx4090-pcie")


@pytest.mark.parametrize("name", hardware_names())
def test_every_shipped_number_says_where_it_is_from(name: str):
    assert load_hardware(name).name == name
    entries = dict(numbers(tomllib.loads((cost_model_dir() / f"{name}.toml").read_text())))
    assert len(entries) >= 18
    for path, entry in entries.items():
        assert entry["source"].startswith(("datasheet: ", "measured: ", "assumption: ")), path
        exact = entry["source"].startswith("datasheet: ") or path.startswith("calibration.")  # which is an error itself
        assert exact == (entry["error"] == 0), path


def test_units_become_si():
    a100 = load_hardware("a100-nvlink")
    assert (a100.memory_bytes, a100.memory_bytes_per_second) == (80 * 10**9, 2.039e12)
    assert a100.peak_flops == {"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12, "float64": 19.5e12}
    assert load_hardware("cpu-generic").launch.plain == pytest.approx(10e-6)
    assert load_hardware("rtx4090-pcie").memory_bytes == 24 * 2**30


def test_the_measured_machine_is_like_its_datasheet():
    """Of an H200 SXM: 141 GB, 4.8 TB/s, 67 TFLOP/s without tensor cores and 989 with them, NVLink of 450 GB/s."""
    h200 = load_hardware("h200-nvlink")
    assert 0.9 * 141e9 < h200.memory_bytes < 1.1 * 141e9
    assert 0.8 < h200.memory_bytes_per_second / 4.8e12 < 1
    assert 0.6 < h200.peak_flops["float32"] / 67e12 < 1 and 0.6 < h200.peak_flops["bfloat16"] / 989e12 < 1
    assert 0 < h200.launch.captured < h200.launch.compiled < h200.launch.plain < 1e-4
    assert 1e11 < present(h200.link).bytes_per_second < 4.5e11
    # Matmuls in float32 do without TF32, convolutions have it.
    assert h200.dtype_efficiency["convolution", "float32"].asymptote > 1
    attention = h200.op_seconds("attention", FORWARD.padding(1024, 1024, 64) * 1e12, 0, "bfloat16")
    matmul, depthwise = (h200.op_seconds(kind, 1e12, 0, "bfloat16") for kind in ("matmul", "depthwise"))
    assert matmul < attention < depthwise


@pytest.mark.parametrize(
    ("kind", "flops", "num_bytes", "seconds"),
    [
        ("matmul", 1e9, 0, 1e9 / (1e12 * 0.5 * 1e9 / 1.001e9) + 1e-6),  # bound by arithmetic
        ("matmul", 1e6, 0, 1e6 / (1e12 * 0.25) + 1e-6),  # half of the asymptote
        ("matmul", 1e6, 10**6, 1e6 / 0.5e9 + 1e-6),  # bound by memory
        ("memory", 1e9, 10**6, 1e6 / 0.5e9 + 1e-6),  # FLOPs do not count
        ("memory", 0, 0, 1e-6),
    ],
)
def test_op_seconds(kind, flops, num_bytes, seconds):
    assert MACHINE.op_seconds(kind, flops, num_bytes, "float32") == pytest.approx(seconds)


def test_op_seconds_of_a_dtype_without_peak():
    with pytest.raises(HardwareError, match=r"toy has no peak FLOP/s for int8.*it has float32"):
        MACHINE.op_seconds("matmul", 1.0, 1, "int8")


def test_transfer_seconds():
    assert MACHINE.transfer_seconds(10**6, 2, 2) == 0.0
    assert MACHINE.transfer_seconds(10**6, 0, 3) == pytest.approx(1.1e-4)
    assert MACHINE.transfer_seconds(10**6, 3, 4) == pytest.approx(1.1e-3)


def test_transfer_without_a_network():
    cpu = load_hardware("cpu-generic")
    with pytest.raises(HardwareError, match=r"one node of 64 devices and no network; ranks 0 and 64"):
        cpu.transfer_seconds(1, 0, 64)


@pytest.mark.parametrize(
    ("kind", "ranks", "stride", "seconds"),
    [
        ("all-reduce", 2, 1, 2e-5 + 2 / 2 * 1e-2),
        ("all-reduce", 4, 1, 2e-5 + 6 / 4 * 1e-2),
        ("all-gather", 4, 1, 2e-5 + 3 / 4 * 1e-2),
        ("reduce-scatter", 4, 1, 2e-5 + 3 / 4 * 1e-2),
        ("all-to-all", 4, 1, 2e-5 + 3 / 16 * 1e-2),
        ("all-reduce", 2, 3, 2e-5 + 1e-2),  # ranks 0 and 3 of a node of 4
        ("all-reduce", 2, 4, 1e-4 + 1e-3),  # ranks 0 and 4 are on two
        ("all-gather", 8, 1, 1e-4 + 7 / 8 * 1e-2),  # the links inside are slower than four ports
        ("all-reduce", 1, 8, 0.0),
    ],
)
def test_collective_seconds(kind, ranks, stride, seconds):
    assert MACHINE.collective_seconds(kind, 10**6, ranks, stride) == pytest.approx(seconds)


def test_a_collective_without_a_network():
    cpu = load_hardware("cpu-generic")
    assert cpu.collective_seconds("all-reduce", 0, 64) == pytest.approx(340e-6)
    with pytest.raises(HardwareError, match=r"one node of 64 devices and no network; ranks 0 and 96 are on"):
        cpu.collective_seconds("all-reduce", 0, 4, 32)


def test_measured_collectives_reproduce_their_measurements():
    name, expected = "cpu-generic", [0.02, 0.03, 0.03, 0.02, 0.08, 0.28, 0.12, -0.13, -0.56]
    raw = tomllib.loads((cost_model_dir() / f"{name}.toml").read_text())["raw"]["all_reduce"]
    measured = list(zip(raw["bytes"], raw["seconds"], strict=True))
    machine = load_hardware(name)
    collective = present(machine.collective)
    fitted = collective.bytes_per_second

    def errors(rate: float) -> list[float]:
        other = replace(machine, collective=replace(collective, bytes_per_second=rate))
        return [other.collective_seconds("all-reduce", b, raw["ranks"]) / s - 1 for b, s in measured]

    best = min((fitted * k / 1000 for k in range(500, 2000)), key=lambda rate: sum(e * e for e in errors(rate)))
    assert fitted == pytest.approx(best, rel=0.02)
    assert [round(e, 2) for e in errors(fitted)] == expected


def test_unknown_name_offers_near_matches():
    with pytest.raises(
        HardwareError, match=r"'h200'\. Did you mean h200-nvlink.* There are a100-nvlink, cpu, cpu-generic"
    ):
        load_hardware("h200")


BROKEN = [
    ('name = "cpu-generic"', "", r"field name is missing; it must be a text"),
    ("devices_per_node = 64", "devices_per_node = 0", r"field devices_per_node is 0"),
    ("devices_per_node = 64", 'devices_per_node = "64"', r"field devices_per_node is '64'; it must be a whole number"),
    ("value = 12, ", "value = -12, ", r"field memory.bandwidth.value is -12; it must be above 0"),
    ("value = 12, ", "value = nan, ", r"field memory.bandwidth.value is nan"),
    ("value = 12, ", "value = true, ", r"field memory.bandwidth.value is True; it must be a number"),
    ("value = 12, ", "", r"field memory.bandwidth.value is missing"),
    ('value = 12, unit = "GB/s"', 'value = 12, unit = "GB"', r"memory.bandwidth.unit is 'GB'; bytes per second are"),
    (
        'value = 0.7, unit = "1"',
        'value = 70, unit = "1"',
        r"field memory.efficiency.value is 70 1; a share is at most 1",
    ),
    (
        'value = 100, unit = "us"',
        'value = 100, unit = "GB/s"',
        r"field link.latency.unit is 'GB/s'; seconds are written in",
    ),
    ("[link]", "[lnk]", r"field link is missing"),
    ("[collective]", "[colective]", r"field collective is missing"),
    (
        'value = 340, unit = "us"',
        'value = 340, unit = "MB"',
        r"field collective.latency.unit is 'MB'; seconds are written in",
    ),
    ("[launch]\nplain", "[launch]\nplan", r"field launch.plain is missing"),
    (
        "[launch]\nplain = { value = 10",
        "[launch]\nplain = { value = -1",
        r"field launch.plain.value is -1; it must be at",
    ),
    (
        'half = { value = 0, unit = "B"',
        'half = { value = 0, unit = "s"',
        r"field memory.half.unit is 's'; bytes are written",
    ),
    ("[optimizer]", "[optimiser]", r"field optimizer is missing"),
    ('device_type = "cpu"', 'device_type = "tpu"', r"field device_type is 'tpu'; it is one of cpu, cuda"),
    (
        "[efficiency.attention]",
        "[efficiency.matmul.int8]\n[efficiency.attention]",
        r"efficiency.matmul.int8 is unknown",
    ),
    (
        "[efficiency.attention]",
        "[efficiency.attention.float32]\n[efficiency.attention]",
        r"efficiency.attention.float32.asymptote is missing",
    ),
    ("[efficiency.attention]", "[efficiency.conv]\n[efficiency.attention]", r"efficiency.conv is unknown"),
    ("[raw.all_reduce]", "[collective.all-reduce.one]\n[raw.all_reduce]", r"collective.all-reduce.one is no group"),
    ("[raw.all_reduce]", "[collective.allreduce.4]\n[raw.all_reduce]", r"field collective.allreduce is unknown"),
    ("[raw.all_reduce]", "[collective.all-reduce.4]\n[raw.all_reduce]", r"collective.all-reduce.4.latency is missing"),
    ("[launch]", "speed = 3\n[launch]", r"field peak_flops.speed is unknown"),
    ("[efficiency.attention]", "[efficiency.atention]", r"field efficiency.attention is missing"),
    ("[memory]", "[memory", r"is not valid TOML: .* \(at line \d+"),
]


@pytest.mark.parametrize(("old", "new", "message"), BROKEN, ids=[b[2][:40] for b in BROKEN])
def test_a_broken_file_is_told_its_field(tmp_path: Path, old: str, new: str, message: str):
    assert old in CPU
    path = tmp_path / "mine.toml"
    path.write_text(CPU.replace(old, new, 1))
    with pytest.raises(HardwareError, match=message) as caught:
        load_hardware(path)
    assert str(path) in str(caught.value)


def test_a_dtype_outranks_its_kind():
    machine = replace(
        MACHINE,
        peak_flops={"float32": 1e12, "bfloat16": 1e12},
        dtype_efficiency={("matmul", "bfloat16"): Efficiency(0.25, 0.0)},
    )
    assert machine.op_seconds("matmul", 1e9, 0, "bfloat16") == pytest.approx(4e-3 + 1e-6)
    assert machine.op_seconds("matmul", 1e9, 0, "float32") == MACHINE.op_seconds("matmul", 1e9, 0, "float32")


def test_backwards_and_traffic_that_arithmetic_does_not_hide():
    backward = Efficiency(0.25, 0.0, bytes_per_second=1e8)
    machine = replace(MACHINE, efficiency={"attention": Efficiency(0.5, 0.0, backward=backward)})
    assert machine.op_seconds("attention", 1e9, 10**5, "float32") == pytest.approx(2e-3 + 1e-6)
    assert machine.op_seconds("attention", 1e9, 10**5, "float32", backward=True) == pytest.approx(5e-3 + 1e-6)
    alike = replace(MACHINE, efficiency={"attention": Efficiency(0.5, 0.0)})  # one curve for both
    assert alike.op_seconds("attention", 1e9, 0, "float32", backward=True) == pytest.approx(2e-3 + 1e-6)


EFFICIENCY = '{ value = 3.5, unit = "1", error = 0.1, date = 2026-11-20, source = "measured: here" }'
HALF = '{ value = 2, unit = "MFLOP", error = 0.1, date = 2026-11-20, source = "measured: here" }'
BANDWIDTH = '{ value = 2, unit = "GB/s", error = 0.1, date = 2026-11-20, source = "measured: here" }'


def test_a_kind_with_a_curve_for_each_dtype_needs_no_other(tmp_path: Path):
    head, rest = CPU.split("[efficiency.attention]")
    tables = [
        f"[efficiency.attention.{dtype}]\nasymptote = {EFFICIENCY}\nhalf = {HALF}\n"
        for dtype in ("float32", "bfloat16", "float16", "float64")
    ]
    backward = f"[efficiency.attention.float64.backward]\nasymptote = {EFFICIENCY}\nhalf = {HALF}\n"
    backward += f"bandwidth = {BANDWIDTH}\n"
    path = tmp_path / "mine.toml"
    rest = rest[rest.index("[efficiency.convolution]") :]
    path.write_text(head + "\n".join([*tables, backward]) + rest)
    found = load_hardware(path)
    assert "attention" not in found.efficiency
    plain = Efficiency(3.5, 2e6)  # more than the peak of matmuls, as with other units
    assert found.dtype_efficiency["attention", "float32"] == plain
    assert found.dtype_efficiency["attention", "float64"] == replace(plain, backward=Efficiency(3.5, 2e6, 2e9))
    path.write_text(head + "\n".join([*tables[1:], backward]) + rest)
    with pytest.raises(HardwareError, match=r"efficiency\.attention\.asymptote is missing"):
        load_hardware(path)


def test_the_way_of_running_decides_the_launch():
    seconds = [
        MACHINE.with_mode(ExecutionMode(compiled, captured)).op_seconds("memory", 0, 0, "")
        for compiled, captured in ((False, False), (True, False), (True, True), (False, True))
    ]
    assert seconds == [1e-6, 5e-7, 1e-7, 1e-7]


@pytest.mark.parametrize(
    ("ranks", "latency", "bandwidth"), [(2, 1.0, 1e9), (4, 2.0, 5e9), (8, 3.0, 9e9), (15, 4.0, 13e9), (31, 4.0, 13e9)]
)
def test_groups_between_measured_sizes(ranks: int, latency: float, bandwidth: float):
    groups = {("all-gather", 2): Link(1.0, 1e9), ("all-gather", 15): Link(4.0, 13e9)}
    groups["all-gather", 8] = Link(3.0, 9e9)
    machine = replace(MACHINE, devices_per_node=32, group_collective=groups)
    link = machine.group_link("all-gather", ranks, 1)
    assert (link.latency_seconds, link.bytes_per_second) == (pytest.approx(latency), pytest.approx(bandwidth))
    assert machine.collective_seconds("all-reduce", 0, ranks) == 2e-5  # no group of it was measured
    machine = replace(machine, group_collective={("all-gather", 4): Link(2.0, 1e9)})
    assert machine.collective_seconds("all-gather", 0, 2) == 2.0


def test_small_kernels_do_not_stream():
    machine = replace(MACHINE, memory_half_bytes=10**6)
    assert machine.op_seconds("memory", 0, 10**6, "") == pytest.approx(2e6 / 0.5e9 + 1e-6)
    assert machine.traffic_seconds(10**6) == pytest.approx(1e6 / 0.5e9)  # part of something larger
    assert machine.traffic_seconds(0, 1) == 0.0


def test_a_machine_of_one_device_needs_no_link(tmp_path: Path):
    path = tmp_path / "one.toml"
    head, rest = CPU.replace("devices_per_node = 64", "devices_per_node = 1").split("[link]")
    path.write_text(head + rest[rest.index("[raw.all_reduce]") :])
    machine = load_hardware(path)
    assert machine.collective_seconds("all-reduce", 8, 1) == 0.0
    with pytest.raises(HardwareError, match=r"one node of 1 devices and no network"):
        machine.transfer_seconds(1, 0, 1)


def test_a_calibration_has_an_error_and_the_parts_that_it_covers(tmp_path: Path):
    entry = '{ value = 0.07, unit = "1", error = 0.0, date = 2026-11-20, source = "autopar bench --calibrate" }'
    path = tmp_path / "mine.toml"
    table = f'{CPU}\n[calibration]\ncovers = ["matmul float32"]\n'
    path.write_text(f"{table}analytic = {entry}\n")
    assert load_hardware("cpu-generic").calibration == {}
    assert load_hardware(path).calibration == {"analytic": StepCalibration(0.07, ("matmul float32",))}
    path.write_text(f"{table}measured = {entry}\n")
    assert set(load_hardware(path).calibration) == {"measured"}
    path.write_text(f"{table}analytic = {entry.replace('0.07', '-1')}\n")
    with pytest.raises(HardwareError, match=r"field calibration\.analytic\.value is -1; it must be above 0"):
        load_hardware(path)
    path.write_text(f"{table}analytic = {entry}\nanalitic = {entry}\n")
    with pytest.raises(HardwareError, match=r"field calibration\.analitic is unknown\. Did you mean analytic\?"):
        load_hardware(path)
    for covers, problem in (("", "is missing"), ("covers = [1]\n", r"is \[1\]"), ('covers = "all"\n', "is 'all'")):
        path.write_text(f"{CPU}\n[calibration]\n{covers}analytic = {entry}\n")
        with pytest.raises(HardwareError, match=rf"field calibration\.covers {problem}; it must be a list of texts"):
            load_hardware(path)


def test_numbers_of_a_part_are_worse_by_their_errors():
    rtx4090 = load_hardware("rtx4090-pcie")
    of = {"flops": 1e15, "num_bytes": 0.0, "dtype": "bfloat16"}
    before, after = (m.op_seconds("matmul", **of) for m in (rtx4090, worse(rtx4090, "matmul bfloat16")))
    assert after / before == pytest.approx(1.3, rel=1e-3)
    assert worse(rtx4090, "matmul bfloat16").op_seconds("attention", **of) == rtx4090.op_seconds("attention", **of)
    slower = worse(rtx4090, "links")
    assert present(slower.link).latency_seconds == pytest.approx(45e-6)
    assert present(slower.link).bytes_per_second == pytest.approx(12e9 / 1.3)
    assert worse(rtx4090, "network") == rtx4090, "it has none"
    h200 = load_hardware("h200-nvlink")
    for part in ("memory", "launch", "update", "links", "network", "overlap"):
        assert worse(h200, part) != h200
    assert is_measured(h200, "links") and not is_measured(h200, "network") and not is_measured(rtx4090, "links")


def test_groups_larger_than_those_measured_are_further_off():
    h200 = load_hardware("h200-nvlink")
    two, eight = (
        worse(h200, "links").collective_seconds("all-reduce", 1e9, n) / h200.collective_seconds("all-reduce", 1e9, n)
        for n in (2, 8)
    )
    assert two == pytest.approx(1.039, abs=1e-3) and eight == pytest.approx(1.05 * 1.17, abs=1e-3)


def test_a_file_of_the_users_own(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(CPU.replace('"cpu-generic"', '"mine"').replace("value = 4, ", "value = 8, "))
    assert load_hardware(str(path)).name == "mine"
    assert load_hardware(path).memory_bytes == 8 * 2**30
    with pytest.raises(HardwareError, match=r"Cannot read cost model .*other.toml: .*No such file"):
        load_hardware(tmp_path / "other.toml")


def test_needs_nothing_but_the_standard_library():
    code = "import autopar.cost.hardware.load as h; print(h.load_hardware('cpu-generic').device)"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "one AVX2 CPU core\n"

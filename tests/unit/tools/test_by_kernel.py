"""`autopar bench --by-kernel` without a GPU: kinds of kernels, a recorded trace, prices, sums, and bad input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bench import FLAGS, TINY, request
from support.cli import invoke
from support.kernel_names import ADAM, CE_BACKWARD, CE_FORWARD, KINDS_OF_NAMES

from autopar.cost.ops.op_cost import op_costs
from autopar.errors import UsageError
from autopar.ir.text import rendered
from autopar.runtime.launch.devices import this_machine
from autopar.tools.bench.by_kernel import ByKernel, by_kernel, plan_pricing, with_one_microbatch
from autopar.tools.bench.kernel_rows import (
    GAP,
    OTHER,
    OVERLAP,
    kernel_directions,
    kernel_kind,
    kernel_rows,
    priced_kinds,
)
from autopar.tools.bench.kernel_trace import STEP, KernelEvent, ProfiledStep, profile_steps, profiled_steps
from autopar.tools.bench.outcome import RankResult
from autopar.tools.bench.priced_kernels import priced_kernels
from autopar.tools.bench.priced_ops import priced_graph
from autopar.tools.bench.request import BenchRequest
from autopar.tools.bench.run import Bench
from autopar.tools.report.by_kernel_table import by_kernel_parts

GEMM, GELU, NORM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "triton_poi_fused_gelu_0", "triton_red_fused_norm_1"


@pytest.mark.parametrize("name", KINDS_OF_NAMES)
def test_kinds_of_kernels(name: str) -> None:
    assert kernel_kind(name) == KINDS_OF_NAMES[name]


def test_the_backward_begins_with_the_gradient_of_the_loss() -> None:
    saving = "triton_per_fused_add_native_layer_norm_native_layer_norm_backward_1"  # a forward that saves for both
    names = [GEMM, saving, GELU, CE_FORWARD, CE_BACKWARD, GEMM, NORM, ADAM]
    assert kernel_directions(names) == ["forward"] * 4 + ["backward"] * 3 + ["update"]


def event(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args}


def test_a_trace_is_cut_into_steps() -> None:
    events = [
        {"ph": "M", "name": "process_name", "ts": 0.0, "args": {"name": "python"}},
        event("kernel", "left over", 990.0, 2.0, grid=[1, 1, 1]),
        event("user_annotation", STEP, 1000.0, 500.0),
        event("gpu_user_annotation", STEP, 1010.0, 400.0),
        event("cuda_runtime", "cudaGraphLaunch", 1002.0, 5.0),
        event("kernel", GEMM, 1100.0, 50.0, grid=[132, 1, 1]),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1010.0, 4.0),
        event("user_annotation", STEP, 2000.0, 500.0),
        event("cuda_runtime", "cudaLaunchKernel", 2002.0, 5.0),
        event("gpu_memset", "Memset (Device)", 2010.0, 1.0),
    ]
    first, second = profiled_steps(events)
    assert [(k.name, k.grid) for k in first.kernels] == [("Memcpy DtoD (Device -> Device)", ()), (GEMM, (132, 1, 1))]
    assert [k.start_seconds for k in first.kernels] == pytest.approx([10e-6, 100e-6])
    assert [k.seconds for k in first.kernels] == pytest.approx([4e-6, 50e-6])
    assert (first.captured, second.captured) == (True, False)
    assert [k.name for k in second.kernels] == ["Memset (Device)"]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_the_profiler_annotates_each_step_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    x, calls = torch.ones(4, 4), list[int]()
    steps = profile_steps(lambda: calls.append(int((x @ x).sum())), 2, torch.device("cpu"))
    assert len(calls) == 3 and len(steps) == 2
    if not torch.cuda.is_available():
        assert [len(step.kernels) for step in steps] == [0, 0]


def profiled(*kernels: tuple[str, float, float]) -> ProfiledStep:
    return ProfiledStep(tuple(KernelEvent(name, (1, 1, 1), start, seconds) for name, start, seconds in kernels), True)


STEPS = (
    profiled((GEMM, 0.0, 2.0), (GELU, 1.0, 3.0), (CE_BACKWARD, 5.0, 1.0), (GEMM, 6.0, 1.0), (ADAM, 8.0, 1.0)),
    profiled((GEMM, 0.0, 4.0), (GELU, 4.0, 3.0), (CE_BACKWARD, 8.0, 1.0), (GEMM, 9.0, 3.0), (ADAM, 12.0, 1.0)),
)


def test_kernels_that_overlap_keep_the_device_busy_once() -> None:
    assert [step.busy_seconds for step in STEPS] == pytest.approx([7.0, 12.0])
    assert [step.span_seconds for step in STEPS] == pytest.approx([9.0, 13.0])


def test_kernels_are_summed_by_name_and_direction() -> None:
    rows = {(row.name, row.direction): (row.count, row.seconds) for row in kernel_rows(STEPS)}
    assert rows[GEMM, "forward"] == (1.0, 3.0) and rows[GEMM, "backward"] == (1.0, 2.0)
    assert [row.seconds for row in kernel_rows(STEPS)] == [3.0, 3.0, 2.0, 1.0, 1.0]
    (twice,) = kernel_rows([profiled((GELU, 0.0, 1.0), (GELU, 1.0, 2.0))])
    assert (twice.count, twice.seconds) == (2.0, 3.0)


def asked(**changes: Any) -> BenchRequest:
    constraints = {"hardware": "h200-nvlink", "precision": "bf16", **changes.pop("constraints", {})}
    return request(devices=1, constraints=constraints, microbatch_sizes=None, **changes)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The bench of a plan for one H200."""
    asked_for = replace(with_one_microbatch(asked()), only=("autopar",))
    return Bench(asked_for, this_machine(1), tmp_path_factory.mktemp("bench"), lambda text: None, lambda result: None)


def test_prices_sum_to_the_predicted_step(bench: Bench) -> None:
    priced = priced_graph(plan_pricing(bench, "h200-nvlink")[0])
    kinds = priced_kinds(priced, bench.plan)
    assert sum(kinds.values()) == pytest.approx(bench.plan.prediction.step_seconds)
    assert abs(kinds[OTHER, ""]) < 1e-3 * bench.plan.prediction.step_seconds
    assert {kind for kind, _ in kinds} == {"matmul", "attention", "convolution", "memory", "optimizer", GAP, OTHER}
    assert all(seconds > 0 for key, seconds in kinds.items() if key != (OTHER, ""))
    (attention,) = (row for row in priced.rows if row.kind == "attention")
    assert attention.count == TINY.kwargs["depth"] and attention.names[0].startswith("blocks.0.attn.")
    assert attention.operands == ("bfloat16[8, 4, 17, 16]",) * 3 and attention.outputs == attention.operands[:1]
    assert attention.flops == attention.count * 4 * 8 * 4 * 17 * 17 * 16
    assert attention.num_bytes == attention.count * 4 * 2 * 8 * 4 * 17 * 16


def compared(bench: Bench, steps: Sequence[ProfiledStep]) -> ByKernel:
    rank = RankResult((19.0, 20.0, 21.0), (), 3 * 2**30, profiled=tuple(steps))
    pricing, kernels = plan_pricing(bench, "h200-nvlink")
    return by_kernel(bench, priced_graph(pricing), priced_kernels(pricing, kernels), rank)


def test_kernels_between_products_have_the_compilers_names(bench: Bench) -> None:
    pricing, kernels = plan_pricing(bench, "h200-nvlink")
    rows = priced_kernels(pricing, kernels)
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    sums, head = (row for row in rows if row.name == "fused_add_layer_norm_to" and row.direction == "forward")
    count, size = 2 * TINY.kwargs["depth"] - 1, 8 * 17 * 64  # the second norms, and the first norms of later blocks
    assert (sums.count, sums.num_bytes, head.count) == (count, count * size * (4 + 2 + 4 + 2), 1)
    memory = [cost for cost in op_costs(pricing).values() if cost.flops == 0]
    between = sum(cost.forward_seconds + cost.backward_seconds for cost in memory)
    assert 0 < sum(row.seconds for row in rows) < between


def test_both_sides_sum_to_their_step_and_the_largest_difference_is_first(bench: Bench) -> None:
    result = compared(bench, STEPS)
    assert sum(row.measured_seconds for row in result.kinds) == pytest.approx(20.0)
    assert sum(row.priced_seconds for row in result.kinds) == pytest.approx(result.predicted_seconds)
    differences = [abs(row.difference_seconds) for row in result.kinds]
    assert differences == sorted(differences, reverse=True)
    measured = {(row.kind, row.direction): row.measured_seconds for row in result.kinds}
    assert (measured[GAP, ""], measured[OVERLAP, ""]) == pytest.approx((10.5, -0.5))
    assert (measured["matmul", "forward"], measured["optimizer", "update"]) == pytest.approx((3.0, 1.0))
    named = [(result.kernels[entry.row].name, entry.start_seconds) for entry in result.timeline]
    assert named == [(k.name, k.start_seconds) for k in STEPS[0].kernels]


def test_the_table_and_the_file(bench: Bench) -> None:
    result = compared(bench, STEPS)
    printed = rendered(by_kernel_parts(result), 120, color=False)
    assert "20,000.000 ms measured" in printed and "replayed from a CUDA graph" in printed
    assert "9,500.000 ms busy" in printed and f"{GEMM} [1, 1, 1]" in printed
    assert "scaled_dot_product_attention.default" in printed and "overlap" in printed
    data = json.loads(result.to_json())
    assert "priced fused kernel" in printed and data["fused_kernels"][0]["ops"]
    assert data["kernels"][0]["seconds"] == 3.0 and data["ops"][0]["names"] and len(data["timeline"]) == 5
    assert data["measured_bytes"] == 3 * 2**30 and data["predicted_bytes"] == result.predicted_bytes


def test_a_profile_without_kernels_is_an_error(bench: Bench) -> None:
    with pytest.raises(UsageError, match="The profiler saw no kernels"):
        compared(bench, [ProfiledStep((), True)])


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"microbatches": 4}, "--microbatches 4 is not supported"),
        ({"cost": "measured"}, "--cost measured is not supported"),
        ({"microbatch_size": 2}, "leave --microbatch-size out"),
    ],
)
def test_only_a_step_of_one_microbatch_is_compared(constraints: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        with_one_microbatch(asked(constraints=constraints))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "1", "--backend", "gloo"], "--by-kernel reads the kernels of a CUDA device"),
        ([], "--devices 2 is not supported. Use --devices 1"),
        (["--devices", "1", "--calibrate"], "--calibrate and --by-kernel are different measurements"),
        (["--devices", "1", "--only", "ddp"], "--by-kernel runs plans alone: leave --only out"),
        (["--devices", "1", "--png", "p.png"], "--by-kernel runs plans alone: leave --png out"),
        (["--devices", "1", "-o", "no/such/folder.json"], "Cannot write to no/such/folder.json"),
    ],
)
def test_bad_input_ends_before_planning(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autopar.tools.bench.run.plan", None)  # nothing is planned
    code, out, error = invoke("bench", *FLAGS, "--batch", "8", "--by-kernel", *flags)
    assert code == 2 and out == "" and message in " ".join(error.split()), error
    assert not list(tmp_path.iterdir())

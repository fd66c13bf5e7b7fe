"""`autopar bench` on GPUs: compiled baselines in bf16 do the same work, plans run in the memory that they are for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.bench import check_trace, early_arrivals, request

import autopar
from autopar import InfeasibleError, Plan
from autopar.api.model_source import ModelSource
from autopar.solve.space.constraints import memory_for
from autopar.tools.bench.baselines.registry import BASELINES
from autopar.tools.bench.by_kernel import bench_by_kernel
from autopar.tools.bench.run import run_bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1800),
]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@TWO
def test_baselines_agree_on_two_gpus() -> None:
    constraints = {"pp": 2, "microbatches": 4, "precision": "bf16"}
    done = run_bench(
        request(only=tuple(BASELINES), constraints=constraints, compile=True, warmup=5, limit_seconds=300.0), print
    )
    reference = done.result.row("plain")
    rows = [row for row in done.result.rows if "CUDA graphs" not in row.label]
    assert len(rows) == len(done.result.rows) - 1, "a graph takes one microbatch, here are four"
    for row in rows:
        assert row.reason is None, f"{row.contestant} {row.label}: {row.reason}"
        # Those that report what each rank did take more steps.
        assert row.losses[: len(reference.losses)] == pytest.approx(reference.losses, rel=3e-2), row.contestant
        assert min(row.peak_bytes) > 0
    assert done.trace is not None
    check_trace(done.trace)
    assert early_arrivals(done.trace) == []
    bounds = [row.of_bound for row in rows if row.of_bound is not None]
    assert len(bounds) == 3 and all(0 < share <= 1.02 for share in bounds)


def test_kernels_of_a_captured_step_are_compared_with_prices() -> None:
    shape, constraints = (64, 3, 224, 224), {"precision": "bf16-params", "hardware": "h200-nvlink"}
    result = bench_by_kernel(
        request(
            source=ModelSource("vit_small_patch16_224"), shape=shape, classes=1000, devices=1, constraints=constraints,
            compile=True, warmup=5, steps=10, microbatch_sizes=None, limit_seconds=300.0,
        )
    )  # fmt: skip
    assert result.captured and len(result.step_seconds) == 10
    assert sum(row.measured_seconds for row in result.kinds) == pytest.approx(result.measured_seconds)
    assert 0.7 * result.measured_seconds < result.busy_seconds < 1.1 * result.measured_seconds
    measured = {(row.kind, row.direction) for row in result.kinds if row.measured_seconds > 0}
    both = {(kind, direction) for kind in ("matmul", "attention", "memory") for direction in ("forward", "backward")}
    assert both | {("optimizer", "update")} <= measured
    counts = [row.count for row in result.kernels]
    assert all(count == int(count) for count in counts), "steps of one graph have the same kernels"


# Model, images, what is asked of the plan. Below 5 GiB the allocator's pages can take more than plans leave free.
BOUNDARIES = {
    "one microbatch": ("vit_base_patch16_224", 256, {"microbatches": 1, "precision": "bf16-params"}),
    "accumulating": ("vit_base_patch16_224", 512, {"microbatches": 4, "precision": "bf16-params"}),
    "recomputing": ("vit_large_patch16_224", 256, {"microbatches": 2, "precision": "bf16-params", "recompute": "all"}),
    "convolutions": ("resnet50", 256, {"microbatches": 1, "precision": "bf16"}),
    "windows": ("swin_tiny_patch4_window7_224", 128, {"microbatches": 1, "precision": "bf16"}),
}  # fmt: skip
MESHES = ({"pp": 2, "microbatches": 8}, {"tp": 2, "microbatches": 1}, {"dp": 2, "microbatches": 1})
ON_TWO = {
    f"{next(iter(mesh))} 2": ("vit_base_patch16_224", 512, {"precision": "bf16-params", **mesh}) for mesh in MESHES
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "devices"),
    [*((case, 1) for case in BOUNDARIES), *(pytest.param(case, 2, marks=TWO) for case in ON_TWO)],
)
def test_a_plan_runs_where_it_is_feasible_and_is_feasible_where_it_runs_with_5_percent_to_spare(
    case: str, devices: int
) -> None:
    name, batch, given = (BOUNDARIES | ON_TWO)[case]
    source, shape = ModelSource(name), (batch, 3, 224, 224)
    asked = {"hardware": "h200-nvlink", "recompute": "none", "cost": "analytic", **given}

    def plan(**more: object) -> Plan:
        return autopar.plan(replace(source, input_shape=shape), devices, **{**asked, **more})

    least = memory_for(max(plan().prediction.peak_bytes))
    limited = request(
        source=replace(source, channels_last=case == "convolutions"), shape=shape, classes=1000, devices=devices,
        only=("autopar",), compile=True, warmup=4, steps=3, constraints={**asked, "memory": least},
        microbatch_sizes=(), limit_seconds=300.0,
    )  # fmt: skip
    (row,) = run_bench(limited).result.rows
    assert row.reason is None, row.reason
    assert max(row.peak_bytes) <= least
    if devices == 1:  # several may find other cuts or shardings
        with pytest.raises(InfeasibleError):
            plan(memory=least - 2**20)
    assert plan(memory=int(1.05 * max(row.peak_bytes)))

"""`autopar bench` on two GPUs: compiled contestants in bf16 do the same work, over NCCL. Skips itself elsewhere."""

from __future__ import annotations

import pytest
import torch
from test_bench import check_trace, request

from autopar.bench import CONTESTANTS, early_arrivals, run_bench
from autopar.zoo import ModelSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(1800),
]


def test_contestants_agree_on_two_gpus() -> None:
    constraints = {"pp": 2, "microbatches": 4, "precision": "bf16"}
    done = run_bench(
        request(only=tuple(CONTESTANTS), constraints=constraints, compile=True, warmup=5, limit_seconds=300.0), print
    )
    reference = done.result.row("plain")
    for row in done.result.rows:
        assert row.reason is None, f"{row.contestant} {row.label}: {row.reason}"
        # Those that report what each rank did take more steps.
        assert row.losses[: len(reference.losses)] == pytest.approx(reference.losses, rel=3e-2), row.contestant
        assert min(row.peak_bytes) > 0
    assert done.trace is not None
    check_trace(done.trace)
    assert early_arrivals(done.trace) == []
    bounds = [row.of_bound for row in done.result.rows if row.of_bound is not None]
    assert len(bounds) == 3 and all(0 < share <= 1.02 for share in bounds)


MESHES = [{"pp": 2, "microbatches": 8}, {"tp": 2, "microbatches": 1}, {"dp": 2, "microbatches": 1}]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: str(next(iter(m))))
def test_what_fits_with_5_percent_to_spare_is_feasible_and_runs_in_that(mesh: dict) -> None:
    source = ModelSource("vit_small_patch16_224", {})
    asked = {"precision": "bf16", "hardware": "h200-nvlink", **mesh}

    def run(**constraints: object):
        given = request(
            source=source, shape=(256, 3, 224, 224), classes=1000, only=("autopar",), constraints=constraints,
            compile=True, warmup=4, steps=3, limit_seconds=300.0,
        )  # fmt: skip
        (row,) = run_bench(given).result.rows
        assert row.reason is None, row.reason
        return max(row.peak_bytes)

    measured = run(**asked)
    spare = int(1.05 * measured)
    assert run(**asked, memory=spare) <= spare

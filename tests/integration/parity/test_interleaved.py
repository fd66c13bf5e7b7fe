"""Several chunks on each rank, in real worker processes, against one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import ADAMW
from support.effort import only
from support.handmade import even_firsts, plan_by_hand
from support.models import Tied, UNet, tiny_vit
from support.parity import images, labels, outputs_agree, state_agrees, step_agrees, three_steps, three_steps_of
from support.reference import Reference

import autopar
from autopar.ir.plan_parts import INTERLEAVED, ZeroStage
from autopar.schedule.generate import may_overlap
from autopar.tools.parity.compare import EPSILON

# Where a true gradient is zero, AdamW would make a full step of rounding noise.
CAREFUL = functools.partial(torch.optim.AdamW, lr=1e-3, eps=EPSILON)
SCHEDULE: dict[str, Any] = {"schedule": "interleaved"}


@pytest.mark.parametrize("chunks", only([2], [2, 3]))
def test_two_ranks_any_number_of_microbatches(chunks: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny_vit()
    plan = plan_by_hand(model, images(5), 5, even_firsts(model, images(5), 2 * chunks), chunks=chunks, **SCHEDULE)
    reference = Reference(model, F.cross_entropy, ADAMW)
    with autopar.parallelize(model, 2, images(5), optimizer=ADAMW, plan=plan) as pm:
        outputs_agree(pm, reference, images(5))
        for batch in (1, 3, 4, 5):  # that many microbatches
            step_agrees(pm, reference, images(batch), labels(batch))
        step_agrees(pm, reference, images(9), labels(9), times=2)  # four microbatches of 2 and one of 1
        outputs_agree(pm, reference, images(9))
        state_agrees(pm, reference, model)
        if chunks == 3:
            return
        pm.save_checkpoint(tmp_path / "checkpoint")
    whole = plan_by_hand(model, images(5), 5, [])
    with autopar.parallelize(model, 1, images(5), optimizer=ADAMW, plan=whole) as alone:
        alone.load_checkpoint(tmp_path / "checkpoint")
        state_agrees(alone, reference, model)
        step_agrees(alone, reference, images(5), labels(5))
        state_agrees(alone, reference, model)


@pytest.mark.parametrize(
    ("chunks", "recompute", "pp"),
    only([(2, "all", 2)], [(*case, pp) for case in ((2, "none"), (3, "none"), (2, "all")) for pp in (2, 4)]),
)
def test_overlap(pp: int, chunks: int, recompute: Any) -> None:
    """Thirteen microbatches are other groups than under interleaved, and no multiple of their size."""
    torch.manual_seed(0)
    model = tiny_vit()
    firsts = even_firsts(model, images(13), pp * chunks)
    plan = plan_by_hand(model, images(13), 13, firsts, "interleaved-overlap", chunks=chunks)
    plan = replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))
    assert may_overlap(pp, 13)
    reference = Reference(model, F.cross_entropy, ADAMW)
    with autopar.parallelize(model, pp, images(13), optimizer=ADAMW, plan=plan) as pm:
        outputs_agree(pm, reference, images(13))
        for batch in (13, 1, pp - 1, pp + 1, 2 * pp):  # that many microbatches
            step_agrees(pm, reference, images(batch), labels(batch))
        step_agrees(pm, reference, images(25), labels(25), times=2)  # twelve microbatches of 2 and one of 1
        outputs_agree(pm, reference, images(25))
        state_agrees(pm, reference, model)


@pytest.mark.parametrize("schedule", INTERLEAVED)
def test_skips_between_and_inside_of_ranks(schedule: str) -> None:
    torch.manual_seed(0)
    model, x = UNet(), images(6, 8)
    firsts = ["down2.conv2d", "middle.conv2d", "add", "merge.conv2d", "head.conv2d"]
    three_steps(model, x, torch.rand(6, 1, 8, 8), 6, firsts, F.mse_loss, chunks=3, schedule=schedule)


def test_a_tied_weight_on_two_chunks_of_a_rank_and_on_another_rank() -> None:
    torch.manual_seed(0)
    model = Tied()
    x, y = torch.randint(0, 32, (6, 5)), torch.randint(0, 32, (6,))
    # The embedding is on stage 0, the projection on the last stage: of rank 0, then of rank 1.
    three_steps(model, x, y, 3, ["layers.1.0.layer_norm", "head.linear"], schedule="interleaved", chunks=3)
    three_steps(
        model, x, y, 3, ["layers.0.1.linear", "layers.1.0.layer_norm", "head.linear"], schedule="interleaved", chunks=2
    )


@pytest.mark.parametrize(
    ("schedule", "zero"), only([(INTERLEAVED[0], 1)], [(INTERLEAVED[0], 0), *((name, 1) for name in INTERLEAVED)])
)
def test_replicas(schedule: str, zero: ZeroStage) -> None:
    torch.manual_seed(0)
    model = tiny_vit()
    firsts = ["blocks.1.norm1.layer_norm", "blocks.2.norm1.layer_norm", "blocks.3.norm1.layer_norm"]
    plan = {"chunks": 2, "dp": 2, "zero": zero, "schedule": schedule}
    three_steps(model, images(12), labels(12), 6, firsts, optimizer=CAREFUL, **plan)


@pytest.mark.full
@pytest.mark.parametrize("schedule", INTERLEAVED)
def test_tensor_parallelism_by_a_plan_that_was_searched_for(schedule: str) -> None:
    torch.manual_seed(0)
    model = tiny_vit(embed_dim=32, num_heads=4)
    x, y = images(8), labels(8)
    plan = autopar.plan(
        model, 4, x, hardware="cpu-generic", memory="64GiB", pp=2, tp=2, microbatches=4, schedule=schedule,
        chunks=2,
    )  # fmt: skip
    assert (plan.schedule, plan.chunks, len(plan.stages)) == (schedule, 2, 4) and plan.strategies
    three_steps_of(plan, model, x, y, optimizer=CAREFUL)

"""Stages that recompute some of their segments: equal to one device on real processes, and as full as predicted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.effort import only
from support.handmade import in_threads, plan_by_hand, with_levels
from support.models import resnet18, tiny_vit
from support.parity import images, labels, three_steps_of

import autopar
from autopar.api.planning.costs import PlanCosts
from autopar.cost.hardware.load import load_hardware
from autopar.ir.hardware import Link
from autopar.ir.plan_parts import Replicas
from autopar.runtime.optim.state_bytes import with_optimizer
from autopar.solve.cuts.evaluate import stage_costs
from autopar.solve.cuts.problem import CutProblem
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-3)

# -- equal to one device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "levels"),
    only(
        [("pp", (2, "all")), ("tp", (3,)), ("dp", (3,))],
        [
            ("pp", ("none", 3)), ("pp", (2, "all")), ("pp", (3, 1)), ("pp", ("all", "none")),
            *((mesh, (level,)) for mesh in ("tp", "dp") for level in ("none", 3, "all")),
        ],
    ),
)  # fmt: skip
def test_worker_processes_equal_one_device(mesh: str, levels: Sequence[Any]) -> None:
    torch.manual_seed(0)
    model, x, y = tiny_vit(), images(8), labels(8)
    asked: dict[str, Any] = {"pp": 1, "tp": 1, "dp": 1, "schedule": "1f1b"} | {mesh: 2}
    plan = autopar.plan(model, 2, x, **asked, microbatches=2, recompute="none", optimizer=ADAMW)
    assert all(stage.num_segments > 3 for stage in plan.stages)
    assert bool(plan.strategies) == (mesh == "tp")
    three_steps_of(with_levels(plan, levels), model, x, y, optimizer=ADAMW)


def test_batch_norm_updates_its_buffers_once() -> None:
    torch.manual_seed(0)
    model, x, y = resnet18(), images(4, 64), labels(4)
    plan = autopar.plan(model, 1, x, microbatches=2, recompute="none")
    three_steps_of(with_levels(plan, [1]), model, x, y, optimizer=ADAMW)


@pytest.mark.full
def test_interleaved_chunks_have_levels_of_their_own() -> None:
    torch.manual_seed(0)
    model, x, y = tiny_vit(), images(8), labels(8)
    firsts = ["blocks.1.norm1.layer_norm", "blocks.2.norm1.layer_norm", "blocks.3.norm1.layer_norm"]
    plan = plan_by_hand(model, x, 4, firsts, "interleaved", chunks=2)
    three_steps_of(with_levels(plan, [1, "none", "all", 1]), model, x, y, optimizer=ADAMW)


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut", "levels"),
    only([(0, (4,)), (20, (3, 2))], [(0, (1,)), (0, (4,)), (0, (7,)), (20, (3, 2)), (20, ("none", 4)), (22, (4, 1))]),
)
def test_predicted_peaks_are_measured_ones(cut: int, levels: Sequence[Any]) -> None:
    torch.manual_seed(0)
    model, x, y = tiny_vit(6, embed_dim=96), images(32), labels(32)
    pp, microbatches = len(levels), 4 if cut else 1
    size = 32 // microbatches
    graph = with_optimizer(lower_model(model, as_call(model, x).first(size), "train", "", "fp32"), ADAMW)
    cost = PlanCosts(graph, load_hardware("cpu-generic")).unsharded(Replicas(), size).cost
    stage_of = tuple(int(g >= cut > 0) for g in range(len(cost.groups)))
    plan = plan_by_hand(model, x, microbatches, [cost.groups[cut].ops[0]] if cut else [])
    numbers = [0 if level == "none" else level for level in levels]
    problem = CutProblem(
        cost.recomputed_on(stage_of, numbers),
        pp,
        microbatches,
        None,
        tuple(range(pp, 0, -1)),
        (Link(1e-5, 1e10),) * (pp - 1),
    )
    pm = in_threads(model, with_levels(plan, levels), x, F.cross_entropy, optimizer=ADAMW)
    pm.train_step(x, y)  # the optimizer has its state from here on
    measured = pm.measure_memory(x, y)
    for rank, stage in enumerate(stage_costs(problem, stage_of)):
        assert stage.memory_bytes == pytest.approx(measured[rank], rel=0.05), rank
    plain = stage_costs(replace(problem, cost=cost), stage_of)
    saved = [a.memory_bytes - b.memory_bytes for a, b in zip(plain, stage_costs(problem, stage_of))]
    assert all((num_bytes > 0) == (level != "none") for num_bytes, level in zip(saved, levels))

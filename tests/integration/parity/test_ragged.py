"""Tokens and heads that the ranks do not divide: outputs, loss, gradients, weights and checkpoints are one device's."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.handmade import plan_by_hand
from support.ragged import HELD_BY_HEADS, PLANS, ragged_plan, vit
from timm.optim.lamb import Lamb

import autopar
from autopar.tools.parity.compare import compare


@pytest.mark.parametrize("name", ["tokens", "heads", "heads and tokens"])
def test_ragged_parts_equal_one_device(name: str) -> None:
    model, x = vit().double().train(), torch.randn(4, 3, 16, 16, dtype=torch.float64)
    parity = compare(model, x, devices=2, steps=2, plan=ragged_plan(model, x, name, "fp64"))
    assert parity.ok, [(row.quantity, row.worst, row.max_absolute) for row in parity.rows if not row.ok]


@pytest.mark.full
def test_compiled_ranks_call_collectives_in_one_order() -> None:
    """A block's backward sums an activation's gradient and gathers a weight's, and the compiler orders them by size."""
    model, x = vit().train(), torch.randn(4, 3, 16, 16)
    parity = compare(model, x, devices=2, steps=2, plan=ragged_plan(model, x, "heads", "fp32"), compile=True)
    assert parity.ok, [(row.quantity, row.worst, row.max_absolute) for row in parity.rows if not row.ok]


MESHES: dict[str, dict[str, Any]] = {
    "pp 2": {"firsts": ["blocks.1.norm1.layer_norm"]},
    "interleaved": {"firsts": ["blocks.1.norm1.layer_norm", "blocks.2.norm1.layer_norm", "blocks.3.norm1.layer_norm"],
                    "schedule": "interleaved", "chunks": 2},
    "ZeRO-1": {"dp": 2, "zero": 1},
    "ZeRO-2": {"dp": 2, "zero": 2, "microbatches": 1},
    "recomputing": {},
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", MESHES)
def test_ragged_parts_on_other_meshes(name: str) -> None:
    mesh = {"microbatches": 2, "firsts": [], "schedule": "1f1b"} | MESHES[name]
    model, x = vit(depth=4).double().train(), torch.randn(8, 3, 16, 16, dtype=torch.float64)
    plan = plan_by_hand(
        model, x, mesh.pop("microbatches"), mesh.pop("firsts"), mesh.pop("schedule"), tp=2,
        strategies=PLANS["heads and tokens"], shardings=HELD_BY_HEADS, precision="fp64", **mesh,
    )  # fmt: skip
    if name == "recomputing":
        plan = replace(plan, stages=(replace(plan.stages[0], recompute=1),))
    parity = compare(model, x, devices=plan.mesh.devices, steps=2, plan=plan)
    assert parity.ok, [(row.quantity, row.worst, row.max_absolute) for row in parity.rows if not row.ok]


def test_dropout_norms_and_checkpoints_of_ragged_parts(tmp_path: Path) -> None:
    """Lamb needs the norm of each parameter; a checkpoint of ragged parts goes on on one device."""
    x, y = torch.randn(4, 3, 16, 16), torch.randint(0, 6, (4,))
    lamb = functools.partial(Lamb, lr=1e-2, weight_decay=0.01, max_grad_norm=None)
    plan = ragged_plan(vit(0.2), x, "heads, tokens and dropout", "fp32")
    with autopar.parallelize(vit(0.2), 1, x, optimizer=lamb, microbatches=2) as one:
        with autopar.parallelize(vit(0.2), 2, x, optimizer=lamb, plan=plan) as two:
            for _ in range(3):
                expected, found = one.train_step(x, y), two.train_step(x, y)
                assert found.loss == pytest.approx(expected.loss, rel=1e-5)
                assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
            programs = two._programs.specializations.values()
            drawn = [op for s in programs for op in s.programs[0].ops if op.target == "autopar.uniform.default"]
            assert any(op.args[-1] == (17, 1, 0) for op in drawn) and any(op.args[-1] == (3, 1, 0) for op in drawn)
            two.save_checkpoint(tmp_path / "saved")
            state = two.state_dict()
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
        expected = one.train_step(x, y)
    again: list[tuple[int, dict[str, Any]]] = [(1, {"microbatches": 2}), (2, {"plan": plan})]
    for devices, options in again:
        with autopar.parallelize(vit(0.2), devices, x, optimizer=lamb, **options) as restored:
            restored.load_checkpoint(tmp_path / "saved")
            assert all(torch.equal(tensor, state[name]) for name, tensor in restored.state_dict().items())
            assert restored.train_step(x, y).loss == pytest.approx(expected.loss, rel=1e-5)

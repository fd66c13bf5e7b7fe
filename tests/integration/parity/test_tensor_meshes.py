"""Several tensor axes on real processes: outputs, loss, gradients, weights and checkpoints are one device's."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.handmade import plan_by_hand
from timm.models.vision_transformer import VisionTransformer
from timm.optim.lamb import Lamb

import autopar
from autopar.errors import PlanError
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.tools.parity.compare import compare

MEGATRON = {"attn.qkv.linear": "nx3", "attn.proj.linear": "k", "mlp.fc1.linear": "n", "mlp.fc2.linear": "k"}
TOKENS = dict.fromkeys(("norm1.layer_norm", "norm2.layer_norm", "add", "add_1", *MEGATRON), "d1@1")
TOKENS["attn.scaled_dot_product_attention"] = "q@1"
DRAWS = ("attn.scaled_dot_product_attention.uniform", "attn.proj_drop.dropout.uniform", "attn.proj_drop.dropout.mul")
SPLIT_DRAWS = dict.fromkeys(DRAWS, "d1@1") | {DRAWS[0]: "d2@1"}
ARRANGEMENTS = {
    "2d": (TOKENS, MEGATRON),
    "1d twice": (MEGATRON, MEGATRON),
    "columns, rows": (
        MEGATRON,
        {"attn.qkv.linear": "k", "mlp.fc1.linear": "k", "mlp.fc2.linear": "n", "norm1.layer_norm": "d1@1"},
    ),
}
HELD = {
    "2d": {"blocks.*.attn.qkv.weight": "tp1:0x3 tp0:gradient", "blocks.*.attn.proj.weight": "tp1:1 tp0:gradient"},
    "1d twice": {"blocks.*.attn.qkv.weight": "tp0:0x3 tp1:0x3", "blocks.*.mlp.fc2.weight": "tp0:1 tp1:1"},
    "columns, rows": {"blocks.*.attn.qkv.weight": "tp0:0x3 tp1:1", "blocks.*.mlp.fc2.weight": "tp0:1 tp1:0"},
}


def vit(rate: float = 0.0) -> VisionTransformer:
    """17 tokens, 4 heads."""
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=16, patch_size=4, num_classes=6, embed_dim=32, depth=2, num_heads=4, mlp_ratio=2,
        pos_drop_rate=rate, proj_drop_rate=rate, attn_drop_rate=rate, drop_path_rate=rate,
    )  # fmt: skip


def plan_of(model: torch.nn.Module, x: torch.Tensor, name: str, precision: Any = "fp64", **options: Any) -> Plan:
    axes = [{f"blocks.*.{op}": label for op, label in own.items()} for own in ARRANGEMENTS[name]]
    names = dict.fromkeys((*axes[0], *axes[1]))
    texts = {n: " ".join(f"tp{i}:{own[n]}" for i, own in enumerate(axes) if n in own) for n in names}
    return plan_by_hand(
        model, x, 2, options.pop("firsts", []), tp_axes=(2, 2), strategies=texts | options.pop("more", {}),
        shardings=HELD[name], precision=precision, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_two_axes_equal_one_device(name: str) -> None:
    model, x = vit().double().train(), torch.randn(4, 3, 16, 16, dtype=torch.float64)
    parity = compare(model, x, devices=4, steps=2, plan=plan_of(model, x, name))
    assert parity.ok, [(row.quantity, row.worst, row.max_absolute) for row in parity.rows if not row.ok]


def test_a_plan_of_the_planner_equals_one_device() -> None:
    torch.manual_seed(0)
    model = VisionTransformer(img_size=16, patch_size=2, num_classes=6, embed_dim=192, depth=2, num_heads=4).double()
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    plan = autopar.plan(model.train(), 4, x, tp=(2, 2), hardware="cpu-generic", cost="analytic", microbatches=1)
    assert {axis for text in plan.shardings.values() for axis in Layout.parse(text).axes} == {"tp0", "tp1"}
    parity = compare(model, x, devices=4, steps=2, plan=plan)
    assert parity.ok, [(row.quantity, row.worst, row.max_absolute) for row in parity.rows if not row.ok]


def test_wrong_plans_on_two_axes_are_refused() -> None:
    model, x = vit(), torch.randn(4, 3, 16, 16)
    plan = plan_of(model, x, "1d twice", "fp32")
    names = {"blocks.*.attn.qkv.weight": "tp0:0x5", "blocks.*.mlp.fc1.weight": "tp1:0 tp0:0"}
    for name, text in names.items():
        match = rf"shardings\.{name.replace('*', '0')}: it has shape .* as '{text}' on axes tp0 of 2 and tp1 of 2 ranks"
        with pytest.raises(PlanError, match=match):
            autopar.parallelize(model, 4, x, plan=replace(plan, shardings={name: text}))
    for text, match in (("tp2:n", "no axis 'tp2'. The tensor axes are tp0, tp1"), ("tp1:z", "cannot run split by 'z'")):
        with pytest.raises(PlanError, match=match):
            autopar.parallelize(model, 4, x, plan=replace(plan, strategies={"head.linear": text}))


MESHES: dict[str, dict[str, Any]] = {
    "pp 2": {"firsts": ["blocks.1.norm1.layer_norm"]}, "ZeRO-1": {"dp": 2, "zero": 1}, "ZeRO-3": {"dp": 2, "zero": 3},
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_two_axes_on_other_meshes(mesh: str) -> None:
    model, x = vit().double().train(), torch.randn(8, 3, 16, 16, dtype=torch.float64)
    plan = plan_of(model, x, "2d", **MESHES[mesh])
    parity = compare(model, x, devices=8, steps=2, plan=plan)
    assert parity.ok, [(row.quantity, row.worst, row.max_absolute) for row in parity.rows if not row.ok]


def test_dropout_norms_and_checkpoints_on_two_axes(tmp_path: Path) -> None:
    """Lamb needs the norm of each parameter; a checkpoint of a mesh goes on on one device, and on the mesh."""
    x, y = torch.randn(4, 3, 16, 16), torch.randint(0, 6, (4,))
    lamb = functools.partial(Lamb, lr=1e-2, weight_decay=0.01, max_grad_norm=None)
    draws = {f"blocks.*.{name}": f"tp0:{label}" for name, label in SPLIT_DRAWS.items()}
    draws["blocks.*.attn.scaled_dot_product_attention"] = "tp0:n@1"  # attention with dropout has its own strategies
    plan = plan_of(vit(0.2), x, "2d", "fp32", more=draws)
    with autopar.parallelize(vit(0.2), 1, x, optimizer=lamb, microbatches=2) as one:
        with autopar.parallelize(vit(0.2), 4, x, optimizer=lamb, plan=plan) as four:
            for _ in range(3):
                expected, found = one.train_step(x, y), four.train_step(x, y)
                assert found.loss == pytest.approx(expected.loss, rel=1e-5)
                assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
            four.save_checkpoint(tmp_path / "saved")
            state = four.state_dict()
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
        expected = one.train_step(x, y)
    again: list[tuple[int, dict[str, Any]]] = [(1, {"microbatches": 2}), (4, {"plan": plan})]
    for devices, options in again:
        with autopar.parallelize(vit(0.2), devices, x, optimizer=lamb, **options) as resumed:
            resumed.load_checkpoint(tmp_path / "saved")
            found = resumed.train_step(x, y)
            assert found.loss == pytest.approx(expected.loss, rel=1e-5)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)

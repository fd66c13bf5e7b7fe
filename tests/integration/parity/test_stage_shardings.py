"""Stages with unlike shardings of the same layers: equal to one device on real processes, saved and loaded."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.effort import only
from support.handmade import plan_by_hand, with_levels
from support.models import tiny_vit
from support.parity import images, labels, step_agrees, three_steps_of, updated_alike
from support.reference import Reference, assert_all_close
from torch import nn

import autopar
from autopar.ir.graph import Graph, Op
from autopar.ir.layout import REPLICATED, TP, split_layout
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import StageRecompute, ZeroStage
from autopar.sharding.lookup import rule_of
from autopar.sharding.rule import strategies
from autopar.sharding.shard_graph import storage
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-3)
SECOND = "blocks.2.norm1.layer_norm"


def model() -> nn.Module:
    torch.manual_seed(0)
    return tiny_vit(class_token=False, global_pool="avg", num_heads=4)


def label(graph: Graph, op: Op, second: bool) -> str | None:
    """Tokens are split on the first stage, heads and features on the second."""
    rule = rule_of(op, graph.shapes.__getitem__)
    by_output = {s.outputs[0]: s.label for s in strategies(rule, 2, {})} if rule is not None else {}
    if not second:
        return by_output.get(split_layout(1)) if op.outputs[0].shape[1:2] == (16,) else None
    if "proj" in op.name or "fc2" in op.name:
        return (
            next((s.label for s in strategies(rule, 2, {}) if s.outputs[0].partial), None) if rule is not None else None
        )
    if "fc1.linear" in op.name:
        return by_output.get(split_layout(2))
    return by_output.get(split_layout(1)) if "attention" in op.name else None


def plan_of(x: torch.Tensor, levels: tuple[StageRecompute, ...], dp: int = 1, zero: ZeroStage = 0) -> Plan:
    graph = lower_model(model(), as_call(model(), x).first(2), "train", "", "fp32")
    start = next(i for i, op in enumerate(graph.ops) if op.name == SECOND)
    found = {op.name: label(graph, op, i >= start) for i, op in enumerate(graph.ops)}
    strategy_of = {name: text for name, text in found.items() if text is not None}
    layouts = {n: str(at) for n, at in storage(graph, strategy_of, {TP: 2}).items() if at != REPLICATED}
    fc1 = [layouts[f"blocks.{block}.mlp.fc1.weight"] for block in (1, 2)]
    assert fc1 == ["tp:gradient", "tp:0"]
    plan = plan_by_hand(
        model(), x, 2, [SECOND], tp=2, dp=dp, zero=zero, strategies=strategy_of, shardings=layouts, precision="fp32"
    )
    return with_levels(plan, levels)


@pytest.mark.parametrize(("first", "second"), only([(1, "all")], [("none", "none"), (1, "all")]))
def test_worker_processes_equal_one_device(first: StageRecompute, second: StageRecompute) -> None:
    x = images(4)
    three_steps_of(plan_of(x, (first, second)), model(), x, labels(4), optimizer=ADAMW)


@pytest.mark.full
def test_replicas_share_the_optimizers_state() -> None:
    x, y = images(8), labels(8)
    plan, reference = plan_of(x, (1, "none"), dp=2, zero=1), Reference(model(), F.cross_entropy, ADAMW)
    with autopar.parallelize(model(), 8, x, loss_fn=F.cross_entropy, optimizer=ADAMW, plan=plan) as pm:
        for _ in range(3):
            updated_alike(pm, reference, x, y)


def test_a_checkpoint_is_loaded_with_and_without_shardings(tmp_path: Path) -> None:
    x, y = images(4), labels(4)
    plan, reference = plan_of(x, ("none", 2)), Reference(model(), F.cross_entropy, ADAMW)
    with autopar.parallelize(model(), 4, x, loss_fn=F.cross_entropy, optimizer=ADAMW, plan=plan) as pm:
        step_agrees(pm, reference, x, y)
        pm.save_checkpoint(tmp_path)
        state = pm.state_dict()
        pm.train_step(x, y)
        pm.load_checkpoint(tmp_path)
        step_agrees(pm, reference, x, y)
    with autopar.parallelize(model(), 1, x, loss_fn=F.cross_entropy, optimizer=ADAMW, microbatches=2) as pm:
        pm.load_checkpoint(tmp_path)
        assert_all_close(pm.state_dict(), state, "loaded")
        pm.train_step(x, y)
        assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")

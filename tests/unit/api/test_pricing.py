"""Prices of shardings: what the planner finds for a ViT against Megatron's split, by its own cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.priced import price
from torch import nn

import autopar
from autopar.api.planning.costs import PlanCosts, apply_strategies
from autopar.api.planning.plan import example_call
from autopar.cost.groups.weight_memory import Sharing
from autopar.cost.hardware.load import load_hardware
from autopar.ir.hardware import Link
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import ReduceDtype, Replicas, ZeroStage
from autopar.ir.tensor_axes import mesh_axes
from autopar.trace.trace import trace

MEGATRON = {"attn.qkv.linear": "nx3", "attn.proj.linear": "k", "mlp.fc1.linear": "n", "mlp.fc2.linear": "k"}


def vit(**kwargs: Any) -> nn.Module:
    import timm

    settings: dict[str, Any] = {"depth": 3, "embed_dim": 1024, "num_heads": 16} | kwargs
    with torch.device("meta"):
        return timm.create_model("vit_base_patch16_224", **settings)


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize("tp", [2, 4])
def test_at_least_as_good_as_megatron(tp: int, size: int) -> None:
    call = example_call(vit(), None, size, None)
    graph = trace(vit(), call.args, call.kwargs)
    costs = PlanCosts(graph, load_hardware("h200-nvlink"))
    labels = {op.name: MEGATRON.get(op.name.split(".", 2)[-1], "") for op in graph.ops}
    inside = {name for name in labels if ".attn." in name or ".mlp." in name}
    by_hand = apply_strategies(
        graph, {n: label for n, label in labels.items() if label or n not in inside}, mesh_axes((tp,)), costs.hardware
    )
    collectives = Counter(op.target for op in by_hand.graph.ops if op.home)
    masked = {"autopar.first_rank.default": 6}  # the biases behind sums, which one rank adds
    assert collectives == {"autopar.all_reduce.default": 6, "autopar.sum_gradient.default": 6} | masked
    sharing = Sharing(tp, storage=by_hand.storage)
    megatron = price(by_hand.graph, by_hand.facts, costs.hardware, size, sharing, costs.unsharded_costs(size).groups)
    found = costs.priced(mesh_axes((tp,)), Replicas(), size, 1, 0)
    assert found is not None
    # Choices are priced to about 0.1 % as the graph that they make (autopar.cost.strategies.group_cost).
    assert found.seconds <= sum(group.seconds for group in megatron.groups) * (1 + 2e-3)
    assert 0 < costs.bound_seconds(mesh_axes((tp,)), size) <= found.seconds * (1 + 1e-9)


def plan(tp: int, size: int) -> Plan:
    return autopar.plan(vit(), tp, batch_size=size, tp=tp, hardware="h200-nvlink", microbatches=1)


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize("tp", [2, 4])
def test_each_block_has_two_reductions_in_each_direction(tp: int, size: int) -> None:
    blocks = [block for block in plan(tp, size).blocks if block.name.startswith("blocks.")]
    assert sum(block.count for block in blocks) == 3
    # The first and the last block also bring the stream of tokens into its layout, and back.
    for block in [b for b in blocks if b.count > 1] or blocks[1:2]:
        for direction in ("forward", "backward"):
            kinds = Counter(c.kind for c in block.collectives if c.direction == direction)
            assert kinds in ({"all-reduce": 2}, {"reduce-scatter": 2, "all-gather": 2}), (block, direction)
        assert block.rows["attn.qkv"] == f"rows by head / {tp}" and block.rows["mlp.fc1"] == f"rows / {tp}"
        assert block.rows["attn.proj"].startswith(f"columns / {tp} → ")
        assert block.rows["mlp.fc2"].startswith(f"columns / {tp} → ")


def test_tokens_are_split_where_their_number_allows() -> None:
    """Without a class token there are 196: sequence parallelism, which no rule mentions."""
    import timm

    with torch.device("meta"):
        model = timm.create_model(
            "vit_base_patch16_224", depth=3, embed_dim=1024, num_heads=16, class_token=False, global_pool="avg"
        )
    found = autopar.plan(model, 4, batch_size=99, tp=4, hardware="h200-nvlink", microbatches=1)
    rows = {text for block in found.blocks for text in block.rows.values()}
    assert "tokens / 4" in rows, rows


@pytest.mark.parametrize(
    "asked",
    [
        {"pp": 4, "microbatches": 8, "schedule": "1f1b"},
        {"pp": 2, "tp": 2, "microbatches": 4, "recompute": "all"},
        pytest.param(
            {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 3}, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_a_plan_says_what_its_stages_hold_and_send(asked: dict[str, Any]) -> None:
    plan = autopar.plan(vit(), 4, batch_size=64, hardware="h200-nvlink", **asked)
    pp, held = plan.mesh.pp, [stage.memory for stage in plan.stages]
    for position in range(pp):
        own = [held[s] for s in range(position, len(held), pp)]
        standing = sum(m.weight_bytes + m.transient_bytes + m.buffer_bytes for m in own if m is not None)
        kept = plan.prediction.peak_bytes[plan.mesh.ranks(position)[0]] - standing
        assert kept > 0 and sum(m.microbatch_bytes for m in own if m is not None) > 0
        if plan.chunks == 1:
            assert kept == min(pp - position, plan.microbatches) * sum(m.microbatch_bytes for m in own if m is not None)
    pairs = {(m.src, m.dst) for m in plan.messages}
    assert pairs >= {pair for s in range(len(held) - 1) for pair in ((s, s + 1), (s + 1, s))}
    assert pairs == {(b, a) for a, b in pairs}  # a cut inside a block also sends what is added to its result
    assert all((m.seconds > 0) == ((m.dst - m.src) % pp > 0) for m in plan.messages)  # a rank reaches itself at once
    sent = [sum(m.num_bytes for m in plan.messages if m.src == s < m.dst and m.seconds) for s in range(len(held))]
    assert sent == [stage.send_bytes for stage in plan.stages]
    shares = [s.collective_seconds / (s.forward_seconds + s.backward_seconds) for s in plan.stages]
    assert all(0 < share < 0.5 for share in shares) if plan.mesh.tp > 1 else shares == [0.0] * len(shares)
    assert max(s.optimizer_seconds for s in plan.stages) <= plan.prediction.optimizer_seconds


def test_overlapped_collectives_of_replicas_slow_compute_down() -> None:
    """By their number and by their bytes, whatever the number of replicas."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    graph = trace(model.to("meta"), (torch.empty(32, 64, device="meta"),), {}, "train", "mlp")
    machine = replace(load_hardware("h200-nvlink"), replica_contention=Link(1e-4, 1e9))
    total = sum(weight.numel for weight in graph.weights)
    cases: tuple[tuple[int, ZeroStage, ReduceDtype, int, int], ...] = (
        (1, 0, "float32", 0, 0), (2, 1, "float32", 8, 2), (4, 1, "float32", 8, 2), (4, 0, "float32", 8, 1),
        (1, 0, "bfloat16", 0, 0), (4, 0, "bfloat16", 4, 1), (4, 1, "bfloat16", 6, 2), (4, 2, "bfloat16", 6, 2),
    )  # fmt: skip
    for replicas, zero, reduce_dtype, num_bytes, collectives in cases:
        weights = PlanCosts(graph, machine, reduce_dtype).unsharded(Replicas(replicas, zero), 8).cost.weights
        assert sum(w.num_buckets for w in weights) == pytest.approx(int(replicas > 1))
        for weight in weights:
            seconds = num_bytes * weight.numel / 1e9 + collectives * 1e-4 * weight.numel / total
            assert weight.contention_seconds == pytest.approx(seconds)

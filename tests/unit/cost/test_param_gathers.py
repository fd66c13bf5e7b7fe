"""ZeRO-3 in prices: what gathers add to a microbatch, what ranks hold, and which blocks are kept."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.api.planning.costs import PlanCosts
from autopar.cost.hardware.load import load_hardware
from autopar.ir.cost_graph import BUCKET_BYTES
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware, Link
from autopar.ir.plan_parts import Replicas
from autopar.ops.regions import op_blocks
from autopar.solve.backend import Outcome
from autopar.solve.cuts import kept_blocks
from autopar.solve.cuts.kept_blocks import Block, most_saving
from autopar.tools.explain.diff import settings
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model

SIZE = 8  # samples of a microbatch


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224", depth=4)
        return lower_model(model, as_call(model, torch.randn(SIZE, 3, 224, 224)), "train", "", "bf16-params")


def machine(bandwidth: float = 100e9) -> Hardware:
    hardware = load_hardware("a100-nvlink")
    return replace(hardware, collective=Link(10e-6, bandwidth))


@pytest.mark.parametrize("bandwidth", [1e9, 10e9, 400e9])
@pytest.mark.parametrize("kept", [frozenset(), frozenset({"blocks.1", "patch_embed", "root"})])
def test_a_block_waits_for_what_its_passes_do_not_hide(graph: Graph, bandwidth: float, kept: frozenset[str]) -> None:
    hardware, dp = machine(bandwidth), 4
    costs = PlanCosts(graph, hardware)
    alone = costs.unsharded(Replicas(), SIZE).cost
    cost = costs.unsharded(Replicas(dp, 3), SIZE, kept).cost
    home, members = op_blocks(graph.ops), defaultdict[str, list[int]](list)
    for number, (before, after) in enumerate(zip(alone.groups[:-1], cost.groups[:-1], strict=True)):
        waits = after.forward_exchange_seconds, after.backward_exchange_seconds
        assert after.forward_seconds - before.forward_seconds == pytest.approx(waits[0], abs=1e-12)
        assert after.backward_seconds - before.backward_seconds == pytest.approx(waits[1], abs=1e-12)
        members[home[before.ops[0]]].append(number)
    waited = [0.0, 0.0]
    for block in {w.block for w in cost.weights if w.block}:
        own = [w for w in cost.weights if w.block == block]
        groups = [alone.groups[n] for n in members[block] or [min(own[0].groups)]]
        weights, times, slowed = [graph.weight[w.name] for w in own], list[float](), list[float]()
        gathered = 0 if block in kept else sum(w.num_bytes for w in weights)
        for num_bytes in (gathered, sum(w.stored_bytes for w in weights)):
            whole = max(num_bytes, BUCKET_BYTES)
            share, contention = num_bytes / whole, hardware.replica_contention
            times.append(share * (10e-6 + 3 / 4 * whole / bandwidth))
            slowed.append(share * contention.latency_seconds + num_bytes / contention.bytes_per_second)
        waited[0] += max(0, times[0] - sum(g.forward_seconds for g in groups)) + slowed[0]
        waited[1] += max(0, sum(times) - sum(g.backward_seconds for g in groups)) + sum(slowed)
    assert sum(g.forward_exchange_seconds for g in cost.groups) == pytest.approx(waited[0])
    assert sum(g.backward_exchange_seconds for g in cost.groups) == pytest.approx(waited[1])


def test_ranks_hold_shares(graph: Graph) -> None:
    costs, dp = PlanCosts(graph, machine()), 4
    gathered, kept = (costs.unsharded(Replicas(dp, 3), SIZE, frozenset(own)).cost for own in ([], ["blocks.2"]))
    trained = [w for w in gathered.weights if w.gradient_bytes]
    total = sum(w.numel for w in trained)
    assert sum(w.num_bytes for w in trained) == pytest.approx(total * (4 + 4 + 8 + 2) / dp, rel=0.02)
    block = sum(w.copy_bytes or w.gradient_bytes for w in trained if w.block == "blocks.2")
    more = sum(w.num_bytes for w in kept.weights) - sum(w.num_bytes for w in gathered.weights)
    assert more == pytest.approx(block * (1 - 1 / dp), rel=1e-3)
    two_nodes = costs.unsharded(Replicas(8, 3, 4), SIZE).cost
    assert [w.num_bytes for w in two_nodes.weights] == [w.num_bytes for w in gathered.weights]


SIZES_AND_SECONDS = st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), min_size=1, max_size=7)


def seconds_saved(sizes_and_seconds: list[tuple[int, float]], limit: int) -> tuple[float, float]:
    """Seconds that the chosen blocks save, which fit, and that the best choice saves."""
    blocks = [Block(f"b{i}", num_bytes, seconds) for i, (num_bytes, seconds) in enumerate(sizes_and_seconds)]
    subsets = [own for n in range(len(blocks) + 1) for own in combinations(blocks, n)]
    best = max(sum(b.seconds for b in own) for own in subsets if sum(b.num_bytes for b in own) <= limit)
    chosen = [b for b in blocks if b.name in most_saving(blocks, limit)]
    assert sum(b.num_bytes for b in chosen) <= limit
    return sum(b.seconds for b in chosen), best


@given(SIZES_AND_SECONDS, st.integers(0, 150))
def test_the_program_keeps_what_saves_most(given_blocks: list[tuple[int, float]], limit: int) -> None:
    saved, best = seconds_saved(given_blocks, limit)
    assert saved == pytest.approx(best, rel=2e-3, abs=1e-9)


@given(SIZES_AND_SECONDS, st.integers(0, 150))
def test_a_solver_that_finds_nothing_leaves_half_of_that(given_blocks: list[tuple[int, float]], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_blocks, "run", lambda *_, **__: Outcome(found=False, bound=0.0, infeasible=False))
        saved, best = seconds_saved(given_blocks, limit)
    assert best / 2 - 1e-9 <= saved <= best + 1e-9


def test_more_memory_keeps_more_blocks() -> None:
    """The step never gets longer with memory, and no plan takes more than there is."""
    plans = []
    for gib in (2.2, 2.3, 2.4, 2.6, 4.0):
        plan = autopar.plan(
            "vit_large_patch16_224", 8, batch_size=64, dp=8, zero=3, microbatches=1, recompute="none",
            precision="bf16-params", hardware="a100-nvlink", cost="analytic", memory=int(gib * 2**30),
        )  # fmt: skip
        assert max(plan.prediction.peak_bytes) <= 0.97 * gib * 2**30
        plans.append(plan)
    kept = [sum(own == "kept" for own in plan.param_blocks.values()) for plan in plans]
    assert kept == sorted(kept) and kept[0] < kept[-1] == len(plans[0].param_blocks)
    steps = [plan.prediction.step_seconds for plan in plans]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(steps))
    assert len({plan.decision for plan in plans}) == len(set(kept))
    changes = {change.name: (change.before, change.after) for change in settings(plans[1], plans[-1])}
    assert changes["ZeRO"] == (f"3, {kept[1]} of {kept[-1]} blocks kept", f"3, {kept[-1]} of {kept[-1]} blocks kept")
    text = str(plans[1])
    assert "ZeRO-3" in text and "gathered before each use: " in text and "gathered once a step: " in text

"""ZeRO-3: parameters live in pieces on the replicas, and are gathered before each use."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import timm
import timm.optim
import torch
import torch.nn.functional as F
from support.effort import only
from support.handmade import even_firsts, in_threads, plan_by_hand, ranks_of, with_levels
from support.hardware import slow_compute
from support.models import UNet, tiny_vit
from support.parity import images_and_labels, three_steps_of
from support.reference import Reference, assert_all_close
from timm.utils import ModelEmaV3
from torch import nn

import autopar
from autopar.ir import grad_buckets
from autopar.ir.grad_buckets import NUM_GRAD_SLOTS, NUM_PARAM_SLOTS
from autopar.runtime.params.sharded_params import SavedView, ShardedParams
from autopar.runtime.rank import Rank

# A larger eps than the default: parameters whose true gradient is zero would amplify the order of sums.
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of one block each, so that slots are used several times in a pass."""
    monkeypatch.setattr(grad_buckets.block_groups, "__defaults__", (2**8,))


def sharded(rank: Rank) -> ShardedParams:
    assert rank.sharded is not None
    return rank.sharded


CASES = [(2, 0, 1, 1), (2, 0, 2, 3), (3, 0, 1, 2), (4, 2, 1, 2), (4, 2, 2, 1)]


@pytest.mark.parametrize(("dp", "dp_shard", "pp", "microbatches"), only([(2, 0, 2, 3), (4, 2, 1, 2)], CASES))
def test_steps_equal_those_of_one_device(dp: int, dp_shard: int, pp: int, microbatches: int) -> None:
    """Losses, norms, gradients over several calls, weights, and outputs of fewer samples than replicas."""
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(5), images_and_labels(6 * dp)
    plan = plan_by_hand(model, x, microbatches, even_firsts(model, x, pp), dp=dp, zero=3, dp_shard=dp_shard)
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW, clip_grad_norm=0.5)
    reference = Reference(model, F.cross_entropy, ADAMW)
    for _ in range(3):
        for _ in range(2):
            loss = reference.forward_backward(x, y, microbatches, dp)
            assert pm.forward_backward(x, y).loss == pytest.approx(loss, abs=1e-5)
            assert_all_close(pm.gradients(), reference.gradients(), "gradient")
        reference.forward_backward(x, y, microbatches, dp)
        norm = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.5).item()
        reference.step()
        assert pm.train_step(x, y).grad_norm == pytest.approx(norm, rel=1e-5)
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")
    pm.eval()
    reference.model.eval()
    for samples in (1, dp + 1, len(x)):
        assert_all_close({"output": pm(x[:samples])}, {"output": reference.model(x[:samples])}, "of evaluation")
    pm.load_state_dict(model.state_dict())
    assert_all_close(pm.state_dict(), model.state_dict(), "loaded state")


class Views(nn.Module):
    """Blocks, and parameters of which views live long: an embedding, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mixing = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(8, 8))
        self.blocks = nn.ModuleList(deep_block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added, mixing = self.embedding.expand(len(x), 2, 8), self.mixing.t()
        for block in self.blocks:
            x = block(x)
        return ((x @ mixing).unsqueeze(1) * added).flatten(1)


class ReadsAll(nn.Module):
    """A sum at the end reads a weight of every block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(deep_block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x + torch.stack([block.get_parameter("0.weight") for block in self.blocks]).sum((0, 1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.Sequential(*(deep_block() for _ in range(4)))
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x)))


def deep_block() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))


def partly_frozen() -> nn.Module:
    model = tiny_vit(3)
    for parameter in [*model.blocks[1].parameters(), model.patch_embed.proj.weight]:  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    return model


def channels_last() -> nn.Module:
    return UNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def weight_standardized() -> nn.Module:
    return timm.create_model("resnetv2_50", layers=(1, 1, 1, 1), channels=(16, 32, 32, 32), num_classes=10)


VIT, ROWS = (3, 32, 32), (8,)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Sequence[str], int]] = {
    "views": (Views, ROWS, [], 1),
    "views between stages": (Views, ROWS, ["blocks.2.0.linear"], 2),
    "reads all blocks": (ReadsAll, ROWS, [], 1),
    "tied": (Tied, ROWS, [], 1),
    "tied over stages": (Tied, ROWS, ["blocks.2.0.linear"], 2),
    "frozen": (partly_frozen, VIT, [], 2),
    "channels_last": (channels_last, (3, 8, 8), [], 1),
    "views of convolutions": (weight_standardized, (3, 64, 64), [], 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_programs_read_changes_no_number(name: str) -> None:
    """Against ZeRO-1, whose parameters stay gathered; bit equal with two replicas."""
    make, shape, firsts, microbatches = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(8, *shape)
    if name == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    states = []
    for zero in (1, 3):
        plan = plan_by_hand(model, x, microbatches, firsts, dp=2, zero=zero)  # type: ignore[arg-type]
        pm = in_threads(model, plan, x, lambda output, target: (output - target).square().mean(), optimizer=ADAMW)
        for _ in range(3):
            pm.train_step(x, torch.zeros(8, 1) if name != "channels_last" else torch.zeros(8, 1, 1, 1))
        states.append(pm.state_dict())
    for key, tensor in states[0].items():
        if microbatches == 1:
            assert torch.equal(states[1][key], tensor), key
        else:
            torch.testing.assert_close(states[1][key], tensor, rtol=1e-4, atol=1e-6, msg=key)


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    groups = [[p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]]
    return torch.optim.AdamW(
        [{"params": own, "weight_decay": decay} for own, decay in zip(groups, (0.1, 0.0), strict=True)], 1e-2, eps=1e-3
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "groups by shape": in_groups,
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
    "LAMB": functools.partial(timm.optim.Lamb, lr=1e-2, max_grad_norm=None),
    "Muon": functools.partial(timm.optim.create_optimizer_v2, opt="muon", lr=1e-2),
}
NEED_WHOLE = {"Adafactor", "LAMB", "Muon"}


SHORT = [("groups by shape", 0), ("LAMB", 2)]


@pytest.mark.parametrize(("name", "dp_shard"), only(SHORT, [*SHORT, *((name, 0) for name in [*OPTIMIZERS][1:])]))
def test_optimizers_see_what_they_need(name: str, dp_shard: int) -> None:
    """An optimizer that needs whole parameters has each on one replica; others update pieces that end anywhere."""
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(3), images_and_labels(8)
    states = []
    for zero in (0, 3):
        plan = plan_by_hand(model, x, 1, [], dp=4 if dp_shard else 2, zero=zero, dp_shard=dp_shard if zero else 0)
        pm = in_threads(model, plan, x, F.cross_entropy, optimizer=OPTIMIZERS[name])
        for _ in range(3):
            pm.train_step(x, y)
        states.append(pm.state_dict())
    assert_all_close(states[1], states[0], "state")
    whole = {n: p.shape for n, p in model.named_parameters()}
    cut = [n for rank in ranks_of(pm) for n, p in sharded(rank).pieces.items() if p.shape != whole[n]]
    assert bool(cut) == (name not in NEED_WHOLE or name == "Muon")


def test_an_average_is_of_pieces() -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(3), images_and_labels(8)
    found = []
    for zero in (0, 3):
        plan = plan_by_hand(model, x, 2, [], dp=2, zero=zero)  # type: ignore[arg-type]
        average = functools.partial(ModelEmaV3, decay=0.5)
        pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW, ema=average)
        for _ in range(3):
            pm.train_step(x, y)
        with pm.ema_weights():
            output = pm.eval()(x)
        found.append(pm.ema_state_dict() | {"output": output} | {f"now.{n}": t for n, t in pm.state_dict().items()})
    assert_all_close(found[1], found[0], "average")
    parameters = sum(p.numel() for p in model.parameters())
    averaged = [sum(p.numel() for p in rank.ema.module.parameters()) for rank in ranks_of(pm) if rank.ema]
    assert sum(averaged) == parameters


# -- memory and traffic ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
@pytest.mark.parametrize("recompute", [False, True])
def test_memory_is_a_share_and_a_few_blocks(precision: Any, recompute: bool) -> None:
    """Weights, gradients and state of a replica of four; nothing grows."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))) for _ in range(12)))
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    plan = plan_by_hand(model, x, 2, [], dp=4, zero=3, precision=precision)
    plan = with_levels(plan, ["all"]) if recompute else plan
    pm = in_threads(model, plan, x, F.mse_loss, optimizer=ADAMW)
    standing = []
    for _ in range(3):
        pm.train_step(x, y)
        standing.append(ranks_of(pm)[0].standing_bytes())
    pm.state_dict()
    pm.eval()(x)
    assert standing[1:] == [ranks_of(pm)[0].standing_bytes()] * 2
    total, read = sum(p.numel() for p in model.parameters()), 4 if precision == "fp32" else 2
    held = total * (4 + 4 + 8 + (read if read < 4 else 0))  # masters, gradients, moments, copies
    block = total // 12
    slots = block * (NUM_PARAM_SLOTS * read + NUM_GRAD_SLOTS * 4)
    assert held / 4 + slots <= standing[-1] <= 1.03 * (held / 4 + slots)


def test_blocks_that_are_kept_are_gathered_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(4), images_and_labels(8)
    plan = plan_by_hand(model, x, 2, [], dp=2, zero=3, kept=["blocks.1", "blocks.3"])
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW)
    pm.train_step(x, y)
    own = sharded(ranks_of(pm)[0])
    gathered: list[str] = []
    gather = own.collectives.all_gather

    def note(flat: torch.Tensor, bucket: Any) -> Any:
        gathered.append(bucket.names[0])
        return gather(flat, bucket)

    monkeypatch.setattr(own.collectives, "all_gather", note)
    pm.train_step(x, y)
    counts = Counter(".".join(name.split(".")[:2]) for name in gathered)
    assert counts["blocks.1"] == counts["blocks.3"] == 1
    assert counts["blocks.0"] > 1 and counts["blocks.2"] > 1  # in forwards and backwards of two microbatches


def test_gathers_are_prefetched_in_the_order_of_the_step_before() -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(6), images_and_labels(8)
    pm = in_threads(model, plan_by_hand(model, x, 2, [], dp=2, zero=3), x, F.cross_entropy, optimizer=ADAMW)
    own, late = sharded(ranks_of(pm)[0]), list[int]()
    unpack = own.unpack

    def note(saved: Any) -> torch.Tensor:
        if isinstance(saved, SavedView) and own.loaded[own.slot_of[saved.index]] != saved.index:
            late.append(saved.index)
        return unpack(saved)

    own.unpack = note  # type: ignore[method-assign]
    counts = []
    for _ in range(3):
        pm.train_step(x, y)
        counts.append(len(late))
        late.clear()
    assert counts[0] > 2 * counts[1] == 2 * counts[2]  # the first step does not know the order of its backwards


# -- real processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", only([True], [True, False]))
def test_processes_go_on_under_another_mesh_and_stage(compile: bool, tmp_path: Path) -> None:
    """Checkpoints hold boxes of pieces that end within rows."""
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(3), images_and_labels(8)
    reference = Reference(model, F.cross_entropy, ADAMW)
    folder = None
    for number, (dp, zero, pp) in enumerate([(2, 3, 1), (4, 3, 1), (1, 0, 2), (2, 3, 2)]):
        plan = plan_by_hand(model, x, 2, even_firsts(model, x, pp), dp=dp, zero=zero)  # type: ignore[arg-type]
        options: dict[str, Any] = {"loss_fn": F.cross_entropy, "optimizer": ADAMW, "compile": compile and number == 0}
        with autopar.parallelize(model, dp * pp, x, plan=plan, **options) as pm:
            if folder is not None:
                before = reference.model.state_dict()
                pm.load_checkpoint(folder)
                assert_all_close(pm.state_dict(), before, f"loaded state of run {number}")
            for _ in range(2):
                reference.buffers = {}
                reference.forward_backward(x, y, 2, dp)
                reference.step()
                pm.train_step(x, y)
            assert_all_close(pm.state_dict(), reference.model.state_dict(), f"state of run {number}")
            folder = tmp_path / str(number)
            pm.save_checkpoint(folder)


SHARDED = {
    "two shards": {"tp": 2, "dp": 2},
    "two shards of two stages": {"pp": 2, "tp": 2, "dp": 2},
    "two shards in two groups": {"tp": 2, "dp": 4, "dp_shard": 2},
}


@pytest.mark.parametrize("kept", only([False], [False, True]))
@pytest.mark.parametrize("name", only(["two shards"], SHARDED))
def test_shards_have_the_numbers_of_one_device(name: str, kept: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(3), images_and_labels(8)
    options: dict[str, Any] = SHARDED[name] | {"zero": 3, "hardware": str(slow_compute(tmp_path))}
    devices = prod(options.get(axis, 1) for axis in ("pp", "tp", "dp"))
    plan = autopar.plan(model, devices, x, microbatches=2, **options)
    assert "tp" in " ".join(plan.shardings.values()) and (plan.zero, plan.mesh.tp) == (3, 2)
    blocks = dict.fromkeys(plan.param_blocks, "gathered") | ({"blocks.1": "kept"} if kept else {})
    three_steps_of(replace(plan, param_blocks=blocks), model, x, y, optimizer=ADAMW)  # type: ignore[arg-type]


def test_a_plan_names_blocks_of_the_model() -> None:
    model, (x, _) = tiny_vit(2), images_and_labels(8)
    plan = plan_by_hand(model, x, 1, [], dp=2, zero=3, kept=["blocks.7"])
    with pytest.raises(autopar.PlanError, match=r"param_blocks names 'blocks\.7', which is no block of .*blocks\.0"):
        autopar.parallelize(model, 2, x, plan=plan)
    with pytest.raises(autopar.PlanError, match="param_blocks: is for zero 3; zero is 1"):
        replace(plan, zero=1).validate()

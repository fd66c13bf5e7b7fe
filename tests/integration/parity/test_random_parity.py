"""Dropout, attention dropout and drop path draw the same masks on every mesh: the same losses, with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.effort import only
from support.forks import SCRIPTS, run_ranks
from support.hardware import slow_compute
from support.random_parity import BATCH, data, dropping_vit, losses, split_model
from torch import nn

import autopar
from autopar.api.program_cache import ProgramCache


@pytest.fixture(scope="module")
def one_device() -> list[float]:
    with split_model(dropping_vit(), microbatches=1) as pm:
        return losses(pm)


def split_draws(programs: ProgramCache) -> set[str]:
    """The modules whose random numbers ranks of the tensor axis draw in parts."""
    ops = (op for variant in programs.specializations.values() for program in variant.programs for op in program.ops)
    return {op.module.rpartition(".")[2] for op in ops if op.target == "autopar.uniform.default" and len(op.args) > 5}


@pytest.mark.parametrize(
    ("mesh", "microbatches"), only([((1, 2, 1), 2)], [((2, 1, 1), 4), ((1, 2, 1), 2), ((2, 1, 2), 2)])
)
def test_losses_are_those_of_one_device(
    one_device: list[float], mesh: tuple[int, int, int], microbatches: int, tmp_path: Path
) -> None:
    with split_model(dropping_vit(), mesh, microbatches=microbatches, hardware=str(slow_compute(tmp_path))) as pm:
        found = losses(pm)
        split = split_draws(pm._programs)
    assert found == pytest.approx(one_device, rel=1e-5)
    assert split >= {"attn", "drop1", "drop2"} if mesh[1] == 2 else not split


@pytest.mark.full
def test_losses_of_two_replicas_under_torchrun(one_device: list[float]) -> None:
    done = run_ranks(2, SCRIPTS / "random_parity.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(one_device, rel=1e-5)


def test_masks_are_drawn_and_differ_from_step_to_step(one_device: list[float]) -> None:
    model = dropping_vit()
    with split_model(dropping_vit(0.0), microbatches=1) as plain, split_model(model, microbatches=1) as pm:
        assert losses(plain, 1)[0] != pytest.approx(one_device[0], rel=1e-3)
        again = model.state_dict()
        first = losses(pm, 1)[0]
        pm.load_state_dict(again)
        second = losses(pm, 1)[0]
    assert first == one_device[0] and second != pytest.approx(first, rel=1e-3)


def test_the_seed_decides(one_device: list[float]) -> None:
    with split_model(dropping_vit(), microbatches=3, seed=1) as pm:
        assert losses(pm, 1)[0] != pytest.approx(one_device[0], rel=1e-3)


def test_accumulated_parts_draw_what_the_whole_batch_draws(one_device: list[float]) -> None:
    x, y = data()
    with split_model(dropping_vit(), microbatches=2) as pm:
        for step in range(2):
            pm.forward_backward(x[:5], y[:5])
            pm.zero_grad()  # as if it had not been
            parts = [pm.forward_backward(x[i : i + 6], y[i : i + 6]).loss for i in (0, 6)]
            assert (pm.num_updates, pm.num_drawn) == (step, BATCH)
            # gradients of two halves are summed, of which each is a mean: twice those of the whole, AdamW's step alike
            pm.optimizer_step()
            assert sum(parts) / 2 == pytest.approx(one_device[step], rel=1e-5)
        assert (pm.num_updates, pm.num_drawn) == (2, 0)


def test_forward_passes_count_what_they_draw() -> None:
    x, _ = data()
    model = dropping_vit()
    with split_model(model, microbatches=2) as pm:
        both = pm(torch.cat([x[:6], x[:6]]))
        assert pm.num_drawn == 12 and not torch.allclose(both[:6], both[6:], rtol=1e-3)
        pm.zero_grad()
        torch.testing.assert_close([pm(x[:6]), pm(x[:6])], [both[:6], both[6:]])
        assert torch.equal(pm.eval()(x), pm(x)) and pm.num_drawn == 12
        assert pm.num_updates == 0


class AlwaysOn(nn.Module):
    """Dropout in evaluation too, as Monte Carlo estimates use it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 32 * 32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(x.flatten(1), 0.5))


def test_what_draws_in_evaluation_draws_anew_each_time() -> None:
    x, _ = data()
    torch.manual_seed(0)
    with autopar.parallelize(AlwaysOn(), 1, x, microbatches=2) as pm:
        pm.eval()
        first, second = pm(x), pm(x)
        assert not torch.allclose(first, second, rtol=1e-3) and pm.num_drawn == 2 * BATCH
        pm.zero_grad()
        torch.testing.assert_close(pm(x), first)

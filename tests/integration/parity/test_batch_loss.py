"""A loss over the global batch, such as a contrastive one, equals that of one device with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.forks import run_on_two
from support.handmade import in_threads, plan_by_hand
from support.reference import assert_all_close
from support.two_towers import TwoTowers, batch, contrastive, on_one_device
from torch import Tensor, nn

import autopar
from autopar import UsageError


@pytest.mark.parametrize(
    ("dp", "firsts", "microbatches", "schedule"),
    [
        (2, ["second.linear"], 2, "gpipe"),
        (1, ["tanh", "second.linear"], 3, "gpipe"),
        (1, [], 4, "gpipe"),
        (2, ["second.linear"], 1, "1f1b"),
    ],
)
def test_gradients_are_those_of_the_whole_batch(dp: int, firsts: list[str], microbatches: int, schedule: str) -> None:
    torch.manual_seed(0)
    model, batches = TwoTowers(), [batch(10), batch(6)]  # 10 among two replicas: microbatches of 3 and 2
    plan = plan_by_hand(model, batches[0][0], microbatches, firsts, schedule, dp)
    losses, reference = on_one_device(model, batches, share=0.5)
    with in_threads(model, plan, batches[0][0], contrastive, loss_over="batch") as pm:
        assert [pm.forward_backward(x, y, share=0.5).loss for x, y in batches] == pytest.approx(losses, rel=1e-5)
        assert_all_close(pm.gradients(), {n: p.grad for n, p in reference.named_parameters()}, "gradient")  # type: ignore


def test_outputs_that_mix_samples_are_refused_before_anything_runs() -> None:
    class Pairs(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ super().forward(x).T

    x = torch.randn(8, 6)
    plan = plan_by_hand(Pairs(6, 4), x, 2, [], "gpipe")
    with (
        in_threads(Pairs(6, 4), plan, x, lambda output, target: output.mean(), loss_over="batch") as pm,
        pytest.raises(UsageError, match=r"Output 0 of Pairs .* cannot be joined, since .* through matmul"),
    ):
        pm.forward_backward(x, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_over": "batch", "schedule": "1f1b"}, "You asked for schedule='1f1b', whose backwards begin before"),
        ({"loss_over": "epoch"}, "loss_over='epoch' is unknown. It is one of microbatch, batch."),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        autopar.parallelize(nn.Linear(6, 4), 1, torch.randn(8, 6), **arguments)


def test_plans_have_every_forward_before_every_backward() -> None:
    model, x = nn.Linear(6, 4), torch.randn(8, 6)
    with pytest.raises(UsageError, match=r"The plan has schedule='1f1b', whose backwards begin before"):
        autopar.parallelize(model, 1, x, plan=plan_by_hand(model, x, 2, []), loss_over="batch")
    with autopar.parallelize(model, 1, x, microbatches=2, loss_over="batch") as pm:
        assert pm.plan.schedule == "gpipe"


REPLICAS = """
import torch
from support import traces; traces.share()
from support.two_towers import TwoTowers, batch, contrastive, on_one_device
from support.forks import run_on_two
from support.handmade import plan_by_hand
from support.reference import assert_all_close, replica_part
import autopar

torch.set_num_threads(1)
torch.manual_seed(0)
model, (x, y) = TwoTowers(), batch(8)
losses, reference = on_one_device(model, [(x, y)])
plan = plan_by_hand(model, x, 2, [], "gpipe", 2)
with autopar.parallelize(model, 2, x, plan=plan, loss_fn=contrastive, loss_over="batch") as pm:
    own_x, own_y = tuple(replica_part(t, pm) for t in x), (replica_part(y[0], pm), *y[1:])
    loss = pm.forward_backward(own_x, own_y).loss
    assert abs(loss - losses[0]) < 1e-5, (loss, losses)
    assert_all_close(pm.gradients(), {n: p.grad for n, p in reference.named_parameters()}, "gradient")
    try:
        pm.forward_backward(own_x, (own_y[0].float() if pm.data_rank else own_y[0], *own_y[1:]))
        raise SystemExit("targets of two dtypes were accepted")
    except autopar.UsageError as error:
        assert "shapes, dtypes or constants differ between rank 0 and rank 1" in str(error), error
    pm.zero_grad()
    assert abs(pm.forward_backward(own_x, own_y).loss - losses[0]) < 1e-5
"""


def test_ranks_of_torchrun_pass_their_parts(tmp_path: Path) -> None:
    done = run_on_two(tmp_path, REPLICAS)
    assert done.returncode == 0, done.stderr[-3000:]

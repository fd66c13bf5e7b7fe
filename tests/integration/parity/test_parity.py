"""Real worker processes against one device: outputs, loss, gradients, weights and buffers."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import ADAMW
from support.handmade import plan_by_hand
from support.hardware import slow_compute
from support.models import Tied, TwoHeads, TwoInputs, UNet, resnet18, tiny_vit
from support.parity import images, labels, outputs_agree, state_agrees, step_agrees, three_steps, updated_alike
from support.reference import Reference, assert_all_close, assert_close
from torch import nn

import autopar

SGD = functools.partial(torch.optim.SGD, lr=0.01)


def test_vit_on_two_stages_any_batch_size() -> None:
    torch.manual_seed(0)
    model = tiny_vit()
    plan = plan_by_hand(model, images(8), 8, ["blocks.1.mlp.fc2.linear"])  # inside a block
    reference = Reference(model, F.cross_entropy, ADAMW)
    initial = {n: t.clone() for n, t in model.state_dict().items()}
    with autopar.parallelize(model, 2, images(8), optimizer=ADAMW, plan=plan) as pm:
        outputs_agree(pm, reference, images(8))
        for batch in (8, 1, 2, 3, 5):  # that many microbatches
            step_agrees(pm, reference, images(batch), labels(batch))
        step_agrees(pm, reference, images(15), labels(15))  # seven microbatches of 2 and one of 1
        step_agrees(pm, reference, images(8), labels(8), times=2)
        outputs_agree(pm, reference, images(15))
        state_agrees(pm, reference, model)
        pm.load_state_dict(initial)
        assert_all_close(pm.state_dict(), initial, "loaded back")
        pm.eval()
        x = images(4)
        assert_close(pm(x), model.eval()(x).detach(), "output of loaded weights")
        result = pm.train().train_step(x, labels(4), return_outputs=True)
        assert_close(result.outputs, model.train()(x).detach(), "outputs of a step")


class ImagesAndTokens(nn.Module):
    """Convolutions that gain from channels_last, on images and on what was tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 72, 3, 2, 1), nn.BatchNorm2d(72)
        self.norm, self.tokens = nn.LayerNorm(72), nn.Linear(72, 72)
        self.conv, self.head = nn.Conv2d(72, 72, 3, padding=1), nn.Linear(72, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.stem(x)).relu()
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.tokens(self.norm(tokens)).tanh()
        x = x + self.conv(tokens.transpose(1, 2).reshape(x.shape))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}, {"dp": 2}], ids=str)
def test_convolutions_in_channels_last(mesh: dict[str, Any], tmp_path: Path) -> None:
    """The weights keep their memory format; the images of a step may have another one than the example."""
    torch.manual_seed(0)
    model, hardware = ImagesAndTokens(), str(slow_compute(tmp_path))  # on which it is worth sharding
    reference = Reference(model, F.cross_entropy, SGD)
    arguments = {"channels_last": True, "microbatches": 2, "cost": "analytic", "hardware": hardware} | mesh
    with autopar.parallelize(model, 2, images(8), optimizer=SGD, **arguments) as pm:
        assert pm.plan.channels_last and ", channels_last, " in str(pm.plan)
        for layout in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
            updated_alike(pm, reference, images(8).contiguous(memory_format=layout), labels(8))
        state_agrees(pm, reference, model)
        pm.eval()
        x = images(7).contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(pm(x), reference.model.eval()(x))
        for name, tensor in pm.state_dict().items():
            assert tensor.stride() == model.state_dict()[name].stride()


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("make", [tiny_vit, resnet18])
def test_training_in_eval_mode(make: Callable[[], nn.Module], mesh: dict[str, Any]) -> None:
    """As to fine-tune a model with fixed running statistics."""
    torch.manual_seed(0)
    model = make()
    reference = Reference(model, F.cross_entropy, SGD)
    with autopar.parallelize(model, 2, images(8), optimizer=SGD, microbatches=2, cost="analytic", **mesh) as pm:
        pm.eval()
        reference.model.eval()
        for _ in range(2):
            step_agrees(pm, reference, images(8), labels(8))
        state_agrees(pm, reference, model)


def test_vit_on_four_stages_ragged_with_clipping_and_a_scheduler() -> None:
    torch.manual_seed(0)
    model = tiny_vit()
    x, y = images(7), labels(7)  # 2, 2, 2, 1
    firsts = ["blocks.0.attn.proj.linear", "blocks.1.add_1", "blocks.3.norm1.layer_norm"]
    halve = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    reference = Reference(model, F.cross_entropy, ADAMW)
    scheduler = halve(reference.optimizer)
    with autopar.parallelize(
        model, 4, x, optimizer=ADAMW, lr_scheduler=halve, plan=plan_by_hand(model, x, 4, firsts), clip_grad_norm=0.1
    ) as pm:
        outputs_agree(pm, reference, x)
        for _ in range(3):
            loss = reference.forward_backward(x, y, 4)
            norm = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.1)
            reference.step()
            scheduler.step()
            result = pm.train_step(x, y)
            pm.lr_scheduler.step()
            assert (result.loss, result.grad_norm) == (
                pytest.approx(loss, abs=1e-5),
                pytest.approx(norm.item(), rel=1e-4),
            )
            assert pm.lr_scheduler.get_last_lr() == scheduler.get_last_lr()
        outputs_agree(pm, reference, x)
        state_agrees(pm, reference, model)


@pytest.mark.full
def test_resnet18_with_batch_norm_statistics() -> None:
    torch.manual_seed(0)
    three_steps(resnet18(), images(8, 64), labels(8), 3, ["layer3.0.conv2.conv2d"])  # 3, 3, 2; a skip crosses


def test_unet_whose_skips_jump_stages() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, 8, 8), torch.rand(8, 1, 8, 8)
    three_steps(UNet(), x, y, 5, ["down2.conv2d", "middle.conv2d", "up.conv_transpose2d"], F.mse_loss)


def test_tied_parameters_on_two_of_three_stages() -> None:
    torch.manual_seed(0)
    three_steps(Tied(), torch.randint(0, 32, (8, 5)), labels(8, 32), 4, ["layers.1.0.layer_norm", "head.linear"])


def test_two_inputs_a_dict_of_outputs_and_a_lambda() -> None:
    torch.manual_seed(0)
    x, y = {"image": torch.randn(6, 3, 8, 8), "text": torch.randn(6, 6)}, labels(6, 5)
    scale = 0.5
    loss_fn = lambda o, t: F.cross_entropy(o["class"], t) + scale * o["early"].square().mean() + o["features"].mean()  # noqa: E731
    three_steps(TwoInputs(), x, y, 2, ["mul", "text.linear"], loss_fn)


@pytest.mark.full
def test_one_device_needs_no_process() -> None:
    torch.manual_seed(0)
    model, x, y = resnet18(), images(5, 64), labels(5)
    reference = Reference(model, F.cross_entropy, ADAMW)
    with autopar.parallelize(model, 1, x, optimizer=ADAMW, plan=plan_by_hand(model, x, 2, [])) as pm:
        for _ in range(2):
            step_agrees(pm, reference, x, y, times=2)
        outputs_agree(pm, reference, x)
        state_agrees(pm, reference, model)


def test_memory_does_not_grow_with_the_number_of_microbatches() -> None:
    model = nn.Sequential(nn.Linear(16, 8192), nn.Linear(8192, 16), nn.Linear(16, 16))
    crossing = 16 * 8192 * 4  # bytes of the activation, and of its gradient
    peaks = []
    for microbatches in (6, 18):
        x = torch.randn(16 * microbatches, 16)
        plan = plan_by_hand(model, x, microbatches, ["1.linear", "2.linear"])
        with autopar.parallelize(model, 3, x, loss_fn=F.mse_loss, optimizer=ADAMW, plan=plan) as pm:
            peaks.append(pm.measure_memory(x, x))
    for rank in range(3):
        assert peaks[1][rank] - peaks[0][rank] < crossing / 4, f"rank {rank}: {peaks}"


def test_the_caller_and_a_model_in_its_process_draw_apart() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    x, y = torch.randn(4, 8), labels(4, 4)
    torch.manual_seed(1)
    expected = torch.rand(4)
    losses = []
    for _ in range(2):
        torch.manual_seed(1)
        with autopar.parallelize(model, 1, x, plan=plan_by_hand(model, x, 2, [])) as pm:
            first = pm.forward_backward(x, y).loss
            assert torch.equal(torch.rand(4), expected)
            losses.append((first, pm.forward_backward(x, y).loss))
    assert losses[0] == losses[1]  # of one seed
    assert losses[0][0] != losses[0][1]


def test_a_head_that_the_loss_does_not_read_is_not_decayed() -> None:
    torch.manual_seed(0)
    model, x, y = TwoHeads(), torch.randn(6, 8), labels(6, 4)
    decaying = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5)
    read_one = lambda output, target: F.cross_entropy(output["main"], target)  # noqa: E731
    reference = Reference(model, read_one, decaying)
    plan = plan_by_hand(model, x, 3, ["middle.linear"])
    with autopar.parallelize(model, 2, x, loss_fn=read_one, optimizer=decaying, plan=plan) as pm:
        for _ in range(2):
            step_agrees(pm, reference, x, y)
        state_agrees(pm, reference, model)


SCRIPT = """
import json, sys, torch, autopar
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))

class Own(torch.optim.SGD):
    pass

def loss_fn(output, target):
    return nn.functional.cross_entropy(output, target) + model_penalty(output)

def model_penalty(output):
    return output.square().mean()

pm = autopar.parallelize(model, devices=2, example_inputs=x, loss_fn=loss_fn, microbatches=3, pp=2,
                         pins={"2.linear": 1}, optimizer=lambda p: Own(p, lr=0.1))
losses = [pm.train_step(x, y).loss for _ in range(3)]
optimizer = Own(model.parameters(), lr=0.1)
expected = []
for _ in range(3):
    loss = loss_fn(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    expected.append(loss.item())
print(json.dumps([losses, expected, len(pm.plan.stages)]))
"""


@pytest.mark.full
def test_a_plain_script_without_a_main_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses, expected, stages = json.loads(done.stdout.splitlines()[-1])
    assert losses == pytest.approx(expected, abs=1e-5) and stages == 2

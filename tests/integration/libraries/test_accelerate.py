"""Accelerate's loop on ranks has the numbers of one device; what would not is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors.torch import load_file
from support.effort import only
from support.forks import SCRIPTS, run_ranks
from support.hugging_face_loops import ACCUMULATING, BATCH, AccelerateLoop, forget_accelerators
from support.prepared_loops import assert_same
from torch import nn

from autopar.errors import CheckpointError, UsageError
from autopar.integrations.accelerate import AutoparAccelerator

MESHES: list[dict[str, Any]] = [{"pp": 2, "microbatches": 2}, {"dp": 2}, {"tp": 2}]


@pytest.fixture(autouse=True)
def accelerators_forgotten() -> Iterator[None]:
    forget_accelerators()
    yield
    forget_accelerators()


def on_ranks(mesh: dict[str, Any], **arguments: Any) -> AutoparAccelerator:
    forget_accelerators()
    return AutoparAccelerator({"devices": 2, "cost": "analytic", **mesh}, **(ACCUMULATING | arguments))


@pytest.mark.parametrize("precision", only(["no"], ["no", "bf16"]))
@pytest.mark.parametrize("mesh", only(MESHES[:1], MESHES), ids=str)
def test_a_loop_equals_that_of_one_device(mesh: dict[str, Any], precision: str) -> None:
    alone = AccelerateLoop(Accelerator(mixed_precision=precision, **ACCUMULATING))
    alone.run(2)
    loop = AccelerateLoop(on_ranks(mesh, mixed_precision=precision))
    loop.run(2)
    tolerance = 1e-4 if precision == "no" else 2e-2
    assert loop.losses == pytest.approx(alone.losses, abs=tolerance)
    assert loop.norms == pytest.approx(alone.norms, rel=10 * tolerance)
    assert loop.scheduler.get_last_lr() == alone.scheduler.get_last_lr()
    (outputs, labels), (expected, _) = loop.predictions(), alone.predictions()
    assert outputs.dtype == torch.float32 and len(labels) == 22
    torch.testing.assert_close(outputs, expected, rtol=0, atol=10 * tolerance)
    assert loop.accelerator.unwrap_model(loop.model) is loop.unmodified
    assert_same(loop.weights(), alone.weights(), atol=tolerance)
    loop.model.pm.close()


def test_a_state_resumes_under_another_mesh(tmp_path: Path) -> None:
    """With the schedule, whose last rate no update has used yet."""
    whole, first = AccelerateLoop(on_ranks({"pp": 2})), AccelerateLoop(on_ranks({"pp": 2}))
    whole.run(2)
    first.run(1)
    first.accelerator.save_state(str(tmp_path))
    second = AccelerateLoop(on_ranks({"dp": 1, "devices": 1}))
    second.accelerator.load_state(str(tmp_path))
    second.loader.set_epoch(1)
    second.run(1)
    assert first.losses + second.losses == pytest.approx(whole.losses, abs=1e-5)
    assert_same(second.weights(), whole.weights())
    whole.accelerator.save_model(whole.model, str(tmp_path / "model"))
    assert_same(load_file(tmp_path / "model" / "model.safetensors"), whole.weights(), atol=0)
    with pytest.raises(CheckpointError, match="autopar_0 is not a checkpoint"):
        (tmp_path / "none").mkdir()
        second.accelerator.load_state(str(tmp_path / "none"))
    for loop in (whole, first, second):
        loop.model.pm.close()


def test_each_process_of_torchrun_is_a_rank(tmp_path: Path) -> None:
    alone = AccelerateLoop(Accelerator(**ACCUMULATING), BATCH)
    alone.run(2)
    outputs, _ = alone.predictions()
    numbers = {"losses": alone.losses, "weights": alone.weights(), "outputs": outputs}
    torch.save(numbers, tmp_path / "accelerate.pt")
    done = run_ranks(2, SCRIPTS / "hugging_face_worker.py", str(tmp_path), "accelerate")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") >= 4, done.stdout


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def small(**arguments: Any) -> tuple[Any, Any, Any]:
    """An accelerator on one device, a prepared model and its optimizer."""
    accelerator = on_ranks({"devices": 1, "example_inputs": torch.ones(4, 4)}, **arguments)
    model = linear()
    return (accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def clip_some() -> None:
    accelerator, model, _ = small()
    accelerator.backward(F.cross_entropy(model(torch.ones(4, 4)), torch.zeros(4, dtype=torch.int64)))
    accelerator.clip_grad_norm_([next(model.parameters())], 1.0)


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: AutoparAccelerator({}, cpu=True), "needs the number of devices"),
    (lambda: on_ranks({"precision": "bf16"}, mixed_precision="bf16"), "Leave one out"),
    (lambda: on_ranks({}, dynamo_backend="inductor"), 'autopar={"compile": True}'),
    (lambda: on_ranks({}).prepare(linear()), "1 model and 0 optimizers"),
    (lambda: on_ranks({}).prepare(torch.optim.SGD(linear().parameters(), lr=0.1)), "0 models and 1 optimizer"),
    (lambda: on_ranks({}).join_uneven_inputs([]), "drop_last=True"),
    (clip_some, "pass model.parameters()"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_mistakes_are_errors(mistake: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mistake()


def test_a_plan_decides_about_the_precision() -> None:
    _, model, _ = small()
    model.pm.close()
    accelerator = on_ranks({"devices": 1, "plan": model.pm.plan, "example_inputs": torch.ones(4, 4)})
    del accelerator.options["cost"]  # of planning
    own = linear()
    again, _ = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
    assert again.pm.plan == model.pm.plan
    again.pm.close()
    other = on_ranks({"devices": 1, "plan": model.pm.plan}, mixed_precision="bf16")
    other.options = accelerator.options
    own = linear()
    with pytest.raises(UsageError, match="The plan computes in fp32, and mixed_precision='bf16' is asked for"):
        other.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))


def test_an_overflow_is_told_and_a_frozen_model_stays_here() -> None:
    accelerator, model, optimizer = small(mixed_precision="fp16", gradient_accumulation_steps=1)
    outputs = model(torch.ones(4, 4))
    assert outputs.dtype == torch.float32 and accelerator.scaler is None
    accelerator.backward((outputs * float("inf")).sum())
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    teacher = linear().requires_grad_(False)
    assert accelerator.prepare(teacher) is teacher
    model.pm.close()

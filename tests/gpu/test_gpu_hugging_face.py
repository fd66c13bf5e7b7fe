"""Accelerate's loop and transformers' Trainer on GPUs: equal to one GPU. Skips itself with fewer than two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support.forks import SCRIPTS, run_ranks
from support.hugging_face_loops import (
    ACCUMULATING,
    BATCH,
    AccelerateLoop,
    Images,
    assert_same_log,
    close,
    forget_accelerators,
    logged,
    trainer,
)

from autopar.integrations.accelerate import AutoparAccelerator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
MESHES: list[dict[str, Any]] = [{"pp": 2, "microbatches": 2}, {"dp": 2, "zero": 1}]


@pytest.fixture(autouse=True)
def accelerators_forgotten() -> Iterator[None]:
    forget_accelerators()
    yield
    forget_accelerators()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_trainer_logs_the_numbers_of_one_gpu(mesh: dict[str, Any], tmp_path: Path) -> None:
    alone = trainer(tmp_path / "alone", gradient_accumulation_steps=2)
    alone.train()
    options = {"devices": 2, "compile": False, **mesh}
    own = trainer(tmp_path / "own", options, gradient_accumulation_steps=2, save_strategy="epoch")
    assert own.args.n_gpu == 1
    own.train()
    assert_same_log(logged(own), logged(alone))
    assert own.predict(Images(5, labelled=False)).predictions.shape == (5, 10)
    assert next(own.model.parameters()).device.type == "cpu"
    close(own)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_loop_of_accelerate_equals_that_of_one_gpu(mesh: dict[str, Any], precision: str) -> None:
    alone = AccelerateLoop(Accelerator(mixed_precision=precision, **ACCUMULATING))
    alone.run(2)
    forget_accelerators()
    options = {"devices": 2, "cost": "analytic", "compile": False, **mesh}
    loop = AccelerateLoop(AutoparAccelerator(options, mixed_precision=precision, **ACCUMULATING))
    loop.run(2)
    tolerance = 1e-4 if precision == "no" else 2e-2
    assert loop.losses == pytest.approx(alone.losses, abs=tolerance)
    (outputs, labels), (expected, _) = loop.predictions(), alone.predictions()
    assert outputs.device == expected.device == labels.device
    torch.testing.assert_close(outputs, expected, rtol=0, atol=10 * tolerance)
    loop.model.pm.close()


@pytest.mark.parametrize("library", ["accelerate", "trainer"])
def test_each_process_of_torchrun_is_a_rank(library: str, tmp_path: Path) -> None:
    numbers: dict[str, Any]
    if library == "accelerate":
        alone = AccelerateLoop(Accelerator(**ACCUMULATING), BATCH)
        alone.run(2)
        weights = {name: tensor.cpu() for name, tensor in alone.weights().items()}
        numbers = {"losses": alone.losses, "weights": weights, "outputs": alone.predictions()[0].cpu()}
    else:
        made = trainer(tmp_path / "alone")
        made.train()
        numbers = {"log": logged(made), "weights": {n: t.cpu() for n, t in made.model.state_dict().items()}}
    torch.save(numbers, tmp_path / f"{library}.pt")
    done = run_ranks(2, SCRIPTS / "hugging_face_worker.py", str(tmp_path), library)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") >= 4, done.stdout

"""transformers' Trainer on ranks logs the numbers of the Trainer on one device, and resumes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.effort import only
from support.forks import SCRIPTS, run_ranks
from support.hugging_face_loops import (
    Images,
    assert_same_log,
    close,
    forget_accelerators,
    hf_vit,
    logged,
    trainer,
)
from support.models import tiny_vit
from support.prepared_loops import assert_same
from torch import nn
from transformers import TrainerCallback, ViTForImageClassification

from autopar.errors import UsageError
from autopar.integrations.hugging_face import AutoparTrainer

PIPELINE: dict[str, Any] = {"devices": 2, "pp": 2, "microbatches": 2}
ALONE: dict[str, Any] = {"devices": 1, "microbatches": 2}


@pytest.fixture(autouse=True)
def accelerators_forgotten() -> Iterator[None]:
    yield
    forget_accelerators()


class Own(nn.Module):
    """A model that is none of transformers', and returns its loss in a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vit = tiny_vit(depth=2)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.vit(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pipeline": (PIPELINE, {"max_grad_norm": 1.0}),
    "accumulation, label smoothing": (ALONE, {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}),
    "a last update of fewer batches": (ALONE, {"gradient_accumulation_steps": 2, "num_samples": 20}),
    "compute_loss_func": (ALONE, {"gradient_accumulation_steps": 2, "given": {"compute_loss_func": summed}}),
    "no clipping": (ALONE, {"max_grad_norm": 0.0}),
    "plateau": (ALONE, {"lr_scheduler_type": "reduce_lr_on_plateau", "warmup_steps": 0, "num_train_epochs": 3}),
    "replicas": ({"devices": 2, "dp": 2, "zero": 1}, {"dataloader_drop_last": True, "num_samples": 21}),
    "tensor parallel": ({"devices": 2, "tp": 2}, {}),
    "bf16": (PIPELINE, {"bf16": True, "learning_rate": 1e-3}),
}
KEPT = ["pipeline", "accumulation, label smoothing", "no clipping"]


@pytest.mark.filterwarnings("ignore::autopar.UnknownOpWarning")
@pytest.mark.parametrize("name", only(KEPT, RUNS))
def test_a_run_logs_the_numbers_of_one_device(name: str, tmp_path: Path) -> None:
    mesh, options = RUNS[name]
    alone, own = trainer(tmp_path / "alone", **options), trainer(tmp_path / "own", mesh, **options)
    alone.train()
    own.train()
    if name == "bf16":
        rounded = [[round(entry.get("loss", 0), 2) for entry in logged(made)] for made in (own, alone)]
        assert rounded[0] == pytest.approx(rounded[1], abs=0.02)
    else:
        assert_same_log(logged(own), logged(alone))
        assert_same(dict(own.model.state_dict()), dict(alone.model.state_dict()))
        assert own.evaluate()["eval_loss"] == pytest.approx(alone.evaluate()["eval_loss"], abs=1e-5)
    close(own)


def test_a_run_resumes_under_another_mesh(tmp_path: Path) -> None:
    """With dropout, from the step after an epoch's begin; the best weights come back at the end."""
    options: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "model": hf_vit(0.1),
    }  # fmt: skip
    whole = trainer(tmp_path, PIPELINE, **options)
    whole.train()
    close(whole)
    files = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert {"model.safetensors", "config.json", "autopar", "scheduler.pt", "rng_state.pth"} <= files
    best = ViTForImageClassification.from_pretrained(whole.state.best_model_checkpoint)
    assert_same(dict(whole.model.state_dict()), dict(best.state_dict()), atol=0)

    options["model"] = hf_vit(0.1)
    resumed = trainer(tmp_path, ALONE, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same_log(logged(resumed)[:-1], logged(whole)[:-1])  # but for the mean of the losses of this call
    assert_same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
    close(resumed)


def test_a_checkpoint_of_an_unmodified_trainer_resumes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-3}
    alone = trainer(tmp_path, **options)
    alone.train()
    options["save_strategy"] = "no"
    resumed = trainer(tmp_path, ALONE, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same_log(logged(resumed)[:-1], logged(alone)[:-1])
    close(resumed)


class Seen(TrainerCallback):
    """Sums of the weights that callbacks see after each step."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        assert model.config.num_labels == 10
        self.sums.append(sum(tensor.double().sum().item() for tensor in model.state_dict().values()))


def test_evaluation_first_training_twice_and_callbacks(tmp_path: Path) -> None:
    alone, own, seen = trainer(tmp_path / "alone"), trainer(tmp_path / "own", ALONE), Seen()
    own.add_callback(seen)
    unlabelled = own.predict(Images(5, labelled=False)).predictions
    assert abs(unlabelled - alone.predict(Images(5)).predictions).max() < 1e-5
    for made in (alone, own):
        made.train()
        made.train()
    assert len(set(seen.sums)) > 6  # of 12 steps, some of which have a rate of 0
    assert_same(dict(own.model.state_dict()), dict(alone.model.state_dict()))
    close(own)
    assert own.evaluate()["eval_loss"] == pytest.approx(alone.evaluate()["eval_loss"], abs=1e-5)  # on new ranks
    close(own)


@pytest.mark.full
def test_a_model_that_is_not_of_transformers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "num_train_epochs": 1}
    alone = trainer(tmp_path / "alone", model=Own(), **options)
    own = trainer(tmp_path / "own", ALONE, model=Own(), save_strategy="epoch", **options)
    alone.train()
    own.train()
    assert_same(dict(own.model.state_dict()), dict(alone.model.state_dict()))
    close(own)


@pytest.mark.full
def test_each_process_of_torchrun_is_a_rank(tmp_path: Path) -> None:
    alone = trainer(tmp_path / "alone")
    alone.train()
    numbers = {"log": logged(alone), "weights": dict(alone.model.state_dict())}
    torch.save(numbers, tmp_path / "trainer.pt")
    done = run_ranks(2, SCRIPTS / "hugging_face_worker.py", str(tmp_path), "trainer")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") >= 4, done.stdout


class Silent(AutoparTrainer):
    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        return torch.zeros(())


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "last batch": ({"devices": 2, "dp": 2}, {"num_samples": 21}, "dataloader_drop_last=True"),
    "no devices": ({}, {}, "needs the number of devices"),
    "two precisions": ({**ALONE, "precision": "bf16"}, {"bf16": True}, "Leave one out"),
    "checkpointing": (ALONE, {"activation_checkpointing": True}, '"recompute": "all"'),
    "memory": (ALONE, {"auto_find_batch_size": True}, "per_device_train_batch_size"),
    "precision of evaluation": (ALONE, {"bf16_full_eval": True}, "bf16=True"),
    "compiler": (ALONE, {"torch_compile": True}, '"compile": True'),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_errors(name: str, tmp_path: Path) -> None:
    mesh, options, message = MISTAKES[name]
    with pytest.raises(UsageError, match=message):
        trainer(tmp_path, mesh, **options).train()


def test_a_loss_without_the_model(tmp_path: Path) -> None:
    made = trainer(tmp_path, ALONE)
    silent = Silent(made.model, made.args, train_dataset=Images(8), eval_dataset=Images(8), autopar=ALONE)
    with pytest.raises(UsageError, match="did not call the model"):
        silent.train()

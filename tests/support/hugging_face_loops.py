"""Loops of Accelerate and of transformers' Trainer on a small ViT, on one device or on ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import (
    EvalPrediction,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from autopar.integrations.hugging_face import AutoparTrainer
from support.models import tiny_vit

BATCH = 8
# Of an accelerator, whose samples have one order whatever the number of processes.
ACCUMULATING: dict[str, Any] = {
    "cpu": not torch.cuda.is_available(), "gradient_accumulation_steps": 2,
    "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True),
}  # fmt: skip
Log = list[dict[str, float]]


def forget_accelerators() -> None:
    """All accelerators of a process share their state, which the next one may not change."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def samples(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images [number, 3, 32, 32] and labels [number]; the same ones at each call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(number, 3, 32, 32, generator=generator), torch.randint(0, 10, (number,), generator=generator)


# -- Accelerate --------------------------------------------------------------------------------------------------------


@dataclass
class AccelerateLoop:
    """A loop of Accelerate's: accumulation, clipping, a schedule, metrics of an evaluation.

    Args:
        batch: samples of a loader's batch.
        steps: updates for which the schedule is made.
    """

    accelerator: Any
    batch: int = BATCH
    steps: int = 6
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        set_seed(1)
        self.unmodified = tiny_vit(depth=2)
        optimizer = torch.optim.SGD(self.unmodified.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        data = TensorDataset(*samples(22))
        loaders = DataLoader(data, self.batch, shuffle=True, drop_last=True), DataLoader(data, self.batch)
        things = self.accelerator.prepare(self.unmodified, optimizer, *loaders, scheduler)
        self.model, self.optimizer, self.loader, self.evaluation, self.scheduler = things

    def run(self, epochs: int = 1) -> None:
        accelerator = self.accelerator
        for _ in range(epochs):
            self.model.train()
            for images, labels in self.loader:
                with accelerator.accumulate(self.model):
                    loss = F.cross_entropy(self.model(images), labels, label_smoothing=0.1)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        self.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), 1.0)))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(accelerator.gather(loss.detach()).mean().item())

    def predictions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and labels of all samples, each once, on each process."""
        self.model.eval()
        found = []
        with torch.no_grad():
            for images, labels in self.evaluation:
                found.append(self.accelerator.gather_for_metrics((self.model(images), labels)))
        outputs, labels = zip(*found, strict=True)
        return torch.cat(outputs), torch.cat(labels)

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: t.clone() for n, t in self.accelerator.unwrap_model(self.model).state_dict().items()}


# -- transformers' Trainer ---------------------------------------------------------------------------------------------


def hf_vit(dropout: float = 0.0) -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        hidden_dropout_prob=dropout,
    )  # fmt: skip
    config.num_labels = 10
    return ViTForImageClassification(config)


class Images(Dataset):
    """Samples as the Trainer takes them; ``labelled`` says whether they have labels."""

    def __init__(self, number: int, labelled: bool = True) -> None:
        self.images, self.labels = samples(number)
        self.labelled = labelled

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> dict[str, Any]:
        label = {"labels": int(self.labels[number])} if self.labelled else {}
        return {"pixel_values": self.images[number], **label}


def accuracy(result: EvalPrediction) -> dict[str, float]:
    predictions: Any = result.predictions
    return {"accuracy": float((predictions.argmax(-1) == result.label_ids).mean())}


def trainer(
    folder: Path,
    autopar: Mapping[str, Any] | None = None,
    model: Any = None,
    num_samples: int = 24,
    given: Any = None,
    **arguments: Any,
) -> Any:
    """A Trainer that logs each step and evaluates each epoch.

    Args:
        autopar: options of ranks; None for the unmodified Trainer.
        given: other arguments of the Trainer.
        arguments: of TrainingArguments.
    """
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "num_train_epochs": 2,
        "learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 1,
        "report_to": "none", "disable_tqdm": True, "use_cpu": not torch.cuda.is_available(), "eval_strategy": "epoch",
        "save_strategy": "no",
    }  # fmt: skip
    kind: Any = Trainer if autopar is None else AutoparTrainer
    options = {} if autopar is None else {"autopar": {"cost": "analytic", **autopar}}
    own = TrainingArguments(str(folder), **(defaults | arguments))
    if autopar is None and own.n_gpu > 1:
        own._n_gpu = 1  # the reference is one device
    made = kind(
        hf_vit() if model is None else model, own,
        train_dataset=Images(num_samples), eval_dataset=Images(12), compute_metrics=accuracy, **options,
        **(given or {}),
    )  # fmt: skip
    made.remove_callback(PrinterCallback)
    return made


def logged(made: Any) -> Log:
    """What a Trainer has logged, without what depends on time."""
    timed = ("runtime", "per_second", "preparation_time", "total_flos")
    return [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in made.state.log_history]


def assert_same_log(own: Log, expected: Log) -> None:
    assert [entry.keys() for entry in own] == [entry.keys() for entry in expected]
    for ours, theirs in zip(own, expected, strict=True):
        for name, value in theirs.items():
            assert abs(ours[name] - value) < 1e-4 * max(1.0, abs(value)), (name, ours, theirs)


def close(made: Any) -> None:
    made.model_wrapped.pm.close()

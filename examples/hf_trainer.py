"""The Trainer of Hugging Face's transformers on two devices: only the class and one argument differ.

A ViT from a config learns to read digits, so nothing is fetched from the hub. The Trainer accumulates two batches for
an update, clips, schedules the learning rate and evaluates. Losses equal those of one device.

    python examples/hf_trainer.py
    python examples/hf_trainer.py --mesh pp
"""

import argparse
import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import (
    PrinterCallback,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from autopar.integrations.hugging_face import AutoparTrainer

MESHES: dict[str, dict[str, Any]] = {
    "pp": {"pp": 2, "microbatches": 4},
    "tp": {"tp": 2},
    "dp": {"dp": 2},
}
NUM_TRAINED = 1536  # images; the rest are for evaluation


class Digits(Dataset):
    """Handwritten digits [1, 8, 8] and their labels."""

    def __init__(self, part: slice) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images[part], dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
        self.labels = labels[part].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"pixel_values": self.images[number], "labels": self.labels[number]}


def small_vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=48, num_hidden_layers=4, num_attention_heads=3, intermediate_size=192, image_size=8, patch_size=4,
        num_channels=1,
    )  # fmt: skip
    config.num_labels = 10
    return ViTForImageClassification(config)


def accuracy(result: Any) -> dict[str, float]:
    return {"accuracy": float((result.predictions.argmax(-1) == result.label_ids).mean())}


def train(steps: int, **autopar: Any) -> Any:
    """A trainer that has made so many updates; on ranks if it is given ``autopar``."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=64, gradient_accumulation_steps=2, learning_rate=3e-3,
            lr_scheduler_type="cosine", warmup_steps=2, max_grad_norm=1.0, logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        kind: Any = AutoparTrainer if autopar else Trainer
        train_part, evaluation_part = slice(NUM_TRAINED), slice(NUM_TRAINED, None)
        trainer = kind(
            small_vit(), arguments, train_dataset=Digits(train_part), eval_dataset=Digits(evaluation_part),
            compute_metrics=accuracy, **autopar,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.evaluate()
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    """A figure of the trainer's log."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def main(args: argparse.Namespace) -> None:
    expected = train(args.steps)
    for mesh in args.mesh:
        trainer = train(args.steps, autopar={"devices": 2, **MESHES[mesh]})
        trainer.model_wrapped.pm.close()
        losses, own = logged(trainer, "loss"), logged(trainer, "eval_accuracy")
        difference = max(abs(a - b) for a, b in zip(losses, logged(expected, "loss")))
        print(f"{mesh} 2: loss {losses[0]:.4f} to {losses[-1]:.4f}, accuracy {own[-1]:.1%}, ", end="")
        print(f"difference from one device {difference:.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--steps", type=int, default=12)
    main(parser.parse_args())

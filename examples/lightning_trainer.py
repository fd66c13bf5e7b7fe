"""A LightningModule and the Lightning Trainer on two devices: only the strategy differs from the run on one.

The ranks run ``self.model``; ``training_step``, ``validation_step``, metrics and optimizer are as for one device.
Losses equal those of one device, and the trained model is back in its place after ``fit``.

    python examples/lightning_trainer.py
    python examples/lightning_trainer.py --mesh dp
"""

import argparse
import logging
import warnings
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from autopar.integrations.lightning import AutoparTrainerStrategy

MESHES: dict[str, dict[str, Any]] = {
    "pp": {"pp": 2, "microbatches": 4},
    "tp": {"tp": 2},
    "dp": {"dp": 2},
}
BATCH = 64
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")  # its loader has no workers, for so few images


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GELU(), nn.Flatten(),
        nn.Linear(1024, 128), nn.GELU(), nn.Linear(128, 10),
    )  # fmt: skip


class Reader(lightning.LightningModule):
    """Reads handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_net()
        self.accuracy = MulticlassAccuracy(10)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels, label_smoothing=0.1)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        images, labels = batch
        self.accuracy(self.model(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def digits() -> tuple[DataLoader, DataLoader]:
    """Handwritten digits [1, 8, 8] for training and validation, in whole batches."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    train, held_out, _ = random_split(data, [22 * BATCH, 4 * BATCH, len(data) - 26 * BATCH], torch.Generator())
    order = torch.Generator().manual_seed(0)
    return DataLoader(train, BATCH, shuffle=True, generator=order), DataLoader(held_out, BATCH)


def fit(strategy: Any, epochs: int) -> tuple[Reader, float]:
    """The trained module, and its accuracy on images held out."""
    lightning.seed_everything(0, verbose=False)
    reader, (train, held_out) = Reader(), digits()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=epochs, gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(reader, train, held_out)
    return reader, trainer.callback_metrics["accuracy"].item()


def main(args: argparse.Namespace) -> None:
    expected, _ = fit("auto", args.epochs)
    for mesh in args.mesh:
        strategy = AutoparTrainerStrategy(devices=2, example_inputs=torch.zeros(BATCH, 1, 8, 8), **MESHES[mesh])
        reader, accuracy = fit(strategy, args.epochs)
        difference = max(abs(a - b) for a, b in zip(reader.losses, expected.losses))
        print(f"{mesh} 2: loss {reader.losses[0]:.4f} to {reader.losses[-1]:.4f}, accuracy {accuracy:.3f}, ", end="")
        print(f"difference from one device {difference:.1e}, {type(reader.model).__name__} in its place", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--epochs", type=int, default=2)
    main(parser.parse_args())

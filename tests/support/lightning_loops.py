"""A loop of Lightning Fabric and a LightningModule, for the same numbers with and without ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from support.models import tiny_vit

BATCH, BATCHES = 8, 4
SEED = int(os.environ.get("PL_GLOBAL_SEED", 0))  # of Lightning's samplers


def model() -> nn.Module:
    """The model of all loops, equal each time."""
    torch.manual_seed(0)
    return tiny_vit(depth=2)


def loader(batch: int = BATCH, shuffled: bool = False) -> DataLoader:
    """Batches of images and classes, equal each time.

    Args:
        shuffled: whether images come in the order in which the Trainer deals them out to the processes of a launcher.
    """
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(BATCH * BATCHES, 3, 32, 32), torch.randint(0, 10, (BATCH * BATCHES,)))
    return DataLoader(data, batch, sampler=DistributedSampler(data, 1, 0, seed=SEED) if shuffled else None)


def optimizer_and_scheduler(module: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)


class FabricLoop:
    """A loop that accumulates two batches for an update, clips, and schedules the learning rate."""

    def __init__(self, fabric: Fabric, batch: int = BATCH, clip: dict[str, Any] | None = None) -> None:
        self.fabric, self.clip = fabric, clip or {"max_norm": 0.5}
        own = model()
        optimizer, self.scheduler = optimizer_and_scheduler(own)
        fabric.launch()
        self.module, self.optimizer = fabric.setup(own, optimizer)
        self.batches: Any = fabric.setup_dataloaders(loader(batch))
        self.norms: list[float] = []

    def run(self) -> list[float]:
        """Losses of an epoch, of this process's part of the data."""
        losses = []
        for i, (x, y) in enumerate(self.batches):
            with self.fabric.no_backward_sync(self.module, enabled=i % 2 == 0):
                loss = F.cross_entropy(self.module(x), y, label_smoothing=0.1) / 2
                self.fabric.backward(loss)
            if i % 2:
                norm = self.fabric.clip_gradients(self.module, self.optimizer, **self.clip)
                self.norms += [] if norm is None else [norm.item()]
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        """State for checkpoints."""
        return {"model": self.module, "optimizer": self.optimizer, "scheduler": self.scheduler, "epoch": 1}


class Classifier(pl.LightningModule):
    """A classifier that notes its losses."""

    def __init__(self, own: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model() if own is None else own
        self.accuracy = MulticlassAccuracy(10)
        self.losses: list[float] = []
        self.validated: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y, label_smoothing=0.1)
        self.losses.append(loss.item())
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        output = self.model(x)
        loss = F.cross_entropy(output, y)
        self.accuracy(output, y)
        self.log("accuracy", self.accuracy)
        self.log("validation", loss, sync_dist=True)
        self.log("samples", float(len(y)), reduce_fx="sum", sync_dist=True)
        self.validated.append(loss.item())

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.model(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = optimizer_and_scheduler(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ManualClassifier(Classifier):
    """As `Classifier`, with manual optimization: two losses with a graph each, and a backward for both."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        x, y = batch
        optimizer: Any = self.optimizers()
        first, second = self.model(x), self.model(x.flip(-1))
        loss = F.cross_entropy(first, y) + (first - second).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "value")
        optimizer.step()
        self.lr_schedulers().step()  # type: ignore[union-attr]
        self.losses.append(loss.item())


def trainer(strategy: Any, folder: Path | None = None, epochs: int = 2, **arguments: Any) -> pl.Trainer:
    """A Trainer that accumulates, clips and validates; with a folder it saves each epoch and the last state there."""
    settings: dict[str, Any] = {"accelerator": "cpu", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    callbacks: list[Any] = [EarlyStopping("validation", patience=9)]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, save_last=True, save_top_k=-1))
    return pl.Trainer(
        devices=1, strategy=strategy, max_epochs=epochs, logger=False, callbacks=callbacks,
        enable_checkpointing=folder is not None, enable_progress_bar=False, enable_model_summary=False,
        **(settings | arguments),
    )  # fmt: skip

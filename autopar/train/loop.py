"""The training loop: epochs of shuffled batches under a one-cycle learning rate, and an evaluation after each."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from autopar.errors import NonFiniteLossWarning, TrainingError, UsageError
from autopar.model import ParallelModel
from autopar.train.data import Data

SEED_STRIDE = 1_000_003  # keeps the shuffles of neighbouring seeds apart


@dataclass(frozen=True)
class Recipe:
    """How to train.

    ``lr`` is the peak of the one-cycle schedule; training images are moved at random by up to ``shift`` pixels.
    """

    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    seed: int
    shift: int = 0

    def steps_per_epoch(self, samples: int) -> int:
        """Full batches in so many samples.

        Raises:
            UsageError: there is none.
        """
        if samples < self.batch_size:
            raise UsageError(
                f"--batch-size {self.batch_size} is more than the {samples} training images. Use {samples} or less."
            )
        return samples // self.batch_size

    @property
    def optimizer(self) -> Callable[..., Optimizer]:
        return functools.partial(AdamW, lr=self.lr, weight_decay=self.weight_decay)

    def scheduler(self, samples: int) -> Callable[[Optimizer], Any]:
        """What makes the learning-rate schedule for all epochs."""
        steps = self.epochs * self.steps_per_epoch(samples)
        return functools.partial(OneCycleLR, max_lr=self.lr, total_steps=steps)


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to. ``loss`` is the mean of its steps, ``lr`` that of its first one.

    ``samples_per_second`` counts each image once, and the time of training steps only.
    """

    epoch: int
    loss: float
    accuracy: float
    lr: float
    samples_per_second: float


class Progress(Protocol):
    """Who is told how the training goes."""

    def step(self, epoch: int, loss: float, lr: float, samples_per_second: float) -> None: ...

    def epoch(self, epoch: Epoch) -> None: ...


def fit(pm: ParallelModel, data: Data, recipe: Recipe, progress: Progress) -> list[Epoch]:
    """Train for all epochs; what each came to.

    Raises:
        TrainingError: a loss is not finite; names epoch and step.
    """
    history: list[Epoch] = []
    for number in range(1, recipe.epochs + 1):
        losses, seconds, lr = [], 0.0, max(pm.learning_rates())
        pm.train()
        generator = torch.Generator().manual_seed(recipe.seed * SEED_STRIDE + number)
        for chosen in batches(len(data.train_labels), recipe, generator):
            images = shifted(data.train_images[chosen], recipe.shift, generator)
            own, labels = (t.tensor_split(pm.data_size)[pm.data_rank] for t in (images, data.train_labels[chosen]))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NonFiniteLossWarning)  # said better below
                result = pm.train_step(own, labels)
            if not isfinite(result.loss):
                raise TrainingError(
                    f"The loss became {result.loss} in epoch {number}, step {len(losses) + 1} of "
                    f"{recipe.steps_per_epoch(len(data.train_labels))}, at a learning rate near {lr:.3g}. The weights "
                    f"are of no use any more. Use a lower --lr than {recipe.lr:g}."
                )
            pm.lr_scheduler.step()
            losses.append(result.loss)
            seconds += result.step_seconds
            progress.step(number, result.loss, lr, recipe.batch_size * len(losses) / seconds)
        loss = sum(losses) / len(losses)
        score = accuracy(pm.eval(), data, recipe.batch_size)
        history.append(Epoch(number, loss, score, lr, recipe.batch_size * len(losses) / seconds))
        progress.epoch(history[-1])
    return history


def batches(samples: int, recipe: Recipe, generator: torch.Generator) -> list[torch.Tensor]:
    """Which images each step of an epoch sees; an incomplete last batch is left out."""
    order = torch.randperm(samples, generator=generator)
    steps = recipe.steps_per_epoch(samples)
    return list(order[: steps * recipe.batch_size].split(recipe.batch_size))


def shifted(images: torch.Tensor, most: int, generator: torch.Generator) -> torch.Tensor:
    """Each image moved by up to ``most`` pixels in both directions, its border repeated."""
    if most == 0:
        return images
    height, width = images.shape[2:]
    padded = F.pad(images, (most,) * 4, mode="replicate")
    offsets = torch.randint(2 * most + 1, (len(images), 2), generator=generator).tolist()
    return torch.stack([image[:, y : y + height, x : x + width] for image, (y, x) in zip(padded, offsets)])


def accuracy(model: Callable[[torch.Tensor], torch.Tensor], data: Data, batch_size: int) -> float:
    """Share of the test images that a model in eval mode gets right."""
    right = 0
    with torch.no_grad():
        for images, labels in zip(data.test_images.split(batch_size), data.test_labels.split(batch_size)):
            right += int((model(images).argmax(1).cpu() == labels).sum())
    return right / len(data.test_labels)

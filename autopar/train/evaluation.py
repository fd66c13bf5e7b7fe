"""Accuracy and loss of a model on test images, each counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from autopar.api.model import ParallelModel
from autopar.errors import UsageError
from autopar.train.data.loader import Batch
from autopar.train.timm_optional import needed

TOP_CLASSES = 5  # number of highest scores among which the right class counts for `Evaluation.top5`


@dataclass(frozen=True)
class Evaluation:
    """Metrics of an evaluation.

    Args:
        loss: mean cross-entropy.
        accuracy: fraction of images whose class has the highest score.
        top5: fraction of images whose class has one of the five highest scores.
        right: number of images whose class has the highest score.
        samples: number of images.
    """

    loss: float
    accuracy: float
    top5: float
    right: int
    samples: int


def plain_scores(output: Any) -> torch.Tensor:
    """The model's output, which must be scores [batch, classes].

    Raises:
        UsageError: it is anything else.
    """
    if isinstance(output, torch.Tensor) and output.ndim == 2:
        return output
    got = f"shape {list(output.shape)}" if isinstance(output, torch.Tensor) else f"type {type(output).__name__}"
    raise UsageError(
        f"The model's output is of {got}; its accuracy needs scores of [batch, classes]. "
        "Pass scores=, a callable that gets them from the output, such as lambda output: output.logits."
    )


def evaluate(
    pm: ParallelModel, batches: Iterable[Batch], scores: Callable[[Any], torch.Tensor] = plain_scores
) -> Evaluation:
    """Metrics over all batches of all data ranks; leaves the model in eval mode.

    Args:
        scores: returns [batch, classes] from the model's output.
    """
    pm.eval()
    sums = [0.0] * 4
    for x, y, count in batches:
        sums = [a + b for a, b in zip(sums, score_sums(scores(pm(x))[:count], y[:count]))]
    return mean_scores(pm.data_sum(sums))


def evaluate_alone(model: Callable[[torch.Tensor], torch.Tensor], batches: Iterable[Batch]) -> Evaluation:
    """As `evaluate`, for an unparallelized model in eval mode."""
    sums = [0.0] * 4
    with torch.no_grad():
        for x, y, count in batches:
            sums = [a + b for a, b in zip(sums, score_sums(plain_scores(model(x))[:count], y[:count]))]
    return mean_scores(sums)


def score_sums(scores: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Number of samples, sum of cross-entropies, number right, number right among the `TOP_CLASSES` best.

    Args:
        scores: [samples, classes].
        labels: [samples].
    """
    if not len(labels):
        return [0.0] * 4
    labels = labels.to(scores.device)
    loss = F.cross_entropy(scores.float(), labels, reduction="sum").item()
    return [float(len(labels)), loss, num_correct(1, scores, labels), num_correct(TOP_CLASSES, scores, labels)]


def num_correct(best: int, scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Number of samples whose class is among the ``best`` highest scores.

    Args:
        scores: [samples, classes].
        labels: [samples].
    """
    count = needed("torchmetrics.functional.classification", "Accuracy").multiclass_stat_scores
    classes = scores.shape[1]
    stats = count(scores.float(), labels, num_classes=classes, top_k=min(best, classes), average="micro")
    return float(stats[0])


def mean_scores(sums: list[float]) -> Evaluation:
    """Metrics from the sums of `score_sums` over all samples."""
    samples, loss, right, among = sums
    return Evaluation(loss / samples, right / samples, among / samples, round(right), round(samples))

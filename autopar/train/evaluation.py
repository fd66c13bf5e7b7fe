"""How good a model is on test images, each counted once."""

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

TOP_CLASSES = 5  # classes among which the right one has to be for `Evaluation.top5`


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy, and the share of images whose class got the highest score, or one of the five highest.

    ``right`` of ``samples`` images got the highest.
    """

    loss: float
    accuracy: float
    top5: float
    right: int
    samples: int


def plain_scores(output: Any) -> torch.Tensor:
    """The output itself, where it is a tensor [batch, classes].

    Raises:
        UsageError: it is something else.
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
    """The figures over all batches of all data ranks; leaves the model in eval mode."""
    pm.eval()
    sums = [0.0] * 4
    for x, y, count in batches:
        sums = [a + b for a, b in zip(sums, score_sums(scores(pm(x))[:count], y[:count]))]
    return mean_scores(pm.data_sum(sums))


def evaluate_alone(model: Callable[[torch.Tensor], torch.Tensor], batches: Iterable[Batch]) -> Evaluation:
    """The same for a model in eval mode, in this process."""
    sums = [0.0] * 4
    with torch.no_grad():
        for x, y, count in batches:
            sums = [a + b for a, b in zip(sums, score_sums(plain_scores(model(x))[:count], y[:count]))]
    return mean_scores(sums)


def score_sums(scores: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Samples, sum of cross-entropies, number of right ones, number of right ones among the best five."""
    if not len(labels):
        return [0.0] * 4
    labels = labels.to(scores.device)
    loss = F.cross_entropy(scores.float(), labels, reduction="sum").item()
    return [float(len(labels)), loss, num_correct(1, scores, labels), num_correct(TOP_CLASSES, scores, labels)]


def num_correct(best: int, scores: torch.Tensor, labels: torch.Tensor) -> float:
    """How many samples have their class among so many of the highest scores."""
    count = needed("torchmetrics.functional.classification", "Accuracy").multiclass_stat_scores
    classes = scores.shape[1]
    stats = count(scores.float(), labels, num_classes=classes, top_k=min(best, classes), average="micro")
    return float(stats[0])


def mean_scores(sums: list[float]) -> Evaluation:
    """The figures from what `judged` summed over all samples."""
    samples, loss, right, among = sums
    return Evaluation(loss / samples, right / samples, among / samples, round(right), round(samples))

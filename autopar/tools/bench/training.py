"""What the worker drives: a contestant that is ready to train, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from autopar.runtime.spec import RankStats

LossShare = Callable[[], float]  # asked for once the step was timed


@dataclass(frozen=True)
class Trainer:
    """``step`` trains on the batch once and returns what tells this rank's share of its mean loss: shares add up.

    ``stats`` are what each rank measured in its last step, and ``tensor_peaks`` does a step to count tensors on CPU;
    where they are known.
    """

    step: Callable[[], LossShare]
    close: Callable[[], None] = lambda: None
    stats: Callable[[], Mapping[int, RankStats]] | None = None
    tensor_peaks: Callable[[], Mapping[int, int]] | None = None


@contextmanager
def casting(device: torch.device, low: torch.dtype | None) -> Iterator[None]:
    """Autocast, where precision is mixed and anything is computed."""
    if low is None or device.type == "meta":
        yield
        return
    with torch.autocast(device.type, low):
        yield


def mean_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in float32, as autocast computes it."""
    return F.cross_entropy(output if output.dtype == torch.float64 else output.float(), labels)

"""The interface between the worker process and a baseline that is ready to train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from autopar.runtime.spec import RankStats

LossShare = Callable[[], float]  # this rank's share of the mean loss; called after the step was timed


@dataclass(frozen=True)
class BaselineTrainer:
    """A baseline on one rank.

    Args:
        step: trains on the batch once; the shares of all ranks add up to the mean loss.
        close: releases what training holds.
        stats: measurements of all ranks in the last step; a call of all ranks. None for baselines without a plan.
        tensor_peaks: does a step that counts peak bytes in tensors, by rank. None on GPUs, without a plan, and where
            stages are compiled.
    """

    step: Callable[[], LossShare]
    close: Callable[[], None] = lambda: None
    stats: Callable[[], Mapping[int, RankStats]] | None = None
    tensor_peaks: Callable[[], Mapping[int, int]] | None = None


@contextmanager
def casting(device: torch.device, low: torch.dtype | None) -> Iterator[None]:
    """Within ``with``, autocast to a low dtype; nothing if that is None or the device is meta."""
    if low is None or device.type == "meta":
        yield
        return
    with torch.autocast(device.type, low):
        yield


def mean_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy [] of ``output`` [samples, classes] and ``labels`` [samples], in float32 as under autocast."""
    return F.cross_entropy(output if output.dtype == torch.float64 else output.float(), labels)

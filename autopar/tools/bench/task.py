"""The payload of a baseline's worker processes, and the model, batch and optimizer options that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.measure.workers import WorkerContext
from autopar.tools.bench.baselines.registry import LOW_DTYPES
from autopar.tools.bench.request import BenchRequest

LEARNING_RATE = 1e-4
MAX_BUILD_SHARE = 0.4  # share of a GPU's memory up to which a model's weights are initialised there


@dataclass(frozen=True)
class BenchTask:
    """One run of one variant of a baseline. The request is equal for all baselines.

    Args:
        baseline: name of the baseline.
        settings: of the variant.
        plan: file of the baseline's plan; None if it runs none.
        tp: ranks of a tensor-parallel group.
        memory_bytes: memory of a GPU that a baseline with a plan may use; None for all of it.
        profiled_steps: steps whose kernels are profiled on a GPU, after the others.
    """

    request: BenchRequest
    baseline: str
    settings: Mapping[str, Any]
    device_type: str
    precision: str
    plan: str | None = None
    tp: int = 1
    memory_bytes: int | None = None
    profiled_steps: int = 0

    @property
    def low(self) -> torch.dtype | None:
        """The low dtype of mixed precision; None in full precision."""
        return LOW_DTYPES.get(self.precision)


def build_model(task: BenchTask, worker: WorkerContext) -> nn.Module:
    """The model in training mode, with equal weights for all baselines and ranks.

    A worker with a GPU initialises it there unless it is too large: that takes a second instead of minutes.
    """
    request, place = task.request, "cpu"
    if worker.device.type == "cuda":
        num_bytes = sum(t.nbytes for t in request.source.build("meta").state_dict().values())
        if num_bytes < MAX_BUILD_SHARE * torch.cuda.get_device_properties(worker.device).total_memory:
            place = str(worker.device)
    torch.manual_seed(task.request.seed)
    return request.source.build(place).train()


def make_batch(task: BenchTask, worker: WorkerContext, part: slice | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [samples, channels, height, width] and labels [samples] on the device, equal for all baselines.

    Args:
        part: samples of the batch to return; all by default.
    """
    generator = torch.Generator(worker.device).manual_seed(task.request.seed + 1)
    dtype = torch.float64 if task.precision == "fp64" else torch.float32
    images = torch.randn(task.request.shape, generator=generator, device=worker.device, dtype=dtype)
    labels = torch.randint(task.request.classes, task.request.shape[:1], generator=generator, device=worker.device)
    if part is not None:
        images, labels = images[part].clone(), labels[part].clone()
    return (images.contiguous(memory_format=torch.channels_last) if task.request.channels_last else images), labels


def adamw_options(device_type: str) -> dict[str, Any]:
    """Arguments of AdamW for every baseline: the fused kernel on GPUs."""
    return {"lr": LEARNING_RATE} | ({"fused": True} if device_type == "cuda" else {})

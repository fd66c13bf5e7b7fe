"""What a contestant's processes are task, and what each leaves behind: plain data that JSON can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.api.model_source import ModelSource

# Of autocast and of FSDP2's weights. In bf16-params the others stay with autocast, which is how they are written.
LOW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-params": torch.bfloat16}
LEARNING_RATE = 1e-4
MAX_BUILD_SHARE = 0.4  # of a device's memory that a model's weights may take for it to be built there


@dataclass(frozen=True)
class BenchTask:
    """One contestant's run: the same model, data, precision and steps for all of them.

    Args:
        contestant, settings: which one, and what distinguishes this variant of it.
        shape: of the images, at the global batch.
        plan: file of the plan of contestants that run one.
        tp: ranks of a tensor-parallel group.
        run_settings: keyword arguments of `autopar.parallelize`.
        memory_bytes: what of a GPU contestants that run a plan get, where the plan was made for less than all of it.
    """

    contestant: str
    settings: Mapping[str, Any]
    model: str
    model_kwargs: Mapping[str, Any]
    shape: tuple[int, ...]
    classes: int
    devices: int
    device_type: str
    precision: str
    channels_last: bool
    compile: bool
    steps: int
    warmup: int
    seed: int
    plan: str | None = None
    tp: int = 1
    run_settings: Mapping[str, Any] = field(default_factory=dict)
    memory_bytes: int | None = None

    @property
    def batch(self) -> int:
        return self.shape[0]

    @property
    def low(self) -> torch.dtype | None:
        """The low dtype of mixed precision."""
        return LOW_DTYPES.get(self.precision)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> BenchTask:
        data = json.loads(path.read_text())
        return BenchTask(**data | {"shape": tuple(data["shape"])})


@dataclass(frozen=True)
class WorkerContext:
    """Where a process runs: its number among those of its contestant, and its device."""

    rank: int
    world: int
    device: torch.device


def build_model(task: BenchTask, worker: WorkerContext) -> nn.Module:
    """The model, with equal weights for all contestants and ranks.

    On a GPU it is drawn there, which takes a second where a CPU takes minutes, unless it would fill the memory.
    """
    source = ModelSource(task.model, task.model_kwargs)
    place = "cpu"
    if worker.device.type == "cuda":
        num_bytes = sum(t.nbytes for t in source.build("meta").state_dict().values())
        if num_bytes < MAX_BUILD_SHARE * torch.cuda.get_device_properties(worker.device).total_memory:
            place = str(worker.device)
    torch.manual_seed(task.seed)
    model = source.build(place)
    return (model.to(memory_format=torch.channels_last) if task.channels_last else model).train()


def make_batch(task: BenchTask, worker: WorkerContext, part: slice | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch, or its samples of a slice, on the device; the same for all contestants."""
    generator = torch.Generator(worker.device).manual_seed(task.seed + 1)
    dtype = torch.float64 if task.precision == "fp64" else torch.float32
    images = torch.randn(task.shape, generator=generator, device=worker.device, dtype=dtype)
    labels = torch.randint(task.classes, task.shape[:1], generator=generator, device=worker.device)
    if part is not None:
        images, labels = images[part].clone(), labels[part].clone()
    return (images.contiguous(memory_format=torch.channels_last) if task.channels_last else images), labels


def adamw_options(device_type: str) -> dict[str, Any]:
    """Arguments of AdamW for every contestant: the fused kernel where there is one that is fast."""
    return {"lr": LEARNING_RATE} | ({"fused": True} if device_type == "cuda" else {})

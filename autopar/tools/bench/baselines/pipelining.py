"""torch.distributed.pipelining with stages of equal numbers of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from autopar.measure.workers import WorkerContext
from autopar.tools.bench.baselines.ddp_fsdp import refuse_float16
from autopar.tools.bench.baselines.registry import NotExpressible
from autopar.tools.bench.parts import ModelFunction, WithRope, compile_blocks, sequence
from autopar.tools.bench.task import BenchTask, adamw_options, build_model, make_batch
from autopar.tools.bench.training import BaselineTrainer, LossShare, casting, mean_loss


class Section(nn.Module):
    """Consecutive modules of a model; the output is contiguous and in the low dtype.

    The receiver's buffer is contiguous, so channels_last tensors are sent as contiguous ones and converted back.
    """

    def __init__(self, modules: Sequence[nn.Module], low: torch.dtype | None, channels_last: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.low, self.channels_last = low, channels_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with casting(x.device, self.low):
            for part in self.parts:
                x = part(x)
        return x.to(self.low or x.dtype).contiguous()


def pipelined(task: BenchTask, worker: WorkerContext) -> BaselineTrainer:
    """1F1B with one stage per rank, or interleaved 1F1B with several; stage s is on rank s % ranks."""
    refuse_float16(task, "torch.distributed.pipelining")
    chunks, size = task.settings["chunks"], task.settings["microbatch_size"]
    model = build_model(task, worker)
    count = chunks * worker.world
    sections = sections_of(model, task, count)
    shapes = shapes_between(
        sections_of(task.request.source.build("meta"), task, count), (size, *task.request.shape[1:])
    )
    local_sections = {s: sections[s].to(worker.device) for s in range(worker.rank, count, worker.world)}
    del model, sections
    if task.request.compile:
        for section in local_sections.values():
            compile_blocks(repeated_blocks(section))
    low = task.low or (torch.float64 if task.precision == "fp64" else torch.float32)
    # A stage sends back gradients of the inputs that require them.
    meta = [torch.empty(shape, dtype=low, device="meta", requires_grad=True) for shape in shapes]
    meta[0] = torch.empty(shapes[0], dtype=torch.float64 if task.precision == "fp64" else torch.float32, device="meta")
    stages = [
        PipelineStage(section, s, count, worker.device, input_args=meta[s], output_args=meta[s + 1])
        for s, section in local_sections.items()
    ]
    microbatches = task.request.batch // size
    if chunks == 1:
        schedule = Schedule1F1B(stages[0], microbatches, loss_fn=mean_loss)
    else:
        schedule = ScheduleInterleaved1F1B(list(stages), microbatches, loss_fn=mean_loss)
    first, last = worker.rank == 0, worker.rank == worker.world - 1
    images, labels = make_batch(task, worker) if first or last else (None, None)
    arguments = (images,) if first else ()
    if not first:
        images = None
    optimizer = torch.optim.AdamW(
        [p for section in local_sections.values() for p in section.parameters()], **adamw_options(worker.device.type)
    )

    def step() -> LossShare:
        losses: list[torch.Tensor] = []
        if last:
            schedule.step(*arguments, target=labels, losses=losses)
        else:
            schedule.step(*arguments)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss.detach() for loss in losses]).mean().item if last else float

    return BaselineTrainer(step)


def sections_of(model: nn.Module, task: BenchTask, count: int) -> list[Section]:
    """A model in ``count`` sections; errors as `sequence` and `split_evenly`."""
    return [Section(modules, task.low, task.request.channels_last) for modules in split_evenly(sequence(model), count)]


def split_evenly(modules: Sequence[nn.Module], count: int) -> list[list[nn.Module]]:
    """Stem, blocks and head in ``count`` stages with equal numbers of blocks.

    Raises:
        NotExpressible: there are fewer blocks than stages.
    """
    stem, inner, head = modules[0], modules[1:-1], modules[-1]
    if len(inner) < count:
        raise NotExpressible(f"{len(inner)} blocks do not fill {count} stages")
    bounds = [round(i * len(inner) / count) for i in range(count + 1)]
    stages = [list(inner[low:high]) for low, high in pairwise(bounds)]
    stages[0].insert(0, stem)
    stages[-1].append(head)
    return stages


def repeated_blocks(section: Section) -> list[nn.Module]:
    """The model's blocks in a section, without stem and head: these are compiled."""
    parts = [part.block if isinstance(part, WithRope) else part for part in section.parts]
    return [part for part in parts if not isinstance(part, ModelFunction)]


def shapes_between(sections: Sequence[Section], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of the inputs of all sections, and of the last section's output.

    Args:
        sections: of a model on the meta device.
        shape: of the first section's input.
    """
    shapes = [shape]
    with torch.no_grad():
        for section in sections:
            shapes.append(tuple(section(torch.empty(shapes[-1], device="meta")).shape))
    return shapes

"""The plain loop, DDP and FSDP2, as their documentation has people write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from autopar.api.batch import partition
from autopar.tools.bench.assignment import Assignment, WorkerContext, adamw_options, built_model, images_and_labels
from autopar.tools.bench.baselines.registry import NotExpressible
from autopar.tools.bench.parts import RECOMPILE_LIMIT, blocks, compile_blocks
from autopar.tools.bench.training import Ready, Share, casting, mean_loss
from autopar.trace.passes.bf16_params import KEEPS_STATISTICS


def plain(told: Assignment, seat: WorkerContext) -> Ready:
    """One device, gradients accumulated over the plan's microbatches."""
    model = built_model(told, seat).to(seat.device)
    images, labels = images_and_labels(told, seat)
    sizes = partition(told.batch, told.settings["replicas"], told.settings["microbatches"])
    cut = list(zip(images.split(sizes), labels.split(sizes), strict=True))
    if told.compile:
        compile_blocks(blocks(model))
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_options(seat.device.type))
    scaler = torch.amp.GradScaler(seat.device.type, enabled=told.low is torch.float16)

    def step() -> Share:
        total = torch.zeros((), dtype=torch.float64, device=seat.device)
        for x, y in cut:
            with casting(seat.device, told.low):
                loss = mean_loss(model(x), y) * (len(y) / told.batch)
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return total.item

    return Ready(step)


def ddp(told: Assignment, seat: WorkerContext) -> Ready:
    """Each replica its part of the batch at once, gradients summed while the backward runs."""
    model = built_model(told, seat).to(seat.device)
    how = told.settings["compile"]
    if how == "blocks":
        compile_blocks(blocks(model))
    parallel: Callable[[torch.Tensor], torch.Tensor] = nn.parallel.DistributedDataParallel(
        model,
        device_ids=[seat.device.index] if seat.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=how != "whole",  # which the splitter of whole graphs by buckets does not take
    )
    if how == "whole":
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        parallel = torch.compile(parallel)
    images, labels = images_and_labels(told, seat, share_of(told, seat.rank, seat.world))
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_options(seat.device.type))
    scaler = torch.amp.GradScaler(seat.device.type, enabled=told.low is torch.float16)

    def step() -> Share:
        with casting(seat.device, told.low):
            loss = mean_loss(parallel(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return lambda: loss.item() / seat.world

    return Ready(step)


def fsdp2(told: Assignment, seat: WorkerContext) -> Ready:
    """Weights, gradients and the optimizer's state in equal parts on all ranks, gathered block by block.

    It takes no weights in channels_last; convolutions follow the format of the images all the same. Batch norm takes no
    weights of a lower dtype than its statistics: models that have it compute under autocast.
    """
    refuse_float16(told, "FSDP2")
    model = built_model(told, seat).to(memory_format=torch.contiguous_format)
    mesh = init_device_mesh(seat.device.type, (seat.world,))
    images, labels = images_and_labels(told, seat, share_of(told, seat.rank, seat.world))
    statistics = any(isinstance(module, KEEPS_STATISTICS) for module in model.modules())
    shard(model, mesh, None if statistics else told.low, told.settings["reshard"])
    model.to(seat.device)
    if told.compile:
        compile_blocks(blocks(model))
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_options(seat.device.type))

    def step() -> Share:
        with casting(seat.device, told.low if statistics else None):
            loss = mean_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return lambda: loss.item() / seat.world

    return Ready(step)


def shard(model: nn.Module, mesh: DeviceMesh, low: torch.dtype | None, reshard: bool) -> None:
    """`fully_shard` each block, then the rest: computed in a low dtype, gradients summed in float32."""
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    for block in blocks(model):
        if block is not model:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def share_of(told: Assignment, part: int, parts: int) -> slice:
    """The samples of one of equal parts of the batch."""
    size = told.batch // parts
    return slice(part * size, (part + 1) * size)


def refuse_float16(told: Assignment, who: str) -> None:
    """Raise NotExpressible where losses would have to be scaled."""
    if told.low is torch.float16:
        raise NotExpressible(f"float16 needs its loss scaled, which is not written for {who} here; use bf16")

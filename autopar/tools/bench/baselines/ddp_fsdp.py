"""The plain loop, DDP and FSDP2, written as in torch's documentation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from autopar.api.batch import partition
from autopar.measure.workers import WorkerContext
from autopar.tools.bench.baselines.registry import NotExpressible
from autopar.tools.bench.parts import RECOMPILE_LIMIT, blocks, compile_blocks
from autopar.tools.bench.task import BenchTask, adamw_options, build_model, make_batch
from autopar.tools.bench.training import BaselineTrainer, LossShare, casting, mean_loss
from autopar.trace.passes.bf16_params import KEEPS_STATISTICS


def plain(task: BenchTask, worker: WorkerContext) -> BaselineTrainer:
    """One device that accumulates gradients over the microbatches of all replicas of the plan."""
    model = build_model(task, worker).to(worker.device)
    images, labels = make_batch(task, worker)
    sizes = partition(task.request.batch, task.settings["replicas"], task.settings["microbatches"])
    microbatches = list(zip(images.split(sizes), labels.split(sizes), strict=True))
    compile_mode, call = task.settings["compile"], model
    if compile_mode == "blocks":
        compile_blocks(blocks(model))
    elif compile_mode != "none":
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        call = torch.compile(model, mode="reduce-overhead" if compile_mode == "graphs" else None)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_options(worker.device.type))
    scaler = torch.amp.GradScaler(worker.device.type, enabled=task.low is torch.float16)

    def step() -> LossShare:
        total = torch.zeros((), dtype=torch.float64, device=worker.device)
        for x, y in microbatches:
            with casting(worker.device, task.low):
                loss = mean_loss(call(x), y) * (len(y) / task.request.batch)
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return total.item

    return BaselineTrainer(step)


def ddp(task: BenchTask, worker: WorkerContext) -> BaselineTrainer:
    """Each replica runs its part of the batch as one microbatch; gradients are all-reduced during the backward."""
    model = build_model(task, worker).to(worker.device)
    compile_mode = task.settings["compile"]
    if compile_mode == "blocks":
        compile_blocks(blocks(model))
    parallel: Callable[[torch.Tensor], torch.Tensor] = nn.parallel.DistributedDataParallel(
        model,
        device_ids=[worker.device.index] if worker.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=compile_mode != "whole",  # not supported by dynamo's DDP optimizer, which splits graphs at buckets
    )
    if compile_mode == "whole":
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        parallel = torch.compile(parallel)
    images, labels = make_batch(task, worker, batch_slice(task, worker.rank, worker.world))
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_options(worker.device.type))
    scaler = torch.amp.GradScaler(worker.device.type, enabled=task.low is torch.float16)

    def step() -> LossShare:
        with casting(worker.device, task.low):
            loss = mean_loss(parallel(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return lambda: loss.item() / worker.world

    return BaselineTrainer(step)


def fsdp2(task: BenchTask, worker: WorkerContext) -> BaselineTrainer:
    """Weights, gradients and optimizer state sharded over all ranks; weights are all-gathered block by block.

    FSDP2 takes no weights in channels_last, but convolutions follow the format of the images. Batch norm takes no
    weights of a lower dtype than its statistics, so models that have it compute under autocast.
    """
    refuse_float16(task, "FSDP2")
    model = build_model(task, worker).to(memory_format=torch.contiguous_format)
    mesh = init_device_mesh(worker.device.type, (worker.world,))
    images, labels = make_batch(task, worker, batch_slice(task, worker.rank, worker.world))
    has_batch_norm = any(isinstance(module, KEEPS_STATISTICS) for module in model.modules())
    shard_blocks(model, mesh, None if has_batch_norm else task.low, task.settings["reshard"])
    model.to(worker.device)
    if task.request.compile:
        compile_blocks(blocks(model))
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_options(worker.device.type))

    def step() -> LossShare:
        with casting(worker.device, task.low if has_batch_norm else None):
            loss = mean_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return lambda: loss.item() / worker.world

    return BaselineTrainer(step)


def shard_blocks(model: nn.Module, mesh: DeviceMesh, low: torch.dtype | None, reshard: bool) -> None:
    """`fully_shard` each block, then the rest of the model.

    Args:
        low: dtype of computation; gradients are then reduced in float32. None computes in the weights' dtype.
        reshard: whether blocks free their gathered weights between forward and backward.
    """
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    for block in blocks(model):
        if block is not model:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def batch_slice(task: BenchTask, part: int, parts: int) -> slice:
    """The samples of one of ``parts`` equal parts of the batch."""
    size = task.request.batch // parts
    return slice(part * size, (part + 1) * size)


def refuse_float16(task: BenchTask, who: str) -> None:
    """Raise NotExpressible for float16, which needs a scaled loss.

    Args:
        who: the baseline, for the message.
    """
    if task.low is torch.float16:
        raise NotExpressible(f"float16 needs its loss scaled, which is not written for {who} here; use bf16")

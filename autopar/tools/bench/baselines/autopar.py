"""A plan run by autopar, in the same worker processes and with its data on the device like all baselines."""

from __future__ import annotations

import functools

import torch

from autopar.api.parallelize import parallelize
from autopar.measure.workers import WorkerContext
from autopar.runtime.comm.symmetric_p2p import reserved_bytes
from autopar.tools.bench.task import BenchTask, adamw_options, build_model, make_batch
from autopar.tools.bench.training import BaselineTrainer, LossShare, mean_loss


def run_plan(task: BenchTask, worker: WorkerContext) -> BaselineTrainer:
    """`parallelize` with a plan, trained on this data rank's part of the batch.

    Inputs and targets that the rank does not read are on the meta device.
    """
    model = build_model(task, worker).cpu()
    example = torch.empty(task.request.shape, device="meta")
    if task.request.channels_last:
        example = example.contiguous(memory_format=torch.channels_last)
    pm = parallelize(
        model,
        worker.world,
        example_inputs=example,
        loss_fn=mean_loss,
        optimizer=functools.partial(torch.optim.AdamW, **adamw_options(worker.device.type)),
        plan=task.plan,
        **task.request.run_settings,
    )
    del model
    if task.memory_bytes is not None and worker.device.type == "cuda":
        limit_memory(task.memory_bytes, worker.device)
    size = task.request.batch // pm.data_size
    images, labels = make_batch(task, worker, slice(pm.data_rank * size, (pm.data_rank + 1) * size))
    x = images if pm.needs_inputs else images.to("meta")
    y = labels if pm.needs_targets else labels.to("meta")
    del images, labels

    def step() -> LossShare:
        result = pm.train_step(x, y)
        return lambda: result.loss / worker.world

    counts = worker.device.type == "cpu" and not task.request.compile
    return BaselineTrainer(step, pm.close, pm.stats, (lambda: pm.measure_memory(x, y)) if counts else None)


def limit_memory(num_bytes: int, device: torch.device) -> None:
    """Limit the process to so many bytes of a GPU: the allocator gets what symmetric buffers leave of them."""
    total = torch.cuda.get_device_properties(device).total_memory
    share = (num_bytes - reserved_bytes(device)) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)), device)

"""A plan run by autopar itself, under the same launcher and with its data on the device as all others."""

from __future__ import annotations

import functools

import torch

from autopar.api.parallelize import parallelize
from autopar.runtime.comm.symmetric_p2p import reserved_bytes
from autopar.tools.bench.assignment import Assignment, WorkerContext, adamw_options, built_model, images_and_labels
from autopar.tools.bench.training import Ready, Share, mean_loss


def planned(told: Assignment, seat: WorkerContext) -> Ready:
    """`parallelize` with a plan; this rank's part of the batch, and only what it reads of that."""
    model = built_model(told, seat).cpu()
    example = torch.empty(told.shape, device="meta")
    if told.channels_last:
        example = example.contiguous(memory_format=torch.channels_last)
    pm = parallelize(
        model,
        seat.world,
        example_inputs=example,
        loss_fn=mean_loss,
        optimizer=functools.partial(torch.optim.AdamW, **adamw_options(seat.device.type)),
        plan=told.plan,
        **told.run_settings,
    )
    del model
    if told.memory_bytes is not None and seat.device.type == "cuda":
        allow(told.memory_bytes, seat.device)
    size = told.batch // pm.data_size
    images, labels = images_and_labels(told, seat, slice(pm.data_rank * size, (pm.data_rank + 1) * size))
    x = images if pm.needs_inputs else images.to("meta")
    y = labels if pm.needs_targets else labels.to("meta")
    del images, labels

    def step() -> Share:
        result = pm.train_step(x, y)
        return lambda: result.loss / seat.world

    on_cpu = seat.device.type == "cpu"
    return Ready(step, pm.close, pm.stats, (lambda: pm.measure_memory(x, y)) if on_cpu else None)


def allow(num_bytes: int, device: torch.device) -> None:
    """Let the process have so much of a GPU: what peers reach is there already, the allocator gets the rest."""
    total = torch.cuda.get_device_properties(device).total_memory
    share = (num_bytes - reserved_bytes(device)) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)), device)

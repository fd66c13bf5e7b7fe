"""The request to `autopar bench`, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.api.model_source import ModelSource, in_channels_last
from autopar.api.options import RUN_SETTINGS, Options
from autopar.errors import AutoparError, UsageError
from autopar.runtime.launch.devices import Machine, this_machine
from autopar.runtime.launch.environment import launched
from autopar.tools.bench.baselines.registry import check_names

SAMPLES = 2  # batch norm refuses a batch of one


@dataclass(frozen=True)
class BenchRequest:
    """The model, batch, constraints and baselines of one bench.

    Args:
        shape: of the images, [global batch, channels, height, width].
        classes: labels are below this.
        constraints: keyword arguments of `autopar.parallelize` that constrain plans or set how they run.
        steps: timed steps of each baseline, after ``warmup`` others.
        only: names of the baselines that take part; empty for the default ones.
        skip: names of baselines that do not take part.
        microbatch_sizes: of torch.distributed.pipelining; None for the default ones.
        limit_seconds: for each variant of each baseline.
        command: the command line, for the record.

    Raises:
        UsageError: a baseline is unknown, none would be left, or a microbatch size does not fit the batch.
    """

    source: ModelSource
    shape: tuple[int, ...]
    classes: int
    devices: int
    constraints: Mapping[str, Any]
    steps: int = 10
    warmup: int = 5
    seed: int = 0
    compile: bool = False
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    microbatch_sizes: tuple[int, ...] | None = None
    limit_seconds: float = 600.0
    command: str = ""

    def __post_init__(self) -> None:
        check_names(self.only, self.skip)
        for size in self.microbatch_sizes or ():
            if not 1 <= size <= self.shape[0]:
                raise UsageError(
                    f"--microbatch-sizes {size}: a microbatch has from 1 to {self.shape[0]} samples, the global batch."
                )

    @property
    def batch(self) -> int:
        return self.shape[0]

    @property
    def channels_last(self) -> bool:
        """Whether model and images are in channels_last memory format."""
        return self.source.channels_last

    @property
    def run_settings(self) -> Mapping[str, Any]:
        """Keyword arguments of `autopar.parallelize` that set how plans run."""
        return {name: value for name, value in self.constraints.items() if name in RUN_SETTINGS}


def machine_for(request: BenchRequest) -> Machine:
    """The machine on which a bench runs.

    Raises:
        UsageError: this process was started by a launcher, or the machine cannot run the request.
    """
    if launched() is not None:
        raise UsageError("bench starts the processes of each baseline itself. Run it without torchrun or srun.")
    machine = this_machine(request.devices, request.constraints.get("backend"))
    Options.of(request.constraints).check_machine(machine.device_type)
    return machine


def num_classes(model: nn.Module, shape: tuple[int, ...], channels_last: bool = False) -> int:
    """Number of classes: columns of the logits.

    Args:
        model: on the meta device.
        shape: of the images, with any batch.
        channels_last: their memory format.

    Raises:
        UsageError: the model is not a classifier of images of this shape.
    """
    with torch.no_grad():
        try:
            images = torch.empty(1, *shape[1:], device="meta")
            logits = model.eval()(in_channels_last(images) if channels_last else images)
        except AutoparError:
            raise
        except Exception as error:
            raise UsageError(
                f"{type(model).__name__} does not take images of shape {list(shape[1:])}: {type(error).__name__}: "
                f"{error}"
            ) from error
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        raise UsageError(
            f"{type(model).__name__} is no classifier: it does not return one row of logits for each image."
        )
    return logits.shape[1]


def flops_per_image(model: nn.Module, shape: tuple[int, ...]) -> float:
    """FLOPs of matrix products, convolutions and attention, forward and backward, without recomputation.

    Args:
        model: on the meta device.
        shape: of images, with any batch.
    """
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    with FlopCounterMode(display=False) as counter:
        model.train()(torch.empty(SAMPLES, *shape[1:], device="meta", dtype=dtype)).sum().backward()
    return counter.get_total_flops() / SAMPLES

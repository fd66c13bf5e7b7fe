"""Request for a training run: the values of the flags of ``autopar train``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from autopar.ir.plan import Plan
from autopar.tools.cli.existing_run import AUTO
from autopar.tools.cli.flags import BuildFlags
from autopar.tools.cli.train_flags import (
    MIXUP_PROB,
    MIXUP_SWITCH_PROB,
    AugmentationFlags,
    DataFlags,
    OptimizerFlags,
    RegularizationFlags,
    ScheduleFlags,
    WeightsFlags,
)
from autopar.tools.cli.train_tracking import TrackingFlags
from autopar.train import Mixup, micro_batch
from autopar.train.timm_optional import needed

IN_MEMORY = ("digits",)  # data sets so small that reading them in this process is quicker
MAX_WORKERS = 4
ENDLESS = ("none", "constant", "step", "multistep", "plateau")  # schedules that do not depend on the number of epochs


@dataclass(frozen=True)
class Run:
    """Values of the flags of ``autopar train``. ``plan`` is None if its flag is not given.

    ``devices`` are the flag's, else the plan's or torchrun's; None if the machine decides.
    ``flags`` are the values of all flags by name, as given, for trackers.
    """

    model: str
    build: BuildFlags
    weights: WeightsFlags
    data: DataFlags
    augmentation: AugmentationFlags
    optimizer: OptimizerFlags
    schedule: ScheduleFlags
    regularization: RegularizationFlags
    tracking: TrackingFlags
    devices: int | None
    epochs: int
    batch_size: int
    seed: int
    val_only: bool
    resume: str | None
    checkpoint_steps: int | None
    keep: int
    folder: Path
    overwrite: bool
    plan: Plan | None
    constraints: Mapping[str, Any]
    as_json: bool
    flags: Mapping[str, Any]

    @property
    def restarts(self) -> bool:
        """Whether the run goes on with what is in its folder, or starts if there is nothing."""
        return self.resume == AUTO

    @property
    def at_once(self) -> int:
        """Images in one forward pass: the batch divided by the accumulation steps."""
        return micro_batch(self.batch_size, self.optimizer.grad_accum_steps)

    @property
    def workers(self) -> int:
        """Processes that read images, for each rank."""
        if self.data.workers is not None:
            return self.data.workers
        return 0 if self.data.data in IN_MEMORY else min(MAX_WORKERS, os.cpu_count() or 1)

    def mixup(self, num_classes: int) -> Mixup | None:
        flags = self.regularization
        if flags.mixup == flags.cutmix == 0:
            return None
        prob = MIXUP_PROB if flags.mixup_prob is None else flags.mixup_prob
        switch = MIXUP_SWITCH_PROB if flags.mixup_switch_prob is None else flags.mixup_switch_prob
        return Mixup(num_classes, flags.mixup, flags.cutmix, prob, switch, flags.smoothing, self.seed)

    def loss_fn(self) -> nn.Module | None:
        """timm's loss for soft targets or smoothed labels; None for plain cross-entropy."""
        flags = self.regularization
        if flags.mixup or flags.cutmix:
            return needed("timm.loss", "--mixup").SoftTargetCrossEntropy()
        return (
            needed("timm.loss", "--smoothing").LabelSmoothingCrossEntropy(flags.smoothing) if flags.smoothing else None
        )

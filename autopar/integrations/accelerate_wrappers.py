"""Accelerate's wrappers of optimizers and schedulers, for optimizers whose steps run on ranks."""

from __future__ import annotations

from typing import Any

from autopar.train.timm_optional import needed


def part_of_accelerate(path: str) -> Any:
    """A module of Accelerate. Raises a UsageError where it is not installed."""
    return needed(path, "AutoparAccelerator", "accelerate", "accelerate")


OPTIMIZERS, SCHEDULERS = part_of_accelerate("accelerate.optimizer"), part_of_accelerate("accelerate.scheduler")


class RanksOptimizer(OPTIMIZERS.AcceleratedOptimizer):
    """Accelerate's wrapper of an optimizer whose step runs on ranks."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped after an overflow under fp16."""
        return self.optimizer.skipped


class RanksScheduler(SCHEDULERS.AcceleratedScheduler):
    """Accelerate's wrapper of a scheduler, which it steps once for each part of a global batch."""

    def __init__(self, scheduler: Any, optimizers: Any, step_with_optimizer: bool, times: int) -> None:
        """Take over a scheduler; ``times`` is the number of parts."""
        super().__init__(scheduler, optimizers, step_with_optimizer, split_batches=True)
        self.times = times

    def step(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(self.times if self.step_with_optimizer and self.gradient_state.sync_gradients else 1):
            if self.scheduler_may_step():
                super().step(*args, **kwargs)

    def scheduler_may_step(self) -> bool:
        """Whether a scheduler of a fixed length has steps left: the last batches may be fewer than the parts."""
        total = getattr(self.scheduler, "total_steps", None)
        return total is None or self.times == 1 or self.scheduler._step_count <= total

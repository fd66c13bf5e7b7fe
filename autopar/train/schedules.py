"""Learning-rate schedules by name: timm's and torch's one-cycle, all stepped in the same way."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from autopar.api.model_source import need
from autopar.errors import UsageError, suggest
from autopar.ir.units import plural

ONE_CYCLE, NONE = "onecycle", "none"
NAMES = ("cosine", "tanh", "step", "multistep", "plateau", "poly", "wsd", "rsqrt", "constant", ONE_CYCLE, NONE)


@dataclass(frozen=True)
class Schedule:
    """Builds the scheduler of an optimizer; plain data, so that it can be sent to workers.

    Schedulers are stepped as timm's are: ``pm.lr_scheduler.step_update(updates so far)`` after each update, and
    ``pm.lr_scheduler.step(epochs so far, metric)`` after each epoch. Each scheduler uses one of the two calls, and
    depends on the argument alone, except for ``plateau``.
    """

    name: str
    epochs: int
    updates_per_epoch: int
    options: Mapping[str, Any]

    def __call__(self, optimizer: Optimizer) -> Any:
        """The scheduler of an optimizer; None for ``none``.

        Raises:
            UsageError: timm refuses the options.
        """
        return self.build(optimizer)[0]

    @property
    def length(self) -> str:
        """Length of the schedule, in words."""
        return f"{plural(self.epochs, 'epoch')} of {plural(self.updates_per_epoch, 'update')}"

    def build(self, optimizer: Optimizer) -> tuple[Any, int]:
        """The scheduler, and the epochs to train for."""
        try:
            if self.name == ONE_CYCLE:
                total = self.epochs * self.updates_per_epoch
                return OneCycle(optimizer, total, self.options), self.epochs
            scheduler, epochs = timm_factory(self.name)(
                optimizer, self.name, num_epochs=self.epochs, updates_per_epoch=self.updates_per_epoch, **self.options
            )
        except (ValueError, AssertionError, TypeError) as error:
            text = str(error).rstrip(".") or "the options contradict each other"
            options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
            raise UsageError(
                f"Schedule {self.name!r} over {self.length} with {options or 'no options'}: {text}."
            ) from error
        if scheduler is None and self.name != NONE:
            raise UsageError(f"The installed timm has no schedule {self.name!r}. Update it, or choose cosine.")
        return scheduler, epochs


def timm_factory(name: str) -> Any:
    """timm's function that makes a scheduler by name."""
    return need("timm.scheduler", f"Schedule {name!r}").create_scheduler_v2


class OneCycle:
    """torch's OneCycleLR, stepped as timm's schedulers are; a group's peak is its ``lr`` times its ``lr_scale``."""

    def __init__(self, optimizer: Optimizer, total_updates: int, options: Mapping[str, Any]) -> None:
        peaks = [float(group["lr"]) * group.get("lr_scale", 1.0) for group in optimizer.param_groups]
        self.scheduler = OneCycleLR(optimizer, max_lr=peaks, total_steps=total_updates, **options)
        self.last_update = total_updates - 1  # torch raises an error on further steps

    def step(self, epoch: int, metric: float | None = None) -> None:
        """Do nothing: the schedule is stepped by updates."""

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        """Set the learning rates after so many updates; they are constant after the last one."""
        while self.scheduler.last_epoch < min(num_updates, self.last_update):
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)


def schedule(sched: str, epochs: int, updates_per_epoch: int = 0, **options: Any) -> Schedule:
    """A builder of learning-rate schedulers, for the ``lr_scheduler`` argument of `autopar.parallelize`.

    Args:
        sched: ``cosine``, ``tanh``, ``step``, ``multistep``, ``plateau``, ``poly``, ``wsd``, ``rsqrt`` or ``constant``,
            which are timm's; ``onecycle``, which is torch's; ``none`` keeps the learning rate constant.
        epochs: length of the schedule.
        updates_per_epoch: needed by ``onecycle``, and by the others with ``step_on_epochs=False``.
        options: those of ``timm.scheduler.create_scheduler_v2`` (``warmup_epochs``, ``warmup_lr``, ``min_lr``,
            ``decay_epochs``, ``decay_rate``, …), or of OneCycleLR.

    Raises:
        UsageError: unknown name or option, or options that contradict each other.
    """
    if sched not in NAMES:
        hint = suggest(sched, NAMES)
        raise UsageError(f"There is no learning-rate schedule {sched!r}.{hint} It is one of {', '.join(NAMES)}.")
    accepted = schedule_options(sched)
    unknown = [name for name in options if name not in accepted]
    if unknown:
        hint = suggest(unknown[0], accepted)
        raise UsageError(f"Schedule {sched!r} has no option {unknown[0]!r}.{hint} It has {', '.join(accepted)}.")
    by_updates = sched == ONE_CYCLE or options.get("step_on_epochs") is False
    if epochs < 1 or (by_updates and updates_per_epoch < 1):
        raise UsageError(
            f"Schedule {sched!r} over {epochs} epochs of {updates_per_epoch} updates: both must be at least 1. Pass "
            "updates_per_epoch=, the number of optimizer steps of an epoch."
        )
    result = Schedule(sched, epochs, updates_per_epoch, options)
    scheduler, total = result.build(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=1.0, momentum=0.9))
    warmup = options.get("warmup_epochs", 0)
    if scheduler is not None and warmup >= total:
        raise UsageError(
            f"Schedule {sched!r} over {plural(total, 'epoch')} with warmup_epochs={warmup}: the learning rate would "
            f"never reach its peak. Use {total - 1} or less (--warmup-epochs {total - 1}), or more epochs."
        )
    return result


def schedule_options(name: str) -> list[str]:
    """Names of a schedule's options besides its length."""
    if name == ONE_CYCLE:
        factory, fixed = OneCycleLR, {"optimizer", "max_lr", "total_steps", "epochs", "steps_per_epoch", "last_epoch"}
    else:
        factory, fixed = timm_factory(name), {"optimizer", "sched", "num_epochs", "updates_per_epoch"}
    return [option for option in inspect.signature(factory).parameters if option not in fixed]

"""Flags of ``autopar train`` that would do nothing beside the others: refused, so that nobody believes in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from autopar.cli.train_flags import AugmentationFlags, OptimizerFlags, RegularizationFlags, ScheduleFlags
from autopar.errors import UsageError


@dataclass(frozen=True)
class Beside:
    """The values that decide whether a flag does anything."""

    optimizer: OptimizerFlags
    schedule: ScheduleFlags
    regularization: RegularizationFlags
    augmentation: AugmentationFlags
    warmup: int


@dataclass(frozen=True)
class Rule:
    """``flag`` does something only where ``acts``; ``wants`` says where that is."""

    flag: str
    acts: Callable[[Beside], Any]
    wants: str


def of_schedules(flag: str, *names: str) -> Rule:
    """The rule of a flag that only some schedules read, as timm.scheduler.create_scheduler_v2 does."""
    return Rule(flag, lambda beside: beside.schedule.sched in names, f"--sched {', '.join(names)}")


WARMING = ("cosine", "tanh", "step", "multistep", "plateau", "poly", "wsd", "rsqrt", "constant")
RULES = (
    Rule("clip_mode", lambda b: b.optimizer.clip_grad is not None, "--clip-grad"),
    Rule("model_ema_decay", lambda b: b.optimizer.model_ema, "--model-ema"),
    Rule("mixup_prob", lambda b: b.regularization.mixup or b.regularization.cutmix, "--mixup or --cutmix"),
    Rule("mixup_switch_prob", lambda b: b.regularization.mixup and b.regularization.cutmix, "--mixup and --cutmix"),
    # timm's transforms change colours by the policy alone, unless it is one of three augmentations.
    Rule("color_jitter", lambda b: b.augmentation.color_jitter == 0 or "3a" in (b.augmentation.aa or "3a"), "no --aa"),
    of_schedules("warmup_epochs", *WARMING),
    of_schedules("warmup_lr", *WARMING),
    Rule("warmup_lr", lambda b: b.warmup, "--warmup-epochs of at least 1"),
    of_schedules("min_lr", "cosine", "tanh", "plateau", "poly", "wsd", "rsqrt"),
    of_schedules("decay_epochs", "step", "wsd", "rsqrt"),
    of_schedules("decay_milestones", "multistep"),
    of_schedules("decay_rate", "step", "multistep", "plateau", "poly"),
    of_schedules("sched_on_updates", *WARMING),
)


def refuse_idle(
    optimizer: OptimizerFlags,
    schedule: ScheduleFlags,
    regularization: RegularizationFlags,
    augmentation: AugmentationFlags,
    epochs: int,
) -> None:
    """Compare flags that were given with `RULES`.

    Raises:
        UsageError: one does nothing; says what it takes.
    """
    groups = (optimizer, schedule, regularization, augmentation)
    given = {name: value for group in groups for name, value in asdict(group).items() if value is not None}
    beside = Beside(optimizer, schedule, regularization, augmentation, schedule.warmup(epochs))
    for rule in RULES:
        if given.get(rule.flag, False) is not False and not rule.acts(beside):
            flag = f"--{rule.flag.replace('_', '-')}"
            raise UsageError(f"{flag} does nothing here: it takes {rule.wants}. Leave it out, or change that.")

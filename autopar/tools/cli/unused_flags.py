"""Rejects ``autopar train`` flags that have no effect in combination with the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import typer

from autopar.errors import UsageError
from autopar.tools.cli.train_flags import AugmentationFlags, OptimizerFlags, RegularizationFlags, ScheduleFlags
from autopar.tools.cli.train_tracking import TrackingFlags

Values = Mapping[str, Any]  # of all flags by name; ``warmup`` is --warmup-epochs or its default


@dataclass(frozen=True)
class Rule:
    """``flag`` has an effect only if ``acts`` is true of all flags; ``wants`` names that condition in words."""

    flag: str
    acts: Callable[[Values], Any]
    wants: str


WARMING = ("cosine", "tanh", "step", "multistep", "plateau", "poly", "wsd", "rsqrt", "constant")
FIXED = ("onecycle", "none")


def of_schedules(flag: str, *names: str) -> Rule:
    """Rule of a flag that only some schedules read in timm.scheduler.create_scheduler_v2.

    An unknown schedule passes: `autopar.train.schedule` reports it.
    """
    others = {*WARMING, *FIXED} - {*names}
    return Rule(flag, lambda f: f["sched"] not in others, f"--sched {', '.join(names)}")


RULES = (
    Rule("clip_mode", lambda f: f["clip_grad"] is not None, "--clip-grad"),
    Rule("model_ema_decay", lambda f: f["model_ema"], "--model-ema"),
    Rule("mixup_prob", lambda f: f["mixup"] or f["cutmix"], "--mixup or --cutmix"),
    Rule("mixup_switch_prob", lambda f: f["mixup"] and f["cutmix"], "--mixup and --cutmix"),
    # With an AutoAugment policy other than 3-Augment, timm's transforms ignore color_jitter.
    Rule("color_jitter", lambda f: f["color_jitter"] == 0 or "3a" in (f["aa"] or "3a"), "no --aa"),
    of_schedules("warmup_epochs", *WARMING),
    of_schedules("warmup_lr", *WARMING),
    Rule("warmup_lr", lambda f: f["warmup"], "--warmup-epochs of at least 1"),
    of_schedules("min_lr", "cosine", "tanh", "plateau", "poly", "wsd", "rsqrt"),
    of_schedules("decay_epochs", "step", "wsd", "rsqrt"),
    of_schedules("decay_milestones", "multistep"),
    of_schedules("decay_rate", "step", "multistep", "plateau", "poly"),
    of_schedules("sched_on_updates", *WARMING),
    *(
        Rule(flag, lambda f: f["log_wandb"], "--log-wandb")
        for flag in ("wandb_project", "wandb_tags", "wandb_resume_id")
    ),
    Rule("mlflow_experiment", lambda f: f["log_mlflow"], "--log-mlflow"),
    Rule("upload_checkpoints", lambda f: f["log_wandb"] or f["log_mlflow"], "--log-wandb or --log-mlflow"),
)


GROUPS = (OptimizerFlags, ScheduleFlags, RegularizationFlags, AugmentationFlags, TrackingFlags)
OF_TRAINING = {field.name for group in GROUPS for field in fields(group)} - {"amp_dtype", "grad_accum_steps"} | {
    "epochs", "checkpoint_steps", "keep", "output", "overwrite", "train_num_samples",
}  # fmt: skip


def refuse_training_flags(context: typer.Context) -> None:
    """Raise a UsageError if a flag on the command line does nothing beside ``--val-only``. Those of a file may stay."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name in OF_TRAINING and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--{name.replace('_', '-')} does nothing here: --val-only trains nothing. Leave one out.")


def refuse_idle(
    optimizer: OptimizerFlags,
    schedule: ScheduleFlags,
    regularization: RegularizationFlags,
    augmentation: AugmentationFlags,
    tracking: TrackingFlags,
    epochs: int,
) -> None:
    """Check the given flags against `RULES`.

    Raises:
        UsageError: a flag has no effect; names its condition.
    """
    values: dict[str, Any] = {"warmup": schedule.warmup(epochs)}
    for group in (optimizer, schedule, regularization, augmentation, tracking):
        values |= asdict(group)
    for rule in RULES:
        given = values[rule.flag] is not None and values[rule.flag] is not False
        if given and not rule.acts(values):
            flag = f"--{rule.flag.replace('_', '-')}"
            raise UsageError(f"{flag} does nothing here: it takes {rule.wants}. Leave it out, or change that.")

"""A training run from flags to saved and verified weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from autopar.api.model import ParallelModel
from autopar.api.model_source import ModelSource, in_channels_last
from autopar.api.parallelize import parallelize
from autopar.errors import UsageError
from autopar.ir.terminal import is_quiet
from autopar.ir.units import percent, plural
from autopar.runtime.launch.environment import broadcast_from_rank0
from autopar.tools.cli.command import ReportedInterrupt
from autopar.tools.cli.early_checks import check_mesh
from autopar.tools.cli.existing_run import farewell, remove_earlier, results_folder, resumed_checkpoint
from autopar.tools.cli.initial_weights import check_weights_flags, start_model
from autopar.tools.cli.json_output import show_json
from autopar.tools.cli.models import named_plan
from autopar.tools.cli.output import remark, save_plan, show_plan
from autopar.tools.cli.train_flags import EMA_DECAY
from autopar.tools.cli.train_inputs import model_and_data, steps_per_epoch
from autopar.tools.cli.train_loader import (
    AUTO,
    CPU,
    GPU,
    SETTING,
    faster_loader,
    possible_loader,
    resumed_loader,
)
from autopar.tools.cli.train_request import ENDLESS, Run
from autopar.tools.cli.verify_weights import ReferenceScore, VerifiedWeights, verify
from autopar.train import (
    EMA_WEIGHTS,
    EPOCHS,
    PLAN,
    TENSORBOARD,
    WEIGHTS,
    Checkpoints,
    Data,
    JsonLog,
    Mixup,
    PartLoader,
    ProgressBar,
    TensorBoard,
    Trainer,
    evaluate,
    evaluation_loader,
    exits_on_sigterm,
    exported_updates,
    is_rank_zero,
    num_images,
    read_run,
    run_on_rank_zero,
    save_weights,
    schedule,
    start_again,
    timm_average,
    timm_optimizer,
    training_loader,
)
from autopar.train.data.device_images import decode_beside_steps


def run(asked: Run) -> None:
    """Train, save the weights, and compare their accuracy in the unmodified model with the parallel model's.

    SIGTERM ends it as Ctrl-C does, with exit code 143.

    Raises:
        UsageError: flags contradict each other, the data, or the contents of the folder.
        TrainingError: a loss was not finite, or the accuracies differ.
    """
    check_weights_flags(asked)
    devices = asked.devices or visible_gpus(asked) or 1
    check_mesh(devices, asked.at_once, asked.constraints)
    if asked.data.loader != CPU:
        decode_beside_steps()
    with exits_on_sigterm():
        (validate if asked.val_only else run_to_the_end)(asked, devices)


def validate(asked: Run, devices: int) -> None:
    """Evaluate the model that training would start from, and print its metrics."""
    show_devices(asked)
    source, data, _ = model_and_data(asked)
    loader = possible_loader(asked, data)
    show_images(data)
    model, example = start_model(asked, source), example_of(asked, source, data)
    with parallelize(model, devices, example, plan=asked.plan, seed=asked.seed, **asked.constraints) as pm:
        images = partial(evaluation_loader, data, asked.at_once, pm, asked.workers, source.channels_last)
        if loader == AUTO:
            loader = faster_loader(pm, images, asked.workers)
        found = evaluate(pm, images(loader == GPU).epoch(1))
    if is_rank_zero() and asked.as_json:
        show_json({**asdict(found), "devices": devices})
    elif is_rank_zero():
        typer.echo(
            f"loss {found.loss:.4f}  top-1 {percent(found.accuracy, 2)}  top-5 {percent(found.top5, 2)}  on "
            f"{plural(found.samples, 'test image')}, with {plural(devices, 'device')}"
        )


def run_to_the_end(asked: Run, devices: int) -> None:
    """As `run`, but SIGTERM outside of the training loop kills the process."""
    checkpoint = resumed_checkpoint(asked.folder, asked.resume, asked.overwrite)
    show_devices(asked)
    source, data, outputs = model_and_data(asked)
    loader, mixup = possible_loader(asked, data), asked.mixup(outputs)
    show_images(data)
    steps = steps_per_epoch(asked, data)
    if checkpoint is not None:
        loader = resumed_loader(loader, asked, checkpoint)
        check_goes_on(asked, checkpoint, settings(asked, source, data, loader), steps)
        if asked.restarts and run_on_rank_zero(partial(is_finished, asked, checkpoint), broadcast_from_rank0):
            return
    model, example = start_model(asked, source, checkpoint is not None), example_of(asked, source, data)
    if torch.cuda.is_available():  # prices of convolutions assume the fastest algorithms, and sizes do not change
        torch.backends.cudnn.benchmark = True
    updating = how_to_update(asked, model, steps)
    settled = {"plan": asked.plan, "seed": asked.seed, **updating, **asked.constraints}
    with results_folder(asked.folder), parallelize(model, devices, example, **settled) as pm:
        if loader == AUTO:
            make = partial(training_images, asked, pm, source, data, mixup)
            loader = faster_loader(pm, make, asked.workers)
        trainer = trainer_of(asked, pm, source, data, mixup, loader)
        if checkpoint is not None:
            trainer.resume(checkpoint)
        if asked.overwrite:  # as late as possible: every check has passed
            run_on_rank_zero(partial(remove_earlier, asked.folder), pm.broadcast_from_rank0)
        elif asked.restarts and checkpoint is None:
            run_on_rank_zero(partial(start_again, asked.folder), pm.broadcast_from_rank0)
        plan = named_plan(pm.plan, source)
        if is_rank_zero():
            save_plan(plan, asked.folder / PLAN)
            if not is_quiet():
                show_plan(plan)
            at = trainer.position
            length = f"{plural(asked.epochs, 'epoch')} of {plural(at.steps, 'update')}"
            if checkpoint is not None:
                length += f"; goes on from {checkpoint} in epoch {at.epoch}, after {plural(at.step, 'update')}"
            remark(f"\n{data}; {length}\n")
        fit(trainer)
        score = partial(ReferenceScore.of, pm, data, asked.at_once, source.channels_last)
        weights, proofs = {WEIGHTS: pm.state_dict()}, {WEIGHTS: score()}
        if asked.optimizer.model_ema:
            weights[EMA_WEIGHTS] = pm.ema_state_dict()
            with pm.ema_weights():
                proofs[EMA_WEIGHTS] = score()
        device = pm.machine.device_type
    if is_rank_zero():
        for name, state in weights.items():
            metadata = {"format": "pt", "model": source.name, "updates": str(trainer.position.update)}
            save_weights(state, asked.folder / name, metadata)
        remark("")
        scores = []
        for name, proof in proofs.items():
            title = "test accuracy" if name == WEIGHTS else "of averages"
            scores.append(verify(proof, source, asked.folder / name, plan, device, title))
        if asked.as_json:
            show_json(run_numbers(asked, trainer.position.update, scores))
        files = [*weights, PLAN, EPOCHS]
        typer.echo(f"saved          {', '.join(str(asked.folder / name) for name in files)}")


def run_numbers(asked: Run, updates: int, weights: Sequence[VerifiedWeights]) -> dict[str, Any]:
    """The finished run for programs; keys as in docs/command_line.md."""
    files = {"plan": asked.folder / PLAN, "history": asked.folder / EPOCHS}
    return {"output": asked.folder, "epochs": asked.epochs, "updates": updates, "weights": weights, **files}


def example_of(asked: Run, source: ModelSource, data: Data) -> torch.Tensor:
    """Batch of images on the meta device, in the model's memory format."""
    example = torch.empty(asked.at_once, *data.form.shape, device="meta")
    return in_channels_last(example) if source.channels_last else example


def show_images(data: Data) -> None:
    """Print what the model is fed, on rank 0."""
    if is_rank_zero():
        remark(f"images      {data.form}\n")


def how_to_update(asked: Run, model: nn.Module, steps: int) -> dict[str, Any]:
    """Loss, optimizer, scheduler and averages as keyword arguments of `autopar.parallelize`."""
    flags, going = asked.optimizer, asked.schedule
    optimizer = timm_optimizer(
        model, flags.opt, flags.lr, flags.weight_decay, flags.momentum, flags.layer_decay, **flags.options()
    )
    if "clip_grad_value" in asked.constraints:  # replaces LAMB's clipping by norm
        optimizer = replace(optimizer, clip_grad_norm=None)
    arguments: dict[str, Any] = {
        "loss_fn": asked.loss_fn(),
        "optimizer": optimizer,
        "lr_scheduler": schedule(going.sched, asked.epochs, steps, **going.options(asked.epochs)),
    }
    if flags.model_ema:
        arguments["ema"] = timm_average(EMA_DECAY if flags.model_ema_decay is None else flags.model_ema_decay)
    return arguments


def training_images(
    asked: Run, pm: ParallelModel, source: ModelSource, data: Data, mixup: Mixup | None, decode_on_gpu: bool
) -> PartLoader:
    """Loader of training images, which the GPU decodes or not."""
    return training_loader(
        pm,
        data,
        asked.batch_size,
        seed=asked.seed,
        augmentation=asked.augmentation.augmentation(data.augmentation),
        grad_accum_steps=asked.optimizer.grad_accum_steps,
        mixup=mixup,
        num_workers=asked.workers,
        channels_last=source.channels_last,
        aug_repeats=asked.augmentation.aug_repeats or 1,
        decode_on_gpu=decode_on_gpu,
    )


def trainer_of(
    asked: Run, pm: ParallelModel, source: ModelSource, data: Data, mixup: Mixup | None, loader: str
) -> Trainer:
    """Trainer with the callbacks that write and show the command's results; ``loader`` is cpu or gpu."""
    folder, decode_on_gpu = asked.folder, loader == GPU
    saving = Checkpoints(folder, asked.checkpoint_steps, asked.keep)
    trackers = asked.tracking.trackers(folder, {**asked.flags, "batch_size": asked.batch_size})
    writing = (JsonLog(folder), TensorBoard(folder / TENSORBOARD), *trackers, saving)
    return Trainer(
        pm,
        training_images(asked, pm, source, data, mixup, decode_on_gpu),
        evaluation_loader(data, asked.at_once, pm, asked.workers, source.channels_last, decode_on_gpu),
        epochs=asked.epochs,
        grad_accum_steps=asked.optimizer.grad_accum_steps,
        schedule="timm",
        ema=asked.optimizer.model_ema,
        callbacks=(*writing, ProgressBar()),
        settings=settings(asked, source, data, loader),
    )


def settings(asked: Run, source: ModelSource, data: Data, loader: str) -> dict[str, Any]:
    """Settings that must not change when a run is resumed, by flag or name.

    They determine the images and targets of each step, and dropout. The options of optimizer and schedule are among
    them, because resuming restores these from the checkpoint and ignores the flags.
    """
    dropout = asked.regularization.model_kwargs()
    given: dict[str, Any] = {
        "model": source.name,
        "model arguments": {k: v for k, v in source.kwargs.items() if k not in dropout},
        "--data": data.name,
        "images": str(data.form),
        "number of training images": num_images(data.train),
        "--seed": asked.seed,
        "--batch-size": asked.batch_size,
    }
    groups = (
        asked.optimizer.carried(),
        asked.schedule.carried(),
        asdict(asked.augmentation),
        asdict(asked.regularization),
        asdict(asked.data.selection()),
    )
    for group in groups:
        given |= {f"--{name.replace('_', '-')}": value for name, value in group.items()}
    if loader != CPU:
        given[SETTING] = loader
    if asked.schedule.sched not in ENDLESS:
        given["--epochs (the length of the schedule)"] = asked.epochs
    return json.loads(json.dumps(given))  # as a checkpoint returns it: without tuples


def fit(trainer: Trainer) -> None:
    """Train; on Ctrl-C or SIGTERM print what is saved and the command that resumes."""
    try:
        trainer.fit()
    except (KeyboardInterrupt, SystemExit) as error:
        if is_rank_zero():
            typer.echo(f"\n{farewell(trainer)}", err=True)
        if isinstance(error, KeyboardInterrupt):
            raise ReportedInterrupt from error
        raise


def is_finished(asked: Run, checkpoint: Path) -> bool:
    """Whether the run has done all epochs and exported its weights; says so."""
    position = read_run(checkpoint).position
    files = [asked.folder / name for name in (WEIGHTS, *([EMA_WEIGHTS] if asked.optimizer.model_ema else []))]
    if position.epoch <= asked.epochs or any(exported_updates(file) != position.update for file in files):
        return False
    if asked.as_json:
        show_json(run_numbers(asked, position.update, [VerifiedWeights(file) for file in files]))
    typer.echo(
        f"The run in {asked.folder} is finished: it has done {plural(position.epoch - 1, 'epoch')}. Its weights are in "
        f"{' and '.join(map(str, files))}."
    )
    return True


def check_goes_on(asked: Run, checkpoint: Path, now: Mapping[str, Any], steps: int) -> None:
    """Check before planning that this run can resume from a checkpoint.

    Args:
        now: `settings` of this run.
        steps: updates of an epoch.

    Raises:
        CheckpointError: the folder is not a checkpoint, or is damaged.
        UsageError: the checkpoint has other settings, or its run is finished and ``--resume`` is not auto.
    """
    saved = read_run(checkpoint)
    saved.check(now, steps, checkpoint)
    done = saved.position.epoch - 1
    if done >= asked.epochs and not asked.restarts:
        more = (
            f"Pass --epochs {done + 1} or more to go on."
            if asked.schedule.sched in ENDLESS
            else f"The schedule {asked.schedule.sched} ends there: only a new run can have more --epochs."
        )
        raise UsageError(
            f"The run of {checkpoint} is finished: it has done {plural(done, 'epoch')}, --epochs is {asked.epochs}. "
            f"{more} `autopar export {checkpoint} -o model.safetensors` writes its weights."
        )


def visible_gpus(asked: Run) -> int:
    """Number of GPUs that the run may use."""
    return 0 if asked.constraints.get("backend") == "gloo" else torch.cuda.device_count()


def show_devices(asked: Run) -> None:
    """Print the number of devices, if the machine decides it."""
    if asked.devices is None:
        gpus = visible_gpus(asked)
        where = f"all {gpus} GPUs" if gpus > 1 else "the GPU" if gpus else "one CPU process"
        remark(f"Training on {where} of this machine; --devices N chooses another number.\n")

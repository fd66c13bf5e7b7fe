"""A user's script with every public name, which pyright checks in strict mode; nothing runs it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

import autopar
from autopar import (
    AssumedFiniteWarning,
    AutocastWarning,
    AutoparError,
    CheckpointError,
    DeviceMemoryError,
    EvaluationWarning,
    HardwareError,
    InfeasibleError,
    MicrobatchWarning,
    MixedSamplesWarning,
    ModelSource,
    NonFiniteLossWarning,
    ParallelModel,
    Parameters,
    Plan,
    PlanDependentRandomWarning,
    PlanError,
    PreparedModule,
    PreparedOptimizer,
    ResumeWarning,
    StepResult,
    TraceError,
    TrainingError,
    UnknownOpWarning,
    UnreadableDataError,
    UpdatedStateWarning,
    UpdateResult,
    UsageError,
    VariantWarning,
    WorkerError,
)
from autopar.train import (
    BEST,
    DATASETS,
    EMA_WEIGHTS,
    EPOCHS,
    LAST,
    OF_OWN_SIZE,
    PLAN,
    TENSORBOARD,
    WEIGHTS,
    Augmentation,
    Batch,
    Callback,
    Checkpoints,
    Data,
    EpochReport,
    Evaluation,
    JsonLog,
    Mixup,
    Mlflow,
    ModelConfig,
    PartLoader,
    PartSampler,
    ProgressBar,
    SavedRun,
    Schedule,
    Selection,
    StepReport,
    TensorBoard,
    TimmOptimizer,
    Tracker,
    Trainer,
    TrainerView,
    Wandb,
    Wanted,
    check_free,
    evaluate,
    evaluate_alone,
    evaluation_loader,
    exits_on_sigterm,
    exported_updates,
    first,
    is_rank_zero,
    last_of,
    latest,
    lies_in,
    load_data,
    load_weights,
    make_folder,
    micro_batch,
    model_config,
    num_images,
    read_run,
    remove_run,
    run_in,
    run_on_rank_zero,
    save_weights,
    schedule,
    start_again,
    timm_average,
    timm_optimizer,
    training_loader,
)

FOLDER = Path("runs/mine")
IGNORED: tuple[type[Warning], ...] = (
    AssumedFiniteWarning, AutocastWarning, EvaluationWarning, MicrobatchWarning, MixedSamplesWarning,
    NonFiniteLossWarning, PlanDependentRandomWarning, ResumeWarning, UnknownOpWarning, UpdatedStateWarning,
    VariantWarning,
)  # fmt: skip
ERRORS: tuple[type[AutoparError], ...] = (
    CheckpointError, DeviceMemoryError, HardwareError, InfeasibleError, PlanError, TraceError, TrainingError,
    UnreadableDataError, UsageError, WorkerError,
)  # fmt: skip


class PrintLoss(Callback):
    """A user's callback."""

    def on_step(self, trainer: TrainerView, report: StepReport) -> None:
        print(trainer.position.epoch, report.loss, report.lr, report.samples_per_second)

    def on_epoch(self, trainer: TrainerView, report: EpochReport) -> None:
        accuracy: float | None = report.accuracy
        print(accuracy, trainer.best)


def adam(parameters: Parameters) -> torch.optim.Optimizer:
    """A user's optimizer callable, with groups by name."""
    names: list[str] = [name for name, _ in parameters.named_parameters()]
    return torch.optim.AdamW(parameters, lr=1e-3 * len(names))


def loop(model: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A loop of the user's own."""
    for category in IGNORED:
        warnings.simplefilter("ignore", category)
    try:
        pm: ParallelModel = autopar.parallelize(model, 2, batch_size=32, optimizer=adam, clip_grad_norm=1.0)
    except ERRORS as error:
        raise SystemExit(error.exit_code) from error
    for x, y in batches:
        result: StepResult = pm.train_step(x, y)
        loss: float = result.loss
        print(loss, result.grad_norm, result.skipped)
        pm.forward_backward(x, y)
        update: UpdateResult = pm.optimizer_step()
        print(update.grad_norm, pm.data_rank, pm.data_size, pm.eval()(x))
        pm.train()
    pm.lr_scheduler.step(1)
    pm.save_checkpoint(FOLDER / LAST, extra={"epoch": 3}, keep=2)
    state = pm.state_dict()
    plan: Plan = pm.plan
    plan.save(FOLDER / PLAN)
    seconds: float = plan.prediction.step_seconds
    print(seconds, [stage.first for stage in plan.stages])
    pm.close()
    return state


def prepared(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """The loop that the user had before."""
    parallel: PreparedModule
    stepper: PreparedOptimizer
    parallel, stepper = autopar.prepare(model, optimizer, devices=2)
    loss = torch.as_tensor(parallel(x)).mean()
    torch.autograd.backward(loss)
    stepper.step()
    stepper.zero_grad()


def planned() -> Plan:
    """A plan without a model's weights."""
    source = ModelSource("vit_tiny_patch16_224", {"depth": 2})
    config: ModelConfig = model_config(source)
    print(config.side, config.mean)
    return autopar.plan(source, 4, batch_size=64, hardware="h200-nvlink", tp=2)


def run(model: nn.Module) -> Evaluation:
    """A training run made of the parts of `autopar.train`."""
    data: Data = load_data("digits", Wanted(side=32, num_train=64))
    print(sorted(DATASETS), OF_OWN_SIZE, num_images(data.train), Selection(num_classes=3))
    optimizer: TimmOptimizer = timm_optimizer(model, "adamw", 1e-3, weight_decay=0.05)
    plan: Schedule = schedule("cosine", 30, warmup_epochs=3)
    pm = autopar.parallelize(
        model, 2, batch_size=64, optimizer=optimizer, lr_scheduler=plan, ema=timm_average(decay=0.999)
    )
    mixup = Mixup(data.num_classes, mixup=0.2)
    loader: PartLoader = training_loader(pm, data, micro_batch(64, 1), augmentation=Augmentation(), mixup=mixup)
    evaluation = evaluation_loader(data, 64, pm)
    callbacks = [JsonLog(FOLDER), TensorBoard(FOLDER / TENSORBOARD), Checkpoints(FOLDER), ProgressBar(), PrintLoss()]
    trackers = [Tracker(Wandb(project="mine")), Tracker(Mlflow(experiment="mine"))]
    trainer = Trainer(pm, loader, evaluation, epochs=10, callbacks=[*callbacks, *trackers])
    check_free(FOLDER, go_on="resume {}", instead="take another folder.")
    checkpoint: Path | None = latest(FOLDER, "take another folder.")
    if checkpoint is not None and lies_in(last_of(checkpoint), FOLDER):
        saved: SavedRun = read_run(checkpoint)
        print(saved.position.update, run_in(FOLDER), exported_updates(FOLDER / WEIGHTS))
    with exits_on_sigterm():
        trainer.resume_or_start(FOLDER)
        trainer.fit()
    scored: Evaluation = evaluate(pm, evaluation.epoch(1))
    if is_rank_zero():
        make_folder(FOLDER)
        save_weights(pm.state_dict(), FOLDER / WEIGHTS)
        save_weights(pm.ema_state_dict(), FOLDER / EMA_WEIGHTS)
        print((FOLDER / EPOCHS).read_text(), (FOLDER / BEST).is_dir())
    return scored


def scored_alone(model: nn.Module, data: Data, pm: ParallelModel) -> float:
    """Accuracy of exported weights in the unmodified model."""
    whole = load_weights(model, FOLDER / WEIGHTS)
    some = first(data.test, 8)
    sampler = PartSampler(num_images(some), 8, training=False)
    batches: list[Batch] = [*evaluation_loader(data, 8).epoch(1)]
    print(len(sampler), [batch.count for batch in batches])
    run_on_rank_zero(functools.partial(start_again, FOLDER), pm.broadcast_from_rank0)
    remove_run(FOLDER)
    return evaluate_alone(whole, batches).accuracy

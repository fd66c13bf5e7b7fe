"""Training of a parallel model on images: data, loop, callbacks, and weights on disk for the unmodified model.

Question: how is a `ParallelModel` trained so that nothing depends on the plan? In: a parallel model, a data set by
name, flags in timm's names. Out: a run folder with logs, checkpoints and weights.

Read in this order: ``loop`` (`Trainer`), ``callbacks``, ``evaluation``, ``run/`` (what is on disk), ``trackers/``
(TensorBoard, Weights & Biases, MLflow), ``data/`` (the same images on every mesh), ``optim`` and ``schedules`` (timm's,
by name), ``rank_zero``, ``progress``.

Example: ``print(load_data("digits", Wanted(side=8, channels=1)))`` prints::

    digits: 1,438 training and 359 test images of 1×8×8, 10 classes
"""

from autopar.train.callbacks import Callback, Checkpoints, JsonLog
from autopar.train.data.datasets import DATASETS, OF_OWN_SIZE, Data, load_data
from autopar.train.data.loader import Batch, PartLoader, evaluation_loader, micro_batch, training_loader
from autopar.train.data.mixup import Mixup
from autopar.train.data.model_config import ModelConfig, model_config
from autopar.train.data.sampler import PartSampler
from autopar.train.data.streams import first, num_images
from autopar.train.data.transforms import Augmentation
from autopar.train.data.wanted import Selection, Wanted
from autopar.train.evaluation import Evaluation, evaluate, evaluate_alone
from autopar.train.loop import Trainer
from autopar.train.optim import TimmOptimizer, timm_average, timm_optimizer
from autopar.train.progress import ProgressBar
from autopar.train.rank_zero import is_rank_zero, run_on_rank_zero
from autopar.train.run.folder import (
    BEST,
    EMA_WEIGHTS,
    EPOCHS,
    LAST,
    PLAN,
    TENSORBOARD,
    WEIGHTS,
    check_free,
    last_of,
    lies_in,
    make_folder,
    remove_run,
    run_in,
    start_again,
)
from autopar.train.run.interrupt import exits_on_sigterm
from autopar.train.run.reports import EpochReport, StepReport, TrainerView
from autopar.train.run.state import SavedRun, latest, read_run
from autopar.train.run.weights import exported_updates, load_weights, save_weights
from autopar.train.schedules import Schedule, schedule
from autopar.train.trackers.mlflow_run import Mlflow
from autopar.train.trackers.tensorboard import TensorBoard
from autopar.train.trackers.tracker import Tracker
from autopar.train.trackers.wandb_run import Wandb

__all__ = [
    "BEST",
    "DATASETS",
    "EMA_WEIGHTS",
    "EPOCHS",
    "LAST",
    "OF_OWN_SIZE",
    "PLAN",
    "TENSORBOARD",
    "WEIGHTS",
    "Augmentation",
    "Batch",
    "Callback",
    "Checkpoints",
    "Data",
    "EpochReport",
    "Evaluation",
    "JsonLog",
    "Mixup",
    "Mlflow",
    "ModelConfig",
    "PartLoader",
    "PartSampler",
    "ProgressBar",
    "SavedRun",
    "Schedule",
    "Selection",
    "StepReport",
    "TensorBoard",
    "TimmOptimizer",
    "Tracker",
    "Trainer",
    "TrainerView",
    "Wandb",
    "Wanted",
    "check_free",
    "evaluate",
    "evaluate_alone",
    "evaluation_loader",
    "exits_on_sigterm",
    "exported_updates",
    "first",
    "is_rank_zero",
    "last_of",
    "latest",
    "lies_in",
    "load_data",
    "load_weights",
    "make_folder",
    "micro_batch",
    "model_config",
    "num_images",
    "read_run",
    "remove_run",
    "run_in",
    "run_on_rank_zero",
    "save_weights",
    "schedule",
    "start_again",
    "timm_average",
    "timm_optimizer",
    "training_loader",
]  # fmt: skip

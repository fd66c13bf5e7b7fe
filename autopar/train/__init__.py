"""Training a model on images under a plan: data, loop, callbacks, and weights on disk for the unmodified model."""

from autopar.train.callbacks import (
    BEST,
    LAST,
    Callback,
    Checkpoints,
    JsonLog,
    TensorBoard,
    last_of,
    leads,
    make_folder,
)
from autopar.train.data import DATASETS, Data, Wanted, load_data
from autopar.train.evaluation import Evaluation, evaluate, evaluate_alone
from autopar.train.images import first
from autopar.train.loader import Batch, PartLoader, evaluation_loader, micro_batch, training_loader
from autopar.train.mixup import Mixup
from autopar.train.optimizers import TimmOptimizer, timm_optimizer
from autopar.train.progress import ProgressBar
from autopar.train.reports import EpochReport, StepReport
from autopar.train.sampler import PartSampler
from autopar.train.saved import load_weights, save_weights
from autopar.train.saved_run import SavedRun, read_run
from autopar.train.schedules import Schedule, schedule
from autopar.train.trainer import Trainer
from autopar.train.transforms import Augmentation

__all__ = [
    "BEST", "DATASETS", "LAST", "Augmentation", "Batch", "Callback", "Checkpoints", "Data", "EpochReport",
    "Evaluation", "JsonLog", "Mixup", "PartLoader", "PartSampler", "ProgressBar", "SavedRun", "Schedule", "StepReport",
    "TensorBoard", "TimmOptimizer", "Trainer", "Wanted", "evaluate", "evaluate_alone", "evaluation_loader", "first",
    "last_of", "leads", "load_data", "load_weights", "make_folder", "micro_batch", "read_run", "save_weights",
    "schedule", "timm_optimizer", "training_loader",
]  # fmt: skip

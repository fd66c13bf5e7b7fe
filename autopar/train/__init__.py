"""Training a model on images under a plan: data, loop, and the proof that the weights fit the unmodified model."""

from autopar.train.data import DATASETS, Data, load_data
from autopar.train.loop import Epoch, Progress, Recipe, accuracy, fit
from autopar.train.optimizers import TimmOptimizer, timm_optimizer
from autopar.train.saved import load_weights, save_weights
from autopar.train.schedules import Schedule, schedule

__all__ = [
    "DATASETS", "Data", "Epoch", "Progress", "Recipe", "Schedule", "TimmOptimizer", "accuracy", "fit", "load_data",
    "load_weights", "save_weights", "schedule", "timm_optimizer",
]  # fmt: skip

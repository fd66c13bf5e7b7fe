"""Parts of a Trainer's program that ranks bear on: its precision plugin, its callbacks, its optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from autopar.errors import UsageError
from autopar.integrations.lightning.library import trainer_module
from autopar.integrations.lightning.precision import PluginWithoutMixing

PLUGINS, CALLBACKS = trainer_module("plugins"), trainer_module("callbacks")
AVERAGES = ("WeightAveraging", "StochasticWeightAveraging")  # callbacks that read weights of this process


class RanksPrecision(PluginWithoutMixing, PLUGINS.Precision):
    """The Trainer's precision plugin, which also clips gradients."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip by the norm of the gradients of all ranks; a step without a loss has none."""
        if optimizer.pm.has_gradients:
            optimizer.pm.clip_gradients(max_norm=clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip the elements of the gradients; a step without a loss has none."""
        if optimizer.pm.has_gradients:
            optimizer.pm.clip_gradients(max_value=clip_val)


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Raise a UsageError for callbacks that average the weights of this process: the trained ones are on the ranks."""
    averages = tuple(getattr(CALLBACKS, name) for name in AVERAGES if name in dir(CALLBACKS))
    for callback in callbacks:
        if isinstance(callback, averages):
            raise UsageError(
                f"{type(callback).__name__} averages weights of this process, and the trained ones are on the ranks. "
                "Pass ema=functools.partial(timm.utils.ModelEmaV3, decay=0.999) to AutoparTrainerStrategy; "
                "trainer.strategy.prepared.pm.ema_state_dict() returns the averages."
            )


def the_optimizer(optimizers: Iterable[Any], owner: str) -> Optimizer:
    """The optimizer that ``configure_optimizers`` of ``owner`` returned.

    Raises:
        UsageError: it returned none or several.
    """
    own = [optimizer for optimizer in optimizers if type(optimizer).__name__ != "_MockOptimizer"]
    if len(own) != 1:
        raise UsageError(
            f"configure_optimizers of {owner} returned {len(own) or 'no'} optimizers. Ranks have one: build it with a "
            "parameter group for each."
        )
    return own[0]

"""Learning-rate scheduler of a rank: any object with ``step``, such as torch's or timm's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from autopar.errors import AutoparError, UsageError


def scheduler_of(make: Callable[[Optimizer], Any], optimizer: Optimizer | None) -> Any:
    """Scheduler that the user's callable returns; None keeps the learning rate constant.

    Raises:
        UsageError: the callable fails.
    """
    assert optimizer is not None
    try:
        return make(optimizer)
    except AutoparError:
        raise
    except Exception as error:
        raise UsageError(
            f"lr_scheduler= fails for {type(optimizer).__name__} with {len(optimizer.param_groups)} parameter groups: "
            f"{type(error).__name__}: {error}"
        ) from error


def step_scheduler(scheduler: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Call ``step`` or ``step_update`` of a scheduler.

    Raises:
        UsageError: the scheduler has no such method, or the method fails.
    """
    name = type(scheduler).__name__
    call = getattr(scheduler, method, None)
    if call is None:
        raise UsageError(
            f"{name} has no {method}(), which timm's schedulers have. Call pm.lr_scheduler.step() as {name} is stepped."
        )
    try:
        call(*args, **kwargs)
    except AutoparError:
        raise
    except Exception as error:
        arguments = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
        raise UsageError(f"{name}.{method}({arguments}) fails: {type(error).__name__}: {error}") from error

"""Learning-rate scheduler of a rank: any object with ``step``, such as torch's or timm's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from autopar.errors import AutoparError, UsageError
from autopar.ir.units import of_type
from autopar.runtime.optim.probe import nested

METHODS = ("step", "state_dict", "load_state_dict")  # of a scheduler that are called


def scheduler_of(make: Callable[[Optimizer], Any], optimizer: Optimizer | None) -> Any:
    """Scheduler that the user's callable returns; None keeps the learning rate constant.

    Raises:
        UsageError: the callable fails, or returns what is no scheduler of this optimizer.
    """
    assert optimizer is not None
    try:
        scheduler = make(optimizer)
    except AutoparError:
        raise
    except Exception as error:
        raise UsageError(
            f"lr_scheduler= fails for {type(optimizer).__name__} with {len(optimizer.param_groups)} parameter groups: "
            f"{type(error).__name__}: {error}"
        ) from error
    missing = [name for name in METHODS if not callable(getattr(scheduler, name, None))]
    if scheduler is not None and missing:
        raise UsageError(
            f"lr_scheduler= returns {of_type(scheduler)}, which has no {', '.join(missing)}: "
            "pm.lr_scheduler.step and checkpoints call them. Add them, or return one of torch.optim.lr_scheduler."
        )
    other = getattr(scheduler, "optimizer", None)
    if isinstance(other, Optimizer) and all(other is not own for own in nested(optimizer)):
        raise UsageError(
            f"lr_scheduler= returns {of_type(scheduler)} of another optimizer, {of_type(other)}. Use the callable's "
            f"argument: lambda optimizer: {type(scheduler).__name__}(optimizer, …)."
        )
    return scheduler


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

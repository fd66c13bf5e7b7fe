"""`pm.lr_scheduler`: the learning-rate schedulers of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from autopar.api.dispatch import Dispatcher
from autopar.api.module_attributes import OF_SCHEDULER, missing_attribute
from autopar.errors import UsageError


class SchedulerHandle:
    """Steps the learning-rate schedulers of all ranks."""

    def __init__(self, dispatcher: Dispatcher, has_schedulers: bool) -> None:
        self._dispatcher, self._has_schedulers = dispatcher, has_schedulers

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Call ``step`` of every rank's scheduler.

        Raises:
            UsageError: parallelize was given no lr_scheduler, or the scheduler refuses the arguments.
        """
        self._step("step", args, kwargs)

    def step_update(self, *args: Any, **kwargs: Any) -> None:
        """Call ``step_update`` of every rank's scheduler, which timm's have.

        Raises:
            UsageError: as `step`, or the scheduler has no such method.
        """
        self._step("step_update", args, kwargs)

    def _step(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._has_schedulers:
            raise UsageError("There is no learning-rate scheduler to step. Pass lr_scheduler=, a callable(optimizer).")
        self._dispatcher.note(f"lr_scheduler.{method}", args, kwargs)
        self._dispatcher.call_all("scheduler_step", method, args, kwargs)

    def get_last_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return max(self._dispatcher.call_all("learning_rates").values(), key=len)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise missing_attribute(self, name, OF_SCHEDULER)

"""Loss scaling for float16, in which many small gradients underflow to zero."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch

MIN_SCALE = 2.0**-24  # float16's smallest positive number; with a smaller scale all gradients would be zero


class LossScaler:
    """Factor on the loss. It is halved when a gradient overflows and doubled after many updates without an overflow.

    Every rank has a scaler and passes the same global norms to it, so that all ranks agree without communication.
    Defaults and state equal those of torch.amp.GradScaler. Unlike GradScaler's, the scale has a minimum, so that
    training recovers from any number of overflows.
    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
    """

    def __init__(
        self,
        scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scale = scale
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.finite_updates = 0  # number of updates without an overflow since the scale changed

    def unscale(self, gradients: list[torch.Tensor]) -> None:
        """Divide gradients of any shapes by the scale [], in place."""
        if gradients:
            torch._foreach_mul_(gradients, 1 / self.scale)

    def update(self, norm: float) -> bool:
        """Whether to update the weights, given the gradients' global norm. Also sets the scale of the next step."""
        if not isfinite(norm):
            self.scale = max(self.scale * self.backoff_factor, MIN_SCALE)
            self.finite_updates = 0
            return False
        self.finite_updates += 1
        if self.finite_updates == self.growth_interval:
            self.scale *= self.growth_factor
            self.finite_updates = 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """State in the form of `torch.amp.GradScaler.state_dict`."""
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.finite_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another `LossScaler` or a GradScaler."""
        self.scale = float(state["scale"])
        self.growth_factor, self.backoff_factor = float(state["growth_factor"]), float(state["backoff_factor"])
        self.growth_interval, self.finite_updates = int(state["growth_interval"]), int(state["_growth_tracker"])

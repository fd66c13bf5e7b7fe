"""Checks that need no torch, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_request(model: str, devices: int, batch: int, constraints: Mapping[str, Any]) -> None:
    """Refuse what no model and no machine can make right: an unknown name of a model or a cost model, and constraints
    that are impossible for so many devices and samples.

    Raises:
        UsageError: names the flag or the model.
    """
    from autopar.api.model_names import check_known
    from autopar.api.options import Options
    from autopar.cost.hardware.load import load_hardware
    from autopar.solve.space.meshes import check_sizes

    options = Options.of(constraints)
    check_sizes(options.constraints(devices, batch))
    if options.hardware is not None:
        load_hardware(options.hardware)
    check_known(model)

"""Checks that the devices can compute in a precision."""

from __future__ import annotations

import torch

from autopar.errors import UsageError
from autopar.ir.plan_parts import Precision
from autopar.runtime.launch.devices import Machine
from autopar.trace.passes.precision import LOW_DTYPE


def check_device(precision: Precision | None, machine: Machine) -> None:
    """Refuse a precision that the devices only emulate; None is the model's own precision and passes.

    Raises:
        UsageError: bf16 on GPUs before compute capability 8.0.
    """
    if precision is None or LOW_DTYPE.get(precision) != "bfloat16" or machine.device_type != "cuda":
        return
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return
    major, minor = torch.cuda.get_device_capability()
    raise UsageError(
        f'precision="{precision}" needs GPUs of compute capability 8.0 (Ampere) or later; '
        f'{torch.cuda.get_device_name()} has {major}.{minor}. Use precision="fp16", which scales the loss, or "fp32".'
    )

"""Checks of a precision: that the devices can compute in it, and that it is the one which the caller expects."""

from __future__ import annotations

import warnings

import torch

from autopar.errors import AutocastWarning, UsageError, caller_level
from autopar.ir.graph import dtype_name
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


def warn_of_autocast(precision: Precision, device_type: str) -> bool:
    """Warn if the caller is in an autocast region that asks for another precision; returns whether it warned.

    Ranks do not see the region: other processes could not, and mixed precision is planned for.
    """
    if not torch.is_autocast_enabled(device_type):
        return False
    dtype = dtype_name(torch.get_autocast_dtype(device_type))
    if LOW_DTYPE.get(precision) == dtype:
        return False
    wanted = next((known for known, low in LOW_DTYPE.items() if low == dtype), "bf16")
    warnings.warn(
        f"torch.autocast has no effect on this model, which computes in {precision}. For mixed precision pass "
        f'precision="{wanted}" to autopar.parallelize or autopar.prepare, and leave torch.autocast out.',
        AutocastWarning,
        stacklevel=caller_level(),
    )
    return True

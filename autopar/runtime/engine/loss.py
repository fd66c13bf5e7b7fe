"""The user's loss function on a rank's device and under torch.autocast."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.errors import UpdatedStateWarning, UsageError
from autopar.runtime.engine.closure_guard import closure_tensors

LossFunction = Callable[[Any, Any], torch.Tensor]


def check_loss(loss: Any) -> None:
    """Raise a UsageError unless ``loss_fn`` returned a tensor with one element that depends on something trainable."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(
            f"loss_fn must return a tensor with one element, the mean loss over its samples; it returned "
            f'{got}. Use reduction="mean", or call .mean() on it.'
        )
    if not loss.requires_grad:
        raise UsageError(
            "The loss has no gradient: loss_fn detached it, or nothing that it reads can be trained. "
            "Return a loss that depends on the model's outputs, without .item() or .detach()."
        )


def moved_to(thing: Any, device: torch.device) -> Any:
    """A loss function whose modules and partials have their tensors on a device; the user's objects do not change.

    What is on the device already is returned itself, so that numbers which the user changes are still seen.
    """
    if isinstance(thing, torch.Tensor):
        return thing.to(device)
    if isinstance(thing, nn.Module):
        elsewhere = any(tensor.device != device for tensor in [*thing.parameters(), *thing.buffers()])
        return copy.deepcopy(thing).to(device) if elsewhere else thing
    if type(thing) is functools.partial:
        before = [thing.func, *thing.args, *thing.keywords.values()]
        function, *values = (moved_to(value, device) for value in before)
        if any(new is not old for new, old in zip([function, *values], before, strict=True)):
            named = dict(zip(thing.keywords, values[len(thing.args) :], strict=True))
            return functools.partial(function, *values[: len(thing.args)], **named)
    return thing


def naming_devices(loss_fn: LossFunction, device: torch.device) -> LossFunction:
    """``loss_fn`` whose errors on a device name the tensors that it reads on other ones, if there are any."""
    elsewhere = {place: t.device for place, t in closure_tensors(loss_fn).items() if t.device != device}
    if not elsewhere:
        return loss_fn

    def loss_naming_devices(output: Any, target: Any) -> torch.Tensor:
        try:
            return loss_fn(output, target)
        except RuntimeError as error:
            if not re.search("(same|expected) device", str(error)):
                raise
            listed = ", ".join(f"`{place}` on {other}" for place, other in elsewhere.items())
            raise UsageError(
                f"loss_fn fails on {device}: {error}. It reads {listed}. Pass a module with buffers or a "
                "functools.partial, whose tensors are moved to each rank's device, or move them to output.device."
            ) from error

    return loss_naming_devices


def version(tensor: torch.Tensor) -> int:
    """Number of in-place updates of a tensor; those of inference tensors are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def naming_updates(loss_fn: LossFunction) -> LossFunction:
    """``loss_fn`` whose first call warns of tensors that it updates."""
    is_first = True

    def loss_naming_updates(output: Any, target: Any) -> torch.Tensor:
        nonlocal is_first
        if not is_first:
            return loss_fn(output, target)
        is_first = False
        tensors = closure_tensors(loss_fn)
        before = {place: version(tensor) for place, tensor in tensors.items()}
        loss, after = loss_fn(output, target), closure_tensors(loss_fn)
        updated = [place for place, t in tensors.items() if after.get(place) is not t or before[place] != version(t)]
        if updated:
            warnings.warn(
                f"loss_fn updates {', '.join(updated)}: for each microbatch, on each replica by its samples. The "
                "updates are in a rank's copy, which checkpoints do not hold. Let the model hold the tensor as a "
                "buffer, and its forward update it.",
                UpdatedStateWarning,
                stacklevel=1,
            )
        return loss

    return loss_naming_updates


def in_autocast(loss_fn: LossFunction, device: torch.device, dtype: torch.dtype) -> LossFunction:
    """``loss_fn`` in an autocast region. The loss is at least float32, so that multiplying it by a scale is finite."""

    def loss_in_autocast(output: Any, target: Any) -> torch.Tensor:
        with torch.autocast(device.type, dtype):
            loss = loss_fn(output, target)
        low = isinstance(loss, torch.Tensor) and loss.dtype in (torch.float16, torch.bfloat16)
        return loss.float() if low else loss

    return loss_in_autocast

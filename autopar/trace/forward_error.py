"""Errors that a model raises by itself, without torch.export, such as those of inputs of a wrong shape."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode  # torch 2.11 to 2.15 have no public name for it

from autopar.ir.pytree import leaves, tree_map
from autopar.trace.caches import kept_caches
from autopar.trace.copy_model import copy_model
from autopar.trace.fake import FakeTensor, FakeTensorMode
from autopar.trace.frames import user_frame
from autopar.trace.python_state import kept_generators

# What errors say that the lack of data in fake tensors causes, and not the inputs.
NO_DATA = re.compile(r"FakeTensor|\.numpy\(\)|fake impl|\b[Mm]eta\b|pickle")


def fails_itself(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> bool:
    """Whether a model raises the error of its export without an export too, and not for a tensor's values.

    Args:
        error: the error of torch.export for ``model(*args, **kwargs)``.
    """
    if type(error).__module__.partition(".")[0] == "torch" or NO_DATA.search(str(error)):
        return False  # torch's own classes of errors are of guards, values, and operators without a meta kernel
    raised = forward_error(model, args, kwargs)
    return type(raised) is type(error) and user_frame(raised) == user_frame(error)


def forward_error(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """The error of ``model(*args, **kwargs)`` on fake tensors; None if it runs.

    The forward runs in a copy of the model, with weights that have no data, and leaves random generators as they were.
    An error of the copying is returned too.
    """
    tensors = [t for t in (*leaves((args, kwargs)), *model.parameters()) if isinstance(t, FakeTensor)]
    mode = tensors[0].fake_mode if tensors else FakeTensorMode(allow_non_fake_inputs=True)

    def fake(leaf: Any) -> Any:
        return mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf

    try:
        with FakeCopyMode(mode):
            copied = copy_model(model)
        args, kwargs = tree_map(fake, (args, kwargs))
        printed = io.StringIO()  # again what the export has printed
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            kept_caches(copied),
            kept_generators(),
            torch.enable_grad(),
            mode,
        ):
            copied(*args, **kwargs)
    except Exception as error:
        return error
    return None

"""torch.export of a model in one mode, with errors that point into the user's code."""

from __future__ import annotations

import os
import traceback
from typing import Any

import torch
from torch import nn

from autopar.errors import TraceError
from autopar.ir import Mode
from autopar.pytree import tree_map

TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
OWN_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> torch.export.ExportedProgram:
    """The exported program of ``model(*args, **kwargs)`` in ``mode``; the model is left as it was found.

    Raises:
        TraceError: torch.export refused; holds the file and line in the user's model.
    """
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))

    def on_device(leaf: Any) -> Any:
        return torch.empty_like(leaf, device=device) if isinstance(leaf, torch.Tensor) else leaf

    training = {module: module.training for module in model.modules()}
    try:
        model.train(mode == "train")
        with torch.enable_grad():
            return torch.export.export(model, tree_map(on_device, args), tree_map(on_device, kwargs), strict=False)
    except Exception as error:
        raise TraceError(refusal(model, error, mode)) from error
    finally:
        for module, flag in training.items():
            module.training = flag


def refusal(model: nn.Module, error: Exception, mode: Mode) -> str:
    """The message for a model that torch.export refused."""
    frame = user_frame(error)
    where = f" at {frame.filename}:{frame.lineno}, in {frame.name}: `{frame.line}`" if frame else ""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"Cannot trace {type(model).__name__} in {mode} mode{where}. torch.export says: "
        f"{type(error).__name__}: {reason} "
        "A traced model may not branch on tensor values or leave PyTorch for other libraries; "
        "use torch.where or torch.cond there, or hand autopar the part of the model that can be traced."
    )


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of an error (or of its causes) that is neither torch's nor ours."""
    seen: BaseException | None = error
    while seen is not None:
        frames = [f for f in traceback.extract_tb(seen.__traceback__) if not is_internal(f.filename)]
        if frames:
            return frames[-1]
        seen = seen.__cause__ or seen.__context__
    return None


def is_internal(filename: str) -> bool:
    """Whether a file belongs to torch, to autopar or to the interpreter, and so not to the user's model."""
    return filename.startswith((TORCH_DIR, OWN_DIR, "<")) or filename in (contextlib_file(), traceback.__file__)


def contextlib_file() -> str:
    import contextlib

    return contextlib.__file__

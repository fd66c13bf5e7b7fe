"""torch.export of a model in one mode, with errors that point into the user's code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from autopar.errors import TraceError
from autopar.ir import Mode
from autopar.pytree import leaves, tree_map

TORCH_DIR = str(Path(torch.__file__).parent) + os.sep
OWN_DIR = str(Path(__file__).absolute().parent.parent) + os.sep
ADVICE = (
    "A traced model may not branch on tensor values or leave PyTorch for other libraries; "
    "use torch.where or torch.cond there, or hand autopar the part of the model that can be traced."
)


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> torch.export.ExportedProgram:
    """The exported program of ``model(*args, **kwargs)`` in ``mode``; the model is left as it was found.

    Raises:
        TraceError: torch.export refused; holds the file and line in the user's model.
    """
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))

    def on_device(leaf: Any) -> Any:
        return torch.empty_like(leaf, device=device) if isinstance(leaf, torch.Tensor) else leaf

    training = {module: module.training for module in model.modules()}
    own_backward: set[str] = set()
    hook = model.register_forward_hook(lambda _, __, output: own_backward.update(custom_functions(output)))
    said = io.StringIO()  # torch prints the graph so far when it refuses a model
    try:
        if model.training != (mode == "train"):  # a model in training mode may keep parts of it in eval mode: frozen
            model.train(mode == "train")
        with torch.enable_grad(), contextlib.redirect_stderr(said):
            program = torch.export.export(model, tree_map(on_device, args), tree_map(on_device, kwargs), strict=False)
    except Exception as error:
        raise TraceError(refusal(model, error, mode)) from error
    finally:
        hook.remove()
        for module, flag in training.items():
            module.training = flag
    sys.stderr.write(said.getvalue())
    if own_backward and mode == "train":
        raise TraceError(
            f"Cannot trace {type(model).__name__}: its autograd.Function {', '.join(sorted(own_backward))} has a "
            "backward of its own, which torch.export would replace by that of the operations inside. Write it with "
            "PyTorch operations (a straight-through estimate is x + (f(x) - x).detach()); checkpoint() needs "
            "use_reentrant=False."
        )
    return program


def custom_functions(output: Any) -> set[str]:
    """Names of the user's autograd.Functions that a result's gradient goes through."""
    pending = [leaf.grad_fn for leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
    seen, found = set(pending), set()
    while pending:
        node = pending.pop()
        # torch's control flow is an AutogradOp; the conversion refuses it with its place in the model.
        if isinstance(node, BackwardCFunction) and not node.name().endswith("AutogradOpBackward"):
            found.add(node.name().removesuffix("Backward"))
        following = {child for child, _ in node.next_functions} - seen if node is not None else ()
        seen.update(following)
        pending.extend(following)
    return found


def refusal(model: nn.Module, error: Exception, mode: Mode) -> str:
    """The message for a model that torch.export refused."""
    frame = user_frame(error)
    where = f" at {frame.filename}:{frame.lineno}, in {frame.name}: `{frame.line}`" if frame else ""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"Cannot trace {type(model).__name__} in {mode} mode{where}. torch.export says: "
        f"{type(error).__name__}: {reason} {ADVICE}"
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
    return filename.startswith((TORCH_DIR, OWN_DIR, "<")) or filename in (contextlib.__file__, traceback.__file__)

"""torch.export of a model in one mode, with errors that point into the user's code."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._decomp import decompositions
from torch.autograd.function import BackwardCFunction
from torch.fx import graph_module

from autopar.errors import TraceError
from autopar.ir.graph import Mode
from autopar.ir.pytree import leaves, tree_map
from autopar.trace.caches import kept_caches, lacks_data, tensors_of
from autopar.trace.fake import as_on_cpu
from autopar.trace.finite import FiniteBranches, warn_of_finite_branches
from autopar.trace.forward_error import fails_itself
from autopar.trace.frames import frame_text, user_frame, user_traceback
from autopar.trace.hooks import REMEDY, GradientWatch
from autopar.trace.python_state import differing, numbers_of, set_numbers, warn_of_counters

ADVICE = (
    "A traced model may not branch on tensor values or leave PyTorch for other libraries; "
    "use torch.where there, or hand autopar the part of the model that can be traced."
)

INPUT_ADVICE = "Pass inputs that its forward takes, or build the model for these."

# How torch.export (2.11 and 2.15) refuses a forward that computes with ``tensor.data``.
LOST_TENSOR = "fake tensor in the exported program constant's list"
DATA_ADVICE = (
    "autopar cannot follow tensor.data. Read tensor.detach() instead, and update weights and buffers in place under "
    "torch.no_grad(), such as teacher.lerp_(student, 0.01)."
)

DETECTORS = "torchvision.models.detection"
DETECTOR_ADVICE = (
    "torchvision's detectors cannot be traced as a whole: they take lists of images and targets, and each image has a "
    "number of boxes of its own. Hand autopar a module of the model's backbone and head, whose forward is "
    "head(list(backbone(images).values())) for one tensor of resized, normalised images (the head of an R-CNN is "
    "model.rpn.head), and compute anchors and losses in loss_fn."
)


@contextlib.contextmanager
def forget_sources() -> Iterator[None]:
    """Within ``with``, torch.fx keeps no source of the modules that it generates.

    It would keep each for the life of the process, for tracebacks through it: 45 kB a trace of two transformer blocks,
    in a run that traces many shapes or builds many models.
    """
    sources = graph_module._loader.eval_cache  # not public; nothing public empties it
    before = set(sources)
    try:
        yield
    finally:
        for name in sources.keys() - before:
            del sources[name]
            linecache.cache.pop(name, None)


@contextlib.contextmanager
def shapes_of_lstm_states() -> Iterator[None]:
    """Within ``with``, torch.export's shapes of an LSTM's states are right: torch 2.11 gives them a dim too many."""
    layer = decompositions.one_layer_lstm  # not public; later versions of torch return states [batch, features]

    def one_layer_lstm(inp: Any, hidden: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        output, (h, c) = layer(inp, hidden, *args, **kwargs)
        return output, (h.reshape(-1, h.shape[-1]), c.reshape(-1, c.shape[-1]))

    decompositions.one_layer_lstm = one_layer_lstm
    try:
        yield
    finally:
        decompositions.one_layer_lstm = layer


# torch warns of attributes that a forward assigns a tensor to, which may be state that a trace loses. These are none:
# recurrent layers list their parameters again, and timm's attention keeps biases that it computed from parameters.
STATELESS_ASSIGNMENTS = re.compile(
    r"The tensor attributes? (self\.([\w.]+\.)?(_flat_weights|attention_bias_cache)\[[^\]]*\](, )?)+ (was|were) "
    "assigned during export"
)


@contextlib.contextmanager
def ignore_stateless_assignments() -> Iterator[None]:
    """Within ``with``, torch's warning of `STATELESS_ASSIGNMENTS` is not shown.

    `warnings.catch_warnings` would have Python show each warning of the user's forward again at every trace.
    """
    filters: Any = warnings.filters
    ours = ("ignore", STATELESS_ASSIGNMENTS, UserWarning, None, 0)
    filters.insert(0, ours)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the forward may have reset the filters
            filters.remove(ours)


@forget_sources()
@ignore_stateless_assignments()
def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> torch.export.ExportedProgram:
    """The exported program of ``model(*args, **kwargs)`` in ``mode``; the model is not changed.

    Raises:
        TraceError: torch.export refuses the model, or would lose a gradient hook, a custom backward or a no_grad; or
            the model fails on these inputs without an export too. The message holds the file and line in the user's
            model. The traceback ends with the model's frames; the error of torch.export is the ``__context__``.
    """
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))

    def on_device(leaf: Any) -> Any:
        return torch.empty_like(leaf, device=device) if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = tree_map(on_device, (args, kwargs))
    if device.type == "meta":
        model, args, kwargs = as_on_cpu(model, args, kwargs)
    training = {module: module.training for module in model.modules()}
    own_backward: set[str] = set()
    before, after = numbers_of(model), {}
    buffers: dict[str, torch.Tensor] = {}
    parameters: dict[str, nn.Parameter] = {}
    assigned: list[str] = []  # names of parameters that the forward replaces by new ones
    caching: set[str] = set()  # paths of modules that keep tensors of the forward in attributes

    def before_forward(module: nn.Module, _: Any) -> None:
        buffers.update(module.named_buffers(remove_duplicate=False))
        parameters.update(module.named_parameters(remove_duplicate=False))

    def after_forward(module: nn.Module, _: Any, output: Any) -> None:
        own_backward.update(custom_functions(output))
        after.update(numbers_of(module))
        caching.update(path for path, part in module.named_modules() if lacks_data(tensors_of(part)))
        keep_buffers(module, buffers)
        known, now = {id(p) for p in parameters.values()}, dict(module.named_parameters(remove_duplicate=False))
        assigned.extend(name for name in parameters if name in now and id(now[name]) not in known)

    hooks = model.register_forward_pre_hook(before_forward), model.register_forward_hook(after_forward)
    said = io.StringIO()  # when torch refuses a model, it prints the graph traced so far
    try:
        if model.training != (mode == "train"):  # keeps submodules that a training model has in eval mode (frozen)
            model.train(mode == "train")
        with (
            kept_caches(model),
            torch.enable_grad(),
            contextlib.redirect_stderr(said),
            GradientWatch() as seen,
            FiniteBranches() as finite,
            shapes_of_lstm_states(),
        ):
            program = torch.export.export(model, args, kwargs, strict=False)
            once = dict(after)
            if changed := differing(before, once):  # a second forward tells counters from sizes that forwards keep
                # A size beside a tensor of that size is set back, as torch does with the tensor.
                set_numbers(model, {key: (before if key[0] in caching else once)[key] for key in changed})
                torch.export.export(model, args, kwargs, strict=False)
    except Exception as error:
        for hook in hooks:
            hook.remove()  # not to be copied
        itself = not is_detector(model) and fails_itself(model, args, kwargs, error)
        text = own_failure(model, args, kwargs, error, mode) if itself else refusal(model, error, mode, seen.data)
        # A chained error would print torch's frames, more than a hundred lines, above the message.
        raise TraceError(text).with_traceback(user_traceback(error)) from None
    finally:
        for hook in hooks:
            hook.remove()
        set_numbers(model, {key: before[key] for key in differing(before, numbers_of(model))})
        for module, flag in training.items():
            module.training = flag
    sys.stderr.write(said.getvalue())
    warn_of_finite_branches(type(model).__name__, finite.lines)
    warn_of_counters(type(model).__name__, before, once, [key for key in changed if key in differing(once, after)])
    if seen.data_set:
        raise TraceError(f"Cannot trace {type(model).__name__} in {mode} mode{seen.data_set[0]}. {DATA_ADVICE}")
    if assigned:
        raise TraceError(
            f"Cannot trace {type(model).__name__}: its forward assigns a new parameter to {assigned[0]}, which "
            "torch.export would leave out. Update the parameter in place under torch.no_grad(), such as "
            "teacher.lerp_(student, 0.01)."
        )
    if own_backward and mode == "train":
        raise TraceError(
            f"Cannot trace {type(model).__name__}: its autograd.Function {', '.join(sorted(own_backward))} has a "
            "backward of its own, which torch.export would replace by that of the operations inside. Write it with "
            "PyTorch operations (a straight-through estimate is x + (f(x) - x).detach()); checkpoint() needs "
            "use_reentrant=False."
        )
    if seen.hooks and mode == "train":
        raise TraceError(
            f"Cannot trace {type(model).__name__}: its forward registers a hook on a gradient ({seen.hooks[0]}), "
            f"which torch.export would leave out. {REMEDY}"
        )
    if seen.switches and mode == "train":
        raise TraceError(
            f"Cannot trace {type(model).__name__}: its forward turns gradients off inside of an autocast region"
            f"{seen.switches[0]}, which torch.export would leave out. Put torch.no_grad() around a region of its own, "
            "or detach() what it computes."
        )
    return program


def keep_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Write what a forward assigned to buffers of submodules into them.

    torch.export loses such assignments (torch 2.15); it writes those of the model's own buffers itself. A buffer that
    is replaced by one of another shape keeps its first value, so that every step replaces it as the traced forward did.

    Args:
        buffers: before the forward.
    """
    now = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in buffers.items():
        assigned, (path, _, attribute) = now.get(name, buffer), name.rpartition(".")
        if path and assigned is not buffer:
            setattr(model.get_submodule(path), attribute, buffer)
            if assigned.shape == buffer.shape:
                buffer.copy_(assigned.detach())


def custom_functions(output: Any) -> set[str]:
    """Names of the user's autograd.Functions in the autograd graph of an output."""
    pending = [leaf.grad_fn for leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
    seen, found = set(pending), set()
    while pending:
        node = pending.pop()
        # torch's control flow is an AutogradOp; the conversion refuses it and names its line in the model.
        if isinstance(node, BackwardCFunction) and not node.name().endswith("AutogradOpBackward"):
            found.add(node.name().removesuffix("Backward"))
        following = {child for child, _ in node.next_functions} - seen if node is not None else ()
        seen.update(following)
        pending.extend(following)
    return found


def refusal(model: nn.Module, error: Exception, mode: Mode, data_lines: Sequence[str]) -> str:
    """The error message for a model that torch.export refuses.

    Args:
        data_lines: text on each line of the forward that reads or sets ``tensor.data``.
    """
    if data_lines and LOST_TENSOR in str(error):
        return f"Cannot trace {type(model).__name__} in {mode} mode{data_lines[0]}. {DATA_ADVICE}"
    said = first_line(error)
    return (
        f"Cannot trace {type(model).__name__} in {mode} mode{frame_text(user_frame(error))}. torch.export says: "
        f"{said}{'' if said.endswith(('.', '!', '?')) else '.'} "
        f"{DETECTOR_ADVICE if is_detector(model) else ADVICE}"
    )


def is_detector(model: nn.Module) -> bool:
    """Whether a model is one of torchvision's detectors."""
    return any(kind.__module__.startswith(DETECTORS) for kind in type(model).__mro__)


def own_failure(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception, mode: Mode) -> str:
    """The error message for a model whose forward fails on these inputs without torch.export too."""
    shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    frame = frame_text(user_frame(error)).strip()
    return (
        f"{type(model).__name__} itself fails in {mode} mode on inputs of shape {shapes}: "
        f"{first_line(error).rstrip('.')}{f' ({frame})' if frame else ''}. {INPUT_ADVICE}"
    )


def first_line(error: Exception) -> str:
    """Class of an error and the first line of its text, if it has one."""
    return ": ".join((type(error).__name__, *[line.strip() for line in str(error).splitlines() if line.strip()][:1]))


def without_advice(text: str) -> str:
    """Message of a TraceError without its general advice; unchanged if it ends with a specific remedy."""
    return text.removesuffix(ADVICE).removesuffix(INPUT_ADVICE)

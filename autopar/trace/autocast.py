"""Autocast regions of a model as explicit casts, so that the graph computes the same numbers without autocast.

There is no table of what autocast does to which operation. Every operation of a region runs once more on the trace's
fake tensors, and a dispatch mode records what reaches torch's kernels. So devices may differ, and a composite operation
is cast wherever autocast casts an operation inside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode  # the documented way to see what reaches kernels

from autopar.ir.pytree import leaves
from autopar.trace.fake import without_device

COPY = torch.ops.aten._to_copy.default
# Operations that, like views, do not change numbers: a cast after one of them can also come before it.
COPIES = (torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default)
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)  # autocast leaves float64 and complex numbers alone


@dataclass(frozen=True)
class AutocastRegion:
    """An autocast region of the model: the arguments of ``torch.autocast``."""

    device_type: str
    dtype: torch.dtype
    enabled: bool


@dataclass(frozen=True)
class Cast:
    """Cast of an operand to ``dtype``. ``shared``: a weight's cast, which all its readers in a region share."""

    dtype: torch.dtype
    shared: bool = False


Casts = Mapping[fx.Node, Cast]


@dataclass
class DispatchRecord:
    """Record of one run of an operation.

    ``kernels`` are the operations that reached torch's kernels, each with the dtypes of its arguments. ``casts`` are
    the casts that happened, each with the operand, or None for an intermediate tensor. ``results`` are output dtypes.
    """

    kernels: list[tuple[str, tuple[torch.dtype, ...]]] = field(default_factory=list)
    casts: list[tuple[fx.Node | None, Cast]] = field(default_factory=list)
    results: tuple[torch.dtype, ...] = ()


class DispatchRecorder(TorchDispatchMode):
    """Records what is dispatched below autocast."""

    def __init__(self, operands: Mapping[fx.Node, Tensor]) -> None:
        super().__init__()
        self.record = DispatchRecord()
        self.operands = operands
        # Keyed by id(). The tensors are kept alive, so that no other tensor gets the same id.
        self.known = {id(tensor): (node, tensor) for node, tensor in operands.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        node = self.known[id(args[0])][0] if args and id(args[0]) in self.known else None
        if func is COPY:
            if made.dtype != args[0].dtype:
                # Autocast keeps the casts of weights, not of their views, while the outermost region lasts.
                shared = node is not None and args[0] is self.operands[node] and args[0].dtype == torch.float32
                self.record.casts.append((node, Cast(made.dtype, shared)))
        elif func.is_view or func in COPIES:
            if node is not None:
                self.known |= {id(tensor): (node, tensor) for tensor in tensors_of(made)}
        elif func.namespace != "prim":  # prim operations only ask, for example for a tensor's device
            self.record.kernels.append((func._schema.name, dtypes_of((args, kwargs))))
        return made


def casts_of(node: fx.Node, target: OpOverload, regions: Sequence[AutocastRegion]) -> Casts | None:
    """The casts of operands with which an operation computes without autocast what it computes inside the regions.

    For some operations autocast sets their dtype argument instead of casting operands (CUDA's ``sum``). No cast is
    recorded then, and the operands are cast to the dtype of the result.

    Args:
        node: the operation's node in the exported graph.
        regions: all autocast regions around it, from the outermost.
    Returns:
        The cast of each operand; None if no casts of operands have that effect.
    """
    operands = {n: n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)}
    if target._schema.is_mutable or not any(t.dtype in CASTABLE for t in operands.values()):
        return {}  # autocast leaves in-place operations alone
    with contextlib.ExitStack() as stack:
        for region in regions:
            stack.enter_context(torch.autocast(region.device_type, region.dtype, region.enabled, cache_enabled=False))
        inside = record_run(node, target, operands, {})
    with contextlib.ExitStack() as stack:
        for device_type in {region.device_type for region in regions}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        return equivalent_casts(node, target, operands, inside)


def equivalent_casts(
    node: fx.Node, target: OpOverload, operands: Mapping[fx.Node, Tensor], inside: DispatchRecord
) -> Casts | None:
    """The casts of operands with which a run without autocast matches the record of a run inside the regions.

    Casts that lead to the same kernels on the same dtypes are preferred. Otherwise casts that lead to equal result
    dtypes are taken: autocast may select other kernels, and cuDNN's cast some operands internally.
    """
    plain = try_run(node, target, operands, {})
    own = plain.casts if plain is not None else []  # an operation may cast by itself
    new = [(n, cast) for n, cast in inside.casts if (n, cast) not in own]
    if plain is not None and not new and plain.results == inside.results:
        return {}
    made = next(iter(inside.results), None)
    seen = {n: cast for n, cast in reversed(new) if n is not None}
    castable = [n for n, t in operands.items() if {made, t.dtype} <= {*CASTABLE} and t.dtype != made]
    uniform = dict.fromkeys(castable, Cast(made)) if made and all(cast.dtype == made for _, cast in new) else {}
    tried = [(casts, try_run(node, target, operands, casts)) for casts in (seen, uniform) if casts]
    fitting = [(casts, record) for casts, record in tried if record is not None and record.results == inside.results]
    proven = [casts for casts, record in fitting if record.kernels == inside.kernels]
    return next(iter(proven or [casts for casts, _ in reversed(fitting)]), None)


def try_run(
    node: fx.Node, target: OpOverload, operands: Mapping[fx.Node, Tensor], casts: Casts
) -> DispatchRecord | None:
    """The record of a run without autocast; None if torch refuses the operands."""
    try:
        # Fake tensors print a message for operands that they refuse; meta tensors do not, but support fewer operations.
        with contextlib.suppress(NotImplementedError):
            record_run(node, target, {n: without_device(t) for n, t in operands.items()}, casts)
        return record_run(node, target, operands, casts)
    except RuntimeError:
        return None


def record_run(node: fx.Node, target: OpOverload, operands: Mapping[fx.Node, Tensor], casts: Casts) -> DispatchRecord:
    """The record of an operation's run with some operands cast beforehand."""
    with torch.no_grad():
        given = {n: t.to(casts[n].dtype) if n in casts else t for n, t in operands.items()}
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: given.get(n, n.meta.get("val")))
        with DispatchRecorder(given) as recorder:
            made = target(*args, **kwargs)
    recorder.record.results = dtypes_of(made)
    return recorder.record


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """The tensors in a nested structure."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))


def dtypes_of(tree: Any) -> tuple[torch.dtype, ...]:
    """Dtypes of the tensors in a nested structure."""
    return tuple(tensor.dtype for tensor in tensors_of(tree))

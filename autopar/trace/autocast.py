"""Autocast regions as explicit casts, so that the graph gives the same numbers without any autocast around it.

No list of operations says what autocast does with which: every operation of a region runs once more on the trace's
fake tensors, and what reaches torch's kernels is written down. So devices may differ, and compositions are cast
wherever an operation inside of them is.
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
# With views, what leaves numbers as they are: a cast behind one might as well come before it.
COPIES = (torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default)
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)  # autocast leaves float64 and complex numbers alone


@dataclass(frozen=True)
class AutocastRegion:
    """An autocast region of the model."""

    device_type: str
    dtype: torch.dtype
    enabled: bool


@dataclass(frozen=True)
class Cast:
    """What an operand is cast to; ``shared`` where a weight's is made once for all its readers in a region."""

    dtype: torch.dtype
    shared: bool = False


Casts = Mapping[fx.Node, Cast]


@dataclass
class DispatchRecord:
    """What one run of an operation did.

    ``kernels`` are the operations that computed, each with the dtypes that it met; ``casts`` those of operands, None
    standing for what was made on the way.
    """

    kernels: list[tuple[str, tuple[torch.dtype, ...]]] = field(default_factory=list)
    casts: list[tuple[fx.Node | None, Cast]] = field(default_factory=list)
    results: tuple[torch.dtype, ...] = ()


class DispatchRecorder(TorchDispatchMode):
    """Writes down what is dispatched below autocast."""

    def __init__(self, operands: Mapping[fx.Node, Tensor]) -> None:
        super().__init__()
        self.record = DispatchRecord()
        self.operands = operands
        # By identity. What is known is kept alive, so that no other tensor takes its place.
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
        elif func.namespace != "prim":  # questions, such as on which device
            self.record.kernels.append((func._schema.name, dtypes_of((args, kwargs))))
        return made


def casts_of(node: fx.Node, target: OpOverload, regions: Sequence[AutocastRegion]) -> Casts | None:
    """The casts with which an operation does without autocast what it does inside of regions.

    Where autocast asks for another arithmetic by the operation's own dtype argument (CUDA's ``sum``) there are none
    to see: its inputs are cast to what comes out.

    Args:
        node: of the exported graph.
        regions: from the outermost.
    Returns:
        None where no casts of inputs do that.
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
    """The casts with which an operation does what was recorded of it.

    The same kernels on the same dtypes are the best proof. Equal dtypes of the results have to do where autocast leads
    to other kernels; those of cuDNN take some of their operands without a cast to see.
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
    """What a run does; None where torch refuses the operands."""
    try:
        # Fake tensors print what they refuse, meta tensors do not.
        with contextlib.suppress(NotImplementedError):  # but know fewer operations
            record_run(node, target, {n: without_device(t) for n, t in operands.items()}, casts)
        return record_run(node, target, operands, casts)
    except RuntimeError:
        return None


def record_run(node: fx.Node, target: OpOverload, operands: Mapping[fx.Node, Tensor], casts: Casts) -> DispatchRecord:
    """What an operation does with operands, of which some are cast before."""
    with torch.no_grad():
        given = {n: t.to(casts[n].dtype) if n in casts else t for n, t in operands.items()}
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: given.get(n, n.meta.get("val")))
        with DispatchRecorder(given) as recorder:
            made = target(*args, **kwargs)
    recorder.record.results = dtypes_of(made)
    return recorder.record


def tensors_of(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))


def dtypes_of(tree: Any) -> tuple[torch.dtype, ...]:
    return tuple(tensor.dtype for tensor in tensors_of(tree))

"""A user's batch: checked against the trace, and cut into replicas and microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from autopar.errors import UsageError
from autopar.ir.graph import Graph, Ref, dtype_name
from autopar.ir.microbatches import microbatch_sizes
from autopar.ir.pytree import Spec, flatten, unflatten
from autopar.ir.units import of_type
from autopar.trace.call import Call, split_leaves

MAX_NAMED = 3  # attributes that an error lists
PLAIN = (bool, int, float, str)


def check_call(call: Call, graph: Graph, model_name: str) -> None:
    """Compare a call with the traced one: structure, dtypes and numbers of dims.

    Raises:
        UsageError: an input does not fit; names the input, its type and the expected one.
    """
    if call.spec != graph.in_spec:
        raise UsageError(
            f"The inputs of {model_name} have another structure than the example inputs: got "
            f"{outline(call.leaves, call.spec)}, expected {outline(graph.leaves, graph.in_spec)}. "
            "Call parallelize again with example_inputs of this structure."
        )
    values = {v.name: v for v in graph.inputs}
    for leaf, traced in zip(call.leaves, graph.leaves, strict=True):
        if not isinstance(traced, Ref):
            continue
        value = values[traced.name]
        if not isinstance(leaf, torch.Tensor):
            remedy = " Pass torch.as_tensor(input)." if isinstance(leaf, np.ndarray) else ""
            raise UsageError(f"Input {value.name} of {model_name} is {of_type(leaf)}, expected a tensor.{remedy}")
        dtype = dtype_name(leaf.dtype)
        if dtype != value.dtype:
            raise UsageError(
                f"Input {value.name} of {model_name} has dtype {dtype}, expected {value.dtype}. "
                f"Convert it with .to(torch.{value.dtype})."
            )
        if leaf.ndim != len(value.shape):
            raise UsageError(
                f"Input {value.name} of {model_name} has shape {list(leaf.shape)}, expected {len(value.shape)} dims "
                f"like {['batch', *value.shape[1:]]}."
            )


def outline(leaves: Sequence[Any], spec: Spec) -> str:
    """A call's nesting with the word tensor for each tensor: ``((tensor, 2.0), {})``."""
    words = ["tensor" if isinstance(leaf, torch.Tensor | Ref) else repr(leaf) for leaf in leaves]
    return str(unflatten(words, spec)).replace("'", "")


def replica_sizes(batch: int, replicas: int) -> list[int]:
    """Samples of each data-parallel replica: equal contiguous parts, or one more for each of the first replicas."""
    size, more = divmod(batch, replicas)
    return [size + (replica < more) for replica in range(replicas)]


def partition(batch: int, replicas: int, microbatches: int) -> list[int]:
    """Samples of each microbatch, in the order of the batch; each replica has ``microbatches`` of them."""
    return [size for own in replica_sizes(batch, replicas) for size in microbatch_sizes(own, microbatches)]


def check_divisible(batch: int, replicas: int) -> None:
    """Check that replicas can share a training batch evenly.

    Raises:
        UsageError: the batch is no multiple of the replicas.
    """
    if batch % replicas:
        near = " or ".join(str(b) for b in (batch - batch % replicas, batch - batch % replicas + replicas) if b)
        raise UsageError(
            f"A batch of {batch} cannot be trained on by {replicas} data-parallel replicas in equal parts. "
            f"Pass {near} samples, or parallelize with a dp that divides {batch}. DataLoader(drop_last=True) leaves "
            "out a smaller last batch."
        )


def check_real(tree: Any, what: str, rank: int) -> None:
    """Refuse inputs or targets on the meta device on a rank that reads them.

    Args:
        tree: the inputs or targets of the rank.
        what: "input" or "target".

    Raises:
        UsageError: one of the tensors is on the meta device.
    """
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in flatten(tree)[0]):
        raise UsageError(
            f"Rank {rank} was given {what}s on the meta device, which hold no numbers, but reads them. Pass real ones "
            f"where pm.needs_{what}s is true."
        )


def check_detached(leaves: Sequence[Any], what: str) -> None:
    """Refuse tensors that require grad: a training step returns no gradients of them.

    Args:
        leaves: those of the caller's inputs or targets.
        what: "input" or "target".

    Raises:
        UsageError: one of the tensors requires grad.
    """
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise UsageError(
                f"The {what} of shape {list(leaf.shape)} requires grad, but a training step returns gradients of the "
                "model's parameters only. Pass it as .detach(), and train what computed it as part of the model."
            )


def check_targets(leaves: Sequence[Any], batch: int) -> None:
    """Check that microbatches can be cut out of targets.

    Raises:
        UsageError: the first size of a target tensor is not the batch, or an object hides tensors from the cut.
    """
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            check_cuttable(leaf)
        elif leaf.ndim > 0 and leaf.shape[0] != batch:
            raise UsageError(
                f"A target has shape {list(leaf.shape)} for a batch of {batch}: its first dim must be the batch."
            )


def check_lists(targets: Any, batch: int) -> None:
    """Refuse lists with a number or text for each sample of a batch that is cut: each microbatch would get them whole.

    Raises:
        UsageError: there is one.
    """
    if isinstance(targets, Mapping):
        targets = tuple(targets.values())
    if isinstance(targets, list) and len(targets) == batch > 1 and all(isinstance(t, PLAIN) for t in targets):
        raise UsageError(
            f"A target is a list of {batch} values for a batch of {batch}, which is not cut into microbatches. Pass a "
            "tensor of them, or a tuple if each microbatch needs all."
        )
    if isinstance(targets, list | tuple):
        for part in targets:
            check_lists(part, batch)


def split_targets(targets: Any, batch: int, sizes: Sequence[int]) -> list[Any]:
    """Targets of each microbatch; `check_targets` and `check_lists` have passed."""
    leaves, spec = flatten(targets)
    return [unflatten(part, spec) for part in split_leaves(leaves, batch, sizes)]


def check_cuttable(leaf: Any) -> None:
    """Refuse numpy arrays and objects that hold tensors as targets: each microbatch would get them whole.

    Raises:
        UsageError: the leaf is one of them.
    """
    if isinstance(leaf, np.ndarray):
        raise UsageError(
            f"A target is a numpy array of shape {list(leaf.shape)}, which cannot be cut into microbatches. Pass "
            "torch.as_tensor(target)."
        )
    names = [f.name for f in fields(leaf)] if is_dataclass(leaf) else getattr(leaf, "__dict__", {})
    attributes = {name: flatten(getattr(leaf, name, None))[0] for name in names}
    inside = [name for name, held in attributes.items() if any(isinstance(part, torch.Tensor) for part in held)]
    if inside:
        raise UsageError(
            f"A target is {of_type(leaf)} with tensors in {', '.join(inside[:MAX_NAMED])}, which cannot be cut into "
            "microbatches. Pass a dict or tuple of tensors."
        )

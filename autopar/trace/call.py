"""A call of a model: arguments in the signature's order, as flat tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import UsageError
from autopar.ir.pytree import Spec, flatten, unflatten
from autopar.ir.units import of_type


@dataclass(frozen=True)
class Call:
    """A model call with its arguments in the signature's order."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def leaves(self) -> list[Any]:
        return flatten((self.args, self.kwargs))[0]

    @property
    def spec(self) -> Spec:
        return flatten((self.args, self.kwargs))[1]

    @property
    def batch(self) -> int:
        """Samples: the first size of the first tensor.

        Raises:
            UsageError: there is no tensor, or the batch is empty.
        """
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                if leaf.ndim == 0:
                    raise UsageError("The first input has shape []; its first dim must be the batch.")
                if leaf.shape[0] == 0:
                    raise UsageError(
                        f"The batch is empty: the first input has shape {list(leaf.shape)}. Pass at least one sample."
                    )
                return leaf.shape[0]
        kinds = " and ".join(sorted({of_type(leaf) for leaf in self.leaves})) or "nothing"
        raise UsageError(f"The model's inputs are {kinds}: there is no batch to split. Pass at least one tensor.")

    def first(self, samples: int) -> Call:
        """The call with only the first ``samples`` samples of every batched tensor."""
        leaves = split_leaves(self.leaves, self.batch, [samples])[0]
        args, kwargs = unflatten(leaves, self.spec)
        return Call(args, kwargs)

    def repeated(self, times: int) -> Call:
        """A call on the meta device with ``times`` as many samples, which shows shapes; the call itself if 1."""
        if times == 1:
            return self
        batch = self.batch
        leaves = [
            leaf.new_empty((times * batch, *leaf.shape[1:]), device="meta") if is_batched(leaf, batch) else leaf
            for leaf in self.leaves
        ]
        args, kwargs = unflatten(leaves, self.spec)
        return Call(args, kwargs)


def as_call(model: nn.Module, inputs: Any) -> Call:
    """Inputs as a call: a tensor is the only argument, a tuple or list the positional ones, a dict or another
    mapping (such as the result of Hugging Face's processors) the keyword ones.

    The batch is the first size of the first tensor. Every tensor with that first size is cut into microbatches,
    whatever its first dim means. All other inputs go whole to each microbatch.
    """
    if isinstance(inputs, Mapping):
        return bind(model, (), dict(inputs))
    return bind(model, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {})


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """A call with the arguments in the order of ``model.forward``, whether they are positional or keyword arguments.

    Raises:
        UsageError: the arguments do not fit the signature.
    """
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        signature = inspect.signature(model.forward)
        raise UsageError(
            f"The inputs do not fit {type(model).__name__}.forward{signature}: {error}. "
            "Pass a tensor, a tuple of positional inputs, or a dict of keyword inputs."
        ) from error
    return Call(bound.args, dict(bound.kwargs))


def split_leaves(leaves: Sequence[Any], batch: int, sizes: Sequence[int]) -> list[list[Any]]:
    """The leaves of each microbatch: tensors whose first dim is the batch are cut, everything else is repeated."""
    parts = []
    start = 0
    for size in sizes:
        parts.append([leaf[start : start + size] if is_batched(leaf, batch) else leaf for leaf in leaves])
        start += size
    return parts


def is_batched(leaf: Any, batch: int) -> bool:
    """Whether an input is a tensor whose first dim is the batch."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == batch

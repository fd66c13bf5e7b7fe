"""The model inputs that ``--input`` describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autopar.errors import UsageError
from autopar.ir.graph import DTYPE_BYTES
from autopar.tools.cli.flags import parse_shape

if TYPE_CHECKING:  # a wrong --input is refused before torch is imported
    import torch

# Random token and class numbers are below this, which is valid for any embedding.
INTEGERS = 4


@dataclass(frozen=True)
class Input:
    """One input tensor.

    Args:
        name: of forward's argument; empty for a positional input.
        dtype: torch's name of it, such as ``int64``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def empty(self) -> torch.Tensor:
        """A tensor of this shape on the meta device."""
        import torch

        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="meta")

    def drawn(self) -> torch.Tensor:
        """A random tensor: normally distributed, or small whole numbers for integer dtypes."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(self.shape, dtype=dtype)
        return torch.randint(INTEGERS, self.shape).to(dtype)


def parse_inputs(texts: Sequence[str] | None, batch: int | None) -> tuple[Input, ...]:
    """Inputs in texts such as ``8,3,64,64``, ``image=8,3,64,64`` and ``tokens=8,16:int64``, in order.

    Args:
        batch: replaces the first size of the first input, and of all inputs with the same first size.

    Raises:
        UsageError: a text cannot be read, only some inputs have names, or two have one name.
    """
    inputs = [parse_input(text) for text in texts or ()]
    names = [i.name for i in inputs]
    if any(names) and not all(names):
        raise UsageError(
            f"--input is given with names ({', '.join(filter(None, names))}) and without. Name all inputs."
        )
    twice = [name for name in dict.fromkeys(names) if name and names.count(name) > 1]
    if twice:
        raise UsageError(f"--input {twice[0]} is given {names.count(twice[0])} times. Give each input once.")
    if batch is None or not inputs:
        return tuple(inputs)
    before = inputs[0].shape[0]
    return tuple(replace(i, shape=(batch, *i.shape[1:])) if i.shape[0] == before else i for i in inputs)


def num_samples(inputs: Sequence[Input], batch: int) -> int:
    """Samples of the inputs; the batch of the flags without any."""
    return inputs[0].shape[0] if inputs else batch


def parse_input(text: str) -> Input:
    """One input from its text. Raises as `parse_inputs`."""
    name, equals, rest = text.rpartition("=")
    shape, colon, dtype = rest.partition(":")
    if equals and not name.strip().isidentifier():
        raise UsageError(f"Cannot read --input {text!r}: {name!r} is not an argument's name. Write NAME=SHAPE[:DTYPE].")
    if colon and dtype.strip() not in DTYPE_BYTES:
        raise UsageError(
            f"Cannot read --input {text!r}: {dtype!r} is not a dtype. Choose one of {', '.join(DTYPE_BYTES)}."
        )
    return Input(name.strip(), parse_shape(shape), dtype.strip() if colon else "float32")


def example(inputs: Sequence[Input], make: Callable[[Input], torch.Tensor]) -> Any:
    """Example inputs of a model: a dict by name, a tuple by position, or None without inputs."""
    if not inputs:
        return None
    if inputs[0].name:
        return {i.name: make(i) for i in inputs}
    return tuple(make(i) for i in inputs)

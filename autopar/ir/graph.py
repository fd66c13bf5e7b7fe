"""The traced model as plain data: values, weights, operations and the graph that holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

Mode = Literal["train", "eval"]
NO_AUTOCAST = "off"
ADAM_STATE_BYTES = 8.0  # of optimizer state per element: two moments in float32


def dtype_name(dtype: object) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor in row-major order."""
    return dense_strides(shape, range(len(shape)))


def dense_strides(shape: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor with its dims in an order in memory, from the outermost to the innermost."""
    position = {dim: i for i, dim in enumerate(order)}
    return tuple(prod(shape[d] for d in order[position[dim] + 1 :]) for dim in range(len(shape)))


def memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's dims from the outermost in memory to the innermost; the plain order for an expanded tensor."""
    dims = tuple(range(len(shape)))
    if any(size != 1 and step == 0 for size, step in zip(shape, stride)):
        return dims
    return tuple(sorted(dims, key=lambda dim: -stride[dim]))


@dataclass(frozen=True)
class Ref:
    """Names a value: an operation's output, a graph input or a weight."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class LocalDevice:
    """Stands for the device of whoever runs the operation; replaces devices baked in by tracing."""


@dataclass(frozen=True)
class Value:
    """One tensor of the graph at the traced microbatch shape."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    requires_grad: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the dense tensor, byte."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def memory_order(self) -> tuple[int, ...]:
        """Its dims from the outermost in memory to the innermost."""
        return memory_order(self.shape, self.stride)


@dataclass(frozen=True)
class Weight:
    """A tensor that lives on a stage between steps.

    ``names`` are all names under which the model's state dict knows it: more than one when it is tied. A ``constant``
    is a tensor that the trace found in the model's code; it is in no state dict. ``dtype`` is what programs read;
    ``master`` the dtype in which the tensor is stored and optimised, where that is another one: programs then read a
    copy of it. ``state_bytes`` of an optimizer are kept for each element of a trained parameter, and
    ``average_bytes`` of a moving average for each element of any weight. ``order`` has the dims from the outermost in
    memory to the innermost; none where they are in order.
    """

    name: str
    kind: Literal["parameter", "buffer", "constant"]
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    names: tuple[str, ...] = ()
    master: str = ""
    state_bytes: float = ADAM_STATE_BYTES
    average_bytes: float = 0.0
    order: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor that programs read, byte."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def stored_dtype(self) -> str:
        """The dtype of the tensor that is stored and optimised."""
        return self.master or self.dtype

    @property
    def stored_bytes(self) -> int:
        """Size of that tensor, byte."""
        return self.numel * DTYPE_BYTES[self.stored_dtype]

    @property
    def copy_bytes(self) -> int:
        """Size of the copy that programs read, byte; 0 where they read the stored tensor itself."""
        return self.num_bytes if self.master else 0

    @property
    def value(self) -> Value:
        """What an operation reads."""
        stride = dense_strides(self.shape, self.order or range(len(self.shape)))
        return Value(self.name, self.shape, self.dtype, stride, self.requires_grad)


def refs(tree: Any) -> Iterator[str]:
    """Names referred to anywhere in (nested) arguments, in order, repeats included."""
    if isinstance(tree, Ref):
        yield tree.name
    elif isinstance(tree, tuple):
        for item in tree:
            yield from refs(item)


def renamed(tree: Any, names: Mapping[str, str]) -> Any:
    """(Nested) arguments with other references."""
    if isinstance(tree, Ref):
        return Ref(names[tree.name])
    return tuple(renamed(item, names) for item in tree) if isinstance(tree, tuple) else tree


@dataclass(frozen=True)
class Op:
    """One ATen operation.

    ``name`` is the module path with the operation's own name (``blocks.0.attn.qkv.linear``): the same in train and
    eval mode and at any batch size, which is what plans rely on. ``mutates`` lists the weights it updates in place.
    ``home`` is set on a collective that sharding inserted: the traced operation whose stage it shares. ``autocast`` is
    set inside of the model's own autocast regions: the dtype of the innermost, or `NO_AUTOCAST`.
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[Value, ...]
    module: str
    source: str = ""
    mutates: tuple[str, ...] = ()
    home: str = ""
    autocast: str = ""

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Names of all values and weights it reads, each once."""
        return tuple(dict.fromkeys(refs((self.args, tuple(v for _, v in self.kwargs)))))

    def reading(self, names: Mapping[str, str]) -> Op:
        """The operation with another name for each that it reads."""
        kwargs = tuple((key, renamed(value, names)) for key, value in self.kwargs)
        return replace(self, args=renamed(self.args, names), kwargs=kwargs)


@dataclass(frozen=True)
class Graph:
    """A model's forward pass as a list of operations in execution order.

    ``leaves`` are the flattened arguments of the call that was traced: a reference for each tensor, the constant itself
    for anything else. ``outputs`` are the flattened results in the same manner.

    Invariants: names are unique; every reference is to an input, a weight or an earlier operation's output; operations
    listed in one set of ``together`` share state that is updated in place and must stay on one stage.
    """

    model: str
    mode: Mode
    batch: int
    inputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Any, ...]
    leaves: tuple[Any, ...]
    in_spec: Any
    out_spec: Any
    colocated: tuple[tuple[str, ...], ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = {v.name for v in self.inputs} | {w.name for w in self.weights}
        assert len(names) == len(self.inputs) + len(self.weights), "input and weight names are not unique"
        for op in self.ops:
            missing = [r for r in op.reads if r not in names]
            assert not missing, f"{op.name} reads {missing}, which nothing before it produces"
            for value in op.outputs:
                assert value.name not in names, f"two values are named {value.name}"
                names.add(value.name)
        assert all(r in names for r in refs(self.outputs)), "an output is produced by nothing"

    @cached_property
    def producer(self) -> Mapping[str, Op]:
        """The operation behind each value."""
        return {value.name: op for op in self.ops for value in op.outputs}

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """Inputs and operation outputs by name."""
        return {v.name: v for v in self.inputs} | {v.name: v for op in self.ops for v in op.outputs}

    @cached_property
    def readable(self) -> Mapping[str, Value]:
        """Everything that an operation can read: values and weights."""
        return {**self.values, **{w.name: w.value for w in self.weights}}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every value and weight."""
        return {name: value.shape for name, value in self.readable.items()}

    @cached_property
    def weight(self) -> Mapping[str, Weight]:
        return {w.name: w for w in self.weights}

    @property
    def num_params(self) -> int:
        """Number of parameter elements, tied ones once."""
        return sum(w.numel for w in self.weights if w.kind == "parameter")

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what a plan relies on: operations, parameters and their shapes; independent of batch and device."""
        lines = [f"{op.name} {op.target}" for op in self.ops]
        lines += [f"{w.name} {w.shape} {w.dtype}" for w in self.weights if w.kind != "constant"]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        rows = [f"{self.model} ({self.mode}, batch {self.batch}): {len(self.ops)} ops, {self.num_params:,} parameters"]
        for op in self.ops:
            out = ", ".join(f"{v.dtype}{list(v.shape)}" for v in op.outputs)
            kwargs = "".join(f", {k}={v!r}" for k, v in op.kwargs)
            rows.append(f"  {op.name}: {out} = {op.target}({', '.join(map(repr, op.args))}{kwargs})")
        return "\n".join(rows)

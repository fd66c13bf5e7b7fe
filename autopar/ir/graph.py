"""The traced model as plain data: values, weights, operations and the graph that holds them.

In-place operations become out-of-place ones in a trace, and later readers read the new value. Where the old memory is
read under another name (a view, a buffer), the operation stays in place, and all operations on this memory up to the
last update are kept on one stage (`Graph.colocated`). Full functionalisation would cost copies.
"""

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


def dense_strides(shape: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor.

    Args:
        order: dims from the outermost in memory to the innermost.
    """
    position = {dim: i for i, dim in enumerate(order)}
    return tuple(prod(shape[d] for d in order[position[dim] + 1 :]) for dim in range(len(shape)))


def memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Dims of a tensor from the outermost in memory to the innermost; 0, 1, … for an expanded tensor."""
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
    """Stands for the device of the rank that runs the operation; replaces devices that tracing wrote down."""


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
        """Dims from the outermost in memory to the innermost."""
        return memory_order(self.shape, self.stride)


@dataclass(frozen=True)
class Weight:
    """A tensor that lives on a stage between steps.

    Args:
        kind: a constant is a tensor in the model's code that the trace met; it is in no state dict. dtype: dtype that
        programs read. names: keys of the model's state dict for this tensor, more than one where it is tied. master:
        dtype in which the tensor is stored and optimised, where that differs from ``dtype``: programs then read a
            copy. Empty otherwise.
        state_bytes: optimizer state per element of a trained parameter, byte.
        average_bytes: moving average per element of any weight, byte.
        order: dims from the outermost in memory to the innermost; empty for 0, 1, ….
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
        """Size of the stored tensor, byte."""
        return self.numel * DTYPE_BYTES[self.stored_dtype]

    @property
    def copy_bytes(self) -> int:
        """Size of the copy that programs read, byte; 0 where they read the stored tensor itself."""
        return self.num_bytes if self.master else 0

    @property
    def value(self) -> Value:
        """The weight as a value that operations read."""
        stride = dense_strides(self.shape, self.order or range(len(self.shape)))
        return Value(self.name, self.shape, self.dtype, stride, self.requires_grad)


def refs(tree: Any) -> Iterator[str]:
    """Names in the references of (nested) arguments, in order, repeats included."""
    if isinstance(tree, Ref):
        yield tree.name
    elif isinstance(tree, tuple):
        for item in tree:
            yield from refs(item)


LAYOUT_COPY = "layout"  # last part of the names of copies that passes on layouts add


def names_layout_copy(name: str) -> bool:
    """Whether an operation, or a pattern of operations, is a copy that a pass on layouts added."""
    return name.rpartition(".")[2].rstrip("_0123456789") == LAYOUT_COPY


def renamed(tree: Any, names: Mapping[str, str]) -> Any:
    """(Nested) arguments whose references have other names."""
    if isinstance(tree, Ref):
        return Ref(names[tree.name])
    return tuple(renamed(item, names) for item in tree) if isinstance(tree, tuple) else tree


@dataclass(frozen=True)
class Op:
    """One ATen operation.

    Args:
        name: module path and kind, ``blocks.0.attn.qkv.linear``. It is equal in train and eval mode, at any batch size
        and
            on any device; plans refer to it.
        mutates: weights that the operation updates in place.
        home: the traced operation whose stage a collective shares; set on collectives that sharding inserted.
        autocast: dtype of the innermost autocast region of the model, or `NO_AUTOCAST`; empty outside of such regions.
        traced: target in the trace, where a pass on layouts changed it; empty for a copy that such a pass added.
            Both depend on the batch and on the inputs' layout, so no plan relies on them.
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
    traced: str | None = None

    @property
    def is_layout_copy(self) -> bool:
        """Whether a pass on layouts added the operation, as a copy."""
        return self.traced == ""

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Names of all values and weights that the operation reads, each once."""
        return tuple(dict.fromkeys(refs((self.args, tuple(v for _, v in self.kwargs)))))

    def reading(self, names: Mapping[str, str]) -> Op:
        """The operation with other names for the values that it reads."""
        kwargs = tuple((key, renamed(value, names)) for key, value in self.kwargs)
        return replace(self, args=renamed(self.args, names), kwargs=kwargs)


@dataclass(frozen=True)
class Graph:
    """A model's forward pass as a list of operations in execution order; prints, hashes, compares and pickles.

    ``leaves`` are the flattened arguments of the traced call: a reference for each tensor, the constant itself for
    anything else. ``outputs`` are the flattened results in the same form.

    ``uneven`` are dims of values and weights of which other ranks hold parts of another size.

    Invariants: names are unique; every reference is to an input, a weight or an earlier operation's output. Each set of
    ``colocated`` names operations that share state which is updated in place; they must stay on one stage.
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
    uneven: Mapping[str, frozenset[int]] = field(default_factory=dict, compare=False, repr=False)

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
        """The operation that produces each value, by the value's name."""
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

    @cached_property
    def as_traced(self) -> Graph:
        """The graph before the passes on layouts, but for its values' strides."""
        if all(op.traced is None for op in self.ops):
            return self
        source, ops = {name: name for name in self.readable}, list[Op]()
        for op in self.ops:
            if op.is_layout_copy:
                source |= {value.name: source[read] for value, read in zip(op.outputs, op.reads, strict=True)}
            else:
                ops.append(replace(op.reading(source), target=op.traced or op.target, traced=None))
        return replace(self, ops=tuple(ops), outputs=renamed(self.outputs, source))

    @property
    def num_params(self) -> int:
        """Number of parameter elements, tied ones once."""
        return sum(w.numel for w in self.weights if w.kind == "parameter")

    @cached_property
    def fingerprint(self) -> str:
        """Hash of operations, parameters and their shapes, which plans rely on; independent of batch and layouts."""
        return hashlib.sha256("\n".join(self.fingerprint_lines).encode()).hexdigest()[:16]

    @property
    def fingerprint_lines(self) -> list[str]:
        """What the fingerprint is a hash of: a line for each operation, then one for each parameter and buffer."""
        lines = [f"{op.name} {op.target}" for op in self.as_traced.ops]
        return lines + [f"{w.name} {w.shape} {w.dtype}" for w in self.weights if w.kind != "constant"]

    def __str__(self) -> str:
        rows = [f"{self.model} ({self.mode}, batch {self.batch}): {len(self.ops)} ops, {self.num_params:,} parameters"]
        for op in self.ops:
            out = ", ".join(f"{v.dtype}{list(v.shape)}" for v in op.outputs)
            kwargs = "".join(f", {k}={v!r}" for k, v in op.kwargs)
            rows.append(f"  {op.name}: {out} = {op.target}({', '.join(map(repr, op.args))}{kwargs})")
        return "\n".join(rows)

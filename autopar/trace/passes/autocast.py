"""Mixed precision as a rewrite of the graph: casts where `torch.autocast` would insert them, once per value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from autopar.errors import TraceError
from autopar.ir.graph import Graph, Op, Ref, Value, Weight, dtype_name, refs
from autopar.ir.names import unused_name
from autopar.ops.registry import meta_results, named_arguments, slotted_arguments
from autopar.trace.passes.autocast_policy import base_name, treatment_of

CAST = "aten.to.dtype"
CASTABLE = ("float32", "bfloat16", "float16")  # autocast leaves float64 alone
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Views: the dtype that a view's readers want is wanted of the weight itself.
VIEWS = (
    "chunk", "expand", "flatten", "mT", "numpy_T", "permute", "reshape", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view",
)  # fmt: skip


def apply_autocast(graph: Graph, low: str) -> Graph:
    """The graph that computes what the model computes under ``torch.autocast`` with a low precision.

    A parameter that all its readers want in the low precision gets a compute copy: its dtype becomes the low one, its
    master keeps the traced dtype. A cast is an ``aten.to.dtype`` operation after the one that makes the value. So all
    readers share it, and a pipeline cut after it sends the smaller tensor. Result dtypes come from running every
    distinct operation on meta tensors. If an operation refuses its operands, where autocast would fail, it gets them in
    their traced dtypes.

    Args:
        graph: trace of a model in float32.
        low: ``bfloat16`` or ``float16``.
    Raises:
        TraceError: an operation cannot be run on meta tensors even as it was traced.
    """
    return AutocastRewriter(graph, low).run()


def low_precision_weights(graph: Graph, low: str) -> frozenset[str]:
    """Names of the float32 parameters that are read in the low precision only."""
    wanted: defaultdict[str, set[str]] = defaultdict(set)
    for name in refs(graph.outputs):
        wanted[name].add("as given")
    for op in reversed(graph.ops):
        wants = {"as given"}
        if treatment_of(op) == "low":
            wants = {op.autocast or low}
        elif op.target == CAST:
            wants = {dtype_name(op.args[1])}
        elif base_name(op) in VIEWS and op.outputs:
            wants = set().union(*(wanted[value.name] for value in op.outputs))
        for name in op.reads:
            wanted[name] |= wants
        for name in op.mutates:
            wanted[name].add("as given")
    parameters = (w for w in graph.weights if w.kind == "parameter" and w.dtype == "float32")
    return frozenset(w.name for w in parameters if wanted[w.name] == {low})


class AutocastRewriter:
    """Visits the operations in order and tracks the current dtype of every value and weight."""

    def __init__(self, graph: Graph, low: str) -> None:
        self.graph, self.low = graph, low
        cast = low_precision_weights(graph, low)
        self.weights = tuple(self.weight(w, cast) for w in graph.weights)
        self.current = {value.name: value for value in graph.inputs}
        self.current |= {w.name: w.value for w in self.weights}
        self.traced_dtype = {name: value.dtype for name, value in graph.readable.items()}
        self.names = {*self.traced_dtype, *(op.name for op in graph.ops)}
        self.updated = frozenset(updated_in_place(graph))
        # (value, dtype, reader if the value is updated in place) -> name of the cast
        self.casts: dict[tuple[str, str, str], str] = {}
        self.before: defaultdict[str, list[Op]] = defaultdict(list)
        self.after: defaultdict[str, list[Op]] = defaultdict(list)
        self.dtypes_by_signature: dict[str, tuple[str, ...] | None] = {}

    def weight(self, weight: Weight, cast: frozenset[str]) -> Weight:
        """The weight, with a low-precision compute copy if it is among ``cast``."""
        return replace(weight, dtype=self.low, master=weight.dtype) if weight.name in cast else weight

    def run(self) -> Graph:
        ops = [self.converted(op) for op in self.graph.ops]
        return replace(
            self.graph,
            weights=self.weights,
            ops=tuple(o for op in ops for o in (*self.before[op.name], op, *self.after[op.name])),
            colocated=tuple(
                tuple(o for name in group for o in (*(c.name for c in self.before[name]), name))
                for group in self.graph.colocated
            ),
        )

    def converted(self, op: Op) -> Op:
        """The operation with its inputs cast and the new dtypes of its outputs."""
        new = self.reading(op, self.wanted(op))
        if treatment_of(op) == "float32 inside" and self.dtype(op.reads[0]) in CASTABLE[1:]:
            new = float32_inside(new)
        made = self.result_dtypes(new)
        if made is None:
            new = self.reading(op, self.fallback(op))
            made = self.result_dtypes(new)
        if made is None:
            raise TraceError(
                f"Cannot find what {op.name} ({op.target}) makes in {SHORT[self.low]} at "
                f"{op.source or 'an unknown line'}: torch cannot run it on meta tensors. Register a meta kernel for "
                'it, use other operations, or leave precision at "fp32".'
            )
        outputs = tuple(replace(value, dtype=dtype) for value, dtype in zip(op.outputs, made, strict=True))
        self.current |= {value.name: value for value in outputs}
        return replace(new, outputs=outputs)

    def dtype(self, name: str) -> str:
        return self.current[name].dtype

    def wanted(self, op: Op) -> Mapping[str, str]:
        """The dtype to which each input is to be cast, by name."""
        low, treatment = op.autocast or self.low, treatment_of(op)
        given = {name: self.dtype(name) for name in op.reads if self.dtype(name) in CASTABLE}
        if treatment == "low":
            return dict.fromkeys(given, low)
        if treatment == "float32":
            return dict.fromkeys(given, "float32")
        if treatment == "widest":
            return dict.fromkeys(given, low if set(given.values()) == {low} else "float32")
        return {}

    def fallback(self, op: Op) -> Mapping[str, str]:
        """Dtypes of the inputs if torch refuses the wanted ones: as traced, or as the value updated in place."""
        castable = [name for name in op.reads if self.dtype(name) in CASTABLE]
        return {name: self.traced_dtype[name] if op.outputs else self.dtype(op.reads[0]) for name in castable}

    def reading(self, op: Op, wanted: Mapping[str, str]) -> Op:
        """The operation with its inputs cast to the wanted dtypes."""
        names = {name: self.cast(name, wanted[name], op) if name in wanted else name for name in op.reads}
        return op.reading(names)

    def cast(self, name: str, dtype: str, reader: Op) -> str:
        """Name of a value in a dtype; a cast is added if there is none.

        A value that is updated in place is cast again for every reader.
        """
        source = self.current[name]
        if source.dtype == dtype:
            return name
        key = (name, dtype, reader.name if name in self.updated else "")
        if key not in self.casts:
            made_by = None if name in self.updated else self.graph.producer.get(name)
            home = made_by or reader
            unique = unused_name(f"{name}.{SHORT.get(dtype, dtype)}", self.names)
            self.names.add(unique)
            op = Op(unique, CAST, (Ref(name), getattr(torch, dtype)), (), (), home.module, home.source)
            with torch.no_grad():
                (tensor,) = meta_results(op, (source,))
            value = Value(unique, source.shape, dtype, tensor.stride(), source.requires_grad)
            (self.after if made_by else self.before)[home.name].append(replace(op, outputs=(value,)))
            self.current[unique] = value
            self.casts[key] = unique
        return self.casts[key]

    def result_dtypes(self, op: Op) -> tuple[str, ...] | None:
        """The dtypes of an operation's results; None if torch refuses its operands."""
        read = tuple(self.current[name] for name in op.reads)
        if all(self.traced_dtype.get(value.name) == value.dtype for value in read):
            return tuple(value.dtype for value in op.outputs)
        signature = repr((op.target, slotted_arguments(op), [(v.shape, v.dtype, v.stride) for v in read]))
        if signature not in self.dtypes_by_signature:
            self.dtypes_by_signature[signature] = dtypes_on_meta(op, read)
        return self.dtypes_by_signature[signature]


def updated_in_place(graph: Graph) -> Iterator[str]:
    """Names of values whose memory is, or may be, updated in place after they are made."""
    updating = {op.name for op in graph.ops if not op.outputs and not graph.weight.keys() >= set(op.reads)}
    op_of = {op.name: op for op in graph.ops}
    for names in (*graph.colocated, *((name,) for name in updating)):
        if updating.intersection(names):
            for op in map(op_of.__getitem__, names):
                yield from (*op.reads, *(value.name for value in op.outputs))


def float32_inside(op: Op) -> Op:
    """The operation with float32 as its dtype argument, unless that is set."""
    given = named_arguments(op)
    if given["dtype"] is not None:
        return op
    place = list(given).index("dtype")  # positional arguments come first
    if place < len(op.args):
        return replace(op, args=(*op.args[:place], torch.float32, *op.args[place + 1 :]))
    kwargs = tuple((key, value) for key, value in op.kwargs if key != "dtype")
    return replace(op, kwargs=(*kwargs, ("dtype", torch.float32)))


def dtypes_on_meta(op: Op, read: tuple[Value, ...]) -> tuple[str, ...] | None:
    """The dtypes of an operation's results, none for an in-place operation; None if torch refuses its operands."""
    try:
        with torch.no_grad():
            made = meta_results(op, read)
    except RuntimeError:  # NotImplementedError is one
        return None
    return tuple(dtype_name(tensor.dtype) for tensor in made) if op.outputs else ()

"""From a whole graph and its strategies to the graph that a rank of a tensor-parallel group runs.

All ranks run one graph, unless a split is ragged. The local graph is priced, cut, printed and compiled like any other
graph, so the plan that was compared is what runs.

On several axes the graph is sharded over one axis after the other, the outermost first: the local graph of one axis is
the whole graph of the next. Its collectives are operations with rules like any others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Graph, Op, Ref, Value, dense_strides, refs, renamed
from autopar.ir.layout import REPLICATED, AxisSizes, Layout, look_up
from autopar.ir.names import unused_name
from autopar.ir.tensor_axes import TensorAxis, axis_index, tensor_axes
from autopar.sharding.localise import localised, ragged_part
from autopar.sharding.propagate import GraphSharding, assign, storage_layout
from autopar.sharding.reshard import ReshardStep, reshard_steps
from autopar.sharding.rule import axis_labels

UNCOPIED = ("sum_gradient", "share_gradient")  # operators that return their argument uncopied


def shard_graph(
    graph: Graph,
    strategies: Mapping[str, str],
    storage: Mapping[str, Layout],
    ranks: AxisSizes,
    stage_of: Mapping[str, int],
    rank: int = 0,
) -> Graph:
    """The graph that a rank runs: local shapes, and collectives between its operations.

    Args:
        strategies: label of an operation's strategy by its name or pattern, on several axes as `axis_labels` reads it.
            Collectives of an axis can have labels on the axes inside. See `assign` for operations without.
        storage: layout of every weight.
        stage_of: stage of every operation.
        rank: number of the shard; the first one has the largest parts. Only ragged splits depend on it.
    """
    for axis in tensor_axes(ranks):
        labels = labels_on(axis, strategies, graph)
        stored = {name: layout.on(axis.name) for name, layout in storage.items()}
        graph = shard_over_axis(graph, labels, stored, axis, stage_of, axis_index(ranks, rank)[axis.name])
        stage_of = {op.name: stage_of[op.home or op.name] for op in graph.ops}
    return graph


def labels_on(axis: TensorAxis, strategies: Mapping[str, str], graph: Graph) -> Mapping[str, str]:
    """Labels on one axis of the operations of a graph that have one.

    Args:
        strategies: texts by operation or pattern.
    """
    texts = ((op.name, look_up(strategies, op.name)) for op in graph.ops)
    labels = ((name, axis_labels(text)) for name, text in texts if text is not None)
    return {name: own[axis.name] for name, own in labels if axis.name in own}


def shard_over_axis(
    graph: Graph,
    labels: Mapping[str, str],
    storage: Mapping[str, Layout],
    axis: TensorAxis,
    stage_of: Mapping[str, int],
    rank: int = 0,
) -> Graph:
    """The graph that a rank of one axis runs.

    Inputs, constants and outputs are replicated. A tensor is resharded once for all readers of a stage that read it in
    one layout. A partial sum is reduced on the stage of its producer, everything else on the stage of its reader.

    Args:
        storage: layout of every weight on this axis.
        rank: on the axis.
    """
    assigned, ranks, index = assign(graph, labels, storage, axis), {axis.name: axis.ranks}, {axis.name: rank}
    builder = Builder(graph, assigned, storage, axis, stage_of, rank)
    ops = {op.name: builder.local(op) for op in graph.ops}
    outputs = renamed(graph.outputs, {name: builder.output(name) for name in refs(graph.outputs)})
    return replace(
        graph,
        weights=tuple(replace(w, shape=storage[w.name].local_shape(w.shape, ranks, index)) for w in graph.weights),
        ops=tuple(o for op in graph.ops for o in (*builder.before[op.name], ops[op.name], *builder.after[op.name])),
        outputs=outputs,
        uneven=builder.uneven_dims(),
    )


def storage(graph: Graph, strategies: Mapping[str, str], ranks: AxisSizes) -> Mapping[str, Layout]:
    """The layout in which each weight is stored between steps."""
    layouts = dict.fromkeys(graph.weight, REPLICATED)
    for axis in tensor_axes(ranks):
        labels = labels_on(axis, strategies, graph)
        stored = storage_on_axis(graph, labels, axis)
        layouts = {name: layout.then(stored[name]) for name, layout in layouts.items()}
        graph = shard_over_axis(graph, labels, stored, axis, dict.fromkeys((op.name for op in graph.ops), 0))
    return layouts


def storage_on_axis(graph: Graph, labels: Mapping[str, str], axis: TensorAxis) -> Mapping[str, Layout]:
    """The layout in which each weight is stored on one axis.

    A weight is split if all its readers read it split alike. It is replicated with a gradient that is summed once a
    step if all readers use it on split data. Otherwise it is replicated, as are constants, which the trace holds whole.
    """
    sharding = assign(graph, labels, {}, axis)
    readers: dict[str, set[Layout]] = {w.name: set() for w in graph.weights}
    for op in graph.ops:
        for name, layout in zip(op.reads, sharding.strategies[op.name].operands):
            if name in readers:
                readers[name].add(layout)
    for name in refs(graph.outputs):
        if name in readers:
            readers[name].add(REPLICATED)
    return {w.name: REPLICATED if w.kind == "constant" else storage_layout(readers[w.name]) for w in graph.weights}


class Builder:
    """Localises operations one after the other and collects the collectives between them."""

    def __init__(
        self,
        graph: Graph,
        assigned: GraphSharding,
        storage: Mapping[str, Layout],
        axis: TensorAxis,
        stage_of: Mapping[str, int],
        rank: int,
    ) -> None:
        self.graph, self.sharding, self.axis, self.stage_of = graph, assigned, axis, stage_of
        self.rank, self.ranks, self.index = rank, {axis.name: axis.ranks}, {axis.name: rank}
        self.local_values = {value.name: value for value in graph.inputs}
        for w in graph.weights:
            shape = storage[w.name].local_shape(w.shape, self.ranks, self.index)
            self.local_values[w.name] = replace(w, shape=shape).value
        self.layouts = {
            name: (name, layout) for name, layout in assigned.layouts.items()
        }  # and the whole tensor's name
        self.used_names = {op.name for op in graph.ops} | set(graph.shapes)
        self.converted_names: dict[tuple[str, Layout, int], str] = {}  # (value, layout, stage) -> the converted value
        self.before: dict[str, list[Op]] = {op.name: [] for op in graph.ops}
        self.after: dict[str, list[Op]] = {op.name: [] for op in graph.ops}

    def local(self, op: Op) -> Op:
        """An operation with local arguments that reads resharded values."""
        strategy = self.sharding.strategies[op.name]
        names = {name: self.convert(name, read, op) for name, read in zip(op.reads, strategy.operands)}
        if op.name in self.sharding.rules:
            op = localised(op, self.sharding.rules[op.name], strategy, self.axis.ranks, self.rank)
        self.local_values |= {value.name: value for value in op.outputs}
        return op.reading(names)

    def output(self, name: str) -> str:
        """Name of a replicated output of the model; values are resharded on their stage, weights on the last stage."""
        if self.sharding.layouts[name] == REPLICATED:
            return name
        last = max(self.graph.ops, key=lambda op: self.stage_of[op.name])
        return self.convert(name, REPLICATED, self.graph.producer.get(name, last))

    def convert(self, name: str, read: Layout, reader: Op) -> str:
        """Name of a value in the layout in which an operation reads it; inserts the collectives that this takes."""
        current, layout = name, self.sharding.layouts[name]
        steps = reshard_steps(layout, read, self.axis.name, self.axis.ranks)
        for step in steps:
            home = self.graph.producer[name] if layout.partial else reader
            source, layout = layout, read if step is steps[-1] else REPLICATED
            key = (name, layout, self.stage_of[home.name])
            if key not in self.converted_names:
                self.converted_names[key] = self.insert(step, name, current, source, layout, home)
            current = self.converted_names[key]
        return current

    def insert(self, step: ReshardStep, name: str, current: str, made: Layout, layout: Layout, home: Op) -> str:
        """Name of the result of a new operation that takes a reshard step from the current form of a value."""
        source = self.local_values[current]
        unique = unused_name(f"{name}.{step.name}", self.used_names)
        self.used_names.add(unique)
        shape = layout.local_shape(self.graph.shapes[name], self.ranks, self.index)
        stride = source.stride if step.name in UNCOPIED else dense_strides(shape, range(len(shape)))
        result = Value(unique, shape, source.dtype, stride, source.requires_grad)
        op = Op(unique, f"autopar.{step.name}.default", (Ref(current), *step.args),
                self.ragged_arguments(name, made, layout), (result,), home.module,
                home.source, home=home.home or home.name)  # fmt: skip
        self.local_values[unique], self.layouts[unique] = result, (name, layout)
        makes_it = self.graph.producer.get(name) is home
        (self.after if makes_it else self.before)[home.name].append(op)
        return unique

    def uneven_dims(self) -> Mapping[str, frozenset[int]]:
        """Dims of local values and weights whose parts differ in size, on this axis or on an outer one."""
        ragged = {
            local: self.graph.uneven.get(whole, frozenset()) | {split.dim for split in layout.splits if split.unit}
            for local, (whole, layout) in self.layouts.items()
        }
        return {name: dims for name, dims in ragged.items() if dims}

    def ragged_arguments(self, name: str, made: Layout, read: Layout) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Keyword arguments of a resharding between layouts of which one is ragged; none between others."""
        splits = [("ragged", split) for layout in (made, read) for split in layout.splits]
        if len(splits) > 1:
            splits = list(zip(("src_ragged", "dst_ragged"), (split for _, split in splits)))
        shape = self.graph.shapes[name]
        return tuple((word, ragged_part(split, shape, self.rank)) for word, split in splits if split.unit)

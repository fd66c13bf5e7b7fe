"""Conversion of an exported fx graph into operations of an `ir.graph.Graph`: names, arguments, side effects.

In-place operations become out-of-place ones, as far as no other name of their memory is read later. Functionalising the
whole graph would copy views and buffers. ``requires_grad`` is propagated here, since torch.export loses it in graphs
with a ``no_grad`` region.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_arg

from autopar.errors import TraceError
from autopar.ir.graph import NO_AUTOCAST, LocalDevice, Op, Ref, Value, dtype_name, refs
from autopar.ir.names import unused_name
from autopar.trace.autocast import AutocastRegion, casts_of
from autopar.trace.frames import is_internal
from autopar.trace.inplace import STATISTICS, aliased_arguments, missing_defaults, out_of_place, written_arguments

AFTER_THE_END = 1 << 60
CAST = torch.ops.aten.to.dtype
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)\n')
# Checks of tensor properties that hold in the trace; they compute nothing.
CHECKS = ("aten._assert", "aten.sym_constrain", "aten._check")
OF_DTYPES = ("aten.promote_types", "aten.result_type", "aten.can_cast")  # what reads their results has constants
DROPOUTS = ("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout")
DIFFERENTIABLE = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
# Operations that read a tensor's shape or value but propagate no gradient.
UNTRACKED = ("aten::detach", "aten::zeros_like", "aten::ones_like", "aten::empty_like", "aten::full_like",
             "aten::rand_like", "aten::randn_like", "aten::new_empty", "aten::new_zeros", "aten::new_ones",
             "aten::new_full")  # fmt: skip
# Regions that torch.export keeps as sub-graphs.
REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


class Converter:
    """Visits fx nodes in order and collects operations.

    An in-place operation becomes its out-of-place counterpart, and later readers of the old value read the new one. It
    stays in place if a view or a weight with the same memory is read later. All operations that touch that memory, up
    to its last update, are then recorded as colocated: they must share a stage.

    Args:
        known: the value of each placeholder that is an input or a weight.
        weights: names of the weights.
    """

    def __init__(self, known: Mapping[fx.Node, Value], weights: set[str]) -> None:
        self.result: dict[fx.Node, Any] = {node: Ref(value.name) for node, value in known.items()}
        self.values = {value.name: value for value in known.values()}
        self.weights = weights
        self.names = set(self.values)
        self.read_outside: set[str] = set()
        self.latest: dict[str, str] = {}  # old name of an updated value -> the name of its latest version
        self.root: dict[str, str] = {}
        self.aliases: dict[str, set[str]] = defaultdict(set)
        self.ops: list[Op] = []
        self.updated_until: dict[str, int] = {}
        self.regions: tuple[AutocastRegion, ...] = ()  # all autocast regions around, from the outermost
        self.cast_weights: dict[tuple[str, torch.dtype], Ref] = {}  # weight casts of the outermost region
        self.undetached: dict[str, Ref] = {}  # a value detached for a no_grad region -> the value with its history

    @property
    def autocast(self) -> str:
        """The dtype of the innermost autocast region; empty outside all regions."""
        if not self.regions:
            return ""
        return dtype_name(self.regions[-1].dtype) if self.regions[-1].enabled else NO_AUTOCAST

    # -- walking -----------------------------------------------------------------------------------------------

    def run(self, graph: fx.Graph) -> Any:
        """Convert all nodes of a graph or sub-graph; returns the resolved arguments of its output node."""
        nodes: list[fx.Node] = list(graph.nodes)
        last_use = {used: i for i, node in enumerate(nodes) for used in node.all_input_nodes}
        last_use |= {used: AFTER_THE_END for node in nodes if node.op == "output" for used in node.all_input_nodes}
        alive = {n: use for n, use in last_use.items() if n in self.result and self.name_of(n) not in self.weights}
        outputs: Any = ()
        for i, node in enumerate(nodes):
            if node.op == "output":
                outputs = self.resolve(node.args[0])
            elif node.op == "call_function":
                self.result[node] = self.convert(node, alive, i)
            elif node.op == "get_attr" or (node.op == "placeholder" and node not in self.result):
                self.result[node] = None  # sub-graphs of regions, and inputs that are constants
            for used in node.all_input_nodes:
                if last_use[used] == i:
                    alive.pop(used, None)
            if node in last_use and node.op == "call_function":
                alive[node] = last_use[node]
        return outputs

    def convert(self, node: fx.Node, alive: dict[fx.Node, int], position: int) -> Any:
        """Convert one node; returns what its users read: a reference, a tuple of references, or None.

        Args:
            alive: position of the last use of each node that was converted and is still used, but for weights.
        """
        target = node.target
        if target is operator.getitem:
            return self.result[node.args[0]][node.args[1]]  # type: ignore[index]
        if isinstance(target, HigherOrderOperator):
            return self.inline(node, alive, position)
        if not isinstance(target, OpOverload):
            raise TraceError(
                f"Cannot use {target} at {place_of(node)}: sizes that depend on tensor values, and operations outside "
                "ATen, cannot be split. Rewrite it with PyTorch operations whose shapes follow from the inputs' shapes."
            )
        if str(target).startswith((*CHECKS, *OF_DTYPES)):
            return None
        if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
            raise TraceError(
                f"Cannot use {short_name(target)} at {place_of(node)}: it takes a number or a "
                "size from a tensor's values, and a traced graph would not follow it. Keep it a tensor (leave out "
                ".item(), int(), float(), .tolist()) whose shape follows from the inputs' (torch.where, not x[mask])."
            )
        args = tuple(self.resolve(a) for a in node.args)
        if is_identity(target, args):
            return args[0]
        return self.add(node, target, args, alive, position)

    def inline(self, node: fx.Node, alive: dict[fx.Node, int], position: int) -> Any:
        """Convert the sub-graph of a no_grad or autocast region where it stands.

        Values that enter a no_grad region are detached. Values that it returns unchanged, or updated in place, are not.
        """
        if str(node.target) not in REGIONS:
            raise TraceError(
                f"Cannot use {node.target} at {place_of(node)}: control flow inside the graph is not supported. "
                "Compute both branches and select with torch.where."
            )
        where = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
        region = getattr(node.graph.owning_module, str(node.args[where].target))  # type: ignore[union-attr]
        arguments = [self.resolve(a) for a in node.args[where + 1 :]]
        if str(node.target) == "wrap_with_set_grad_enabled" and not node.args[0]:
            arguments = [self.detached(node, a) for a in arguments]
        self.result |= dict(zip(region.graph.find_nodes(op="placeholder"), arguments, strict=True))
        outside = self.read_outside, self.regions
        self.read_outside = self.read_outside | {
            name for n, use in alive.items() if use > position and (name := self.name_of(n))
        }
        if str(node.target) == "wrap_with_autocast":
            self.cast_weights = self.cast_weights if self.regions else {}
            self.regions += (AutocastRegion(*node.args[:3]),)  # type: ignore[arg-type]
        outputs = self.run(region.graph)
        self.read_outside, self.regions = outside
        if isinstance(outputs, tuple):
            return tuple(self.undetached.get(o.name, o) if isinstance(o, Ref) else o for o in outputs)
        return outputs

    def detached(self, node: fx.Node, argument: Any) -> Any:
        """The argument without its autograd history: a ``detach`` of it if it requires a gradient."""
        if not isinstance(argument, Ref) or not self.values[argument.name].requires_grad:
            return argument
        result = self.record(node, torch.ops.aten.detach.default, (argument,), (), self.values[argument.name])
        self.undetached[result.name] = argument
        return result

    # -- one operation -----------------------------------------------------------------------------------------

    def add(self, node: fx.Node, target: OpOverload, args: tuple, alive: dict[fx.Node, int], position: int) -> Any:
        """Record an operation; in place only if another name of the memory that it writes is read later."""
        kwargs = tuple((k, self.resolve(v)) for k, v in node.kwargs.items())
        if any(region.enabled for region in self.regions):
            args, kwargs = self.cast(node, target, args, kwargs)
        given = dict(zip((a.name for a in target._schema.arguments), args)) | dict(kwargs)
        updated = tuple(given.get(name) for name in written_arguments(target))
        written = list(refs(updated))
        if not written:
            return self.record(node, target, args, kwargs, node.meta.get("val"))
        # A list of tensors, as of torch._foreach_lerp_, has no counterpart that returns one tensor.
        functional = None if any(isinstance(argument, tuple) for argument in updated) else out_of_place(target)
        if len(written) == 1 and functional is not None and not self.read_elsewhere(written[0], alive, position):
            result = self.functional(node, target, functional, args, kwargs)
            self.latest[written[0]] = result.name
            return result
        return self.update(node, target, args, kwargs, written)

    def functional(self, node: fx.Node, target: OpOverload, functional: OpOverload, args: tuple, kwargs: tuple) -> Ref:
        """Record the out-of-place counterpart of an in-place operation; its result has the updated value's dtype."""
        val, missing = node.meta["val"], missing_defaults(target, functional, args, kwargs)
        made = result_dtype(node, functional, dict(missing))
        result = self.record(node, functional, args, kwargs + missing, replace(value_of("", val), dtype=made))
        if made == dtype_name(val.dtype):
            return result
        return self.record(node, CAST, (result, val.dtype), (), val)

    def cast(self, node: fx.Node, target: OpOverload, args: tuple, kwargs: tuple) -> tuple[tuple, tuple]:
        """The arguments after autocast's casts; a trainable weight is cast once per outermost region."""
        casts = casts_of(node, target, self.regions)
        if casts is None:
            raise TraceError(
                f"Cannot write {short_name(target)} at {place_of(node)} without autocast: its inputs stay as they are "
                "while autocast casts what is made of them inside. Put it in a region of its own with "
                "torch.autocast(..., enabled=False), and cast its inputs there, or write out what it is made of."
            )
        wanted = {self.name_of(read): cast for read, cast in casts.items()}

        def converted(argument: Any) -> Any:
            if isinstance(argument, tuple):
                return tuple(converted(a) for a in argument)
            if not isinstance(argument, Ref) or argument.name not in wanted:
                return argument
            value, cast = self.values[argument.name], wanted[argument.name]
            if value.dtype == dtype_name(cast.dtype):
                return argument
            key = argument.name, cast.dtype
            if cast.shared and key in self.cast_weights:
                return self.cast_weights[key]
            result = self.record(node, CAST, (argument, cast.dtype), (), replace(value, dtype=dtype_name(cast.dtype)))
            if cast.shared and argument.name in self.weights and value.requires_grad:
                self.cast_weights[key] = result
            return result

        return converted(args), tuple((k, converted(v)) for k, v in kwargs)

    def record(self, node: fx.Node, target: OpOverload, args: tuple, kwargs: tuple, val: Any) -> Any:
        """Append an operation that returns new tensors; returns what its users read."""
        name = self.fresh(node, target)
        outputs, result = values_of(name, val)
        if self.records_gradient(args, kwargs) and target._schema.name not in UNTRACKED:
            outputs = tuple(replace(v, requires_grad=v.dtype in DIFFERENTIABLE) for v in outputs)
        statistics = tuple(self.root_of(s) for s in updated_statistics(target, args))
        self.append(node, name, target, args, kwargs, outputs, statistics)
        for i in aliased_arguments(target):
            for source in refs(args[i] if i < len(args) else ()):
                for value in outputs:
                    self.root[value.name] = self.root_of(source)
                    self.aliases[self.root_of(source)].add(value.name)
        return result

    def update(self, node: fx.Node, target: OpOverload, args: tuple, kwargs: tuple, written: list[str]) -> Any:
        """Append an in-place operation; returns the old name, under which its users read the updated value."""
        roots = tuple(dict.fromkeys(self.root_of(w) for w in written))
        self.append(node, self.fresh(node, target), target, args, kwargs, (), roots)
        if self.records_gradient(args, kwargs):
            for name in {alias for root in roots for alias in (root, *self.aliases[root])} - self.weights:
                self.values[name] = replace(self.values[name], requires_grad=True)
        return Ref(written[0])

    def records_gradient(self, args: tuple, kwargs: tuple) -> bool:
        """Whether autograd records an operation with these arguments."""
        return any(self.values[name].requires_grad for name in refs((args, tuple(v for _, v in kwargs))))

    def append(
        self, node: fx.Node, name: str, target: OpOverload, args: tuple, kwargs: tuple, outputs: tuple, updated: tuple
    ) -> None:
        mutates = tuple(root for root in updated if root in self.weights)
        module, source = module_of(node), source_of(node)
        self.ops.append(Op(name, str(target), args, kwargs, outputs, module, source, mutates, autocast=self.autocast))
        self.values |= {value.name: value for value in outputs}
        self.updated_until |= dict.fromkeys(updated, len(self.ops) - 1)

    def read_elsewhere(self, written: str, alive: dict[fx.Node, int], position: int) -> bool:
        """Whether the memory of ``written`` is a weight's, or is read later under another name."""
        root = self.root_of(written)
        others = ({root} | self.aliases[root]) - {written}
        if root in self.weights or others & self.read_outside or written in self.undetached:
            return True
        return any(use > position and self.name_of(n) in others for n, use in alive.items())

    # -- names -------------------------------------------------------------------------------------------------

    def resolve(self, argument: Any) -> Any:
        """An fx argument as plain data."""
        if isinstance(argument, fx.Node):
            result = self.result[argument]
            return self.resolve(result) if isinstance(result, tuple) else self.current(result)
        if isinstance(argument, Ref):
            return self.current(argument)
        if isinstance(argument, list | tuple):
            return tuple(self.resolve(a) for a in argument)
        if isinstance(argument, torch.device):
            return LocalDevice()
        if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise TraceError(
                f"Size {argument} depends on tensor values; autopar needs sizes that follow from the inputs'."
            )
        return argument

    def current(self, ref: Any) -> Any:
        """The reference to the latest version of a value that out-of-place updates replaced."""
        while isinstance(ref, Ref) and ref.name in self.latest:
            ref = Ref(self.latest[ref.name])
        return ref

    def name_of(self, node: fx.Node) -> str | None:
        """Name of a node's value; None if it has several or none."""
        result = self.current(self.result.get(node))
        return result.name if isinstance(result, Ref) else None

    def root_of(self, name: str) -> str:
        """Name of the value or weight whose memory a value shares."""
        return self.root.get(name, name)

    def fresh(self, node: fx.Node, target: OpOverload) -> str:
        """A new operation's name: module path and operation, with a number if that is taken."""
        module = module_of(node)
        name = f"{module}.{short_name(target)}" if module else short_name(target)
        unique = unused_name(name, self.names)
        self.names.add(unique)
        return unique

    def final_ops(self) -> list[Op]:
        """The operations, with ``requires_grad`` of their outputs as in-place updates left it."""
        return [replace(op, outputs=tuple(self.values[v.name] for v in op.outputs)) for op in self.ops]

    def colocated(self) -> Iterable[tuple[str, ...]]:
        """Names of the operations that touch the same updated memory, up to its last update; one tuple per storage."""
        touching: defaultdict[str, list[int]] = defaultdict(list)  # positions of the operations that touch a name
        for i, op in enumerate(self.ops):
            for name in {*op.reads, *op.mutates, *(v.name for v in op.outputs)}:
                touching[name].append(i)
        for root, last in self.updated_until.items():
            found = {i for name in {root} | self.aliases[root] for i in touching[name]}
            names = tuple(self.ops[i].name for i in sorted(found) if i <= last or root in self.weights)
            if len(names) > 1:
                yield names
        # The update of a counter reads no activation; it belongs to the stage of its module's other operations.
        for i, op in enumerate(self.ops):
            if op.mutates and not op.outputs and set(op.reads) <= self.weights:
                later = self.ops[i + 1 :]
                neighbour = next((other for other in later if other.module == op.module and other.outputs), None)
                if neighbour is not None:
                    yield (op.name, neighbour.name)


def updated_statistics(target: OpOverload, args: tuple) -> tuple[str, ...]:
    """Names of the running statistics that a norm updates."""
    positions, flag = STATISTICS.get(str(target), ((), 0))
    if not positions or not args[flag]:
        return ()
    return tuple(args[i].name for i in positions if isinstance(args[i], Ref))


def is_identity(target: OpOverload, args: tuple) -> bool:
    """Whether an operation returns its first argument unchanged: an alias, a copy onto itself, inactive dropout."""
    if target is torch.ops.aten.alias.default:
        return True
    if target is torch.ops.aten.copy_.default:
        return args[0] == args[1]
    return target._schema.name.removesuffix("_") in DROPOUTS and (args[1] == 0 or not args[2])


def result_dtype(node: fx.Node, target: OpOverload, more: dict[str, Any]) -> str:
    """Dtype of an operator's result for a node's arguments, found by running it on their fake tensors."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    with torch.no_grad():
        return dtype_name(target(*args, **kwargs, **more).dtype)


def values_of(name: str, val: Any) -> tuple[tuple[Value, ...], Any]:
    """The output values of an operation, and what its users read: a reference, a tuple of references, or None.

    Args:
        val: the node's result: a tensor, a `Value`, a list of tensors and None, or no tensor.
    """
    if isinstance(val, list | tuple):
        names = [f"{name}:{i}" if isinstance(v, torch.Tensor) else None for i, v in enumerate(val)]
        values = tuple(value_of(n, v) for n, v in zip(names, val, strict=True) if n is not None)
        return values, tuple(Ref(n) if n is not None else None for n in names)
    if isinstance(val, torch.Tensor):
        val = value_of(name, val)
    if isinstance(val, Value):
        return (replace(val, name=name, requires_grad=False),), Ref(name)
    return (), None


def value_of(name: str, tensor: torch.Tensor) -> Value:
    """The value of a tensor under a name: shape, dtype and strides.

    ``requires_grad`` is not read: torch.export loses it in graphs with a no_grad region.
    """
    return Value(name, tuple(tensor.shape), dtype_name(tensor.dtype), tuple(tensor.stride()))


def short_name(target: OpOverload) -> str:
    """``linear`` for ``aten.linear.default``."""
    return target._schema.name.split("::")[-1].rstrip("_")


def module_of(node: fx.Node) -> str:
    """Path of the user's module that a node belongs to; repeated calls of one module have the same path."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return re.sub(r"@\d+", "", next(reversed(stack.values()))[0])


def place_of(node: fx.Node) -> str:
    """Source of a node, as text for messages."""
    return source_of(node) or "an unknown line"


def source_of(node: fx.Node) -> str:
    """``file:line: code`` of the innermost frame of the user's model."""
    lines = node.meta.get("stack_trace") or ""
    frames = [m for m in FRAME.finditer(lines) if not is_internal(m[1])]
    if not frames:
        return ""
    code = lines[frames[-1].end() :].split("\n", 1)[0].strip()
    return f"{frames[-1][1]}:{frames[-1][2]}: {code}"

"""How a value of the whole batch follows from its values in the microbatches, proven by the graphs of both.

Operations have the same names at any batch size, so both graphs are walked together. The rules say where the samples
lie after an operation, the shapes and numbers in both graphs say whether it treats the microbatch as it treats the
batch. What neither shows is `UNKNOWN`.

Error: two things are assumed. An operator of the user's keeps the samples in their dim if only that dim grows and no
argument names it (`by_shape`); one that mixes samples without saying so is not noticed. And no class index is -100
where a mean over one index per sample ignores it (`loss`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from autopar.ir.graph import Graph, Op, Ref, Value, refs
from autopar.ir.layout import TP, Layout, Split
from autopar.ops.registry import memory_of, named_arguments, operator, returns_view
from autopar.sharding.lookup import key_of, rule_of
from autopar.sharding.rule import factor_layout, factor_of, has_letter, label_of_layout
from autopar.sharding.table import DRAWN, RESHAPES

FIRST = Split(0)


@dataclass(frozen=True)
class Join:
    """How a value of the batch follows from the values of its microbatches.

    Args:
        kind: "same": the microbatches' values are equal, and the batch's too. "concatenate": along ``split``. "sum".
            "mean": weighted by samples. "index": 0, 1, … for the samples, which cannot be joined.
        split: place of the samples, if they are concatenated.
        op: of an unknown value: the operation behind which the samples could not be followed, and its line of code.
    """

    kind: Literal["same", "concatenate", "sum", "mean", "index", "unknown"]
    split: Split = FIRST
    op: str = ""


SAME, SUM, MEAN, INDEX, UNKNOWN = Join("same"), Join("sum"), Join("mean"), Join("index"), Join("unknown")
ROWS = Join("concatenate")

# Arguments that may differ between the graphs: they are sizes, and the shapes of operands and results prove them.
SIZES = {"size", "sizes", "shape", "repeats", "groups", "start", "end", "length"}
PARTS = {"slice.Tensor", "narrow"}  # of these only if the part is the whole dim
# Results have equal elements, or are copies of an operand without samples: all samples have equal parts.
UNIFORM = {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "expand", "repeat"}
# Rules keep their samples whole for the sake of tensor parallelism, although each sample is computed alone. Statistics
# of batch norm in training are those of a microbatch, by definition of a microbatch.
BY_SAMPLE = {"batch_norm", "instance_norm", "embedding", "dropout", *DRAWN.split()}
STATEFUL = {"batch_norm", "instance_norm"}
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
# Losses of elements, of which "mean" divides by the number of elements.
ELEMENT_LOSSES = {
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
}  # fmt: skip
CLASS_LOSSES = {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"}
NONE, AVERAGE, TOTAL = range(3)  # values of the argument ``reduction``
UNUSED = -100  # torch's default of ``ignore_index``
# Functions f with f(a + b) = f(a) + f(b) of all operands together.
ADDITIVE = {
    *RESHAPES.split(), "add", "sub", "neg", "clone", "detach", "alias", "contiguous", "to.dtype", "_to_copy",
    "to.dtype_layout", "sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "permute", "transpose.int", "t",
    "select.int", "slice.Tensor", "unbind.int", "stack", "cat", "expand", "flip", "roll", "split.Tensor", "chunk",
    "rsub",
}  # fmt: skip
MOVING = {
    *RESHAPES.split(), "expand", "permute", "transpose.int", "clone", "detach", "contiguous", "to.dtype",
    "lift_fresh_copy",
}  # fmt: skip
SCALING = {"mul", "div", "true_divide"}
# Linear in the first operand; with a bias only a mean stays a mean.
PRODUCTS = {"linear", "matmul", "mm", "mv"}
# Operations of torch that have no rule, and no argument that names a dim, but compute each sample alone. Those that
# compute each element alone are known by their tag, except for names that torch has as aliases.
WITHIN_SAMPLES = {
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "addmv", "affine_grid_generator", "bilinear",
    "broadcast_tensors", "bucketize", "cdist", "column_stack", "dstack", "fractional_max_pool2d",
    "fractional_max_pool3d", "hstack", "inner", "linear", "max_unpool3d", "outer", "pairwise_distance", "searchsorted",
    "stft", "vander",
    "absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "divide", "fix", "greater",
    "greater_equal", "imag", "isclose", "isfinite", "isreal", "less", "less_equal", "multiply", "negative", "not_equal",
    "real", "subtract",
}  # fmt: skip
# Functions of matrices, the last two dims, as torch.linalg's.
OF_MATRICES = {"cholesky", "det", "inverse", "logdet", "matrix_exp", "matrix_power", "pinverse", "slogdet"}
# Operations without a rule that have an argument for dims and mix others too.
ACROSS_DIMS = {"index_put", "linalg_tensorinv", "linalg_tensorsolve", "put", "renorm", "take"}
# Those whose second operand is the same for all samples: indices into a dim, or a set.
BY_INDEX = {"index_add", "index_copy", "index_fill", "index_reduce", "isin"}
CONTINUOUS = ("float", "bfloat", "complex")


def joins(whole: Graph, part: Graph) -> Mapping[str, Join]:
    """For every input, weight and value of the batch's graph, how it follows from those of the microbatches.

    Args:
        whole: graph of the batch.
        part: graph of a microbatch.
    """
    found = dict(JoinAnalysis(whole.as_traced, part.as_traced).follow())
    for op in whole.ops:
        if op.is_layout_copy:
            found |= dict.fromkeys((value.name for value in op.outputs), found[op.reads[0]])
    return found


def may_mix_samples(graph: Graph) -> bool:
    """Whether an output seems to mix samples other than by a sum or a mean over them, judged from one graph.

    Error: one graph does not show which sizes grow with the batch, so it errs both ways. `joins` compares two graphs.
    """
    traced = graph.as_traced
    found = OneGraphAnalysis(traced, traced).follow()
    return any(found[output.name].kind == "unknown" for output in traced.outputs if isinstance(output, Ref))


class JoinAnalysis:
    """Walks the graphs of a batch and of one of its microbatches, operation by operation."""

    def __init__(self, whole: Graph, part: Graph) -> None:
        self.whole, self.part = whole, part
        self.batch, self.samples = whole.batch, part.batch
        self.ops = {op.name: op for op in part.ops}
        self.joins: dict[str, Join] = {}

    def follow(self) -> Mapping[str, Join]:
        for weight in self.whole.weights:
            constants = (graph.constants.get(weight.name) for graph in (self.whole, self.part))
            different = replace(UNKNOWN, op=f"{weight.name}, a tensor in its code that depends on the batch")
            self.joins[weight.name] = self.constant(*constants) or different
        for value in self.whole.inputs:
            join = ROWS if self.grows(value) else SAME
            self.joins[value.name] = self.checked(join, value, self.part.values.get(value.name), value.name)
        for op in self.whole.ops:
            if op.outputs:
                self.joins |= zip((value.name for value in op.outputs), self.results(op, self.ops.get(op.name)))
            else:
                self.update(op)
        for op in self.whole.ops:  # a buffer that was updated once for each microbatch
            self.joins |= dict.fromkeys(op.mutates, replace(UNKNOWN, op=op.name))
        return self.joins

    def constant(self, ours: torch.Tensor | None, theirs: torch.Tensor | None) -> Join | None:
        """How a weight or a tensor in the model's code is joined; None if it depends on the batch otherwise."""
        if ours is None or theirs is None:
            return SAME if ours is theirs else None
        if ours.is_meta:
            return SAME if ours.shape == theirs.shape else None
        sizes, both = (self.batch, self.samples), (ours, theirs)
        if tuple(t.numel() for t in both) == sizes and all(map(is_arange, both)):
            return INDEX
        if ours.shape == theirs.shape:
            return SAME if torch.equal(ours, theirs) else None
        for dim in range(min(ours.ndim, theirs.ndim)):
            one = theirs.narrow(dim, 0, 1)
            if tuple(t.shape[dim] for t in both) == sizes and all(torch.equal(one.expand_as(t), t) for t in both):
                return Join("concatenate", Split(dim))  # of equal parts for all samples
        return None

    def grows(self, value: Value) -> bool:
        """Whether an input has a row per sample."""
        return self.part.shapes.get(value.name) != value.shape

    def update(self, op: Op) -> None:
        """Follow an in-place operation: all that shares the memory is lost, unless it stays joined as it was.

        In training, weights stay what they are to their readers: each microbatch updates and reads them, as it does
        the statistics of batch norm.
        """
        training, twin = self.whole.mode == "train", self.ops.get(op.name)
        functional = out_of_place(op, self.whole)
        after = replace(UNKNOWN, op=place(op))
        if functional is not None and not (op.mutates and not training):
            (join,) = self.results(functional, twin and out_of_place(twin, self.part))
            if join.kind != "unknown" and join == self.joins[op.args[0].name]:
                return
            after = join if join.kind == "unknown" else after
        sharing = {name for names in self.whole.colocated if op.name in names for name in names}
        lost = {value.name for o in self.whole.ops if o.name in sharing and returns_view(o) for value in o.outputs}
        written = {memory_of(self.whole, name) for name in refs(op.args[0])}
        lost |= {*written, *op.mutates} - set(op.mutates if training else ())
        self.joins |= dict.fromkeys(lost & self.joins.keys(), after)

    # -- one operation ---------------------------------------------------------------------------------------------

    def results(self, op: Op, twin: Op | None) -> Sequence[Join]:
        """How each output of an operation is joined; ``twin`` is the operation in the microbatch's graph."""
        lost = replace(UNKNOWN, op=place(op))
        if twin is None or twin.target != op.target or twin.reads != op.reads or len(twin.outputs) != len(op.outputs):
            return [lost] * len(op.outputs)
        earlier = next((self.joins[name] for name in self.read(op) if self.joins[name].kind == "unknown"), None)
        found = self.candidates(op, twin) if earlier is None else [earlier] * len(op.outputs)
        return [self.checked(*row, place(op)) for row in zip(found, op.outputs, twin.outputs, strict=True)]

    def checked(self, join: Join, value: Value, twin: Value | None, where: str) -> Join:
        """The join, if the shapes and dtypes of the value in both graphs agree with it."""
        shape = list(value.shape)
        if join.kind in ("concatenate", "index"):
            split = join.split
            if split.dim >= len(shape) or shape[split.dim] % (split.outer * self.batch):
                return replace(UNKNOWN, op=where)
            shape[split.dim] = shape[split.dim] // self.batch * self.samples
        if join.kind == "unknown" or twin is None or twin.dtype != value.dtype or list(twin.shape) != shape:
            return join if join.kind == "unknown" and join.op else replace(UNKNOWN, op=where)
        return join

    def read(self, op: Op) -> tuple[str, ...]:
        """Names of the operands whose values matter."""
        key = key_of(op.target) or ""
        if key in STATEFUL:
            return op.reads[:1]
        return () if key.startswith("new_") else op.reads

    def candidates(self, op: Op, twin: Op) -> Sequence[Join]:
        """How each output is joined, before its shapes are compared."""
        read = {name: self.joins[name] for name in self.read(op)}
        kinds = {join.kind for join in read.values()}
        key, arguments, others = key_of(op.target) or base(op.target), named_arguments(op), named_arguments(twin)
        differ = {name for name in arguments if text(arguments[name]) != text(others[name])}
        if key == "autopar.uniform" and arguments["sample_dim"] < 0:
            return [SAME]  # of the counters it reads only the seed
        if kinds <= {"same"}:
            if not differ:
                return [SAME] * len(op.outputs)
            if base(op.target) == "arange" and op.args == (self.batch,) and twin.args == (self.samples,):
                return [INDEX]
            return [self.uniform(op, twin) if key in UNIFORM and differ <= SIZES else UNKNOWN] * len(op.outputs)
        if "index" in kinds:
            if key == "index.Tensor" or key not in MOVING or not differ <= SIZES:
                return [self.looked_up(op, read) if key == "index.Tensor" else UNKNOWN] * len(op.outputs)
            moved = self.by_rule(key, op, {name: replace(join, kind="concatenate") for name, join in read.items()})
            return [replace(join, kind="index") if join.kind == "concatenate" else join for join in moved]
        if kinds & {"sum", "mean"}:
            return [self.linear(key, op, twin, kinds, bool(differ))] * len(op.outputs)
        cut = key in PARTS and op.outputs[0].shape != self.whole.shapes[op.reads[0]]
        if differ and (cut or not differ <= SIZES):
            return [UNKNOWN] * len(op.outputs)
        if base(op.target) in RECURRENT:
            return self.recurrent(op, arguments)
        if "reduction" in arguments:
            return [self.loss(key, op, arguments)]
        if key.partition(".")[0] == "mean":
            (split,) = (join.split for join in read.values())
            dims = arguments.get("dim") or range(len(self.whole.shapes[op.reads[0]]))
            if split.dim in {dim % len(self.whole.shapes[op.reads[0]]) for dim in dims}:
                return [MEAN]
        return self.by_rule(key, op, read)

    def uniform(self, op: Op, twin: Op) -> Join:
        """A tensor of equal parts for all samples."""
        ours, theirs = op.outputs[0].shape, twin.outputs[0].shape
        grown = [dim for dim, (size, other) in enumerate(zip(ours, theirs)) if size != other]
        return Join("concatenate", Split(grown[0])) if len(grown) == 1 else UNKNOWN

    def by_rule(self, key: str, op: Op, read: Mapping[str, Join]) -> Sequence[Join]:
        """The joins that the operation's rule gives, read as a split of the samples."""
        unknown = [UNKNOWN] * len(op.outputs)
        rule = rule_of(op, self.whole.shapes.__getitem__)
        if rule is None:
            return self.by_shape(op, read)
        labels = set()
        operands = dict(zip(op.reads, rule.operands, strict=True))
        for name, join in read.items():
            if join.kind == "concatenate":
                label = label_of_layout(rule, operands[name], Layout((join.split,)), self.batch)
                labels.add(factor_of(label) if label else None)
        labels = {label for label in labels if label is None or label.letter not in rule.unread}
        if not labels:
            return [SAME] * len(op.outputs)
        label = labels.pop()
        if labels or label is None:
            return unknown
        letter = label.letter
        if any(read[name].kind == "same" and has_letter(operands[name], letter) for name in read):
            return unknown
        if not has_letter(rule.outputs[0], letter):
            return [SUM] if letter in rule.free and not rule.added and len(op.outputs) == 1 else unknown
        if letter in rule.whole and key not in BY_SAMPLE:
            return unknown
        layouts = (factor_layout(rule, dims, label, TP) for dims in rule.outputs)
        return [Join("concatenate", layout.splits[0]) for layout in layouts]

    def by_shape(self, op: Op, read: Mapping[str, Join]) -> Sequence[Join]:
        """The joins of an operation without a rule: samples stay in their dim if no argument names that dim."""
        unknown = [UNKNOWN] * len(op.outputs)
        splits = {(name, join.split) for name, join in read.items() if join.kind == "concatenate"}
        dims = {split.dim for _, split in splits}
        if len(dims) > 1 or any(self.whole.shapes[name][split.dim] != self.batch for name, split in splits):
            return unknown
        (dim,) = dims
        name = base(op.target)
        if name in ACROSS_DIMS or ("scatter" in name and any(join == SAME for join in read.values())):
            return unknown
        if name in BY_INDEX and [read[second] for second in op.reads[1:2]] != [SAME]:
            return unknown
        ranks = {len(self.whole.shapes[name]) for name, _ in splits}
        names_other_dims = False
        for argument, given in named_arguments(op).items():
            if argument.startswith(("dim", "axis", "axes")):
                named = given if isinstance(given, tuple | list) else (given,)
                if any(not isinstance(d, int) or d % rank == dim for d in named for rank in ranks):
                    return unknown
                names_other_dims |= bool(named)
        alone = torch.Tag.pointwise in operator(op.target).tags or not op.target.startswith("aten.")
        alone |= name.startswith("special_") or name in WITHIN_SAMPLES | BY_INDEX
        of_matrices = (name in OF_MATRICES or name.startswith("linalg_")) and dim < min(ranks) - 2
        if not (names_other_dims or alone or of_matrices):
            return unknown
        grows = all(dim < len(value.shape) and value.shape[dim] == self.batch for value in op.outputs)
        return [Join("concatenate", Split(dim))] * len(op.outputs) if grows else unknown

    def looked_up(self, op: Op, read: Mapping[str, Join]) -> Join:
        """Elements of each sample: ``x[torch.arange(len(x)), i]``, with indices that are broadcast together."""
        values, indices = op.args[0].name, dict(enumerate(op.args[1]))
        by_dim = {dim: index.name for dim, index in indices.items() if isinstance(index, Ref)}
        shapes = {dim: self.whole.shapes[name] for dim, name in by_dim.items()}
        samples = [dim for dim, name in by_dim.items() if read[name].kind == "index"]
        if [read[values]] != [Join("concatenate", Split(dim)) for dim in samples]:
            return UNKNOWN

        def from_end(dim: int) -> int:
            return read[by_dim[dim]].split.dim - len(shapes[dim])

        position = from_end(samples[0])
        for dim, name in by_dim.items():
            copied = read[name] == SAME and (len(shapes[dim]) < -position or shapes[dim][position] == 1)
            alike = read[name] != SAME and from_end(dim) == position and shapes[dim][position] == self.batch
            if not copied and not alike:
                return UNKNOWN
        at, rank = list(by_dim), max(map(len, shapes.values()))
        first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
        return Join("concatenate", Split(first + rank + position))

    def recurrent(self, op: Op, arguments: Mapping[str, Any]) -> Sequence[Join]:
        """Outputs of LSTM, GRU and RNN: those of all steps, then the last states, [layers, samples, ...]."""
        states = Join("concatenate", Split(1))
        batched = ROWS if arguments["batch_first"] else states
        given = [self.joins[name] for name in refs(arguments["hx"])]
        fits = self.joins[arguments["input"].name] == batched and all(join == states for join in given)
        return [batched, *[states] * (len(op.outputs) - 1)] if fits else [UNKNOWN] * len(op.outputs)

    def loss(self, key: str, op: Op, arguments: Mapping[str, Any]) -> Join:
        """A loss of elements or classes.

        A mean over class indices divides by the weights of those that are not ``ignore_index``, a number that is known
        only when it runs. It is the mean over samples where each has one index, classes have no weights and
        ``ignore_index`` is torch's default, which classification does not use.
        """
        read = {name: self.joins[name] for name in op.reads}
        first = op.args[0].name
        reduction = arguments["reduction"]
        splits = {join.split for join in read.values() if join.kind == "concatenate"}
        if key in CLASS_LOSSES:
            probabilities = self.whole.shapes[op.args[1].name] == self.whole.shapes[first]
            if splits != {Split(0)} or self.whole.shapes[first][0] % self.batch or len(self.whole.shapes[first]) < 2:
                return UNKNOWN
            labels = math.prod(self.whole.shapes[op.args[1].name]) == self.batch and arguments["ignore_index"] == UNUSED
            if reduction == AVERAGE and (arguments["weight"] is not None or not (probabilities or labels)):
                return UNKNOWN
        elif key not in ELEMENT_LOSSES or len({self.whole.shapes[n] for n in read if read[n] != SAME}) > 1:
            return UNKNOWN
        if len(splits) != 1:
            return UNKNOWN
        return {NONE: Join("concatenate", splits.pop()), AVERAGE: MEAN, TOTAL: SUM}[reduction]

    def linear(self, key: str, op: Op, twin: Op, kinds: set[str], differ: bool) -> Join:
        """A linear function of sums, or an affine function of means."""
        read = [self.joins[name].kind for name in refs((op.args, tuple(value for _, value in op.kwargs)))]
        name = key.partition(".")[0]
        join = MEAN if kinds <= {"mean", "same"} else SUM
        continuous = all(value.dtype.startswith(CONTINUOUS) for value in op.outputs)
        if not continuous and any(self.whole.readable[n].dtype.startswith(CONTINUOUS) for n in op.reads):
            return UNKNOWN  # rounded
        if "concatenate" in kinds or {"sum", "mean"} <= kinds or named_arguments(op).get("rounding_mode"):
            return UNKNOWN
        one_factor = read.count("same") == len(read) - 1
        if name in SCALING:
            if not one_factor or (name != "mul" and read[0] == "same"):
                return UNKNOWN
            return self.scaled(join, name, op, twin) if differ else join
        if differ:
            return UNKNOWN
        if name in PRODUCTS:
            return join if one_factor and (join == MEAN or len(read) == 2) else UNKNOWN
        if key not in ADDITIVE and name not in ADDITIVE:
            return UNKNOWN
        summand = name in ("add", "sub", "rsub") and not isinstance(op.args[1], Ref) and op.args[1] != 0
        return join if join == MEAN or not (summand or "same" in kinds) else UNKNOWN

    def scaled(self, join: Join, name: str, op: Op, twin: Op) -> Join:
        """A sum divided by the number of samples is a mean, and the reverse."""
        ours, theirs = (next((a for a in o.args[1:2] if isinstance(a, int | float)), 0.0) for o in (op, twin))
        if not ours or not theirs:
            return UNKNOWN
        ratio = theirs / ours if name != "mul" else ours / theirs  # of the factors, the batch's by the microbatch's
        if join == SUM and math.isclose(ratio, self.samples / self.batch):
            return MEAN
        return SUM if join == MEAN and math.isclose(ratio, self.batch / self.samples) else UNKNOWN


class OneGraphAnalysis(JoinAnalysis):
    """As `JoinAnalysis`, with the microbatch's graph as the batch's: dims of as many elements as samples hold these."""

    def grows(self, value: Value) -> bool:
        return value.shape[:1] == (self.batch,)

    def candidates(self, op: Op, twin: Op) -> Sequence[Join]:
        key = key_of(op.target) or base(op.target)
        if key in UNIFORM and all(self.joins[name] == SAME for name in self.read(op)):
            grown = [dim for dim, size in enumerate(op.outputs[0].shape) if size == self.batch]
            return [Join("concatenate", Split(grown[0])) if len(grown) == 1 else SAME]
        return super().candidates(op, twin)


def is_arange(tensor: torch.Tensor) -> bool:
    """Whether a tensor is [0, 1, 2, …]."""
    return torch.equal(tensor, torch.arange(tensor.numel(), device=tensor.device))


def out_of_place(op: Op, graph: Graph) -> Op | None:
    """An operation that returns what an in-place one writes into its first argument; None if there is none."""
    name, _, overload = op.target.rpartition(".")
    if not name.endswith("_") or not isinstance(op.args[0], Ref):
        return None
    target = f"{name[:-1]}.{overload}"
    try:
        operator(target)
    except AttributeError:
        return None
    return replace(op, target=target, outputs=(graph.readable[op.args[0].name],), mutates=())


def text(argument: Any) -> str:
    """An argument as text; a list of the schema's defaults is the tuple that a call passes."""
    return repr(tuple(argument) if isinstance(argument, list) else argument)


def base(target: str) -> str:
    """``topk`` for ``aten.topk.default``."""
    return target.split(".")[1]


def place(op: Op) -> str:
    """An operation's name and line of code."""
    return f"{op.name} ({op.source})" if op.source else op.name

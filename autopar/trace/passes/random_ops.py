"""Counter-based random numbers: random operations draw the same numbers under every plan.

Each random operation becomes ordinary operations around ``autopar.uniform`` (`autopar.ops.counter_rng`). That operator
computes numbers from (seed, update, operation, sample, element) and reads the counters of the samples from a further
input of the graph. An operation without such a form is left. It draws from the generator of the rank that runs it, and
`autopar.PlanDependentRandomWarning` names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.graph import Graph, LocalDevice, Op, Ref, Value
from autopar.ops.registry import named_arguments, operator
from autopar.sharding.batch_dim import sample_dims
from autopar.sharding.lookup import rule_of
from autopar.trace.passes.rewrite import Expansion
from autopar.trace.trace import live_ops

RNG_COUNTERS = "autopar.draws"  # name of the input with the counters, [samples, 4] of int64
MAX_CHOICES = 1 << 16  # integers to draw from 24 random bits: their probabilities differ by at most 0.4 %
SELU_LIMIT = 1.7580993408473766  # minus the limit of SELU for ever smaller numbers
PROBABILITIES, FLAGS = ("p", "dropout_p", "dropout"), ("train", "training")


class NoFormError(Exception):
    """A random operation has no plan-invariant form with these arguments."""


@dataclass(frozen=True)
class SamplePlace:
    """Place of the samples in a tensor: dim ``dim`` has size outer · samples · rest. Negative: it has no sample dim."""

    dim: int = -1
    outer: int = 1


@dataclass
class RandomCall:
    """One random operation while it is rewritten: its replacements, arguments, result, and the place of its samples."""

    into: Expansion
    arguments: Mapping[str, Any]
    result: Value
    samples: SamplePlace

    def uniform(self, shape: tuple[int, ...]) -> Ref:
        """Add uniform float32 numbers in [0, 1), different ones for each sample.

        Args:
            shape: shape to draw, with the same samples as the result in the same dim.
        Raises:
            NoFormError: the samples are elsewhere in this shape, or the result is complex.
        """
        dim = self.samples.dim
        elsewhere = dim >= 0 and (dim >= len(shape) or shape[dim] != self.result.shape[dim])
        if elsewhere or self.result.dtype.startswith("complex"):
            raise NoFormError
        name = self.into.fresh(f"{self.into.op.name}.uniform")
        args = (Ref(RNG_COUNTERS), tuple(shape), name, dim, self.samples.outer)
        return self.into.append(name, "autopar.uniform.default", args, {})

    def add(self, target: str, *args: Any) -> Ref:
        """Add an ATen operation with one output."""
        return self.into.add(f"aten.{target}", *args)

    @property
    def operand(self) -> Any:
        """The first argument, whose name differs between operations."""
        return next(iter(self.arguments.values()))

    def shape(self, x: Ref) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.into.value(x).shape

    def cast(self, x: Ref) -> Ref:
        """A tensor cast to the dtype of the result."""
        dtype = self.result.dtype
        return x if self.into.value(x).dtype == dtype else self.add("to.dtype", x, getattr(torch, dtype))

    def scaled(self, x: Ref, factor: Any, summand: Any) -> Ref:
        """x · factor + summand in the dtype of the result; factor and summand are numbers or tensors."""
        for target, other, idle in (("mul", factor, 1.0), ("add", summand, 0.0)):
            if other != idle:
                x = self.add(f"{target}.{'Tensor' if isinstance(other, Ref) else 'Scalar'}", x, other)
        return self.cast(x)


# -- the form of each operation --------------------------------------------------------------------------------------


def dropout(d: RandomCall) -> Ref:
    """x or 0, scaled to keep the mean. The backward saves only the mask, one byte per element."""
    return drop_by_mask(d, d.operand, d.arguments["p"], d.shape(d.operand))


def feature_dropout(d: RandomCall) -> Ref:
    """As `dropout`, but drops whole channels."""
    return drop_by_mask(d, d.operand, d.arguments["p"], channels(d.shape(d.operand)))


def drop_by_mask(d: RandomCall, x: Ref, p: float, mask: tuple[int, ...]) -> Ref:
    """x where a mask of this shape keeps it, else 0; scaled by 1 / (1 - p)."""
    keep = d.add("ge.Scalar", d.uniform(mask), p)
    return d.add("mul.Scalar", d.add("mul.Tensor", x, keep), 1 / (1 - p) if p < 1 else 0.0)


def alpha_dropout(d: RandomCall) -> Ref:
    """x or SELU's lower limit, scaled and shifted to keep mean and variance."""
    return alpha_drop_by_mask(d, d.shape(d.operand))


def feature_alpha_dropout(d: RandomCall) -> Ref:
    """As `alpha_dropout`, but drops whole channels."""
    return alpha_drop_by_mask(d, channels(d.shape(d.operand)))


def alpha_drop_by_mask(d: RandomCall, mask: tuple[int, ...]) -> Ref:
    """x where a mask of this shape keeps it, else SELU's lower limit; scaled and shifted.

    Source: Klambauer et al. 2017, Self-Normalizing Neural Networks, section "New Dropout Technique".
    """
    p = d.arguments["p"]
    scale = 1 / math.sqrt((SELU_LIMIT**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    keep = d.cast(d.add("ge.Scalar", d.uniform(mask), p))
    shift = d.add("mul.Scalar", d.add("sub.Scalar", keep, 1 - p), SELU_LIMIT * scale)
    return d.add("add.Tensor", d.add("mul.Scalar", d.add("mul.Tensor", d.operand, keep), scale), shift)


def rrelu(d: RandomCall) -> Ref:
    """x where it is positive, else x times a number in [lower, upper)."""
    lower, upper = d.arguments.get("lower", 1 / 8), d.arguments.get("upper", 1 / 3)
    slope = d.scaled(d.uniform(d.result.shape), upper - lower, lower)
    positive = d.add("gt.Scalar", d.operand, 0)
    return d.add("where.self", positive, d.operand, d.add("mul.Tensor", d.operand, slope))


def channels(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a mask with one element for each channel of each sample."""
    return (*shape[:2], *[1] * len(shape[2:]))


def bernoulli(d: RandomCall) -> Ref:
    """1 with probability p, else 0; p is a number, a tensor, or the operand itself."""
    p = d.arguments.get("p", d.operand)
    target = "lt.Tensor" if isinstance(p, Ref) else "lt.Scalar"
    return d.cast(d.add(target, d.uniform(d.result.shape), p))


def rand(d: RandomCall) -> Ref:
    """Uniform numbers in [from, to), rounded down to the result's dtype, which excludes ``to``."""
    low, high = d.arguments.get("from", 0.0), d.arguments.get("to", 1.0)
    x = d.uniform(d.result.shape)
    bits = {"float16": 11, "bfloat16": 8}.get(d.result.dtype)
    if bits is not None:
        x = d.add("mul.Scalar", d.add("floor.default", d.add("mul.Scalar", x, 2.0**bits)), 2.0**-bits)
    return d.scaled(x, high - low, low)


def randn(d: RandomCall) -> Ref:
    """Normal numbers: the inverse normal distribution at the midpoints of 2**24 equal parts of (0, 1)."""
    middle = d.add("add.Scalar", d.add("mul.Scalar", d.uniform(d.result.shape), 2.0), 2.0**-24 - 1)
    mean, std = d.arguments.get("mean", 0.0), d.arguments.get("std", 1.0)
    return d.scaled(d.add("mul.Scalar", d.add("erfinv.default", middle), math.sqrt(2)), std, mean)


def randint(d: RandomCall) -> Ref:
    """Integers in [low, high)."""
    low, high = d.arguments.get("low", 0), d.arguments["high"]
    if high - low > MAX_CHOICES:
        raise NoFormError
    wide = d.add("to.dtype", d.uniform(d.result.shape), torch.float64)  # a float32 could round up to high
    return d.scaled(d.add("floor.default", d.add("mul.Scalar", wide, high - low)), 1.0, low)


def exponential(d: RandomCall) -> Ref:
    """Exponential numbers above 0: Gumbel noise takes their logarithm."""
    log = d.add("log1p.default", d.add("neg.default", d.uniform(d.result.shape)))
    positive = d.add("clamp_min.default", d.add("neg.default", log), 2.0**-25)
    return d.cast(d.add("mul.Scalar", positive, 1 / d.arguments.get("lambd", 1.0)))


def randperm(d: RandomCall) -> Ref:
    """A permutation that all samples share. A permutation of the samples themselves has no plan-invariant form."""
    if d.samples.dim >= 0:
        raise NoFormError
    return d.cast(d.add("argsort.default", d.uniform(d.result.shape)))


def attention(d: RandomCall) -> Ref:
    """Attention with dropout in separate operations, as torch itself computes it on CPU."""
    query, key, value, mask = (
        d.arguments["query"],
        d.arguments["key"],
        d.arguments["value"],
        d.arguments.get("attn_mask"),
    )
    if d.arguments.get("enable_gqa"):
        times = d.shape(query)[-3] // d.shape(key)[-3]
        key, value = (d.add("repeat_interleave.self_int", x, times, -3) for x in (key, value))
    scale = d.arguments.get("scale") or 1 / math.sqrt(d.shape(query)[-1])
    scores = d.add("matmul.default", d.add("mul.Scalar", query, scale), d.add("transpose.int", key, -2, -1))
    shape = d.shape(scores)
    if d.arguments.get("is_causal"):
        ones = d.into.add("aten.ones.default", shape[-2:], dtype=torch.bool, device=LocalDevice())
        scores = d.add("masked_fill.Scalar", scores, d.add("triu.default", ones, 1), -math.inf)
    elif mask is not None and d.into.value(mask).dtype == "bool":
        scores = d.add("masked_fill.Scalar", scores, d.add("logical_not.default", mask), -math.inf)
    elif mask is not None:
        scores = d.add("add.Tensor", scores, mask)
    if d.into.value(scores).dtype in ("float16", "bfloat16"):  # as torch's kernels do
        scores = d.add("to.dtype", scores, torch.float32)
    # A query whose mask hides all keys gets zeros instead of NaN.
    weights = d.add("softmax.int" if mask is None else "_safe_softmax.default", scores, -1)
    return d.add("matmul.default", d.cast(drop_by_mask(d, weights, d.arguments["dropout_p"], shape)), value)


# The random operations that models of timm, torchvision and Hugging Face draw with while they train.
FORMS: Mapping[str, Callable[[RandomCall], Ref]] = {
    "dropout": dropout,
    "feature_dropout": feature_dropout,
    "alpha_dropout": alpha_dropout,
    "feature_alpha_dropout": feature_alpha_dropout,
    "rrelu": rrelu,
    "bernoulli": bernoulli,
    "rand": rand,
    "rand_like": rand,
    "uniform": rand,
    "randn": randn,
    "randn_like": randn,
    "normal": randn,
    "normal_functional": randn,
    "randint": randint,
    "randint_like": randint,
    "exponential": exponential,
    "randperm": randperm,
    "scaled_dot_product_attention": attention,
}


# -- the rewrite -----------------------------------------------------------------------------------------------------


def is_random(op: Op) -> bool:
    """Whether an operation, with its arguments, draws random numbers from a generator."""
    if torch.Tag.nondeterministic_seeded not in operator(op.target).tags:
        return False
    given = named_arguments(op)
    return not (any(given.get(n) == 0 for n in PROBABILITIES) or any(given.get(n) is False for n in FLAGS))


def use_counter_rng(graph: Graph, larger: Callable[[], Graph | None]) -> Graph:
    """The graph with its random operations as functions of counters, which are a further input.

    The last replacement of an operation has its name, so that plans can refer to it. An operation without a form is
    left; `is_random` finds it.

    Args:
        larger: traces the model at another batch size; None if the model takes no other. It is called only for results
            whose sample dim is unknown otherwise, as ``torch.rand(b, n)``, which reads no tensor.
    """
    random = [op for op in graph.ops if is_random(op)]
    if not random:
        return graph
    rows = Value(RNG_COUNTERS, (graph.batch, 4), "int64", (4, 1))
    known = {**graph.readable, RNG_COUNTERS: rows}
    taken = known.keys() | {op.name for op in graph.ops}
    old, where = {op.name: op for op in graph.ops}, sample_places(graph, random, larger)
    put: dict[str, tuple[Op, ...]] = {}
    for op in random:
        samples = where[op.name]
        put[op.name] = expand_random_op(op, samples, known, taken) if samples is not None else (op,)
        taken |= {new.name for new in put[op.name]}
    ops = live_ops([new for op in graph.ops for new in put.get(op.name, (op,))], graph.outputs)
    left = {op.name for op in ops}
    groups = ([new.name for name in names for new in put.get(name, (old[name],))] for names in graph.colocated)
    together = (tuple(name for name in names if name in left) for names in groups)
    return replace(
        graph,
        inputs=(*graph.inputs, rows) if any(RNG_COUNTERS in op.reads for op in ops) else graph.inputs,
        ops=ops,
        colocated=tuple(names for names in together if len(names) > 1),
    )


def expand_random_op(op: Op, samples: SamplePlace, known: Mapping[str, Value], taken: Set[str]) -> tuple[Op, ...]:
    """The operations that replace a random one, the last of which has its name; the operation itself without a form."""
    form = FORMS.get(op.target.split(".")[1].rstrip("_"))
    into = Expansion(op, known, taken)
    try:
        if form is None:
            raise NoFormError
        result = form(RandomCall(into, named_arguments(op), result_of(op, known), samples))
    except NoFormError:
        return (op,)
    *others, last = into.ops
    assert result.name == last.name, f"{op.name} makes {result.name} and then {last.name}"
    if not op.outputs:
        copy = Op(op.name, "aten.copy_.default", (op.args[0], result), (), (), op.module, op.source, op.mutates)
        return (*others, last, copy)
    # The operator uniform has the operation's name as an argument.
    args = tuple(op.name if argument == last.name else argument for argument in last.args)
    return (*others, replace(last, name=op.name, args=args, outputs=(replace(last.outputs[0], name=op.name),)))


def result_of(op: Op, known: Mapping[str, Value]) -> Value:
    """The value that a random operation returns or fills in place."""
    return op.outputs[0] if op.outputs else known[op.args[0].name]


def sample_places(
    graph: Graph, random: Sequence[Op], larger: Callable[[], Graph | None]
) -> Mapping[str, SamplePlace | None]:
    """Place of the samples in the result of each random operation, by its name; None if it cannot be found.

    Args:
        larger: as in `use_counter_rng`.
    """
    known = graph.readable
    followed = sample_dims(graph, lambda op: rule_of(op, graph.shapes.__getitem__))
    found: dict[str, SamplePlace | None] = {}
    unknown: dict[str, tuple[int, ...]] = {}
    for op in random:
        value = result_of(op, known)
        if value.name in followed:
            (split,) = followed[value.name].splits
            found[op.name] = SamplePlace(split.dim, split.outer)
        elif graph.batch > 1 and all(size % graph.batch for size in value.shape):
            found[op.name] = SamplePlace()
        else:
            unknown[op.name] = value.shape
    other = larger() if unknown else None
    sizes = other.readable if other is not None else {}
    made = {
        op.name: result_of(op, sizes).shape for op in (other.ops if other is not None else ()) if op.name in unknown
    }
    return found | {name: place_by_size(shape, made.get(name, ())) for name, shape in unknown.items()}


def place_by_size(shape: tuple[int, ...], other: tuple[int, ...]) -> SamplePlace | None:
    """Place of the samples in a tensor with these shapes at two batch sizes; None if more than one dim differs."""
    dims = [dim for dim, (size, more) in enumerate(zip(shape, other)) if size != more]
    if len(shape) != len(other) or len(dims) > 1:
        return None
    return SamplePlace(dims[0]) if dims else SamplePlace()

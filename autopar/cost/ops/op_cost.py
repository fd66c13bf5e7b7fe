"""Seconds and bytes of single operations on one machine at one batch size, priced or measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from autopar.cost.groups.grouping import fed_by_inputs
from autopar.cost.ops.collective_cost import is_collective, step_seconds, whole_bytes
from autopar.cost.ops.memory_traffic import added_to, backward_bytes, forward_bytes, summed_bytes
from autopar.cost.ops.op_stats import ATTENTION, Facts, OpStats, storage_of
from autopar.ir.graph import Graph, Op, Ref
from autopar.ir.hardware import Hardware, OpKind
from autopar.ir.layout import TP
from autopar.ops.registry import named_arguments
from autopar.sharding.buffer_sizes import symmetric_buffer_bytes
from autopar.sharding.reshard import reshard_step

# A complex product is a few real ones of this precision.
REAL_PART = {"complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True)
class Factor:
    """What an operation takes, measured with those that it was compiled with, as a multiple of its price."""

    forward: float = 1.0
    backward: float = 1.0


UNMEASURED = Factor()
Factors = Mapping[str, Factor]  # by operation
NO_FACTORS: Factors = MappingProxyType({})
Measured = Iterable[tuple[tuple[str, ...], float, float]]


@dataclass(frozen=True)
class OpCost:
    """One operation at the priced batch: seconds, forward FLOPs, and the bytes that it needs while it runs beyond what
    has been saved until then; a collective's count whole.

    ``passes_seconds`` of the backward go into what is read again, and into adding to sums of gradients.
    """

    forward_seconds: float
    backward_seconds: float
    flops: float
    transient_bytes: int
    symmetric_buffer_bytes: int = 0
    passes_seconds: float = 0.0

    def times(self, factor: Factor) -> OpCost:
        """What a measurement makes of it."""
        return replace(
            self,
            forward_seconds=self.forward_seconds * factor.forward,
            backward_seconds=self.backward_seconds * factor.backward,
            passes_seconds=self.passes_seconds * factor.backward,
        )


@dataclass(frozen=True)
class Pricing:
    """What is being priced; sizes at that batch are asked from here."""

    graph: Graph
    facts: Facts
    hardware: Hardware
    batch: int
    ranks: int = 1

    @cached_property
    def batch_dependent(self) -> frozenset[str]:
        return fed_by_inputs(self.graph)

    def scaled(self, amount: float, name: str) -> float:
        """An amount of a value or an operation: it grows with the batch if it depends on a graph input."""
        return amount * self.batch / self.graph.batch if name in self.batch_dependent else amount

    def num_bytes(self, name: str) -> int:
        """Size of a value or weight at the priced batch, byte."""
        if name in self.graph.weight:
            return self.graph.weight[name].num_bytes
        return round(self.scaled(self.graph.values[name].num_bytes, name))

    @cached_property
    def added_to(self) -> frozenset[str]:
        """Weights to whose gradients linear layers add in the product that makes them."""
        return added_to(self.graph, self.hardware)

    @cached_property
    def root(self) -> Mapping[str, str]:
        return storage_of(self.graph, self.facts)

    @cached_property
    def held(self) -> Mapping[str, frozenset[str]]:
        """Of what each operation reads and makes: what it or an earlier one saves for the backward."""
        saved, found = set[str](), dict[str, frozenset[str]]()
        for op in self.graph.ops:
            saved.update(self.root.get(name, name) for name in self.facts.ops[op.name].saved_names(op))
            around = (*op.reads, *(v.name for v in op.outputs))
            found[op.name] = frozenset(name for name in around if self.root.get(name, name) in saved)
        return found


def kind_of(op: Op, graph: Graph, flops: float) -> OpKind:
    """Which efficiency curve an operation follows."""
    if op.target == ATTENTION:
        return "attention"
    if flops <= 0:
        return "memory"
    if "conv" not in op.target:
        return "matmul"
    return "depthwise" if is_depthwise(op, graph) else "convolution"


def is_depthwise(op: Op, graph: Graph) -> bool:
    """Whether a convolution has one channel in each of its groups."""
    arguments = named_arguments(op)
    weight = arguments["weight"]
    assert isinstance(weight, Ref), f"{op.name}: a convolution with a constant"
    shape = graph.weight[weight.name].shape if weight.name in graph.weight else graph.values[weight.name].shape
    return arguments["groups"] > 1 and shape[1] == 1


def num_products(kind: OpKind, facts: OpStats) -> int:
    """How many equal kernels a backward is: a product for each gradient; attention has one kernel for all of its."""
    if kind in ("attention", "memory"):
        return 1
    return max(1, round(facts.backward_flops / facts.forward_flops))


def has_sums(op: Op, pricing: Pricing, kind: OpKind, products: int) -> bool:
    """Whether some gradient of an operation is a sum over samples that none of its products makes."""
    gradients = pricing.facts.ops[op.name].gradients
    if op.name not in pricing.batch_dependent or kind == "attention":
        return False
    if kind == "memory":
        return any(op.reads[i] not in pricing.batch_dependent for i in gradients)
    return len(gradients) > products


def op_costs(pricing: Pricing) -> Mapping[str, OpCost]:
    """The cost of every operation by name; those that differ in names alone are priced once."""
    graph, fed, known = pricing.graph, pricing.batch_dependent, dict[tuple, OpCost]()
    stored = {weight.name: weight.stored_dtype for weight in graph.weights}
    costs: dict[str, OpCost] = {}
    for op in graph.ops:
        held = pricing.held[op.name]
        sources = tuple((stored.get(name), name in fed, name in pricing.added_to, name in held) for name in op.reads)
        arriving = tuple((v.requires_grad, v.name in held) for v in op.outputs)
        # Equal operations have one object for their facts.
        key = (id(pricing.facts.ops[op.name]), op.name in fed, sources, arriving)
        if key not in known:
            known[key] = op_cost(op, pricing)
        costs[op.name] = known[key]
    return costs


def op_cost(op: Op, pricing: Pricing) -> OpCost:
    """Seconds of one operation; 0 for views, whose backward may still copy (a slice's fills a whole tensor)."""
    return collective_cost(op, pricing) if is_collective(op) else part_cost(op, pricing, pricing.num_bytes)


def part_cost(op: Op, pricing: Pricing, num_bytes: Callable[[str], float], parts: int = 1) -> OpCost:
    """Seconds of a rank's part of an operation, by the cost model alone.

    Args:
        num_bytes: what a rank has of a value or weight.
        parts: how many ranks divide its arithmetic.
    """
    facts = pricing.facts.ops[op.name]
    flops = pricing.scaled(facts.forward_flops, op.name) / parts
    backward_flops = pricing.scaled(facts.backward_flops, op.name) / parts
    operands = sum(map(num_bytes, op.reads))
    outputs = sum(num_bytes(v.name) for v in op.outputs)
    dtype = compute_dtype(op, pricing.graph)
    kind, hardware = kind_of(op, pricing.graph, facts.forward_flops), pricing.hardware
    products = num_products(kind, facts)
    forward = hardware.op_seconds(kind, flops, operands + outputs, dtype) if facts.moves_data else 0.0
    if again := forward_bytes(op, num_bytes):
        forward += hardware.op_seconds("memory", 0.0, again, dtype)
    arriving = sum(num_bytes(v.name) for v in op.outputs if v.requires_grad)
    written = sum(num_bytes(op.reads[i]) for i in facts.gradients)
    kept = pricing.scaled(facts.saved_bytes, op.name) / parts + sum(map(num_bytes, facts.saved_names(op)))
    backward = beyond = 0.0
    if facts.gradients:
        moved = arriving + written + kept
        backward = products * hardware.op_seconds(
            kind, backward_flops / products, moved / products, dtype, backward=True
        )
        beyond = hardware.traffic_seconds(summed_bytes(op, facts, pricing.graph, pricing.added_to, num_bytes))
        sums = has_sums(op, pricing, kind, products)
        if again := backward_bytes(op, facts, sums, num_bytes, hardware.device_type == "cuda"):
            beyond += hardware.op_seconds("memory", 0.0, again, dtype)
    around = (*(r for r in op.reads if r not in pricing.graph.weight), *(v.name for v in op.outputs))
    alone = sum(num_bytes(name) for name in around if name not in pricing.held[op.name])
    forward_set = round(alone) if facts.moves_data else 0
    working_set = max(forward_set, round(arriving + written) if facts.gradients else 0)
    return OpCost(forward, backward + beyond, flops, working_set, passes_seconds=beyond)


def factors_of(graph: Graph, facts: Facts, hardware: Hardware, batch: int, ranks: int, measured: Measured) -> Factors:
    """How the operations of a graph that were measured compare with their prices; collectives stay as they are priced.

    Args:
        measured: operations that were run together, and their forward and backward seconds.
    """
    costs = op_costs(Pricing(graph, facts, hardware, batch, ranks))
    moved = {op.name for op in graph.ops if is_collective(op)}
    factors: dict[str, Factor] = {}
    for names, forward, backward in measured:
        own = [name for name in names if name not in moved]
        priced = [sum(costs[n].forward_seconds for n in own), sum(costs[n].backward_seconds for n in own)]
        found = Factor(*(seconds / price if price else 1.0 for seconds, price in zip((forward, backward), priced)))
        factors |= dict.fromkeys(own, found)
    return factors


def collective_cost(op: Op, pricing: Pricing) -> OpCost:
    """Seconds of an operation that sharding has inserted; backward only where a gradient comes back."""
    source, made = pricing.num_bytes(op.reads[0]), pricing.num_bytes(op.outputs[0].name)
    step, trained = reshard_step(op), pricing.facts.ops[op.name].outputs[0].requires_grad
    assert step is not None, f"{op.name}: {op.target} has no price"
    whole = whole_bytes(step, source, made, pricing.ranks)
    time = step_seconds(step, whole, trained, pricing.hardware, pricing.ranks)
    taken = max(symmetric_buffer_bytes(op, TP, pricing.ranks), default=0)
    return OpCost(
        time.forward_seconds, time.backward_seconds, 0.0, source + made, round(pricing.scaled(taken, op.name))
    )


def compute_dtype(op: Op, graph: Graph) -> str:
    """The precision that an operation computes in: that of its first output or, writing in place, first operand."""
    if op.outputs:
        dtype = op.outputs[0].dtype
    else:
        dtype = graph.weight[op.reads[0]].dtype if op.reads[0] in graph.weight else graph.values[op.reads[0]].dtype
    return REAL_PART.get(dtype, dtype)

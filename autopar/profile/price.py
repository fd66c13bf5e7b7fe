"""From facts to a cost graph: seconds and bytes of every group on one machine at one microbatch size."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from autopar.hardware import Hardware, Kind
from autopar.ir import TP, CostGraph, Flow, Graph, Group, Holding, Op, Ref, refs
from autopar.operators import named_arguments
from autopar.profile.collectives import is_collective, step_of, step_seconds, whole_bytes
from autopar.profile.facts import ATTENTION, Facts, OpFacts, roots
from autopar.profile.groups import Members, fed_by_inputs, group_ops, regrouped
from autopar.profile.holding import ALONE, Sharing, held
from autopar.rules.boards import board_bytes

LOSS = "loss"
LINEAR = "aten.linear.default"
WORKSPACE = 2  # of cuDNN's convolutions, as a multiple of what they read and make


@dataclass(frozen=True)
class Factor:
    """What an operation takes, measured with those that it was compiled with, as a multiple of its price."""

    forward: float = 1.0
    backward: float = 1.0


UNMEASURED = Factor()
Factors = Mapping[str, Factor]  # by operation
NO_FACTORS: Factors = MappingProxyType({})
Measured = Iterable[tuple[tuple[str, ...], float, float]]
# A complex product is a few real ones of this precision.
REAL_PART = {"complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True)
class OpCost:
    """One operation at the priced batch: seconds, forward FLOPs, and the bytes that only it needs while it runs."""

    forward_seconds: float
    backward_seconds: float
    flops: float
    transient_bytes: int
    board_bytes: int = 0

    def times(self, factor: Factor) -> OpCost:
        """What a measurement makes of it."""
        return replace(
            self,
            forward_seconds=self.forward_seconds * factor.forward,
            backward_seconds=self.backward_seconds * factor.backward,
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
    def fed(self) -> frozenset[str]:
        return fed_by_inputs(self.graph)

    def scaled(self, amount: float, name: str) -> float:
        """An amount of a value or an operation: it grows with the batch if it depends on a graph input."""
        return amount * self.batch / self.graph.batch if name in self.fed else amount

    def num_bytes(self, name: str) -> int:
        """Size of a value or weight at the priced batch, byte."""
        if name in self.graph.weight:
            return self.graph.weight[name].num_bytes
        return round(self.scaled(self.graph.values[name].num_bytes, name))

    @cached_property
    def root(self) -> Mapping[str, str]:
        return roots(self.graph, self.facts)


def price(
    graph: Graph,
    facts: Facts,
    hardware: Hardware,
    batch: int,
    sharing: Sharing = ALONE,
    groups: tuple[Group, ...] | None = None,
    factors: Factors = NO_FACTORS,
) -> CostGraph:
    """The cost graph of a traced model, or of what each rank runs of a sharded one, at one microbatch size.

    FLOPs and activation bytes are linear in the batch, weight bytes are not. A storage that is saved for the backward
    counts for the groups that save it, each storage once, whoever made it.

    Args:
        facts: of this graph, from `op_facts`.
        batch: samples per microbatch, of all ranks of a tensor-parallel group together.
        sharing: what the ranks that hold the same weights have divided among them.
        groups: of the whole graph, to be kept in the sharded one; found anew where none are given.
        factors: of operations that were measured. They do not change groups.
    Raises:
        HardwareError: the machine has no peak for a dtype the model computes in.
    Error: ``hardware.error`` for seconds. Saved bytes equal what torch 2.15 saves on CPU to 0.1 % for most timm
        families. Of those compared, an LSTM (Sequencer) keeps 2.5 times as much, and a model whose own in-place
        activation was traced into one that is not in place keeps less (TResNet, 16 %). GPU kernels may add workspaces.
    """
    pricing = Pricing(graph, facts, hardware, batch, sharing.tp)
    costs = op_costs(pricing)
    if groups is None:
        seconds = {name: cost.forward_seconds + cost.backward_seconds for name, cost in costs.items()}
        members = group_ops(graph, seconds, {name: cost.flops for name, cost in costs.items()})
    else:
        members = regrouped(graph, [group for group in groups if group.ops])
    group_of = {op.name: i for i, m in enumerate(members) for op in m.ops}
    own_saved, shared_saved = saved_memory(pricing, group_of)
    costs = {name: cost.times(factors.get(name, UNMEASURED)) for name, cost in costs.items()}
    priced = [group_of_members(m, [costs[op.name] for op in m.ops], own_saved[i]) for i, m in enumerate(members)]
    if hardware.device_type == "cuda":
        priced = [with_workspace(group, m) for group, m in zip(priced, members, strict=True)]
    sets = (tuple(sorted({group_of[name] for name in names})) for names in graph.together)
    return CostGraph(
        model=graph.model,
        batch=batch,
        groups=(*priced, Group(LOSS, (), "")),
        flows=tuple(flows(pricing, group_of, savers(pricing, group_of), loss=len(priced))),
        weights=tuple(weight_holdings(pricing, group_of, sharing)),
        saved=shared_saved,
        together=tuple(dict.fromkeys(numbers for numbers in sets if len(numbers) > 1)),
    )


def reweighted(cost: CostGraph, graph: Graph, sharing: Sharing, hardware: Hardware) -> CostGraph:
    """The same graph as its replicas, and whether they share the optimizer's state, are in ``sharing``: only weights
    cost something else."""
    weights = tuple(
        held(graph.weight[w.name], w.groups, sharing, hardware, w.gradient_bytes > w.left_bytes == 0)
        for w in cost.weights
    )
    return replace(cost, weights=weights)


# -- operations and groups -----------------------------------------------------------------------------------------


def kind_of(op: Op, graph: Graph, flops: float) -> Kind:
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


def num_products(kind: Kind, facts: OpFacts) -> int:
    """How many equal kernels a backward is: a product for each gradient; attention has one kernel for all of its."""
    if kind in ("attention", "memory"):
        return 1
    return max(1, round(facts.backward_flops / facts.forward_flops))


def op_costs(pricing: Pricing) -> Mapping[str, OpCost]:
    """The cost of every operation by name; those that differ in names alone are priced once."""
    graph, fed, known = pricing.graph, pricing.fed, dict[tuple, OpCost]()
    costs: dict[str, OpCost] = {}
    for op in graph.ops:
        sources = tuple((name in graph.weight, name in fed) for name in op.reads)
        arriving = tuple(v.requires_grad for v in op.outputs)
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
    kind = kind_of(op, pricing.graph, facts.forward_flops)
    forward = pricing.hardware.op_seconds(kind, flops, operands + outputs, dtype) if facts.moves_data else 0.0
    arriving = sum(num_bytes(v.name) for v in op.outputs if v.requires_grad)
    written = sum(num_bytes(op.reads[i]) for i in facts.gradients)
    kept = sum(num_bytes(op.reads[i]) for i in facts.saved_operands)
    kept += pricing.scaled(facts.saved_bytes, op.name) / parts
    kept += sum(num_bytes(op.outputs[j].name) for j in facts.saved_outputs)
    backward = 0.0
    if facts.gradients:
        products, moved = num_products(kind, facts), arriving + written + kept
        backward = products * pricing.hardware.op_seconds(
            kind, backward_flops / products, moved / products, dtype, backward=True
        )
    activations = sum(num_bytes(r) for r in op.reads if r not in pricing.graph.weight)
    forward_set = round(activations + outputs) if facts.moves_data else 0
    working_set = max(forward_set, round(arriving + written) if facts.gradients else 0)
    return OpCost(forward, backward, flops, working_set)


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
    step, trained = step_of(op), pricing.facts.ops[op.name].outputs[0].requires_grad
    whole = whole_bytes(step, source, made, pricing.ranks)
    time = step_seconds(step, whole, trained, pricing.hardware, pricing.ranks)
    taken = max(board_bytes(op, TP, pricing.ranks), default=0)
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


def group_of_members(members: Members, costs: list[OpCost], saved_bytes: int) -> Group:
    """The sum of a group's operations; its working set is that of the largest, since they run one by one."""
    collectives = [cost for op, cost in zip(members.ops, costs, strict=True) if is_collective(op)]
    return Group(
        name=members.anchor.name,
        ops=tuple(op.name for op in members.ops),
        module=members.anchor.module,
        forward_seconds=sum(c.forward_seconds for c in costs),
        backward_seconds=sum(c.backward_seconds for c in costs),
        flops=sum(c.flops for c in costs),
        saved_bytes=saved_bytes,
        transient_bytes=max(c.transient_bytes for c in costs),
        forward_collective_seconds=sum(c.forward_seconds for c in collectives),
        backward_collective_seconds=sum(c.backward_seconds for c in collectives),
        board_bytes=max((c.board_bytes for c in collectives), default=0),
    )


def with_workspace(group: Group, members: Members) -> Group:
    """A group as GPUs run it: cuDNN tries its convolutions with workspaces in the first steps.

    Error: fitted to ResNet-50 alone, 256 images in bf16 on an H200 (`docs/benchmarks/h200-x2-resnet50-dp2.json`), which
        took 1.13 GiB beyond what is accounted for otherwise, 1.96 times the largest working set of its convolutions.
    """
    convolves = any("conv" in op.target for op in members.ops)
    return replace(group, workspace_bytes=WORKSPACE * group.transient_bytes) if convolves else group


# -- what flows and what stays ---------------------------------------------------------------------------------------


def readers(graph: Graph, group_of: Mapping[str, int], loss: int) -> Mapping[str, set[int]]:
    """Groups that read each value or weight; the loss reads the model's outputs."""
    reading: defaultdict[str, set[int]] = defaultdict(set)
    for op in graph.ops:
        for name in (*op.reads, *op.mutates):
            reading[name].add(group_of[op.name])
    for name in refs(graph.outputs):
        reading[name].add(loss)
    return reading


def flows(pricing: Pricing, group_of: Mapping[str, int], saving: Mapping[str, set[int]], loss: int) -> Iterable[Flow]:
    """Values that another group reads than the one that makes them. Graph inputs are handed to whoever needs them."""
    reading, seen = readers(pricing.graph, group_of, loss), set[str]()
    for op in pricing.graph.ops:
        here = group_of[op.name]
        for value, made in zip(op.outputs, pricing.facts.ops[op.name].outputs, strict=True):
            consumers = tuple(sorted(reading[value.name] - {here}))
            if consumers:
                storage, num_bytes = pricing.root.get(value.name, value.name), pricing.num_bytes(value.name)
                kept_by: tuple[int, ...] = ()
                if storage in saving and storage not in seen and num_bytes == pricing.num_bytes(storage):
                    kept_by = tuple(sorted(g for g in saving[storage] if g >= here))
                seen.add(storage)
                yield Flow(value.name, here, consumers, num_bytes, made.requires_grad, kept_by)


def weight_holdings(pricing: Pricing, group_of: Mapping[str, int], sharing: Sharing) -> Iterable[Holding]:
    """Weights with gradient and optimizer state. One that no operation reads is held by no group and left out."""
    reading = readers(pricing.graph, group_of, loss=-1)
    adding = added_to(pricing)
    for weight in pricing.graph.weights:
        groups = tuple(sorted(reading[weight.name] - {-1}))
        if groups:
            yield held(weight, groups, sharing, pricing.hardware, weight.name in adding)


def added_to(pricing: Pricing) -> frozenset[str]:
    """Weights to whose gradients compiled linear layers add: those that nothing else reads."""
    if pricing.hardware.way == "plain":
        return frozenset()
    reads = Counter(name for op in pricing.graph.ops for name in op.reads)
    layers = (op for op in pricing.graph.ops if op.target == LINEAR and pricing.graph.values[op.reads[0]].requires_grad)
    return frozenset(op.reads[1] for op in layers if reads[op.reads[1]] == 1)


def saved_memory(pricing: Pricing, group_of: Mapping[str, int]) -> tuple[Mapping[int, int], tuple[Holding, ...]]:
    """Bytes that only one group saves, by group; and storages that several groups save."""
    own: defaultdict[int, int] = defaultdict(int)
    for op in pricing.graph.ops:
        own[group_of[op.name]] += round(pricing.scaled(pricing.facts.ops[op.name].saved_bytes, op.name))
    saving = savers(pricing, group_of)
    for storage, groups in saving.items():
        if len(groups) == 1:
            own[min(groups)] += pricing.num_bytes(storage)
    shared = (
        Holding(storage, pricing.num_bytes(storage), tuple(sorted(groups)))
        for storage, groups in saving.items()
        if len(groups) > 1
    )
    return own, tuple(shared)


def savers(pricing: Pricing, group_of: Mapping[str, int]) -> Mapping[str, set[int]]:
    """The groups that save each storage of an activation for their backward."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for op in pricing.graph.ops:
        facts = pricing.facts.ops[op.name]
        for name in [op.reads[i] for i in facts.saved_operands] + [op.outputs[j].name for j in facts.saved_outputs]:
            storage = pricing.root.get(name, name)
            if storage not in pricing.graph.weight:
                found[storage].add(group_of[op.name])
    return found

"""Seconds and bytes of single operations on one machine at one batch size: analytic, scaled by measurements if any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import hypot
from types import MappingProxyType

from autopar.cost.groups.grouping import batch_dependent_names
from autopar.cost.ops.collective_cost import (
    exchange_cost,
    full_tensor_bytes,
    is_collective,
    reshard_step_cost,
    window_copy_cost,
)
from autopar.cost.ops.fused_cost import column_sum_seconds, fused_seconds
from autopar.cost.ops.kernel_shapes import group_padding, shape_slowdowns
from autopar.cost.ops.memory_traffic import (
    backward_reread_bytes,
    forward_reread_bytes,
    fused_wgrad_weights,
    grad_accumulation_bytes,
    splittable_layers,
)
from autopar.cost.ops.op_stats import ATTENTION, GraphStats, OpStats, has_fused_kernel, storage_names
from autopar.cost.ops.unfused_attention import unfused_attention_seconds
from autopar.ir.graph import Graph, Op, Ref
from autopar.ir.hardware import Hardware, OpKind
from autopar.ir.strategies import ReshardingCost
from autopar.ir.tensor_axes import ONE_RANK, TensorAxes, TensorAxis
from autopar.ops.registry import named_arguments, operand_of
from autopar.sharding.buffer_sizes import exchange_buffer_bytes, symmetric_buffer_bytes
from autopar.sharding.exchanges import EXCHANGING, UNFUSED
from autopar.sharding.reshard import ReshardStep, reshard_step

# A complex multiplication is a few real ones of this precision.
REAL_PART = {"complex64": "float32", "complex128": "float64"}

# cuDNN launches a separate kernel before partial sums of a weight's gradient: 3 to 14 us, 8 on average, for 90 of the
# 104 convolutions of resnet101 and 15 of the 104 of efficientnet_b3.
SPLIT_START_SECONDS = 5e-6


@dataclass(frozen=True)
class Factor:
    """Measured over analytic seconds of the compiled region that an operation is part of."""

    forward: float = 1.0
    backward: float = 1.0


UNMEASURED = Factor()
NO_COLLECTIVES = ReshardingCost(0.0, 0.0)
Factors = Mapping[str, Factor]  # by the operation's name
NO_FACTORS: Factors = MappingProxyType({})
MeasuredRegions = Iterable[tuple[tuple[str, ...], float, float]]  # names of operations; forward, backward seconds


@dataclass(frozen=True)
class OpCost:
    """Cost of one operation at the priced batch size, on one rank.

    ``flops`` are the forward's. ``transient_bytes`` are alive while the operation runs and are not among the tensors
    that are saved by then; a collective's input and output both count. ``extra_traffic_seconds`` are part of
    ``backward_seconds``: second passes over memory and the accumulation into main gradients. ``wgrad_seconds`` are the
    part of a weight's gradient that a split backward leaves for later, and ``deferred_bytes`` what it keeps for it.
    ``collectives`` are part of the seconds too: all of them for a collective, and those inside of an operation on a
    part of a picture.
    """

    forward_seconds: float
    backward_seconds: float
    flops: float
    transient_bytes: int
    symmetric_buffer_bytes: int = 0
    extra_traffic_seconds: float = 0.0
    wgrad_seconds: float = 0.0
    deferred_bytes: int = 0
    collectives: ReshardingCost = NO_COLLECTIVES

    def scaled_by(self, factor: Factor) -> OpCost:
        """The cost with its seconds multiplied by a measured factor, except for those of collectives."""
        forward, backward = self.collectives.forward_seconds, self.collectives.backward_seconds
        return replace(
            self,
            forward_seconds=(self.forward_seconds - forward) * factor.forward + forward,
            backward_seconds=(self.backward_seconds - backward) * factor.backward + backward,
            extra_traffic_seconds=self.extra_traffic_seconds * factor.backward,
            wgrad_seconds=self.wgrad_seconds * factor.backward,
        )

    def exchanging(self, collectives: ReshardingCost, copies: ReshardingCost, buffer_bytes: int = 0) -> OpCost:
        """The cost with collectives inside of the operation, and copies around them."""
        return replace(
            self,
            forward_seconds=self.forward_seconds + collectives.forward_seconds + copies.forward_seconds,
            backward_seconds=self.backward_seconds + collectives.backward_seconds + copies.backward_seconds,
            symmetric_buffer_bytes=buffer_bytes,
            collectives=collectives,
        )


@dataclass(frozen=True)
class Pricing:
    """A graph to be priced: on which machine, at which batch size, over how many ranks.

    Args:
        graph: a traced model's graph, or the local graph that each rank runs after sharding.
        stats: statistics of ``graph`` at its traced batch size.
        batch: samples per microbatch, of all ranks of a tensor-parallel group together.
        axes: tensor axes of the graph's collectives. `autopar.cost.strategies` splits over the last of them, of which
            the graph has no collectives yet.
    """

    graph: Graph
    stats: GraphStats
    hardware: Hardware
    batch: int
    axes: TensorAxes = ()

    @property
    def axis(self) -> TensorAxis:
        """The innermost axis."""
        return self.axes[-1] if self.axes else ONE_RANK

    @property
    def ranks(self) -> int:
        """Number of ranks of the innermost axis."""
        return self.axis.ranks

    def axis_of(self, step: ReshardStep | Op) -> TensorAxis:
        """The axis of a collective, or of those inside of an operation; a step that runs none has a number of ranks."""
        named = (axis for axis in self.axes if axis.name in step.args)
        return next(named, self.axis)

    def at(self, batch: int) -> Pricing:
        """This pricing at another batch size; it shares the properties that are kept, which depend on no batch size."""
        other = replace(self, batch=batch)
        vars(other).update({**vars(self), "op_numbers": self.op_numbers, "batch": batch})
        return other

    @cached_property
    def batch_dependent(self) -> frozenset[str]:
        """Names of the operations and values that depend on a graph input."""
        return batch_dependent_names(self.graph)

    def scaled(self, amount: float, name: str) -> float:
        """Amount of a value or operation at the priced batch: proportional to the batch if it depends on an input."""
        return amount * self.batch / self.graph.batch if name in self.batch_dependent else amount

    def num_bytes(self, name: str) -> int:
        """Size of a value or weight at the priced batch, byte."""
        if name in self.graph.weight:
            return self.graph.weight[name].num_bytes
        return round(self.scaled(self.graph.values[name].num_bytes, name))

    @cached_property
    def fused_wgrad_weights(self) -> frozenset[str]:
        """Weights whose wgrad GEMM accumulates into the main gradient."""
        return fused_wgrad_weights(self.graph, self.hardware)

    @cached_property
    def splittable(self) -> frozenset[str]:
        """Operations whose weight's gradient a split backward leaves for later."""
        return splittable_layers(self.graph)

    @cached_property
    def storage(self) -> Mapping[str, str]:
        """Name of the value, input or weight whose memory each view shares."""
        return storage_names(self.graph, self.stats)

    @cached_property
    def saved_until(self) -> Mapping[str, frozenset[str]]:
        """For each operation: its operands and outputs that it, or an earlier operation, saves for the backward."""
        saved, found = set[str](), dict[str, frozenset[str]]()
        for op in self.graph.ops:
            saved.update(self.storage.get(name, name) for name in self.stats.ops[op.name].saved_names(op))
            around = (*op.reads, *(v.name for v in op.outputs))
            found[op.name] = frozenset(name for name in around if self.storage.get(name, name) in saved)
        return found

    @cached_property
    def op_numbers(self) -> Mapping[str, int]:
        """A number of every operation, equal for operations that differ in names alone."""
        fed, wgrad, numbers = self.batch_dependent, self.fused_wgrad_weights, dict[tuple, int]()
        stored = {weight.name: weight.stored_dtype for weight in self.graph.weights}
        found: dict[str, int] = {}
        for op in self.graph.ops:
            saved = self.saved_until[op.name]
            sources = tuple((stored.get(name), name in fed, name in wgrad, name in saved) for name in op.reads)
            outputs = tuple((v.requires_grad, v.name in saved) for v in op.outputs)
            # Equal operations share one OpStats object.
            traits = op.name in fed, op.name in self.splittable, self.stats.traffic.get(op.name)
            key = id(self.stats.ops[op.name]), sources, outputs, traits
            found[op.name] = numbers.setdefault(key, len(numbers))
        return found


def op_kind(op: Op, graph: Graph, flops: float) -> OpKind:
    """Efficiency curve of an operation, as in a cost model's ``[efficiency]``."""
    if op.target == ATTENTION:
        return "attention"
    if flops <= 0:
        return "memory"
    if "conv" not in op.target:
        return "matmul"
    return "depthwise" if is_depthwise(op, graph) else "convolution"


def is_depthwise(op: Op, graph: Graph) -> bool:
    """Whether each group of a convolution has one input channel."""
    arguments = named_arguments(op)
    weight = arguments["weight"]
    assert isinstance(weight, Ref), f"{op.name}: a convolution with a constant"
    shape = graph.weight[weight.name].shape if weight.name in graph.weight else graph.values[weight.name].shape
    return arguments["groups"] > 1 and shape[1] == 1


def num_backward_kernels(kind: OpKind, stats: OpStats) -> int:
    """Number of equal kernels in a backward: one GEMM per gradient; attention has one kernel for all gradients."""
    if kind in ("attention", "memory"):
        return 1
    return max(1, round(stats.backward_flops / stats.forward_flops))


def sums_over_samples(op: Op, pricing: Pricing, kind: OpKind, products: int) -> bool:
    """Whether a gradient of an operation is a sum over samples that no GEMM computes, such as a bias's."""
    gradients = pricing.stats.ops[op.name].gradients
    if op.name not in pricing.batch_dependent or kind == "attention":
        return False
    if kind == "memory":
        return any(op.reads[i] not in pricing.batch_dependent for i in gradients)
    return len(gradients) > products


def op_costs(pricing: Pricing) -> Mapping[str, OpCost]:
    """Cost of every operation by name. Operations that differ in names alone are priced once."""
    by_number = dict[int, OpCost]()
    costs: dict[str, OpCost] = {}
    for op in pricing.graph.ops:
        number = pricing.op_numbers[op.name]
        if number not in by_number:
            by_number[number] = op_cost(op, pricing)
        costs[op.name] = by_number[number]
    return costs


def op_cost(op: Op, pricing: Pricing) -> OpCost:
    """Cost of one operation. A view's forward takes 0 s; its backward may copy (a slice's fills a whole tensor)."""
    if is_collective(op):
        return collective_cost(op, pricing, pricing.num_bytes)
    cost = local_op_cost(op, pricing, pricing.num_bytes)
    if op.target not in EXCHANGING:
        return cost
    part, axis = pricing.graph.readable[op.reads[0]], pricing.axis_of(op)
    buffer_bytes = max(exchange_buffer_bytes(op, part, axis.name))
    scale = pricing.batch / pricing.graph.batch
    collectives = exchange_cost(op, part, scale, pricing.hardware, axis)
    copies = window_copy_cost(op, part, scale, pricing.hardware)
    return cost.exchanging(collectives, copies, round(pricing.scaled(buffer_bytes, op.name)))


def kernel_seconds(
    hardware: Hardware, kind: OpKind, flops: float, num_bytes: float, dtype: str, backward: bool = False
) -> float:
    """As `Hardware.op_seconds`. On a GPU neither arithmetic nor traffic hides all of the other in a convolution.

    Error: the root of the sum of their squares is within 20 % of all but strided convolutions of resnet101's step
        (H100); their sum, which fits the points of `autopar profile`, is up to 45 % too long there.
    """
    if kind != "convolution" or hardware.device_type != "cuda":
        return hardware.op_seconds(kind, flops, num_bytes, dtype, backward)
    launch = hardware.launch_seconds
    computing = hardware.op_seconds(kind, flops, 0.0, dtype, backward) - launch
    return hypot(computing, hardware.traffic_seconds(num_bytes, 1)) + launch


def padded_bytes(op: Op, pricing: Pricing, num_bytes: Callable[[str], float]) -> Callable[[str], float]:
    """As ``num_bytes``, of an operation's operands and results as its kernel reads and writes them: with padded groups.

    Args:
        num_bytes: bytes of a value or weight on this rank, by name.
    """
    hardware = pricing.hardware
    wide_in, wide_out = group_padding(op, pricing.graph)
    if hardware.device_type != "cuda" or not hardware.execution_mode.compiled or wide_in == wide_out == 1:
        return num_bytes
    widened = {op.reads[0]: wide_in, op.reads[1]: wide_in * wide_out, op.outputs[0].name: wide_out}
    return lambda name: num_bytes(name) * widened.get(name, 1.0)


def local_op_cost(op: Op, pricing: Pricing, num_bytes: Callable[[str], float], parts: float = 1) -> OpCost:
    """Analytic cost of a rank's part of an operation: a roofline over its FLOPs and memory traffic.

    Operations that share kernels with others in compiled code on a GPU cost their part of these kernels instead.
    ``saved`` are bytes that the backward reads, ``unsaved`` bytes of operands and outputs that nothing saves, and
    ``extra_traffic`` seconds of second passes over memory and of gradient accumulation.

    Args:
        num_bytes: bytes of a value or weight on this rank, by name.
        parts: number of ranks that divide the operation's FLOPs.
    Error: as `Hardware.op_seconds`.
    """
    stats, hardware = pricing.stats.ops[op.name], pricing.hardware
    flops = pricing.scaled(stats.forward_flops, op.name) / parts
    backward_flops = pricing.scaled(stats.backward_flops, op.name) / parts
    kernel_bytes = padded_bytes(op, pricing, num_bytes)
    operands = sum(map(kernel_bytes, op.reads))
    outputs = sum(kernel_bytes(v.name) for v in op.outputs)
    dtype = compute_dtype(op, pricing.graph)
    kind, on_gpu = op_kind(op, pricing.graph, stats.forward_flops), hardware.device_type == "cuda"
    compiled = hardware.execution_mode.compiled
    slowdowns = shape_slowdowns(op, pricing.graph, compiled) if on_gpu and kind != "memory" else (1.0, 1.0)
    products, fused = num_backward_kernels(kind, stats), None
    if on_gpu and (kind != "memory" or op.target not in UNFUSED):
        fused = pricing.stats.traffic.get(op.name)
    forward = (
        kernel_seconds(hardware, kind, flops * slowdowns[0], operands + outputs, dtype) if stats.moves_data else 0.0
    )
    if again := forward_reread_bytes(op, num_bytes):
        forward += hardware.op_seconds("memory", 0.0, again, dtype)
    output_grads = sum(kernel_bytes(v.name) for v in op.outputs if v.requires_grad)
    input_grads = sum(kernel_bytes(op.reads[i]) for i in stats.gradients)
    saved = pricing.scaled(stats.saved_bytes, op.name) / parts + sum(map(num_bytes, stats.saved_names(op)))
    backward = extra_traffic = wgrad = 0.0
    if stats.gradients:
        reads = products if kind in ("matmul", "convolution") else 1  # each product reads the gradient of the result
        moved = reads * output_grads + input_grads + saved
        backward = products * kernel_seconds(
            hardware, kind, backward_flops * slowdowns[1] / products, moved / products, dtype, backward=True
        )
        extra_traffic = hardware.traffic_seconds(
            grad_accumulation_bytes(op, stats, pricing.graph, pricing.fused_wgrad_weights, num_bytes)
        )
        if op.name in pricing.splittable:
            wgrad = backward / products + extra_traffic
        sums = sums_over_samples(op, pricing, kind, products)
        if again := backward_reread_bytes(op, stats, sums, num_bytes, on_gpu):
            is_fused = fused is not None
            extra_traffic += (
                column_sum_seconds(again, hardware) if is_fused else hardware.op_seconds("memory", 0.0, again, dtype)
            )
        if kind == "convolution" and on_gpu:
            backward += SPLIT_START_SECONDS
    if kind == "attention" and on_gpu:
        read = tuple(operand_of(pricing.graph.readable[name]) for name in op.reads)
        if not has_fused_kernel(op, read, hardware.device_type):
            forward, backward = unfused_attention_seconds(op, pricing.graph, flops, num_bytes, hardware)
            backward *= bool(stats.gradients)
    if fused is not None:
        shared = (fused_seconds(op, traffic, num_bytes, hardware) for traffic in (fused.forward, fused.backward))
        if kind == "memory":
            (forward, backward), extra_traffic = shared, 0.0
        else:
            forward, backward = (alone + part for alone, part in zip((forward, backward), shared, strict=True))
    around = (*(r for r in op.reads if r not in pricing.graph.weight), *(v.name for v in op.outputs))
    unsaved = sum(kernel_bytes(name) for name in around if name not in pricing.saved_until[op.name])
    forward_set = round(unsaved) if stats.moves_data else 0
    working_set = max(forward_set, round(output_grads + input_grads) if stats.gradients else 0)
    deferred = round(num_bytes(op.reads[0]) + num_bytes(op.outputs[0].name)) if wgrad else 0
    return OpCost(
        forward,
        backward + extra_traffic,
        flops,
        working_set,
        extra_traffic_seconds=extra_traffic,
        wgrad_seconds=wgrad,
        deferred_bytes=deferred,
    )


def measured_factors(pricing: Pricing, measured: MeasuredRegions) -> Factors:
    """Measured over analytic seconds of each operation that was measured; collectives keep their analytic price.

    Args:
        pricing: of the graph that was measured.
        measured: names of the operations of one compiled region, with its forward and backward seconds.
    """
    costs = op_costs(pricing)
    collectives = {op.name for op in pricing.graph.ops if is_collective(op)}
    factors: dict[str, Factor] = {}
    for names, forward, backward in measured:
        region = [name for name in names if name not in collectives]
        priced = [sum(costs[n].forward_seconds for n in region), sum(costs[n].backward_seconds for n in region)]
        factor = Factor(*(seconds / price if price else 1.0 for seconds, price in zip((forward, backward), priced)))
        factors |= dict.fromkeys(region, factor)
    return factors


def collective_cost(op: Op, pricing: Pricing, num_bytes: Callable[[str], float]) -> OpCost:
    """Cost of an operation that sharding inserted; its backward is 0 s if its output has no gradient.

    Args:
        num_bytes: bytes of its operand and its result on this rank, by name.
    """
    input_bytes, output_bytes = num_bytes(op.reads[0]), num_bytes(op.outputs[0].name)
    step, trained = reshard_step(op), pricing.stats.ops[op.name].outputs[0].requires_grad
    assert step is not None, f"{op.name}: {op.target} has no price"
    axis = pricing.axis_of(step)
    full_bytes = full_tensor_bytes(step, input_bytes, output_bytes, axis.ranks)
    time = reshard_step_cost(step, full_bytes, trained, pricing.hardware, axis)
    buffer_bytes = max(symmetric_buffer_bytes(op, axis.name, axis.ranks), default=0)
    return OpCost(
        time.forward_seconds,
        time.backward_seconds,
        0.0,
        round(input_bytes + output_bytes),
        round(pricing.scaled(buffer_bytes, op.name)),
        collectives=time,
    )


def compute_dtype(op: Op, graph: Graph) -> str:
    """Dtype that an operation computes in: its first output's; for an in-place operation, its first operand's."""
    if op.outputs:
        dtype = op.outputs[0].dtype
    else:
        dtype = graph.weight[op.reads[0]].dtype if op.reads[0] in graph.weight else graph.values[op.reads[0]].dtype
    return REAL_PART.get(dtype, dtype)

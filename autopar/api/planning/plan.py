"""``autopar.plan``: the best plan for an unmodified model."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.api.model_source import BuiltModel, ModelSource, built_model, default_input_shape, in_channels_last
from autopar.api.options import Options
from autopar.api.planning.costs import MeasuredConfig, PlanCosts
from autopar.api.planning.error_band import step_parts, total_error
from autopar.api.planning.measured import plan_where_undecided, plan_with_measurements
from autopar.api.planning.refine import refine
from autopar.cost.hardware.load import load_hardware
from autopar.errors import MicrobatchWarning, UnknownOpWarning, UsageError, caller_level
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware
from autopar.ir.microbatches import microbatch_mismatch, microbatch_size
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import InputInfo, ModelInfo
from autopar.ir.status import doing, showing_status
from autopar.ir.units import of_type, plural
from autopar.measure.regions.region_times import region_timer_for
from autopar.runtime.launch.devices import default_hardware_name, this_machine
from autopar.runtime.launch.environment import Launched, launched
from autopar.runtime.launch.torch_settings import without_caller_modes
from autopar.runtime.optim.ema import with_averages
from autopar.runtime.optim.state_bytes import with_optimizer
from autopar.runtime.spec import Parameters
from autopar.sharding.propagate import ops_without_rule
from autopar.solve.cuts.step_time import Decision, Setting
from autopar.solve.search import Listen, search
from autopar.solve.space.candidates import Candidate
from autopar.solve.space.constraints import Constraints
from autopar.trace.call import Call, as_call
from autopar.trace.hooks import check_hooks
from autopar.trace.lower import explain_uneven_inputs, lower_model, lower_planned
from autopar.trace.passes.layouts import gain_from_channels_last
from autopar.trace.passes.precision import model_precision
from autopar.trace.passes.random_ops import RNG_COUNTERS
from autopar.trace.python_state import no_python_random

DEFAULT_BATCH = 64
# Classes of torch around a model, or mixed into it.
WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


# Batch statistics are taken over a microbatch, and networks trained on those of fewer samples are clearly worse (Wu and
# He 2018, "Group Normalization", figure 1). The planner does not go lower by itself; microbatches= does.
MIN_BATCH_NORM_SAMPLES = 8


@contextmanager
def without_cycle_collection() -> Iterator[None]:
    """Pauses Python's cyclic garbage collector: planning makes millions of small objects, and few cycles.

    ViT-L/16 on 4 devices: 9.7 s instead of 12.0 s, and 23 MiB more memory.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_cycle_collection()
@without_caller_modes()
@showing_status("building the model")
def plan(
    model: nn.Module | str | ModelSource,
    devices: int,
    example_inputs: Any = None,
    *,
    batch_size: int | None = None,
    optimizer: Callable[[Parameters], torch.optim.Optimizer] | None = None,
    ema: Callable[[nn.Module], Any] | None = None,
    **constraints: Any,
) -> Plan:
    """The best plan for a model on a number of devices; needs no GPU, and no weights for a model by name.

    Where the plan's device is at hand, operations are timed whose errors could turn the choice, and times are kept:
    see ``cost`` and ``measure_seconds`` of `autopar.ir.plan_constraints.PlanConstraints`. Each process of a launcher
    that calls this plans by itself, without measured times; `parallelize` plans on rank 0.

    After 3 s a line on standard error says what is being done; AUTOPAR_QUIET=1 in the environment switches it off.

    Args:
        model: a module (on any device), or a name: ``vit_large_patch16_224``, ``torchvision:resnet50``,
            ``package.module:factory``.
        devices: number of ranks.
        example_inputs: a tensor, or a tuple or dict of tensors, at the global batch; derived for timm and torchvision.
            The first dim of the first tensor is the batch. Every tensor with the same first size is cut into
            microbatches along that dim, whatever it means there; each microbatch gets all other tensors whole.
        batch_size: global batch if the inputs are derived (default 64).
        optimizer: as in `parallelize`. The bytes of its state are found by updating small parameters; without one,
            AdamW's state is planned for.
        ema: as in `parallelize`. The bytes of its averages are found in the same way.
        constraints: the fields of `autopar.api.options.Options`.

    Raises:
        UsageError: an argument is wrong.
        TraceError: the model cannot be traced.
        InfeasibleError: nothing fits; the message says what would.
    """
    options = Options.of(constraints)
    built = built_model(model, "meta")
    check_model(built.module)
    call = built_call(built, example_inputs, batch_size)
    hardware = load_hardware(options.hardware or default_hardware_name(this_machine()))
    if options.cost != "analytic" and (launch := launched()) is not None:
        options = without_measured_times(options, launch)
    channels_last = options.computes_channels_last(hardware.device_type)
    request = PlanRequest(built.module, call, devices, options, built.name, built.kwargs, optimizer, ema, channels_last)
    return plan_graph(request, lower_example(request), hardware)


def without_measured_times(options: Options, launch: Launched) -> Options:
    """Options of `plan` in a process of a launcher, whose processes may have different measured times.

    Raises:
        UsageError: measured times are requested, and all processes would measure.
    """
    asked = "cost='measured'" if options.cost == "measured" else f"measure_seconds={options.measure_seconds or 0:g}"
    if options.cost == "measured" or options.measure_seconds:
        raise UsageError(
            f"{asked} in autopar.plan: {launch.launcher}'s processes would each measure. Pass it to "
            "autopar.parallelize, which measures on rank 0 alone, or make the plan before: autopar plan … --cost "
            "measured -o plan.json, and pass plan='plan.json'."
        )
    return replace(options, cost="analytic", measure_seconds=None)


@dataclass(frozen=True)
class PlanRequest:
    """A model, an example call at the global batch, and the conditions under which a plan is made for them.

    Args:
        name, kwargs: how the model is named and built, for the plan file.
        optimizer, ema: as in `autopar.parallelize`; their state counts as memory.
        channels_last: whether convolutions, where that suits them, compute on images in channels_last.
    """

    model: nn.Module
    call: Call
    devices: int
    options: Options
    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Parameters], torch.optim.Optimizer] | None = None
    ema: Callable[[nn.Module], Any] | None = None
    channels_last: bool = False

    def __post_init__(self) -> None:
        check_devices(self.devices)

    def constraints(self) -> Constraints:
        """The options' constraints on the plan, with the devices and the batch."""
        return self.options.constraints(self.devices, self.call.batch)

    def graph(self, microbatch_size: int) -> Graph:
        """The training graph of a microbatch of so many samples."""
        microbatch = self.call.first(microbatch_size)
        return lower_model(self.model, microbatch, "train", self.name, self.options.precision, self.channels_last)


def lower_example(request: PlanRequest, user_plan: Plan | None = None) -> Graph:
    """The training graph of one microbatch: as the user's plan says, or else of the size that a plan is likely to have.

    Raises:
        TraceError: the model cannot be traced.
    """
    with explain_uneven_inputs(request.model, request.call), no_python_random(request.name):
        if user_plan is None:
            return request.graph(likely_microbatch_size(request.call.batch, request.devices, request.options))
        microbatch = request.call.first(user_plan.microbatch_size)
        return lower_planned(user_plan, request.model, microbatch, "train")


@without_cycle_collection()
def plan_graph(request: PlanRequest, graph: Graph, hardware: Hardware) -> Plan:
    """The best plan for a training graph.

    Args:
        graph: of `lower_example`.
        hardware: the machine to plan for; the option ``memory`` replaces its memory.

    Raises:
        UsageError, InfeasibleError: as `plan`.
    """
    options = request.options
    if not graph.ops:
        raise UsageError(f"{graph.model} computes nothing, so there is nothing to divide.")
    doing(f"pricing the operations of {graph.model}")
    if request.optimizer is not None:
        graph = with_optimizer(graph, request.optimizer)
    if request.ema is not None:
        graph = with_averages(graph, request.ema)
    if options.memory is not None:
        hardware = replace(hardware, memory_bytes=options.memory)
    has_batch_norm = any(op.mutates and "batch_norm" in op.target for op in graph.ops)
    least_samples = MIN_BATCH_NORM_SAMPLES if has_batch_norm else 1
    constraints = replace(request.constraints(), least_samples=least_samples)
    hardware = hardware.with_mode(options.execution_mode(hardware.device_type))
    costs = PlanCosts(graph, hardware, options.reduce_dtype)
    info = model_info(request, graph)
    decisions: list[Decision] = []

    def find_plan(listen: Listen = lambda candidates, decision: None, slack: float = 0.0) -> Plan:
        def heard(candidates: Sequence[Candidate], decision: Decision) -> None:
            decisions.append(decision)
            listen(candidates, decision)

        return search(costs, graph, hardware, constraints, info, partial(refine, costs), heard, slack)

    setting = Setting(graph, hardware, info, constraints, costs)
    timer = region_timer_for(options.cost, options.measure_seconds, hardware, request.devices, options.backend)
    if timer is None:
        plan = find_plan()
    elif options.cost == "measured":
        plan = plan_with_measurements(costs, find_plan, timer, request.graph)
    else:
        plan = plan_where_undecided(setting, costs, find_plan, timer, request.graph)
    source = "measured" if options.cost == "measured" else costs.source(MeasuredConfig.of(decisions[-1]))
    if source != "analytic":
        priced = replace(plan.hardware, cost=source)
        plan = replace(plan, hardware=priced, solver=replace(plan.solver, other_meshes=None))
    parts = step_parts(setting, costs, decisions[-1], source)
    plan = replace(plan, prediction=replace(plan.prediction, error=total_error(parts), parts=parts))
    if changed := microbatch_mismatch(plan.batch, plan.mesh.dp, options.microbatches, options.microbatch_size):
        warnings.warn(changed, MicrobatchWarning, stacklevel=caller_level())
    warn_of_ops_without_rule(plan, graph)
    precision = options.precision or model_precision(graph)
    channels_last = request.channels_last and gain_from_channels_last(graph)
    return replace(plan, precision=precision, reduce_dtype=options.reduce_dtype, channels_last=channels_last)


def model_info(request: PlanRequest, graph: Graph) -> ModelInfo:
    """The plan file's record of the model, with its inputs at the global batch."""
    batch = request.call.batch
    inputs = tuple(
        InputInfo(v.name, (batch, *v.shape[1:]) if v.shape and v.shape[0] == graph.batch else v.shape, v.dtype)
        for v in graph.inputs
        if v.name != RNG_COUNTERS
    )
    return ModelInfo(request.name, graph.fingerprint, graph.num_params, inputs, dict(request.kwargs))


def likely_microbatch_size(batch: int, devices: int, options: Options) -> int:
    """Microbatch size to trace with: the one that the options ask for, or else a guess.

    The guess is a multiple of 8 if the batch allows it, so that the samples of a microbatch can be sharded too.
    """
    share = max(1, batch // (options.dp or 1))
    if options.microbatch_size or options.microbatches:
        return min(share, options.microbatch_size or microbatch_size(share, options.microbatches or 1))
    return min(share, 8 * max(1, share // (32 * devices)))


def warn_of_ops_without_rule(plan: Plan, graph: Graph) -> None:
    """Warn of operations that every rank of a tensor-parallel group runs whole because they have no sharding rule."""
    if plan.mesh.tp == 1:
        return
    targets = ops_without_rule(graph)
    if targets:
        warnings.warn(
            f"{plan.model.name} has operations that autopar has no sharding rule for: {', '.join(targets)}. "
            f"Each of the {plan.mesh.tp} ranks of a tensor-parallel group runs them whole.",
            UnknownOpWarning,
            stacklevel=caller_level(),
        )


def built_call(built: BuiltModel, example_inputs: Any, batch_size: int | None) -> Call:
    """As `example_call`, for a model that may be built by name: with the name's input shape and memory format."""
    source = built.source
    if source is None:
        return example_call(built.module, example_inputs, batch_size, None)
    shape = source.expected_shape(built.module, batch_size or DEFAULT_BATCH)
    call = example_call(built.module, example_inputs, batch_size, shape)
    return Call(*in_channels_last((call.args, call.kwargs))) if source.channels_last else call


def example_call(model: nn.Module, example_inputs: Any, batch_size: int | None, shape: tuple[int, ...] | None) -> Call:
    """Example inputs as a call at the global batch; derived from the model's config if none are given.

    Args:
        shape: input shape of a model by name, with the batch.

    Raises:
        UsageError: the batch sizes contradict each other, or inputs cannot be derived.
    """
    if example_inputs is not None:
        call = as_call(model, example_inputs)
        if batch_size is not None and batch_size != call.batch:
            raise UsageError(
                f"batch_size={batch_size}, but the example inputs hold {plural(call.batch, 'sample')}. "
                "Pass one of them."
            )
        return call
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise UsageError(f"batch_size={batch_size!r} must be a whole number of at least 1.")
    if shape is not None:
        shape = (batch_size or shape[0], *shape[1:])
    else:
        shape = default_input_shape(model, batch_size or DEFAULT_BATCH)
    return as_call(model, torch.empty(shape, device="meta"))


def check_devices(devices: int) -> None:
    """Raise a UsageError unless ``devices`` is a whole number of at least 1."""
    if not isinstance(devices, int) or devices < 1:
        raise UsageError(f"devices={devices!r} must be a whole number of at least 1.")


def check_model(model: Any) -> None:
    """Refuse objects other than modules, and modules with hooks that a trace would lose.

    Raises:
        UsageError: the object is no module.
        TraceError: a parameter or buffer has hooks on its gradient.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"The model is {of_type(model)}; it must be a torch.nn.Module. "
            "Names such as vit_small_patch16_224 build one."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "The model is a torch.jit.ScriptModule, which torch.export cannot trace. Pass the module before "
            "torch.jit.script or torch.jit.trace."
        )
    wrapper = next((kind.__name__ for kind in type(model).__mro__ if kind.__name__ in WRAPPERS), None)
    if wrapper is not None:
        raise UsageError(
            f"The model is a {wrapper}, which splits or replicates it already. Pass the model without it: "
            "autopar replicates by dp=, and shards by zero=."
        )
    check_hooks(model)

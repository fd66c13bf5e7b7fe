"""``autopar.plan`` and ``autopar.parallelize``: from an unmodified model to a plan, and to a model that runs it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn

from autopar.batching import Call, as_call
from autopar.codegen import graph_module
from autopar.errors import MicrobatchWarning, PlanDependentRandomWarning, UnknownOpWarning, UsageError
from autopar.hardware import Hardware, load_hardware
from autopar.ir import REPLICATED, TP, Graph, InputInfo, ModelInfo, Plan, Weight, microbatch_size, unlike_asked
from autopar.ir.units import of_type, plural
from autopar.lowering import lowered, uneven_inputs_explained
from autopar.machine import Machine, default_hardware_name, this_machine
from autopar.measuring import decided, timekeeper_for
from autopar.model import ParallelModel
from autopar.options import Options
from autopar.precision import check_device, mixed_dtype, own_precision
from autopar.pricing import Costs
from autopar.programs import Programs
from autopar.random_ops import DRAWS, draws
from autopar.refine import refine
from autopar.rules import unruled
from autopar.runtime import (
    LocalRanks,
    Parameters,
    RankSpec,
    TorchrunRanks,
    TransportName,
    WorkerPool,
    replica_owners,
    with_averages,
    with_optimizer,
)
from autopar.shards import part
from autopar.solve import Constraints, search
from autopar.trace import check_hooks, weight_tensors
from autopar.zoo import ModelSource, default_input_shape

DEFAULT_BATCH = 64
# What a plan says nothing of.
RUN_SETTINGS = frozenset(
    {"backend", "compile", "cuda_graph", "transport", "timeout", "clip_grad_norm", "clip_grad_value"}
)
# Batch statistics are taken over a microbatch, and networks trained on those of fewer samples are clearly worse (Wu and
# He 2018, "Group Normalization", figure 1). The planner does not go lower by itself; microbatches= does.
LEAST_BATCH_NORM_SAMPLES = 8


def plan(
    model: nn.Module | str | ModelSource,
    devices: int,
    example_inputs: Any = None,
    batch_size: int | None = None,
    optimizer: Callable[[Parameters], torch.optim.Optimizer] | None = None,
    ema: Callable[[nn.Module], Any] | None = None,
    **constraints: Any,
) -> Plan:
    """The best plan for a model on a number of devices; needs no GPU and, for a model by name, no weights.

    Args:
        model: a module (on any device), or a name: ``vit_large_patch16_224``, ``torchvision:resnet50``,
            ``package.module:factory``.
        devices: how many; each becomes a rank.
        example_inputs: a tensor, or a tuple or dict of tensors, at the global batch; derived for timm and torchvision.
            The first dim of the first tensor is the batch. Every tensor with the same first size is cut into
            microbatches along that dim, whatever it means there; all others go whole to each microbatch.
        batch_size: global batch, where the inputs are derived (default 64).
        optimizer: as in `parallelize`; what it keeps of each parameter is found by a trial on small ones. That of
            AdamW is planned for where none is given.
        ema: as in `parallelize`; so is what it keeps of each weight.
        constraints: the fields of `autopar.options.Options`.

    Raises:
        UsageError: an argument is wrong.
        TraceError: the model cannot be traced.
        InfeasibleError: nothing fits; the message says what would.
    """
    options = Options.of(constraints)
    source = ModelSource(model) if isinstance(model, str) else model
    built = source.build("meta") if isinstance(source, ModelSource) else source
    check_model(built)
    name = source.name if isinstance(source, ModelSource) else type(built).__name__
    kwargs = source.kwargs if isinstance(source, ModelSource) else {}
    shape = source.input_shape if isinstance(source, ModelSource) else None
    call = example_call(built, example_inputs, batch_size, shape)
    hardware = load_hardware(options.hardware or default_hardware_name(this_machine()))
    return make_plan(built, call, devices, options, hardware, name, kwargs, optimizer, ema)[0]


def make_plan(
    model: nn.Module,
    call: Call,
    devices: int,
    options: Options,
    hardware: Hardware,
    name: str,
    kwargs: Mapping[str, Any],
    optimizer: Callable[[Parameters], torch.optim.Optimizer] | None,
    ema: Callable[[nn.Module], Any] | None = None,
) -> tuple[Plan, Graph]:
    """A plan, and the training graph that it was made from."""
    check_devices(devices)
    batch = call.batch
    microbatch = call.first(likely_microbatch_size(batch, devices, options))
    with uneven_inputs_explained(model, call):
        graph = lowered(model, microbatch, "train", name, options.precision)
    if optimizer is not None:
        graph = with_optimizer(graph, optimizer)
    if ema is not None:
        graph = with_averages(graph, ema)

    def retrace(size: int) -> Graph:
        return lowered(model, call.first(size), "train", name, options.precision)

    inputs = tuple(
        InputInfo(v.name, (batch, *v.shape[1:]) if v.shape and v.shape[0] == graph.batch else v.shape, v.dtype)
        for v in graph.inputs
        if v.name != DRAWS
    )
    info = ModelInfo(name, graph.fingerprint, graph.num_params, inputs, dict(kwargs))
    if options.memory is not None:
        hardware = replace(hardware, memory_bytes=options.memory)
    least_samples = LEAST_BATCH_NORM_SAMPLES if any(op.mutates for op in graph.ops) else 1
    constraints = replace(constraints_of(options, devices, batch), least_samples=least_samples)
    hardware = hardware.running(options.way(hardware.device_type))
    costs = Costs(graph, hardware)
    find = partial(search, costs, graph, hardware, constraints, info, partial(refine, costs))
    keeper = timekeeper_for(options.cost, hardware, devices, options.backend)
    found = None if keeper is None else decided(costs, find, keeper, retrace)
    if found is None:
        costs.unlearn()
        found = find()
    else:
        timed = replace(found.hardware, cost="measured")
        found = replace(found, hardware=timed, prediction=replace(found.prediction, error=hardware.measured_error))
    warn_of_microbatches(found, options)
    warn_of_unruled(found, graph)
    return replace(found, precision=options.precision or own_precision(graph)), graph


def constraints_of(options: Options, devices: int, batch: int) -> Constraints:
    """What the options ask of a plan.

    Raises:
        UsageError: two of them contradict each other, the devices or the batch.
    """
    return Constraints(
        devices=devices,
        batch=batch,
        pp=options.pp,
        tp=options.tp,
        dp=options.dp,
        zero1=options.zero1,
        microbatches=options.microbatches,
        microbatch_size=options.microbatch_size,
        schedule=options.schedule,
        chunks=options.chunks,
        memory_bytes=options.memory,
        balance=options.balance,
        pins=options.pins,
        recompute=options.recompute,
        peer_memory=options.transport != "nccl",
        time_limit_seconds=options.solver_seconds,
    )


def likely_microbatch_size(batch: int, devices: int, options: Options) -> int:
    """Samples to trace with: as many as a microbatch will have, where that is given, or else a guess.

    A guess is a multiple of 8 where the batch allows it, so that the samples of a microbatch can be split too.
    """
    share = max(1, batch // (options.dp or 1))
    if options.microbatch_size or options.microbatches:
        return min(share, options.microbatch_size or microbatch_size(share, options.microbatches or 1))
    return min(share, 8 * max(1, share // (32 * devices)))


def warn_of_microbatches(plan: Plan, options: Options) -> None:
    """Say what became of the microbatches that were asked for, where they come out otherwise."""
    changed = unlike_asked(plan.batch, plan.mesh.dp, options.microbatches, options.microbatch_size)
    if changed:
        warnings.warn(changed, MicrobatchWarning, stacklevel=4)  # the caller of plan or parallelize


def warn_of_unruled(plan: Plan, graph: Graph) -> None:
    """Say which operations are replicated on all ranks of a tensor-parallel group because no rule says how to split."""
    if plan.mesh.tp == 1:
        return
    targets = unruled(graph)
    if targets:
        warnings.warn(
            f"{plan.model.name} has operations that autopar has no sharding rule for: {', '.join(targets)}. "
            f"Each of the {plan.mesh.tp} ranks of a tensor-parallel group runs them whole.",
            UnknownOpWarning,
            stacklevel=4,  # the caller of plan or parallelize
        )


def warn_of_generators(graph: Graph) -> None:
    """Say which operations draw numbers that depend on the plan."""
    left = [op for op in graph.ops if draws(op)]
    if left:
        listed = ", ".join(f"{op.name} ({op.target}{f' at {op.source}' if op.source else ''})" for op in left[:3])
        warnings.warn(
            f"{graph.model} has {len(left)} random operations that cannot count samples: {listed}"
            f"{', …' if len(left) > 3 else ''}. Each rank draws them from a generator of its own, so their numbers "
            "depend on the plan and on how a batch is cut. Set their probability to 0, or draw with torch.rand or "
            "F.dropout.",
            PlanDependentRandomWarning,
            stacklevel=3,  # the caller of parallelize
        )


def example_call(model: nn.Module, example_inputs: Any, batch_size: int | None, shape: tuple[int, ...] | None) -> Call:
    """Example inputs as a call at the global batch; derived from the model's config where none are given."""
    if example_inputs is not None:
        call = as_call(model, example_inputs)
        if batch_size is not None and batch_size != call.batch:
            raise UsageError(
                f"batch_size={batch_size}, but the example inputs hold {plural(call.batch, 'sample')}. "
                "Pass one of them."
            )
        return call
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch_size={batch_size} must be at least 1.")
    if shape is not None:
        shape = (batch_size or shape[0], *shape[1:])
    else:
        shape = default_input_shape(model, batch_size or DEFAULT_BATCH)
    return as_call(model, torch.empty(shape, device="meta"))


@torch.inference_mode(False)  # the model is to train, whatever the caller is doing
def parallelize(
    model: nn.Module,
    devices: int,
    example_inputs: Any = None,
    batch_size: int | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Callable[[Parameters], torch.optim.Optimizer] | None = None,
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    seed: int = 0,
    ema: Callable[[nn.Module], Any] | None = None,
    **constraints: Any,
) -> ParallelModel:
    """The model split over devices and ready to train; the model itself is copied from, never modified.

    In a plain script or notebook this starts one worker process per device (none for ``devices=1``). Under torchrun or
    srun, on one node or several, every process makes the same call and becomes one device; rank 0's weights count.

    Args:
        model: any module that torch.export can trace, on any device but meta.
        devices: how many; under a launcher as many as it started processes.
        example_inputs, batch_size: as in `plan`.
        loss_fn: ``loss_fn(output, target)``, the mean loss over the samples it is given; cross-entropy by default. A
            CUDA graph does not run its Python again: let numbers that change come with the target.
        optimizer: makes an optimizer from a list of parameters, such as ``functools.partial(AdamW, lr=1e-3)``. It is
            called where the plan is made, with small parameters of the same names, and on each rank with all
            parameters of the model, of which it keeps those (or the parts of them) that the rank updates; those that
            lie elsewhere have shapes and no values. The list also has
            ``named_parameters()`` with the model's own names, to group parameters by name:
            ``lambda params: AdamW(timm.optim.param_groups_weight_decay(params, 0.05))``. Optimizers that need a
            parameter whole (LAMB, Muon, …) get whole ones. On CUDA, torch's Adam, AdamW and SGD run their fused kernels
            unless ``fused`` or ``foreach`` is given. If the callable has a ``clip_grad_norm``, the norm of all
            gradients is limited to that too. `autopar.train.timm_optimizer` makes any by timm's name.
        lr_scheduler: makes a scheduler from an optimizer; step it with ``pm.lr_scheduler.step()``.
            `autopar.train.schedule` makes timm's.
        plan: a plan or the path of one; skips planning.
        seed: of random operations (dropout). What they draw depends on it, the number of updates so far, the sample's
            number since the last one and the place in the model, but not on the plan.
        ema: makes a moving average of weights from a module, such as
            ``functools.partial(timm.utils.ModelEmaV3, decay=0.999)``; see `ParallelModel.ema_weights`.
        constraints: the fields of `autopar.options.Options`.

    Raises:
        UsageError, TraceError, InfeasibleError: as `plan`.
        PlanError: the given plan does not fit the model or the devices.
        WorkerError: a worker did not start.
    """
    options = Options.of(constraints)
    check_devices(devices)
    check_model(model)
    machine = this_machine(devices, options.backend)
    options.check_machine(machine.device_type)
    call = example_call(model, example_inputs, batch_size, None)
    if any(p.is_meta for p in model.parameters()):
        raise UsageError("The model is on the meta device and has no weights to run with. Build it on the CPU.")
    if plan is None:
        hardware = machine.described(load_hardware(options.hardware or default_hardware_name(machine)))
        if options.hardware is not None:
            machine.warn_of_other_gpu(hardware)
        if options.hardware is None and options.memory is None and machine.device_type == "cpu":
            options = replace(options, memory=psutil.virtual_memory().total // machine.local_devices(devices))
        name = type(model).__name__
        chosen, graph = make_plan(model, call, devices, options, hardware, name, {}, optimizer, ema)
    else:
        chosen, graph = plan if isinstance(plan, Plan) else Plan.load(plan), None
        check_given(chosen, devices, constraints)
    check_device(chosen.precision, machine)
    programs = Programs(model, chosen, call.first(min(call.batch, chosen.batch)), graph)
    warn_of_generators(programs.example)
    specs = rank_specs(
        programs,
        machine,
        loss_fn=loss_fn or F.cross_entropy,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        ema=ema,
        seed=seed,
        clip_grad_norm=options.norm_limit(optimizer),
        clip_grad_value=options.clip_grad_value,
        compiled=options.way(machine.device_type).compiled,
        cuda_graph=options.cuda_graph is not False,
        transport=options.transport,
    )
    tensors = weight_tensors(model, programs.example)
    ranks = start(specs, tensors, machine, options.timeout, chosen.decision)
    return ParallelModel(model, chosen, programs, ranks, machine, specs[0])


def check_devices(devices: int) -> None:
    """Raise a UsageError unless ``devices`` is a whole number of at least 1."""
    if not isinstance(devices, int) or devices < 1:
        raise UsageError(f"devices={devices!r} must be a whole number of at least 1.")


def check_model(model: Any) -> None:
    """Refuse what is no module, and hooks that would be lost.

    Raises:
        UsageError: it is no module.
        TraceError: a parameter or buffer has hooks on its gradient.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"The model is {of_type(model)}; it must be a torch.nn.Module. "
            "autopar.plan also takes names, such as vit_small_patch16_224."
        )
    check_hooks(model)


def check_given(plan: Plan, devices: int, constraints: Mapping[str, Any]) -> None:
    """Compare a given plan with the other arguments.

    Raises:
        UsageError: it is for another number of devices, or constraints are given too.
        PlanError: it contradicts itself.
    """
    plan.validate()
    if plan.mesh.devices != devices:
        raise UsageError(f"The plan is for {plural(plan.mesh.devices, 'device')}, parallelize was asked for {devices}.")
    for name in constraints.keys() - RUN_SETTINGS:
        raise UsageError(f"Both plan= and {name}= are given; the plan decides already. Leave {name} out.")


def rank_specs(
    programs: Programs,
    machine: Machine,
    *,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: Callable[[Parameters], torch.optim.Optimizer] | None = None,
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ema: Callable[[nn.Module], Any] | None = None,
    seed: int = 0,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    compiled: bool = False,
    cuda_graph: bool = False,
    transport: TransportName = "auto",
) -> list[RankSpec]:
    """What each rank is told."""
    mesh, stored, positions = programs.plan.mesh, programs.storage, programs.positions
    weights: list[list[Weight]] = [[] for _ in range(mesh.pp)]
    for weight in programs.example.weights:
        if weight.kind != "constant":
            layout = stored.get(weight.name, REPLICATED)
            local = replace(weight, shape=layout.local_shape(weight.shape, {TP: mesh.tp}))
            for position in positions[weight.name]:
                weights[position].append(local)
    pairs = {(e.src, e.dst) for v in programs.known.values() for p in v.programs for e in p.sends}
    pairs |= {(i, i + 1) for i in range(programs.num_stages - 1)}
    owners: Mapping[str, int] = {}
    if programs.plan.zero1:
        owners = replica_owners(weights, positions, mesh.dp)
    first = RankSpec(
        rank=0,
        mesh=mesh,
        device=machine.device_of(0),
        build=partial(graph_module, compiled=compiled),
        weights=tuple(weights[0]),
        holders={name: held_at for name, held_at in positions.items() if len(held_at) > 1},
        edges=tuple(sorted(pairs | {(b, a) for a, b in pairs})),
        loss_fn=loss_fn,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        clip_grad_norm=clip_grad_norm,
        seed=seed,
        clip_grad_value=clip_grad_value,
        ema=ema,
        trainable=tuple(weight for weight in programs.example.weights if weight.requires_grad),
        storage=stored,
        owners=owners,
        autocast=mixed_dtype(programs.example, programs.plan.precision),
        chunks=programs.plan.chunks,
        cuda_graph=cuda_graph,
        transport=transport,
    )
    return [
        replace(
            first,
            rank=rank,
            device=machine.device_of(rank),
            weights=tuple(weights[mesh.place(rank).stage]),
            region=", ".join(f"{s.first} to {s.last}" for s in programs.plan.stages if rank in s.ranks),
            predicted_bytes=programs.plan.prediction.peak_bytes[rank],
        )
        for rank in range(mesh.devices)
    ]


def start(
    specs: list[RankSpec], tensors: Mapping[str, torch.Tensor], machine: Machine, timeout_seconds: float, decision: str
) -> LocalRanks | TorchrunRanks | WorkerPool:
    """The ranks, running: this process's own under torchrun or alone, worker processes otherwise."""
    if machine.launched is not None:
        machine.limit_threads()
        return TorchrunRanks(specs[machine.launched.rank], tensors, machine.backend, timeout_seconds, decision)
    if len(specs) == 1:
        return LocalRanks(specs[0], tensors)
    parts = [
        {w.name: part(tensors[w.name], s.layout(w.name), {TP: s.mesh.tp}, {TP: s.place.shard}) for w in s.weights}
        for s in specs
    ]
    return WorkerPool(specs, parts, machine.backend, timeout_seconds, machine.num_threads)

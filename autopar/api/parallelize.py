"""``autopar.plan`` and ``autopar.parallelize``: from an unmodified model to a plan, and to a model that runs it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn

from autopar.api.model import ParallelModel
from autopar.api.options import Options
from autopar.api.planning.plan import check_devices, check_model, example_call, make_plan
from autopar.api.precision import check_device
from autopar.api.program_cache import ProgramCache
from autopar.api.rank_specs import rank_specs
from autopar.cost.hardware.load import load_hardware
from autopar.errors import PlanDependentRandomWarning, UsageError
from autopar.ir.graph import Graph
from autopar.ir.layout import TP
from autopar.ir.plan import Plan
from autopar.ir.units import plural
from autopar.runtime.launch.devices import Machine, default_hardware_name, this_machine
from autopar.runtime.launch.pool import WorkerPool
from autopar.runtime.launch.spmd import InProcessBackend, SpmdBackend
from autopar.runtime.spec import Parameters, RankSpec
from autopar.sharding.tensors import part
from autopar.trace.passes.counter_rng import is_random
from autopar.trace.trace import weight_tensors

# What a plan says nothing of.
RUN_SETTINGS = frozenset(
    {"backend", "compile", "cuda_graph", "transport", "timeout", "clip_grad_norm", "clip_grad_value"}
)


def warn_of_plan_dependent_random(graph: Graph) -> None:
    """Say which operations draw numbers that depend on the plan."""
    left = [op for op in graph.ops if is_random(op)]
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
        constraints: the fields of `autopar.api.options.Options`.

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
        check_given_plan(chosen, devices, constraints)
    check_device(chosen.precision, machine)
    programs = ProgramCache(model, chosen, call.first(min(call.batch, chosen.batch)), graph)
    warn_of_plan_dependent_random(programs.example)
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
        compiled=options.execution_mode(machine.device_type).compiled,
        cuda_graph=options.cuda_graph is not False,
        transport=options.transport,
    )
    tensors = weight_tensors(model, programs.example)
    ranks = start_ranks(specs, tensors, machine, options.timeout, chosen.decision)
    return ParallelModel(model, chosen, programs, ranks, machine, specs[0])


def check_given_plan(plan: Plan, devices: int, constraints: Mapping[str, Any]) -> None:
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


def start_ranks(
    specs: list[RankSpec], tensors: Mapping[str, torch.Tensor], machine: Machine, timeout_seconds: float, decision: str
) -> InProcessBackend | SpmdBackend | WorkerPool:
    """The ranks, running: this process's own under torchrun or alone, worker processes otherwise."""
    if machine.launched is not None:
        machine.limit_threads()
        return SpmdBackend(specs[machine.launched.rank], tensors, machine.backend, timeout_seconds, decision)
    if len(specs) == 1:
        return InProcessBackend(specs[0], tensors)
    parts = [
        {w.name: part(tensors[w.name], s.layout(w.name), {TP: s.mesh.tp}, {TP: s.place.shard}) for w in s.weights}
        for s in specs
    ]
    return WorkerPool(specs, parts, machine.backend, timeout_seconds, machine.num_threads)

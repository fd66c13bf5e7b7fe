"""``autopar.parallelize``: from an unmodified model to one that runs on several devices, in four steps.

The steps are the last four lines of `parallelize`; the room's docstring (``autopar/api/__init__.py``) draws them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import nn

from autopar.api.model import ParallelModel
from autopar.api.model_source import ModelSource, built_model
from autopar.api.options import RUN_SETTINGS, Options
from autopar.api.outputs import warn_of_mixed_samples
from autopar.api.planning.hardware import planning_hardware
from autopar.api.planning.plan import PlanRequest, built_call, check_devices, check_model, lower_example, plan_graph
from autopar.api.planning.rank0 import plan_on_rank0
from autopar.api.precision import check_device
from autopar.api.program_cache import ProgramCache
from autopar.api.rank_specs import rank_specs
from autopar.api.recipe_check import check_recipe, try_recipe
from autopar.errors import PlanDependentRandomWarning, UpdatedStateWarning, UsageError, caller_level
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.plan_constraints import check_choice
from autopar.ir.status import doing, showing_status
from autopar.ir.units import plural
from autopar.measure.compile_ahead import prepare_compilers
from autopar.runtime.launch.devices import Machine, check_world, this_machine
from autopar.runtime.launch.environment import launched
from autopar.runtime.launch.fork_server import prepare
from autopar.runtime.launch.pool import WorkerPool
from autopar.runtime.launch.spmd import InProcessBackend, SpmdBackend
from autopar.runtime.launch.start_exchange import StartExchange
from autopar.runtime.launch.torch_settings import without_caller_modes
from autopar.runtime.spec import LossOver, Parameters, RankSpec, TrainingRecipe
from autopar.sharding.lookup import key_of
from autopar.sharding.table import UPDATING
from autopar.trace.passes.random_ops import is_random
from autopar.trace.trace import weight_tensors


@without_caller_modes()
@showing_status("building the model")
def parallelize(
    model: nn.Module | str | ModelSource,
    devices: int,
    example_inputs: Any = None,
    *,
    batch_size: int | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Callable[[Parameters], torch.optim.Optimizer] | None = None,
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    seed: int = 0,
    ema: Callable[[nn.Module], Any] | None = None,
    loss_over: LossOver = "microbatch",
    **constraints: Any,
) -> ParallelModel:
    """The model split over devices, in the mode of the passed model, which is copied from and never modified.

    The passed model is traced again when inputs of a new shape come. Until ``close()`` it can be used, moved and given
    other weights, but its modules, their attributes and ``requires_grad`` must stay; change a ``copy.deepcopy`` of it.

    In a plain script or notebook this starts one worker process per device (none for ``devices=1``). Under torchrun or
    srun, on one node or several, every process makes the same call and becomes one rank; all use rank 0's weights.
    Rank 0 plans, and times operations unless ``cost="analytic"``; an error of any rank is raised on all of them.

    Torch's default dtype, float32 precisions and deterministic mode are those at this call, whatever the caller sets
    later. ``torch.autocast``, ``no_grad``, ``inference_mode`` and the default device have no effect on a run: pass
    ``precision="bf16"`` instead of autocast. Only a model's trace reads the default device, that of this call.

    Args:
        model: any module that torch.export can trace, on any device but meta; or a name, as in `plan`, of a model that
            gets fresh weights.
        devices: number of ranks; under a launcher, the number of processes that it started.
        example_inputs, batch_size: as in `plan`.
        loss_fn: ``loss_fn(output, target)``, the mean loss over the samples it is given; cross-entropy by default. The
            tensors of a module or `functools.partial` are copied to each rank's device. They cannot be trained: put
            what has parameters into the model. A CUDA graph does not run its Python code again: pass numbers that
            change as part of the target.
        optimizer: builds an optimizer from a list of parameters, such as ``functools.partial(AdamW, lr=1e-3)``. The
            planner calls it with small parameters of the same names. Each rank calls it with all parameters of the
            model; the optimizer keeps the parameters, or shards of them, that the rank updates. Parameters of other
            ranks have a shape and no values; where the rank has shards, a further call gets them in their whole shapes,
            whose groups count. The list also has ``named_parameters()`` with the model's names, to group
            parameters by name: ``lambda params: AdamW(timm.optim.param_groups_weight_decay(params, 0.05))``. Optimizers
            that need full parameters (LAMB, Muon, …) get full ones. On CUDA, torch's Adam, AdamW and SGD run their
            fused kernels unless ``fused`` or ``foreach`` is given. If the callable has an attribute ``clip_grad_norm``,
            it limits the norm of all gradients too. `autopar.train.timm_optimizer` builds any optimizer by timm's name.
        lr_scheduler: builds a scheduler from an optimizer; step it with ``pm.lr_scheduler.step()``.
            `autopar.train.schedule` builds timm's schedulers.
        plan: a plan or the path of a plan file; skips planning.
        seed: seed of random operations such as dropout. Their numbers depend on the seed, the updates so far, the
            sample's index since the last update and the operation, but not on the plan.
        ema: builds a moving average of weights from a module, such as
            ``functools.partial(timm.utils.ModelEmaV3, decay=0.999)``; see `ParallelModel.ema_weights`. Checkpoints keep
            what it changes besides the averages: attributes and buffers that are numbers, texts or small tensors.
        loss_over: what ``loss_fn`` is given. "microbatch": the outputs and targets of one microbatch; the loss of the
            batch is the mean of these, weighted by samples. "batch": those of the global batch, for losses that are no
            such mean, such as contrastive ones. All forwards then come before all backwards: plan with
            ``schedule="gpipe"``. Each replica of the last stage holds the outputs of the global batch. Batch norm still
            uses the statistics of a microbatch. "caller": nothing; the caller computes losses from the outputs of
            ``pm(x)`` and calls ``loss.backward()``, also with all forwards first. `autopar.prepare` uses it.
        constraints: the fields of `autopar.api.options.Options`.

    Raises:
        UsageError, TraceError, InfeasibleError: as `plan`; or a callable cannot be used, such as an optimizer of other
            parameters than it is given; or the ranks' models, arguments, versions or devices differ.
        PlanError: the plan does not fit the model or the devices.
        WorkerError: a worker did not start.
    """
    check_devices(devices)
    launch = launched()
    check_world(launch, devices)  # before ranks wait for each other: a launcher's variables may be left over
    exchange = None if launch is None else StartExchange(launch)
    with shared_errors(exchange):
        options = options_for_loss(Options.of(constraints), loss_over)
        built = built_model(model)
        module = built.module
        check_model(module)
        machine = this_machine(devices, options.backend)
        options.check_machine(machine.device_type)
        call = built_call(built, example_inputs, batch_size)
        check_has_weights(module)
        user_plan = load_user_plan(plan, devices, constraints)
        if user_plan is not None and loss_over != "microbatch":
            check_schedule_for_loss(loss_over, user_plan.schedule, user_plan.microbatches, "The plan has")
        if machine.launched is None and devices > 1:
            prepare(machine.num_threads)  # workers' imports overlap with planning
        elif options.execution_mode(machine.device_type).compiled:
            prepare_compilers(machine.device_type)
        check_device(options.precision if user_plan is None else user_plan.precision, machine)
        channels_last = options.computes_channels_last(machine.device_type)
        request = PlanRequest(module, call, devices, options, built.name, built.kwargs, optimizer, ema, channels_last)
        clip_norm, clip_value = options.norm_limit(optimizer), options.clip_grad_value
        loss_fn = F.cross_entropy if loss_fn is None else loss_fn
        recipe = TrainingRecipe(loss_fn, optimizer, lr_scheduler, ema, seed, clip_norm, clip_value, loss_over)
        check_recipe(recipe, module)

        graph = lower_example(request, user_plan)
        try_recipe(recipe, graph)
    if exchange is not None:
        chosen = plan_on_rank0(exchange, request, graph, machine, user_plan)
    else:
        chosen = user_plan or plan_for_workers(request, graph, machine)
    with shared_errors(exchange):
        compiled = options.execution_mode(machine.device_type).compiled
        programs = ProgramCache(module, chosen, call, graph, compiled)
        check_device(programs.plan.precision, machine)
        warn_of_plan_dependent_random(programs.example)
        warn_of_updated_state(programs.example, chosen)
        warn_of_synchronised_norms(module, chosen)
        if loss_over == "microbatch":
            warn_of_mixed_samples(programs.example, call.batch, partial(programs.whole_graph, "train", call))
        specs = rank_specs(programs, machine, recipe, options)
    if exchange is not None:
        exchange.confirm()
    doing(f"starting {plural(len(specs), 'rank')}")
    return start(programs, specs, machine, options.timeout)


def shared_errors(exchange: StartExchange | None) -> AbstractContextManager[None]:
    """Context in which an error of this rank is raised on all ranks of a launcher."""
    return nullcontext() if exchange is None else exchange.shared_errors()


def options_for_loss(options: Options, loss_over: LossOver) -> Options:
    """The options under which ``loss_over`` works: a loss of all microbatches asks for GPipe.

    Raises:
        UsageError: ``loss_over`` is unknown, or needs another schedule than the one that is asked for.
    """
    check_choice("loss_over", loss_over, get_args(LossOver))
    if loss_over == "microbatch" or options.microbatches == 1:
        return options
    if options.schedule == "auto":
        return replace(options, schedule="gpipe")
    check_schedule_for_loss(loss_over, options.schedule, options.microbatches, "You asked for")
    return options


def check_schedule_for_loss(loss_over: LossOver, schedule: str, microbatches: int | None, who: str) -> None:
    """Check that all forwards of a schedule come before its backwards, as a loss of all microbatches needs.

    Args:
        who: subject and verb of the sentence that names the schedule.

    Raises:
        UsageError: they do not.
    """
    if schedule != "gpipe" and microbatches != 1:
        raise UsageError(
            f"{who} schedule={schedule!r}, whose backwards begin before its forwards end. loss_over={loss_over!r} "
            'needs the outputs of all microbatches first: use schedule="gpipe", or microbatches=1.'
        )


def plan_for_workers(request: PlanRequest, graph: Graph, machine: Machine) -> Plan:
    """The plan of ranks that this process starts. Raises as `plan_graph`."""
    devices = [machine.rank_device(rank, request.devices) for rank in range(request.devices)]
    return plan_graph(request, graph, planning_hardware(machine, request.options, devices))


def check_has_weights(model: nn.Module) -> None:
    """Raise a UsageError if parameters of the model are on the meta device."""
    if any(p.is_meta for p in model.parameters()):
        raise UsageError("The model is on the meta device and has no weights to run with. Build it on the CPU.")


def load_user_plan(
    plan: Plan | str | os.PathLike[str] | None, devices: int, constraints: Mapping[str, Any]
) -> Plan | None:
    """The user's plan, loaded and compared with the other arguments; None if there is none.

    Raises:
        UsageError: the plan is for another number of devices, or constraints on the plan are passed too.
        PlanError: the plan contradicts itself.
    """
    if plan is None:
        return None
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    plan.validate()
    if plan.mesh.devices != devices:
        raise UsageError(
            f"The plan is for {plural(plan.mesh.devices, 'device')}, parallelize was asked for {devices}. Use "
            f"devices={plan.mesh.devices} (--devices {plan.mesh.devices}), or plan for {devices}."
        )
    for name in constraints.keys() - RUN_SETTINGS:
        raise UsageError(f"Both plan= and {name}= are given; the plan decides already. Leave {name} out.")
    return plan


def start(programs: ProgramCache, specs: list[RankSpec], machine: Machine, timeout_seconds: float) -> ParallelModel:
    """The model with its ranks running: this process's rank under a launcher or on one device, else worker processes.

    Raises:
        WorkerError: a worker did not start.
    """
    tensors = weight_tensors(programs.model, programs.example)
    if machine.launched is not None:
        machine.limit_threads()
        ranks = SpmdBackend(specs[machine.launched.rank], tensors, machine.backend, timeout_seconds)
    elif len(specs) == 1:
        ranks = InProcessBackend(specs[0], tensors)
    else:
        parts = ({w.name: spec.local_part(w.name, tensors[w.name]) for w in spec.weights} for spec in specs)
        ranks = WorkerPool(specs, parts, machine.backend, timeout_seconds, machine.num_threads)
    return ParallelModel(programs.model, programs.plan, programs, ranks, machine, specs[0])


def warn_of_plan_dependent_random(graph: Graph) -> None:
    """Warn of random operations whose numbers depend on the plan."""
    ops = [op for op in graph.ops if is_random(op)]
    if ops:
        listed = ", ".join(f"{op.name} ({op.target}{f' at {op.source}' if op.source else ''})" for op in ops[:3])
        warnings.warn(
            f"{graph.model} has {len(ops)} random operations that cannot count samples: {listed}"
            f"{', …' if len(ops) > 3 else ''}. Each rank draws them from its generator, so their numbers "
            "depend on the plan and on how a batch is cut. Set their probability to 0, or draw with torch.rand or "
            "F.dropout.",
            PlanDependentRandomWarning,
            stacklevel=caller_level(),
        )


def warn_of_updated_state(graph: Graph, plan: Plan) -> None:
    """Warn of weights and buffers that a forward updates more often than on one device, or by other samples.

    Norms do so too, by the definition of a microbatch.
    """
    norms = {op.module for op in graph.ops if key_of(op.target) in UPDATING}
    by_samples = {value.name for value in graph.inputs}
    found: dict[str, str] = {}
    for op in graph.ops:
        reads_samples = not by_samples.isdisjoint(op.reads)
        if reads_samples:
            by_samples |= {*(value.name for value in op.outputs), *op.mutates}
        if op.module not in norms and (plan.microbatches > 1 or (plan.mesh.dp > 1 and reads_samples)):
            found |= dict.fromkeys(op.mutates, op.source)
    if found:
        listed = ", ".join(f"{name}{f' at {source}' if source else ''}" for name, source in list(found.items())[:3])
        warnings.warn(
            f"The forward of {graph.model} updates {listed}{', …' if len(found) > 3 else ''}: for each microbatch "
            f"({plan.microbatches}), by the samples of a replica. On one device it would once, by the batch; so it "
            "does with microbatches=1 and dp=1.",
            UpdatedStateWarning,
            stacklevel=caller_level(),
        )


def warn_of_synchronised_norms(model: nn.Module, plan: Plan) -> None:
    """Warn of batch norms that would synchronise their statistics, which ranks do not."""
    count = sum(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if count and plan.microbatches * plan.mesh.dp > 1:
        warnings.warn(
            f"{plan.model.name} has {plural(count, 'SyncBatchNorm')}, which compute as BatchNorm does: by a microbatch "
            f"of {plan.microbatch_size} samples. microbatches=1 with dp=1 gives the statistics of the batch.",
            UpdatedStateWarning,
            stacklevel=caller_level(),
        )

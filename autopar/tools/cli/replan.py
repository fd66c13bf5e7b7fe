"""From a plan file back to its model, its inputs, and the programs of its ranks."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.api.model_source import ModelSource, check_named_by_file, in_channels_last
from autopar.api.program_cache import ProgramCache
from autopar.codegen.emit import source
from autopar.errors import PlanError, UsageError
from autopar.ir.graph import Mode
from autopar.ir.layout import REPLICATED
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.runtime.spec import rank_text
from autopar.tools.cli.train_flags import EMA_DECAY
from autopar.tools.explain.why_not import ReplanContext, plan_hardware
from autopar.trace.call import Call, as_call
from autopar.train import timm_average


def stage_source(plan: Plan, rank: int, mode: Mode, name: str | None, kwargs: Mapping[str, Any] | None) -> str:
    """Readable Python of one rank: one program per stage.

    Args:
        name, kwargs: model to build and its arguments; None for the plan's.
    Raises:
        UsageError: no such rank, or no such model.
        PlanError: the plan's model cannot be built by name, or the built model is not the plan's.
    """
    if not 0 <= rank < plan.mesh.devices:
        raise UsageError(f"--rank {rank}: the plan has ranks 0 to {plan.mesh.devices - 1}.")
    model = planned_model(plan, name, kwargs)
    call = planned_call(plan, model)
    programs = ProgramCache(model, plan, call)
    variant = programs.specialize(mode, call.first(plan.microbatch_size))
    parts = []
    for stage in plan.stages_of(rank):
        program = variant.of_shard(plan.mesh.place(rank).shard)[stage]
        parts.append("\n".join([*held_lines(program, programs), source(program)]))
    return f"# {rank_text(plan.mesh, rank, plan.placement)} of {plan.mesh}\n" + "\n\n".join(parts)


def held_lines(program: Program, programs: ProgramCache) -> list[str]:
    """A comment per weight that a rank stores split, or whose gradient is summed over tp."""
    lines = []
    for weight in program.weights:
        layout, whole = programs.storage.get(weight.name, REPLICATED), programs.example.weight[weight.name].shape
        if layout.splits:
            lines.append(f"# holds   {weight.name}: {weight.dtype}{list(weight.shape)} of {list(whole)}, {layout}")
        elif layout != REPLICATED:
            lines.append(f"# holds   {weight.name}: whole, its gradient is summed over tp once a step")
    return lines


def planned_model(
    plan: Plan, name: str | None, kwargs: Mapping[str, Any] | None, channels_last: bool = False
) -> nn.Module:
    """The plan's model on the meta device, without weights.

    Args:
        name, kwargs: model to build and its arguments; None for the plan's.
        channels_last: memory format of the model.
    Raises:
        UsageError: no such model, or the plan's is not of timm or torchvision and ``name`` is None.
        PlanError: the plan's model cannot be built by name.
    """
    if name is not None:
        return ModelSource(name, kwargs or {}, channels_last=channels_last).build("meta")
    check_named_by_file(
        plan.model.name,
        plan.model.kwargs if kwargs is None else {},
        f"name it on the command line: {shlex.join(model_flags(plan))}",
    )
    if kwargs is None:
        kwargs = plan.model.kwargs
    try:
        return ModelSource(plan.model.name, kwargs, channels_last=channels_last).build("meta")
    except UsageError as error:
        raise PlanError(
            f"Cannot build the plan's model by its name, field model.name: {error} A model that was made in Python "
            "is known to its plan by its class only: pass --model NAME [--model-kwargs ...]."
        ) from error


def model_flags(plan: Plan) -> list[str]:
    """Flags that name the plan's model on the command line."""
    kwargs = [f"{name}={value}" for name, value in plan.model.kwargs.items()]
    return ["--model", plan.model.name, *(["--model-kwargs", *kwargs] if kwargs else [])]


def planned_inputs(plan: Plan, model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Plan's inputs by argument name of forward, on the meta device."""
    parameters = {name.lower(): name for name in inspect.signature(model.forward).parameters}
    return {  # torch.export writes names in lower case
        parameters.get(i.name, i.name): torch.empty(i.shape, dtype=dtype_of(i.dtype), device="meta")
        for i in plan.model.inputs
    }


def planned_call(plan: Plan, model: nn.Module) -> Call:
    """Call of the model with the plan's inputs, on the meta device.

    Raises:
        PlanError: the inputs are not tensors that forward takes by name.
    """
    tensors = planned_inputs(plan, model)
    try:
        return as_call(model, tensors)
    except UsageError as error:
        raise PlanError(
            f"Cannot call {type(model).__name__}.forward{inspect.signature(model.forward)} with the plan's inputs, "
            f"field model.inputs: {', '.join(tensors)}. A plan's model can be called again where every input is an "
            "argument with a name: inputs in *args, in lists or dicts, and ones with the name of a parameter of the "
            "model are not supported."
        ) from error


def dtype_of(name: str) -> torch.dtype:
    """Torch dtype of a plan's field.

    Raises:
        PlanError: torch has no dtype of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"Plan field model.inputs: {name!r} is not a dtype of PyTorch.")
    return dtype


def rebuilt_of(
    plan: Plan,
    name: str | None,
    kwargs: Mapping[str, Any] | None,
    hardware: str | None,
    opt: str | None,
    model_ema: bool,
    channels_last: bool,
) -> ReplanContext:
    """Everything that the plan was made from.

    Args:
        name, kwargs: model to build and its arguments; None for the plan's.
        hardware: name or file of the plan's cost model; None for a shipped one.
        opt: timm's name of the optimizer that the plan is for; None for AdamW.
        model_ema: whether the plan is for a moving average in addition to the weights.
        channels_last: whether the plan is for a model and images in that memory format.
    Raises:
        UsageError: no such model.
        HardwareError: the cost model is unknown, or not the plan's.
        PlanError: as `planned_model` and `planned_call`.
    """
    machine = plan_hardware(plan, hardware)
    model = planned_model(plan, name, kwargs, channels_last)
    call = planned_call(plan, model)
    arguments = kwargs if kwargs is not None else plan.model.kwargs if name is None else {}
    return ReplanContext(
        name or plan.model.name,
        arguments,
        model,
        planned_inputs(plan, model),
        Call(*in_channels_last((call.args, call.kwargs))) if channels_last else call,
        machine,
        hardware or plan.hardware.name,
        opt,
        timm_average(EMA_DECAY) if model_ema else None,
        channels_last,
    )

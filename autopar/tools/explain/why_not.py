"""Answers to "why not": the best plan of the same model under a constraint, compared with a plan file."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.api.options import Options
from autopar.api.planning.plan import PlanRequest, lower_example, plan_graph
from autopar.cost.hardware.load import hardware_names, load_hardware
from autopar.errors import HardwareError, InfeasibleError, PlanError, UsageError
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import Alternative
from autopar.ir.table import comparison_text
from autopar.ir.units import TIME, text
from autopar.solve.result.step_breakdown import excess_text
from autopar.tools.explain.breakdown import breakdown_of
from autopar.tools.explain.why_not_result import WhyNotResult
from autopar.trace.call import Call
from autopar.trace.lower import lower_planned
from autopar.trace.passes.layouts import gain_from_channels_last
from autopar.train import timm_optimizer

ALIKE = 5e-4  # relative difference below which two steps count as equally fast


@dataclass(frozen=True)
class Query:
    """A constraint as the user wrote it, and as keyword arguments of `autopar.plan`."""

    asked: str
    constraints: Mapping[str, Any]


@dataclass(frozen=True)
class ReplanContext:
    """Everything that planning again needs: the model, its inputs and the machine.

    ``name`` and ``kwargs`` build the model; ``inputs`` are by argument name; ``machine`` is the name or file of
    ``hardware``. ``opt`` is timm's name of the optimizer, None for AdamW. ``ema`` makes the moving average of the
    weights, None without one. ``channels_last`` is the memory format of model and images.
    """

    name: str
    kwargs: Mapping[str, Any]
    model: nn.Module
    inputs: Mapping[str, torch.Tensor]
    call: Call
    hardware: Hardware
    machine: str
    opt: str | None = None
    ema: Callable[[nn.Module], Any] | None = None
    channels_last: bool = False


def plan_hardware(plan: Plan, file: str | None) -> Hardware:
    """Cost model of the machine that a plan was priced for.

    Args:
        file: name or TOML file of the cost model; None for a shipped one.
    Raises:
        HardwareError: the plan's cost model is not shipped and no file is given, or the file describes another machine.
    """
    name = plan.hardware.name
    if file is None:
        if name not in hardware_names():
            raise HardwareError(
                f"The plan was priced for cost model {name} (field hardware.name), which autopar does not ship. Pass "
                "its file: --hardware FILE.toml."
            )
        return load_hardware(name)
    hardware = load_hardware(file)
    if hardware.name != name:
        raise HardwareError(
            f"--hardware {file} is cost model {hardware.name}, the plan was priced for {name} (field hardware.name); "
            "steps on two machines do not compare. Give the plan's, or plan again for this one."
        )
    return hardware


def asked_of(plan: Plan, hardware: Hardware, graph: Graph, question: Query) -> Mapping[str, Any]:
    """Keyword arguments of `autopar.plan` for a question.

    Of the plan only its precision and memory format, its dtype of gradients between replicas, its kind of cost and its
    memory limit are kept; the question's constraints are added.
    """
    # Only prices of one kind compare.
    fixed: dict[str, Any] = {
        "precision": plan.precision, "cost": "analytic" if plan.hardware.cost == "analytic" else "auto"
    }  # fmt: skip
    if plan.reduce_dtype != "float32":
        fixed["reduce_dtype"] = plan.reduce_dtype
    by_default = Options().computes_channels_last(hardware.device_type) and gain_from_channels_last(graph)
    if plan.channels_last != by_default:
        fixed["channels_last"] = plan.channels_last
    if plan.hardware.memory_bytes != hardware.memory_bytes:
        fixed["memory"] = plan.hardware.memory_bytes
    asked = fixed | dict(question.constraints)
    return asked | ({"measure_seconds": 0} if asked["cost"] == "auto" else {})  # times that are there count


def answers(plan: Plan, rebuilt: ReplanContext, questions: Sequence[Query]) -> tuple[WhyNotResult, ...]:
    """Answers to the questions, in order.

    Raises:
        UsageError: a constraint is impossible for every model.
        PlanError: the model is not the plan's.
        TraceError: the model cannot be traced.
    """
    graph = lower_planned(plan, rebuilt.model, rebuilt.call.first(plan.microbatch_size), "train")
    keywords = [asked_of(plan, rebuilt.hardware, graph, question) for question in questions]
    for options in keywords:
        Options.of(options).constraints(plan.mesh.devices, plan.batch)
    plan.stage_of(graph)  # refuses a model other than the plan's
    return tuple(answer(plan, rebuilt, question.asked, options) for question, options in zip(questions, keywords))


def answer(plan: Plan, rebuilt: ReplanContext, asked: str, given: Mapping[str, Any]) -> WhyNotResult:
    """Comparison of the best plan under a constraint with the plan in the file."""
    model, options = rebuilt.model, Options.of(given)
    optimizer = timm_optimizer(model, rebuilt.opt, None) if rebuilt.opt is not None else None
    try:
        request = PlanRequest(
            model, rebuilt.call, plan.mesh.devices, options, rebuilt.name, rebuilt.kwargs, optimizer, rebuilt.ema,
            options.computes_channels_last(rebuilt.hardware.device_type),
        )  # fmt: skip
        found = plan_graph(request, lower_example(request), rebuilt.hardware)
    except (PlanError, HardwareError):
        raise
    except (UsageError, InfeasibleError) as error:  # the constraint is possible, but not for this model or machine
        return WhyNotResult(asked, str(error))
    breakdown, before = breakdown_of(found), breakdown_of(plan)
    seconds = breakdown.step_seconds
    if found.hardware.cost != "analytic" == plan.hardware.cost:
        said = f"{text(seconds, TIME)} a step with operations timed, which does not compare with the file's prices."
        return WhyNotResult(asked, said, found, breakdown)
    if found.hardware.cost == "analytic" != plan.hardware.cost:
        return WhyNotResult(
            asked,
            f"{text(seconds, TIME)} a step by the cost model, which does not compare with the file's: there operations "
            "were timed. Time those of this question: autopar plan … --cost measured.",
            found,
            breakdown,
        )
    step, against = f"{text(seconds, TIME)} a step", comparison_text(Alternative(asked, seconds), before.step_seconds)
    if found.decision == plan.decision:
        return WhyNotResult(asked, f"{step}: that is the plan in the file.", found, breakdown)
    if abs(seconds - before.step_seconds) < ALIKE * seconds:
        return WhyNotResult(asked, f"{step}, as fast as the plan in the file.", found, breakdown)
    if seconds > before.step_seconds:
        loses = excess_text(breakdown.spent, before.spent)
        return WhyNotResult(asked, f"{step}, {against}{f': {loses}' if loses else ''}.", found, breakdown)
    said = f"{step}, {against} than the plan in the file: that is not the best one."
    return WhyNotResult(asked, said, found, breakdown, command_for(plan, rebuilt, given))


def command_for(plan: Plan, rebuilt: ReplanContext, given: Mapping[str, Any]) -> str:
    """Shell command that plans with the given constraints."""
    words = ["autopar", "plan", rebuilt.name, "--devices", str(plan.mesh.devices), "--hardware", rebuilt.machine]
    for name, tensor in rebuilt.inputs.items():
        kind = "" if tensor.dtype == torch.float32 else f":{str(tensor.dtype).removeprefix('torch.')}"
        words += ["--input", f"{name}={','.join(map(str, tensor.shape))}{kind}"]
    if rebuilt.kwargs:
        words += ["--model-kwargs", *(f"{name}={value}" for name, value in rebuilt.kwargs.items())]
    if rebuilt.opt is not None:
        words += ["--opt", rebuilt.opt]
    if rebuilt.ema is not None:
        words.append("--model-ema")
    formats = {"channels_last": True} if rebuilt.channels_last else {}
    for name, value in ({**given} | formats).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            words += [f"--{flag}", f"{value}B" if name == "memory" and isinstance(value, int) else str(value)]
    return shlex.join([*words, "--output", "plan.json"])

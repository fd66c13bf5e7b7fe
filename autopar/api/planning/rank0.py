"""The plan of a launcher's ranks: rank 0 makes it from what all ranks report, and the others receive it.

A plan depends on the solver's wall time, on measured times, on memory and on the device. Ranks may differ in each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import torch
from pydantic import TypeAdapter

from autopar import __version__
from autopar.api.options import Options
from autopar.api.planning.hardware import planning_hardware
from autopar.api.planning.plan import PlanRequest, plan_graph
from autopar.ir.graph import Graph, dtype_name
from autopar.ir.plan import Plan
from autopar.runtime.launch.devices import Machine, RankDevice
from autopar.runtime.launch.recipe_text import SAME_ARGUMENTS, check_agreement, value_text
from autopar.runtime.launch.start_exchange import StartExchange
from autopar.trace.call import Call

PLAN_GIVEN = "plan="  # rank 0's answer if the user has passed a plan
OTHER_MODELS = "other models"  # rank 0's answer if the fingerprints differ
OWN_OPTIONS = ("timeout", "checkpoint_timeout")  # which ranks may have differently: limits of each rank's waits


@dataclass(frozen=True)
class RankReport:
    """Everything about a rank that a plan may depend on. All but the device must be alike on all ranks.

    Args:
        plan: parts of the decision of the user's plan; empty if there is none.
        model: fingerprint of the training graph.
    """

    versions: tuple[str, ...]
    arguments: tuple[str, ...]
    plan: tuple[str, ...]
    model: str
    device: RankDevice


REPORT = TypeAdapter(RankReport)


def plan_on_rank0(
    exchange: StartExchange, request: PlanRequest, graph: Graph, machine: Machine, user_plan: Plan | None
) -> Plan:
    """The plan of all ranks: the user's, or rank 0's. All ranks make the call, none within `shared_errors`.

    Args:
        graph: this rank's training graph.

    Raises:
        UsageError, InfeasibleError: as `autopar.plan`, on all ranks; or the ranks differ in what they must have alike.
    """

    def decide(texts: Sequence[str]) -> str:
        reports = [REPORT.validate_json(text) for text in texts]
        check_reports(reports)
        if len({report.model for report in reports}) > 1:
            return OTHER_MODELS
        if user_plan is not None:
            return PLAN_GIVEN
        hardware = planning_hardware(machine, request.options, [report.device for report in reports])
        return plan_graph(request, graph, hardware).to_json()

    with exchange.shared_errors():
        report = json.dumps(asdict(rank_report(exchange.rank, request, graph, machine, user_plan)))
    answer = exchange.decide(report, decide)
    if answer == OTHER_MODELS:
        exchange.decide(json.dumps([*graph.fingerprint_lines, f"fingerprint {graph.fingerprint}"]), refuse_other_models)
    with exchange.shared_errors():
        return user_plan or Plan.from_json(answer, "rank 0's plan")


def rank_report(rank: int, request: PlanRequest, graph: Graph, machine: Machine, user_plan: Plan | None) -> RankReport:
    """This rank's report."""
    shared = [f.name for f in fields(Options) if f.name not in OWN_OPTIONS]  # which all ranks must have alike
    options = [f"{name} {value_text(getattr(request.options, name))}" for name in shared]
    return RankReport(
        versions=(f"autopar {__version__}", f"torch {torch.__version__}"),
        arguments=(f"backend {machine.backend}", *call_texts(request.call), *options),
        plan=() if user_plan is None else tuple(re.split("; |, ", user_plan.decision)),
        model=graph.fingerprint,
        device=machine.rank_device(rank, request.devices),
    )


def call_texts(call: Call) -> list[str]:
    """Shapes and dtypes of the example inputs, and the inputs that are no tensors."""
    return [
        f"input {number} {dtype_name(leaf.dtype)}{list(leaf.shape)}"
        if isinstance(leaf, torch.Tensor)
        else f"input {number} {value_text(leaf)}"
        for number, leaf in enumerate(call.leaves)
    ]


def check_reports(reports: Sequence[RankReport]) -> None:
    """Compare the ranks' versions, arguments and plans.

    Raises:
        UsageError: two ranks differ; names them and the differences.
    """
    versions, arguments, plans = zip(*((report.versions, report.arguments, report.plan) for report in reports))
    check_agreement(versions, 0, "run the same software", "Install the same versions for every rank.")
    check_agreement(plans, 0, "run the same plan", "Pass the same plan= on every rank, or on none.")
    check_agreement(arguments, 0, "have the same arguments", SAME_ARGUMENTS)


def refuse_other_models(texts: Sequence[str]) -> str:
    """Raise a UsageError that names the differences between rank 0's model and another rank's.

    Args:
        texts: lines of each rank's fingerprint, and the fingerprint, which alone differs if the order does.
    """
    check_agreement(
        [json.loads(text) for text in texts], 0, "have the same model", "Build the same model on every rank."
    )
    return ""

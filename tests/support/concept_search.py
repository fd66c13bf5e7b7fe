"""Picture of docs/concepts/solver.md: where stages begin, and the steps and the bound of every mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib import colormaps

import autopar
from autopar.api.model_source import built_model
from autopar.api.options import Options
from autopar.api.planning.costs import PlanCosts
from autopar.api.planning.plan import MIN_BATCH_NORM_SAMPLES, PlanRequest, built_call, lower_example, model_info
from autopar.api.planning.refine import refine
from autopar.cost.hardware.load import load_hardware
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import Stage
from autopar.ir.units import TIME, percent, text
from autopar.solve.cuts.step_time import Setting
from autopar.solve.result.alternatives import proven_seconds
from autopar.solve.search import search
from autopar.solve.space.candidates import Candidate
from autopar.solve.space.lower_bounds import LowerBounds
from autopar.solve.space.points import first_points
from autopar.tools.report.figure import save_figure
from autopar.tools.report.html.palette import INK, LIGHTEST, MUTED, css_of, text_colour
from support.concept_style import BLUE, HARDWARE, NORMAL, PALE, RED, SMALL, new_figure

CUTS: Mapping[str, str] = {"time": "equal time", "uniform": "equal numbers of operations", "params": "equal parameters"}


@dataclass(frozen=True)
class Searched:
    """Candidates of a search, and a proven bound of each mesh's step.

    Args:
        steps: seconds of the candidates that fit, by mesh.
        num_points: of each mesh, whether or not they were priced.
    """

    plan: Plan
    steps: Mapping[Mesh, Sequence[float]]
    bounds: Mapping[Mesh, float | None]
    num_points: Mapping[Mesh, int]


def searched(model: Any, devices: int, batch: int, precision: str) -> Searched:
    """The planner's search for a model, and what it compared."""
    options = Options.of({"hardware": HARDWARE, "precision": precision, "cost": "analytic"})
    built, hardware = built_model(model, "meta"), load_hardware(HARDWARE)
    hardware = hardware.with_mode(options.execution_mode(hardware.device_type))
    layout = options.computes_channels_last(hardware.device_type)
    call = built_call(built, None, batch)
    request = PlanRequest(built.module, call, devices, options, built.name, built.kwargs, channels_last=layout)
    graph, found = lower_example(request), list[Candidate]()
    costs = PlanCosts(graph, hardware)
    asked = replace(request.constraints(), least_samples=MIN_BATCH_NORM_SAMPLES)
    setting = Setting(graph, hardware, model_info(request, graph), asked, costs)
    plan = search(
        costs, graph, hardware, asked, setting.model, partial(refine, costs), lambda tried, _: found.extend(tried)
    )
    bounds, meshes = LowerBounds(setting), sorted({c.point.mesh for c in found}, key=str)
    for mesh in meshes:
        for point in first_points(setting, mesh):
            bounds.tighten(point)
    return Searched(
        plan,
        {mesh: [c.seconds for c in found if c.point.mesh == mesh and c.step is not None] for mesh in meshes},
        {mesh: proven_seconds(bounds, mesh) for mesh in meshes},
        {mesh: len(first_points(setting, mesh)) for mesh in meshes},
    )


def draw_solver(path: Path, model: Any = "resnet50", devices: int = 4, batch: int = 512, microbatches: int = 8) -> None:
    """Above: blocks and where stages begin, by three measures. Below: the steps and the bound of every mesh."""
    asked = {"batch_size": batch, "precision": "bf16", "hardware": HARDWARE, "cost": "analytic"}
    cuts = [
        autopar.plan(model, devices, pp=devices, schedule="1f1b", microbatches=microbatches, balance=balance, **asked)
        for balance in CUTS
    ]
    figure = new_figure(5.0)
    above, below = figure.subplots(2, 1, height_ratios=(1, 1.25))
    draw_cuts(above, cuts)
    draw_candidates(below, searched(model, devices, batch, "bf16"))
    for axes in (above, below):
        axes.tick_params(labelsize=SMALL)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def draw_cuts(axes: Any, plans: Sequence[Plan]) -> None:
    """Rows of blocks, as wide as their forward and backward of a microbatch, in the colours of their stages."""
    palette = colormaps["viridis"]
    for row, (plan, words) in enumerate(zip(plans, CUTS.values(), strict=True)):
        begin = 0.0
        for number, stage in enumerate(plan.stages):
            colour, total = palette(LIGHTEST * number / (len(plan.stages) - 1)), 1e3 * stage_seconds(stage)
            spans, start = [], begin
            for block in (block for block in plan.block_costs if block.stage == number):
                spans.append((start, 1e3 * block.seconds))
                start += 1e3 * block.seconds
            axes.broken_barh(spans, (row - 0.3, 0.6), facecolors=colour, edgecolors="white", linewidth=0.5)
            axes.text(
                begin + total / 2, row, f"{total:.1f}", ha="center", va="center", fontsize=SMALL,
                color=text_colour(css_of(colour[:3])), bbox={"facecolor": colour, "edgecolor": "none", "pad": 1},
            )  # fmt: skip
            begin = start
        proof = f"; no cuts take less than {text(proven_bound(plan), TIME)}" if plan.solver.balance == "time" else ""
        axes.text(0, row - 0.36, f"{words}: {step_words(plan)}{proof}", fontsize=SMALL, va="bottom", color=INK)
        axes.set_xlim(0, begin)
    axes.set_ylim(len(plans) - 0.6, -0.75)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_title(
        f"{plans[0].model.name}, {plans[0].mesh.pp} stages: forward and backward of blocks", fontsize=NORMAL, loc="left"
    )
    axes.set_xlabel("ms of a microbatch", fontsize=NORMAL)


def stage_seconds(stage: Stage) -> float:
    """Forward and backward of a microbatch."""
    return stage.forward_seconds + stage.backward_seconds


def step_words(plan: Plan) -> str:
    step = plan.prediction
    return f"step {text(step.step_seconds, TIME)}, bubble {percent(step.bubble_fraction, 0)}"


def proven_bound(plan: Plan) -> float:
    """Seconds that no cuts of a plan's mesh undercut."""
    return (1 - plan.solver.gap) * plan.prediction.step_seconds


def draw_candidates(axes: Any, result: Searched) -> None:
    """A row for each mesh, the fastest first: its proven bound, its candidates, and how many points were priced."""
    meshes = sorted(result.steps, key=lambda mesh: min(result.steps[mesh], default=math.inf))
    for row, mesh in enumerate(meshes):
        steps, bound = [1e3 * s for s in result.steps[mesh]], result.bounds[mesh]
        if bound is not None:
            axes.plot([1e3 * bound, min(steps, default=1e3 * bound)], [row, row], color=PALE, linewidth=1, zorder=1)
            axes.scatter([1e3 * bound], [row], marker="|", s=160, color=RED, linewidths=2, zorder=2)
        axes.scatter(steps, [row] * len(steps), s=16, color=BLUE, alpha=0.7, linewidths=0, zorder=3)
        axes.annotate(
            f"{len(steps)} of {result.num_points[mesh]}", (1.0, row), xycoords=("axes fraction", "data"),
            xytext=(6, 0), textcoords="offset points", va="center", fontsize=SMALL, color=MUTED, annotation_clip=False,
        )  # fmt: skip
    axes.axvline(1e3 * result.plan.prediction.step_seconds, color=INK, linewidth=0.8, linestyle="--", zorder=0)
    axes.scatter([], [], marker="|", s=90, color=RED, linewidths=2, label="proven bound")
    axes.scatter([], [], s=16, color=BLUE, label="candidate")
    axes.plot([], [], color=INK, linewidth=0.8, linestyle="--", label="the plan")
    axes.set_yticks(range(len(meshes)), list(map(str, meshes)))
    axes.set_ylim(len(meshes) - 0.5, -0.5)
    axes.set_xlabel("simulated step, ms", fontsize=NORMAL)
    axes.set_title("every mesh: candidates of the search", fontsize=NORMAL, loc="left")
    axes.set_title("simulated, of all points", fontsize=SMALL, loc="right", color=MUTED)
    axes.legend(frameon=False, fontsize=SMALL, loc="upper right")

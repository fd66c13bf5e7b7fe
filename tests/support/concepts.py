"""Pictures of the pages in docs/concepts, drawn from rules, measured points, plans and simulated steps.

``PYTHONPATH=tests python -m support.concepts`` draws them again into docs/pictures, in a minute of CPU time;
``python -m support.concepts FOLDER rules costs`` draws some of them into another folder. Those of rules and of the
solver are in `concept_sharding` and `concept_search`.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import autopar
from autopar.cost.hardware.load import cost_model_dir, load_hardware
from autopar.cost.ops.kernel_shapes import FORWARD
from autopar.cost.ops.op_cost import kernel_seconds
from autopar.ir.hardware import ExecutionMode, Hardware, OpKind
from autopar.ir.plan import Plan
from autopar.ir.units import BYTES, TIME, percent, text
from autopar.measure.machine.points import MeasuredPoint, point_from
from autopar.tools.report.figure import save_figure
from autopar.tools.report.html.palette import IDLE, INK, MUTED
from autopar.tools.report.step_bars import COLOURS, bars, shade
from autopar.tools.simulate.step import simulate_plan
from support.concept_search import draw_solver
from support.concept_sharding import draw_rules
from support.concept_style import BLUE, GREEN, HARDWARE, NORMAL, ORANGE, RED, SMALL, new_figure

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"

# -- costs -------------------------------------------------------------------------------------------------------------

KINDS: Mapping[OpKind, str] = {"matmul": BLUE, "attention": ORANGE, "convolution": GREEN}
MIB = 2**20


def measured_points(hardware: Hardware) -> list[MeasuredPoint]:
    """Points from which the numbers of a shipped machine were fitted."""
    data = tomllib.loads((cost_model_dir() / f"{hardware.name}.toml").read_text(encoding="utf-8"))
    return [point_from(record) for record in data["raw"]["points"]]


def draw_costs(path: Path) -> None:
    """Left: the roofline, kernels as measured and as priced. Right: a message and all-reduces by size."""
    hardware = load_hardware(HARDWARE).with_mode(ExecutionMode(compiled=True, captured=True))
    points = measured_points(hardware)
    figure = new_figure(3.7)
    left, right = figure.subplots(1, 2, width_ratios=(1.08, 1))
    draw_roofline(left, hardware, points)
    draw_links(right, hardware, points)
    for axes in (left, right):
        axes.tick_params(labelsize=SMALL)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
    save_figure(figure, path)


def draw_roofline(axes: Any, hardware: Hardware, points: Sequence[MeasuredPoint]) -> None:
    rate, peak = hardware.memory_bytes_per_second * hardware.memory_efficiency, hardware.peak_flops["bfloat16"]
    axes.plot([1, peak / rate, 1e4], [rate / 1e12, peak / 1e12, peak / 1e12], color=INK, linewidth=1.2, zorder=1)
    for kind, colour in KINDS.items():
        own = [p for p in points if (p.kind, p.case.variant, p.dtype) == (kind, "forward", "bfloat16")]
        intensity = [p.flops / p.num_bytes for p in own]
        measured = [p.flops / p.value / 1e12 for p in own]
        priced = [p.flops / priced_seconds(hardware, kind, p) / 1e12 for p in own]
        axes.vlines(intensity, measured, priced, color=colour, linewidth=1.0)
        axes.scatter(intensity, priced, s=22, facecolors="none", edgecolors=colour, linewidths=1.0)
        axes.scatter(intensity, measured, s=13, color=colour, label=kind)
    axes.scatter([], [], s=22, facecolors="none", edgecolors=MUTED, label="priced")
    axes.set(xscale="log", yscale="log", xlim=(8, 6e3), ylim=(1, 1500))
    axes.set_xlabel("FLOPs per byte", fontsize=NORMAL)
    axes.set_ylabel("TFLOP/s", fontsize=NORMAL)
    axes.set_title("kernels in bfloat16", fontsize=NORMAL, loc="left")
    axes.legend(frameon=False, fontsize=SMALL, loc="lower right", handletextpad=0.2)


def priced_seconds(hardware: Hardware, kind: OpKind, point: MeasuredPoint) -> float:
    """Seconds that the planner prices a forward kernel with; attention computes whole tiles."""
    *_, tokens, width = point.case.sizes
    tiles = FORWARD.padding(tokens, tokens, width) if kind == "attention" else 1.0
    return kernel_seconds(hardware, kind, point.flops * tiles, point.num_bytes, point.dtype)


def draw_links(axes: Any, hardware: Hardware, points: Sequence[MeasuredPoint]) -> None:
    sizes = [2**k for k in range(10, 31)]
    slow = load_hardware("rtx4090-pcie")
    curves: tuple[tuple[str, str, Callable[[float], float]], ...] = (
        ("all-reduce, 4 over PCIe", MUTED, lambda n: slow.collective_seconds("all-reduce", n, 4)),
        ("all-reduce, 64 on 8 nodes", RED, lambda n: hardware.collective_seconds("all-reduce", n, 64)),
        ("all-reduce, 2 over NVLink", BLUE, lambda n: hardware.collective_seconds("all-reduce", n, 2)),
        ("message over NVLink", ORANGE, lambda n: hardware.transfer_seconds(n, 0, 1)),
    )
    for label, colour, seconds in curves:
        axes.plot([n / MIB for n in sizes], [1e3 * seconds(n) for n in sizes], color=colour, linewidth=1.2, label=label)
    for kind, colour in (("all-reduce", BLUE), ("point-to-point", ORANGE)):
        own = [p for p in points if p.kind == kind]
        axes.scatter([p.num_bytes / MIB for p in own], [1e3 * p.value for p in own], s=13, color=colour, zorder=3)
    axes.set(xscale="log", yscale="log", xlim=(1e-3, 1.1e3))
    axes.set_xlabel("MiB", fontsize=NORMAL)
    axes.set_ylabel("ms", fontsize=NORMAL)
    axes.set_title("messages and collectives", fontsize=NORMAL, loc="left")
    axes.legend(frameon=False, fontsize=SMALL, loc="upper left")


# -- schedules ---------------------------------------------------------------------------------------------------------

SCHEDULES: Mapping[str, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2, "searched": 3}
NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved", "zb-h1": "ZB-H1", "zb-v": "ZB-V"}


def schedule_plans(model: Any, names: Collection[str] = tuple(SCHEDULES), **more: Any) -> list[Plan]:
    """Plans of a model that differ in their schedule."""
    return [
        autopar.plan(model, 4, pp=4, schedule=name, chunks=SCHEDULES[name], hardware=HARDWARE, cost="analytic", **more)
        for name in names
    ]


def draw_schedules(path: Path, plans: Sequence[Plan] | None = None) -> None:
    """Simulated steps of plans below each other on one time axis."""
    if plans is None:
        plans = schedule_plans("vit_large_patch16_224", batch_size=512, microbatches=8, precision="bf16-params")
    steps = [simulate_plan(plan) for plan in plans]
    figure = new_figure(1.05 * len(plans) + 0.6)
    panels = figure.subplots(len(plans), 1, sharex=True)
    kinds = set[str]()
    for axes, step in zip(panels, steps, strict=True):
        for place, position in enumerate(step.positions):
            for bar in bars(step, position):
                kinds.add(bar.kind)
                start, end = 1e3 * bar.start_seconds, 1e3 * bar.end_seconds
                colour = shade(COLOURS[bar.kind], bar.chunk, step.plan.chunks if bar.label else 1)
                axes.broken_barh(
                    [(start, end - start)], (place - 0.43, 0.86), facecolors=colour, edgecolors="white", linewidth=0.3
                )
        chunks = f", {step.plan.chunks} stages a rank" if step.plan.chunks > 1 else ""
        axes.set_title(
            f"{NAMES.get(step.schedule, step.schedule)}{chunks}: {text(step.step_seconds, TIME)}, bubble "
            f"{percent(step.bubble_fraction, 0)}, fullest rank {text(max(step.plan.prediction.peak_bytes), BYTES)}",
            fontsize=NORMAL, loc="left", pad=3, color=INK,
        )  # fmt: skip
        axes.set_yticks(range(len(step.positions)), [str(p.ranks[0]) for p in step.positions], fontsize=SMALL)
        axes.set_ylim(len(step.positions) - 0.5, -0.5)
        axes.set_ylabel("rank", fontsize=SMALL)
        axes.axvspan(0, 1e3 * step.step_seconds, color=IDLE, zorder=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[-1].set_xlim(0, 1e3 * max(step.step_seconds for step in steps))
    panels[-1].set_xlabel("ms", fontsize=NORMAL)
    panels[-1].tick_params(axis="x", labelsize=SMALL)
    for kind in (kind for kind in COLOURS if kind in kinds):
        panels[0].broken_barh([], (0, 0), facecolors=COLOURS[kind], label=kind)
    figure.legend(loc="outside lower center", ncols=len(kinds), frameon=False, fontsize=SMALL, handlelength=1.2)
    save_figure(figure, path)


# -- all ---------------------------------------------------------------------------------------------------------------

DRAW: Mapping[str, Callable[[Path], None]] = {
    "rules": draw_rules, "costs": draw_costs, "solver": draw_solver, "schedules": draw_schedules
}  # fmt: skip


def main(folder: Path, names: Sequence[str]) -> None:
    """Draw pictures, all by default, each into ``FOLDER/NAME.png``."""
    for name in names or DRAW:
        DRAW[name](folder / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES, sys.argv[2:])

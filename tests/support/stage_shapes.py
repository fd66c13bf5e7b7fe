"""Pipelines whose stages have shapes of their own against the best uniform mesh: the tables of docs/stage_shapes.md.

``PYTHONPATH=tests python -m support.stage_shapes plan 8 fastvit_t12`` searches for a model again with 8 images a
device, minutes of CPU time, and replaces its rows in docs/stage_shapes/rows.json. Without arguments it prints tables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import timm
import torch
from torch import nn

from autopar.api.options import Options
from autopar.api.planning.costs import PlanCosts
from autopar.api.planning.plan import (
    MIN_BATCH_NORM_SAMPLES,
    PlanRequest,
    example_call,
    lower_example,
    model_info,
    without_cycle_collection,
)
from autopar.api.planning.refine import refine
from autopar.cost.hardware.load import load_hardware
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware
from autopar.ir.network import Network, Port
from autopar.ir.placement import V_SHAPED
from autopar.ir.plan import Plan
from autopar.solve.cuts.step_time import Setting
from autopar.solve.search import search
from autopar.solve.space.candidates import Candidate
from support.shape_prices import Shape, units
from support.shaped_pipelines import STAGES, ShapedPipeline, ShapeSearch
from support.zoo_hugging_face import configured, of

ROWS = Path(__file__).parents[2] / "docs" / "stage_shapes" / "rows.json"
DEVICES = (8, 16)
HARDWARE = ("h200-nvlink", "rtx4090-pcie")
TRACED_IMAGES = 64  # of the example call
# Between nodes of machines whose file has no network: one Ethernet card of 100 Gbit/s.
ETHERNET = Network(Port(35e-6, 12.5e9, 4e-6), ports=1)
STARTS = 6  # uniform pipelines of the planner from which cuts and devices are moved too
WORTH = 0.05  # share of the step from which the feature is worth building


def segformer() -> nn.Module:
    """SegFormer-B2 for 150 classes."""
    sizes: dict[str, Any] = {"hidden_sizes": [64, 128, 320, 512], "depths": [3, 4, 6, 3]}
    return of(
        "SegformerForSemanticSegmentation", "SegformerConfig", decoder_hidden_size=768, num_labels=150, **sizes
    )  # fmt: skip


def detr() -> nn.Module:
    """DETR with a ResNet-50."""
    backbone = configured("ResNetConfig", out_features=["stage4"])
    model: Any = of("DetrForObjectDetection", "DetrConfig", backbone_config=backbone, num_labels=91)
    model.model.unfreeze_backbone()
    return model


# Models and the height and width of their images.
MODELS: Mapping[str, tuple[Callable[[], nn.Module], int]] = {
    "coatnet_0_rw_224": (partial(timm.create_model, "coatnet_0_rw_224"), 224),
    "maxvit_tiny_tf_224": (partial(timm.create_model, "maxvit_tiny_tf_224"), 224),
    "fastvit_t12": (partial(timm.create_model, "fastvit_t12"), 256),
    "swin_tiny_patch4_window7_224": (partial(timm.create_model, "swin_tiny_patch4_window7_224"), 224),
    "SegFormer-B2": (segformer, 512),
    "DETR, ResNet-50": (detr, 640),
}


@dataclass(frozen=True)
class Best:
    """A pipeline and the seconds of its step."""

    pipeline: str
    seconds: float


@dataclass(frozen=True)
class Row:
    """The best uniform plan, and the best pipelines of the study.

    Args:
        plan: mesh and schedule of the best uniform plan.
        equal: the best pipeline with one shape for all stages, while messages between stages are free.
        free: the best one whose stages differ, while messages are free.
        sent: the best one whose stages differ, where messages take time.
        num_checked: uniform pipelines of the planner that the study prices too.
        largest_difference: between the two steps of such a pipeline, relative.
    """

    model: str
    devices: int
    hardware: str
    batch: int
    plan: str
    plan_seconds: float
    equal: Best
    free: Best
    sent: Best
    num_checked: int
    largest_difference: float

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Row:
        """The row of a JSON object."""
        return cls(**{**fields, **{name: Best(**fields[name]) for name in ("equal", "free", "sent")}})

    def gain(self, best: Best) -> float:
        """Share of the best uniform plan's step that a pipeline saves."""
        return 1 - best.seconds / self.plan_seconds


@dataclass(frozen=True)
class Question:
    """A model's training graph on a machine, with prices for any number of devices."""

    request: PlanRequest
    graph: Graph
    hardware: Hardware
    costs: PlanCosts

    @classmethod
    def of(cls, model: str, hardware: str) -> Question:
        build, side = MODELS[model]
        with torch.device("meta"):
            built = build()
        options = Options.of({"hardware": hardware, "cost": "analytic", "precision": "bf16"})
        machine = load_hardware(hardware)
        machine = replace(machine, network=machine.network or ETHERNET)
        machine = machine.with_mode(options.execution_mode(machine.device_type))
        call = example_call(built, torch.empty(TRACED_IMAGES, 3, side, side, device="meta"), None, None)
        layout = options.computes_channels_last(machine.device_type)
        request = PlanRequest(built, call, DEVICES[0], options, model, channels_last=layout)
        graph = lower_example(request)
        return cls(request, graph, machine, PlanCosts(graph, machine))

    def setting(self, devices: int, images: int) -> Setting:
        """The setting of a search for so many devices, and so many images of each."""
        has_batch_norm = any(op.mutates and "batch_norm" in op.target for op in self.graph.ops)
        least = MIN_BATCH_NORM_SAMPLES if has_batch_norm else 1
        asked = replace(self.request.options.constraints(devices, images * devices), least_samples=least)
        return Setting(self.graph, self.hardware, model_info(self.request, self.graph), asked, self.costs)

    def plan(self, setting: Setting) -> Planned:
        """The best uniform plan, and the uniform plans that it was chosen from."""
        asked, refined, candidates = setting.constraints, partial(refine, self.costs), list[Candidate]()
        best = search(
            self.costs, self.graph, self.hardware, asked, setting.model, refined, lambda c, _: candidates.extend(c)
        )  # fmt: skip
        return Planned(best, tuple(candidates))


@dataclass(frozen=True)
class Planned:
    """The best uniform plan, and all that the planner compared it with."""

    best: Plan
    candidates: tuple[Candidate, ...]

    def pipelines(self, search: ShapeSearch) -> Iterator[tuple[ShapedPipeline, Candidate]]:
        """Uniform pipelines without tensor parallelism as pipelines of the study."""
        for candidate in self.candidates:
            if (own := shaped(candidate, search)) is not None:
                yield own, candidate


def shaped(candidate: Candidate, search: ShapeSearch) -> ShapedPipeline | None:
    """A uniform plan as a pipeline of the study; None where it is none, or where ports limit it."""
    point, step = candidate.point, candidate.step
    if candidate.stage_of is None or step is None or point.pp not in STAGES or point.tp > 1 or point.replicas.zero > 1:
        return None
    if point.pipeline.schedule in V_SHAPED or step.pipeline_seconds <= step.port_seconds:
        return None
    if point.microbatches not in search.microbatches:
        return None
    unit_of, stage_of = units(candidate.problem.cost, search.prices(point.microbatches).names), candidate.stage_of
    stages = dict(zip(unit_of, stage_of))
    if tuple(stages[unit] for unit in unit_of) != stage_of or list(stage_of) != sorted(stage_of):
        return None
    cuts = [unit for unit in stages if unit == 0 or stages[unit] != stages[unit - 1]]
    shapes = (Shape(1, point.replicas.dp),) * point.pp
    return ShapedPipeline(shapes, point.microbatches, point.pipeline, (*cuts, len(stages)))


@without_cycle_collection()
def searched(model: str, hardware: str, devices: int, images: int, question: Question) -> Row:
    """The row of a model on a machine."""
    setting = question.setting(devices, images)
    planned = question.plan(setting)
    free, sent = (ShapeSearch(setting, has_messages) for has_messages in (False, True))
    known = sorted(planned.pipelines(sent), key=lambda pair: pair[1].seconds)
    starts = dict.fromkeys(own for own, _ in known[:STARTS])
    equal, equal_seconds = free.best(True, starts=starts)
    own, own_seconds = free.best(False, starts=starts)
    other, other_seconds = sent.best(False, starts=starts)
    steps = ((sent.step_seconds(own, zero=c.point.replicas.zero), c.seconds) for own, c in known)
    differences = [abs(own / planner - 1) for own, planner in steps]
    return Row(
        model, devices, hardware, setting.constraints.batch, plan_text(planned.best),
        planned.best.prediction.step_seconds, Best(str(equal), equal_seconds), Best(str(own), own_seconds),
        Best(str(other), other_seconds), len(differences), max(differences, default=0.0),
    )  # fmt: skip


def plan_text(plan: Plan) -> str:
    """``pp 2 × dp 4, v 2, m 4, ZeRO-1``."""
    sizes = {"pp": plan.mesh.pp, "tp": plan.mesh.tp, "dp": plan.mesh.dp}
    words = [" × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)]
    words += [f"v {plan.chunks}"] if plan.chunks > 1 else []
    words += [f"m {plan.microbatches}"] if plan.microbatches > 1 else []
    return ", ".join([*words, *([plan.replicas.zero_text] if plan.zero else [])])


# -- rows and tables -----------------------------------------------------------------------------------------------


def saved_rows() -> list[Row]:
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else []
    return [*map(Row.parse, rows)]


def save_row(row: Row) -> None:
    def place(of: Row) -> tuple[int, str, int, int]:
        return [*MODELS].index(of.model), of.hardware, of.devices, -of.batch

    rows = sorted([*(r for r in saved_rows() if place(r) != place(row)), row], key=place)
    ROWS.parent.mkdir(exist_ok=True)
    ROWS.write_text(json.dumps([asdict(r) for r in rows], indent=1, ensure_ascii=False) + "\n")


def search_again(model: str, images: int) -> None:
    for hardware in HARDWARE:
        question = Question.of(model, hardware)
        for devices in DEVICES:
            start = perf_counter()
            row = searched(model, hardware, devices, images, question)
            save_row(row)
            print(f"{perf_counter() - start:.0f} s", row, flush=True)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Steps of uniform plans and of pipelines whose stages differ."""
    yield "| model | devices | images | best uniform plan | step | own shapes | step | gain |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        yield f"| {named(row)} | {row.plan} | {milliseconds(row.plan_seconds)} | {cells(row, row.sent)} |"


def free_table(rows: Sequence[Row]) -> Iterator[str]:
    """As `table`, but with free messages, under which uniform pipelines are faster too."""
    yield "| model | devices | images | uniform pipeline | step | gain | own shapes | step | gain |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        yield f"| {named(row)} | {cells(row, row.equal)} | {cells(row, row.free)} |"


def named(row: Row) -> str:
    return f"{row.model} | {row.devices} × {row.hardware} | {row.batch}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def cells(row: Row, best: Best) -> str:
    return f"{best.pipeline} | {milliseconds(best.seconds)} | {gain_text(row.gain(best))}"


def gain_text(gain: float) -> str:
    text = f"{100 * gain:+.1f} %"
    return f"**{text}**" if gain >= WORTH else text


def check_text(rows: Sequence[Row]) -> str:
    """Sentence that compares the study's steps of uniform pipelines with the planner's."""
    number, largest = sum(row.num_checked for row in rows), max(row.largest_difference for row in rows)
    return f"{number:,} uniform pipelines of the planner have the planner's step within {100 * largest:.1f} %."


if __name__ == "__main__":
    if sys.argv[1:2] == ["plan"]:
        for name in sys.argv[3:]:
            search_again(name, int(sys.argv[2]))
    else:
        saved = saved_rows()
        print("\n".join(table(saved)), "\n".join(free_table(saved)), check_text(saved), sep="\n\n")

"""Plans for 8 to 1,024 H100s, and the tables and pictures of docs/scale.md that show them.

``PYTHONPATH=tests python -m support.scale plan vit_7b_patch16_dinov3`` plans a model again, in minutes, and
replaces its rows in docs/scale/plans.json; plan files go to runs/scale. ``python -m support.scale draw`` prints tables
and draws pictures.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import autopar
from autopar.cost.hardware.load import load_hardware
from autopar.ir.hardware import ring_share
from autopar.tools.bench.description import plan_label
from autopar.tools.explain.breakdown import breakdown_of
from autopar.tools.report.figure import needed_figure, save_figure

FOLDER = Path(__file__).parents[2] / "docs" / "scale"
PLANS = Path("runs") / "scale"  # plan files, for `autopar simulate`
HARDWARE = "h100-nvlink"
DEVICES = (8, 64, 256, 1024)
SCALING = ("weak", "strong")


@dataclass(frozen=True)
class Study:
    """A model's batches.

    Args:
        images: of a GPU under weak scaling.
        batch: under strong scaling.
    """

    images: int
    batch: int

    def batch_of(self, scaling: str, devices: int) -> int:
        return self.images * devices if scaling == "weak" else self.batch


STUDIES = {
    "vit_large_patch16_224": Study(64, 4096),
    "vit_giant_patch14_224": Study(32, 2048),
    "vit_7b_patch16_dinov3": Study(8, 1024),
}
# Activities of a step, in the order of `StepBreakdown`, and their colours.
PARTS = {
    "compute": "#1b6ca8", "recompute": "#6fa8cf", "collective": "#c2731d", "transfer": "#e2b714", "bubble": "#c9ced3",
    "reduce": "#b23a48", "optimizer": "#3c8f4f",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A plan; seconds of the step by activity, the mean over pipeline positions.

    Args:
        plan: as in the tables, such as ``pp 8 × dp 128, searched × 3, ZeRO-1, 16 microbatches of 4``.
        next_best: of the best other mesh, such as ``pp 8 × tp 2 × dp 64, v 3, m 16, ZeRO-1``.
    """

    model: str
    scaling: str
    devices: int
    batch: int
    plan: str
    step_seconds: float
    parts: Mapping[str, float]
    peak_bytes: int
    next_best: str
    next_seconds: float


def planned(name: str, scaling: str, devices: int) -> Row:
    """Plan a model of the study."""
    batch = STUDIES[name].batch_of(scaling, devices)
    plan = autopar.plan(name, devices, batch_size=batch, hardware=HARDWARE, precision="bf16-params", cost="analytic")
    plan.save(PLANS / f"{name}-{scaling}-{devices}.json")
    spent = {key.removesuffix("_seconds"): part for key, part in asdict(breakdown_of(plan).spent).items()}
    label, seconds = next((a.label, a.step_seconds) for a in plan.alternatives if a.label.startswith("pp "))
    assert seconds is not None, "meshes that do not fit come last"
    return Row(
        name, scaling, devices, batch, plan_label(plan), plan.prediction.step_seconds, spent,
        max(plan.prediction.peak_bytes), re.sub(r"\b[pt]p 1 × | × dp 1\b", "", label), seconds,
    )  # fmt: skip


def saved_rows() -> list[Row]:
    file = FOLDER / "plans.json"
    return [Row(**row) for row in json.loads(file.read_text())] if file.exists() else []


def save_rows(rows: Sequence[Row]) -> None:
    (FOLDER / "plans.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def plan_again(name: str) -> None:
    PLANS.mkdir(parents=True, exist_ok=True)
    for devices in DEVICES:
        for scaling in SCALING:
            row = planned(name, scaling, devices)
            kept = [r for r in saved_rows() if (r.model, r.scaling, r.devices) != (name, scaling, devices)]
            save_rows(sorted([*kept, row], key=lambda r: (list(STUDIES).index(r.model), r.scaling, r.devices)))
            print(row, flush=True)


# -- tables and pictures -------------------------------------------------------------------------------------------


def efficiencies(rows: Sequence[Row]) -> list[float]:
    """Images a second of each GPU, by those of the first row."""
    rates = [row.batch / row.step_seconds / row.devices for row in rows]
    return [rate / rates[0] for rate in rates]


def rows_of(model: str, scaling: str) -> list[Row]:
    return [row for row in saved_rows() if (row.model, row.scaling) == (model, scaling)]


def table(model: str) -> Iterator[str]:
    yield "| scaling | GPUs | images | plan | step | images/s | of 8 GPUs' rate | next best |"
    yield "|---|---|---|---|---|---|---|---|"
    for scaling in SCALING:
        rows = rows_of(model, scaling)
        for row, share in zip(rows, efficiencies(rows), strict=True):
            following = f"{row.next_best}: {1e3 * row.next_seconds:.1f} ms"
            yield (
                f"| {scaling} | {row.devices:,} | {row.batch:,} | {row.plan} | {1e3 * row.step_seconds:.1f} ms | "
                f"{row.batch / row.step_seconds:,.0f} | {100 * share:.0f} % | {following} |"
            )


def draw_steps(model: str) -> None:
    """Step by activity, and what each GPU keeps of the rate that it has among 8."""
    figure = needed_figure()(figsize=(9.6, 3.8), layout="constrained")
    used = [part for part in PARTS if any(row.parts[part] for row in saved_rows() if row.model == model)]
    for axes, scaling in zip(figure.subplots(1, 2), SCALING, strict=True):
        rows, base = rows_of(model, scaling), [0.0] * len(DEVICES)
        for part in used:
            # Per image of a GPU, so that bars of equal efficiency are equally high.
            heights = [1e3 * row.parts[part] * row.devices / row.batch for row in rows]
            axes.bar(range(len(rows)), heights, bottom=base, color=PARTS[part], label=part, width=0.7)
            base = [low + height for low, height in zip(base, heights, strict=True)]
        for i, share in enumerate(efficiencies(rows)):
            axes.text(i, base[i], f"{100 * share:.0f} %", ha="center", va="bottom", fontsize=8)
        study, images = STUDIES[model], "images a GPU" if scaling == "weak" else "images"
        number = study.images if scaling == "weak" else study.batch
        axes.set_title(f"{scaling} scaling: {number:,} {images}", fontsize=9)
        axes.set_xticks(
            range(len(rows)),
            [f"{row.devices:,}\n{row.plan.split(',')[0]}".replace(" × dp", "\n× dp") for row in rows],
            fontsize=7,
        )
        axes.set_ylabel("GPU ms an image", fontsize=8)
        axes.tick_params(axis="y", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
    figure.suptitle(f"{model}, H100 (cost model {HARDWARE})", fontsize=9.5, x=0.01, ha="left")
    save_figure(figure, FOLDER / f"{model}.png")


def bandwidths() -> Iterator[str]:
    """Bus bandwidths of 1 GB and of 26 MB, as nccl-tests define them, that a collective of dp ranks is priced with."""
    hardware = load_hardware(HARDWARE)
    yield "| GPUs | all-reduce, 8 GiB | all-gather, 8 GiB | reduce-scatter, 8 GiB | all-reduce, 25 MiB |"
    yield "|---|---|---|---|---|"
    for devices in (2, 4, *DEVICES):
        cells = []
        cases = (("all-reduce", 2**33), ("all-gather", 2**33), ("reduce-scatter", 2**33), ("all-reduce", 25 * 2**20))
        for kind, size in cases:
            seconds = hardware.collective_seconds(kind, size, devices)  # type: ignore[arg-type]
            cells.append(f"{ring_share(kind, devices) * size / seconds / 1e9:.0f} GB/s")  # type: ignore[arg-type]
        yield f"| {devices:,} | {' | '.join(cells)} |"


if __name__ == "__main__":
    if sys.argv[1] == "plan":
        for model in sys.argv[2:]:
            plan_again(model)
    else:
        print("\n".join(bandwidths()))
        for model in STUDIES:
            if rows_of(model, SCALING[0]):
                print(f"\n{model}\n" + "\n".join(table(model)))
                draw_steps(model)

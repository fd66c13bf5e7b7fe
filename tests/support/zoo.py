"""The zoo matrix: every family of models, traced, planned and compared with one device; docs/zoo.md shows it.

``PYTHONPATH=tests python -m support.zoo run`` computes the cells that docs/zoo/cells.json lacks, a process per family,
and can be interrupted and run again; ``run FAMILY…`` computes those families again. ``bench`` measures steps
on a GPU into docs/zoo/bench, ``draw`` writes docs/zoo.md.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import track
from torch import nn

import autopar
from autopar.ir.layout import pattern_of
from autopar.runtime.spec import LossOver
from autopar.tools.bench.description import plan_label
from autopar.tools.parity.compare import compare, default_loss
from autopar.trace.call import Call, as_call
from autopar.trace.passes.random_ops import is_random
from autopar.trace.trace import trace
from support import zoo_bench
from support.hardware import slow_compute
from support.zoo_models import ROWS
from support.zoo_row import Inputs, ZooRow

LIBRARIES = Path(torch.__file__).parents[1]
FOLDER = Path(__file__).parents[2] / "docs" / "zoo"
CELLS, BENCHES, PAGE = FOLDER / "cells.json", FOLDER / "bench", FOLDER.parent / "zoo.md"
HARDWARE, DEVICES, BATCH = "h200-nvlink", 4, 64
MESHES: Mapping[str, dict[str, Any]] = {
    "chosen": {}, "pp 4": {"pp": 4}, "tp 4": {"tp": 4}, "pp 2 × tp 2": {"pp": 2, "tp": 2},
}  # fmt: skip
PAIRS: Mapping[str, dict[str, Any]] = {"pp 2": {"pp": 2}, "tp 2": {"tp": 2}, "dp 2": {"dp": 2}}
# With free communication the planner shards all that it can; by true prices such small models stay whole.
SHARDING = functools.cache(lambda: str(slow_compute(Path(tempfile.mkdtemp()))))
STEPS, SAMPLES = 2, 8
NORM_EPS = 1.0  # of batch norms
LIMIT = 3600.0  # seconds for a family
TIME_LEFT = "did not end in {:.0f} s"
SGD = functools.partial(torch.optim.SGD, lr=0.01)
COLUMNS = ("traces", *(f"plan {m}" for m in MESHES), *(f"equal {m}" for m in PAIRS), "dropout")


@dataclass(frozen=True)
class Cell:
    """One entry of the matrix.

    Args:
        text: what was found, or why there is a ✗.
    """

    ok: bool
    text: str


# -- one family ----------------------------------------------------------------------------------------------------


def row_cells(row: ZooRow) -> Iterator[tuple[str, Cell]]:
    """All cells of a row by column, as they are computed."""
    yield "traces", attempted(lambda: traced(row))
    for mesh, sizes in MESHES.items():
        yield f"plan {mesh}", attempted(lambda sizes=sizes: planned(row, sizes))
    for pair, sizes in PAIRS.items():
        yield f"equal {pair}", attempted(lambda sizes=sizes: compared(row, sizes))
    yield "dropout", attempted(lambda: dropped(row))


def attempted(cell: Any) -> Cell:
    """The cell that a function computes; a ✗ with the error's first line if it raises one."""
    try:
        return cell()
    except Exception as error:
        message = str(error).replace(f"{LIBRARIES}/", "")
        lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
        return Cell(False, f"{type(error).__name__}: {lines[0][:300]}")


def traced(row: ZooRow) -> Cell:
    model, (args, kwargs) = planned_model(row, 2)
    graph = trace(model.train(), args, kwargs, "train", row.name)
    return Cell(True, f"{len(graph.ops)} operations")


def planned(row: ZooRow, sizes: dict[str, Any]) -> Cell:
    model, inputs = planned_model(row, BATCH)
    plan = autopar.plan(
        model.train(), DEVICES, as_inputs(model, inputs), hardware=HARDWARE, precision="bf16", cost="analytic", **sizes
    )
    return Cell(True, f"{plan_label(plan)}: {1e3 * plan.prediction.step_seconds:.1f} ms")


def planned_model(row: ZooRow, batch: int) -> tuple[nn.Module, Inputs]:
    """The model that is planned, and its inputs."""
    return row.planned(batch) if row.planned is not None else (row.build(), row.inputs(batch))


def compared(row: ZooRow, sizes: dict[str, Any]) -> Cell:
    """Outputs, loss, gradients, weights and buffers in float64 against one device; dropout is off."""
    model, inputs = doubled(row, dropout=False)
    loss, y, loss_over = loss_of(row, model, as_call(model, inputs))
    parity = compare(model, inputs, y, steps=STEPS, loss_fn=loss, loss_over=loss_over, **options(sizes))
    if parity.steps != STEPS:
        return Cell(False, parity.notes[-1])
    wrong = [r for r in parity.rows if not r.ok]
    if wrong:
        return Cell(False, "; ".join(f"{r.quantity}: {r.max_absolute:.1e} in {r.worst}" for r in wrong))
    if parity.plan.mesh.tp == 1:
        return Cell(True, "equal")
    names = [name for name, _ in model.named_parameters()]
    count = sum(name in parity.plan.shardings or pattern_of(name) in parity.plan.shardings for name in names)
    return Cell(count > 0, f"equal with {count} of {len(names)} weights sharded")


def dropped(row: ZooRow) -> Cell:
    """Losses with dropout on every pair of devices against those on one device."""
    model, inputs = doubled(row, dropout=True)
    call = as_call(model, inputs)
    if not any(is_random(op) for op in trace(model, call.first(2).args, call.first(2).kwargs, "train").ops):
        return Cell(True, "draws no random numbers")
    loss, y, loss_over = loss_of(row, model, call)
    losses: dict[str, list[float]] = {}
    for mesh, sizes in {"one": {"pp": 1}, **PAIRS}.items():
        with autopar.parallelize(
            model, example_inputs=inputs, loss_fn=loss, loss_over=loss_over, optimizer=SGD, compile=False,
            **options(sizes),
        ) as pm:  # fmt: skip
            losses[mesh] = [pm.train_step(inputs, y).loss for _ in range(STEPS)]
    wrong = [mesh for mesh, found in losses.items() if not np.allclose(found, losses["one"], rtol=1e-6, atol=0)]
    return Cell(not wrong, f"losses {losses}" if wrong else "equal losses")


def options(sizes: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a plan for one device, or for two."""
    hardware = {"hardware": SHARDING()} if "tp" in sizes else {}
    return {"devices": max(sizes.values()), "microbatch_size": SAMPLES // 4, **sizes, **hardware}


def loss_of(row: ZooRow, model: nn.Module, call: Call) -> tuple[Any, Any, LossOver]:
    """A row's loss, its target, and what it is a loss over."""
    if row.loss is not None:
        return row.loss, torch.zeros(call.batch), "batch"
    loss, y, _ = default_loss(model, call)
    return loss, y, "microbatch"


def doubled(row: ZooRow, dropout: bool) -> tuple[nn.Module, Any]:
    """The small model in float64 with random weights, and its inputs.

    Over the few values of a channel of small images, batch norms would divide by deviations near zero, and multiply
    rounding errors.
    """
    torch.manual_seed(0)
    build = row.dropping if dropout and row.dropping is not None else row.build
    model = build().double().train()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            module.eps = NORM_EPS
    inputs = row.inputs(SAMPLES)

    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    args, kwargs = inputs
    return model, as_inputs(model, (tuple(map(wide, args)), {name: wide(value) for name, value in kwargs.items()}))


def as_inputs(model: nn.Module, inputs: Inputs) -> Any:
    """Arguments in the form that `autopar.parallelize` takes: a tensor, or a dict."""
    args, kwargs = inputs
    if not args:
        return kwargs
    if len(args) == 1 and not kwargs:
        return args[0]
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


# -- all families --------------------------------------------------------------------------------------------------


def saved() -> dict[str, dict[str, Any]]:
    return json.loads(CELLS.read_text()) if CELLS.exists() else {}


def save(found: Mapping[str, Mapping[str, Any]]) -> None:
    order = {row.key: number for number, row in enumerate(ROWS)}
    kept = {key: found[key] for key in sorted(found, key=lambda key: order.get(key, len(order)))}
    CELLS.parent.mkdir(parents=True, exist_ok=True)
    CELLS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def run_row(row: ZooRow, limit: float) -> dict[str, Any]:
    """All cells of a row, computed in a process of its own for at most so many seconds."""
    cells: dict[str, Any] = {}
    if row.blocked:
        return dict.fromkeys(COLUMNS, asdict(Cell(False, row.blocked)))
    started = time.monotonic()
    command = [sys.executable, "-m", "support.zoo", "cells", row.key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        timer = threading.Timer(limit, lambda: os.killpg(process.pid, signal.SIGKILL))
        timer.start()
        for line in process.stdout:
            if line.startswith("{"):
                cells |= json.loads(line)
        timer.cancel()
    reason = TIME_LEFT.format(limit) if time.monotonic() - started >= limit else f"ended with code {process.returncode}"
    return {column: cells.get(column, asdict(Cell(False, reason))) for column in COLUMNS}


app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def run(
    families: Annotated[list[str] | None, typer.Argument(help="Families to compute again.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds for a family.")] = LIMIT,
    jobs: Annotated[int, typer.Option(help="Families at a time; each has two processes.")] = 1,
) -> None:
    """Compute cells, and keep them in docs/zoo/cells.json."""
    found = saved()
    wanted = [row for row in ROWS if (row.family in families if families else row.key not in found)]
    with ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(run_row, row, limit): row for row in wanted}
        for done in track(as_completed(runs), "families", total=len(wanted)):
            row, cells = runs[done], done.result()
            record = {"name": row.name, "part": row.part, "torch": torch.__version__, "cells": cells}
            save(saved() | {row.key: record})
            print(row.key, " ".join("✓" if cells[column]["ok"] else "✗" for column in COLUMNS), flush=True)


@app.command()
def cells(key: str) -> None:
    """Print the cells of one row as JSON lines."""
    warnings.simplefilter("ignore")
    row = next(row for row in ROWS if row.key == key)
    for column, cell in row_cells(row):
        print(json.dumps({column: asdict(cell)}), flush=True)


@app.command()
def bench(
    families: Annotated[list[str] | None, typer.Argument(help="Families of timm to measure again.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds for each way to compile a model.")] = 200.0,
    folder: Annotated[Path, typer.Option(help="Folder of the results.")] = BENCHES,
    rest: Annotated[bool, typer.Option("--rest", help="Measure other rows, against the whole model.")] = False,
) -> None:
    """Measure steps on this machine's GPU: autopar's, and those of the model under torch.compile."""
    zoo_bench.measure(families or (), folder, limit, rest)


# -- the page ------------------------------------------------------------------------------------------------------

# What models forbid, and what would have to change.
FORBIDDEN = {
    "timm/csatv2": (
        "`SpatialTransformerBlock` attends between the samples of a batch, so batches cannot be cut: its q, k and v "
        "[batch, tokens] lack an axis for features. timm would have to split `qkv.unsqueeze(-2)`, and leave out the "
        "`unsqueeze` after `attn @ v`"
    ),
}
BEGIN, END = "<!-- begin: python -m support.zoo draw -->", "<!-- end -->"


def summary(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Number of families and of cells, and the share of ✓."""
    marks = [record["cells"][column]["ok"] for record in found.values() for column in COLUMNS]
    return f"{len(found)} families, {len(marks)} cells, {100 * sum(marks) / max(1, len(marks)):.1f} % ✓."


def table(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A row per family, then the reasons of all ✗."""
    yield f"| family | model | {' | '.join(COLUMNS)} |"
    yield f"|---|---|{'---|' * len(COLUMNS)}"
    reasons: dict[str, int] = {}
    for key, record in found.items():
        marks = []
        for column in COLUMNS:
            cell = record["cells"][column]
            reason = f"{key}: {FORBIDDEN.get(key, cell['text'])}"
            marks.append("✓" if cell["ok"] else f"✗ {reasons.setdefault(reason, len(reasons) + 1)}")
        part = f" ({record['part']})" if record["part"] else ""
        yield f"| {key.replace('/', ': ')} | {record['name']}{part} | {' | '.join(marks)} |"
    if reasons:
        yield ""
        yield from (f"{number}. {reason}" for reason, number in reasons.items())


def page_text(text: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with the matrix of today's cells."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    steps = [*zoo_bench.tables(BENCHES)]
    parts = [summary(found), "", *table(found), "", *([*steps, ""] if steps else [])]
    return "\n".join([before + BEGIN, "", *parts, END + after])


@app.command()
def draw() -> None:
    """Write the matrix into docs/zoo.md."""
    PAGE.write_text(page_text(PAGE.read_text(), saved()))


if __name__ == "__main__":
    app()

"""What notebooks show of plans, steps and progress: HTML in a real kernel, without widgets, and nothing twice."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.report_pages import full_plan

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

LOAD = """
import sys
sys.modules["ipywidgets"] = None  # progress needs none
from autopar.ir.plan import Plan
plan = Plan.load("plan.json")
print(plan)
"""
STEP = """
import torch, autopar
from torch import nn

torch.set_num_threads(1)
x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
pm = autopar.parallelize(
    nn.Linear(8, 4), 1, x, loss_fn=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
)
result = pm.train_step(x, y)
pm.close()
result
"""
PROGRESS = """
from types import SimpleNamespace
from autopar.train import ProgressBar
from autopar.train.run.reports import EpochReport, StepReport

position = SimpleNamespace(epoch=0, steps=4, update=0)
machine = SimpleNamespace(device_type="cpu")
trainer = SimpleNamespace(position=position, epochs=2, history=[], pm=SimpleNamespace(machine=machine, compiled=False))
common = dict(loss=1.5, lr=1e-3, samples_per_second=100.0, peak_bytes=2**20, data_share=0.0)
bar = ProgressBar()
bar.on_start(trainer)
for update in range(1, 9):
    step = dict(epoch=1 + (update - 1) // 4, step=1 + (update - 1) % 4, update=update, grad_norm=None, skipped=False)
    bar.on_step(trainer, StepReport(**step, **common))
    if update % 4 == 0:
        scores = dict(accuracy=update / 16, top5=None, test_loss=None, ema_accuracy=None, best=True)
        bar.on_epoch(trainer, EpochReport(epoch=update // 4, update=update, **scores, **common))
bar.on_end(trainer)
"""


def test_outputs_of_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    full_plan("<b>vit</b>").save(tmp_path / "plan.json")
    sources = [LOAD, "plan", STEP, PROGRESS]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    with client.setup_kernel():
        for number, cell in enumerate(notebook.cells):
            client.execute_cell(cell, number)
    printed, plan, step, progress = (cell.outputs for cell in notebook.cells)

    (stream,) = printed  # a printed plan is not displayed too
    assert stream["name"] == "stdout" and "rejected" in stream["text"]

    html = html_of(plan)
    assert html.count("<table") == 6 and "&lt;b&gt;vit&lt;/b&gt;" in html and "<b>" not in html and "\x1b" not in html

    html = html_of(step)
    assert all(word in html for word in ("loss", "gradient norm", "step")) and "skipped" not in html

    (bar,) = progress  # one output, which the bar has updated
    assert bar["output_type"] == "display_data"
    for text in (bar["data"]["text/html"], bar["data"]["text/plain"]):
        assert "epoch 2/2  loss 1.5000  accuracy  50.0 %" in text and "\x1b" not in text and "\r" not in text


def html_of(outputs: list[Any]) -> str:
    """HTML of a cell's value, its only output but for streams."""
    (shown,) = [output for output in outputs if output["output_type"] != "stream"]
    assert shown["output_type"] == "execute_result"
    return shown["data"]["text/html"]

"""A notebook as a browser would run it: functions of its cells on two devices, and a cell that is interrupted."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

DEFINE = """
import os, time
import psutil, torch
from pathlib import Path
from torch import nn
import autopar

torch.set_num_threads(1)
def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

scale = 2.0
def loss_fn(output, target):
    if Path("slow").exists():
        Path("reached").touch()
        time.sleep(600)
    return scale * nn.functional.cross_entropy(output, target)

def parallel():
    return autopar.parallelize(
        make_model(), 2, x, loss_fn=loss_fn, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), microbatches=2, pp=2
    )

def workers():
    own = psutil.Process().children(recursive=True)
    return [p for p in own if p.name().startswith("autopar:rank")]

x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
print(os.getpid())
"""
TRAIN = """
pm = parallel()
losses = [pm.train_step(x, y).loss for _ in range(3)]
print(len(workers()), "workers")
print("losses", losses)
"""
ALONE = """
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
alone = []
for _ in range(3):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    alone.append(loss.item())
print("largest difference", max(abs(a - b) for a, b in zip(losses, alone)))
"""
INTERRUPTED = """
Path("slow").touch()
pm.train_step(x, y)
"""
AGAIN = """
Path("slow").unlink()
print(len(workers()), "workers")
try:
    pm.train_step(x, y)
except autopar.UsageError as error:
    print(error)
with parallel() as pm:
    print("same loss", pm.train_step(x, y).loss == losses[0])
print(len(workers()), "workers")
"""


def text(cell: Any) -> str:
    """Printed text of a cell."""
    return "".join(output.get("text", "") for output in cell.outputs)


def interrupt(kernel: int, reached: Path) -> None:
    """Interrupt the kernel as the stop button does, once a worker is inside a step."""
    while not reached.exists():
        time.sleep(0.02)
    os.killpg(kernel, signal.SIGINT)


def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    monkeypatch.setenv("AUTOPAR_QUIET", "1")  # a busy machine's plans take long enough to say what they do
    sources = [DEFINE, TRAIN, ALONE, INTERRUPTED, AGAIN]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    defined, trained, alone, interrupted, again = notebook.cells
    with client.setup_kernel():
        for number, cell in enumerate((defined, trained, alone)):
            client.execute_cell(cell, number)
        assert "2 workers\nlosses [" in text(trained)
        assert float(text(alone).removeprefix("largest difference ")) < 1e-6
        stopping = threading.Thread(target=interrupt, args=(int(text(defined)), tmp_path / "reached"), daemon=True)
        stopping.start()
        with pytest.raises(nbclient.exceptions.CellExecutionError, match="KeyboardInterrupt"):
            client.execute_cell(interrupted, 3)
        stopping.join()
        client.execute_cell(again, 4)
    assert text(again).splitlines() == [
        "0 workers",
        "The workers are gone: Ctrl-C during train_step, which some ranks may have done and others not. Call "
        "autopar.parallelize again.",
        "same loss True",
        "0 workers",
    ]

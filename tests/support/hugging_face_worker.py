"""Script for two ranks of torchrun: Accelerate's loop and the Trainer, with the numbers of one process.

Arguments: a folder with the numbers, and whose turn it is: accelerate or trainer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from autopar.errors import UsageError
from autopar.integrations.accelerate import AutoparAccelerator
from support import effort, traces
from support.hugging_face_loops import (
    ACCUMULATING,
    BATCH,
    AccelerateLoop,
    Images,
    assert_same_log,
    close,
    forget_accelerators,
    logged,
    trainer,
)
from support.prepared_loops import assert_same

MESHES: list[dict[str, Any]] = [{"dp": 2}, {"pp": 2, "dp": 1}]
MESHES += [{"tp": 2, "dp": 1}] if effort.full() else []


def check_accelerate(mesh: dict[str, Any], folder: Path) -> None:
    """Compare a loop, its metrics, and collectives that count each part of the batch once."""
    forget_accelerators()
    options = {"batch_size": BATCH, "cost": "analytic", "compile": False, **mesh}
    accelerator: Any = AutoparAccelerator(options, **ACCUMULATING)
    try:
        accelerator.prepare(torch.utils.data.DataLoader(Images(4)))
        raise AssertionError("a loader before the model")
    except UsageError as error:
        assert "accelerator.prepare(model, optimizer) first" in str(error), error
    parts = mesh["dp"]
    loop = AccelerateLoop(accelerator, BATCH // parts, 6 * parts)  # Accelerate steps a schedule once for each part
    assert (accelerator.num_processes, accelerator.has_copies) == (parts, parts == 1)
    rank = torch.tensor([float(torch.distributed.get_rank())], device=accelerator.device)
    assert accelerator.gather(rank).tolist() == ([0, 1] if parts == 2 else [0])
    assert accelerator.reduce(torch.full_like(rank, 3.0), "sum").item() == 3.0 * parts
    assert accelerator.reduce(rank, "mean").item() == 0.5
    loop.run(2)
    outputs, labels = (tensor.cpu() for tensor in loop.predictions())
    accelerator.save_state(str(folder / f"state-{parts}"))
    accelerator.load_state(str(folder / f"state-{parts}"))
    expected = torch.load(folder / "accelerate.pt", weights_only=True)
    assert torch.allclose(torch.tensor(loop.losses), torch.tensor(expected["losses"]), atol=1e-5)
    assert_same(loop.weights(), expected["weights"])
    assert torch.allclose(outputs, expected["outputs"], atol=1e-4)
    assert torch.equal(labels, Images(22).labels)
    loop.model.pm.close()


def check_trainer(mesh: dict[str, Any], folder: Path) -> None:
    """Compare logs, predictions of samples without labels, and a run that resumes."""
    expected = torch.load(folder / "trainer.pt", weights_only=False)
    size = BATCH // mesh["dp"]
    options = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size, "save_strategy": "epoch"}
    output = folder / f"run-{mesh}"
    own = {"compile": False, **mesh}
    made = trainer(output, own, **options)
    made.train()
    assert_same_log(logged(made), expected["log"])
    assert_same(dict(made.model.state_dict()), expected["weights"])
    assert made.predict(Images(5, labelled=False)).predictions.shape == (5, 10)
    close(made)
    resumed = trainer(output, own, **options)
    resumed.train(resume_from_checkpoint=str(output / "checkpoint-3"))
    assert_same(dict(resumed.model.state_dict()), expected["weights"])
    close(resumed)


if __name__ == "__main__":
    traces.share()
    torch.set_num_threads(1)
    check = check_accelerate if sys.argv[2] == "accelerate" else check_trainer
    for mesh in MESHES:
        check(mesh, Path(sys.argv[1]))
        print(f"{mesh} agrees", flush=True)

"""Script for two ranks of torchrun: Fabric's and the Trainer's loops, with the losses of one process."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from autopar.errors import UsageError
from autopar.integrations.lightning import AutoparStrategy, AutoparTrainerStrategy
from support import effort, traces
from support.lightning_loops import BATCH, Classifier, FabricLoop, loader, trainer

# Loops and meshes; in a fast run each mesh with one of the loops.
CASES: list[tuple[str, dict[str, Any]]] = [("fabric", {"dp": 2}), ("trainer", {"pp": 2})]
CASES += [("fabric", {"pp": 2}), ("trainer", {"dp": 2})] if effort.full() else []


def check_fabric(mesh: dict[str, Any], folder: Path, expected: list[float], weights: dict[str, torch.Tensor]) -> None:
    """Compare Fabric's loop, its collectives and a checkpoint; the ranks' parts of batches are strided."""
    strategy = AutoparStrategy(devices=2, batch_size=BATCH, cost="analytic", **mesh)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    rank = fabric.global_rank
    gathered: Any = fabric.all_gather(torch.tensor([rank]))
    assert (fabric.world_size, fabric.is_global_zero) == (2, rank == 0)
    assert fabric.broadcast(f"from {rank}") == "from 0"
    assert gathered.tolist() == [[0], [1]]
    fabric.barrier()
    with fabric.rank_zero_first():
        assert rank == 0 or (folder / "first").exists()
        (folder / "first").touch()
    try:
        fabric.setup_dataloaders(loader())
        raise AssertionError("loaders before the model")
    except UsageError as error:
        assert "before fabric.setup_dataloaders" in str(error)
    replicas = mesh.get("dp", 1)
    loop = FabricLoop(fabric, BATCH // replicas)
    losses: Any = fabric.all_reduce(torch.tensor(loop.run()))
    assert torch.allclose(losses, torch.tensor(expected), atol=1e-5), (losses, expected)
    for name, tensor in loop.module.state_dict().items():
        assert torch.allclose(tensor, weights[name], atol=1e-5), name
    samples: Any = fabric.all_reduce(torch.tensor(BATCH // replicas), reduce_op="sum")
    highest: Any = fabric.all_reduce(torch.tensor(rank), reduce_op="max")
    assert samples.item() == BATCH and highest.item() == 1
    fabric.save(folder / "checkpoint", loop.state())
    assert fabric.load(folder / "checkpoint", {"model": loop.module, "optimizer": loop.optimizer})["epoch"] == 1
    strategy.teardown()


def check_trainer(mesh: dict[str, Any], folder: Path, alone: Classifier, metrics: dict[str, torch.Tensor]) -> None:
    """Compare the Trainer's loop and what it logs, with a resume from a checkpoint of the first epoch."""
    data = loader(BATCH // mesh.get("dp", 1))
    for epochs, path in ((1, None), (2, folder / "last.ckpt")):
        strategy = AutoparTrainerStrategy(
            devices=2, batch_size=BATCH, cost="analytic", state_dict_type="sharded", **mesh
        )
        own, run = Classifier(), trainer(strategy, folder, epochs)
        run.fit(own, data, data, ckpt_path=path)
    for name, tensor in alone.state_dict().items():
        assert torch.allclose(own.state_dict()[name], tensor, atol=1e-5), name
    for name, value in metrics.items():
        assert torch.allclose(run.callback_metrics[name], value, atol=1e-5), (name, value, run.callback_metrics[name])


def main() -> None:
    """Compare each case."""
    torch.set_num_threads(1)
    traces.share()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    folder = Path(sys.argv[1])
    loop = FabricLoop(Fabric(accelerator="cpu", devices=1))
    expected, weights = loop.run(), {name: t.clone() for name, t in loop.module.state_dict().items()}
    alone, run = Classifier(), trainer("auto")
    run.fit(alone, loader(shuffled=True), loader())
    for kind, mesh in CASES:
        own = folder / kind / "".join(mesh)
        own.mkdir(parents=True, exist_ok=True)
        if kind == "fabric":
            check_fabric(mesh, own, expected, weights)
        else:
            check_trainer(mesh, own, alone, dict(run.callback_metrics))
    print("agrees", flush=True)


if __name__ == "__main__":
    main()

"""A loop of Lightning Fabric on two devices: only the strategy differs from the loop for one.

It accumulates two batches for an update, clips, and schedules the learning rate. Losses equal those of one device.

    python examples/lightning_fabric.py
    python examples/lightning_fabric.py --mesh pp
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autopar.integrations.lightning import AutoparStrategy

MESHES: dict[str, dict[str, Any]] = {
    "pp": {"pp": 2, "microbatches": 4},
    "tp": {"tp": 2},
    "dp": {"dp": 2},
}
BATCH = 64


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GELU(), nn.Flatten(),
        nn.Linear(1024, 128), nn.GELU(), nn.Linear(128, 10),
    )  # fmt: skip


def digits() -> DataLoader:
    """Handwritten digits [1, 8, 8] in whole batches, in an order that depends on nothing else."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    return DataLoader(data, BATCH, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))


def train(fabric: Fabric, steps: int) -> list[float]:
    """Losses of a small network that learns to read digits."""
    fabric.seed_everything(0, verbose=False)
    fabric.launch()
    own = small_net()
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps // 2)
    model, optimizer = fabric.setup(own, optimizer)
    batches = fabric.setup_dataloaders(digits())
    losses = []
    for step, (images, labels) in zip(range(steps), batches):
        accumulates = step % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss / 2)
        if not accumulates:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        losses.append(loss.item())
    return losses


def main(args: argparse.Namespace) -> None:
    expected = train(Fabric(accelerator="cpu", devices=1), args.steps)
    for mesh in args.mesh:
        strategy = AutoparStrategy(devices=2, example_inputs=torch.zeros(BATCH, 1, 8, 8), **MESHES[mesh])
        losses = train(Fabric(accelerator="cpu", strategy=strategy), args.steps)
        strategy.teardown()
        difference = max(abs(a - b) for a, b in zip(losses, expected))
        print(f"{mesh} 2: loss {losses[0]:.4f} to {losses[-1]:.4f}, ", end="")
        print(f"difference from one device {difference:.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--steps", type=int, default=24)
    main(parser.parse_args())

"""A loop of Hugging Face Accelerate on two devices: only the accelerator differs from the loop for one.

A ViT learns to read digits. The loop accumulates two batches for an update, clips, and schedules the learning rate.
Losses equal those of one device.

    python examples/accelerate_vit.py
    python examples/accelerate_vit.py --mesh pp
"""

import argparse
from typing import Any

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from autopar.integrations.accelerate import AutoparAccelerator

MESHES: dict[str, dict[str, Any]] = {
    "pp": {"pp": 2, "microbatches": 4},
    "tp": {"tp": 2},
    "dp": {"dp": 2},
}
BATCH = 64
OPTIONS: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": 2}


def digits() -> TensorDataset:
    """Handwritten digits [1, 8, 8] and their labels."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels))


def train(accelerator: Accelerator, steps: int) -> list[float]:
    """Losses of a ViT of four blocks."""
    set_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, depth=4, embed_dim=48, num_heads=3, num_classes=10
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps // 2)
    loader = DataLoader(digits(), BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for _, (images, labels) in zip(range(steps), loader):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.free_memory()
    return losses


def main(args: argparse.Namespace) -> None:
    expected = train(Accelerator(**OPTIONS), args.steps)
    for mesh in args.mesh:
        losses = train(AutoparAccelerator({"devices": 2, **MESHES[mesh]}, **OPTIONS), args.steps)
        difference = max(abs(a - b) for a, b in zip(losses, expected))
        print(f"{mesh} 2: loss {losses[0]:.4f} to {losses[-1]:.4f}, ", end="")
        print(f"difference from one device {difference:.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--steps", type=int, default=24)
    main(parser.parse_args())

"""Contrastive learning (SimCLR): each image is told apart from all others of the global batch.

Such a loss is no mean over microbatches. With ``loss_over="batch"`` ``loss_fn`` is given the embeddings of all
microbatches and replicas, so that every mesh has the negatives of one device with the whole batch.

    python examples/contrastive.py
    python examples/contrastive.py --mesh pp
"""

import argparse
import copy
import functools
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

MESHES: dict[str, dict[str, Any]] = {
    "pp": {"pp": 2, "microbatches": 4},
    "tp": {"tp": 2},
    "dp": {"dp": 2, "microbatches": 2},
}
TEMPERATURE = 0.2
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class SimCLR(nn.Module):
    """Embeddings of two views of each image, both [batch, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=0
        )
        self.projection = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 32))

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        embed = nn.Sequential(self.encoder, self.projection)
        return F.normalize(embed(one), dim=1), F.normalize(embed(other), dim=1)


def two_views(count: int) -> tuple[Tensor, Tensor]:
    """Images [count, 3, 32, 32] twice, with noise of their own; half of the second views are mirrored."""
    images = F.interpolate(torch.randn(count, 3, 4, 4), size=(32, 32), mode="bilinear")
    one, other = (images + 0.1 * torch.randn_like(images) for _ in range(2))
    is_mirrored = torch.rand(count, 1, 1, 1) < 0.5
    return one, torch.where(is_mirrored, other.flip(3), other)


def loss_fn(output: tuple[Tensor, Tensor], target: None) -> Tensor:
    """NT-Xent (Chen et al. 2020, equation 1) over all images of the global batch."""
    embeddings = torch.cat(output)
    places = torch.arange(len(embeddings), device=embeddings.device)
    similarities = embeddings @ embeddings.T / TEMPERATURE
    similarities = similarities.masked_fill(places == places[:, None], float("-inf"))
    return F.cross_entropy(similarities, places.roll(len(embeddings) // 2))


def on_one_device(model: nn.Module, views: tuple[Tensor, Tensor], steps: int) -> list[float]:
    losses, optimizer = [], SGD(model.parameters())
    for _ in range(steps):
        loss = loss_fn(model(*views), None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model, views = SimCLR(), two_views(16)
    expected = on_one_device(copy.deepcopy(model), views, args.steps)
    for mesh in args.mesh:
        with autopar.parallelize(
            model, devices=2, example_inputs=views, loss_fn=loss_fn, loss_over="batch", optimizer=SGD, **MESHES[mesh]
        ) as pm:
            losses = [pm.train_step(views, None).loss for _ in range(args.steps)]
        difference = max(abs(a - b) for a, b in zip(losses, expected))
        print(f"{mesh} 2: loss {losses[0]:.4f} to {losses[-1]:.4f}, ", end="")
        print(f"difference from one device {difference:.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--steps", type=int, default=10)
    main(parser.parse_args())

"""Self-supervised learning: a masked autoencoder (ViT-MAE), whose random masks are equal under every mesh.

autopar draws random numbers by seed, update and sample, so that no mesh and no microbatch changes a mask. They are not
those of `torch.manual_seed`: one device here is a parallel model on one device.

    python examples/masked_autoencoder.py
    python examples/masked_autoencoder.py --mesh pp
"""

import argparse
import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ViTMAEConfig, ViTMAEForPreTraining

import autopar

MESHES: dict[str, dict[str, Any]] = {
    "one": {},
    "pp": {"pp": 2, "microbatches": 4},
    "tp": {"tp": 2},
    "dp": {"dp": 2},
}
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SIDE, PATCH = 32, 8


class MaskedAutoencoder(nn.Module):
    """Pixels of each patch [batch, patches, 3 · 8 · 8], and which patches were masked [batch, patches]."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        }
        decoder: dict[str, Any] = {f"decoder_{name}": number for name, number in sizes.items()}
        self.mae = ViTMAEForPreTraining(ViTMAEConfig(image_size=SIDE, patch_size=PATCH, **sizes, **decoder))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        output = self.mae(images)
        return {"pixels": output.logits, "mask": output.mask}


def slopes(count: int) -> Tensor:
    """Images [count, 3, 32, 32] whose hidden parts follow from the visible ones: slopes of a color, with noise."""
    places = torch.linspace(-1, 1, SIDE)
    color, across, down = torch.randn(3, count, 3, 1, 1)
    return color + across * places + down * places[:, None] + 0.1 * torch.randn(count, 3, SIDE, SIDE)


def loss_fn(output: dict[str, Tensor], patches: Tensor) -> Tensor:
    """Mean squared error of the masked patches; each image has equally many."""
    errors = (output["pixels"] - patches).square().mean(-1)
    return (errors * output["mask"]).sum() / output["mask"].sum()


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model, images = MaskedAutoencoder(), slopes(16)
    patches = model.mae.patchify(images)
    losses: dict[str, list[float]] = {}
    masks: dict[str, Tensor] = {}
    for mesh in ("one", *args.mesh):
        with autopar.parallelize(
            model, 1 if mesh == "one" else 2, images, loss_fn=loss_fn, optimizer=SGD, seed=0, **MESHES[mesh]
        ) as pm:
            steps = [pm.train_step(images, patches, return_outputs=True) for _ in range(args.steps)]
        losses[mesh], masks[mesh] = [s.loss for s in steps], torch.stack([s.outputs["mask"] for s in steps])
        difference = max(abs(a - b) for a, b in zip(losses[mesh], losses["one"]))
        equal = torch.equal(masks[mesh], masks["one"])
        print(f"{pm.plan.mesh}: loss {losses[mesh][0]:.4f} to {losses[mesh][-1]:.4f}, ", end="")
        print(f"equal masks: {equal}, difference from one device {difference:.1e}", flush=True)
    hidden, patches_per_image = masks["one"][0, 0].sum(), masks["one"].shape[-1]
    print(f"masked: {hidden:.0f} of {patches_per_image} patches, others in each step: ", end="")
    print(not torch.equal(masks["one"][0], masks["one"][1]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=["pp", "tp", "dp"], choices=list(MESHES))
    parser.add_argument("--steps", type=int, default=10)
    main(parser.parse_args())

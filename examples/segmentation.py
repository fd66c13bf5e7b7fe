"""Semantic segmentation: a SegFormer, per-pixel cross-entropy with ignored pixels, and the mean IoU.

Cross-entropy divides by the number of labelled pixels, of which each microbatch has another number. So the target
carries that number for the whole batch, and losses equal those of one device with the whole batch under every mesh.

    python examples/segmentation.py
    python examples/segmentation.py --mesh pp
"""

import argparse
import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassJaccardIndex
from transformers import SegformerConfig, SegformerForSemanticSegmentation

import autopar

MESHES: dict[str, dict[str, Any]] = {
    "pp": {"pp": 2, "microbatches": 4},
    "tp": {"tp": 2},
    "dp": {"dp": 2},
}
CLASSES, IGNORED, SIDE = 3, 255, 32
ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3)


def segformer() -> nn.Module:
    sizes: dict[str, Any] = {
        "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2],
        "sr_ratios": [4, 2], "patch_sizes": [7, 3], "strides": [2, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 32,
        "num_labels": CLASSES,
    }  # fmt: skip
    # Random numbers would be those of autopar, not of the plain PyTorch loop below.
    no_dropout: dict[str, Any] = {
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0,
        "drop_path_rate": 0.0,
    }  # fmt: skip
    model: Any = SegformerForSemanticSegmentation(SegformerConfig(**sizes, **no_dropout))
    # Batch norm would take the statistics of a microbatch; group norm takes those of a sample.
    model.decode_head.batch_norm = nn.GroupNorm(8, 32)
    return model


def scenes(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images [count, 3, 32, 32] of a square of one of two colors; the labels [count, 32, 32] ignore its edge."""
    images, labels = 0.3 * torch.randn(count, 3, SIDE, SIDE), torch.zeros(count, SIDE, SIDE, dtype=torch.int64)
    for image, label in zip(images, labels):
        side, kind = int(torch.randint(12, 24, ())), int(torch.randint(1, CLASSES, ()))
        top, left = (int(torch.randint(0, SIDE - side, ())) for _ in range(2))
        label[top : top + side, left : left + side] = IGNORED
        label[top + 2 : top + side - 2, left + 2 : left + side - 2] = kind
        image[kind, top : top + side, left : left + side] += 1.0
    return images, labels


def upsampled(output: Any) -> torch.Tensor:
    return F.interpolate(output.logits, size=(SIDE, SIDE), mode="bilinear")


def loss_fn(output: Any, target: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum over pixels, divided by the labelled pixels that so many images of the batch have on average."""
    labels = target["labels"]
    total = F.cross_entropy(upsampled(output), labels, ignore_index=IGNORED, reduction="sum")
    return total / (len(labels) * target["pixels_per_image"])


def on_one_device(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int) -> list[float]:
    losses, optimizer = [], ADAMW(model.parameters())
    for _ in range(steps):
        loss = F.cross_entropy(upsampled(model(images)), labels, ignore_index=IGNORED)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model, (images, labels) = segformer().train(), scenes(8)
    target = {"labels": labels, "pixels_per_image": (labels != IGNORED).sum() / len(labels)}
    expected = on_one_device(copy.deepcopy(model), images, labels, args.steps)
    for mesh in args.mesh:
        with autopar.parallelize(
            model, devices=2, example_inputs=images, loss_fn=loss_fn, optimizer=ADAMW, **MESHES[mesh]
        ) as pm:
            losses = [pm.train_step(images, target).loss for _ in range(args.steps)]
            predicted = upsampled(pm.eval()(images)).argmax(1)
        iou = MulticlassJaccardIndex(CLASSES, ignore_index=IGNORED)(predicted, labels)
        difference = max(abs(a - b) for a, b in zip(losses, expected))
        print(f"{mesh} 2: loss {losses[0]:.4f} to {losses[-1]:.4f}, mean IoU {iou:.3f}, ", end="")
        print(f"difference from one device {difference:.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args())

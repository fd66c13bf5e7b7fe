"""Detection: a DETR, and its set loss with Hungarian matching by scipy.

The loss divides by the number of boxes, of which each microbatch has another number. So the target carries that number
for the whole batch, and losses equal those of one device with the whole batch under every mesh. Images have different
numbers of objects: labels and boxes are padded, so that a batch is a tensor.

    python examples/detection.py
    python examples/detection.py --mesh pp
"""

import argparse
import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torchvision.ops import box_convert, generalized_box_iou
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

import autopar

MESHES: dict[str, dict[str, Any]] = {
    "pp": {"pp": 2, "microbatches": 4},
    "tp": {"tp": 2},
    "dp": {"dp": 2},
}
CLASSES, QUERIES, MAX_OBJECTS, NONE, SIDE = 2, 8, 3, -1, 64
NO_OBJECT_WEIGHT = 0.1
SGD = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9)


def detr() -> nn.Module:
    backbone: dict[str, Any] = {
        "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic",
        "out_features": ["stage2"],
    }  # fmt: skip
    sizes: dict[str, Any] = {
        "d_model": 32, "num_queries": QUERIES, "num_labels": CLASSES, "dropout": 0.0,
        "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
        "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64,
    }  # fmt: skip
    model = DetrForObjectDetection(DetrConfig(backbone_config=ResNetConfig(**backbone), **sizes)).train()
    model.model.unfreeze_backbone()
    return model


def scenes(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images [count, 3, 64, 64] of 1 to 3 squares, their classes and boxes (center, size; 0 to 1), padded."""
    images, labels = 0.1 * torch.randn(count, 3, SIDE, SIDE), torch.full((count, MAX_OBJECTS), NONE)
    boxes = torch.zeros(count, MAX_OBJECTS, 4)
    for i in range(count):
        for k in range(1 + i % MAX_OBJECTS):
            side, kind = int(torch.randint(8, 24, ())), int(torch.randint(0, CLASSES, ()))
            top, left = (int(torch.randint(0, SIDE - side, ())) for _ in range(2))
            images[i, kind, top : top + side, left : left + side] += 1.0
            labels[i, k] = kind
            boxes[i, k] = torch.tensor([left + side / 2, top + side / 2, side, side]) / SIDE
    return images, labels, boxes


def distances(boxes: Tensor, true_boxes: Tensor) -> Tensor:
    """DETR's cost of each pair of boxes: 5 · L1 distance - 2 · generalized IoU."""
    corners, true_corners = (box_convert(b, "cxcywh", "xyxy") for b in (boxes, true_boxes))
    return 5 * torch.cdist(boxes, true_boxes, p=1) - 2 * generalized_box_iou(corners, true_corners)


def matched(logits: Tensor, costs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of an image and the objects that they are assigned to, at the least cost in all."""
    with torch.no_grad():
        queries, objects = linear_sum_assignment((costs - logits.softmax(-1)[:, labels]).cpu())
    return torch.as_tensor(queries), torch.as_tensor(objects)


def loss_fn(output: Any, target: dict[str, Tensor]) -> Tensor:
    """The mean over images of DETR's loss, each term divided by what the images of the batch have on average."""
    class_loss = box_loss = output.logits.new_zeros(())
    weight = torch.ones(CLASSES + 1, device=output.logits.device)
    weight[-1] = NO_OBJECT_WEIGHT
    for logits, boxes, labels, true_boxes in zip(output.logits, output.pred_boxes, target["labels"], target["boxes"]):
        real = labels != NONE
        labels, costs = labels[real], distances(boxes, true_boxes[real])
        queries, objects = matched(logits, costs, labels)
        classes = torch.full((QUERIES,), CLASSES, device=labels.device)
        classes[queries] = labels[objects]
        class_loss = class_loss + F.cross_entropy(logits, classes, weight, reduction="sum")
        box_loss = box_loss + (2 + costs[queries, objects]).sum()
    boxes_per_image = target["boxes_per_image"]
    weight_per_image = boxes_per_image + NO_OBJECT_WEIGHT * (QUERIES - boxes_per_image)
    return (class_loss / weight_per_image + box_loss / boxes_per_image) / len(output.logits)


def on_one_device(model: nn.Module, images: Tensor, target: dict[str, Tensor], steps: int) -> list[float]:
    losses, optimizer = [], SGD(model.parameters())
    for _ in range(steps):
        loss = loss_fn(model(images), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model, (images, labels, boxes) = detr(), scenes(8)
    target = {"labels": labels, "boxes": boxes, "boxes_per_image": (labels != NONE).sum() / len(labels)}
    expected = on_one_device(copy.deepcopy(model), images, target, args.steps)
    for mesh in args.mesh:
        with autopar.parallelize(
            model, devices=2, example_inputs=images, loss_fn=loss_fn, optimizer=SGD, **MESHES[mesh]
        ) as pm:
            losses = [pm.train_step(images, target).loss for _ in range(args.steps)]
        difference = max(abs(a - b) for a, b in zip(losses, expected))
        print(f"{mesh} 2: loss {losses[0]:.4f} to {losses[-1]:.4f}, ", end="")
        print(f"difference from one device {difference:.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--steps", type=int, default=10)
    main(parser.parse_args())

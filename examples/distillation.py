"""Distillation: a frozen teacher and its student as one module, which is cut and split as a whole.

The teacher has no gradients, no optimizer state and keeps no activations for a backward. The planner knows: it gives a
stage of the teacher no backward, and balances the stages with that.

    python examples/distillation.py
    python examples/distillation.py --mesh pp
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
    "dp": {"dp": 2},
}
TEMPERATURE = 2.0
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


class Distillation(nn.Module):
    """Logits of the student and of its teacher, both [batch, classes]."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher = teacher.eval().requires_grad_(False)
        self.student = student

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"student": self.student(images), "teacher": self.teacher(images)}


def vit(depth: int, width: int) -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=depth, embed_dim=width, num_heads=4, num_classes=10
    )


def loss_fn(output: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Half cross-entropy with the labels, half with the softened classes of the teacher (Hinton et al. 2015)."""
    student, teacher = output["student"], output["teacher"]
    soft = F.cross_entropy(student / TEMPERATURE, (teacher / TEMPERATURE).softmax(1)) * TEMPERATURE**2
    return 0.5 * F.cross_entropy(student, labels) + 0.5 * soft


def on_one_device(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> list[float]:
    losses, optimizer = [], ADAMW(p for p in model.parameters() if p.requires_grad)
    for _ in range(steps):
        loss = loss_fn(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = Distillation(teacher=vit(depth=4, width=64), student=vit(depth=2, width=32))
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    teacher, student = (sum(p.nbytes for p in part.parameters()) for part in (model.teacher, model.student))
    print(f"weights: teacher {teacher / 2**10:.0f} KiB, student {student / 2**10:.0f} KiB")
    expected = on_one_device(copy.deepcopy(model), images, labels, args.steps)
    for mesh in args.mesh:
        with autopar.parallelize(
            model, devices=2, example_inputs=images, loss_fn=loss_fn, optimizer=ADAMW, **MESHES[mesh]
        ) as pm:
            losses = [pm.train_step(images, labels).loss for _ in range(args.steps)]
            state = [rank.optimizer_bytes for rank in pm.stats().values()]
            peaks = pm.measure_memory(images, labels)
            pm.forward_backward(images, labels)
            trained = pm.gradients()
        difference = max(abs(a - b) for a, b in zip(losses, expected))
        print(f"{mesh} 2: loss {losses[0]:.4f} to {losses[-1]:.4f}, difference from one device {difference:.1e}")
        print(f"  gradients of the teacher: {sum(name.startswith('teacher.') for name in trained)}, ", end="")
        print(f"optimizer state: {' + '.join(f'{size / 2**10:.0f}' for size in state)} KiB")
        planned = zip(peaks.values(), pm.plan.prediction.peak_bytes)
        print(f"  peak of tensors: {', '.join(f'{a / 2**10:.0f} KiB (planned {b / 2**10:.0f})' for a, b in planned)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--steps", type=int, default=5)
    main(parser.parse_args())

"""Fine-tuning with few trained weights: the last block and the head, or LoRA adapters of peft.

Frozen weights have no gradients, no reduction and no optimizer state, and a backward ends at the first trained layer.
The planner knows: stages in front of that layer have no backward, and are larger for it.

    python examples/fine_tuning.py
    python examples/fine_tuning.py --method lora --mesh pp
"""

import argparse
import copy
import functools
from typing import Any

import peft
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

MESHES: dict[str, dict[str, Any]] = {
    "pp": {"pp": 2, "microbatches": 4, "schedule": "1f1b"},
    "tp": {"tp": 2},
    "dp": {"dp": 2},
}
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def vit() -> nn.Module:
    """Stands for a pretrained model: ``timm.create_model(name, pretrained=True)``."""
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, embed_dim=64, num_heads=4, num_classes=10
    )


def last_block(model: Any) -> nn.Module:
    model.requires_grad_(False)
    for part in (model.blocks[-1], model.norm, model.head):
        part.requires_grad_(True)
    return model


def lora(model: nn.Module) -> nn.Module:
    """Low-rank updates of all projections of attention, and a trained head."""
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["qkv", "proj"], modules_to_save=["head"]))


METHODS = {"last-block": last_block, "lora": lora}


def on_one_device(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> list[float]:
    losses, optimizer = [], ADAMW(p for p in model.parameters() if p.requires_grad)
    for _ in range(steps):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    for method in args.method:
        model = METHODS[method](vit())
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        sizes = [sum(p.nbytes for n, p in model.named_parameters() if (n in trained) == is_) for is_ in (True, False)]
        print(f"{method}: {sizes[0] / 2**10:.0f} KiB of weights are trained, {sizes[1] / 2**10:.0f} KiB are frozen")
        expected = on_one_device(copy.deepcopy(model), images, labels, args.steps)
        for mesh in args.mesh:
            with autopar.parallelize(model, devices=2, example_inputs=images, optimizer=ADAMW, **MESHES[mesh]) as pm:
                losses = [pm.train_step(images, labels).loss for _ in range(args.steps)]
                state = [rank.optimizer_bytes for rank in pm.stats().values()]
                pm.forward_backward(images, labels)
                assert pm.gradients().keys() == trained
                tuned = copy.deepcopy(model)
                tuned.load_state_dict(pm.state_dict())  # an unmodified model: tuned.save_pretrained(folder), if of peft
            difference = max(abs(a - b) for a, b in zip(losses, expected))
            print(f"{mesh} 2: loss {losses[0]:.4f} to {losses[-1]:.4f}, difference from one device {difference:.1e}")
            seconds = [f"{s.forward_seconds * 1e3:.1f} + {s.backward_seconds * 1e3:.1f} ms" for s in pm.plan.stages]
            print(f"  forward + backward of stages: {', '.join(seconds)} (planned)")
            print(f"  optimizer state of ranks: {', '.join(f'{size / 2**10:.0f} KiB' for size in state)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--steps", type=int, default=5)
    main(parser.parse_args())

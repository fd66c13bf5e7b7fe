"""Measured step time of a model under every mesh of the available devices, next to the planner's prediction.

torchrun --nproc-per-node 4 examples/compare_meshes.py vit_large_patch16_224 --batch 64
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from statistics import median

import timm
import torch

import autopar

WARMUP_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a timm name")
    parser.add_argument("--batch", type=int, default=64, help="global batch")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=10, help="timed steps, after three of warm-up")
    parser.add_argument("--hardware", help="cost model to plan with")
    args = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node N, as its first lines say")
    devices, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.manual_seed(0)
    model = timm.create_model(args.model, num_classes=1000)
    images = torch.randn(args.batch, 3, args.img_size, args.img_size)
    labels = torch.randint(0, 1000, (args.batch,))
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    chosen = autopar.plan(model, devices, images, hardware=args.hardware).mesh
    if rank == 0:
        print(f"{args.model}, batch {args.batch}; the planner's choice is {chosen}")
        print(f"{'mesh':22} {'microbatches':>12} {'predicted':>10} {'measured':>10} {'samples/s':>10}")
    for tp in divisors(devices):
        for pp in divisors(devices // tp):
            dp = devices // tp // pp
            with autopar.parallelize(
                model, devices, images, optimizer=optimizer, pp=pp, tp=tp, dp=dp, hardware=args.hardware
            ) as pm:
                # Under torchrun a rank feeds its own part of the batch.
                x, y = images.chunk(pm.data_size)[pm.data_rank], labels.chunk(pm.data_size)[pm.data_rank]
                seconds = [pm.train_step(x, y).step_seconds for _ in range(WARMUP_STEPS + args.steps)][WARMUP_STEPS:]
                if rank == 0:
                    print(
                        f"{pm.plan.mesh!s:22} {pm.plan.microbatches:12} "
                        f"{pm.plan.prediction.step_seconds * 1e3:7.1f} ms {median(seconds) * 1e3:7.1f} ms "
                        f"{args.batch / median(seconds):10.1f}",
                        flush=True,
                    )


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


if __name__ == "__main__":
    try:
        main()
    except autopar.AutoparError as error:
        sys.exit(f"error: {error}")

"""A ViT with every kind of dropout, and its losses; as a script for two ranks it prints the losses of two replicas."""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import torch
from torch import nn

import autopar
from support.models import tiny_vit
from support.reference import replica_part
from support.traces import share

BATCH, STEPS = 12, 20
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)


def dropping_vit(rate: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return tiny_vit(
        2, embed_dim=32, num_heads=4, drop_rate=rate, pos_drop_rate=rate, proj_drop_rate=rate, attn_drop_rate=rate,
        drop_path_rate=rate,
    )  # fmt: skip


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, 3, 32, 32, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)


def split_model(model: nn.Module, mesh: tuple[int, int, int] = (1, 1, 1), **more: Any) -> autopar.ParallelModel:
    """Model on a mesh (pp, tp, dp)."""
    pp, tp, dp = mesh
    return autopar.parallelize(
        model, pp * tp * dp, data()[0], optimizer=ADAMW, pp=pp, tp=tp, dp=dp, memory="8GiB", **more
    )


def losses(pm: autopar.ParallelModel, steps: int = STEPS) -> list[float]:
    """Losses of training steps on one batch, of which this process feeds its part."""
    x, y = (replica_part(t, pm) for t in data())
    return [pm.train_step(x, y).loss for _ in range(steps)]


def main() -> None:
    torch.set_num_threads(1)
    share()
    with split_model(dropping_vit(), (1, 1, 2), microbatches=3) as pm:
        assert (pm.data_size, pm.data_rank) == (2, int(os.environ["RANK"]))
        step_losses = losses(pm)
        if pm.data_rank == 0:
            print(json.dumps(step_losses))


if __name__ == "__main__":
    main()

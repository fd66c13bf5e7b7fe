"""Tensor parallelism by DTensor: `parallelize_module` on the blocks of timm's ViTs, and FSDP2 over what is left."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from autopar.tools.bench.assignment import Assignment, WorkerContext, adamw_options, built_model, images_and_labels
from autopar.tools.bench.baselines.ddp_fsdp import refuse_float16, shard, share_of
from autopar.tools.bench.baselines.registry import NotExpressible
from autopar.tools.bench.parts import blocks, compile_blocks
from autopar.tools.bench.training import Ready, Share, mean_loss

SPLITS = {"attn.qkv": ColwiseParallel, "attn.proj": RowwiseParallel, "mlp.fc1": ColwiseParallel,
          "mlp.fc2": RowwiseParallel}  # fmt: skip


class LocalHeads(nn.Module):
    """timm's attention over the heads of one rank."""

    def __init__(self, attention: Any, ranks: int) -> None:
        super().__init__()
        self.heads, self.width = attention.num_heads // ranks, attention.head_dim
        self.qkv, self.proj = attention.qkv, attention.proj

    def forward(self, x: torch.Tensor, attn_mask: None = None, is_causal: bool = False) -> torch.Tensor:
        assert attn_mask is None and not is_causal
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.width)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def tensor_parallel(told: Assignment, seat: WorkerContext) -> Ready:
    """Column splits of qkv and the MLP's first layer, row splits of the projections: an all-reduce after each pair."""
    refuse_float16(told, "DTensor")
    model = built_model(told, seat)
    found = blocks(model)
    check(found, told.tp)
    mesh = init_device_mesh(seat.device.type, (seat.world // told.tp, told.tp), mesh_dim_names=("dp", "tp"))
    model.to(seat.device)
    for block in found:
        split(block, told.tp, mesh["tp"])
    replicas = seat.world // told.tp
    if replicas > 1 or told.low is not None:
        # Over one replica too: it casts the weights once a step, where autocast casts them for every use.
        shard(model, mesh["dp"], told.low, reshard=False)
    if told.compile:
        compile_blocks(found)
    images, labels = images_and_labels(told, seat, share_of(told, seat.rank // told.tp, replicas))
    optimizer = torch.optim.AdamW(by_mesh(model.parameters()), **adamw_options(seat.device.type))

    def step() -> Share:
        loss = mean_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return lambda: loss.item() / seat.world

    return Ready(step)


def split(block: Any, ranks: int, mesh: Any) -> None:
    """One block in place. The rows of qkv get the order (rank, q k v, heads), so that a rank has whole heads."""
    with torch.no_grad():
        for tensor in (block.attn.qkv.weight, block.attn.qkv.bias):
            if tensor is not None:
                rows = tensor.unflatten(0, (3, ranks, -1)).transpose(0, 1).reshape(tensor.shape).clone()
                tensor.copy_(rows)
    block.attn = LocalHeads(block.attn, ranks)
    parallelize_module(block, mesh, {name: style() for name, style in SPLITS.items()})


def check(found: Iterable[nn.Module], ranks: int) -> None:
    """Raise NotExpressible unless these are blocks of timm's ViT that ``ranks`` can share."""
    for block in found:
        children = dict(block.named_modules())
        attention: Any = children.get("attn")
        if not SPLITS.keys() <= children.keys() or not hasattr(attention, "num_heads"):
            raise NotExpressible(
                f"{type(block).__name__} is no block with {', '.join(SPLITS)}, which is what is split by hand here"
            )
        plain = {"qkv", "proj", "q_norm", "k_norm", "attn_drop", "norm", "proj_drop"}
        idle = (nn.Identity, nn.Dropout, nn.Linear)
        extra = [n for n, m in attention.named_children() if n not in plain or not isinstance(m, idle)]
        if type(attention).__name__ != "Attention" or extra or getattr(attention.attn_drop, "p", 0.0) > 0.0:
            raise NotExpressible(
                f"{type(attention).__name__} does more between qkv and the projection ({', '.join(extra) or 'its own'})"
                " than heads that lie apart can do"
            )
        if attention.num_heads % ranks:
            raise NotExpressible(f"{ranks} ranks cannot share {attention.num_heads} heads evenly")


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """Parameter groups, each of one mesh or of plain tensors: AdamW's kernels over lists take no mixture."""

    def key(parameter: nn.Parameter) -> str:
        return str(parameter.device_mesh) if isinstance(parameter, DTensor) else ""

    return [{"params": list(own)} for _, own in groupby(sorted(parameters, key=key), key=key)]

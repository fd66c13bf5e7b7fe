"""Tensor parallelism by DTensor: `parallelize_module` on the blocks of timm's ViTs, and FSDP2 over the replicas."""

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

from autopar.measure.workers import WorkerContext
from autopar.tools.bench.baselines.ddp_fsdp import batch_slice, refuse_float16, shard_blocks
from autopar.tools.bench.baselines.registry import NotExpressible
from autopar.tools.bench.parts import blocks, compile_blocks
from autopar.tools.bench.task import BenchTask, adamw_options, build_model, make_batch
from autopar.tools.bench.training import BaselineTrainer, LossShare, mean_loss

BLOCK_STYLES = {"attn.qkv": ColwiseParallel, "attn.proj": RowwiseParallel, "mlp.fc1": ColwiseParallel,
          "mlp.fc2": RowwiseParallel}  # fmt: skip


class LocalHeads(nn.Module):
    """timm's attention with the heads of one rank."""

    def __init__(self, attention: Any, ranks: int) -> None:
        super().__init__()
        self.heads, self.width = attention.num_heads // ranks, attention.head_dim
        self.qkv, self.proj = attention.qkv, attention.proj

    def forward(self, x: torch.Tensor, attn_mask: None = None, is_causal: bool = False) -> torch.Tensor:
        assert attn_mask is None and not is_causal
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.width)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def tensor_parallel(task: BenchTask, worker: WorkerContext) -> BaselineTrainer:
    """Column splits of qkv and the MLP's first layer, row splits of the projections; an all-reduce after each pair."""
    refuse_float16(task, "DTensor")
    model = build_model(task, worker)
    model_blocks = blocks(model)
    check_blocks(model_blocks, task.tp)
    mesh = init_device_mesh(worker.device.type, (worker.world // task.tp, task.tp), mesh_dim_names=("dp", "tp"))
    model.to(worker.device)
    for block in model_blocks:
        split_block(block, task.tp, mesh["tp"])
    replicas = worker.world // task.tp
    if replicas > 1 or task.low is not None:
        # Also for one replica: FSDP2 casts the weights once a step, autocast for every use.
        shard_blocks(model, mesh["dp"], task.low, reshard=False)
    if task.request.compile:
        compile_blocks(model_blocks)
    images, labels = make_batch(task, worker, batch_slice(task, worker.rank // task.tp, replicas))
    optimizer = torch.optim.AdamW(groups_by_mesh(model.parameters()), **adamw_options(worker.device.type))

    def step() -> LossShare:
        loss = mean_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return lambda: loss.item() / worker.world

    return BaselineTrainer(step)


def split_block(block: Any, ranks: int, mesh: Any) -> None:
    """Split one block in place. The rows of qkv are reordered to (rank, q k v, heads), so that a rank has whole heads.

    Args:
        mesh: of the tensor-parallel axis.
    """
    with torch.no_grad():
        for tensor in (block.attn.qkv.weight, block.attn.qkv.bias):
            if tensor is not None:
                rows = tensor.unflatten(0, (3, ranks, -1)).transpose(0, 1).reshape(tensor.shape).clone()
                tensor.copy_(rows)
    block.attn = LocalHeads(block.attn, ranks)
    parallelize_module(block, mesh, {name: style() for name, style in BLOCK_STYLES.items()})


def check_blocks(modules: Iterable[nn.Module], ranks: int) -> None:
    """Raise NotExpressible unless all modules are blocks of timm's ViT that ``ranks`` ranks can share."""
    for block in modules:
        children = dict(block.named_modules())
        attention: Any = children.get("attn")
        if not BLOCK_STYLES.keys() <= children.keys() or not hasattr(attention, "num_heads"):
            raise NotExpressible(
                f"{type(block).__name__} is no block with {', '.join(BLOCK_STYLES)}, which is what is split by hand "
                "here"
            )
        expected = {"qkv", "proj", "q_norm", "k_norm", "attn_drop", "norm", "proj_drop"}
        harmless = (nn.Identity, nn.Dropout, nn.Linear)
        extra = [n for n, m in attention.named_children() if n not in expected or not isinstance(m, harmless)]
        if type(attention).__name__ != "Attention" or extra or getattr(attention.attn_drop, "p", 0.0) > 0.0:
            raise NotExpressible(
                f"{type(attention).__name__} does more between qkv and the projection ({', '.join(extra) or 'its own'})"
                " than heads that lie apart can do"
            )
        if attention.num_heads % ranks:
            raise NotExpressible(f"{ranks} ranks cannot share {attention.num_heads} heads evenly")


def groups_by_mesh(parameters: Iterable[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """Parameter groups, each of one mesh or of plain tensors: AdamW's foreach kernels take no mixture."""

    def key(parameter: nn.Parameter) -> str:
        return str(parameter.device_mesh) if isinstance(parameter, DTensor) else ""

    return [{"params": list(group)} for _, group in groupby(sorted(parameters, key=key), key=key)]

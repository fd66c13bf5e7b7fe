"""CPU copies of a rank's weights and gradients, from which its caller joins whole ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.ir.layout import REPLICATED
from autopar.runtime.optim.step import Updater
from autopar.runtime.params.sharded_params import ShardedParams
from autopar.runtime.spec import RankSpec
from autopar.sharding.tensors import contiguous_copy


def weight_copies(
    spec: RankSpec, stored: Mapping[str, torch.Tensor], sharded: ShardedParams | None
) -> dict[str, torch.Tensor]:
    """CPU copies of a rank's parts of weights, or of their averages; each part comes from one rank of the mesh.

    Args:
        stored: what this replica stores of them, by name. Pieces of ``sharded`` ones are gathered from all replicas.
    """
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        if spec.place.replica == 0 and spec.has_first_copy(name):
            found[name] = contiguous_copy(tensor)

    for name in stored.keys() - (sharded.pieces.keys() if sharded is not None else ()):
        keep(name, stored[name])
    if sharded is not None:
        for name, tensor in sharded.whole_values(stored):
            keep(name, tensor)
    return {weight.name: found[weight.name] for weight in spec.weights if weight.name in found}


def gradient_copies(spec: RankSpec, updater: Updater) -> dict[str, torch.Tensor]:
    """CPU copies of a rank's local gradients.

    The whole gradients are their sums over replicas, tied stages and, where the gradient is partial, shards. If several
    shards have equal gradients, only the first shard returns them.
    """
    gradients = {name: p.grad for name, p in updater.trainable.items() if p.grad is not None}
    for name, piece in updater.updated.items():
        if piece.grad is not None and name not in gradients:
            sharded = updater.sharded
            gradients[name] = sharded.whole_of(name, piece.grad) if sharded is not None else piece.grad
    return {
        name: contiguous_copy(gradient) / updater.loss_scale
        for name, gradient in gradients.items()
        if spec.place.shard == 0 or spec.layout(name) != REPLICATED
    }

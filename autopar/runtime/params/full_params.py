"""Full (unsharded) tensor-parallel weights, for optimizers that need full parameters, such as LAMB or Muon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import nn

from autopar.ir.grad_buckets import assign_owners, group_weights
from autopar.ir.tensor_axes import axis_index
from autopar.runtime.comm.protocols import Transport
from autopar.runtime.spec import RankSpec
from autopar.sharding.tensors import local_part, whole_tensor


class FullParams:
    """Gathers the parts of some weights on the one shard that updates each, and scatters the updated weights.

    Between steps only the parts are valid. Every update gathers the full copies again, so code that changes a part
    (loading a state) need not know of them. A step sends weights and gradients to the owners and the weights back:
    three times the size of the other shards' parts. Only the owner has the optimizer state of a weight.
    """

    def __init__(
        self, names: Iterable[str], parts: Mapping[str, nn.Parameter], spec: RankSpec, transport: Transport
    ) -> None:
        """Take the split weights ``names`` that this replica updates; equal on all shards."""
        self.parts = {name: parts[name] for name in names}
        self.spec, self.transport = spec, transport
        self.shard, self.sizes = spec.place.shard, spec.mesh.axis_sizes
        # The first shard's parts, the largest, so that all shards share weights out alike.
        self.weights = [
            replace(weight, shape=self.part_shape(weight.name, 0))
            for weight in spec.weights
            if weight.name in self.parts
        ]
        self.owners = assign_owners({weight.name: weight.numel for weight in self.weights}, spec.mesh.tp, {})
        # Full parameters that this shard owns.
        self.full: dict[str, nn.Parameter] = {}
        for name, local in self.parts.items():
            if self.owners[name] == self.shard:
                self.full[name] = nn.Parameter(local.new_zeros(spec.whole_shape(name, local.shape)))

    def part_shape(self, name: str, shard: int) -> tuple[int, ...]:
        """Shape of a shard's part of a weight."""
        whole = self.spec.whole_shape(name, self.parts[name].shape)
        return self.spec.layout(name).local_shape(whole, self.sizes, axis_index(self.sizes, shard))

    def part_sizes(self, names: Iterable[str], shard: int) -> list[int]:
        """Number of elements of a shard's part of each weight."""
        return [prod(self.part_shape(name, shard)) for name in names]

    def buckets(self) -> Iterator[tuple[int, list[str]]]:
        """Each owner with weights that travel together in this step. A gradient exists on all shards or on none."""
        for owner in range(self.spec.mesh.tp):
            owned = [w for w in self.weights if self.owners[w.name] == owner and self.parts[w.name].grad is not None]
            for group in group_weights(owned, 1):
                yield owner, [weight.name for weight in group]

    def gather(self) -> None:
        """Fill the full weights that this shard owns, and their gradients, where these exist."""
        for full in self.full.values():
            full.grad = None
        for owner, names in self.buckets():
            tensors = [t for name in names for t in (self.parts[name].detach(), self.parts[name].grad)]
            largest = 2 * sum(self.part_sizes(names, 0))
            flat = padded([t.reshape(-1) for t in tensors if t is not None], largest)
            rows = self.transport.start_gather(flat, self.spec.shard_ranks, self.spec.shard_ranks[owner])()
            if owner == self.shard:
                sizes = ([n for n in self.part_sizes(names, i) for _ in range(2)] for i in range(len(rows)))
                by_shard = [row[: sum(own)].split(own) for row, own in zip(rows, sizes)]
                for i, name in enumerate(names):
                    self.full[name].data.copy_(self.unshard(name, [pieces[2 * i] for pieces in by_shard]))
                    self.full[name].grad = self.unshard(name, [pieces[2 * i + 1] for pieces in by_shard])

    def unshard(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """Full tensor of all shards' flat parts, [numel] each."""
        members = [(axis_index(self.sizes, i), part.view(self.part_shape(name, i))) for i, part in enumerate(parts)]
        return whole_tensor(members, self.spec.layout(name), self.sizes)

    def scatter(self) -> None:
        """Send every shard its part of the updated weights."""
        for owner, names in self.buckets():
            sizes, largest = self.part_sizes(names, self.shard), sum(self.part_sizes(names, 0))
            updated: list[torch.Tensor] = []
            if owner == self.shard:
                updated = [padded([self.local_part(name, shard) for name in names], largest)
                           for shard in range(self.spec.mesh.tp)]  # fmt: skip
            flat = self.parts[names[0]].new_empty(largest)
            self.transport.start_scatter(flat, updated, self.spec.shard_ranks, self.spec.shard_ranks[owner])()
            for name, local in zip(names, flat[: sum(sizes)].split(sizes), strict=True):
                self.parts[name].data.copy_(local.view(self.parts[name].shape))
        for full in self.full.values():
            full.grad = None

    def local_part(self, name: str, shard: int) -> torch.Tensor:
        """Part of a shard of a full weight, flat."""
        return local_part(
            self.full[name].detach(), self.spec.layout(name), self.sizes, axis_index(self.sizes, shard)
        ).reshape(-1)


def padded(pieces: Sequence[torch.Tensor], numel: int) -> torch.Tensor:
    """Flat pieces one after the other, with zeros at the end up to ``numel``."""
    flat = torch.cat([*pieces])
    return flat if len(flat) == numel else torch.cat([flat, flat.new_zeros(numel - len(flat))])

"""Outputs of a batch, joined from those of its microbatches as `autopar.sharding.batch_join` has proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.pytree import Spec, unflatten
from autopar.sharding.batch_join import Join


@dataclass(frozen=True)
class Outputs:
    """Recipe that joins the flattened outputs of microbatches to the model's output for the batch.

    Args:
        sizes: samples of each microbatch.
        leaves: for each output how it is joined, or its value if it is no tensor.
    """

    sizes: tuple[int, ...]
    leaves: tuple[Any, ...]
    spec: Spec

    def join(self, parts: Sequence[Sequence[Any]]) -> Any:
        """The model's output for the batch.

        Args:
            parts: flattened outputs of each microbatch.
        """
        columns = zip(self.leaves, zip(*parts, strict=True), strict=True)
        joined = [self.joined(leaf, column) if isinstance(leaf, Join) else leaf for leaf, column in columns]
        return unflatten(joined, self.spec)

    def joined(self, how: Join, column: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """One output, joined from those of the microbatches."""
        if how.kind == "concatenate":
            dim, outer = how.split.dim, how.split.outer
            if outer == 1:
                return torch.cat(column, dim)
            digits = [leaf.unflatten(dim, (outer, leaf.shape[dim] // outer)) for leaf in column]
            return torch.cat(digits, dim + 1).flatten(dim, dim + 1)
        if how.kind == "mean":
            batch = sum(self.sizes)
            column = tuple(leaf * (size / batch) for leaf, size in zip(column, self.sizes, strict=True))
        return column[0] if how.kind == "same" else torch.stack(column).sum(0, dtype=column[0].dtype)

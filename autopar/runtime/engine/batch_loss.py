"""One loss of a whole batch: of the outputs of all microbatches of all replicas.

The last stage keeps the outputs of its microbatches. Before its first backward the replicas all-gather outputs and
targets. Each computes the loss of the whole batch; its backwards start from the gradients of its microbatches' outputs.
Every forward comes before every backward, as in GPipe. Recomputing the forwards would take less memory and a third more
time (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.ir.pytree import flatten, unflatten
from autopar.runtime.comm.protocols import Transport
from autopar.runtime.engine.edges import gradient_edge
from autopar.runtime.engine.loss import LossFunction, check_loss
from autopar.sharding.outputs import Outputs


@dataclass(frozen=True)
class Replicas:
    """The ranks that run the last stage's shard for other samples.

    Args:
        ranks: by replica.
        index: index of this rank among them.
    """

    transport: Transport
    ranks: Sequence[int]
    index: int

    def all_gather(self, rows: list[list[Any]]) -> list[list[list[Any]]]:
        """The rows of every replica, in their order; this replica's are ``rows`` itself.

        Args:
            rows: tensors, of equal shapes and dtypes on all replicas, and other values, which are not gathered.
        """
        tensors = [leaf.detach() for row in rows for leaf in row if isinstance(leaf, torch.Tensor)]
        if len(self.ranks) == 1 or not tensors:
            return [rows for _ in self.ranks]
        raw = [t.contiguous().view(-1).view(torch.uint8) for t in tensors]  # Gloo moves no booleans
        own = torch.cat(raw)
        flat = own.repeat(len(self.ranks))
        self.transport.start_all_gather(flat, self.ranks)()
        gathered = []
        for index, segment in enumerate(flat.split(len(own))):
            # A tensor's bytes may not be aligned for its dtype; those of a copy are.
            parts = segment.split([len(part) for part in raw])
            theirs = iter([p.clone().view(t.dtype).view(t.shape) for p, t in zip(parts, tensors, strict=True)])
            copies = [[next(theirs) if isinstance(v, torch.Tensor) else v for v in row] for row in rows]
            gathered.append(rows if index == self.index else copies)
        return gathered


@dataclass
class BatchLoss:
    """The loss of a step's batch, and the gradients of the outputs of this replica's microbatches.

    Args:
        outputs: how the outputs of all microbatches of all replicas are joined.
    """

    loss_fn: LossFunction
    outputs: Outputs
    replicas: Replicas
    kept: list[list[Any]] = field(default_factory=list)  # leaves of each microbatch's output so far
    gradients: list[list[torch.Tensor | None]] = field(default_factory=list)  # of the leaves that require grad

    def clear(self) -> None:
        """Forget a step."""
        self.kept, self.gradients = [], []

    def keep(self, leaves: Sequence[Any]) -> list[Any]:
        """Keep the output of the next microbatch; returns the gradient edges of the leaves that require grad."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.kept.append(
            [v.detach().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v for v in leaves]
        )
        return [gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]

    def compute(self, target: Any, scale: float, to_device: Callable[[Any], Any]) -> torch.Tensor:
        """The loss of the whole batch, []; afterwards ``gradients`` has the gradients of ``scale`` times the loss.

        Args:
            target: this replica's part.

        Raises:
            UsageError: as `check_loss`.
        """
        leaves, spec = flatten(target)
        parts = len(self.kept) * len(self.replicas.ranks)
        assert parts == len(self.outputs.sizes), (
            f"{parts} outputs for a batch of {len(self.outputs.sizes)} microbatches"
        )
        own_target = [to_device(leaf) for leaf in leaves]
        replicas = self.replicas.all_gather([*self.kept, own_target])
        output = self.outputs.join([row for rows in replicas for row in rows[:-1]])
        targets = zip(own_target, zip(*(rows[-1] for rows in replicas), strict=True), strict=True)
        target = unflatten([torch.cat(parts) if is_batched(own) else own for own, parts in targets], spec)
        loss = self.loss_fn(output, target)
        check_loss(loss)
        tracked = [[v for v in row if isinstance(v, torch.Tensor) and v.requires_grad] for row in self.kept]
        flat = [leaf for row in tracked for leaf in row]
        gradients = iter(torch.autograd.grad(loss, flat, torch.full_like(loss, scale), allow_unused=True))
        self.gradients = [[next(gradients) for _ in row] for row in tracked]
        self.kept = []
        return loss.detach()


def is_batched(leaf: Any) -> bool:
    """Whether a leaf of a target has samples in its first dim."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0

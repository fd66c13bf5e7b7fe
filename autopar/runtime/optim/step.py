"""A rank's part of the optimizer step: gradients summed, their global norm, clipping, the update."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import nn

from autopar.ir.layout import REPLICATED, TP, Layout
from autopar.ir.pytree import leaves
from autopar.runtime.checkpoint.rank_state import options_by_name
from autopar.runtime.comm.replica_collectives import exchange_of
from autopar.runtime.comm.transport import Transport
from autopar.runtime.optim.build import rank_optimizer, use_fused_kernels
from autopar.runtime.optim.loss_scaler import LossScaler
from autopar.runtime.optim.lr_scheduler import scheduler_of, step_scheduler
from autopar.runtime.params.flat_buckets import flat_buckets
from autopar.runtime.params.grad_buffer import Gradients
from autopar.runtime.params.grad_reduce import ReplicaSum, sum_gradients
from autopar.runtime.params.zero1_gather import ReplicaWeights
from autopar.runtime.spec import RankSpec, UpdateResult


class Updater:
    """Owns the optimizer of one rank: of all its trainable parameters, or under ZeRO-1 of those its replica owns.

    Every rank of the mesh calls the same methods in the same order, and inside of `step` all go through the same
    phases: sums over replicas, over shards, over stages, over everybody. A rank waits only for ranks in the same or an
    earlier phase, so that there is no circle.
    """

    def __init__(self, spec: RankSpec, trainable: Mapping[str, nn.Parameter], transport: Transport) -> None:
        self.spec, self.trainable, self.transport = spec, trainable, transport
        replicated = spec.mesh.dp > 1 and bool(trainable)
        weights = [weight for weight in spec.weights if weight.name in trainable]
        # What autograd leaves may be a part of what another stage sent or is sent, in memory that is used again.
        moved = replicated or spec.mesh.pp > 1 or any(weight.master for weight in weights)
        buckets = flat_buckets(weights, spec.owners, spec.mesh.dp) if moved else ()
        self.gradients = Gradients(trainable, buckets)
        self.replica_sum: ReplicaSum | None = None
        self.replica_weights: ReplicaWeights | None = None
        if replicated:
            largest = max(bucket.longest * bucket.segments * bucket.dtype.itemsize for bucket in buckets)
            exchange = exchange_of(transport, spec.replicas, torch.device(spec.device), largest)
            self.replica_sum = ReplicaSum(self.gradients, spec.replicas, spec.place.replica, transport, exchange)
            if spec.owners:
                self.replica_weights = ReplicaWeights(trainable, buckets, spec.place.replica, exchange)
        own = {name: p for name, p in trainable.items() if self.updates(name)}
        made = rank_optimizer(spec, spec.optimizer, own, transport) if spec.optimizer else None
        # What the optimizer was made from: parts of tensor-parallel weights, or whole ones where it needs them.
        self.optimized = dict(made.parameters) if made else own
        self.optimizer, self.wholes = (made.optimizer, made.wholes) if made else (None, None)
        # Before a scheduler changes any: what checkpoints compare.
        self.made_options = options_by_name(self.optimizer, self.optimized) if self.optimizer is not None else {}
        if self.optimizer is not None:
            use_fused_kernels(self.optimizer)
        self.scheduler = scheduler_of(spec.lr_scheduler, self.optimizer) if made and spec.lr_scheduler else None
        self.scaler = LossScaler() if spec.autocast == "float16" else None

    def updates(self, name: str) -> bool:
        """Whether this rank's replica updates a parameter."""
        return self.spec.owners.get(name, self.spec.place.replica) == self.spec.place.replica

    def expect(self, names: Collection[str]) -> None:
        """The step that ends in an update reaches these weights alone."""
        if self.replica_sum is not None:
            self.replica_sum.expect(names)

    def arm(self, names: Collection[str]) -> None:
        """The next backward is the last one before `step` that reaches some weights."""
        if self.replica_sum is not None:
            self.replica_sum.arm(names)

    def start_rest(self) -> None:
        """The last backward before `step` is over."""
        if self.replica_sum is not None:
            self.replica_sum.start_rest()

    @property
    def loss_scale(self) -> float:
        """What all gradients are multiplied by until the next `step`."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def step(self) -> UpdateResult:
        """Sum, clip, update, clear gradients; their norm, and whether float16 overflowed and nothing was updated."""
        norm = self.gradients_norm()
        if self.scaler is not None and not self.scaler.update(norm.item()):
            self.zero_grad()
            return UpdateResult(inf, skipped=True)
        self.update(norm)
        return UpdateResult(norm.item())

    def gradients_norm(self) -> torch.Tensor:
        """Complete the gradients: summed over all ranks, free of the loss scale; their global norm."""
        if self.replica_sum is not None:
            self.replica_sum.finish()
        else:
            self.gradients.show()
        self.sum_over_shards()
        self.sum_over_stages()
        norm = self.global_norm()
        if self.scaler is not None:
            self.scaler.unscale([p.grad for p in self.trainable.values() if p.grad is not None])
            norm /= self.scaler.scale
        return norm

    def update(self, norm: torch.Tensor) -> None:
        """Update the weights by complete gradients of that norm, clipped, and clear them; the host waits for nothing
        that an optimizer does not wait for."""
        self.clip(norm)
        if self.wholes is not None:
            self.wholes.gather()
        if self.optimizer is not None:
            self.optimizer.step()
        if self.wholes is not None:
            self.wholes.scatter()
        self.zero_grad()  # all of them, also those that the optimizer was not made for

    def abandon(self) -> None:
        """Drop gradients, and what a step that was not ended has left."""
        if self.replica_sum is not None:
            self.replica_sum.reset()
        if self.replica_weights is not None:
            self.replica_weights.abandon()
        self.zero_grad()

    def sum_over_shards(self) -> None:
        """Complete the gradients of weights that the shards read together with what only one of them has.

        The shards run one program on one loss, so a gradient exists on all of them or on none.
        """
        present = {n: p for n, p in self.trainable.items() if p.grad is not None}
        partial = {n: p for n, p in present.items() if TP in self.spec.layout(n).partial_gradient}
        if partial:
            sum_gradients(partial, self.spec.shards, self.transport)

    def sum_over_stages(self) -> None:
        """Give every holder of a tied parameter the sum of all holders' gradients, or None where nobody has one."""
        for name, positions in sorted(self.spec.holders.items()):
            if len(positions) < 2 or name not in self.trainable or not self.updates(name):
                continue
            ranks = [self.spec.pipeline[position] for position in positions]
            parameter = self.trainable[name]
            if not any(self.transport.sum_flags([parameter.grad is not None], ranks)):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sum_gradients({name: parameter}, ranks, self.transport)

    def counts(self, name: str) -> bool:
        """Whether the global norm takes a parameter's gradient from this rank."""
        return self.spec.owners.get(name, 0) == self.spec.place.replica and self.spec.first_copy(name)

    def global_norm(self) -> torch.Tensor:
        """2-norm of all gradients of all ranks, each element of the model counted once."""
        own = [p.grad for name, p in self.trainable.items() if p.grad is not None and self.counts(name)]
        device = torch.device(self.spec.device)
        square = torch.zeros((), dtype=torch.float64, device=device)
        if own:
            square += nn.utils.get_total_norm(own).square()
        if self.spec.mesh.devices > 1:
            self.transport.start_sum(square, range(self.spec.mesh.devices))()
        return square.sqrt().float()

    def clip(self, norm: torch.Tensor) -> None:
        """Limit the gradients as asked for; ``norm`` is that of all of them together."""
        gradients = [p for p in self.trainable.values() if p.grad is not None]
        if self.spec.clip_grad_norm is not None and gradients:
            nn.utils.clip_grads_with_norm_(gradients, self.spec.clip_grad_norm, norm)
        if self.spec.clip_grad_value is not None and gradients:
            nn.utils.clip_grad_value_(gradients, self.spec.clip_grad_value)

    def layout(self, name: str) -> Layout:
        """How the optimizer's parameter, and with it its state, lies."""
        return REPLICATED if self.wholes is not None and name in self.wholes.parts else self.spec.layout(name)

    def zero_grad(self) -> None:
        self.gradients.clear()
        for parameter in self.trainable.values():
            parameter.grad = None

    def scheduler_step(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self.scheduler is not None:
            step_scheduler(self.scheduler, method, args, kwargs)

    def learning_rates(self) -> list[float]:
        """Learning rate of each parameter group of the whole model, the same on all ranks."""
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else []

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        states = leaves(self.optimizer.state_dict()["state"]) if self.optimizer else []
        return sum(t.nbytes for t in states if isinstance(t, torch.Tensor))

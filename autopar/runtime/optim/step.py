"""Optimizer step on one rank: sums of gradients, global norm, clipping, update."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from math import inf
from typing import Any

import torch
from torch import nn

from autopar.ir.layout import REPLICATED, Layout
from autopar.ir.pytree import leaves
from autopar.runtime.comm.protocols import FlagChannel, Transport
from autopar.runtime.comm.replica_collectives import ReduceBuffers, ReplicaCollectives, reduce_buffers
from autopar.runtime.optim.build import rank_optimizer, use_fused_kernels
from autopar.runtime.optim.loss_scaler import LossScaler
from autopar.runtime.optim.lr_scheduler import scheduler_of, step_scheduler
from autopar.runtime.optim.param_groups import options_by_name, options_of
from autopar.runtime.params.flat_buckets import block_buckets, flat_buckets
from autopar.runtime.params.grad_buffer import GradBuffer
from autopar.runtime.params.grad_reduce import GradReducer, sum_gradients
from autopar.runtime.params.sharded_grads import ShardedGrads
from autopar.runtime.params.sharded_params import ShardedParams
from autopar.runtime.spec import RankSpec, UpdateResult


class Updater:
    """Owns one rank's optimizer, over all trainable parameters or, under ZeRO, the replica's pieces of them.

    Every rank of the mesh calls the same methods in the same order. Within `step` all ranks go through the same phases:
    sums over replicas, over shards, over stages, over all ranks. A rank waits only for ranks in the same or an earlier
    phase, so that no deadlock is possible.
    """

    def __init__(
        self, spec: RankSpec, trainable: Mapping[str, nn.Parameter], transport: Transport, flags: FlagChannel
    ) -> None:
        self.spec, self.trainable, self.transport, self.flags = spec, trainable, transport, flags
        has_double = any(parameter.dtype == torch.float64 for parameter in trainable.values())
        self.norm_dtype = torch.float64 if has_double else torch.float32  # of the gradients' norm
        recipe = spec.recipe
        replicated = spec.mesh.dp > 1 and bool(trainable)
        weights = [weight for weight in spec.weights if weight.name in trainable]
        # Gradients from autograd may be views of buffers of a transfer between stages, whose memory is used again.
        moved = replicated or spec.mesh.pp > 1 or any(weight.master for weight in weights)
        if spec.zero == 3:
            buckets = block_buckets(weights, spec.blocks, spec.kept, spec.owners, len(spec.sharing_ranks))
        else:
            buckets = flat_buckets(weights, spec.owners, len(spec.sharing_ranks)) if moved else ()
        self.grad_reducer: GradReducer | ShardedGrads | None = None
        self.sharded: ShardedParams | None = None
        self.reduce_buffers: ReduceBuffers | None = None
        # What the optimizer updates, or gathers whole; gradients of an update are attached to it.
        self.updated: Mapping[str, nn.Parameter] = trainable
        if not replicated:
            self.grad_buffer: GradBuffer | ShardedGrads = GradBuffer(trainable, buckets)
        else:
            every, ranks, device = spec.replica_ranks, spec.sharing_ranks, torch.device(spec.device)
            replica = ranks.index(spec.rank)
            self.reduce_buffers = reduce_buffers(buckets, spec.reduce_dtype, device)
            # Masters are gathered in their own dtype, through the same symmetric memory.
            most = self.reduce_buffers.dtype.itemsize if self.reduce_buffers is not None and not spec.zero else inf
            largest = max(b.longest_segment * b.num_segments * min(b.dtype.itemsize, most) for b in buckets)
            collectives = ReplicaCollectives(
                transport, ranks, device, int(largest), self.reduce_buffers, spec.copy_ranks
            )
            grads = GradBuffer(trainable, buckets) if spec.zero < 2 else None  # while parameters have their strides
            if spec.zero:
                self.sharded = ShardedParams(trainable, buckets, replica, collectives, device)
                self.updated = self.sharded.pieces
            if grads is not None:
                self.grad_buffer = grads
                self.grad_reducer = GradReducer(grads, self.updated, every, replica, flags, collectives)
            else:
                assert self.sharded is not None
                self.grad_buffer = self.grad_reducer = ShardedGrads(self.sharded, every, flags)
        made = rank_optimizer(spec, recipe.optimizer, self.updated, transport) if recipe.optimizer else None
        # Parameters of the optimizer: parts of tensor-parallel weights, or whole copies if it needs them.
        self.optimized = dict(made.parameters if made else self.updated)
        self.optimizer, self.full_params = (made.optimizer, made.wholes) if made else (None, None)
        # Options before a scheduler changes any: a checkpoint compares them.
        self.made_options = options_by_name(self.optimizer, self.optimized) if self.optimizer is not None else {}
        if self.optimizer is not None:
            use_fused_kernels(self.optimizer)
        self.scheduler = scheduler_of(recipe.lr_scheduler, self.optimizer) if made and recipe.lr_scheduler else None
        self.scaler = LossScaler() if spec.autocast == "float16" else None
        self.clipped_norm: torch.Tensor | None = None  # of gradients that are summed and clipped already

    @property
    def reduces_each_call(self) -> bool:
        """Whether gradients are reduced after every backward, also if no update follows (ZeRO-2 and -3)."""
        return isinstance(self.grad_reducer, ShardedGrads)

    def attach_gradients(self) -> None:
        """After backwards that no update follows: make the main grads the parameters' gradients."""
        if isinstance(self.grad_reducer, ShardedGrads):
            self.grad_reducer.finish(update_follows=False)
        else:
            self.grad_buffer.attach_to_params()

    def set_used_params(self, names: Collection[str]) -> None:
        """Announce that the backwards before the next `step` reach these weights only."""
        if isinstance(self.grad_reducer, GradReducer):
            self.grad_reducer.set_used_params(names)

    def begin_backward(self, update_follows: bool, reached: Set[str], completed: Collection[str]) -> None:
        """Announce a backward.

        Args:
            update_follows: whether `step` follows the call that runs it.
            reached: weights that it reaches.
            completed: those of them that no later backward of the call reaches.
        """
        if isinstance(self.grad_reducer, ShardedGrads):
            self.grad_reducer.begin_backward(reached, frozenset(completed if update_follows else ()))
        elif self.grad_reducer is not None and completed:
            self.grad_reducer.enable_sync(completed)

    def flush_remaining(self) -> None:
        """Announce that the last backward before `step` has ended."""
        if isinstance(self.grad_reducer, GradReducer):
            self.grad_reducer.flush_remaining()

    @property
    def loss_scale(self) -> float:
        """Factor on all gradients until the next `step`."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def step(self) -> UpdateResult:
        """Sum, clip, update, clear gradients. Returns their norm, and whether a float16 overflow skipped the update."""
        norm = self.finish_gradients() if self.clipped_norm is None else self.clipped_norm
        if self.scaler is not None and not self.scaler.update(norm.item()):
            self.zero_grad()
            return UpdateResult(inf, skipped=True)
        self.update(norm)
        return UpdateResult(norm.item())

    def finish_gradients(self) -> torch.Tensor:
        """Sum the gradients over all ranks, divide them by the loss scale. Returns their global norm, a scalar."""
        if self.grad_reducer is not None:
            self.grad_reducer.finish()
        else:
            self.grad_buffer.attach_to_params()
        self.sum_over_shards()
        self.sum_over_stages()
        norm = self.global_norm()
        if self.scaler is not None:
            self.scaler.unscale([p.grad for p in self.updated.values() if p.grad is not None])
            norm /= self.scaler.scale
        return norm

    def clip_gradients(self, max_norm: float | None, max_value: float | None) -> float:
        """Sum the gradients over all ranks and clip them before `step`. Returns their global norm before clipping."""
        norm = self.finish_gradients() if self.clipped_norm is None else self.clipped_norm
        self.clip(norm, max_norm, max_value)
        self.clipped_norm = self.global_norm()
        return norm.item()

    def set_options(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Change options of the optimizer's parameter groups, in their order."""
        assert self.optimizer is not None
        for group, own in zip(self.optimizer.param_groups, changes, strict=True):
            group.update(own)

    def update(self, norm: torch.Tensor) -> None:
        """Clip complete gradients of global norm ``norm`` [], update the weights, clear the gradients.

        The host waits for the GPU only if the optimizer does.
        """
        self.clip(norm, self.spec.recipe.clip_grad_norm, self.spec.recipe.clip_grad_value)
        if self.full_params is not None:
            self.full_params.gather()
        if self.optimizer is not None:
            self.optimizer.step()
        if self.full_params is not None:
            self.full_params.scatter()
        self.zero_grad()  # all gradients, also of parameters that the optimizer does not have

    def abandon(self) -> None:
        """Drop gradients and the remains of a step that has not ended."""
        if self.grad_reducer is not None:
            self.grad_reducer.reset()
        if self.sharded is not None:
            self.sharded.abandon()
        self.zero_grad()

    def sum_over_shards(self) -> None:
        """Sum the gradients of weights whose gradient is partial, over each tensor axis on which it is.

        All shards run one program on one loss, so a gradient exists on all shards or on none.
        """
        present = [w for w in self.spec.weights if w.name in self.updated and self.updated[w.name].grad is not None]
        for axis in self.spec.mesh.axis_sizes:
            partial = [w for w in present if axis in self.spec.layout(w.name).partial_gradient]
            sum_gradients(partial, self.updated, self.spec.mesh.group(self.spec.rank, axis), self.transport)

    def sum_over_stages(self) -> None:
        """Set a tied parameter's gradient on all its stages to the sum of theirs, or to None if no stage has one."""
        weights = {weight.name: weight for weight in self.spec.weights}
        for name, positions in sorted(self.spec.holders.items()):
            if len(positions) < 2 or name not in self.updated:
                continue
            ranks = [self.spec.pipeline_ranks[position] for position in positions]
            parameter = self.updated[name]
            if not any(self.flags.sum_flags([parameter.grad is not None], ranks)):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sum_gradients([weights[name]], self.updated, ranks, self.transport)

    def owns_for_norm(self, name: str) -> bool:
        """Whether this rank's gradient of a parameter counts in the global norm."""
        is_first = self.spec.rank == self.spec.copy_ranks[0] if self.spec.zero else self.spec.place.replica == 0
        return is_first and self.spec.has_first_copy(name)

    def global_norm(self) -> torch.Tensor:
        """2-norm of the gradients of all ranks, each element of the model counted once; a 0-dim tensor."""
        own = [p.grad for name, p in self.updated.items() if p.grad is not None and self.owns_for_norm(name)]
        device = torch.device(self.spec.device)
        square = torch.zeros((), dtype=torch.float64, device=device)
        if own:
            square += nn.utils.get_total_norm(own).square()
        if self.spec.mesh.devices > 1:
            self.transport.start_sum(square, range(self.spec.mesh.devices))()
        return square.sqrt().to(self.norm_dtype)

    def clip(self, norm: torch.Tensor, max_norm: float | None, max_value: float | None) -> None:
        """Clip the gradients of global norm ``norm`` [] by norm, by value, or not (None)."""
        gradients = [p for p in self.updated.values() if p.grad is not None]
        if max_norm is not None and gradients:
            nn.utils.clip_grads_with_norm_(gradients, max_norm, norm)
        if max_value is not None and gradients:
            nn.utils.clip_grad_value_(gradients, max_value)

    def layout(self, name: str) -> Layout:
        """Layout of the optimizer's parameter and of its state."""
        return REPLICATED if self.full_params is not None and name in self.full_params.parts else self.spec.layout(name)

    def zero_grad(self) -> None:
        self.clipped_norm = None
        self.grad_buffer.clear()
        for parameter in (*self.trainable.values(), *self.updated.values()):
            parameter.grad = None

    def scheduler_step(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self.scheduler is not None:
            step_scheduler(self.scheduler, method, args, kwargs)

    def learning_rates(self) -> list[float]:
        """Learning rate of each parameter group of the whole model, the same on all ranks."""
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else []

    def group_options(self) -> list[dict[str, Any] | None]:
        """Options of each parameter group; None where this rank has none of the group's parameters."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [options_of(group) if group["params"] else None for group in groups]

    def standing_bytes(self) -> int:
        """Bytes of optimizer state and gradients that are allocated between steps."""
        held = self.reduce_buffers.num_bytes if self.reduce_buffers is not None else 0
        return self.state_bytes() + self.grad_buffer.num_bytes + held

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        states = leaves(self.optimizer.state_dict()["state"]) if self.optimizer else []
        return sum(t.nbytes for t in states if isinstance(t, torch.Tensor))

"""One rank of a mesh: its weights, programs, steps, optimizer and state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.errors import CheckpointError
from autopar.ir.checkpoint_header import Header
from autopar.ir.graph import Mode
from autopar.ir.program import Program
from autopar.ir.pytree import leaves
from autopar.ops.collectives import on
from autopar.runtime.checkpoint.rank_state import OptionChange
from autopar.runtime.comm.protocols import Transport
from autopar.runtime.comm.symmetric_p2p import reserved_bytes
from autopar.runtime.engine.batch_loss import BatchLoss, Replicas
from autopar.runtime.engine.cuda_graph import CudaGraphCache
from autopar.runtime.engine.deferred_wgrads import DeferredWgrads
from autopar.runtime.engine.executor import BackwardNotice, BoundStep
from autopar.runtime.engine.loss import LossFunction, in_autocast, moved_to, naming_devices, naming_updates
from autopar.runtime.engine.metrics import StepLimit, StepMarks, step_numbers
from autopar.runtime.engine.recorded_flags import FlagRecorder
from autopar.runtime.engine.records import ChunkModule, StepTensors
from autopar.runtime.engine.staging import Staging
from autopar.runtime.engine.timer import Stopwatch
from autopar.runtime.host_copies import gradient_copies, weight_copies
from autopar.runtime.memory.cuda_allocator import let_segments_grow
from autopar.runtime.memory.peaks import TensorPeak, peak_resident_bytes, resident_bytes
from autopar.runtime.optim.ema import Average
from autopar.runtime.optim.param_groups import NamedState
from autopar.runtime.optim.step import Updater
from autopar.runtime.params.compute_copies import ComputeParams
from autopar.runtime.spec import DeviceStepResult, RankSpec, RankStats, RankStepResult, StepRequest, UpdateResult
from autopar.schedule.generate import generate
from autopar.sharding.buffer_sizes import program_exchange_bytes, symmetric_buffer_bytes
from autopar.sharding.lookup import key_of
from autopar.sharding.table import UPDATING
from autopar.sharding.tensors import with_strides

NO_AXES: Mapping[str, str] = MappingProxyType({})


class BoundStepKey(NamedTuple):
    """Fields of a `StepRequest` that select its bound schedule."""

    schedule: str
    programs: tuple[int, ...]
    training: bool
    shape_signature: tuple[int, ...]
    graph: int | None


class Rank:
    """Holds one rank's part of the model and runs its part of every step."""

    def __init__(
        self,
        spec: RankSpec,
        tensors: Mapping[str, torch.Tensor],
        transport: Transport,
        axes: Mapping[str, str] = NO_AXES,
        timeout_seconds: float = inf,
    ) -> None:
        """Take ownership of ``tensors``, this rank's parts of its weights by name.

        Args:
            axes: key in `autopar.ops.collectives` of each mesh axis's communicator.
            timeout_seconds: longest wait for a step on the GPU, but see `StepLimit`.
        """
        if torch.device(spec.device).type == "cuda":
            let_segments_grow()
        self.spec, self.axes = spec, axes
        self.transport, self.flag_recorder = transport, FlagRecorder(transport)
        self.place, self.mesh = spec.place, spec.mesh
        self.device = torch.device(spec.device)
        # Not the default stream, on which a CUDA graph cannot be captured.
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.weights: dict[str, torch.Tensor] = {}
        for weight in spec.weights:
            tensor = tensors[weight.name].detach()
            if not (spec.zero == 3 and weight.requires_grad):  # otherwise the device gets this replica's piece only
                tensor = tensor.to(self.device)
            assert tuple(tensor.shape) == weight.shape, f"{weight.name}: {list(tensor.shape)} for {list(weight.shape)}"
            tensor = with_strides(tensor, weight.value.stride)
            is_parameter = weight.kind == "parameter"
            self.weights[weight.name] = nn.Parameter(tensor, weight.requires_grad) if is_parameter else tensor
        self.trainable = {w.name: self.parameter(w.name) for w in spec.weights if w.requires_grad}
        self.updater = Updater(spec, self.trainable, transport, self.flag_recorder)
        self.sharded = self.updater.sharded
        # What this rank stores of each weight: under ZeRO a piece of each trainable one, or nothing.
        self.stored = dict(self.weights)
        if self.sharded is not None:
            self.stored = {n: t for n, t in self.stored.items() if n not in self.trainable} | self.sharded.pieces
        ema = spec.recipe.ema
        self.ema = Average(ema, self.stored, {w.name: w for w in spec.weights}) if ema else None
        self.saved_weights: dict[str, torch.Tensor] | None = None  # weights, while averages are in their place
        self.compute_params = ComputeParams(self.weights, self.updater.grad_buffer.watch, self.sharded)
        self.loss_fn: LossFunction = spec.recipe.loss_fn
        if self.is_last_stage:
            self.loss_fn = moved_to(self.loss_fn, self.device)
        self.chunks: dict[int, tuple[ChunkModule, ...]] = {}
        self.updated_buffers: set[str] = set()  # weights that training programs update in place
        self.running_statistics: set[str] = set()  # those of norms, which no backward of a training program reads
        self.bound_steps: dict[BoundStepKey, BoundStep] = {}
        self.current_step: BoundStep | None = None
        self.open_graphs: dict[int, BoundStep] = {}  # steps whose forwards wait for their backwards, by number
        self.limit = StepLimit(timeout_seconds)
        self.stopwatch, self.staging = Stopwatch(self.device), Staging(self.device)
        self.graphs = CudaGraphCache(self) if self.stream is not None and spec.cuda_graph else None
        # Whether a call has left gradients for the next update, on this rank or another one.
        self.has_pending_grads = False
        self.buffers_diverged = False  # whether training has changed buffers, differently on each replica
        self.data_bytes = 0
        # Memory of libraries is not the model's: torch.optim alone imports over 100 MB.
        self.base_bytes = resident_bytes() - self.weight_bytes()

    def parameter(self, name: str) -> nn.Parameter:
        parameter = self.weights[name]
        assert isinstance(parameter, nn.Parameter)
        return parameter

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes losses."""
        return self.place.stage == self.spec.placement.last_position

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context of every command: on a GPU the rank's stream, ordered after and before the caller's stream."""
        if self.stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outside.wait_stream(self.stream)

    def is_busy(self) -> bool:
        """Whether the rank's stream has unfinished work."""
        return self.stream is not None and not self.stream.query()

    # -- programs ----------------------------------------------------------------------------------------------

    def add_programs(self, key: int, programs: Sequence[Program], constants: Mapping[str, torch.Tensor]) -> None:
        """Build the module of each chunk's program; steps refer to them by ``key``.

        Allocates the symmetric memory of their collectives, for which the hosts of an axis meet. So the ranks of an
        axis add equal programs in the same order.

        Args:
            constants: tensors that the programs read, by name.
        """
        for axis, name in self.axes.items():
            communicator = on(name)
            ops = [op for program in programs for op in program.ops]
            buffer_bytes = [num for op in ops for num in symmetric_buffer_bytes(op, axis, communicator.ranks)]
            buffer_bytes += [num for program in programs for num in program_exchange_bytes(program, axis)]
            if buffer_bytes:
                communicator.reserve(max(buffer_bytes))
        tensors = self.weights | {name: tensor.to(self.device) for name, tensor in constants.items()}
        copies, main_grad_of = self.compute_params, self.updater.grad_buffer.main_grad_of

        def chunk(program: Program) -> ChunkModule:
            weights = {**tensors, **copies.copies_for(program)}
            module = self.spec.build(program, weights, self.device, self.axes, copies.wait_for, main_grad_of)
            wgrads = None
            if program.deferred:
                sink = self.updater.grad_buffer
                wgrads = DeferredWgrads(program.deferred, weights, sink, self.device)
            return ChunkModule(program, module, wgrads)

        self.chunks[key] = tuple(map(chunk, programs))
        if self.sharded is not None and self.sharded.allocate_slots() and self.graphs is not None:
            self.graphs.forget()  # they read weights where these were
        training = [program for program in programs if program.mode == "train"]
        self.updated_buffers |= self.weights.keys() & {name for p in training for op in p.ops for name in op.mutates}
        self.running_statistics |= {
            name for p in training for op in p.ops if key_of(op.target) in UPDATING for name in op.mutates
        }

    def forget_programs(self, shape_signature: tuple[int, ...], keys: Sequence[int]) -> None:
        """Drop what steps of one batch shape need: bound schedules, CUDA graphs, and programs by key.

        Binding and capture are collective. So all ranks drop the same shapes, though perhaps other programs.
        """
        for key in keys:
            del self.chunks[key]
        self.bound_steps = {k: step for k, step in self.bound_steps.items() if k.shape_signature != shape_signature}
        if self.graphs is not None:
            self.graphs.forget_shape(shape_signature)

    def bound_step(self, request: StepRequest) -> BoundStep:
        """Bound schedule of a step; bound at its first use."""
        # Ranks bind together, so the signature is that of all ranks: a rank without a new program may have a peer with
        # one.
        key = BoundStepKey(request.schedule, request.programs, request.training, request.shape_signature, request.graph)
        if key not in self.bound_steps:
            placement, count = self.spec.placement, len(request.programs)
            schedule = generate(request.schedule, placement, count, self.spec.order)
            has_loss = self.is_last_stage and request.training and request.graph is None
            loss_fn = self.step_loss() if has_loss else None
            batch_loss = None
            if loss_fn is not None and request.joined is not None:
                replicas = Replicas(self.transport, self.spec.replica_ranks, self.place.replica)
                loss_fn, batch_loss = None, BatchLoss(loss_fn, request.joined, replicas)
            chunks = [self.chunks[k] for k in request.programs]
            step = self.bound_steps[key] = BoundStep(
                schedule, placement, self.place.stage, self.spec.pipeline_ranks, chunks, self.transport,
                self.flag_recorder, self.device, loss_fn, request.training, batch_loss, request.graph is not None,
            )  # fmt: skip
            step.after_backward = self.updater.grad_buffer.flush
            if self.sharded is not None and self.sharded.slots and request.training:
                step.saving = self.sharded.saving
        return self.bound_steps[key]

    def step_loss(self) -> LossFunction:
        """Loss function of a training step, in the plan's precision."""
        loss_fn = naming_updates(naming_devices(self.loss_fn, self.device))
        dtype = self.spec.autocast
        return loss_fn if dtype is None else in_autocast(loss_fn, self.device, getattr(torch, dtype))

    # -- steps -------------------------------------------------------------------------------------------------

    def forward(self, request: StepRequest) -> list[list[Any]]:
        """Flattened outputs per microbatch; empty lists except where they are kept."""
        self.broadcast_buffers(request.mode)
        if not request.programs:  # fewer samples than replicas
            return []
        with self.staging.staged(request.data) as data:
            return self.execute(replace(request, data=data), update_follows=False).outputs

    def forward_graph(self, request: StepRequest) -> list[list[Any]]:
        """As `forward`, but keeps what `backward` of ``request.graph`` needs."""
        assert request.graph is not None
        self.broadcast_buffers(request.mode)
        self.current_step = step = self.bound_step(request)
        self.compute_params.refresh(step.bucket_reads)
        with self.staging.staged(request.data) as data:
            outputs = step.run_forwards(data, request.keep_outputs).outputs
        self.compute_params.wait()
        if self.sharded is not None:
            step.bucket_reads = tuple(self.sharded.reads)
        self.open_graphs[request.graph] = step
        return outputs

    def backward(self, graph: int, output_gradients: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """Accumulate gradients from those of the outputs of `forward_graph`.

        Args:
            output_gradients: of each output of each microbatch, on the last stage; empty on others.
        """
        self.has_pending_grads = True
        self.current_step = step = self.open_graphs.pop(graph)
        step.loss_scale = self.updater.loss_scale
        self.compute_params.refresh(step.backward_reads)
        with self.accumulating(step, update_follows=False) as announce:
            step.run_backwards(output_gradients, announce)
            self.compute_params.wait()
        if self.sharded is not None:
            step.backward_reads = tuple(self.sharded.reads)

    def drop_graphs(self, graphs: Sequence[int]) -> None:
        """Free what forwards have kept for backwards that will not come."""
        for graph in graphs:
            if (step := self.open_graphs.pop(graph, None)) is not None:
                step.drop_saved()

    @property
    def marks(self) -> StepMarks:
        """Marks of the last step's actions."""
        return self.current_step.marks if self.current_step is not None else ()

    def forward_backward(self, request: StepRequest) -> RankStepResult:
        """Accumulate gradients."""
        self.has_pending_grads = True
        start = self.stopwatch.mark()
        self.broadcast_buffers(request.mode)
        with self.staging.staged(request.data) as data:
            step = self.execute(replace(request, data=data), update_follows=False)
        losses = self.sum_losses(step, len(request.programs))
        return RankStepResult(step_numbers(losses, None, start, self.stopwatch, self.marks, self.limit), step.outputs)

    def train_step(self, request: StepRequest) -> RankStepResult:
        """Gradients and an update, which includes gradients that earlier calls accumulated."""
        start = self.stopwatch.mark()
        self.broadcast_buffers(request.mode)
        with self.staging.staged(request.data) as data:
            computed, update = self.compute_and_update(replace(request, data=data))
        numbers = step_numbers(computed.losses, update, start, self.stopwatch, self.marks, self.limit)
        return RankStepResult(numbers, computed.outputs)

    def compute_and_update(self, request: StepRequest) -> tuple[DeviceStepResult, UpdateResult | torch.Tensor]:
        """Run a training step and its update; returns the update's result where the host knows it, else the norm."""
        if self.updater.scaler is not None:
            step = self.execute(request, update_follows=True)
            losses = self.sum_losses(step, len(request.programs))
            result = self.optimizer_step(request.num_updates)
            return DeviceStepResult(losses, losses.new_tensor(result.grad_norm), step.outputs, updated=True), result
        computed = self.graphs.run(request) if self.graphs is not None else self.compute(request)
        if not computed.updated:
            self.updater.update(computed.norm)
        self.after_update(request.num_updates)
        return computed, computed.norm

    def compute(self, request: StepRequest) -> DeviceStepResult:
        """A training step up to the update; the host does not wait for the device."""
        step = self.execute(request, update_follows=True)
        return DeviceStepResult(
            self.sum_losses(step, len(request.programs)), self.updater.finish_gradients(), step.outputs
        )

    def sum_losses(self, step: StepTensors, count: int) -> torch.Tensor:
        """Losses of all microbatches of all replicas, [dp * count], on every rank; ``count`` per replica."""
        replica = self.place.replica
        losses = torch.zeros(self.mesh.dp * count, dtype=torch.float64, device=self.device)
        if self.is_last_stage and self.place.shard == 0:
            local = torch.stack([loss for loss in step.losses if loss is not None]).flatten()
            losses[replica * count : (replica + 1) * count] += local
        if self.mesh.devices > 1:
            self.transport.start_sum(losses, range(self.mesh.devices))()
        return losses

    def abandon_step(self) -> None:
        """Drop everything of a step that raised."""
        self.bound_steps.clear()
        self.open_graphs.clear()
        self.compute_params.invalidate()
        self.updater.abandon()

    def execute(self, request: StepRequest, update_follows: bool) -> StepTensors:
        self.current_step = step = self.bound_step(request)
        step.loss_scale = self.updater.loss_scale
        self.compute_params.refresh(step.bucket_reads, always=update_follows)
        batch = leaves((request.data.inputs, request.data.targets))
        self.data_bytes = sum(t.nbytes for t in batch if isinstance(t, torch.Tensor))
        with self.accumulating(step, update_follows) if request.training else nullcontext() as announce:
            results = step.run(request.data, request.keep_outputs, announce)
            self.compute_params.wait()
        if self.sharded is not None:
            step.bucket_reads = tuple(self.sharded.reads)
        return results

    @contextmanager
    def accumulating(self, step: BoundStep, update_follows: bool) -> Iterator[BackwardNotice | None]:
        """Context in which backwards of a step add to the main grads; they call what it yields, if anything."""
        self.updater.grad_buffer.detach_from_params()
        reduces = update_follows or self.updater.reduces_each_call
        if reduces:
            self.updater.set_used_params(step.trained_weights)
        yield partial(self.updater.begin_backward, update_follows) if reduces else None
        if reduces:
            self.updater.flush_remaining()
        if not update_follows:
            self.updater.attach_gradients()

    def broadcast_buffers(self, mode: Mode) -> None:
        """Before an evaluation, broadcast the first replica's buffers if training has changed any.

        In training, each replica's buffers follow its own samples. An evaluation runs the model that `state` returns.
        """
        if mode == "eval" and self.buffers_diverged and self.mesh.dp > 1:
            for name in sorted(self.updated_buffers):
                # Autograd keeps statistics with each forward that waits for its backward: .data has another version.
                tensor = self.weights[name].data if name in self.running_statistics else self.weights[name].detach()
                raw = tensor.reshape(-1).view(torch.uint8)  # Gloo moves no booleans
                self.transport.start_broadcast(raw, self.spec.replica_ranks, self.spec.replica_ranks[0])()
                tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))
        self.buffers_diverged = mode == "train"

    def optimizer_step(self, num_updates: int) -> UpdateResult:
        """As `Updater.step`, and update averages; ``num_updates`` is the number of updates before this one."""
        self.has_pending_grads = False
        result = self.updater.step()
        if not result.skipped:
            self.after_update(num_updates)
        return result

    def after_update(self, num_updates: int) -> None:
        """After weights have changed, each on the replica that updates it: invalidate copies, update averages."""
        self.has_pending_grads = False
        self.compute_params.invalidate()
        if self.ema is not None:
            self.ema.update(num_updates + 1)

    def zero_grad(self) -> None:
        self.has_pending_grads = False
        self.updater.zero_grad()

    def clip_gradients(self, max_norm: float | None, max_value: float | None) -> float:
        return self.updater.clip_gradients(max_norm, max_value)

    def set_options(self, changes: Sequence[Mapping[str, Any]]) -> None:
        self.updater.set_options(changes)

    def scheduler_step(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.updater.scheduler_step(method, args, kwargs)

    def loss_scale(self) -> float:
        return self.updater.loss_scale

    def learning_rates(self) -> list[float]:
        """Learning rate of each parameter group."""
        return self.updater.learning_rates()

    def group_options(self) -> list[dict[str, Any] | None]:
        """As `Updater.group_options`."""
        return self.updater.group_options()

    # -- state -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """CPU copies of this rank's parts of the weights; each part comes from one rank of the mesh."""
        return weight_copies(self.spec, self.stored, self.sharded)

    def ema_state(self) -> dict[str, torch.Tensor]:
        """CPU copies of the averages of the weights that `state` returns."""
        assert self.ema is not None
        return weight_copies(self.spec, self.ema.tensors(), self.sharded)

    def swap_ema(self, averages: bool) -> None:
        """Put the averages in the place of the weights, or restore the weights."""
        assert self.ema is not None and averages == (self.saved_weights is None)
        if self.saved_weights is None:
            tensors = self.ema.tensors()
            self.saved_weights = {name: self.stored[name].detach().clone() for name in tensors}
            self.overwrite(tensors)
        else:
            self.overwrite(self.saved_weights)
            self.saved_weights = None
        self.buffers_diverged = True  # each replica has its own buffers and averages of them

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the named weights with this rank's parts of them; all replicas load equal parts."""
        sharded = self.sharded
        if sharded is not None:
            tensors = {
                n: sharded.piece_of(n, t) if n in sharded.pieces else t for n, t in tensors.items() if n in self.stored
            }
        self.overwrite(tensors)

    def overwrite(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite what this rank stores of the named weights."""
        self.wait_for_readers()
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.stored[name].copy_(tensor)
        self.compute_params.invalidate()

    def wait_for_readers(self) -> None:
        """Before weights are overwritten outside of a step: other replicas may still read this one's."""
        if self.sharded is not None:
            self.sharded.synchronize()

    # A worker's start does not import torch.distributed.checkpoint: it takes 0.7 of the 2.8 s of a start's imports.

    @property
    def checkpoint_group(self) -> Any:
        """Process group of all ranks for saves and loads; None for a single rank."""
        return self.transport.checkpoint_group

    def save_checkpoint(self, folder: str, header: Header, keep: int) -> CheckpointError | None:
        """Write this rank's share of a checkpoint; returns the error if it failed on any rank."""
        from autopar.runtime.checkpoint import save_load

        return save_load.save(self, folder, header, keep)

    def inspect_checkpoint(self, folder: str) -> Header | CheckpointError:
        """Header of a checkpoint that this rank can read, or the error. Each file is checked by one of the ranks."""
        from autopar.runtime.checkpoint import save_load

        return save_load.inspect(folder, self.spec.rank, self.mesh.devices)

    def load_checkpoint(self, folder: str, header: Header) -> CheckpointError | list[OptionChange]:
        """Load a checkpoint; returns the changed optimizer options, or the error if it failed on any rank."""
        from autopar.runtime.checkpoint import save_load

        if self.graphs is not None:
            self.graphs.forget()  # the optimizer's tensors are replaced
        self.has_pending_grads = False
        self.wait_for_readers()
        result = save_load.load(self, folder, header)
        self.compute_params.invalidate()
        if not isinstance(result, CheckpointError):
            self.buffers_diverged = False  # all replicas have the first one's buffers now
        return result

    def optimizer_state(self) -> Any:
        """As `optimizer_part`."""
        from autopar.runtime.checkpoint import optimizer_state

        return optimizer_state.optimizer_part(self)

    def load_optimizer(self, state: NamedState, options: Sequence[Mapping[str, Any]]) -> None:
        from autopar.runtime.checkpoint import optimizer_state

        if self.graphs is not None:
            self.graphs.forget()  # the optimizer's tensors are replaced
        optimizer_state.load_optimizer(self, state, options)

    def gradients(self) -> dict[str, torch.Tensor]:
        """CPU copies of this rank's local gradients; see `gradient_copies`."""
        return gradient_copies(self.spec, self.updater)

    def close(self) -> None:
        """Release CUDA graphs. NCCL communicators cannot be destroyed while a graph references them."""
        self.bound_steps.clear()
        self.open_graphs.clear()
        self.current_step = None
        self.updater.grad_buffer.close()
        if self.graphs is not None:
            self.graphs.forget()

    # -- measurements ------------------------------------------------------------------------------------------

    def tensor_peak(self, request: StepRequest) -> int:
        """Peak bytes of tensors during a training step; on CPU without the batch, on a GPU with symmetric memory."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.train_step(request)
            return self.peak_bytes()
        standing = self.standing_bytes()
        with TensorPeak() as peak:
            self.train_step(request)
        return standing + peak.bytes

    def standing_bytes(self) -> int:
        """Bytes of tensors that are allocated between steps."""
        averages = self.ema.num_bytes if self.ema is not None else 0
        return self.weight_bytes() + self.updater.standing_bytes() + averages

    def weight_bytes(self) -> int:
        """Bytes of weights and of their copies."""
        whole = self.weights.keys() - (self.trainable.keys() if self.sharded is not None else ())
        return sum(self.weights[name].nbytes for name in whole) + self.compute_params.num_bytes

    def stats(self) -> RankStats:
        """Measurements of the last step."""
        return RankStats(
            self.current_step.timings() if self.current_step else (),
            self.peak_bytes(),
            self.updater.state_bytes(),
            self.current_step.started_ns() if self.current_step else 0,
        )

    def peak_bytes(self) -> int:
        """Peak bytes so far. On CPU: resident memory less the base and the batch, which a small model may not exceed: 0
        then. On a GPU: of torch's allocator, plus the symmetric memory that is allocated now."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) + reserved_bytes(self.device)
        return max(0, peak_resident_bytes() - self.base_bytes - self.data_bytes)

"""Dispatch of a call to the ranks: each receives its part of the batch, and programs that are new to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch

from autopar.api.batch import (
    check_detached,
    check_divisible,
    check_lists,
    check_real,
    check_targets,
    replica_sizes,
    split_targets,
)
from autopar.api.batch_agreement import BatchAgreement, check_one_kind, checksum
from autopar.api.kept_graphs import KeptGraph, KeptGraphs
from autopar.api.outputs import join_outputs, single_output
from autopar.api.program_cache import ProgramCache, Specialization, input_signature
from autopar.errors import UsageError
from autopar.ir.graph import Graph, Mode, Ref
from autopar.ir.mesh import Place
from autopar.ir.microbatches import microbatch_sizes
from autopar.ir.program import input_names
from autopar.ir.pytree import leaves as pytree_leaves
from autopar.ops.counter_rng import counter_rows
from autopar.runtime.commands import command_named
from autopar.runtime.engine.records import StepData
from autopar.runtime.launch.interrupt import interrupt_at_end
from autopar.runtime.launch.pool import WorkerPool
from autopar.runtime.launch.recipe_text import call_text
from autopar.runtime.launch.spmd import InProcessBackend, SpmdBackend
from autopar.runtime.spec import StepRequest, TrainingRecipe
from autopar.schedule.check import check
from autopar.schedule.generate import generate, max_in_flight
from autopar.schedule.order import chain_edges
from autopar.sharding.outputs import Outputs
from autopar.trace.call import Call, split_leaves
from autopar.trace.passes.random_ops import RNG_COUNTERS

# Batch shapes whose programs are kept, so that a run with images of 100 sizes traces each of them once. The programs of
# one shape and mode take 4 MiB of host memory for a ViT-B (torch 2.15, not compiled).
MAX_BATCH_SHAPES = 128
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class BatchRequest:
    """A batch and the command that all ranks run on it.

    Args:
        command: name of a method of `Rank`.
        target: target of the loss, as the only item; None where ranks compute no loss.
        share: factor of the gradients.
        keeps_graph: whether a forward keeps its graph for a later backward, as `Dispatcher.newest_graph`.
    """

    command: str
    mode: Mode
    schedule: str
    call: Call
    target: tuple[Any] | None = None
    keep_outputs: bool = False
    share: float = 1.0
    keeps_graph: bool = False

    @property
    def trains(self) -> bool:
        """Whether gradients of the batch are computed, by this command or a later one."""
        return self.target is not None or self.keeps_graph

    @property
    def text(self) -> str:
        """The call without its batch, in which all ranks must agree."""
        outputs = " with outputs" if self.keep_outputs and self.target is not None else ""
        share = f", share={self.share}" if self.share != 1.0 else ""
        return f"{self.command} in {self.mode} mode{outputs}{share}"


@dataclass(frozen=True)
class BatchPartition:
    """Division of batches of one signature into microbatches.

    Args:
        sizes: samples of each microbatch, by replica that shares the caller's batch.
        specializations: programs of each microbatch, by replica.
        outputs: how the outputs are joined; None where they are not kept.
        joined: how the outputs of the global batch are joined for its loss; None where each microbatch has a loss.
    """

    sizes: tuple[tuple[int, ...], ...]
    specializations: tuple[tuple[Specialization, ...], ...]
    outputs: Outputs | None
    joined: Outputs | None = None

    @property
    def all_sizes(self) -> list[int]:
        return [size for replica in self.sizes for size in replica]

    @property
    def all_specializations(self) -> list[Specialization]:
        return [s for replica in self.specializations for s in replica]

    @cached_property
    def has_random_ops(self) -> bool:
        """Whether any microbatch has counter-based random operations."""
        return any(value.name == RNG_COUNTERS for own in self.all_specializations for value in own.graph.inputs)


@dataclass(frozen=True)
class Microbatch:
    """A part of a batch.

    Args:
        specialization: its programs.
        leaves: leaves of its call.
        target: its target; None outside of training. Where the batch has one loss, a replica's first microbatch has the
            replica's whole target.
        share: factor of its mean loss, or of the batch's loss.
        rng_counters: RNG counters of its samples, int64 [samples, counters]; None without random operations.
    """

    specialization: Specialization
    leaves: list[Any]
    target: Any
    share: float
    rng_counters: torch.Tensor | None

    def inputs(self, stages: Sequence[int]) -> list[Any]:
        """Inputs that the programs of a rank's stages read, in their order."""
        by_name: dict[str, Any] = {
            leaf.name: tensor
            for leaf, tensor in zip(self.specialization.graph.leaves, self.leaves)
            if isinstance(leaf, Ref)
        }
        by_name[RNG_COUNTERS] = self.rng_counters
        return [by_name[name] for name in input_names(self.specialization.programs[stage] for stage in stages)]


class Dispatcher:
    """Sends commands to the ranks and owns the RNG counters.

    ``num_updates`` counts calls of optimizer_step and train_step, ``num_drawn`` samples since the last of them.
    ``has_gradients`` says whether samples since then left gradients. ``averaged`` is true while averages stand in for
    the weights, ``clipped`` while gradients are clipped that no update has used.
    """

    def __init__(
        self, programs: ProgramCache, ranks: InProcessBackend | SpmdBackend | WorkerPool, recipe: TrainingRecipe
    ) -> None:
        self.programs, self.ranks, self.seed = programs, ranks, recipe.seed
        self.loss_over = recipe.loss_over
        self.plan, self.mesh = programs.plan, programs.plan.mesh
        spmd = isinstance(ranks, SpmdBackend)
        self.data_size = self.mesh.dp if spmd else 1
        self.data_rank = self.mesh.place(ranks.numbers[0]).replica if spmd else 0
        self.num_updates = self.num_drawn = 0
        self.has_gradients = self.averaged = self.clipped = False
        self.graphs, self.newest_graph = KeptGraphs(), KeptGraph(0)
        self.agreement: BatchAgreement | None = None
        if isinstance(ranks, SpmdBackend):
            self.agreement = BatchAgreement(ranks, self.mesh, self.data_size, recipe.loss_over == "caller")
        self.partitions: dict[tuple[Any, ...], BatchPartition] = {}
        # Keys of the partitions of each batch shape, least recently used shape first. A shape is that of all ranks'
        # parts, so that all ranks forget the same one at the same call.
        self.batch_shapes: OrderedDict[tuple[int, ...], set[tuple[Any, ...]]] = OrderedDict()
        self.sent: set[int] = set()
        self.checked: set[tuple[str, int]] = set()

    def call(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Results of a command by rank.

        Raises:
            UsageError: averages stand in for the weights and the command needs the weights; or the ranks are closed.
        """
        self.check_weights_in_place(name)
        if command_named(name).changes_weights:
            self.drop_graphs(self.graphs.end_all())
        return self.ranks.call(name, arguments)

    def drop_graphs(self, numbers: Sequence[int]) -> None:
        """Free graphs on the ranks whose backwards will not come."""
        if numbers:
            self.ranks.call("drop_graphs", dict.fromkeys(self.ranks.numbers, (tuple(numbers),)))

    def check_weights_in_place(self, name: str) -> None:
        """Raise a UsageError if averages stand in for the weights, which a command needs."""
        if self.averaged and not command_named(name).allowed_under_averages:
            raise UsageError(
                "Inside of ema_weights() averages stand in for the weights: they can be evaluated and read, but not "
                "trained, loaded or saved. Leave it first."
            )

    def check_not_clipped(self) -> None:
        """Raise a UsageError if gradients were clipped: they are sums over all ranks, to which nothing can be added."""
        if self.clipped:
            raise UsageError(
                "The gradients have been clipped, which sums them over all ranks: none can be added or read before the "
                "update. Clip after the last backward, directly before the optimizer's step."
            )

    def call_all(self, name: str, *arguments: Any) -> dict[int, Any]:
        """Results of a command by rank, with the same arguments for all."""
        return self.call(name, dict.fromkeys(self.ranks.numbers, arguments))

    def any_rank_so_far(self, flag: bool) -> bool:
        """As `ParallelModel.any_rank_so_far`."""
        if self.agreement is None:
            return flag
        self.agreement.flag = flag
        return self.agreement.any_flag

    def updated(self) -> None:
        """Count an update: random operations count samples from 0 again."""
        self.set_counters(self.num_updates + 1)

    def set_counters(self, num_updates: int, num_drawn: int = 0) -> None:
        """Set the counters where no gradients are left."""
        self.num_updates, self.num_drawn = num_updates, num_drawn
        self.has_gradients = self.clipped = False

    def note(self, call: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = NO_ARGUMENTS) -> None:
        """Before a command that ranks carry out without an agreement: keep it for the next one, with its arguments."""
        if self.agreement is not None:
            self.agreement.note(call_text(call, args, kwargs) if args or kwargs else call)

    @contextmanager
    def compared(self, call: str, reads_only: bool = False, uses_files: bool = False) -> Iterator[None]:
        """Context of a call outside of batches in which ranks of a launcher wait for each other.

        Args:
            call: the call as text.
            reads_only: as in `Command`.
            uses_files: as for `BatchAgreement.compare`.

        Raises:
            UsageError: the ranks do not make the same call, on all of them.
        """
        if self.agreement is None:
            yield
            return
        with interrupt_at_end(call) if reads_only else nullcontext():
            self.agreement.compare(call, uses_files)
            yield

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Context in which a rank checks its part of a call on a batch. Its error makes the others raise one too."""
        try:
            yield
        except Exception as error:
            if self.agreement is not None and self.ranks.failed is None:
                self.agreement.refuse(error)
            raise

    def carry_out(self, request: BatchRequest) -> tuple[dict[int, Any], Outputs | None]:
        """Results of a command on a batch by rank, and how to join the outputs if they are kept.

        Raises:
            UsageError: as `ParallelModel.forward_backward`.
        """
        leaves, targets = request.call.leaves, pytree_leaves(request.target)
        input_key = input_signature(leaves)
        kind = checksum(request.keep_outputs, request.share, input_key, input_signature(targets))
        shapes = checksum(input_key)
        key = request.mode, request.schedule, request.trains, request.keep_outputs, input_key
        known = self.partitions.get(key)
        with self.checking():
            self.check_weights_in_place(request.command)
            if request.target is not None:
                self.check_not_clipped()
            if request.trains:
                check_detached(leaves, "input")
                check_detached(targets, "target")
            partition = known or self.partition(request, leaves)
            self.check_batch(request, partition, leaves, targets)
        await_agreement = None
        if self.agreement is not None:
            values = [*leaves, *targets]
            gone = self.graphs.unreachable()
            await_agreement = self.agreement.start(request.text, request.call.batch, kind, shapes, values, gone)
        microbatches = self.microbatches(request, partition, leaves)
        joined = partition.joined
        rank_requests = {rank: self.rank_request(request, microbatches, joined, rank) for rank in self.ranks.numbers}
        if await_agreement is not None:  # as late as possible, so that the all-gather overlaps with the work above
            await_agreement()
        if known is None:
            self.send_programs(partition.all_specializations)
            self.partitions[key] = partition
        kinds, all_shapes, gone = (kind,), (shapes,), self.graphs.unreachable()
        if self.agreement is not None:
            kinds, all_shapes, gone = self.agreement.kinds, self.agreement.shapes, self.agreement.unreachable
            if joined is not None:
                check_one_kind(kinds)
        self.batch_shapes.setdefault(all_shapes, set()).add(key)
        self.batch_shapes.move_to_end(all_shapes)
        if len(self.batch_shapes) > MAX_BATCH_SHAPES:
            self.forget_oldest_shape()
        self.drop_graphs(self.graphs.forget(gone))
        graph = None
        if request.keeps_graph:
            outputs = partition.all_specializations[0].graph
            self.newest_graph = self.graphs.open(
                [isinstance(o, Ref) and outputs.readable[o.name].requires_grad for o in outputs.outputs]
            )
            graph = self.newest_graph.number
        arguments = {
            rank: (replace(own, signature=kinds, shape_signature=all_shapes, graph=graph),)
            for rank, own in rank_requests.items()
        }
        results = self.call(request.command, arguments)
        if partition.has_random_ops:
            self.num_drawn += request.call.batch * self.data_size
        return results, partition.outputs

    def forget_oldest_shape(self) -> None:
        """Drop the batch shape that has not been used for longest, and programs that only its batches use."""
        shape, _ = self.batch_shapes.popitem(last=False)
        kept = set().union(*self.batch_shapes.values())
        self.partitions = {key: partition for key, partition in self.partitions.items() if key in kept}
        used = {own.number for partition in self.partitions.values() for own in partition.all_specializations}
        forgotten = self.programs.forget(used)
        on_ranks = sorted(self.sent.intersection(forgotten))
        self.sent.difference_update(on_ranks)
        self.call_all("forget_programs", shape, on_ranks)

    def joined_outputs(self, outputs: Outputs, kept: Mapping[int, list[list[Any]]]) -> Any:
        """The model's output for the caller's batch; arguments as for `output_parts`."""
        return outputs.join(self.output_parts(outputs, kept))

    def output_parts(self, outputs: Outputs, kept: Mapping[int, list[list[Any]]]) -> list[list[Any]]:
        """Flattened outputs of each microbatch of the caller's batch.

        Args:
            kept: flattened outputs of each microbatch, by rank.
        """
        last, tp = self.plan.placement.last_position, self.mesh.tp
        if isinstance(self.ranks, SpmdBackend):
            own, source = self.ranks.numbers[0], self.mesh.rank(Place(last, self.data_rank))
            readers = [self.mesh.rank(Place(s, self.data_rank, t)) for s in range(self.mesh.pp) for t in range(tp)]
            return self.ranks.outputs(kept[own], source, readers)
        parts: list[list[Any]] = []
        for replica, size in enumerate(replica_sizes(sum(outputs.sizes), self.mesh.dp)):
            count = len(microbatch_sizes(size, self.plan.microbatches))  # without those that were run again
            parts += kept[self.mesh.rank(Place(last, replica))][:count]
        return parts

    def of_replicas(self, parts: Sequence[Any]) -> dict[int, tuple[Any, ...]]:
        """The part of each microbatch of the caller's training batch, by rank; none on ranks without a last stage."""
        count = len(parts) * self.data_size // self.mesh.dp
        by_rank: dict[int, tuple[Any, ...]] = {}
        for rank in self.ranks.numbers:
            number = self.mesh.place(rank).replica % (self.mesh.dp // self.data_size)
            own = parts[number * count : (number + 1) * count]
            by_rank[rank] = tuple(own) if self.plan.has_last_stage(rank) else ()
        return by_rank

    def partition(self, request: BatchRequest, leaves: Sequence[Any]) -> BatchPartition:
        """The partition of a batch among the replicas that share it.

        Raises:
            UsageError: replicas cannot share the batch, the model does not take it, or its outputs cannot be joined.
        """
        call, batch, replicas = request.call, request.call.batch, self.mesh.dp // self.data_size
        if request.trains:
            check_divisible(batch, replicas)
        sizes = [microbatch_sizes(own, self.plan.microbatches) for own in replica_sizes(batch, replicas)]
        parts = split_leaves(leaves, batch, [size for own in sizes for size in own])
        specializations = [s for s, _ in self.programs.microbatches(request.mode, call, parts)]
        # Before anything runs: outputs that cannot be joined are an error that must leave no gradients.
        graphs = [s.graph for s in specializations]
        outputs = self.outputs(request, graphs) if request.keep_outputs else None
        one_loss = request.target is not None and self.loss_over == "batch"
        joined = self.joined_for_loss(request.mode, call, graphs) if one_loss else None
        for own in sizes:
            self.check_schedule(request.schedule, specializations, len(own))
        remaining = iter(specializations)
        by_replica = tuple(tuple(islice(remaining, len(replica))) for replica in sizes)
        return BatchPartition(tuple(map(tuple, sizes)), by_replica, outputs, joined)

    def check_batch(
        self, request: BatchRequest, partition: BatchPartition, leaves: Sequence[Any], targets: Sequence[Any]
    ) -> None:
        """Check the tensors of a batch.

        Raises:
            UsageError: targets cannot be cut, or a rank reads a tensor that is on the meta device.
        """
        check_targets(targets, request.call.batch)
        if len(partition.all_sizes) > 1:
            check_lists(request.target, request.call.batch)
        if not any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in (*leaves, *targets)):
            return
        for rank in self.ranks.numbers:
            place = self.mesh.place(rank)
            own = partition.specializations[place.replica % len(partition.specializations)]
            programs = [specialization.programs[stage] for specialization in own for stage in self.stages(rank)]
            names = set(input_names(programs))
            read = [
                leaf
                for specialization in own
                for leaf, ref in zip(leaves, specialization.graph.leaves)
                if isinstance(ref, Ref) and ref.name in names
            ]
            check_real(read, "input", rank)
            if self.plan.has_last_stage(rank):
                check_real(targets, "target", rank)

    def outputs(self, request: BatchRequest, parts: Sequence[Graph]) -> Outputs:
        """How the outputs of microbatches with these graphs are joined; raises as `join_outputs`."""
        if len(parts) == 1:
            return single_output(parts[0])
        return join_outputs(self.programs.whole_graph(request.mode, request.call), parts)

    def joined_for_loss(self, mode: Mode, call: Call, parts: Sequence[Graph]) -> Outputs:
        """How the outputs of the global batch are joined for its loss.

        Args:
            call: the caller's part of the global batch.
            parts: graphs of the part's microbatches.

        Raises:
            UsageError: as `join_outputs`.
        """
        every = [part for _ in range(self.data_size) for part in parts]
        if len(every) == 1:
            return single_output(every[0])
        return join_outputs(self.programs.whole_graph(mode, call.repeated(self.data_size)), every)

    def microbatches(
        self, request: BatchRequest, partition: BatchPartition, leaves: Sequence[Any]
    ) -> list[list[Microbatch]]:
        """Microbatches of each replica that shares the caller's batch; under ZeRO equally many, the last one again."""
        batch, sizes, specializations = request.call.batch, partition.all_sizes, partition.all_specializations
        parts = split_leaves(leaves, batch, sizes)
        targets: list[Any] = [None] * len(sizes)
        shares = [request.share * size / (batch * self.data_size) for size in sizes]
        if partition.joined is not None and request.target is not None:
            by_replica = split_targets(request.target[0], batch, list(map(sum, partition.sizes)))
            targets = [None if k else part for part, own in zip(by_replica, partition.sizes) for k in range(len(own))]
            shares = [request.share] * len(sizes)
        elif request.target is not None:
            targets = split_targets(request.target[0], batch, sizes)
        counters = self.rng_counters(sizes) if partition.has_random_ops else [None] * len(sizes)
        microbatches = map(Microbatch, specializations, parts, targets, shares, counters)
        by_replica = [list(islice(microbatches, len(own))) for own in partition.sizes]
        if self.plan.zero:  # replicas gather weights together, so all run as many microbatches
            for own in by_replica:
                own += [(own or by_replica[0])[-1]] * (len(by_replica[0]) - len(own))
        return by_replica

    def rng_counters(self, sizes: list[int]) -> list[torch.Tensor]:
        """RNG counters of each microbatch, int64 [samples, counters]; samples count since the last update, globally."""
        first = self.num_drawn + self.data_rank * sum(sizes)
        return list(counter_rows(self.seed, self.num_updates, first, sum(sizes)).split(sizes))

    def rank_request(
        self, request: BatchRequest, microbatches: list[list[Microbatch]], joined: Outputs | None, rank: int
    ) -> StepRequest:
        """The request of one rank, with its part of the batch.

        Args:
            microbatches: by replica that shares the caller's batch.
            joined: as in `BatchPartition`.
        """
        place = self.mesh.place(rank)
        own, last = microbatches[place.replica % len(microbatches)], self.plan.has_last_stage(rank)
        data = StepData(
            [microbatch.inputs(self.stages(rank)) for microbatch in own],
            [microbatch.target for microbatch in own] if request.target is not None and last else [],
            [microbatch.share for microbatch in own],
        )
        return StepRequest(
            mode=request.mode,
            schedule=request.schedule,
            programs=tuple(microbatch.specialization.number for microbatch in own),
            data=data,
            training=request.trains,
            keep_outputs=request.keep_outputs and last and place.shard == 0,
            num_updates=self.num_updates,
            joined=joined,
        )

    def stages(self, rank: int) -> tuple[int, ...]:
        """Stages that a rank runs."""
        return self.plan.stages_of(rank)

    def send_programs(self, specializations: Sequence[Specialization]) -> None:
        """Send each rank its programs of the specializations that it does not have yet."""
        for specialization in specializations:
            if specialization.number in self.sent:
                continue
            arguments = {}
            for rank in self.ranks.numbers:
                own = specialization.of_shard(self.mesh.place(rank).shard)
                programs = [own[stage] for stage in self.stages(rank)]
                weights = [weight for program in programs for weight in program.weights]
                constants = {w.name: specialization.graph.constants[w.name] for w in weights if w.kind == "constant"}
                arguments[rank] = (specialization.number, programs, constants)
            self.call("add_programs", arguments)
            self.sent.add(specialization.number)

    def check_schedule(self, name: str, specializations: Sequence[Specialization], count: int) -> None:
        """Prove the schedule for this number of microbatches before its first run."""
        placement, order = self.plan.placement, self.plan.order
        if (name, count) in self.checked or count == 0:
            return
        bounds = [max_in_flight(name, rank, placement, count, order) for rank in range(placement.pp)]
        edges = {(e.src, e.dst) for s in specializations for p in s.programs for e in p.sends}
        training = name != "forward-only"
        check(
            generate(name, placement, count, order),
            placement,
            microbatches=count,
            edges=sorted(edges | set(chain_edges(placement.num_stages))),
            in_flight=bounds,
            training=training,
        )
        self.checked.add((name, count))

"""A call of the model carried out by its ranks: each gets its part of the batch, and programs that it has not seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any
from zlib import crc32

import torch

from autopar.api.batch import Outputs, check_real, check_shares, join_outputs, replica_sizes, split_targets
from autopar.api.batch_agreement import check_copies, check_parts, fingerprint
from autopar.api.program_cache import ProgramCache, Specialization, signature
from autopar.errors import UsageError
from autopar.ir.graph import Mode, Ref
from autopar.ir.mesh import Mesh, Place
from autopar.ir.microbatches import microbatch_sizes
from autopar.ir.program import input_names
from autopar.ir.pytree import leaves as pytree_leaves
from autopar.ops.counter_rng import counter_rows
from autopar.runtime.commands import command_named
from autopar.runtime.engine.executor import StepData
from autopar.runtime.engine.metrics import start_readback
from autopar.runtime.launch.pool import WorkerPool
from autopar.runtime.launch.spmd import InProcessBackend, SpmdBackend
from autopar.runtime.spec import StepRequest
from autopar.schedule.check import check
from autopar.schedule.generate import generate, max_in_flight
from autopar.trace.call import Call, split_leaves
from autopar.trace.passes.counter_rng import RNG_COUNTERS

# Steps that may be launched and not done: one computes while the next is prepared. More would take memory for their
# inputs, and move errors away from their cause.
IN_FLIGHT = 2
MAX_CACHED_PARTITIONS = 64  # a caller whose batches differ every time is not to fill the memory with how they were cut


@dataclass(frozen=True)
class BatchRequest:
    """What the ranks are to do with a batch.

    Args:
        command: the method of each rank.
        target: of the loss, as the only item; None where nothing is trained.
        share: factor of the gradients.
    """

    command: str
    mode: Mode
    schedule: str
    call: Call
    target: tuple[Any] | None = None
    keep_outputs: bool = False
    share: float = 1.0


@dataclass(frozen=True)
class BatchPartition:
    """How batches of one signature are cut: samples and variants of the microbatches of each replica that shares one.

    ``outputs`` says how their outputs are joined, where they are kept.
    """

    sizes: tuple[tuple[int, ...], ...]
    variants: tuple[tuple[Specialization, ...], ...]
    outputs: Outputs | None

    @property
    def all_sizes(self) -> list[int]:
        return [size for own in self.sizes for size in own]

    @property
    def all_variants(self) -> list[Specialization]:
        return [variant for own in self.variants for variant in own]

    @cached_property
    def has_random_ops(self) -> bool:
        """Whether any microbatch draws random numbers by counters."""
        return any(map(draws_numbers, self.all_variants))


@dataclass(frozen=True)
class Microbatch:
    """A part of a batch: its programs, the leaves of its call, and its target where it is to be trained on.

    ``share`` is the factor of its mean loss; ``draws`` what its random operations count, None where it has none.
    """

    variant: Specialization
    leaves: list[Any]
    target: Any
    share: float
    rng_counters: torch.Tensor | None

    def inputs(self, stages: Sequence[int]) -> list[Any]:
        """What the programs of a rank's stages read, in their order."""
        by_name: dict[str, Any] = {
            leaf.name: tensor for leaf, tensor in zip(self.variant.graph.leaves, self.leaves) if isinstance(leaf, Ref)
        }
        by_name[RNG_COUNTERS] = self.rng_counters
        return [by_name[name] for name in input_names(self.variant.programs[stage] for stage in stages)]


class BatchAgreement:
    """What the ranks of a launcher tell each other before every batch: one message of a few whole numbers.

    They must agree on its size, as ranks with other sizes would wait for tensors that never come. Ranks of a
    tensor-parallel group must have the same samples: `mark` of tensors on the CPU is compared before the batch runs.
    That of tensors on a GPU could only be read by waiting for the GPU, so it travels `IN_FLIGHT` batches later, when it
    has long been there. A sampler that shards wrongly does so from the first batch on, so this shows it at the third.

    ``flag`` is what this rank tells the others besides, and ``flagged`` whether any did, the last time. ``kinds``
    and ``shapes`` are what each rank called those of its last batch: ranks that see other parts of it bind and capture
    their steps together.
    """

    def __init__(self, ranks: SpmdBackend, mesh: Mesh, data_size: int) -> None:
        self.ranks, self.mesh, self.data_size = ranks, mesh, data_size
        self.flag = self.flagged = False
        self.kinds: tuple[int, ...] = ()
        self.shapes: tuple[int, ...] = ()
        self.late: deque[Callable[[], list[int]]] = deque()  # marks of batches on GPUs

    def start(self, batch: int, kind: int, shapes: int, given: Sequence[Any]) -> Callable[[], None]:
        """Send this rank's numbers; the result waits for those of the others.

        Args:
            given: inputs and targets.

        Raises:
            UsageError: by the result, if the ranks do not agree: on all of them.
        """
        now, late = self.fingerprints(given) if self.mesh.tp > 1 else (0, 0)
        told = self.ranks.exchange((batch, self.flag, now, late, kind, shapes))

        def agreed() -> None:
            rows = told()
            self.flagged = any(row[1] for row in rows)
            self.kinds, self.shapes = tuple(row[4] for row in rows), tuple(row[5] for row in rows)
            check_parts([(self.mesh.place(rank).replica, own) for rank, (own, *_) in enumerate(rows)], self.data_size)
            check_copies([row[2] for row in rows], self.mesh)
            check_copies(
                [row[3] for row in rows], self.mesh, f" {IN_FLIGHT} calls ago, so that updates since are wrong"
            )

        return agreed

    def fingerprints(self, given: Sequence[Any]) -> tuple[int, int]:
        """The mark of the tensors on the CPU, and that of those which were on a GPU `IN_FLIGHT` calls ago."""
        tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        there = [leaf for leaf in tensors if leaf.device.type != "cpu"]
        here = [leaf for leaf in tensors if leaf.device.type == "cpu"]
        self.late.append(start_readback(fingerprint(there).reshape(1)) if there else lambda: [0])
        late = self.late.popleft()()[0] if len(self.late) > IN_FLIGHT else 0
        return int(fingerprint(here)) if here else 0, late


class Dispatcher:
    """Passes commands on to the ranks, and counts what random operations count.

    ``num_updates`` are calls of optimizer_step and train_step so far, ``num_drawn`` samples since then. ``averaged``:
    averages stand in for the weights.
    """

    def __init__(self, programs: ProgramCache, ranks: InProcessBackend | SpmdBackend | WorkerPool, seed: int) -> None:
        self.programs, self.ranks, self.seed = programs, ranks, seed
        self.plan, self.mesh = programs.plan, programs.plan.mesh
        apart = isinstance(ranks, SpmdBackend)
        self.data_size = self.mesh.dp if apart else 1
        self.data_rank = self.mesh.place(ranks.numbers[0]).replica if apart else 0
        self.num_updates = self.num_drawn = 0
        self.averaged = False
        self.agreement = BatchAgreement(ranks, self.mesh, self.data_size) if isinstance(ranks, SpmdBackend) else None
        self.partitions: dict[tuple, BatchPartition] = {}
        self.sent: set[int] = set()
        self.checked: set[tuple[str, int]] = set()

    def call(self, name: str, arguments: Mapping[int, tuple]) -> dict[int, Any]:
        """Results of a command by rank.

        Raises:
            UsageError: it is for the model's own weights, and averages stand in for them; or the ranks are closed.
        """
        command = command_named(name)
        if self.averaged and not command.allowed_under_averages:
            raise UsageError(
                "Inside of ema_weights() averages stand in for the weights: they can be evaluated and read, but not "
                "trained, loaded or saved. Leave it first."
            )
        return self.ranks.call(name, arguments)

    def call_all(self, name: str, *arguments: Any) -> dict[int, Any]:
        """Results of a command by rank, with the same arguments for all."""
        return self.call(name, dict.fromkeys(self.ranks.numbers, arguments))

    def any_rank_so_far(self, flag: bool) -> bool:
        """As `ParallelModel.any_rank_so_far`."""
        if self.agreement is None:
            return flag
        self.agreement.flag = flag
        return self.agreement.flagged

    def updated(self) -> None:
        """Count an update of the weights."""
        self.num_updates += 1
        self.num_drawn = 0

    def carry_out(self, request: BatchRequest) -> tuple[dict[int, Any], Outputs | None]:
        """Results of a command on a batch by rank, and how to join the outputs where they are kept.

        Raises:
            UsageError: as `ParallelModel.forward_backward`.
        """
        leaves, targets = request.call.leaves, pytree_leaves(request.target)
        given = signature(leaves)
        kind, shapes = checksum(request.keep_outputs, request.share, given, signature(targets)), checksum(given)
        agreed = None
        if self.agreement is not None:
            agreed = self.agreement.start(request.call.batch, kind, shapes, [*leaves, *targets])
        key = request.mode, request.schedule, request.target is None, request.keep_outputs, given
        cut = self.partitions.get(key)
        if cut is None:
            if agreed is not None:
                agreed()
            cut = self.partition(request, leaves)
            if len(self.partitions) == MAX_CACHED_PARTITIONS:
                self.partitions.clear()
            self.partitions[key] = cut
            agreed = None
        microbatches = self.microbatches(request, cut, leaves)
        check = any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in (*leaves, *targets))
        works = {rank: self.rank_request(request, microbatches, rank, check) for rank in self.ranks.numbers}
        if agreed is not None:  # as late as possible: what was done meanwhile took time too
            agreed()
        of_all = (self.agreement.kinds, self.agreement.shapes) if self.agreement is not None else ((kind,), (shapes,))
        agreed_on = {rank: (replace(work, kind=of_all[0], shapes=of_all[1]),) for rank, work in works.items()}
        results = self.call(request.command, agreed_on)
        if cut.has_random_ops:
            self.num_drawn += request.call.batch * self.data_size
        return results, cut.outputs

    def joined_outputs(self, outputs: Outputs, kept: Mapping[int, list[list[Any]]]) -> Any:
        """The model's output for the caller's batch, of the microbatches' outputs that each rank kept."""
        last, tp = self.mesh.pp - 1, self.mesh.tp
        if isinstance(self.ranks, SpmdBackend):
            own, source = self.ranks.numbers[0], self.mesh.rank(Place(last, self.data_rank))
            readers = [self.mesh.rank(Place(s, self.data_rank, t)) for s in range(self.mesh.pp) for t in range(tp)]
            return outputs.join(self.ranks.outputs(kept[own], source, readers))
        sources = [self.mesh.rank(Place(last, replica)) for replica in range(self.mesh.dp)]
        return outputs.join([parts for source in sources for parts in kept[source]])

    def partition(self, request: BatchRequest, leaves: Sequence[Any]) -> BatchPartition:
        """How to cut a batch among the replicas that share it; the ranks get the programs for it."""
        call, batch, replicas = request.call, request.call.batch, self.mesh.dp // self.data_size
        if request.target is not None:
            check_shares(batch, replicas)
        sizes = [microbatch_sizes(own, self.plan.microbatches) for own in replica_sizes(batch, replicas)]
        parts = split_leaves(leaves, batch, [size for own in sizes for size in own])
        variants = [variant for variant, _ in self.programs.microbatches(request.mode, call, parts)]
        # Before anything runs, so that outputs that cannot be joined leave no gradients behind.
        graphs = [variant.graph for variant in variants]
        outputs = join_outputs(graphs, variants[-1].batched) if request.keep_outputs else None
        self.send_programs(variants)
        for own in sizes:
            self.check_schedule(request.schedule, variants, len(own))
        found = iter(variants)
        return BatchPartition(tuple(map(tuple, sizes)), tuple(tuple(islice(found, len(own))) for own in sizes), outputs)

    def microbatches(self, request: BatchRequest, cut: BatchPartition, leaves: Sequence[Any]) -> list[list[Microbatch]]:
        """The microbatches of each replica that shares the caller's batch."""
        batch, sizes, variants = request.call.batch, cut.all_sizes, cut.all_variants
        parts = split_leaves(leaves, batch, sizes)
        targets = [None] * len(sizes) if request.target is None else split_targets(request.target[0], batch, sizes)
        shares = [request.share * size / (batch * self.data_size) for size in sizes]
        draws = self.rng_counters(sizes) if cut.has_random_ops else [None] * len(sizes)
        found = map(Microbatch, variants, parts, targets, shares, draws)
        return [list(islice(found, len(own))) for own in cut.sizes]

    def rng_counters(self, sizes: list[int]) -> list[torch.Tensor]:
        """What random operations count in each microbatch: samples since the last update, in the global batch."""
        first = self.num_drawn + self.data_rank * sum(sizes)
        return list(counter_rows(self.seed, self.num_updates, first, sum(sizes)).split(sizes))

    def rank_request(self, request: BatchRequest, cut: list[list[Microbatch]], rank: int, check: bool) -> StepRequest:
        """A rank's part.

        Args:
            check: whether tensors on the meta device are among what the caller passed.

        Raises:
            UsageError: it reads tensors that are on the meta device.
        """
        place = self.mesh.place(rank)
        own, last = cut[place.replica % len(cut)], place.stage == self.mesh.pp - 1
        training = request.target is not None
        data = StepData(
            [microbatch.inputs(self.stages(rank)) for microbatch in own],
            [microbatch.target for microbatch in own] if training and last else [],
            [microbatch.share for microbatch in own],
        )
        if check:
            check_real(data.inputs, "input", rank)
            check_real(data.targets, "target", rank)
        return StepRequest(
            mode=request.mode,
            schedule=request.schedule,
            programs=tuple(microbatch.variant.number for microbatch in own),
            data=data,
            training=training,
            keep_outputs=request.keep_outputs and last and place.shard == 0,
            num_updates=self.num_updates,
        )

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs."""
        return self.mesh.stages(rank, self.plan.chunks)

    def send_programs(self, variants: Sequence[Specialization]) -> None:
        """Give each rank its programs of those variants that it does not have yet."""
        for variant in variants:
            if variant.number in self.sent:
                continue
            arguments = {}
            for rank in self.ranks.numbers:
                programs = [variant.programs[stage] for stage in self.stages(rank)]
                weights = [weight for program in programs for weight in program.weights]
                constants = {w.name: variant.graph.constants[w.name] for w in weights if w.kind == "constant"}
                arguments[rank] = (variant.number, programs, constants)
            self.call("add_programs", arguments)
            self.sent.add(variant.number)

    def check_schedule(self, name: str, variants: Sequence[Specialization], count: int) -> None:
        """Prove the schedule for this number of microbatches before its first run."""
        stages, pp, chunks = self.programs.num_stages, self.mesh.pp, self.plan.chunks
        if (name, count) in self.checked or count == 0:
            return
        edges = {(e.src, e.dst) for v in variants for p in v.programs for e in p.sends}
        training = name != "forward-only"
        check(
            generate(name, pp, count, chunks),
            num_chunks=stages,
            microbatches=count,
            edges=sorted(edges | {(i, i + 1) for i in range(stages - 1)}),
            in_flight=[max_in_flight(name, r, pp, count, chunks) for r in range(pp)] if training else None,
            training=training,
        )
        self.checked.add((name, count))


def checksum(*values: Any) -> int:
    """A number for what the values' texts say."""
    return crc32(repr(values).encode())


def draws_numbers(variant: Specialization) -> bool:
    """Whether a microbatch's programs draw random numbers by counters."""
    return any(value.name == RNG_COUNTERS for value in variant.graph.inputs)

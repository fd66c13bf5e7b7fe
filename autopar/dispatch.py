"""A call of the model carried out by its ranks: each gets its part of the batch, and programs that it has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from autopar.batching import (
    Call,
    Outputs,
    check_copies,
    check_parts,
    check_real,
    check_shares,
    join_outputs,
    mark,
    replica_sizes,
    split_leaves,
    split_targets,
)
from autopar.counter_random import rows
from autopar.errors import UsageError
from autopar.ir import Mode, Place, Ref, input_names, microbatch_sizes
from autopar.programs import Programs, Variant
from autopar.random_ops import DRAWS
from autopar.runtime import LocalRanks, StepData, TorchrunRanks, Work, WorkerPool
from autopar.schedule import check, generate, max_in_flight

# Commands that neither read nor write the weights which an optimizer updates, or that show whichever are in place.
WITH_AVERAGES = frozenset({
    "add_programs", "forward", "state", "ema_state", "gradients", "zero_grad", "scheduler_step", "learning_rates",
    "loss_scale", "stats",
})  # fmt: skip


@dataclass(frozen=True)
class Request:
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
class Microbatch:
    """A part of a batch: its programs, the leaves of its call, and its target where it is to be trained on.

    ``share`` is the factor of its mean loss; ``draws`` what its random operations count, None where it has none.
    """

    variant: Variant
    leaves: list[Any]
    target: Any
    share: float
    draws: torch.Tensor | None

    def inputs(self, stages: Sequence[int]) -> list[Any]:
        """What the programs of a rank's stages read, in their order."""
        by_name: dict[str, Any] = {
            leaf.name: tensor for leaf, tensor in zip(self.variant.graph.leaves, self.leaves) if isinstance(leaf, Ref)
        }
        by_name[DRAWS] = self.draws
        return [by_name[name] for name in input_names(self.variant.programs[stage] for stage in stages)]


class Dispatcher:
    """Passes commands on to the ranks, and counts what random operations count.

    ``num_updates`` are calls of optimizer_step and train_step so far, ``num_drawn`` samples since then. ``averaged``:
    averages stand in for the weights.
    """

    def __init__(self, programs: Programs, ranks: LocalRanks | TorchrunRanks | WorkerPool, seed: int) -> None:
        self.programs, self.ranks, self.seed = programs, ranks, seed
        self.plan, self.mesh = programs.plan, programs.plan.mesh
        apart = isinstance(ranks, TorchrunRanks)
        self.data_size = self.mesh.dp if apart else 1
        self.data_rank = self.mesh.place(ranks.numbers[0]).replica if apart else 0
        self.num_updates = self.num_drawn = 0
        self.averaged = False
        self.sent: set[int] = set()
        self.checked: set[tuple[str, int]] = set()

    def call(self, name: str, arguments: Mapping[int, tuple]) -> dict[int, Any]:
        """Results of a command by rank.

        Raises:
            UsageError: it is for the model's own weights, and averages stand in for them; or the ranks are closed.
        """
        if self.averaged and name not in WITH_AVERAGES:
            raise UsageError(
                "Inside of ema_weights() averages stand in for the weights: they can be evaluated and read, but not "
                "trained, loaded or saved. Leave it first."
            )
        return self.ranks.call(name, arguments)

    def call_all(self, name: str, *arguments: Any) -> dict[int, Any]:
        """Results of a command by rank, with the same arguments for all."""
        return self.call(name, dict.fromkeys(self.ranks.numbers, arguments))

    def updated(self) -> None:
        """Count an update of the weights."""
        self.num_updates += 1
        self.num_drawn = 0

    def carry_out(self, request: Request) -> tuple[dict[int, Any], Outputs | None]:
        """Results of a command on a batch by rank, and how to join the outputs where they are kept.

        Raises:
            UsageError: as `ParallelModel.forward_backward`.
        """
        cut = self.cut(request)
        microbatches = [microbatch for own in cut for microbatch in own]
        variants = [microbatch.variant for microbatch in microbatches]
        # Before anything runs, so that outputs that cannot be joined leave no gradients behind.
        graphs = [variant.graph for variant in variants]
        outputs = join_outputs(graphs, variants[-1].batched) if request.keep_outputs else None
        self.send_programs(variants)
        for own in cut:
            self.check_schedule(request.schedule, variants, len(own))
        results = self.call(request.command, {rank: (self.work(request, cut, rank),) for rank in self.ranks.numbers})
        if any(map(draws_numbers, variants)):
            self.num_drawn += request.call.batch * self.data_size
        return results, outputs

    def joined(self, outputs: Outputs, kept: Mapping[int, list[list[Any]]]) -> Any:
        """The model's output for the caller's batch, of the microbatches' outputs that each rank kept."""
        replicas = range(self.mesh.dp) if self.data_size == 1 else [self.data_rank]
        last = self.mesh.pp - 1
        return outputs.join([parts for replica in replicas for parts in kept[self.mesh.rank(Place(last, replica))]])

    def cut(self, request: Request) -> list[list[Microbatch]]:
        """The microbatches of each replica that shares the caller's batch."""
        call, batch, replicas = request.call, request.call.batch, self.mesh.dp // self.data_size
        if isinstance(self.ranks, TorchrunRanks) and self.mesh.devices > self.mesh.pp:
            checksum = mark((call.args, call.kwargs, request.target)) if self.mesh.tp > 1 else 0
            given = self.ranks.gathered((batch, checksum))
            check_parts([(self.mesh.place(rank).replica, own) for rank, (own, _) in enumerate(given)], self.data_size)
            check_copies([own for _, own in given], self.mesh)
        if request.target is not None:
            check_shares(batch, replicas)
        counts = [microbatch_sizes(own, self.plan.microbatches) for own in replica_sizes(batch, replicas)]
        sizes = [size for own in counts for size in own]
        parts = self.programs.microbatches(request.mode, call, split_leaves(call.leaves, batch, sizes))
        variants, leaves = zip(*parts)
        targets = [None] * len(sizes) if request.target is None else split_targets(request.target[0], batch, sizes)
        shares = [request.share * size / (batch * self.data_size) for size in sizes]
        draws = self.draws(sizes) if any(map(draws_numbers, variants)) else [None] * len(sizes)
        found = map(Microbatch, variants, leaves, targets, shares, draws)
        return [list(islice(found, len(own))) for own in counts]

    def draws(self, sizes: list[int]) -> list[torch.Tensor]:
        """What random operations count in each microbatch: samples since the last update, in the global batch."""
        first = self.num_drawn + self.data_rank * sum(sizes)
        return list(rows(self.seed, self.num_updates, first, sum(sizes)).split(sizes))

    def work(self, request: Request, cut: list[list[Microbatch]], rank: int) -> Work:
        """A rank's part.

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
        check_real(data.inputs, "input", rank)
        check_real(data.targets, "target", rank)
        return Work(
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

    def send_programs(self, variants: Sequence[Variant]) -> None:
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

    def check_schedule(self, name: str, variants: Sequence[Variant], count: int) -> None:
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


def draws_numbers(variant: Variant) -> bool:
    """Whether a microbatch's programs draw random numbers by counters."""
    return any(value.name == DRAWS for value in variant.graph.inputs)

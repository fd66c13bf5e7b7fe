"""Error messages when nothing fits: the least memory that would do, and the tensors that fill it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

from autopar.errors import InfeasibleError, UsageError
from autopar.ir.cost_graph import Group
from autopar.ir.units import BYTES, percent, text
from autopar.schedule.generate import may_overlap
from autopar.solve.cuts.evaluate import rank_costs, stage_costs
from autopar.solve.cuts.problem import CutProblem
from autopar.solve.space.constraints import USABLE_MEMORY, memory_for

# Share of a stage's memory from which a part of it is worth naming.
NOTABLE_PART = 0.05


@dataclass(frozen=True)
class Part:
    """Something that takes memory, and how to say so."""

    num_bytes: int
    text: str


def check_num_stages(problem: CutProblem) -> None:
    """Refuse more stages than there are groups to fill them.

    Raises:
        InfeasibleError: names both numbers.
    """
    groups = problem.cost.loss
    if problem.stages > groups:
        most = f"pp={max(groups, 1)}"
        if problem.chunks > 1:
            fewer = groups // problem.pp
            most = f"chunks={fewer}" if fewer > 1 else f'chunks=1 with schedule="1f1b", or pp={max(groups // 2, 1)}'
        raise InfeasibleError(
            f"No plan has {problem.stages} stages: {problem.cost.model} can be cut into {groups} "
            f"{'piece' if groups == 1 else 'pieces'} at most. Use {most} or less."
        )


def check_pins(problem: CutProblem) -> None:
    """Refuse pins that no order of stages satisfies.

    Raises:
        UsageError: names the two pins.
    """
    names = [g.name for g in problem.cost.groups]
    graph = nx.DiGraph((f.producer, c) for f in problem.cost.edges for c in f.consumers)
    for producer, later in sorted(problem.pins.items()):
        readers = nx.descendants(graph, producer) if producer in graph else set[int]()
        for reader, stage in sorted(problem.pins.items()):
            if reader in readers and later > stage:
                raise UsageError(
                    f"Pins contradict the model's order: {names[reader]} is pinned to stage {stage}, and reads what "
                    f"comes from {names[producer]}, pinned to stage {later}. Pin {names[producer]} to stage {stage} "
                    f"or earlier, or {names[reader]} to stage {later} or later."
                )


def no_cuts(problem: CutProblem) -> UsageError:
    """The error for pins that leave a stage empty."""
    pins = ", ".join(f"{problem.cost.groups[g].name} to {s}" for g, s in sorted(problem.pins.items()))
    return UsageError(
        f"The pins leave a stage of {problem.stages} without operations: {pins}. Use fewer stages or remove a pin."
    )


def memory_message(problem: CutProblem, stage_of: Sequence[int]) -> str:
    """Message for cuts of least memory that do not fit: the fullest rank, its largest parts, and remedies."""
    ranks = rank_costs(problem, stage_costs(problem, stage_of))
    position = max(range(problem.pp), key=lambda p: ranks[p].memory_bytes)
    need, capacity = ranks[position].memory_bytes, problem.capacity_bytes or 0
    own = problem.stages_at(position)
    parts = [part for stage in own for part in memory_parts(problem, stage_of, stage)]
    parts.sort(key=lambda part: part.num_bytes, reverse=True)
    largest = ", ".join(part.text for part in parts if part.num_bytes >= NOTABLE_PART * need)
    remedies = ["more devices"]
    if problem.chunks > 1:
        if problem.schedule == "interleaved-overlap" and may_overlap(problem.pp, problem.microbatches):
            remedies.append('schedule="interleaved"')
        remedies.append('schedule="1f1b"')
    if problem.cost.batch > 1 and sum(c.weight_bytes for c in ranks[position].stages) <= capacity:
        remedies.append(f"more (smaller) microbatches than {problem.microbatches}")
    least = memory_for(need)
    remedies.append(f'devices with memory="{memory_argument(least)}" (--memory {memory_argument(least)})')
    stages = f"these {problem.stages} stages" if problem.stages > 1 else "one stage"
    numbers = problem.mesh.ranks(position)
    have = f"rank {numbers[0]} has" if len(numbers) == 1 else f"ranks {numbers[0]}–{numbers[-1]} have"
    needs = f"stages {' and '.join(map(str, own))} need" if problem.chunks > 1 else f"stage {position} needs"
    return (
        f"No plan fits: {needs} {text(need, BYTES)}, {have} {text(capacity, BYTES)} ({percent(USABLE_MEMORY, 0)} of "
        f"{text(memory_for(capacity), BYTES)}). Largest: {largest}. "
        f"The smallest memory that holds {stages} is {text(least, BYTES)} per device. Use {', or '.join(remedies)}."
    )


def memory_argument(num_bytes: int) -> str:
    """Text for ``--memory`` under which this many bytes fit: whole GiB, or MiB or KiB below one."""
    unit, size = next((u for u in (("GiB", 2**30), ("MiB", 2**20)) if num_bytes >= u[1]), ("KiB", 2**10))
    return f"{-(-num_bytes // size)}{unit}"


def memory_parts(problem: CutProblem, stage_of: Sequence[int], stage: int) -> tuple[Part, ...]:
    """Parts of a stage's memory; for the activations also the block with most of them."""
    own = stage_costs(problem, stage_of)[stage]
    cost = problem.recomputing_below(own.recomputed_below).cost if own.recomputed_below else problem.cost
    blocks: Counter[str] = Counter()
    for group, s in zip(cost.groups, stage_of):
        if s == stage:
            blocks[block_of(group)] += own.in_flight * group.saved_bytes
    for holding in cost.saved:
        inside = [g for g in holding.groups if stage_of[g] == stage]
        if inside:
            blocks[block_of(cost.groups[min(inside)])] += own.in_flight * holding.num_bytes
    block, most = blocks.most_common(1)[0]
    saved, received, sent = (own.in_flight * n for n in (own.saved_bytes, own.received_bytes, own.sent_bytes))
    working = "a recomputed segment and " * (own.recomputed_below > 0) + "the working set of one operation"
    standing = "weights with gradients and optimizer state"
    if problem.gradients_come:
        working, standing = f"{working} and gradients", "weights with optimizer state"
    elif problem.has_buckets:
        working += " and gradients that wait for their bucket"
    batches = "1 microbatch" if own.in_flight == 1 else f"{own.in_flight} microbatches"
    return (
        Part(own.weight_bytes, f"{standing} ({text(own.weight_bytes, BYTES)})"),
        Part(
            saved, f"activations of {batches} in flight ({text(saved, BYTES)}, {text(most, BYTES)} of them in {block})"
        ),
        Part(sent, f"sent tensors ({text(sent, BYTES)})"),
        Part(received, f"received tensors ({text(received, BYTES)})"),
        Part(own.buffer_bytes, f"inputs, symmetric buffers and libraries ({text(own.buffer_bytes, BYTES)})"),
        Part(own.transient_bytes, f"{working} ({text(own.transient_bytes, BYTES)})"),
    )


def block_of(group: Group) -> str:
    """The module path up to its last number: the repeated block that a group is part of."""
    parts = (group.module or group.name).split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1] if numbers else parts)

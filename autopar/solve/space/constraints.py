"""Constraints that the user puts on a plan, and what follows from them before anything is priced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

from autopar.errors import UsageError, suggest
from autopar.ir.cost_graph import CostGraph
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware, Link
from autopar.ir.mesh import Mesh
from autopar.ir.microbatches import microbatch_sizes
from autopar.ir.names import inside
from autopar.ir.placement import Placement
from autopar.ir.plan_constraints import PlanConstraints, check_whole
from autopar.ir.plan_parts import FIXED_CHUNKS, OF_PIPELINES

# The rest is left to the device's context, the allocator's fragments and the buffers of collectives.
USABLE_MEMORY = 0.97


@dataclass(frozen=True)
class Constraints(PlanConstraints):
    """Constraints on a plan for so many devices and a batch of so many samples.

    A plan uses `USABLE_MEMORY` of a device's memory at most. With pins and no ``chunks`` each rank has as few stages as
    the schedule allows, since pins name stages.

    Args:
        least_samples: fewest samples of a microbatch where the search chooses the number of microbatches, and of a
            replica where it chooses the number of replicas.
        peer_memory: ranks may reach each other's memory.

    Raises:
        UsageError: as `PlanConstraints`, or a constraint contradicts the devices or the batch.
    """

    devices: int
    batch: int
    least_samples: int = 1
    peer_memory: bool = False

    @property
    def chunks_with_pins(self) -> int:
        """Stages of a rank where pins name stages."""
        return self.chunks or FIXED_CHUNKS.get(self.schedule, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("devices", self.devices)
        check_whole("batch", self.batch)
        if (self.chunks or 1) > 1 and (self.pp == 1 or self.devices == 1):
            alone = "pp=1" if self.pp == 1 else "1 device"
            raise UsageError(
                f"chunks={self.chunks} with {alone}, which is no pipeline. Use pp=2 or more, or leave chunks out."
            )
        if self.schedule in OF_PIPELINES and (alone := self.without_pipeline()):
            raise UsageError(
                f"schedule={self.schedule!r} with {alone}, which is no pipeline. Use pp=2 or more, or leave schedule "
                "out."
            )
        for name, number in (("microbatches", self.microbatches), ("microbatch_size", self.microbatch_size)):
            if number is not None and number > self.batch:
                raise UsageError(f"{name}={number} of a batch of {self.batch}. Use {name}={self.batch} or less.")
        if self.zero and (self.dp == 1 or self.devices == 1):
            alone = "dp=1" if self.dp == 1 else "1 device"
            raise UsageError(
                f"zero={self.zero} with {alone}: there are no replicas to share the optimizer's state. Use dp=2 or "
                "more, or leave zero out."
            )

        if self.dp_shard is not None and (self.zero == 0 or self.dp == 1 or (self.dp or self.dp_shard) % self.dp_shard):
            raise UsageError(
                f"dp_shard={self.dp_shard} with dp={self.dp} and zero={self.zero}: groups of that many replicas divide "
                "what ZeRO says. Use a zero of 1 or more and a divisor of dp, or leave dp_shard out."
            )
        if self.zero == 2 and (self.microbatches or 1) > 1:
            raise UsageError(
                f"zero=2 with microbatches={self.microbatches}: ZeRO-2 reduces gradients after every backward, and is "
                "planned for one microbatch a step. Use microbatches=1, zero=1, or zero=3, which may keep parameters."
            )

    def without_pipeline(self) -> str:
        """Sizes that leave no pipeline, or an empty string."""
        if self.devices == 1 or self.pp == 1:
            return "pp=1" if self.pp == 1 else "1 device"
        given = {name: size for name, size in (("tp", self.tp_ranks), ("dp", self.dp)) if size is not None}
        if prod(given.values()) != self.devices:
            return ""
        return f"{' × '.join(f'{name}={size}' for name, size in given.items())} on {self.devices} devices"

    def capacity_bytes(self, hardware: Hardware) -> int:
        """Memory that a stage may use."""
        return int(USABLE_MEMORY * (self.memory or hardware.memory_bytes))


def memory_for(num_bytes: int) -> int:
    """The memory of a device in which a plan may use so many bytes."""
    return ceil(num_bytes / USABLE_MEMORY)


def microbatch_candidates(constraints: Constraints, dp: int) -> tuple[int, ...]:
    """Numbers of microbatches of a replica to consider: those given, or powers of two and divisors of its batch.

    Args:
        dp: replicas that share the batch evenly; none has fewer samples than microbatches are given.
    """
    batch = constraints.batch // dp
    if constraints.microbatches is not None:
        return (len(microbatch_sizes(batch, constraints.microbatches)),)
    if constraints.microbatch_size is not None:
        return (len(microbatch_sizes(batch, -(-batch // constraints.microbatch_size))),)
    return open_microbatches(batch, constraints.least_samples)


@lru_cache
def open_microbatches(batch: int, least_samples: int) -> tuple[int, ...]:
    """As `microbatch_candidates`, of a replica's batch where nothing is given."""
    asked = {2**k for k in range(batch.bit_length())} | {d for d in range(1, batch + 1) if batch % d == 0}
    sizes = [microbatch_sizes(batch, m) for m in asked]
    return tuple(sorted({len(each) for each in sizes if each[-1] >= least_samples} or {1}))


def hop_link(hardware: Hardware, mesh: Mesh, src: int, dst: int, placement: Placement | None = None) -> Link:
    """The slowest link from a rank of one stage to its partner on another: the same replica and shard. Between two
    stages of one rank it takes no time.

    Ranks of a node that send at the same time share what their node has: within the node those whose stages lie equally
    far apart, out of it all that send activations or gradients to another node.

    Args:
        placement: of the stages. Default: one on each rank. With several in rounds, the last rank of a pipeline sends
            to the first one too.
    Raises:
        HardwareError: partners are on different nodes and the machine has no network.
    Error: a rank that sends both ways is counted once, though no step is shorter than its ports are in use
        (`make_plan.port_seconds`); messages that never meet share the ports too.
    """
    placed = placement or Placement(mesh.pp)
    src, dst, width, per_node = placed.position(src), placed.position(dst), mesh.tp * mesh.dp, hardware.devices_per_node
    if src == dst:
        return Link(0.0, float("inf"))
    # Where a stage fills a node or more, all partners are on other nodes.
    ranks, distance = range(src * width, src * width + min(width, per_node)), (dst - src) * width
    returns = placed.chunks > 1 and not placed.is_v
    either = {width, distance, (mesh.pp - 1) * width if returns else width}

    def partners(rank: int, steps: Iterable[int]) -> list[int]:
        return [rank + step for step in steps if 0 <= rank + step < mesh.devices]

    def num_senders(node: int, leaves: bool) -> int:
        """Ranks of a node that send at the same time, out of it or within it."""
        own, steps = range(node * per_node, (node + 1) * per_node), {*either, *(-step for step in either)}
        if leaves:
            return sum(any(other not in own for other in partners(rank, steps)) for rank in own if rank < mesh.devices)
        return sum(other in own for rank in own for other in partners(rank, [distance]))

    hops = {rank: (rank // per_node, (rank + distance) // per_node != rank // per_node) for rank in ranks}
    senders = {of: num_senders(*of) for of in set(hops.values())}
    links = [hardware.message_link(rank, rank + distance, senders[of]) for rank, of in hops.items()]
    return max(links, key=lambda link: link.seconds(TYPICAL_BYTES))


def boundary_links(hardware: Hardware, mesh: Mesh, placement: Placement | None = None) -> tuple[Link, ...]:
    """Link after each stage but the last. Arguments and errors as of `hop_link`."""
    placed = placement or Placement(mesh.pp)
    hops = [(placed.position(s), placed.position(s + 1)) for s in range(placed.num_stages - 1)]
    links = {hop: hop_link(hardware, mesh, hops.index(hop), hops.index(hop) + 1, placed) for hop in set(hops)}
    return tuple(links[hop] for hop in hops)


TYPICAL_BYTES = 2**22  # of a message as stages send them


def pinned_groups(cost: CostGraph, graph: Graph, pins: Mapping[str, int], stages: int) -> Mapping[int, int]:
    """The stage of every group that a pin reaches.

    A name is an operation's or a module's; a module pins the groups named after its operations, or, if it has none,
    those that hold them. A longer name outranks the module it lies in.

    Raises:
        UsageError: unknown name (with near ones), or two pins for one group.
    """
    found: dict[int, tuple[str, int]] = {}
    for name, stage in sorted(pins.items(), key=lambda pin: len(pin[0])):
        assert 0 <= stage < stages, "the mesh has no such stage"
        for group in _reached(cost, graph, name):
            other, known = found.get(group, (name, stage))
            if known != stage and not inside(name, other):
                raise UsageError(
                    f"Pins contradict each other: {other} is pinned to stage {known} and {name} to stage {stage}, but "
                    f"both reach {cost.groups[group].name}, which cannot be divided. Pin both to one stage."
                )
            found[group] = name, stage
    return {group: stage for group, (_, stage) in found.items()}


def _reached(cost: CostGraph, graph: Graph, name: str) -> list[int]:
    """Groups that an operation's or module's name stands for."""
    anchored = [i for i, g in enumerate(cost.groups) if g.ops and (g.name == name or inside(g.module, name))]
    if anchored:
        return anchored
    ops = {op.name for op in graph.ops if op.name == name or inside(op.module, name)}
    if ops:
        return [i for i, g in enumerate(cost.groups) if ops.intersection(g.ops)]
    paths = {op.module.rsplit(".", k)[0] for op in graph.ops for k in range(op.module.count(".") + 1)}
    hint = suggest(name, sorted(paths | {op.name for op in graph.ops}), 3, cutoff=0.4)
    raise UsageError(f"Cannot pin {name!r}: {graph.model} has no operation or module of that name.{hint}")

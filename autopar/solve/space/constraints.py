"""Constraints that the user puts on a plan, and what follows from them before anything is priced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from autopar.errors import UsageError, suggest
from autopar.ir.cost_graph import CostGraph
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware, Link
from autopar.ir.mesh import Mesh
from autopar.ir.microbatches import microbatch_sizes
from autopar.ir.names import inside
from autopar.ir.plan_parts import INTERLEAVED, Balance, Recompute, RequestedSchedule

# The rest is left to the device's context, the allocator's fragments and the buffers of collectives.
USABLE_MEMORY = 0.97
_INTERLEAVED = tuple(f'"{name}"' for name in INTERLEAVED)


@dataclass(frozen=True)
class Constraints:
    """What is given; None leaves it to the search.

    ``batch`` is the global batch in samples, ``microbatches`` counts per data-parallel replica, ``microbatch_size`` is
    the most samples of a microbatch, ``memory_bytes`` a device's (the machine's by default), of which a plan uses
    `USABLE_MEMORY` at most. ``pins`` fixes operations or whole modules, by name, to stages. ``recompute``: no stage
    recomputes its activations in the backward, all do, or those that do not fit otherwise. ``least_samples`` is how few
    samples a microbatch may have where their number is left to the search. ``schedule`` "auto" is the fastest of 1f1b,
    interleaved and interleaved-overlap (gpipe takes as long as 1f1b and keeps more). ``chunks`` are the stages of a
    rank, of which only the interleaved ones have several; pins name stages, so with pins and no ``chunks`` there is
    one.

    Raises:
        UsageError: a number is out of range, or two of them contradict each other.
    """

    devices: int
    batch: int
    pp: int | None = None
    tp: int | None = None
    dp: int | None = None
    zero1: bool | None = None
    microbatches: int | None = None
    microbatch_size: int | None = None
    schedule: RequestedSchedule = "1f1b"
    chunks: int | None = None
    memory_bytes: int | None = None
    balance: Balance = "time"
    pins: Mapping[str, int] = field(default_factory=dict)
    recompute: Recompute = "none"
    least_samples: int = 1
    peer_memory: bool = False
    time_limit_seconds: float = 60.0

    def __post_init__(self) -> None:
        numbers = {"devices": self.devices, "batch": self.batch, "pp": self.pp, "tp": self.tp, "dp": self.dp,
                   "microbatches": self.microbatches, "microbatch_size": self.microbatch_size,
                   "memory": self.memory_bytes, "chunks": self.chunks}  # fmt: skip
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise UsageError(f"{name}={number}: must be at least 1.")
        if self.schedule == "forward-only":
            raise UsageError(
                'schedule="forward-only" has no training step to plan. Use "auto", "1f1b", '
                f'{", ".join(_INTERLEAVED)} or "gpipe".'
            )
        if self.schedule in ("1f1b", "gpipe") and (self.chunks or 1) > 1:
            raise UsageError(
                f'chunks={self.chunks} with schedule="{self.schedule}", under which a rank has one stage. Use '
                f"schedule={' or '.join(_INTERLEAVED)}, or leave chunks out."
            )
        if (self.chunks or 1) > 1 and (self.pp == 1 or self.devices == 1):
            alone = "pp=1" if self.pp == 1 else "1 device"
            raise UsageError(
                f"chunks={self.chunks} with {alone}, which is no pipeline. Use pp=2 or more, or leave chunks out."
            )
        for name, number in (("microbatches", self.microbatches), ("microbatch_size", self.microbatch_size)):
            if number is not None and number > self.batch:
                raise UsageError(f"{name}={number} of a batch of {self.batch}. Use {name}={self.batch} or less.")
        if self.microbatches is not None and self.microbatch_size is not None:
            raise UsageError(
                f"Both microbatches={self.microbatches} and microbatch_size={self.microbatch_size} are given; one "
                "follows from the other. Give only one."
            )
        if self.zero1 and (self.dp == 1 or self.devices == 1):
            alone = "dp=1" if self.dp == 1 else "1 device"
            raise UsageError(
                f"zero1=True with {alone}: there are no replicas to share the optimizer's state. Use dp=2 or more, or "
                "leave zero1 out."
            )

    def capacity_bytes(self, hardware: Hardware) -> int:
        """Memory that a stage may use."""
        return int(USABLE_MEMORY * (self.memory_bytes or hardware.memory_bytes))


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
        asked = {constraints.microbatches}
    elif constraints.microbatch_size is not None:
        asked = {-(-batch // constraints.microbatch_size)}
    else:
        asked = {2**k for k in range(batch.bit_length())} | {d for d in range(1, batch + 1) if batch % d == 0}
        asked = {m for m in asked if microbatch_sizes(batch, m)[-1] >= constraints.least_samples} or {1}
    return tuple(sorted({len(microbatch_sizes(batch, m)) for m in asked}))


def hop_link(hardware: Hardware, mesh: Mesh, src: int, dst: int) -> Link:
    """The slowest link from a rank of one stage to its partner on another: the same replica and shard. Between two
    stages of one rank it takes no time.

    Raises:
        HardwareError: partners are on different nodes and the machine has no network.
    """
    src, dst, width = src % mesh.pp, dst % mesh.pp, mesh.tp * mesh.dp
    if src == dst:
        return Link(0.0, float("inf"))
    # Where a stage fills a node or more, all partners are on other nodes.
    links = [_link(hardware, src * width + i, dst * width + i) for i in range(min(width, hardware.devices_per_node))]
    return max(links, key=lambda link: link.seconds(TYPICAL_BYTES))


def _link(hardware: Hardware, src_rank: int, dst_rank: int) -> Link:
    """Link between two ranks that explains the machine's transfer time between them."""
    latency = hardware.transfer_seconds(0, src_rank, dst_rank)
    return Link(latency, BULK_BYTES / (hardware.transfer_seconds(BULK_BYTES, src_rank, dst_rank) - latency))


def boundary_links(hardware: Hardware, mesh: Mesh, chunks: int = 1) -> tuple[Link, ...]:
    """The link behind each stage but the last, of so many a rank. Raises as `hop_link`."""
    return tuple(hop_link(hardware, mesh, s, s + 1) for s in range(mesh.pp * chunks - 1))


# Large enough for a bandwidth to be read off the machine's own transfer time; and a message as stages send them.
BULK_BYTES, TYPICAL_BYTES = 2**40, 2**22


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

"""The machine that a plan is priced for: seconds of operations, collectives and messages.

`autopar.cost.hardware.load` reads machines from the files of cost_models/. This module imports the standard library
only, so that a cost model can be read where torch is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, log2
from typing import Literal

from autopar.errors import HardwareError
from autopar.ir.network import CollectiveKind, Network, Port, members_per_node

OpKind = Literal["matmul", "attention", "convolution", "depthwise", "memory"]
COMPUTE_KINDS: tuple[OpKind, ...] = ("matmul", "attention", "convolution", "depthwise")
DTYPES = ("float32", "bfloat16", "float16", "float64")
LaunchKind = Literal["plain", "compiled", "captured"]
DEVICE_TYPES = ("cpu", "cuda")
CALIBRATED = ("analytic", "measured")  # sources of costs in [calibration]


@dataclass(frozen=True)
class Link:
    """A connection between devices; ``bytes_per_second`` counts one direction."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: float) -> float:
        """Time of one point-to-point message, α + bytes/β."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


def ring_link(port: Port, inside: Link | None) -> Link:
    """The link of a ring through several nodes, which pipelines its chunks: the slower of port and link.

    Args:
        port: between nodes, with all that the members of a node have of it.
        inside: between members of one node; None where a node has one member.
    """
    if inside is None:
        return Link(port.latency_seconds, port.bytes_per_second)
    return Link(max(port.latency_seconds, inside.latency_seconds), min(port.bytes_per_second, inside.bytes_per_second))


def ring_share(kind: CollectiveKind, ranks: int) -> float:
    """Bytes that each rank sends in a collective, as a share of the whole tensor's bytes on one rank.

    Source: rings, as in nccl-tests (PERFORMANCE.md): an all-reduce is a reduce-scatter and an all-gather.
    """
    once = (ranks - 1) / ranks
    return {"all-reduce": 2 * once, "all-gather": once, "reduce-scatter": once, "all-to-all": once / ranks}[kind]


@dataclass(frozen=True)
class Efficiency:
    """Speed of one kind of kernel: ``asymptote`` of the peak when large, half of that at ``half_flops``.

    The peak of a dtype is the peak of its matmuls. A kind that computes on other units can exceed 1, such as float32
    convolutions that use TF32.

    Args:
        bytes_per_second: rate of the memory traffic that arithmetic does not hide; infinite where arithmetic hides all.
        backward: efficiency of backward kernels, where it differs.
    """

    asymptote: float
    half_flops: float
    bytes_per_second: float = math.inf
    backward: Efficiency | None = None

    def seconds(self, flops: float, num_bytes: float, peak: float) -> float:
        """Time of a kernel's arithmetic and of the memory traffic that it does not hide.

        Args:
            peak: FLOPs per second.
        """
        return (flops + self.half_flops) / (peak * self.asymptote) + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class ExecutionMode:
    """Mode in which programs run: compiled by torch.compile or eager, and replayed from a CUDA graph or not."""

    compiled: bool = False
    captured: bool = False

    @property
    def launch(self) -> LaunchKind:
        """Field of `Launch` with the launch overhead of this mode."""
        return "captured" if self.captured else "compiled" if self.compiled else "plain"


@dataclass(frozen=True)
class Launch:
    """Seconds of an operation beyond its work.

    Args:
        plain: eager dispatch.
        compiled: in code of torch.compile.
        captured: pause between two kernels of a CUDA graph.
    """

    plain: float
    compiled: float
    captured: float


@dataclass(frozen=True)
class NumberError:
    """Relative error of a number of a machine's file, and whether the number was measured."""

    error: float
    is_measured: bool


@dataclass(frozen=True)
class StepCalibration:
    """Steps of plans that were run on the machine.

    Args:
        error: largest relative error of their predicted steps.
        covers: parts of a step that these plans had; see `autopar.cost.hardware.worse`.
    """

    error: float
    covers: tuple[str, ...]


@dataclass(frozen=True)
class Hardware:
    """A machine as the planner sees it, in SI base units, with programs in one ``execution_mode``.

    A kernel that moves n bytes reaches n / (n + ``memory_half_bytes``) of the memory's bandwidth times
    ``memory_efficiency``.

    Args:
        efficiency: by kind of operation. dtype_efficiency: by kind and dtype; it takes precedence over ``efficiency``.
        link: connection of two devices of one node; None is allowed for a machine of one device.
        link_ports: messages that a node carries at ``link``'s bandwidth at the same time; more share it.
        peer_access: devices of one node reach each other's memory.
        collective: what a rank of a collective within one node sends over; None is allowed for a machine of one device.
        group_collective: by kind and number of ranks; it takes precedence over ``collective``.
        network: connection between nodes.
        errors: of the numbers of the machine's file, by path, such as ``efficiency.matmul.bfloat16.asymptote``.
        calibration: steps of plans that were run, by the source of their costs.
        reserve_bytes: device memory that libraries take for every rank, such as workspaces of matrix products.
        replica_contention: slowdown of compute by a collective of replicas that overlaps with it (``[overlap]``):
            seconds of each collective (its barriers and sums wait for multiprocessors) and of each byte.
        overlap_efficiency: hidden share of collectives that run on a side stream during the products of linear layers.
    """

    name: str
    device: str
    device_type: str
    memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bytes_per_second: float
    launch: Launch
    efficiency: Mapping[str, Efficiency]
    memory_efficiency: float
    memory_half_bytes: float
    optimizer_bytes_per_second: float
    devices_per_node: int
    link: Link | None
    link_name: str
    network: Network | None
    collective: Link | None
    dtype_efficiency: Mapping[tuple[str, str], Efficiency] = field(default_factory=dict)
    group_collective: Mapping[tuple[str, int], Link] = field(default_factory=dict)
    link_ports: float = inf
    peer_access: bool = True
    reserve_bytes: int = 0
    replica_contention: Link = Link(0.0, inf)
    overlap_efficiency: float = 0.0
    execution_mode: ExecutionMode = ExecutionMode()
    errors: Mapping[str, NumberError] = field(default_factory=dict)
    calibration: Mapping[str, StepCalibration] = field(default_factory=dict)

    def with_mode(self, mode: ExecutionMode) -> Hardware:
        """The machine with programs in another execution mode."""
        return replace(self, execution_mode=mode)

    @property
    def launch_seconds(self) -> float:
        """Seconds of an operation beyond its work, in this machine's execution mode."""
        return getattr(self.launch, self.execution_mode.launch)

    def op_seconds(self, kind: OpKind, flops: float, num_bytes: float, dtype: str, backward: bool = False) -> float:
        """Time of one operation on one device: launch, plus the longer of its arithmetic and its memory traffic.

        Args:
            kind: "memory" prices the traffic alone.
            flops: multiplications and additions counted separately.
            num_bytes: read and written.
            dtype: of the operands, such as "float32".
            backward: whether gradients are computed.
        Raises:
            HardwareError: the machine's file has no peak for ``dtype``.
        Error: of the numbers in ``errors``, relative.
        Source: roofline model (Williams, Waterman, Patterson 2009) with a saturating efficiency.
        """
        traffic = self.traffic_seconds(num_bytes, 1)
        if kind == "memory" or flops <= 0:
            return traffic + self.launch_seconds
        if dtype not in self.peak_flops:
            raise HardwareError(
                f"Cost model {self.name} has no peak FLOP/s for {dtype}, which a {kind} of {flops:.3g} FLOPs uses; "
                f"it has {', '.join(self.peak_flops)}. Run the model in one of these."
            )
        efficiencies = self.dtype_efficiency.get((kind, dtype)) or self.efficiency[kind]
        efficiency = efficiencies.backward if backward and efficiencies.backward is not None else efficiencies
        return max(efficiency.seconds(flops, num_bytes, self.peak_flops[dtype]), traffic) + self.launch_seconds

    def collective_seconds(self, kind: CollectiveKind, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Time of one collective over a group of ranks at equal distances, while all groups of that axis have one.

        Args:
            num_bytes: of the whole tensor on one rank: the result of an all-gather, the operand of a reduce-scatter or
                an all-reduce, and n times a rank's part in an all-to-all.
            stride: distance from one rank of the group to the next.
        Raises:
            HardwareError: the group crosses nodes and the machine's file has no network.
        Error: of the numbers in ``errors``; between nodes see `autopar.ir.network`, 10 to 20 % for large tensors.
        Source: latency + traffic / bandwidth of a ring with one message's latency in all, as NVLink was measured.
        """
        if ranks == 1:
            return 0.0
        return self.group_link(kind, ranks, stride).seconds(ring_share(kind, ranks) * num_bytes)

    def group_link(self, kind: CollectiveKind, ranks: int, stride: int) -> Link:
        """The link of a group of ranks at equal distances that starts with a node's first rank.

        Raises:
            HardwareError: the group crosses nodes and the machine's file has no network.
        """
        last = (ranks - 1) * stride
        if last < self.devices_per_node and self.collective is not None:
            return self.node_link(self.collective, kind, ranks)
        port = self.network_between(0, last).group_port(kind, ranks, stride, self.devices_per_node)
        members = members_per_node(ranks, stride, self.devices_per_node)
        if members == 1 or self.collective is None:
            return ring_link(port, None)
        return ring_link(port, self.node_link(self.collective, kind, members))

    def node_link(self, collective: Link, kind: CollectiveKind, ranks: int) -> Link:
        """The link of a group inside a node: measured for its size, interpolated between two measured sizes in
        log₂ ranks, or that of the nearest measured size; ``collective`` if the kind was not measured.

        Error: on 4 × H200 all-reduces by the constants of 2 ranks took 6 to 17 % less than predicted.
        """
        sizes = sorted(size for known, size in self.group_collective if known == kind)
        if not sizes:
            return collective
        below = max((size for size in sizes if size <= ranks), default=sizes[0])
        above = min((size for size in sizes if size >= ranks), default=sizes[-1])
        first, second = self.group_collective[kind, below], self.group_collective[kind, above]
        if below >= above:
            return first
        share = log2(ranks / below) / log2(above / below)
        return Link(
            first.latency_seconds + share * (second.latency_seconds - first.latency_seconds),
            first.bytes_per_second + share * (second.bytes_per_second - first.bytes_per_second),
        )

    def traffic_seconds(self, num_bytes: float, kernels: int = 0) -> float:
        """Time to move bytes between a device and its memory.

        Args:
            kernels: number of kernels that share the bytes. With 0, the bytes are part of a kernel so large that its
            start
                does not count.
        """
        moved = num_bytes + kernels * self.memory_half_bytes if num_bytes else 0.0
        return moved / (self.memory_bytes_per_second * self.memory_efficiency)

    def update_seconds(self, num_bytes: float) -> float:
        """Time of the part of an optimizer's update that reads and writes these bytes."""
        return num_bytes / self.optimizer_bytes_per_second

    def transfer_seconds(self, num_bytes: float, src_rank: int, dst_rank: int) -> float:
        """Time of one message between two ranks while no other rank sends, 0 from a rank to itself.

        Raises:
            HardwareError: the ranks are on different nodes and the machine's file has no network.
        """
        return 0.0 if src_rank == dst_rank else self.message_link(src_rank, dst_rank).seconds(num_bytes)

    def message_link(self, src_rank: int, dst_rank: int, senders: int = 1) -> Link:
        """The link of a message between two ranks; ranks fill nodes in order.

        Args:
            senders: ranks of the sender's node that send at the same time, within the node or out of it as this one.
        Raises:
            HardwareError: the ranks are on different nodes and the machine's file has no network.
        """
        if self.link is not None and src_rank // self.devices_per_node == dst_rank // self.devices_per_node:
            return replace(self.link, bytes_per_second=self.link.bytes_per_second * min(1.0, self.link_ports / senders))
        network = self.network_between(src_rank, dst_rank)
        port = network.message_port(src_rank, dst_rank, senders, self.devices_per_node)
        return Link(port.latency_seconds, port.bytes_per_second)

    def network_between(self, src_rank: int, dst_rank: int) -> Network:
        """The network.

        Raises:
            HardwareError: the machine's file has none.
        """
        if self.network is None:
            raise HardwareError(
                f"Cost model {self.name} describes one node of {self.devices_per_node} devices and no network; ranks "
                f"{src_rank} and {dst_rank} are on different nodes. Use fewer devices or add [network] to its file."
            )
        return self.network

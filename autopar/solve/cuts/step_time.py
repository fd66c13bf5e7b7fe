"""The predicted step of cuts: the simulated pipeline, ports between nodes, and the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import DTYPE_BYTES, Graph
from autopar.ir.hardware import Hardware, ring_share
from autopar.ir.mesh import Mesh
from autopar.ir.microbatches import microbatch_factors
from autopar.ir.network import CollectiveKind, Network
from autopar.ir.plan_parts import ListOrder, ModelInfo
from autopar.schedule.simulate import Pipelined, scheduled_seconds
from autopar.solve.cuts.evaluate import StageCost, one_way_seconds, own_peak_costs, rank_costs
from autopar.solve.cuts.intervals import leaving_edges
from autopar.solve.cuts.problem import Costs, CutProblem, Priced
from autopar.solve.space.constraints import Constraints, hop_link

Ranks = NDArray[np.int64]
Orders = Sequence[ListOrder | None]  # None stands for the order of a schedule that is not searched


@dataclass(frozen=True)
class Setting:
    """Inputs that all candidates of one search share."""

    graph: Graph
    hardware: Hardware
    model: ModelInfo
    constraints: Constraints
    costs: Costs


@dataclass(frozen=True)
class Decision:
    """Everything that a plan decides, and the prices it was decided on."""

    problem: CutProblem
    priced: Priced
    stage_of: tuple[int, ...]

    @property
    def size(self) -> int:
        """Samples of the largest microbatch."""
        return self.problem.cost.batch


@dataclass(frozen=True)
class StepTime:
    """A step: the pipeline, then of the rank for which that takes longest what of the reduction its last backward does
    not hide, and its optimizer. ``port_seconds`` are those of `port_seconds`, which the pipeline takes at least."""

    pipeline_seconds: float
    reduce_seconds: float
    optimizer_seconds: float
    bubble_fraction: float
    port_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.pipeline_seconds + self.reduce_seconds + self.optimizer_seconds


def step_time(setting: Setting, problem: CutProblem, stage_of: Sequence[int]) -> StepTime:
    """The whole step: the simulated pipeline, then the rank with the longest exposed reduction and optimizer.

    The pipeline is simulated with the stages' own times and the batch's own microbatches; every replica's is alike.
    """
    return step_time_of(setting, problem, stage_of, own_peak_costs(problem, stage_of))


def step_time_of(
    setting: Setting, problem: CutProblem, stage_of: Sequence[int], costs: Sequence[StageCost]
) -> StepTime:
    """As `step_time`, from the stages' costs."""
    forward, backward = [c.forward_seconds for c in costs], [c.backward_seconds for c in costs]
    seconds = pipeline_seconds(setting, problem, stage_of, forward, backward, [c.wgrad_seconds for c in costs])
    return with_update(setting, problem, stage_of, costs, seconds)


def with_update(
    setting: Setting, problem: CutProblem, stage_of: Sequence[int], costs: Sequence[StageCost], simulated: float
) -> StepTime:
    """The step of which the simulated pipeline takes so many seconds."""
    sizes = microbatch_factors(setting.constraints.batch // problem.replicas.dp, problem.microbatches)
    busy = (sum(c.forward_seconds for c in costs) + sum(c.backward_seconds for c in costs)) * sum(sizes) / problem.pp
    last = max(rank_costs(problem, costs), key=lambda c: c.exposed_seconds + c.optimizer_seconds)
    ports = port_seconds(setting, problem, stage_of, costs)
    seconds = max(simulated, ports)
    bubble = 1 - busy / seconds if seconds else 0.0
    return StepTime(seconds, last.exposed_seconds, last.optimizer_seconds, bubble, ports)


def pipeline_seconds(
    setting: Setting,
    problem: CutProblem,
    stage_of: Sequence[int],
    forward: Sequence[float],
    backward: Sequence[float],
    wgrad: Sequence[float],
    orders: Orders | None = None,
) -> float:
    """Seconds of the simulated pipeline, from the stages' seconds of a microbatch.

    Args:
        orders: of a searched schedule. Default: those for these cuts.
    """
    sizes = microbatch_factors(setting.constraints.batch // problem.replicas.dp, problem.microbatches)
    transfers = hop_seconds(setting, problem, stage_of)

    def seconds(order: ListOrder | None) -> float:
        pipeline = Pipelined(problem.schedule, problem.placement, order)
        return scheduled_seconds(pipeline, forward, backward, transfers, sizes, wgrad)

    return min(map(seconds, orders or list_orders(problem, forward, backward, wgrad, transfers)))


def hop_seconds(setting: Setting, problem: CutProblem, stage_of: Sequence[int]) -> Mapping[tuple[int, int], float]:
    """Seconds of a microbatch's message by (source stage, destination stage)."""
    sent = messages(problem, stage_of)
    return {pair: transfer_seconds(setting, problem, pair, num_bytes) for pair, num_bytes in sent.items()}


def list_orders(
    problem: CutProblem,
    forward: Sequence[float],
    backward: Sequence[float],
    wgrad: Sequence[float],
    transfers: Mapping[tuple[int, int], float],
) -> Orders:
    """Inputs of list scheduling, where the schedule is searched: the stages' times, and how much ranks hold."""
    if problem.schedule != "searched":
        return (None,)
    hops = [seconds for (src, dst), seconds in transfers.items() if abs(src - dst) == 1]

    def nanoseconds(seconds: Sequence[float]) -> tuple[int, ...]:
        return tuple(round(1e9 * max(0.0, s)) for s in seconds)

    first = ListOrder(
        forward=nanoseconds(forward),
        input_grad=nanoseconds([b - w for b, w in zip(backward, wgrad, strict=True)]),
        wgrad=nanoseconds(wgrad),
        hop=nanoseconds([max(hops, default=0.0)])[0],
        max_in_flight=tuple(
            max(problem.stages, sum(problem.in_flight[s] for s in problem.stages_at(p))) for p in range(problem.pp)
        ),
    )
    return first, replace(first, alternates=False)


def order_of(setting: Setting, problem: CutProblem, stage_of: Sequence[int]) -> ListOrder | None:
    """The order of a searched schedule under some cuts; None under other schedules."""
    costs = own_peak_costs(problem, stage_of)
    forward, backward = [c.forward_seconds for c in costs], [c.backward_seconds for c in costs]
    wgrad, hops = [c.wgrad_seconds for c in costs], hop_seconds(setting, problem, stage_of)
    sizes = microbatch_factors(setting.constraints.batch // problem.replicas.dp, problem.microbatches)

    def seconds(order: ListOrder | None) -> float:
        pipeline = Pipelined(problem.schedule, problem.placement, order)
        return scheduled_seconds(pipeline, forward, backward, hops, sizes, wgrad)

    return min(list_orders(problem, forward, backward, wgrad, hops), key=seconds)


def messages(problem: CutProblem, stage_of: Sequence[int]) -> Mapping[tuple[int, int], int]:
    """Bytes per microbatch from stage to stage, sent straight: activations forward, their gradients backward."""
    sent: dict[tuple[int, int], int] = {}
    for flow in leaving_edges(problem, stage_of):
        src = stage_of[flow.producer]
        for dst in sorted({stage_of[c] for c in flow.consumers} - {src}):
            sent[src, dst] = sent.get((src, dst), 0) + flow.num_bytes
            if flow.requires_grad:
                sent[dst, src] = sent.get((dst, src), 0) + flow.num_bytes
    return sent


def transfer_seconds(setting: Setting, problem: CutProblem, pair: tuple[int, int], num_bytes: int) -> float:
    """Time of what one stage sends to another for each microbatch."""
    if pair not in problem.hops:
        problem.hops[pair] = hop_link(setting.hardware, problem.mesh, *pair, problem.placement)
    return one_way_seconds(num_bytes, problem.hops[pair])


def port_seconds(setting: Setting, problem: CutProblem, stage_of: Sequence[int], costs: Sequence[StageCost]) -> float:
    """Seconds for which the busiest port of a node is in use during the pipeline, in its busier direction: by messages
    between stages, and by what of the exchange between replicas the passes hide. 0 without a pipeline over nodes.

    Error: low by tensor-parallel collectives between nodes, by the first message's wait for its forward and the last
        one's reader, and by uplinks that nodes share.
    """
    hardware, mesh, width = setting.hardware, problem.mesh, problem.tp * problem.replicas.dp
    if (network := network_between(hardware, mesh)) is None:
        return 0.0
    out, into = np.zeros(mesh.devices), np.zeros(mesh.devices)
    sizes = microbatch_factors(setting.constraints.batch // problem.replicas.dp, problem.microbatches)
    for (src, dst), num_bytes in messages(problem, stage_of).items():
        senders, receivers = ranks_between_nodes(hardware, problem, src, dst)
        seconds = num_bytes * sum(sizes) / network.port.bytes_per_second
        out[senders] += seconds
        into[receivers] += seconds
    for position, hidden in enumerate(hidden_ring_seconds(problem, costs, network) if mesh.dp > 1 else ()):
        nodes = (position * width + np.arange(width)).reshape(mesh.dp, mesh.tp) // hardware.devices_per_node
        members = (nodes[:, None] == nodes).sum(axis=1)  # of a rank's group on its node: they share what leaves it
        seconds = (members < mesh.dp) / members * hidden
        for direction in (out, into):
            direction[position * width :][:width] += seconds.ravel()
    return max(network.busiest_port_seconds(direction.tolist(), hardware.devices_per_node) for direction in (out, into))


def network_between(hardware: Hardware, mesh: Mesh) -> Network | None:
    """The network, if there is a pipeline and its ranks are on several nodes."""
    return hardware.network if mesh.devices > hardware.devices_per_node and mesh.pp > 1 else None


def ranks_between_nodes(hardware: Hardware, problem: CutProblem, src: int, dst: int) -> tuple[Ranks, Ranks]:
    """Ranks of a stage that send to another node what they send to a stage, and those that receive it."""
    width = problem.tp * problem.replicas.dp
    senders, receivers = (problem.placement.position(s) * width + np.arange(width) for s in (src, dst))
    crosses = senders // hardware.devices_per_node != receivers // hardware.devices_per_node
    return senders[crosses], receivers[crosses]


def hidden_ring_seconds(problem: CutProblem, costs: Sequence[StageCost], network: Network) -> list[float]:
    """For each position, seconds in which one port carries what of a ring of replicas the passes hide."""
    weights, share = problem.cost.weights, DTYPE_BYTES[problem.reduce_dtype] / DTYPE_BYTES["float32"]
    reduced = sum(w.gradient_bytes for w in weights) * share
    gathered = sum(w.copy_bytes or w.gradient_bytes for w in weights if w.gradient_bytes)
    exchanges: tuple[tuple[CollectiveKind, str, str, float], ...] = (
        ("reduce-scatter" if problem.replicas.zero else "all-reduce", "reduce_seconds", "hiding_seconds", reduced),
        ("all-gather", "gather_seconds", "forward_seconds", gathered),
    )
    found, ranks = [0.0] * problem.pp, rank_costs(problem, costs)
    for kind, exchange, passes, num_bytes in exchanges:
        if whole := sum(getattr(w, exchange) for w in weights):
            rate = network.collectives.get(kind, network.port).bytes_per_second
            # of a second of the exchange
            carried = ring_share(kind, problem.replicas.group_size) * num_bytes / rate / whole
            hidden = (rank.total(exchange) - rank.exposed_part(exchange, passes) for rank in ranks)
            found = [known + carried * seconds for known, seconds in zip(found, hidden)]
    return found

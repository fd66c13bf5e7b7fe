"""From an assignment of groups to a plan: ranges of operations, rows per stage, predicted step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.cost_graph import CostGraph
from autopar.ir.graph import DTYPE_BYTES, Graph
from autopar.ir.hardware import Hardware, ring_share
from autopar.ir.layout import REPLICATED, compressed
from autopar.ir.mesh import Mesh
from autopar.ir.microbatches import microbatch_factors
from autopar.ir.network import CollectiveKind, Network
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import (
    Alternative,
    HardwareInfo,
    Message,
    ModelInfo,
    Prediction,
    SolverInfo,
    Stage,
    StageMemory,
    StageRecompute,
    ZeroStage,
)
from autopar.schedule.simulate import scheduled_seconds
from autopar.solve.cuts.evaluate import (
    StageCost,
    one_way_seconds,
    own_peak_costs,
    rank_costs,
    stage_costs,
    stages_holding,
)
from autopar.solve.cuts.intervals import leaving_edges
from autopar.solve.cuts.problem import Costs, CutProblem, Priced
from autopar.solve.space.constraints import Constraints, hop_link

Ranks = NDArray[np.int64]


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
    zero: ZeroStage
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


@dataclass(frozen=True)
class OpRanges:
    """Stage s runs the operations ``starts[s]`` up to the next start, but for ``exceptions``."""

    starts: tuple[int, ...]
    exceptions: Mapping[str, int]


def make_plan(
    setting: Setting,
    decision: Decision,
    solver: SolverInfo,
    alternatives: tuple[Alternative, ...],
    bound_by: str,
    seconds_without_limit: float | None,
) -> Plan:
    """The plan in which every group runs on its stage."""
    problem, priced, stage_of = decision.problem, decision.priced, decision.stage_of
    ops, costs = setting.graph.ops, stage_costs(problem, stage_of)
    found = op_ranges(setting.graph, problem.cost, stage_of)
    step = step_time(setting, problem, stage_of)
    ends = (*found.starts[1:], len(ops))
    sent = messages(problem, stage_of)
    numel = {w.name: w.numel for w in setting.graph.weights if w.kind == "parameter"}
    storage = {name: str(layout) for name, layout in priced.storage.items() if layout != REPLICATED}
    return Plan(
        model=setting.model,
        batch=setting.constraints.batch,
        mesh=problem.mesh,
        schedule=problem.schedule,
        chunks=problem.chunks,
        microbatches=problem.microbatches,
        stages=tuple(
            Stage(
                first=ops[found.starts[s]].name,
                last=ops[ends[s] - 1].name,
                ranks=problem.mesh.ranks(s),
                params=sum(numel.get(w.name, 0) for w in problem.cost.weights if s in stages_holding(w, stage_of)),
                forward_seconds=c.forward_seconds,
                backward_seconds=c.backward_seconds,
                send_bytes=sum(n for (src, dst), n in sent.items() if src == s < dst and (dst - s) % problem.pp),
                peak_bytes=c.memory_bytes,
                recompute=recompute_level(problem, stage_of, s, c.recomputed_below),
                collective_seconds=c.collective_seconds,
                optimizer_seconds=c.optimizer_seconds,
                memory=StageMemory(c.weight_bytes, c.held_bytes, c.transient_bytes, c.buffer_bytes),
                num_segments=len(problem.cost.segments_on(stage_of, s)),
                recompute_seconds=c.recompute_seconds,
            )
            for s, c in enumerate(costs)
        ),
        prediction=Prediction(
            step_seconds=step.seconds,
            samples_per_second=setting.constraints.batch / step.seconds if step.seconds else 0.0,
            bubble_fraction=step.bubble_fraction,
            peak_bytes=tuple(
                c.memory_bytes for p, c in enumerate(rank_costs(problem, costs)) for _ in problem.mesh.ranks(p)
            ),
            reduce_seconds=step.reduce_seconds,
            optimizer_seconds=step.optimizer_seconds,
            port_seconds=step.port_seconds,
        ),
        solver=solver,
        hardware=HardwareInfo(
            name=setting.hardware.name,
            device=setting.hardware.device,
            link=setting.hardware.link_name,
            memory_bytes=setting.hardware.memory_bytes,
            device_type=setting.hardware.device_type,
        ),
        exceptions=found.exceptions,
        shardings=compressed(storage, [w.name for w in setting.graph.weights]),
        strategies=compressed(priced.strategies, [op.name for op in ops]),
        zero=decision.zero,
        blocks=priced.blocks(),
        alternatives=alternatives,
        bound_by=bound_by,
        seconds_without_limit=seconds_without_limit,
        messages=tuple(
            Message(src, dst, num_bytes, transfer_seconds(setting, problem, (src, dst), num_bytes))
            for (src, dst), num_bytes in sorted(sent.items())
        ),
    )


def recompute_level(problem: CutProblem, stage_of: Sequence[int], stage: int, below: int) -> StageRecompute:
    """The recomputation of a stage whose segments with a number below the given one recompute."""
    segments = problem.cost.segments_on(stage_of, stage)
    count = sum(own < below for own in segments)
    return count if 0 < count < len(segments) else "all" if below else "none"


def op_ranges(graph: Graph, cost: CostGraph, stage_of: Sequence[int]) -> OpRanges:
    """The ranges of operations, one per stage, from which the fewest operations are excepted."""
    home = {op: stage_of[g] for g, group in enumerate(cost.groups) for op in group.ops}
    stages, size = max(stage_of) + 1, len(graph.ops)
    # best[i]: most operations at home among the first i, if the stages so far end there; entered[s][i]: where s starts.
    best: list[float] = [0.0] + [float("-inf")] * size
    entered: list[list[int]] = []
    for s in range(stages):
        reached, starts = [float("-inf")] * (size + 1), [0] * (size + 1)
        running, start = float("-inf"), 0
        for i, op in enumerate(graph.ops):
            if best[i] >= running:
                running, start = best[i], i
            running += home[op.name] == s
            reached[i + 1], starts[i + 1] = running, start
        best = reached
        entered.append(starts)
    bounds = [size]
    for starts in reversed(entered):
        bounds.append(starts[bounds[-1]])
    edges = tuple(reversed(bounds))
    exceptions = {
        op.name: home[op.name] for s in range(stages) for op in graph.ops[edges[s] : edges[s + 1]] if home[op.name] != s
    }
    return OpRanges(edges[:-1], exceptions)


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
        problem.hops[pair] = hop_link(setting.hardware, problem.mesh, *pair, problem.chunks)
    return one_way_seconds(num_bytes, problem.hops[pair])


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
    seconds = pipeline_seconds(setting, problem, stage_of, forward, backward)
    return with_update(setting, problem, stage_of, costs, seconds)


def with_update(
    setting: Setting, problem: CutProblem, stage_of: Sequence[int], costs: Sequence[StageCost], simulated: float
) -> StepTime:
    """The step of which the simulated pipeline takes so many seconds."""
    sizes = microbatch_factors(setting.constraints.batch // problem.dp, problem.microbatches)
    busy = (sum(c.forward_seconds for c in costs) + sum(c.backward_seconds for c in costs)) * sum(sizes) / problem.pp
    last = max(rank_costs(problem, costs), key=lambda c: c.exposed_seconds + c.optimizer_seconds)
    ports = port_seconds(setting, problem, stage_of, costs)
    seconds = max(simulated, ports)
    bubble = 1 - busy / seconds if seconds else 0.0
    return StepTime(seconds, last.exposed_seconds, last.optimizer_seconds, bubble, ports)


def port_seconds(setting: Setting, problem: CutProblem, stage_of: Sequence[int], costs: Sequence[StageCost]) -> float:
    """Seconds for which the busiest port of a node is in use during the pipeline, in its busier direction: by messages
    between stages, and by what of the exchange between replicas the passes hide. 0 without a pipeline over nodes.

    Error: low by tensor-parallel collectives between nodes, by the first message's wait for its forward and the last
        one's reader, and by uplinks that nodes share.
    """
    hardware, mesh, width = setting.hardware, problem.mesh, problem.tp * problem.dp
    if (network := network_between(hardware, mesh)) is None:
        return 0.0
    out, into = np.zeros(mesh.devices), np.zeros(mesh.devices)
    sizes = microbatch_factors(setting.constraints.batch // problem.dp, problem.microbatches)
    for (src, dst), num_bytes in messages(problem, stage_of).items():
        senders, receivers = ranks_between_nodes(hardware, mesh, src, dst)
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


def ranks_between_nodes(hardware: Hardware, mesh: Mesh, src: int, dst: int) -> tuple[Ranks, Ranks]:
    """Ranks of a stage that send to another node what they send to a stage, and those that receive it."""
    width = mesh.tp * mesh.dp
    senders, receivers = (s % mesh.pp * width + np.arange(width) for s in (src, dst))
    crosses = senders // hardware.devices_per_node != receivers // hardware.devices_per_node
    return senders[crosses], receivers[crosses]


def hidden_ring_seconds(problem: CutProblem, costs: Sequence[StageCost], network: Network) -> list[float]:
    """For each position, seconds in which one port carries what of a ring of replicas the passes hide."""
    weights, share = problem.cost.weights, DTYPE_BYTES[problem.reduce_dtype] / DTYPE_BYTES["float32"]
    reduced = sum(w.gradient_bytes for w in weights) * share
    gathered = sum(w.copy_bytes or w.gradient_bytes for w in weights if w.gradient_bytes)
    exchanges: tuple[tuple[CollectiveKind, str, str, float], ...] = (
        ("reduce-scatter" if problem.zero else "all-reduce", "reduce_seconds", "backward_seconds", reduced),
        ("all-gather", "gather_seconds", "forward_seconds", gathered),
    )
    found, ranks = [0.0] * problem.pp, rank_costs(problem, costs)
    for kind, exchange, passes, num_bytes in exchanges:
        if whole := sum(getattr(w, exchange) for w in weights):
            rate = network.collectives.get(kind, network.port).bytes_per_second
            carried = ring_share(kind, problem.dp) * num_bytes / rate / whole  # of a second of the exchange
            found = [known + carried * rank.hidden_seconds(exchange, passes) for known, rank in zip(found, ranks)]
    return found


def pipeline_seconds(
    setting: Setting, problem: CutProblem, stage_of: Sequence[int], forward: Sequence[float], backward: Sequence[float]
) -> float:
    """Seconds of the simulated pipeline, from the stages' seconds of a microbatch."""
    sent = messages(problem, stage_of)
    sizes = microbatch_factors(setting.constraints.batch // problem.dp, problem.microbatches)
    transfers = {pair: transfer_seconds(setting, problem, pair, num_bytes) for pair, num_bytes in sent.items()}
    return scheduled_seconds(problem.schedule, problem.pp, forward, backward, transfers, sizes)

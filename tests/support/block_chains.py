"""Chains of blocks with costs given by a test, and the plans that the search finds for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost.hardware.load import load_hardware
from autopar.ir.cost_graph import CostGraph, Group, ResidentTensor, TensorEdge
from autopar.ir.graph import Graph, Op, Ref, Value, Weight
from autopar.ir.hardware import Hardware, Link
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import BlockSharding, Collective, ModelInfo, Replicas
from autopar.ir.tensor_axes import TensorAxes, num_ranks
from autopar.solve.cuts.problem import Priced
from autopar.solve.search import Refine, search
from autopar.solve.space.constraints import Constraints

GIB = 2**30
# No reserved memory, and no copy of inputs: on CPU they stay where the caller has them.
MACHINE = replace(
    load_hardware("h200-nvlink"), device_type="cpu", reserve_bytes=0, memory_bytes=100 * GIB, link=Link(1e-4, 1e11)
)


def op(name: str, reads: Sequence[str], weights: Sequence[str] = ()) -> Op:
    args = tuple(Ref(r) for r in (*reads, *weights))
    module = name.rpartition(".")[0]
    return Op(name, "aten.linear.default", args, (), (Value(f"{name}:out", (4,), "float32", (1,), True),), module)


def graph_of(ops: Sequence[Op], colocated: tuple[tuple[str, ...], ...] = ()) -> Graph:
    weights = {
        r: Weight(r, "parameter", (2, 2), "float32", True, (r,)) for o in ops for r in o.reads if r.startswith("w_")
    }
    return Graph(
        model="net",
        mode="train",
        batch=1,
        inputs=(Value("x", (4,), "float32", (1,)),),
        weights=tuple(weights.values()),
        ops=tuple(ops),
        outputs=(Ref(ops[-1].outputs[0].name),),
        leaves=(Ref("x"),),
        in_spec=None,
        out_spec=None,
        colocated=colocated,
    )


def model_of(graph: Graph) -> ModelInfo:
    return ModelInfo(graph.model, graph.fingerprint, graph.num_params, ())


def priced(graph: Graph, groups: Sequence[Sequence[int]], milliseconds: Sequence[float], batch: int,
           saved: float = 0.0, weight: float = 0.0) -> CostGraph:  # fmt: skip
    """Cost graph whose groups are the given sets of operation indices.

    Args:
        milliseconds: forward time of each group for one sample.
        saved: saved activations of a group for one sample, GiB.
        weight: each weight, GiB.
    """
    group_of = {graph.ops[i].name: g for g, members in enumerate(groups) for i in members}
    loss = len(groups)
    readers: dict[str, set[int]] = {}
    for o in graph.ops:
        for r in o.reads:
            readers.setdefault(r, set()).add(group_of[o.name])
    readers.setdefault(graph.ops[-1].outputs[0].name, set()).add(loss)
    edges = []
    for o in graph.ops:
        value, producer = o.outputs[0], group_of[o.name]
        consumers = tuple(sorted(readers.get(value.name, set()) - {producer}))
        if consumers:
            edges.append(TensorEdge(value.name, producer, consumers, value.num_bytes * batch, True))
    named = [graph.ops[members[0]] for members in groups]
    return CostGraph(
        graph.model,
        batch,
        (
            *(
                Group(o.name, tuple(graph.ops[i].name for i in members), o.module, t * batch * 1e-3,
                      2 * t * batch * 1e-3, t, int(saved * batch * GIB))
                for o, members, t in zip(named, groups, milliseconds)
            ),
            Group("loss", (), ""),
        ),
        tuple(edges),
        tuple(
            ResidentTensor(w.name, int(weight * GIB), tuple(sorted(readers[w.name])), w.numel, 1e-3)
            for w in graph.weights
        ),
        colocated=tuple(tuple(sorted({group_of[n] for n in names})) for names in graph.colocated),
    )  # fmt: skip


def blocks(count: int) -> Graph:
    """Chain of blocks, each an attention and an MLP."""
    ops, value = [], "x"
    for b in range(count):
        for part in ("attn.linear", "mlp.linear"):
            ops.append(op(f"blocks.{b}.{part}", [value], [f"w_{b}{part[0]}"]))
            value = ops[-1].outputs[0].name
    return graph_of(ops)


@dataclass(frozen=True)
class Unsharded:
    """Costs of a model that has no sharding and whose replicas reduce gradients in no time."""

    cost_at: Callable[[int], CostGraph]

    def priced(
        self, axes: TensorAxes, replicas: Replicas, size: int, microbatches: int, memory_level: int
    ) -> Priced | None:
        cost = self.cost_at(size)
        return Priced(cost, notes=("attention has 3 heads", "197 tokens")) if memory_level == 0 else None

    def keeping(self, priced: Priced, axes: TensorAxes, replicas: Replicas, size: int, kept: frozenset[str]) -> Priced:
        raise AssertionError("no weight belongs to a block")

    def floor_seconds(self, axes: TensorAxes, size: int) -> float:
        return sum(g.seconds for g in self.cost_at(size).groups) / num_ranks(axes)

    def bound_seconds(self, axes: TensorAxes, size: int) -> float:
        return sum(g.seconds for g in self.cost_at(size).groups)

    proven_seconds = bound_seconds


def pipeline(cost_at: Callable[[int], CostGraph], graph: Graph, hardware: Hardware, asked: Constraints) -> Plan:
    """Plan with one stage on every device."""
    return search(Unsharded(cost_at), graph, hardware, replace(asked, pp=asked.devices), model_of(graph))


def plan_for(graph: Graph, constraints: Constraints, hardware: Hardware = MACHINE, **memory: float) -> Plan:
    """Plan with one stage on every device and one group per operation, each of 1 ms a sample."""
    groups = [[i] for i in range(len(graph.ops))]
    times = [1.0] * len(groups)
    asked = replace(constraints, recompute="none")
    return pipeline(lambda b: priced(graph, groups, times, b, **memory), graph, hardware, asked)


@dataclass(frozen=True)
class Splittable:
    """Costs of a model that tensor-parallel ranks share evenly.

    Attributes:
        overhead: collectives and repeated work, as a share of a group's time; each memory level adds it once more.
        reduce: seconds of the reduction of all gradients over replicas.
        levels: number of memory levels; each halves the bytes of weights, as each ZeRO stage does, and ranks share them
            evenly at the last one.
        able: tensor-parallel sizes that can be used.
    """

    cost_at: Callable[[int], CostGraph]
    overhead: float = 0.1
    reduce: float = 0.0
    levels: int = 1
    able: tuple[int, ...] = (2, 4, 8)

    def priced(
        self, axes: TensorAxes, replicas: Replicas, size: int, microbatches: int, memory_level: int
    ) -> Priced | None:
        tp = num_ranks(axes)
        if memory_level >= (self.levels if tp > 1 else 1):
            return None
        whole = self.cost_at(size)
        if tp > 1 and tp not in self.able:
            return Priced(whole, notes=("attention has 4 heads", "197 tokens"))
        extra = self.overhead * (memory_level + 1) * (tp > 1)
        groups = tuple(
            replace(g, forward_seconds=(1 + extra) * g.forward_seconds / tp,
                    backward_seconds=(1 + extra) * g.backward_seconds / tp,
                    forward_collective_seconds=extra * g.forward_seconds / tp,
                    backward_collective_seconds=extra * g.backward_seconds / tp, saved_bytes=g.saved_bytes // tp)
            for g in whole.groups
        )  # fmt: skip
        share = tp * 2 ** (replicas.zero + (memory_level + 1 - self.levels if tp > 1 else 0))
        weights = tuple(
            replace(w, num_bytes=int(w.num_bytes / share),
                    optimizer_seconds=w.optimizer_seconds / tp / replicas.sharing,
                    reduce_seconds=self.reduce / len(whole.weights) / tp * (replicas.dp > 1))
            for w in whole.weights
        )  # fmt: skip
        half = extra * sum(g.seconds for g in whole.groups) / tp / 2
        collectives = tuple(Collective("fc", "all-reduce", way, 2**20, half) for way in ("forward", "backward"))
        return Priced(
            cost=replace(whole, groups=groups, weights=weights),
            strategies={whole.groups[0].name: "n"} if tp > 1 else {},
            storage={whole.weights[0].name: Layout.parse("tp:0")} if tp > 1 else {},
            blocks=lambda: (BlockSharding("blocks.*", 1, {"attn": f"rows / {tp}"}, collectives),) if tp > 1 else (),
        )

    def keeping(self, priced: Priced, axes: TensorAxes, replicas: Replicas, size: int, kept: frozenset[str]) -> Priced:
        raise AssertionError("no weight belongs to a block")

    def floor_seconds(self, axes: TensorAxes, size: int) -> float:
        return sum(g.seconds for g in self.cost_at(size).groups) / num_ranks(axes)

    def bound_seconds(self, axes: TensorAxes, size: int) -> float:
        tp = num_ranks(axes)
        return sum(g.seconds for g in self.cost_at(size).groups) / (tp if tp == 1 or tp in self.able else 1)

    proven_seconds = bound_seconds


def meshed(asked: Constraints, hardware: Hardware = MACHINE, depth: int = 4, memory: Mapping[str, float] = {},
           refine: Refine | None = None, **costs: Any) -> Plan:  # fmt: skip
    """Plan for a chain of blocks under the costs of `Splittable`."""
    graph = blocks(depth)
    groups = [[i] for i in range(len(graph.ops))]

    def cost_at(batch: int) -> CostGraph:
        return priced(graph, groups, [1.0] * len(groups), batch, **memory)

    asked = replace(asked, recompute="none")
    return search(Splittable(cost_at, **costs), graph, hardware, asked, model_of(graph), refine)


def listed(plan: Plan) -> list[tuple[str, int | None, str]]:
    """Label, step time in milliseconds and note of every alternative."""
    return [
        (a.label, None if a.step_seconds is None else round(a.step_seconds * 1e3), a.note) for a in plan.alternatives
    ]

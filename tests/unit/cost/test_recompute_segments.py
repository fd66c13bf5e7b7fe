"""Where segments begin: against brute force, and on real models."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples

from autopar.cost.groups.recompute_segments import MAX_EXCESS, segment_starts
from autopar.cost.ops.op_stats import GraphStats, OpStats, graph_stats
from autopar.ir.graph import Graph, Op, Ref, Value
from autopar.ops.registry import Operand
from autopar.trace.trace import trace

NOTHING = OpStats(0, 0, True, (), (), (), 0, (), (Operand((1,), "int8", (1,), True),))


def value(name: str, num_bytes: int) -> Value:
    return Value(name, (num_bytes,), "int8", (1,), True)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Graph, GraphStats]:
    """Operations that read the one before them and sometimes an earlier one, views among them."""
    size, number = draw(st.integers(1, 9)), st.integers(0, 9)
    ops, facts = [], {}
    names = ["x"]
    for i in range(size):
        reads = tuple(dict.fromkeys([names[-1], draw(st.sampled_from(names))]))
        made = value(f"v{i}", draw(number))
        ops.append(Op(f"v{i}", "aten.relu.default", tuple(map(Ref, reads)), (), (made,), ""))
        facts[f"v{i}"] = replace(
            NOTHING,
            saved_operands=tuple(k for k in range(len(reads)) if draw(st.booleans())),
            saved_outputs=(0,) * draw(st.booleans()),
            saved_bytes=draw(number),
            aliases=((0, 0),) if draw(st.integers(0, 4)) == 0 else (),
        )
        names.append(f"v{i}")
    together = ()
    if size > 2 and draw(st.integers(0, 3)) == 0:
        together = (tuple(f"v{i}" for i in sorted(draw(st.sets(st.integers(0, size - 1), min_size=2, max_size=2)))),)
    graph = Graph(
        "chain", "train", 1, (value("x", 5),), (), tuple(ops), (Ref(names[-1]),), (Ref("x"),), None, None, together
    )
    return graph, GraphStats(facts)


def memory(graph: Graph, facts: GraphStats, starts: tuple[int, ...]) -> int:
    """Bytes that stay between segments and that the largest one saves, by the definition."""
    root: dict[str, str] = {}
    for op in graph.ops:
        for _, k in facts.ops[op.name].aliases:
            root[op.name] = root.get(op.reads[k], op.reads[k])
    segment_of = {op.name: sum(start <= i for start in starts) for i, op in enumerate(graph.ops)}
    kept = {root.get(name, name) for op in graph.ops for name in op.reads}
    kept = {
        storage
        for storage in kept - {"x"}
        if any(
            segment_of[op.name] != segment_of[storage] and storage in {root.get(name, name) for name in op.reads}
            for op in graph.ops
        )
    }
    saved = dict.fromkeys(range(len(starts) + 1), 0)
    found = set()
    for op in graph.ops:
        own, here = facts.ops[op.name], segment_of[op.name]
        saved[here] += own.saved_bytes
        for name in [op.reads[k] for k in own.saved_operands] + [op.name] * len(own.saved_outputs):
            storage = root.get(name, name)
            if storage != "x" and segment_of[storage] == here and storage not in found:
                found.add(storage)
                saved[here] += graph.values[storage].num_bytes
    return sum(graph.values[storage].num_bytes for storage in kept) + max(saved.values())


def narrow(graph: Graph, facts: GraphStats) -> list[int]:
    """Positions where neither neighbour has fewer bytes alive; none inside what must stay together."""
    root: dict[str, str] = {}
    for op in graph.ops:
        for _, k in facts.ops[op.name].aliases:
            root[op.name] = root.get(op.reads[k], op.reads[k])
    place = {op.name: i for i, op in enumerate(graph.ops)} | {"x": -1}

    def alive(i: int) -> int:
        late = {root.get(name, name) for op in graph.ops[i:] for name in op.reads}
        return sum(graph.values[storage].num_bytes for storage in late if place[storage] < i)

    spans = [sorted(place[name] for name in names) for names in graph.colocated]
    open_ = [i for i in range(1, len(graph.ops)) if not any(span[0] < i <= span[-1] for span in spans)]
    sizes = [float("inf"), *map(alive, open_), float("inf")]
    return [i for k, i in enumerate(open_, 1) if sizes[k] <= min(sizes[k - 1], sizes[k + 1])]


@given(chains())
@settings(max_examples=examples(300))
def test_segments_need_the_least_memory(chain: tuple[Graph, GraphStats]) -> None:
    graph, facts = chain
    places = narrow(graph, facts)
    best = min(memory(graph, facts, (0, *c)) for n in range(len(places) + 1) for c in combinations(places, n))
    found = segment_starts(graph, facts)
    assert found[0] == 0 and {*found[1:]} <= {*places}
    assert memory(graph, facts, found) <= best / (1 - MAX_EXCESS) + 1e-9


def test_a_vit_has_a_segment_for_each_block() -> None:
    with torch.device("meta"):
        model, x = timm.create_model("vit_small_patch16_224"), torch.empty(8, 3, 224, 224)
    graph = trace(model, (x,))
    starts = [graph.ops[i].name for i in segment_starts(graph, graph_stats(graph))]
    assert starts == ["patch_embed.proj.conv2d", *(f"blocks.{i}.norm2.layer_norm" for i in range(12))]

"""Pipeline split: from a graph and the stage of each operation to one program per stage.

A tensor goes directly from the stage that makes it to each stage that reads it. Each stage receives the model inputs
that it reads. The last stage gathers the model's outputs. So skips, fan-out and several outputs need no special case.

Eval mode has other operations than training (no drop path). `follow_plan` keeps those that the plan knows on their
stage. Tied parameters live on every stage that reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from autopar.errors import TraceError
from autopar.ir.graph import Graph, Weight, refs
from autopar.ir.program import Edge, Program


def split(graph: Graph, stage_of: Mapping[str, int], num_stages: int) -> tuple[Program, ...]:
    """One program per stage.

    Args:
        stage_of: stage of every traced operation in ``graph``, at least the stage of each operation that it reads from.
            An operation that sharding inserted runs on the stage of its home.
    """
    last = num_stages - 1
    stage_of = {op.name: stage_of[op.home or op.name] for op in graph.ops}
    readers: dict[str, set[int]] = {}
    for op in graph.ops:
        for name in op.reads:
            readers.setdefault(name, set()).add(stage_of[op.name])
    for name in refs(graph.outputs):
        readers.setdefault(name, set()).add(last)
    made_on = {value.name: stage_of[op.name] for op in graph.ops for value in op.outputs}
    edges = [
        Edge(graph.values[name], source, reader)
        for name, source in made_on.items()
        for reader in sorted(readers.get(name, ()))
        if reader != source
    ]
    assert all(e.src < e.dst for e in edges), "an operation reads from a later stage"
    reachable = reachable_outputs(graph) if graph.mode == "train" else {}
    ops = [tuple(op for op in graph.ops if stage_of[op.name] == stage) for stage in range(num_stages)]
    return tuple(
        Program(
            stage=stage,
            mode=graph.mode,
            batch=graph.batch,
            inputs=tuple(v for v in graph.inputs if stage in readers.get(v.name, ())),
            receives=tuple(e for e in edges if e.dst == stage),
            weights=tuple(w for w in graph.weights if stage in readers.get(w.name, ())),
            ops=ops[stage],
            sends=tuple(e for e in edges if e.src == stage),
            outputs=graph.outputs if stage == last else (),
            out_spec=graph.out_spec if stage == last else None,
            output_boundaries=output_boundaries([reachable[op.name] for op in ops[stage]]) if reachable else (),
        )
        for stage in range(num_stages)
    )


def reachable_outputs(graph: Graph) -> Mapping[str, Set[str]]:
    """For each operation, the model outputs whose gradient reaches it."""
    reached: dict[str, Set[str]] = {name: {name} for name in refs(graph.outputs)}
    by_op: dict[str, Set[str]] = {}
    for op in reversed(graph.ops):
        own: Set[str] = {name for v in op.outputs if v.requires_grad for name in reached.get(v.name, ())}
        by_op[op.name] = own
        for name in op.reads:
            reached[name] = reached.get(name, set()) | own
    return by_op


def output_boundaries(reachable: Sequence[Set[str]]) -> tuple[int, ...]:
    """Indices where a run of operations that reach the same outputs ends; operations that reach none fit any run.

    Args:
        reachable: outputs that each operation reaches, from `reachable_outputs`.
    """
    boundaries: list[int] = []
    current: Set[str] = set()
    for position, outputs in enumerate(reachable):
        if outputs and current and outputs != current:
            boundaries.append(position)
        current = outputs or current
    return tuple(boundaries)


def follow_plan(
    graph: Graph, reference: Mapping[str, int], held_on: Mapping[str, tuple[int, ...]]
) -> Mapping[str, int]:
    """The stage of each operation of another trace of the same model: eval mode, or another input shape.

    An operation with a name of the planned graph keeps that stage, if the stage holds its weights. A numbered name such
    as ``add_1`` can be another operation in another mode. Any other operation goes where its weights and inputs are. No
    operation goes before one that it reads from.

    Args:
        reference: stage of each operation of the planned training graph.
        held_on: stages that hold each weight in the plan.
    """
    stage_of: dict[str, int] = {}
    pinned = {name: min(reference[n] for n in names if n in reference) for names in graph.colocated
              for name in names if any(n in reference for n in names)}  # fmt: skip
    for op in graph.ops:
        sources = [stage_of[graph.producer[r].name] for r in op.reads if r in graph.producer]
        weights = [held_on[r] for r in op.reads if r in held_on]
        known = pinned.get(op.name, reference.get(op.name))
        elsewhere = [on[0] for on in weights]
        wanted = [known] if known is not None and all(known in on for on in weights) else elsewhere
        stage_of[op.name] = max([*sources, *wanted], default=0)
    return stage_of


def weight_stages(graphs: Iterable[tuple[Graph, tuple[Program, ...]]]) -> Mapping[str, tuple[int, ...]]:
    """The stages that hold each weight: all stages whose programs read it, else the last one.

    Args:
        graphs: each trace of the model with its programs.
    Raises:
        TraceError: a weight that training updates in place is read on a second stage, whose copy would be stale.
    """
    stages: dict[str, set[int]] = {}
    mutated: dict[str, Weight] = {}
    for graph, programs in graphs:
        for weight in graph.weights:
            stages.setdefault(weight.name, set())
        for program in programs:
            for weight in program.weights:
                stages[weight.name].add(program.stage)
            mutated |= {m: graph.weight[m] for op in program.ops for m in op.mutates}
        last = len(programs) - 1
    for name in mutated:
        if len(stages[name]) > 1:
            raise TraceError(
                f"Buffer {name} is updated in training on one stage and read on another (stages "
                f"{sorted(stages[name])}). Pin both uses to one stage with --pin, or use fewer stages."
            )
    return {name: tuple(sorted(on)) or (last,) for name, on in stages.items()}

"""Activations under each number of recomputed segments: by hand, and what generated programs save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import timm
import torch
from support.effort import only
from support.models import TwoHeads, tiny_vit
from support.priced import price
from torch import nn

from autopar.api.planning.costs import MeasuredConfig, PlanCosts
from autopar.api.recompute import local_segments
from autopar.codegen.emit import graph_module
from autopar.codegen.split import split
from autopar.cost.groups.segment_memory import with_segments
from autopar.cost.hardware.load import load_hardware
from autopar.cost.ops.op_cost import Pricing
from autopar.cost.ops.op_stats import graph_stats
from autopar.ir.activation import Activation, Keeper
from autopar.ir.cost_graph import CostGraph, Group, ResidentTensor, TensorEdge
from autopar.trace.trace import trace, weight_tensors

# -- by hand -------------------------------------------------------------------------------------------------------


def test_what_groups_keep_and_restore() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3)))
    graph = trace(model, (torch.randn(4, 8),))
    facts, hardware = graph_stats(graph), load_hardware("cpu-generic")
    cost = with_segments(price(graph, facts, hardware, 4), Pricing(graph, facts, hardware, 4), (0, 3, 6))
    narrow_bytes, wide_bytes = 4 * 8 * 4, 4 * 32 * 4
    names = [op.name for op in graph.ops]
    per_block = [(narrow_bytes, 0), (0, wide_bytes), (0, wide_bytes)]  # linear; relu, which saves its output; linear
    assert [g.ops for g in cost.groups] == [*((name,) for name in names), ()]
    assert [(g.kept_bytes, g.segment_bytes) for g in cost.groups] == [*per_block * 3, (0, 0)]
    assert [g.segment for g in cost.groups] == [0, 0, 0, 1, 1, 1, 2, 2, 2, -1]
    again = cost.recomputed
    assert [g.saved_bytes for g in again.groups] == [g.kept_bytes for g in cost.groups]
    assert again.groups[0].backward_seconds == pytest.approx(cost.groups[0].seconds)
    assert again.saved == ()
    first = cost.recomputed_up_to(1)
    assert first.groups[:3] == again.groups[:3] and first.groups[3:] == cost.groups[3:]


def test_what_no_segment_holds_is_saved_in_any_case() -> None:
    graph = trace(TwoHeads(), (torch.randn(4, 8),))
    facts, hardware = graph_stats(graph), load_hardware("cpu-generic")
    once = price(graph, facts, hardware, 4)
    cost = with_segments(once, Pricing(graph, facts, hardware, 4), (len(graph.ops),))  # no segment at all
    assert {g.segment for g in cost.groups} == {-1}
    for own in (cost, cost.recomputed):
        assert [g.saved_bytes for g in own.groups] == [g.saved_bytes for g in once.groups]
        assert [(a.num_bytes, a.groups) for a in own.saved] == [(a.num_bytes, a.groups) for a in once.saved]
        assert sum(g.backward_seconds for g in own.groups) == sum(g.backward_seconds for g in once.groups)


def chain(segments: Sequence[tuple[int, ...]], saved: Sequence[ResidentTensor] = ()) -> CostGraph:
    """Groups that save 10 bytes, keep 2, and restore 5, 10, … bytes of their segment."""
    groups: list[Group] = []
    for i, own in enumerate(segments):
        restored = 5 * sum(own[0] == other[0] for other in segments[: i + 1])
        groups.append(Group(f"g{i}", (f"g{i}",), "", 1.0, 2.0, saved_bytes=10, transient_bytes=1, kept_bytes=2,
                            segment_bytes=restored, segments=own))  # fmt: skip
    edges = tuple(TensorEdge(f"v{i}", i, (i + 1,), 1, True, (i,)) for i in range(len(groups)))
    return CostGraph("chain", 1, (*groups, Group("loss", (), "", segments=())), edges, saved=tuple(saved))


def test_a_group_recomputes_where_its_segment_does() -> None:
    shared = ResidentTensor("a", 7, (0, 1, 3))
    cost = chain([(0,), (0,), (1,), (1,), (2,)], [shared]).recomputed_up_to(1)
    assert [g.saved_bytes for g in cost.groups] == [2, 2, 10, 10, 10, 0]
    assert [g.backward_seconds for g in cost.groups] == [3.0, 3.0, 2.0, 2.0, 2.0, 0.0]
    assert [g.transient_bytes for g in cost.groups] == [6, 11, 1, 1, 1, 0]
    assert cost.saved == (replace(shared, groups=(3,)),)
    assert [edge.saved_by for edge in cost.edges] == [(), (), (2,), (3,), (4,)]
    assert chain([(0,), (1,)]).recomputed_up_to(0) == chain([(0,), (1,)])
    assert chain([(0,)] * 4, [shared]).recomputed.saved == ()


def test_what_a_checkpoint_and_a_later_group_keep_counts_once() -> None:
    activation = Activation((Keeper(0, 0), Keeper(3, 2)), Keeper(1, 1))  # made in segment 0, read in 1, saved in 2
    cost = chain([(0,), (1,), (1,), (2,)], [ResidentTensor("a", 2, (0, 3), activation=activation)])
    kept = {level: [tensor.groups for tensor in cost.recomputed_up_to(level).saved] for level in range(4)}
    assert kept == {0: [(0, 3)], 1: [(3,)], 2: [(1, 3)], 3: [(1,)]}
    saved = [[g.saved_bytes for g in cost.recomputed_up_to(level).groups] for level in (1, 2, 3)]
    assert saved == [[2, 10, 10, 10, 0], [2, 0, 2, 10, 0], [2, 0, 2, 2, 0]]  # 2 of its 2 bytes are that tensor


def test_each_stage_recomputes_its_own_first_segments() -> None:
    cost = chain([(0,), (1,), (1,), (1, 2), (2,), (3,)])
    stage_of = (0, 0, 1, 1, 1, 1, 1)  # the second stage begins inside segment 1
    assert [cost.segments_on(stage_of, stage) for stage in range(2)] == [(0, 1), (1, 2, 3)]
    for levels, again in (((0, 0), []), ((2, 1), [0, 1, 2, 3]), ((1, 2), [0, 2, 3, 4]), ((2, 3), [*range(6)])):
        found = cost.recomputed_on(stage_of, levels)
        assert [g for g in range(6) if found.groups[g].saved_bytes == 2] == again
    restored = [g.transient_bytes - 1 for g in cost.recomputed_on(stage_of, (2, 3)).groups[:6]]
    assert restored == [5, 5, 5, 10, 5, 5]  # 5 bytes of segment 1 are on the first stage
    assert [g.transient_bytes - 1 for g in cost.recomputed.groups[:6]] == [5, 5, 10, 15, 5, 5]


# -- generated programs --------------------------------------------------------------------------------------------


def saved_bytes(module: Any, arguments: Sequence[torch.Tensor], received: int, weights: Mapping[str, Any]) -> Any:
    """Bytes of the storages that a forward leaves for the backward, those of the last arguments among them.

    Returns:
        the bytes, and the module's results.
    """
    held = {w.untyped_storage().data_ptr() for w in weights.values()}
    saved = [t.untyped_storage() for t in arguments[len(arguments) - received :]]
    alive = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        saved.append(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = module(*arguments)
    return sum({s.data_ptr(): s.nbytes() for s in saved if s.data_ptr() not in held}.values()), results


def held_bytes(cost: CostGraph, stage_of: Sequence[int], stage: int) -> int:
    """Bytes that a stage keeps of a microbatch by the cost graph: saved or received."""
    saved = sum(g.saved_bytes for g, own in zip(cost.groups, stage_of) if own == stage)
    saved += sum(a.num_bytes for a in cost.saved if any(stage_of[g] == stage for g in a.groups))
    received = [edge for edge in cost.edges if stage_of[edge.producer] < stage]
    crossing = sum(e.num_bytes for e in received if any(stage_of[g] >= stage for g in e.consumers))
    return saved + crossing - sum(e.num_bytes for e in received if any(stage_of[g] == stage for g in e.saved_by))


MODELS: dict[str, tuple[Any, int]] = {
    "vit": (lambda: tiny_vit(6), 32),
    "resnet": (lambda: timm.create_model("resnet26"), 64),
    "swin": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(2, 2), num_heads=(3, 6)),
        56,
    ),
    "densenet": (lambda: timm.create_model("densenet121"), 32),
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", only(["vit", "resnet", "swin"], MODELS))
def test_programs_save_what_the_cost_graph_says(name: str, stages: int) -> None:
    torch.manual_seed(0)
    make, side = MODELS[name]
    model, x = make().train(), torch.randn(2, 3, side, side)
    graph = trace(model, (x,))
    costs = PlanCosts(graph, load_hardware("cpu-generic"))
    cost, weights = costs.unsharded_costs(2), weight_tensors(model, graph)
    # The second stage begins inside a segment.
    cut = next(g for g in range(len(cost.groups) // 2, 999) if cost.groups[g].segment == cost.groups[g - 2].segment)
    stage_of = [int(stages == 2 and g >= cut) for g in range(len(cost.groups))]
    programs = split(graph, {op: stage_of[g] for g, group in enumerate(cost.groups) for op in group.ops}, stages)
    place = {op.name: i for i, op in enumerate(graph.ops)}
    bounds = [local_segments([place[op.name] for op in program.ops], costs.segments) for program in programs]
    counts = [len(cost.segments_on(stage_of, stage)) for stage in range(stages)]
    assert counts == [len(own) - 1 for own in bounds]
    for levels in zip(*([1, count // 2, count - 1, count] for count in counts)):
        priced = cost.recomputed_on(stage_of, levels)
        made: dict[str, torch.Tensor] = {graph.inputs[0].name: x}
        for stage, program in enumerate(programs):
            level = levels[stage]
            recomputing = replace(program, segments=bounds[stage][: level + 1] if level else ())
            module = graph_module(recomputing, weights, torch.device("cpu"))
            arguments = [made[name].detach().requires_grad_(made[name].requires_grad) for name in program.arguments]
            measured, results = saved_bytes(module, arguments, len(program.receives), weights)
            assert held_bytes(priced, stage_of, stage) == measured, (stage, level)
            made |= dict(zip(program.results, results, strict=True))


def test_levels_of_a_real_model_save_ever_less_and_take_ever_longer() -> None:
    graph = trace(tiny_vit(6), (torch.randn(2, 3, 32, 32),))
    cost = PlanCosts(graph, load_hardware("cpu-generic")).unsharded_costs(2)
    stage_of = [0] * len(cost.groups)
    levels = [cost.recomputed_on(stage_of, [level]) for level in range(len(cost.segments_on(stage_of, 0)) + 1)]
    assert levels[0] == cost and levels[-1] == cost.recomputed and len(levels) > 6
    for fewer, more in pairwise(levels):
        assert held_bytes(fewer, stage_of, 0) > held_bytes(more, stage_of, 0)
        assert sum(g.backward_seconds for g in fewer.groups) < sum(g.backward_seconds for g in more.groups)


def test_measured_forwards_run_again() -> None:
    graph = trace(tiny_vit(6), (torch.randn(2, 3, 32, 32),))
    costs = PlanCosts(graph, load_hardware("cpu-generic"))
    costs.use_measurements(MeasuredConfig((), 2), [(tuple(op.name for op in graph.ops), 1.0, 3.0)])
    cost = costs.unsharded_costs(2)
    assert sum(g.backward_seconds for g in cost.recomputed.groups) == pytest.approx(3.0 + 1.0)
    half = [g.forward_seconds for g in cost.groups if g.segment in range(4)]
    assert sum(g.backward_seconds for g in cost.recomputed_up_to(4).groups) == pytest.approx(3.0 + sum(half))

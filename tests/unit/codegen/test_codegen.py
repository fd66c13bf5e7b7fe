"""Graphs split into stages, and what a stage prints and holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.handmade import run_in_one_process
from support.models import Tied, TwoInputs, UNet, Updating, tiny_vit
from torch import nn

from autopar.codegen.emit import graph_module, source
from autopar.codegen.split import follow_plan, split, weight_stages
from autopar.errors import TraceError
from autopar.ir.graph import Graph, Op, Ref, Value, Weight
from autopar.ir.program import Program
from autopar.ops.registry import operator
from autopar.trace.trace import trace, weight_tensors


def value(name: str) -> Value:
    return Value(name, (2, 4), "float32", (4, 1), True)


def op(name: str, *reads: str, mutates: tuple[str, ...] = (), target: str = "aten.add.Tensor") -> Op:
    """An operation that adds what it reads."""
    return Op(name, target, tuple(Ref(r) for r in reads), (), (value(name),), "", "", mutates)


def weight(name: str, kind: Any = "parameter") -> Weight:
    return Weight(name, kind, (2, 4), "float32", kind == "parameter", (name,))


def graph(*operations: Op, outputs: tuple[str, ...], weights: tuple[Weight, ...] = (), **fields: Any) -> Graph:
    inputs = (value("x"), value("z"))
    leaves = (Ref("x"), Ref("z"))
    return Graph(
        "m", "train", 2, inputs, weights, operations, tuple(Ref(o) for o in outputs), leaves, None, None, **fields
    )


# A diamond with a skip from the first to the last operation, a late input and two outputs.
DIAMOND = graph(
    op("a", "x", "w"), op("b", "a", "a"), op("c", "a", "v"), op("d", "b", "c"), op("e", "d", "z"), op("f", "e", "a"),
    outputs=("f", "b"), weights=(weight("w"), weight("v"), weight("unused")),
)  # fmt: skip


def edges(program: Program) -> list[str]:
    return [f"{e.value.name}:{e.src}>{e.dst}" for e in (*program.receives, *program.sends)]


def test_tensors_go_straight_from_producer_to_consumer() -> None:
    stage_of = {"a": 0, "b": 0, "c": 1, "d": 2, "e": 2, "f": 3}
    programs = split(DIAMOND, stage_of, 4)
    assert [edges(p) for p in programs] == [
        ["a:0>1", "a:0>3", "b:0>2", "b:0>3"],
        ["a:0>1", "c:1>2"],
        ["b:0>2", "c:1>2", "e:2>3"],
        ["a:0>3", "b:0>3", "e:2>3"],
    ]
    assert [[v.name for v in p.inputs] for p in programs] == [["x"], [], ["z"], []]
    assert [[w.name for w in p.weights] for p in programs] == [["w"], ["v"], [], []]
    assert [p.arguments for p in programs] == [("x",), ("a",), ("z", "b", "c"), ("a", "b", "e")]
    assert [p.results for p in programs] == [("a", "b"), ("c",), ("e",), ("f", "b")]
    assert weight_stages([(DIAMOND, programs)]) == {"w": (0,), "v": (1,), "unused": (3,)}


def test_parallel_branches_may_interleave() -> None:
    programs = split(DIAMOND, {"a": 0, "b": 1, "c": 0, "d": 1, "e": 1, "f": 1}, 2)
    assert [[o.name for o in p.ops] for p in programs] == [["a", "c"], ["b", "d", "e", "f"]]
    assert edges(programs[0]) == ["a:0>1", "c:0>1"]


def test_a_backward_edge_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="later stage"):
        split(DIAMOND, {"a": 1, "b": 0, "c": 1, "d": 1, "e": 1, "f": 1}, 2)


def test_follow_keeps_known_operations_and_places_new_ones() -> None:
    reference = {"a": 0, "b": 1, "c": 1, "f": 2}
    stage_of = follow_plan(DIAMOND, reference, {"w": (0,), "v": (1,), "unused": (2,)})
    assert stage_of == {"a": 0, "b": 1, "c": 1, "d": 1, "e": 1, "f": 2}


def test_follow_goes_where_the_weights_are_when_a_name_means_another_operation() -> None:
    # In training "c" was something else, on stage 0; the operation that reads v must go to v.
    assert follow_plan(DIAMOND, {"a": 0, "b": 0, "c": 0, "f": 2}, {"w": (0,), "v": (1,)})["c"] == 1
    # A weight that is tied over stages 0 and 1 decides nothing between them.
    assert follow_plan(DIAMOND, {"a": 0, "b": 0, "c": 1, "f": 2}, {"w": (0,), "v": (0, 1)})["c"] == 1


def test_follow_never_runs_backwards_and_keeps_updates_together() -> None:
    stage_of = follow_plan(DIAMOND, {"a": 2, "b": 0, "c": 1, "d": 0, "e": 1, "f": 0}, {})
    assert stage_of == dict.fromkeys("abcdef", 2)
    tied = graph(op("a", "x"), op("b", "a"), op("c", "b"), outputs=("c",), colocated=(("b", "c"),))
    assert follow_plan(tied, {"a": 0, "b": 1, "c": 2}, {}) == {"a": 0, "b": 1, "c": 1}


def test_a_buffer_updated_on_one_stage_and_read_on_another_is_refused() -> None:
    stale = graph(
        op("a", "x", "s", mutates=("s",)), op("b", "a", "s"), outputs=("b",), weights=(weight("s", "buffer"),)
    )
    with pytest.raises(TraceError, match=r"Buffer s is updated in training on one stage and read on another.*\[0, 1\]"):
        weight_stages([(stale, split(stale, {"a": 0, "b": 1}, 2))])


def test_the_printed_source_of_a_stage() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    traced = trace(model, (torch.randn(3, 4),))
    programs = split(traced, {"0.linear": 0, "1.relu": 1, "2.linear": 1}, 2)
    assert source(programs[0]).split("\n    ")[0].splitlines() == [
        "# stage 0, train, microbatch of 3: 1 operations, 40 parameters in 2 tensors",
        "# input   input: float32[3, 4]",
        "# to stage 1: 0.linear: float32[3, 8]",
        "def forward(self, input):",
    ]
    lines = [line.strip() for line in source(programs[1]).splitlines()]
    assert lines == [
        "# stage 1, train, microbatch of 3: 2 operations, 18 parameters in 2 tensors",
        "# from stage 0: 0.linear: float32[3, 8]",
        "def forward(self, _0_linear):",
        '_2_weight = getattr(self, "2").weight',
        '_2_bias = getattr(self, "2").bias',
        "_1_relu = torch.ops.aten.relu.default(_0_linear);  _0_linear = None",
        "_2_linear = torch.ops.aten.linear.default(_1_relu, _2_weight, _2_bias);  _1_relu = _2_weight = _2_bias = None",
        "return (_2_linear,)",
    ]


class Named(nn.Module):
    """Names that are no identifiers, or the same one, all of them sent over a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a-b": nn.Linear(4, 4), "a b": nn.Linear(4, 4), "über": nn.Linear(4, 4)})
        self.a = nn.ModuleDict({"b": nn.Linear(4, 4)})
        self.a_b = nn.Linear(4, 4)

    def forward(self, torch: Any, device: Any) -> Any:
        made = [m(torch) for m in (*self.parts.values(), self.a["b"], self.a_b)]
        return sum(m * i for i, m in enumerate(made, 1)) + device


def test_names_that_are_no_identifiers_or_collide() -> None:
    model, args = Named(), (torch.randn(2, 4), torch.randn(2, 4))
    traced = trace(model, args)
    programs = split(traced, {o.name: int(not o.name.endswith("linear")) for o in traced.ops}, 2)
    assert programs[0].results == (
        "parts.a-b.linear", "parts.a b.linear", "parts.über.linear", "a.b.linear", "a_b.linear",
    )  # fmt: skip
    header = next(line for line in source(programs[1]).splitlines() if line.startswith("def"))
    assert header == (
        "def forward(self, device_1, parts_a_b_linear, parts_a_b_linear_1, parts__ber_linear, "
        "a_b_linear, a_b_linear_1):"
    )
    assert torch.equal(run_in_one_process(traced, programs, weight_tensors(model, traced), *args)[0], model(*args))


def test_an_operator_is_found_by_its_name() -> None:
    assert operator("aten.add.Tensor") is torch.ops.aten.add.Tensor


def test_stages_hold_their_own_parameters_and_nothing_else() -> None:
    model = tiny_vit(depth=4)
    traced = trace(model, (torch.randn(2, 3, 32, 32),))
    weights = weight_tensors(model, traced)
    stage_of = {o.name: min(3, i * 4 // len(traced.ops)) for i, o in enumerate(traced.ops)}
    programs = split(traced, stage_of, 4)
    modules = [graph_module(p, weights, torch.device("cpu")) for p in programs]
    names = [[n for n, _ in m.named_parameters()] for m in modules]
    assert sorted(n for part in names for n in part) == sorted(n for n, _ in model.named_parameters())
    assert all(p is weights[n] for m in modules for n, p in m.named_parameters())  # the tensors themselves, no copies
    assert max(len(part) for part in names) < len(weights) / 2


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize(
    ("model", "args"),
    [
        (UNet(), (torch.randn(2, 3, 8, 8),)),
        (Tied(), (torch.randint(0, 32, (2, 5)),)),
        (tiny_vit(depth=2), (torch.randn(2, 3, 32, 32),)),
    ],
)
def test_any_number_of_stages_computes_the_model(model: nn.Module, args: tuple, stages: int) -> None:
    traced = trace(model, args)
    programs = split(traced, {o.name: i * stages // len(traced.ops) for i, o in enumerate(traced.ops)}, stages)
    assert torch.equal(run_in_one_process(traced, programs, weight_tensors(model, traced), *args)[0], model(*args))


def test_evaluation_follows_training_where_graphs_differ() -> None:
    model = Updating()
    train = trace(model, (torch.randn(2, 8),))
    names = [o.name for o in train.ops]
    stage_of = {n: int(i >= names.index("second.linear")) for i, n in enumerate(names)}
    programs = split(train, stage_of, 2)
    held = weight_stages([(train, programs)])
    evaluated = trace(model, (torch.randn(2, 8),), mode="eval")
    placed = follow_plan(evaluated, stage_of, held)
    assert [placed[o.name] for o in evaluated.ops] == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert weight_stages([(train, programs), (evaluated, split(evaluated, placed, 2))]) == held


def test_outputs_made_early_and_constants_reach_the_last_stage() -> None:
    model = TwoInputs()
    args, kwargs = (torch.randn(2, 3, 8, 8),), {"text": torch.randn(2, 6)}
    traced = trace(model, args, kwargs)
    names = [o.name for o in traced.ops]
    programs = split(
        traced, {n: int(i >= names.index("mul")) + int(i >= names.index("out.linear")) for i, n in enumerate(names)}, 3
    )
    outputs = run_in_one_process(traced, programs, weight_tensors(model, traced), *args, kwargs["text"])
    for actual, expected in zip(outputs, model(*args, **kwargs).values(), strict=True):
        assert torch.equal(actual, expected)
    assert [[w.name for w in p.weights if w.kind == "constant"] for p in programs] == [[], list(traced.constants), []]

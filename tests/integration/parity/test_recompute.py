"""Stages that compute their activations again in the backward: equal results, less memory, readable programs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import MODELS, vectors
from support.effort import only
from support.handmade import even_firsts, in_threads, plan_by_hand, with_levels
from support.models import Normed, Updating, tiny_vit
from support.parity import images_and_labels
from support.reference import Reference, assert_all_close, assert_close
from torch import nn

import autopar
from autopar.api import recompute
from autopar.api.recompute import local_segments
from autopar.codegen.emit import graph_module, source
from autopar.codegen.split import split
from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.pytree import leaves
from autopar.trace.trace import trace, weight_tensors

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-3)


class ConvNet(nn.Module):
    """Batch norm behind every convolution, with a skip."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        block = lambda cin, stride: nn.Sequential(  # noqa: E731
            nn.Conv2d(cin, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.stem, self.one, self.two = block(3, 2), block(width, 1), block(width, 1)
        self.three, self.head = block(width, 2), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.three(x + self.two(self.one(x)))
        return self.head(x.mean((2, 3)))


def recomputing(plan: Plan) -> Plan:
    """The plan with every stage recomputing."""
    return replace(plan, stages=tuple(replace(stage, recompute="all") for stage in plan.stages))


def normed(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 8, 3), torch.randint(0, 4, (batch,))


# -- equal results -------------------------------------------------------------------------------------------------


CELLS = [(name, stages) for name in (*MODELS, "normed") for stages in (1, 2, 3)]


@pytest.mark.parametrize(("name", "stages"), only([cell for i, cell in enumerate(CELLS) if i % 4 == 0], CELLS))
def test_equals_one_device(name: str, stages: int) -> None:
    torch.manual_seed(0)
    make, data, loss_fn = MODELS.get(name, (Normed, normed, F.cross_entropy))
    model = make()
    x, _ = data(8)
    plan = recomputing(plan_by_hand(model, x, 4, even_firsts(model, x, stages)))
    pm = in_threads(model, plan, x, loss_fn, optimizer=ADAMW)
    assert any(p.segments for v in pm._programs.specializations.values() for p in v.programs)
    reference = Reference(model, loss_fn, ADAMW)
    for batch in (8, 5):
        x, y = data(batch)
        expected = reference.forward_backward(x, y, 4)
        assert pm.forward_backward(x, y).loss == pytest.approx(expected, abs=1e-6)
        assert_all_close(pm.gradients(), reference.gradients(), f"gradient, batch {batch}")
        pm.optimizer_step()
        reference.step()
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")
    for mode in (False, True):
        pm.train(mode)
        reference.model.train(mode)
        actual = pm(**x) if isinstance(x, dict) else pm(x)
        for a, b in zip(leaves(actual), reference.forward(x, 4), strict=True):
            assert_close(a, b, f"output, train={mode}")
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")


@pytest.mark.parametrize(
    ("make", "mesh"),
    [
        pytest.param(tiny_vit, (2, 2), id="vit", marks=pytest.mark.full),
        pytest.param(ConvNet, (2, 1), id="conv net"),
    ],
)
def test_worker_processes_equal_one_device(make: Any, mesh: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, (pp, tp), (x, y) = make(), mesh, images_and_labels(8)
    asked: dict[str, Any] = {"pp": pp, "tp": tp, "dp": 1, "microbatches": 2, "recompute": "all", "optimizer": ADAMW}
    reference = Reference(model, make_optimizer=ADAMW)
    with autopar.parallelize(model, pp * tp, x, **asked) as pm:
        assert [stage.recompute for stage in pm.plan.stages] == ["all"] * len(pm.plan.stages)
        for _ in range(3):
            x, y = images_and_labels(8)
            expected = reference.forward_backward(x, y, 2)
            result = pm.forward_backward(x, y, return_outputs=True)
            assert result.loss == pytest.approx(expected, abs=1e-5)
            assert_all_close(pm.gradients(), reference.gradients(), "gradient")
            pm.optimizer_step()
            reference.step()
        assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")
        assert_close(pm(x), reference.forward(x, 2)[0], "output")


DROPPING: dict[str, Any] = {
    "drop_rate": 0.2, "attn_drop_rate": 0.2, "proj_drop_rate": 0.2, "drop_path_rate": 0.2
}  # fmt: skip


def test_dropout_drops_the_same_again() -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(**DROPPING), images_and_labels(8)
    plan = autopar.plan(model, 1, x, microbatches=2, recompute="none")
    found = []
    for level in ("none", 3, "all"):
        with autopar.parallelize(model, 1, x, seed=5, plan=with_levels(plan, [level])) as pm:
            losses = [pm.forward_backward(x, y).loss for _ in range(2)]
            found.append((losses, pm.gradients()))
    (expected_losses, expected), *others = found
    assert expected_losses[0] != expected_losses[1]  # it drops at all
    for losses, gradients in others:
        assert losses == expected_losses
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_torchs_own_generators_draw_the_same_again() -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(**DROPPING), images_and_labels(8)
    found = []
    size = len(trace(model, (x,)).ops)
    for segments in ((), (0, 40, size), (0, 40), (20, 40, 60)):
        program, weights = with_segments(model, x, segments)
        module = graph_module(program, weights, torch.device("cpu"))
        model.zero_grad()
        torch.manual_seed(7)
        loss = F.cross_entropy(module(x)[0], y)
        after = torch.rand(())
        loss.backward()
        gradients = {name: p.grad for name, p in weights.items() if p.grad is not None}
        found.append({"loss": loss.detach(), "after": after, "next": torch.rand(())} | gradients)
    assert all(torch.equal(other[name], found[0][name]) for other in found[1:] for name in found[0])
    assert len(found[0]) > 20


class WritesItsInput(nn.Module):
    """Adds to a part of its input in place, before and after reading it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.first(x.clone())
        x[:, :3] += 1.0
        return self.second(torch.relu(before) + torch.tanh(self.first(x)))


def test_an_input_that_is_written_into_is_written_once() -> None:
    torch.manual_seed(0)
    model, (x, y) = WritesItsInput(), vectors(6)
    pm = in_threads(model, recomputing(plan_by_hand(model, x, 2, [])), x, F.cross_entropy)
    program = program_of(pm)
    assert program.segments and program.segments[0] > [op.name for op in program.ops].index("add")
    reference = Reference(model)
    expected = reference.forward_backward(x.clone(), y, 2)
    assert pm.forward_backward(x.clone(), y).loss == pytest.approx(expected, abs=1e-6)
    assert_all_close(pm.gradients(), reference.gradients(), "gradient")


# -- memory --------------------------------------------------------------------------------------------------------


def test_memory_falls_as_far_as_the_plan_says() -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(depth=8, img_size=96, embed_dim=96), images_and_labels(16, 96)
    plan = autopar.plan(model, 2, x, pp=2, microbatches=4, schedule="1f1b", recompute="all")
    without = replace(plan, stages=tuple(replace(stage, recompute="none") for stage in plan.stages))
    measured = {}
    for own in (plan, without):
        pm = in_threads(model, own, x, F.cross_entropy, optimizer=ADAMW)
        pm.train_step(x, y)  # the optimizer has its state from here on
        measured[own.stages[0].recompute] = pm.measure_memory(x, y)
    for rank, stage in enumerate(plan.stages):
        again, once = measured["all"][rank], measured["none"][rank]
        assert plan.prediction.peak_bytes[rank] == pytest.approx(again, rel=0.25)
        standing = 4 * 4 * stage.params  # value, gradient, two moments
        assert again - standing < 0.4 * (once - standing)


# -- plans and programs --------------------------------------------------------------------------------------------


def program_of(pm: Any, stage: int = 0) -> Program:
    return next(iter(pm._programs.specializations.values())).programs[stage]


def test_a_plan_is_edited_by_hand(tmp_path: Path) -> None:
    model, (x, y) = tiny_vit(), images_and_labels(8)
    made = autopar.plan(model, 2, x, pp=2, microbatches=2, schedule="1f1b")
    file = tmp_path / "plan.json"
    made.save(file)
    text = file.read_text()
    assert text.count('"recompute": "none"') == 2
    file.write_text(text.replace('"recompute": "none"', '"recompute": "all"', 1))
    edited = Plan.load(file)
    assert [stage.recompute for stage in edited.stages] == ["all", "none"]
    assert edited.decision == made.decision + "; recomputing on stages 0"
    assert "recompute" in str(edited) and "recompute" not in str(made)
    pm = in_threads(model, edited, x, F.cross_entropy)
    assert [bool(program_of(pm, stage).segments) for stage in range(2)] == [True, False]
    reference = Reference(model)
    assert pm.forward_backward(x, y).loss == pytest.approx(reference.forward_backward(x, y, 2), abs=1e-5)
    assert_all_close(pm.gradients(), reference.gradients(), "gradient")
    file.write_text(text.replace('"recompute": "none"', '"recompute": 2', 1))
    edited = Plan.load(file)
    assert made.stages[0].num_segments > 3
    part = f"2 of {made.stages[0].num_segments}"
    assert edited.decision == f"{made.decision}; recomputing on stages 0 ({part} segments)"
    assert re.search(rf"^ +0 .* {part} ", str(edited), re.MULTILINE), str(edited)
    assert Plan.from_json(edited.to_json()) == edited
    pm = in_threads(model, edited, x, F.cross_entropy)
    assert [len(program_of(pm, stage).segments) for stage in range(2)] == [3, 0]
    assert program_of(pm).segments[-1] < len(program_of(pm).ops)
    assert pm.forward_backward(x, y).loss == pytest.approx(reference.forward_backward(x, y, 2), abs=1e-5)


def test_a_stage_cannot_recompute_more_segments_than_it_has() -> None:
    model, (x, _) = tiny_vit(), images_and_labels(8)
    plan = autopar.plan(model, 2, x, pp=2, microbatches=2, schedule="1f1b", recompute="none")
    count = plan.stages[1].num_segments
    for edited in (with_levels(plan, ["none", count]), with_levels(plan, ["none", 99])):
        level = edited.stages[1].recompute
        problem = rf'stages\.1\.recompute: is {level}, the stage has {count} segments\. Use fewer, or "all"\.'
        with pytest.raises(PlanError, match=problem):
            edited.validate()
        unknown = replace(edited, stages=tuple(replace(stage, num_segments=0) for stage in edited.stages))
        unknown.validate()  # made by hand: known when the model is traced
        with pytest.raises(PlanError, match=problem):
            in_threads(model, unknown, x, F.cross_entropy)


def test_inputs_of_another_shape_recompute_as_many_segments_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, (x, y) = tiny_vit(), images_and_labels(8)
    plan = with_levels(plan_by_hand(model, x, 2, []), [3])
    pm = in_threads(model, plan, x, F.cross_entropy)
    monkeypatch.setattr(recompute, "segment_starts", lambda graph, stats: (0, 30))
    reference = Reference(model)
    assert pm.forward_backward(x[:6], y[:6]).loss == pytest.approx(
        reference.forward_backward(x[:6], y[:6], 2), abs=1e-5
    )
    assert_all_close(pm.gradients(), reference.gradients(), "gradient")
    planned, *_, new = (own.programs[0] for own in pm._programs.specializations.values() if own.graph.mode == "train")
    assert len(planned.segments) == 4 and new.segments == (0, 30, len(new.ops))


def test_evaluation_has_no_segments() -> None:
    model, (x, _) = tiny_vit(), images_and_labels(8)
    pm = in_threads(model, with_levels(plan_by_hand(model, x, 2, []), [2]), x, F.cross_entropy)
    modes = {own.graph.mode: own.programs[0].segments for own in pm._programs.specializations.values()}
    assert len(modes["train"]) == 3 and modes["eval"] == ()


def test_a_cut_divides_a_segment() -> None:
    assert local_segments([0, 1, 2, 3, 4, 5], (0, 3)) == (0, 3, 6)
    assert local_segments([2, 3, 4], (0, 3)) == (0, 1, 3)
    assert local_segments([4, 5, 6], (0, 3)) == (0, 3)
    assert local_segments([0, 2, 5, 6], (2, 6)) == (1, 3, 4)  # the first operation is run once
    assert local_segments([0, 1], (2,)) == ()


def with_segments(model: nn.Module, x: torch.Tensor, segments: tuple[int, ...]) -> tuple[Program, Any]:
    graph = trace(model, (x,))
    (program,) = split(graph, dict.fromkeys((op.name for op in graph.ops), 0), 1)
    return replace(program, segments=segments), weight_tensors(model, graph)


@pytest.mark.parametrize("segments", [(), (0, 12), (0, 12, 39), (10, 20, 39), (10, 20)])
def test_weights_are_waited_for_before_they_are_first_read(segments: tuple[int, ...]) -> None:
    model, x = tiny_vit(2), torch.randn(2, 3, 32, 32)
    expected = model(x)
    program, weights = with_segments(model, x, segments)
    given = {name: tensor.detach().clone() for name, tensor in weights.items()}
    names = [w.name for w in program.weights]
    arrivals: list[list[str]] = []

    groups = [names[:6], names[6:20], names[20:]]

    @functools.cache
    def arrival(numbers: frozenset[int]) -> Callable[[], None]:
        def arrive() -> None:
            for group in (groups[number] for number in sorted(numbers)):
                if group not in arrivals:
                    arrivals.append(group)
                    for name in group:
                        weights[name].data.copy_(given[name])

        return arrive

    def waits(read: Collection[str]) -> Callable[[], None] | None:
        numbers = frozenset(number for number, group in enumerate(groups) if not set(group).isdisjoint(read))
        return arrival(numbers) if numbers else None

    for name in names:
        weights[name].data.fill_(float("nan"))
    module = graph_module(program, weights, torch.device("cpu"), {}, waits)
    (output,) = module(x)
    torch.testing.assert_close(output, expected)
    assert arrivals == groups
    output.sum().backward()
    assert arrivals == groups and not any(p.grad.isnan().any() for p in model.parameters() if p.grad is not None)
    lines = [
        line for line in module.code.splitlines() if "wait_" in line or "= torch.ops" in line or "segment_" in line
    ]
    places = [k for k, line in enumerate(lines) if "wait_" in line]
    assert places[0] == 0 and (segments[:1] == (0,) or places[1] - places[0] > 2)  # each as late as can be
    assert "wait_" not in source(program)


def test_the_printed_source_shows_segments() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    program, _ = with_segments(model, torch.randn(3, 4), (1, 2, 3))
    lines = [line.strip() for line in source(program).splitlines()]
    assert lines[2] == "# kept for the backward is what enters its 2 segments, which run again"
    assert [line for line in lines if line.startswith(("def", "segment", "return"))] == [
        "def forward(self, input):",
        "segment_0 = self.segment_0(_0_linear);  _0_linear = None",
        "segment_1 = self.segment_1(_1_relu);  _1_relu = None",
        "return (_2_linear,)",
        "def segment_0(self, _0_linear):",
        "return (_1_relu,)",
        "def segment_1(self, _1_relu):",
        "return (_2_linear,)",
    ]


def test_the_printed_source_shows_which_segments_run_again() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    program, _ = with_segments(model, torch.randn(3, 4), (0, 2))
    lines = [line.strip() for line in source(program).splitlines()]
    assert lines[2] == (
        "# kept for the backward is what enters its first segment, which run again, and what later operations save"
    )
    assert [line for line in lines if line.startswith(("def", "segment", "return", "_2_linear ="))] == [
        "def forward(self, input):",
        "segment_0 = self.segment_0(input_1);  input_1 = None",
        "_2_linear = torch.ops.aten.linear.default(_1_relu, _2_weight, _2_bias);  _1_relu = _2_weight = _2_bias = None",
        "return (_2_linear,)",
        "def segment_0(self, input):",
        "return (_1_relu,)",
    ]


@pytest.mark.parametrize(
    "make", [pytest.param(tiny_vit, id="vit", marks=pytest.mark.full), pytest.param(ConvNet, id="conv net")]
)
def test_a_program_with_segments_compiles(make: Any) -> None:
    torch.manual_seed(0)
    model, (x, y) = make(), images_and_labels(4)
    size = len(trace(model, (x,)).ops)
    program, weights = with_segments(model, x, (0, size // 2, size))
    found = []
    for compiled in (False, True):
        own = {name: tensor.clone().detach().requires_grad_(tensor.requires_grad) for name, tensor in weights.items()}
        module: Any = graph_module(program, own, torch.device("cpu"))
        if compiled:
            module = torch.compile(module, backend="aot_eager", fullgraph=True)
        loss = F.cross_entropy(module(x)[0], y)
        loss.backward()
        found.append((loss.detach(), {name: t.grad if t.requires_grad else t for name, t in own.items()}))
    assert_close(found[1][0], found[0][0], "loss")
    assert_all_close(found[1][1], found[0][1], "compiled")


def test_buffers_are_as_they_were_while_a_segment_runs_again() -> None:
    torch.manual_seed(0)
    model, (x, y) = Updating(), vectors(6)
    program, weights = with_segments(model, x, (0, len(trace(model, (x,)).ops)))
    module = graph_module(program, weights, torch.device("cpu"))
    first, second = module(x)[0], module(x + 1)[0]  # the second forward changes what the first one's backward reads
    F.cross_entropy(second, y).backward()
    F.cross_entropy(first, y).backward()
    expected = Updating()
    expected.load_state_dict(model.state_dict())
    for buffer in expected.buffers():
        buffer.zero_()
    first, second = expected(x), expected(x + 1)
    F.cross_entropy(second, y).backward()
    F.cross_entropy(first, y).backward()
    assert_close(weights["calls"], expected.calls, "calls")
    assert_close(weights["mean"], expected.mean, "mean")
    actual, wanted = weights["first.weight"].grad, expected.first.weight.grad
    assert actual is not None and wanted is not None
    assert_close(actual, wanted, "gradient")

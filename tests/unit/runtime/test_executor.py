"""Every schedule over threads: all stage counts and microbatch counts against one device, and what stays in memory."""

from __future__ import annotations

import gc
import resource
import sys
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import MODELS, tied, vectors
from support.effort import only
from support.handmade import even_firsts, in_threads, plan_by_hand
from support.models import Tied, TwoHeads, loss_of_some, main_loss
from support.reference import Reference, assert_all_close, assert_close
from torch import nn

from autopar.codegen.emit import graph_module
from autopar.ir.graph import Value
from autopar.ir.placement import Placement
from autopar.ir.program import Program
from autopar.ir.pytree import leaves
from autopar.runtime.comm.in_process import LocalTransport
from autopar.runtime.comm.protocols import RecvHandle
from autopar.runtime.engine.edges import inverse_permutation
from autopar.runtime.engine.send_lifetimes import send_lifetimes
from autopar.runtime.memory import peaks as memory
from autopar.schedule.actions import Action
from autopar.schedule.generate import generate, max_in_flight
from autopar.schedule.order import Links, topological_order

PIPELINES = [(schedule, stages, 1) for schedule in ("1f1b", "gpipe") for stages in (1, 2, 4)]
PIPELINES += [("interleaved", 4, 2), ("interleaved", 6, 2), ("interleaved", 6, 3), ("interleaved", 3, 3)]
PIPELINES += [("interleaved-overlap", 4, 2), ("interleaved-overlap", 6, 3), ("zb-v", 4, 2), ("zb-v", 6, 2)]


CELLS = [(name, *pipeline) for name in MODELS for pipeline in PIPELINES]
# Each pipeline with two models, each model with several pipelines.
KEPT = [(name, *p) for i, name in enumerate(MODELS) for j, p in enumerate(PIPELINES) if (i - j) % len(MODELS) in (0, 2)]


@pytest.mark.parametrize(("name", "schedule", "stages", "chunks"), only(KEPT, CELLS))
def test_equals_one_device_for_any_number_of_microbatches(name: str, schedule: str, stages: int, chunks: int) -> None:
    torch.manual_seed(0)
    make, data, loss_fn = MODELS[name]
    model = make()
    x, _ = data(8)
    plan = plan_by_hand(model, x, 8, even_firsts(model, x, stages), schedule, chunks=chunks)
    pm = in_threads(model, plan, x, loss_fn)
    reference = Reference(model, loss_fn)
    for batch in (1, 2, 3, 5, 8, 11):  # as many microbatches, but for the last: five of 2 samples and one of 1
        x, y = data(batch)
        expected = reference.forward_backward(x, y, 8)
        assert pm.forward_backward(x, y).loss == pytest.approx(expected, abs=1e-6)
        assert_all_close(pm.gradients(), reference.gradients(), f"gradient, batch {batch}")  # they accumulate
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")
    for mode in (True, False):
        pm.train(mode)
        reference.model.train(mode)
        actual = pm(**x) if isinstance(x, dict) else pm(x)
        for a, b in zip(leaves(actual), reference.forward(x, 8), strict=True):
            assert_close(a, b, f"output, train={mode}")
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")


def test_frozen_batch_norm_stays_frozen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].eval()
    x, y = vectors(8)
    pm = in_threads(model, plan_by_hand(model, x, 2, ["2.linear"]), x, F.cross_entropy)
    reference = Reference(model, F.cross_entropy)
    model.eval()  # what happens to the user's model later has no say
    for batch in (8, 6):  # a shape that is traced only now
        x, y = vectors(batch)
        assert pm.forward_backward(x, y).loss == pytest.approx(reference.forward_backward(x, y, 2), abs=1e-6)
    assert_all_close(pm.gradients(), reference.gradients(), "gradient")
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")
    assert not any(module.training for module in model.modules())


class Token:
    """Lives as long as the activations of one forward."""


class Keep(torch.autograd.Function):
    """The identity; its node holds a token until its backward is done or its graph is freed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: weakref.WeakSet) -> torch.Tensor:
        ctx.token = Token()
        tokens.add(ctx.token)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Watched(nn.Module):
    """A stage that notes after each forward how many microbatches' activations are alive."""

    def __init__(self, stage: nn.Module, tokens: weakref.WeakSet, alive: list[int]) -> None:
        super().__init__()
        self.stage, self.tokens, self.alive = stage, tokens, alive

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = self.stage(*args)
        if torch.is_grad_enabled():
            results = tuple(Keep.apply(r, self.tokens) if i == 0 else r for i, r in enumerate(results))
        self.alive.append(len(self.tokens))
        return results


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [
        ("1f1b", 1, [4, 3, 2, 1]), ("gpipe", 1, [6, 6, 6, 6]), ("interleaved", 2, [5, 3]), ("interleaved", 4, [9, 7]),
        ("interleaved-overlap", 2, [6, 4]), ("interleaved-overlap", 4, [12, 10]),
    ],
)  # fmt: skip
def test_activations_are_freed_as_the_schedule_says(schedule: str, chunks: int, expected: list[int]) -> None:
    pp = len(expected)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(pp * chunks)))
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    tokens = [weakref.WeakSet() for _ in range(pp)]
    alive: list[list[int]] = [[] for _ in range(pp)]

    def build(program: Program, weights: Mapping[str, torch.Tensor], device: torch.device, *rest: Any) -> nn.Module:
        rank = program.stage % pp
        return Watched(graph_module(program, weights, device, *rest), tokens[rank], alive[rank])

    firsts = [f"{i}.linear" for i in range(1, pp * chunks)]
    plan = plan_by_hand(model, x, 6, firsts, schedule, chunks=chunks)
    pm = in_threads(model, plan, x, F.mse_loss, build)
    pm.forward_backward(x, y)
    bounds = [max_in_flight(schedule, rank, plan.placement, 6) for rank in range(pp)]
    assert [max(a) for a in alive] == expected == bounds
    gc.collect()
    assert [len(t) for t in tokens] == [0] * pp


WAITS = [(name, 1) for name in ("1f1b", "gpipe", "forward-only")] + [
    (name, chunks) for name in ("interleaved", "interleaved-overlap", "forward-only") for chunks in (2, 3)
]


@pytest.mark.parametrize(("schedule", "chunks"), WAITS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_waiting_for_sends_never_halts_and_bounds_them(schedule: str, chunks: int, ranks: int) -> None:
    stages = ranks * chunks
    links = Links.of(list(combinations(range(stages), 2)), stages)  # every skip there can be
    for microbatches in (1, 2, 3, 5, 8, 13):
        rows = generate(schedule, Placement(ranks, chunks), microbatches)
        waits = {
            own: found
            for rank, row in enumerate(rows)
            for own, found in zip(row, send_lifetimes(rank, rows, links.before, links.after), strict=True)
        }

        def needs(action: Action, waits: Any = waits) -> list[Action]:
            return [*links.needs(action), *(Action(own.kind, to, own.microbatch) for to, own in waits[action])]

        assert topological_order(rows, needs).stuck == {}
        for rank, row in enumerate(rows):
            under_way: set[tuple[int, Action]] = set()
            most = 0
            for action in row:
                gone = waits[action]
                assert len(set(gone)) == len(gone) and under_way >= set(gone)
                under_way -= set(gone)
                under_way |= {(taker.chunk, action) for taker in links.after(action) if taker.chunk % ranks != rank}
                most = max(most, *(sum(to == peer for to, _ in under_way) for peer in range(stages)))
            # Activations of the microbatches in flight and of one more of each chunk, or as many gradients.
            kept = "interleaved" if schedule == "forward-only" else schedule
            bound = max_in_flight(kept, 0, Placement(ranks, chunks), microbatches) + chunks
            assert most <= (microbatches if schedule == "gpipe" else bound)


@pytest.mark.parametrize("loss_fn", [main_loss, loss_of_some])
@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (3, 1), (5, 1), (4, 2), (3, 3)])
def test_what_the_loss_does_not_depend_on_stays_untouched(stages: int, chunks: int, loss_fn: Any) -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    decaying = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)  # noqa: E731
    x = torch.randn(6, 8)
    schedule = "interleaved" if chunks > 1 else "1f1b"
    plan = plan_by_hand(model, x, 3, even_firsts(model, x, stages), schedule, chunks=chunks)
    pm = in_threads(model, plan, x, loss_fn, optimizer=decaying)
    reference = Reference(model, loss_fn, decaying)
    for y in ([1] * 6, [1, 1, 0, 1, 1, 1], [2] * 6):
        reference.forward_backward(x, torch.tensor(y), 3)
        pm.forward_backward(x, torch.tensor(y))
        assert ("side.weight" in pm.gradients()) == (loss_fn is loss_of_some and 0 in y)
        assert_all_close(pm.gradients(), reference.gradients(), "gradient")
        pm.optimizer_step()
        reference.step()
        assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")


def test_an_update_clears_the_gradients_of_parameters_that_it_leaves_alone() -> None:
    torch.manual_seed(0)
    model = Tied()
    x, y = tied(6)
    some = lambda parameters: torch.optim.SGD(parameters[-1:], lr=0.0)  # noqa: E731
    plan = plan_by_hand(model, x, 3, ["layers.1.0.layer_norm", "head.linear"])
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=some)
    norms = [pm.train_step(x, y).grad_norm for _ in range(2)]
    assert pm.gradients() == {}
    assert norms[0] == pytest.approx(norms[1])


@pytest.mark.parametrize("status", [None, "Name: python\n"])
def test_peak_memory_without_the_files_of_linux(
    status: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "STATUS", tmp_path / "status")
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "missing" / "clear_refs")
    if status is not None:
        (tmp_path / "status").write_text(status)
    memory.restart_peak()
    unit = 1 if sys.platform == "darwin" else 1024
    assert memory.peak_resident_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def test_inference_keeps_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(6, 8)
    pm = in_threads(model, plan_by_hand(model, x, 3, ["1.linear"]), x, F.mse_loss)
    pm(x)
    ranks: Any = pm._ranks.ranks  # type: ignore[union-attr]
    assert not any(step.saved or step.local_tensors for rank in ranks for step in rank.bound_steps.values())


class LastingMail:
    """Receives what comes under a tag where the last one under it was, as over symmetric memory."""

    posts_early = False

    def __init__(self, transport: LocalTransport, places: dict[tuple[int, int], torch.Tensor]) -> None:
        self.send, self.transport, self.places = transport.send, transport, places

    def receive(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int, channel: int = 0) -> RecvHandle:
        receipt = self.transport.receive(shape, dtype, src, tag, channel)
        place = self.places.setdefault((src, tag), torch.empty(tuple(shape), dtype=dtype))
        return lambda: place.copy_(receipt()).view(tuple(shape))


@pytest.fixture
def lasting_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels of one rank share the places of messages, except those that outlive a step."""
    shared: dict[LocalTransport, dict[tuple[int, int], torch.Tensor]] = defaultdict(dict)

    def channel(self: LocalTransport, incoming: object, outgoing: object, outlives_step: bool) -> LastingMail:
        return LastingMail(self, {} if outlives_step else shared[self])

    monkeypatch.setattr(LocalTransport, "open_channel", channel)


class EarlyOutput(nn.Module):
    """Returns what its first stage makes too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        early = self.first(x)
        return self.second(early.relu()), early


@pytest.mark.parametrize("microbatches", [1, 2])
def test_outputs_outlive_the_next_step(microbatches: int, lasting_mail: None) -> None:
    torch.manual_seed(0)
    model, x, y = EarlyOutput(), torch.randn(4, 8), torch.arange(4)
    plan = plan_by_hand(model, x, microbatches, ["second.linear"])
    pm = in_threads(
        model, plan, x, lambda output, target: F.cross_entropy(output[0], target), optimizer=torch.optim.SGD
    )
    expected = [output.detach() for output in model(x)]
    outputs = pm.train_step(x, y, return_outputs=True).outputs
    pm.train_step(x + 1, y)
    for output, wanted in zip(outputs, expected, strict=True):
        assert_close(output, wanted, "output")


@pytest.mark.parametrize("stages", [1, 2])
def test_a_dropped_output_is_freed(stages: int) -> None:
    model, x, y = EarlyOutput(), torch.randn(4, 8), torch.arange(4)
    plan = plan_by_hand(model, x, 1, ["second.linear"][: stages - 1])
    pm = in_threads(model, plan, x, lambda output, target: F.cross_entropy(output[0], target))
    trained = pm.forward_backward(x, y, return_outputs=True).outputs
    outputs = [weakref.ref(output) for output in (*trained, *pm.eval()(x))]
    del trained
    gc.collect()
    assert all(output() is None for output in outputs)
    ranks: Any = pm._ranks
    steps = [step for rank in ranks.ranks for step in rank.bound_steps.values()]
    assert all(loss is None for step in steps for loss in step.results.losses)


class ClassToken(nn.Module):
    """Reaches its parameters from the second stage by views alone."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.proj = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(6, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.proj(x)], dim=1)
        return self.head(self.norm(x)[:, 0])


def test_activations_of_several_graphs_are_kept_apart(lasting_mail: None) -> None:
    torch.manual_seed(0)
    model, x, y = EarlyOutput(), torch.randn(4, 8), torch.arange(4)
    plan = plan_by_hand(model, x, 2, ["second.linear"], "gpipe")
    pm = in_threads(model, plan, x, None, loss_over="caller")

    def loss(module: Any) -> torch.Tensor:
        return F.cross_entropy(module(x)[0], y) + module(-x)[0].square().mean()

    loss(model).backward()
    for _ in range(2):  # the second time in the same channels
        loss(pm).backward()
        assert_all_close(
            pm.gradients(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, "gradient"
        )
        pm.zero_grad()


def test_gradients_are_kept_in_memory_of_their_own(lasting_mail: None) -> None:
    """Even a view of a received gradient, whose memory the next step overwrites."""
    torch.manual_seed(0)
    model, y = ClassToken(), torch.tensor([0, 2])
    plan = plan_by_hand(model, torch.randn(2, 5, 6), 2, ["norm.layer_norm"])
    pm, reference = in_threads(model, plan, torch.randn(2, 5, 6), F.cross_entropy), Reference(model)
    for _ in range(2):
        x = torch.randn(2, 5, 6)
        assert pm.forward_backward(x, y).loss == pytest.approx(reference.forward_backward(x, y, 2), abs=1e-6)
        assert_all_close(pm.gradients(), reference.gradients(), "gradient")


def test_clipping_counts_tied_parameters_once_and_covers_all_stages() -> None:
    torch.manual_seed(0)
    model = Tied()
    x, y = tied(6)
    adam = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731
    plan = plan_by_hand(model, x, 3, ["layers.1.0.layer_norm", "head.linear"])
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=adam, clip_grad_norm=0.05)
    reference = Reference(model, F.cross_entropy, adam)
    for _ in range(3):
        reference.forward_backward(x, y, 3)
        norm = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.05)
        assert norm > 0.05
        reference.step()
        assert pm.train_step(x, y).grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert_all_close(pm.state_dict(), reference.model.state_dict(), "state")


def test_a_cut_keeps_the_memory_format() -> None:
    def value(*shape: int, stride: tuple[int, ...]) -> Value:
        return Value("v", shape, "float32", stride)

    assert value(2, 3, 4, 5, stride=(60, 20, 5, 1)).memory_order == (0, 1, 2, 3)
    assert value(2, 3, 4, 5, stride=(60, 1, 15, 3)).memory_order == (0, 2, 3, 1)  # channels_last
    assert value(2, 3, stride=(1, 2)).memory_order == (1, 0)
    assert value(2, 4, 32, 784, stride=(301056, 32, 1, 384)).memory_order == (0, 3, 1, 2)  # a slice of a fused qkv
    assert value(2, 3, stride=(0, 1)).memory_order == (0, 1)  # expanded
    assert value(stride=()).memory_order == ()
    assert inverse_permutation([0, 2, 3, 1]) == [0, 3, 1, 2]

    seen: list[tuple[int, ...]] = []

    class Note(nn.Module):
        def __init__(self, stage: nn.Module) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            seen.append(args[0].stride())
            return self.stage(*args)

    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    pm = in_threads(model, plan_by_hand(model, x, 1, ["1.conv2d"]), x, None, lambda *a: Note(graph_module(*a)))
    assert_close(pm(x), model(x).detach(), "output")
    assert (100, 1, 20, 4) in seen


class Wrong(nn.Module):
    """A stage whose results, or the gradient of whose input, differ from its program."""

    def __init__(self, stage: nn.Module, wrong: str) -> None:
        super().__init__()
        self.stage, self.wrong = stage, wrong

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.wrong == "gradient" and not args[0].requires_grad:  # the first stage
            return self.stage(*args)
        if self.wrong == "gradient":
            args[0].grad_dtype = torch.bfloat16
        results = self.stage(*args)
        changes = {"dtype": lambda t: t.bfloat16(), "shape": lambda t: t[:1], "gradient": lambda t: t}
        return tuple(map(changes[self.wrong], results))


@pytest.mark.parametrize(
    ("wrong", "message"),
    {
        "dtype": "0.linear is torch.bfloat16 [2, 8], but torch.float32 [2, 8] in the program",
        "shape": "0.linear is torch.float32 [1, 8], but torch.float32 [2, 8] in the program",
        "gradient": "the gradient of 0.linear is torch.bfloat16 [2, 8], but torch.float32 [2, 8] in the program",
    }.items(),
    ids=["dtype", "shape", "gradient"],
)
def test_no_tensor_that_differs_from_the_program_is_sent(wrong: str, message: str) -> None:
    model, (x, y) = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), vectors(4)
    plan = plan_by_hand(model, x, 2, ["1.linear"], "interleaved", chunks=2)  # on one rank, so that none waits
    pm = in_threads(model, plan, x, F.cross_entropy, lambda *a: Wrong(graph_module(*a), wrong))
    with pytest.raises(AssertionError) as raised:
        pm.forward_backward(x, y)
    assert f"between stages 0 and 1, {message}" in str(raised.value)

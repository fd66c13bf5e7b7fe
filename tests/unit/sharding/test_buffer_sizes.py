"""Programs reserve as many buffer bytes as their collectives take, by operator and in whole models."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.effort import only
from support.handmade import in_threads, plan_by_hand
from support.models import UNet, resnet18, tiny_vit
from support.random_plans import TP, random_labels, random_layouts
from support.symmetric_buffers import ThreadBuffers, thread_buffers
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import autopar
from autopar.api.model import ParallelModel
from autopar.codegen import compile as regions
from autopar.codegen.emit import graph_module
from autopar.ir.graph import Op, Ref
from autopar.ir.plan_parts import Precision
from autopar.ir.program import Program
from autopar.ops import collectives
from autopar.ops.registry import meta_results, operator, value_from
from autopar.runtime.comm import symmetric_collectives as symmetric_axis
from autopar.runtime.comm.symmetric_collectives import SymmetricBufferPool, SymmetricCommunicator
from autopar.sharding.buffer_sizes import symmetric_buffer_bytes
from autopar.sharding.reshard import COLLECTIVES
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model

SGD = functools.partial(torch.optim.SGD, lr=1e-3)
NUMBERS = itertools.count()
AXIS = "tp"


@dataclass(frozen=True)
class SharedBuffers:
    """Buffers of thread ranks, and the key under which each rank's operators find them."""

    of_ranks: Sequence[ThreadBuffers]
    keys: Sequence[str]

    def taken(self) -> int:
        """Most that a collective has taken since the last call."""
        assert len({buffers.taken for buffers in self.of_ranks}) == 1
        most = self.of_ranks[0].taken
        for buffers in self.of_ranks:
            buffers.taken = 0
        return most

    @property
    def reserved(self) -> int:
        assert len({buffers.num_bytes for buffers in self.of_ranks}) == 1
        return self.of_ranks[0].num_bytes


@pytest.fixture
def registered() -> Iterator[Callable[[int], SharedBuffers]]:
    """Makes buffers of so many ranks, which operators know until the test ends."""
    keys: list[str] = []

    def make(ranks: int) -> SharedBuffers:
        of_ranks = thread_buffers(ranks, 2**24, late_seconds=0.0)
        own = [f"buffers {next(NUMBERS)}" for _ in of_ranks]
        for key, buffers in zip(own, of_ranks, strict=True):
            collectives.register(key, SymmetricCommunicator(buffers.rank, ranks, buffers))
        keys.extend(own)
        return SharedBuffers(of_ranks, own)

    yield make
    for key in keys:
        collectives.unregister(key)


# -- operators -----------------------------------------------------------------------------------------------------

WHOLE = (12, 5, 12)


def part_of(dim: int, ranks: int) -> tuple[int, ...]:
    return tuple(size // ranks if k == dim else size for k, size in enumerate(WHOLE))


def operators(ranks: int) -> list[tuple[str, tuple[int, ...], tuple[Any, ...]]]:
    """Every operator of graphs, with the shape of what it takes and the arguments behind that."""
    return [
        ("all_reduce", (7, 1, 11), (AXIS,)),
        ("reduce_scatter", WHOLE, (2, 1, ranks, AXIS)),
        ("all_gather", part_of(0, ranks), (0, 1, ranks, AXIS, False)),
        ("all_gather", part_of(2, ranks), (2, 1, ranks, AXIS, True)),
        ("all_to_all", part_of(0, ranks), (0, 1, 2, 1, ranks, AXIS)),
        ("shard", WHOLE, (0, 1, ranks, AXIS, False)),
        ("shard", WHOLE, (0, 1, ranks, AXIS, True)),
        ("sum_gradient", (7, 1, 11), (AXIS,)),
        ("share_gradient", WHOLE, (ranks,)),
        ("first_rank", WHOLE, (AXIS,)),
    ]


def program_of(name: str, shape: Sequence[int], args: Sequence[Any], dtype: torch.dtype, trained: bool) -> Program:
    """A program of one operation of ``x``."""
    given = value_from("x", torch.empty(*shape, dtype=dtype, requires_grad=trained))
    op = Op("y", f"autopar.{name}.default", (Ref("x"), *args), (), (given,), "")
    (made,) = meta_results(op, [given])
    assert made.requires_grad == trained
    return Program(0, "train", shape[0], (given,), (), (), (replace(op, outputs=(value_from("y", made),)),), ())


def run_everywhere(
    buffers: SharedBuffers, call: Callable[..., torch.Tensor], shapes: Sequence[Sequence[int]], args: Sequence[Any],
    dtype: torch.dtype, trained: Sequence[bool],
) -> None:  # fmt: skip
    """Call an operator on all ranks, forward and backward."""

    def run(key: str) -> None:
        tensors = [torch.randn(*s).to(dtype).requires_grad_(t) for s, t in zip(shapes, trained, strict=True)]
        result = call(*tensors, *(key if arg == AXIS else arg for arg in args))
        if any(trained):
            result.sum().backward()

    with ThreadPoolExecutor(len(buffers.keys)) as threads:
        list(threads.map(run, buffers.keys))


@pytest.mark.parametrize("one_shot_bytes", [2**19, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_operators_take_what_is_reserved(
    ranks: int, dtype: torch.dtype, one_shot_bytes: int, registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric_axis, "ONE_SHOT_BYTES", one_shot_bytes)
    assert {name for name, *_ in operators(ranks)} == COLLECTIVES.keys()
    for (name, shape, args), trained in itertools.product(operators(ranks), (True, False)):
        buffers = registered(ranks)
        asked = list(symmetric_buffer_bytes(program_of(name, shape, args, dtype, trained).ops[0], AXIS, ranks))
        for one in buffers.of_ranks:
            one.reserve(max(asked, default=0))
        run_everywhere(buffers, operator(f"autopar.{name}.default"), [shape], args, dtype, [trained])
        rounded_up = (ranks - 1) * dtype.itemsize if name in ("all_reduce", "sum_gradient") else 0
        taken = buffers.taken()
        assert taken <= buffers.reserved <= taken + rounded_up, (name, args, trained)
    assert list(symmetric_buffer_bytes(program_of("all_reduce", (4,), ("dp",), dtype, False).ops[0], AXIS, ranks)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_layers_take_what_was_reserved_for_the_operations_in_their_place(
    ranks: int, dtype: torch.dtype, registered: Any
) -> None:
    # Layers of 11 columns, what they take; the operations in whose place they are, what those take.
    part, rows, made = (7, 3, 5), (7 * ranks, 3, 5), (7 * ranks, 3, 11)
    layers = [
        ("all_gather_linear", part, (1, 1, ranks, AXIS), "all_gather", part, (1, 1, ranks, AXIS, True)),
        ("linear_with_async_grad_allreduce", part, (AXIS,), "sum_gradient", part, (AXIS,)),
        ("pipelined_all_gather_linear", part, (ranks, AXIS), "all_gather", part, (0, 1, ranks, AXIS, True)),
        ("pipelined_linear_reduce_scatter", rows, (ranks, AXIS), "reduce_scatter", made, (0, 1, ranks, AXIS)),
    ]
    for (name, x, args, instead, shape, where), weight_trained in itertools.product(layers, (True, False)):
        buffers = registered(ranks)
        asked = max(symmetric_buffer_bytes(program_of(instead, shape, where, dtype, True).ops[0], AXIS, ranks))
        for one in buffers.of_ranks:
            one.reserve(asked)
        call = operator(f"autopar.{name}.default")
        shapes, trained = (x, (11, 5), (11,)), (True, weight_trained, True)
        run_everywhere(buffers, call, shapes, args, dtype, trained)
        taken = buffers.taken()
        assert taken <= asked <= taken + (ranks - 1) * dtype.itemsize, (name, weight_trained)
        run_everywhere(buffers, call, shapes, args, dtype, (False, False, False))
        assert buffers.taken() <= asked


def test_what_is_not_reserved_is_told(registered: Any) -> None:
    buffers = registered(2)
    for one in buffers.of_ranks:
        one.reserve(80)
    for name, args, what, num in [
        ("all_reduce", (AXIS,), "an all-reduce", 96),
        ("all_gather", (0, 1, 2, AXIS, False), "an all-gather", 96),
        ("reduce_scatter", (0, 1, 2, AXIS), "a reduce-scatter", 96),
        ("all_to_all", (0, 1, 1, 1, 2, AXIS), "an all-to-all", 96),
    ]:
        message = f"^{what} of 2 ranks takes {num} bytes of each rank's buffer, 80 were reserved"
        with pytest.raises(AssertionError, match=message):
            run_everywhere(buffers, operator(f"autopar.{name}.default"), [(4, 6)], args, torch.float32, [False])
    layer = operator("autopar.pipelined_all_gather_linear.default")
    with pytest.raises(AssertionError, match=r"^a linear layer's all-gather of 2 ranks takes 96 bytes"):
        run_everywhere(buffers, layer, [(2, 6), (3, 6), (3,)], (2, AXIS), torch.float32, [False] * 3)
    layer = operator("autopar.pipelined_linear_reduce_scatter.default")
    with pytest.raises(AssertionError, match=r"^a linear layer's reduce-scatter of 2 ranks takes 96 bytes"):
        run_everywhere(buffers, layer, [(4, 3), (6, 3), (6,)], (2, AXIS), torch.float32, [False] * 3)
    summed = operator("autopar.linear_with_async_grad_allreduce.default")
    with pytest.raises(AssertionError, match=r"^an all-reduce of 2 ranks takes 96 bytes"):
        run_everywhere(buffers, summed, [(4, 6), (3, 6), (3,)], (AXIS,), torch.float32, [True] * 3)


def test_buffers_grow_between_steps_only_and_outgrown_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def allocated(num_bytes: int, device: torch.device, group: Any) -> tuple[torch.Tensor, Any]:
        made.append(num_bytes)
        return torch.empty(max(num_bytes, 256), dtype=torch.uint8), None

    idle: list[torch.device] = []
    monkeypatch.setattr(symmetric_axis, "allocate", allocated)
    monkeypatch.setattr(torch.cuda, "synchronize", idle.append)
    buffers = SymmetricBufferPool(0, torch.device("cuda", 0), None)
    assert buffers.num_bytes == 0
    for num_bytes in (0, 100, 256, 1024, 512, 1024, 4096):
        buffers.reserve(num_bytes)
        assert buffers.num_bytes >= num_bytes
    assert made == [0, 1024, 4096] and len(idle) == len(made)
    assert [buffer.numel() for buffer, _ in buffers.allocations] == [256, 1024, 4096]


# -- models --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    side: int
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.cross_entropy

    def x(self, batch: int) -> torch.Tensor:
        return torch.randn(batch, 3, self.side, self.side)

    def y(self, batch: int) -> torch.Tensor:
        labels = self.loss_fn is F.cross_entropy
        return torch.randint(0, 10, (batch,)) if labels else torch.rand(batch, 1, self.side, self.side)


MODELS = {
    "vit": Case(functools.partial(tiny_vit, 2), 32),
    "resnet18": Case(resnet18, 32),
    "unet": Case(UNet, 8, F.mse_loss),
}


def searched(model: nn.Module, x: torch.Tensor, precision: Precision, pp: int = 1) -> autopar.Plan:
    return autopar.plan(
        model, pp * TP, x, hardware="cpu-generic", memory="64GiB", pp=pp, tp=TP, microbatches=2, precision=precision
    )


def drawn(model: nn.Module, x: torch.Tensor, precision: Precision) -> autopar.Plan:
    rng = random.Random(type(model).__name__)
    graph = lower_model(model, as_call(model, x).first(4), "train", "", precision)
    labels, layouts = random_labels(graph, rng), random_layouts(graph, rng)
    return plan_by_hand(model, x, 2, [], tp=TP, strategies=labels, shardings=layouts, precision=precision)


def over_buffers(
    case: Case,
    model: nn.Module,
    x: torch.Tensor,
    plan: autopar.Plan,
    groups: Sequence[SharedBuffers],
    compiled: bool = False,
) -> ParallelModel:
    """A parallel model whose ranks are threads with buffers, shared by each two that follow each other."""

    def axes(rank: int) -> Mapping[str, str]:
        return {AXIS: groups[rank // TP].keys[rank % TP]}

    build = functools.partial(graph_module, compiled=compiled)
    return in_threads(model, plan, x, case.loss_fn, build, axes, optimizer=SGD)


PLANNERS = {"searched": searched, "drawn": drawn}
CELLS = [(name, precision, planner) for name in MODELS for precision in ("fp32", "bf16") for planner in PLANNERS]
KEPT = [("vit", "bf16", "searched"), ("vit", "fp32", "drawn"), ("unet", "bf16", "drawn"), ("unet", "fp32", "searched")]


@pytest.mark.parametrize(("name", "precision", "planner"), only(KEPT, CELLS))
def test_models_take_what_is_reserved(name: str, precision: Precision, planner: str, registered: Any) -> None:
    """Evaluation before training, then batches of other sizes; a collective that takes more fails by itself."""
    torch.manual_seed(0)
    case, buffers = MODELS[name], registered(TP)
    model, x = case.make(), case.x(8)
    pm = over_buffers(case, model, x, PLANNERS[planner](model, x, precision), [buffers])
    pm.eval()(x)
    evaluated, taken = buffers.reserved, buffers.taken()
    assert 0 < taken <= evaluated <= TP * taken  # gradients that an evaluation has not
    pm.train()
    for batch in (8, 16):
        assert isfinite(pm.train_step(case.x(batch), case.y(batch)).loss)
        # Forward and backward have run: but for a sum's segments of one length, nothing was reserved in vain.
        taken = buffers.taken()
        assert taken <= buffers.reserved <= max(evaluated, taken + 4 * (TP - 1))
    before = buffers.reserved
    pm.train_step(case.x(8), case.y(8))
    assert buffers.reserved == before
    pm.forward_backward(case.x(7), case.y(7))  # microbatches of two sizes, one of which cannot be split
    before = buffers.reserved
    buffers.taken()
    pm.eval()(case.x(40))
    taken = buffers.taken()
    assert taken <= buffers.reserved <= max(before, TP * taken)


@pytest.mark.parametrize("name", only(["unet"], ["vit", "unet"]))
def test_compiled_stages_take_what_is_reserved(name: str, registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "inductor", lambda module, args, options: aot_eager(module, args))  # not to kernels
    monkeypatch.setattr(regions, "COMPILED_REGIONS", {})
    torch.manual_seed(0)
    case, buffers = MODELS[name], registered(TP)
    model, x = case.make(), case.x(8)
    pm = over_buffers(case, model, x, searched(model, x, "bf16"), [buffers], compiled=True)
    pm.train_step(x, case.y(8))
    taken = buffers.taken()
    assert len(regions.COMPILED_REGIONS) > 1
    assert 0 < taken <= buffers.reserved <= taken + 4 * (TP - 1)


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_stages_have_buffers_of_their_own(recompute: Any, registered: Any) -> None:
    torch.manual_seed(0)
    case, groups = MODELS["vit"], [registered(TP), registered(TP)]
    model, x = case.make(), case.x(8)
    plan = searched(model, x, "fp32", pp=2)
    plan = replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))
    pm = over_buffers(case, model, x, plan, groups)
    pm.train_step(x, case.y(8))
    for buffers in groups:
        taken = buffers.taken()
        assert 0 < taken <= buffers.reserved <= taken + 4 * (TP - 1)

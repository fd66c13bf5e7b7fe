"""Predicted peaks: how a backward's memory goes, what is measured of it, and what peers' buffers take."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import timm
import timm.utils
import torch
import torch.nn.functional as F
from support.handmade import in_threads
from support.models import resnet18, tiny_vit
from torch import nn

import autopar
from autopar.api.program_cache import ProgramCache
from autopar.cost.hardware.load import load_hardware
from autopar.ir.comm_sizes import message_bytes, replica_buffer_bytes
from autopar.ir.cost_graph import BUCKET_BYTES, CostGraph, Group, ResidentTensor, TensorEdge
from autopar.ir.grad_buckets import NUM_GRAD_SLOTS, bucket_sizes
from autopar.ir.graph import Graph
from autopar.ir.hardware import Link
from autopar.ir.plan_parts import Replicas
from autopar.runtime.comm.symmetric_p2p import count_until_freed, reserved_bytes
from autopar.runtime.params.flat_buckets import flat_buckets, replica_owners
from autopar.sharding.buffer_sizes import symmetric_buffer_bytes
from autopar.solve.cuts.evaluate import stage_costs
from autopar.solve.cuts.memory import working_bytes
from autopar.solve.cuts.problem import CutProblem
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
EMA = functools.partial(timm.utils.ModelEmaV3, decay=0.9)
MIB = 2**20


# -- formulas ------------------------------------------------------------------------------------------------------


def chain(weights: tuple[ResidentTensor, ...], dp: int = 1, **options: Any) -> CutProblem:
    """Three groups that save 8, 4 and 2 MiB with working sets of 5, 6 and 1, on one stage."""
    sizes = ((8, 5), (4, 6), (2, 1))
    groups = tuple(
        Group(f"g{i}", (f"g{i}",), "", saved_bytes=saved * MIB, transient_bytes=transient * MIB)
        for i, (saved, transient) in enumerate(sizes)
    )
    cost = CostGraph("chain", 1, (*groups, Group("loss", (), "")), (), weights)
    return CutProblem(cost, **({"stages": 1, "microbatches": 1, "capacity_bytes": None, "in_flight": (1,),
                                "boundary": (), "replicas": Replicas(dp)} | options))  # fmt: skip


def gradient(group: int, mib: int, **rest: Any) -> ResidentTensor:
    size = mib * MIB
    return ResidentTensor(
        f"w{group}", 4 * size, (group,), gradient_bytes=size, wgrad_bytes=rest.pop("left", size), **rest
    )


@pytest.mark.parametrize(
    ("weights", "options", "mib"),
    [
        ((), {}, 4),  # the second group's working set, when the third has let go of its 2
        ((gradient(2, 3),), {}, 7),  # and the third one's gradient is there
        ((gradient(2, 3),), {"microbatches": 2}, 4),  # which is among the weights when it was there before
        ((gradient(2, 3),), {"dp": 2}, 7),  # waits for its bucket
        ((gradient(2, 3, left=0),), {"dp": 2}, 4),  # was added to its sum at once
        ((gradient(2, 26), gradient(1, 3)), {"dp": 2}, 30),  # 26 are a bucket, moved before the next comes
        ((gradient(0, 20, flattened_grad_bytes=20 * MIB),), {}, 26),  # 20 and their packed copy, when all 14 are gone
    ],
)
def test_the_working_set_is_the_backward_s_fullest_moment(
    weights: tuple[ResidentTensor, ...], options: dict[str, Any], mib: int
) -> None:
    problem = chain(weights, **options)
    assert problem.has_buckets == ("dp" in options) and 25 * MIB == BUCKET_BYTES
    assert working_bytes(problem, range(4), weights) == mib * MIB
    (cost,) = stage_costs(problem, (0,) * 4)
    gradients = 0 if problem.gradients_come else sum(w.gradient_bytes for w in weights)
    assert cost.weight_bytes == sum(w.num_bytes - w.gradient_bytes for w in weights) + gradients
    assert cost.memory_bytes == cost.weight_bytes + (14 + mib) * MIB


def test_what_is_received_and_saved_counts_once() -> None:
    groups = (*(Group(f"g{i}", (f"g{i}",), "", saved_bytes=10) for i in range(3)), Group("loss", (), ""))
    flows = (TensorEdge("a", 0, (1, 2), 8, True, (2,)), TensorEdge("b", 1, (2,), 2, True))
    problem = CutProblem(CostGraph("m", 1, groups, flows), 3, 4, None, (3, 2, 1), (Link(0.0, 1.0),) * 2)
    # "a" is sent on from the first stage and passes the second; "b" is sent by the second; the third saves "a" itself.
    assert [c.held_bytes for c in stage_costs(problem, (0, 1, 2, 2))] == [10 + 8, 10 + 8 + 8 + 2, 10 - 8 + 8 + 2]
    near = replace(problem, peers=frozenset({"pp"}))
    costs = stage_costs(near, (0, 1, 2, 2))
    assert [c.held_bytes for c in costs] == [18, 20, 2]
    # Each of 4 microbatches has a place for "a" and its gradient, or "b": most is sent to the first stage.
    assert [c.buffer_bytes for c in costs] == [4 * 2 * message_bytes(8)] * 3


# -- measured ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "precision", "ema"),
    [
        pytest.param({"microbatches": 1}, "fp32", None, marks=pytest.mark.full),
        ({"microbatches": 1}, "bf16", None),
        pytest.param({"microbatches": 4}, "fp32", EMA, marks=pytest.mark.full),
        ({"microbatches": 1, "recompute": "all"}, "fp32", None),
        pytest.param({"pp": 2, "microbatches": 1, "schedule": "1f1b"}, "fp32", None, marks=pytest.mark.full),
        ({"pp": 2, "microbatches": 4, "schedule": "1f1b"}, "bf16", EMA),
    ],
    ids=str,
)
def test_predicted_peaks_are_measured_ones(asked: dict[str, Any], precision: str, ema: Any) -> None:
    torch.manual_seed(0)
    model, devices = tiny_vit(6, embed_dim=96), asked.get("pp", 1)
    x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    plan = autopar.plan(
        model, devices, x, optimizer=ADAMW, ema=ema, hardware="cpu-generic", precision=precision, **asked
    )
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW, ema=ema)
    pm.train_step(x, y)
    measured = pm.measure_memory(x, y)
    for rank, predicted in enumerate(plan.prediction.peak_bytes):
        assert predicted == pytest.approx(measured[rank], rel=0.05), rank


def test_predicted_peaks_of_split_backwards_are_not_low() -> None:
    """Tensors kept for deferred gradients count from the forward on; the estimate is high, never low."""
    torch.manual_seed(0)
    model, x, y = tiny_vit(6, embed_dim=96), torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    plan = autopar.plan(model, 2, x, optimizer=ADAMW, hardware="cpu-generic", pp=2, microbatches=4, schedule="zb-h1")
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW)
    pm.train_step(x, y)
    measured = pm.measure_memory(x, y)
    for rank, predicted in enumerate(plan.prediction.peak_bytes):
        assert 0.98 * measured[rank] <= predicted <= 1.2 * measured[rank], (rank, predicted, measured[rank])


def test_averages_are_planned_for() -> None:
    model = resnet18()
    asked: dict[str, Any] = {"batch_size": 8, "hardware": "cpu-generic", "recompute": "none", "microbatches": 1}
    call = torch.empty(8, 3, 32, 32, device="meta")
    plain, averaged = (autopar.plan(model, 1, call, ema=ema, **asked).prediction.peak_bytes[0] for ema in (None, EMA))
    assert averaged - plain == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


# -- memory that peers reach ---------------------------------------------------------------------------------------


def on_gpus(model: nn.Module, x: torch.Tensor, **asked: Any) -> autopar.Plan:
    return autopar.plan(model, 2, x, hardware="h200-nvlink", precision="bf16", cuda_graph=False, **asked)


def buffers(plan: autopar.Plan, position: int, inputs: int) -> int:
    """Predicted bytes of symmetric buffers at a pipeline position, without inputs and libraries."""
    own = [stage.memory.buffer_bytes for stage in plan.stages[position :: plan.mesh.pp] if stage.memory is not None]
    return sum(own) - inputs * (position == 0) - load_hardware(plan.hardware.name).reserve_bytes


@pytest.mark.parametrize(
    "asked",
    [{"microbatches": 4, "schedule": "1f1b"}, {"microbatches": 4, "schedule": "interleaved", "chunks": 2}],
    ids=str,
)
def test_buffers_of_a_pipeline_have_a_place_for_each_message(asked: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x, y = tiny_vit(4), torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    plan = on_gpus(model, x, pp=2, **asked)
    pm = in_threads(model, plan, x, F.cross_entropy, optimizer=ADAMW)
    pm.train_step(x, y)
    received = []
    for rank in pm._ranks.ranks:  # type: ignore[attr-defined]
        step = rank.current_step
        incoming, _ = step.messages([bound.action for bound in step.bound_actions])
        received.append(sum(map(message_bytes, incoming.values())))
    assert max(received) > 0
    assert [buffers(plan, position, x.nbytes) for position in range(2)] == [max(received)] * 2
    apart = on_gpus(model, x, pp=2, transport="nccl", **asked)
    assert [buffers(apart, position, x.nbytes) for position in range(2)] == [0, 0]


def test_buffers_of_tensor_parallel_ranks_take_their_largest_collective() -> None:
    torch.manual_seed(0)
    model, x = tiny_vit(2), torch.randn(64, 3, 32, 32)
    plan = on_gpus(model, x, tp=2, microbatches=2)
    programs = ProgramCache(model, plan, as_call(model, x).first(32))
    ops = [op for known in programs.specializations.values() for program in known.programs for op in program.ops]
    assert buffers(plan, 0, x.nbytes) == max(taken for op in ops for taken in symmetric_buffer_bytes(op, "tp", 2)) > 0


@functools.cache
def graph_of(name: str, precision: Any) -> Graph:
    with torch.device("meta"):
        model = timm.create_model(name)
        x = torch.empty(2, 3, 224, 224)
    return lower_model(model, as_call(model, x), "train", name, precision)


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "resnet50"])
@pytest.mark.parametrize("num_owners", [1, 2, 4])
def test_buffers_of_replicas_take_their_largest_bucket(name: str, num_owners: int) -> None:
    weights = [weight for weight in graph_of(name, "bf16").weights if weight.requires_grad]
    owners = replica_owners([weights], {}, num_owners) if num_owners > 1 else {}
    made = flat_buckets(weights, owners, num_owners)
    sizes = [b.longest_segment * b.num_segments * b.dtype.itemsize for b in made]
    assert bucket_sizes(weights, num_owners) == sizes


def test_replicas_buffers_and_inputs_are_planned_for() -> None:
    model, x = tiny_vit(2), torch.randn(8, 3, 32, 32)
    plan = on_gpus(model, x, dp=2, zero=0, microbatches=1)
    weights = [
        w for w in lower_model(model, as_call(model, x).first(4), "train", "", "bf16").weights if w.requires_grad
    ]
    assert buffers(plan, 0, x.nbytes // 2) == replica_buffer_bytes(max(bucket_sizes(weights, 1)), 2)
    largest = max(bucket_sizes(weights, 1)) // 2
    narrow = on_gpus(model, x, dp=2, zero=0, microbatches=1, reduce_dtype="bfloat16")
    taken = NUM_GRAD_SLOTS if len(bucket_sizes(weights, 1)) > 1 else 1
    assert buffers(narrow, 0, x.nbytes // 2) == replica_buffer_bytes(largest, 2) + taken * largest
    captured = autopar.plan(
        model, 2, x, hardware="h200-nvlink", precision="bf16", dp=2, zero=0, microbatches=1, transport="nccl"
    )
    assert buffers(captured, 0, 0) == x.nbytes  # each replica's half as it was given, and where the step reads it
    on_cpu = autopar.plan(model, 2, x, hardware="cpu-generic", dp=2, zero=0, microbatches=1)
    assert buffers(on_cpu, 0, 0) == 0


def test_reserved_memory_is_counted_until_it_is_freed() -> None:
    device = torch.device("cpu")
    assert reserved_bytes(device) == 0
    first, second = torch.empty(300, dtype=torch.uint8), torch.empty(20)
    count_until_freed(first)
    count_until_freed(second)
    view = first[:1]
    del first
    assert reserved_bytes(device) == 380
    del view
    assert reserved_bytes(device) == 80
    del second
    assert reserved_bytes(device) == 0

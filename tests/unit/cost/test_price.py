"""Prices of groups, flows, weights and collectives, on graphs made by hand and random ones."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.graphs import MACHINE, MLP, X, buffer, graph, op, parameter, value
from support.priced import price

from autopar.cost.groups.cost_graph import with_weight_sharing
from autopar.cost.groups.weight_memory import Sharing, gradient_buckets, weight_cost
from autopar.cost.ops.op_cost import Pricing, op_costs
from autopar.cost.ops.op_stats import graph_stats
from autopar.errors import HardwareError
from autopar.ir.graph import Graph, LocalDevice, Op
from autopar.ir.hardware import Efficiency, Hardware, Launch, Link
from autopar.ir.layout import broadcast_layout, split_layout
from autopar.ir.network import Network, Port
from autopar.ir.plan_parts import ReduceDtype, Replicas, ZeroStage


def priced(model: Graph, batch: int = 2, machine: Hardware = MACHINE):
    return price(model, graph_stats(model), machine, batch)


def test_the_printed_cost_graph():
    assert str(priced(MLP)).splitlines() == [
        "toy: 3 groups, 2 flows, microbatch of 2",
        "   0 fc1: F 0.128 ms, B 0.129 ms, saves 0.00 MiB, reads [], a cut after it sends 0.00 MiB",
        "   1 fc2: F 0.096 ms, B 0.192 ms, saves 0.00 MiB, reads [0], a cut after it sends 0.00 MiB",
        "   2 loss: F 0.000 ms, B 0.000 ms, saves 0.00 MiB, reads [1]",
    ]


def test_seconds_are_the_larger_of_arithmetic_and_traffic():
    first, second, loss = priced(MLP).groups
    assert (first.ops, second.ops, loss.ops) == (("fc1", "act"), ("fc2",), ())
    # fc1 is bound by 128 FLOPs; gelu by bytes: x and y, in the backward their gradients and the saved x. The bias's
    # gradient reads that of y again; that of 32 weights is added to a sum: two are read and one is written.
    assert first.forward_seconds == pytest.approx(128e-6 + 128e-9)
    assert first.backward_seconds == pytest.approx(128e-6 + 192e-9 + 64e-9 + 3 * 4 * 32e-9)
    # a machine without arithmetic cost: fc2 moves y, w and x; then the gradients of all three, that of y
    # twice, the saved x, and the sum
    free = priced(MLP, machine=replace(MACHINE, peak_flops={"float32": 1e15})).groups[2]
    assert free.name == "fc2"
    assert free.forward_seconds == pytest.approx((24 + 96 + 64) * 1e-9)
    assert free.backward_seconds == pytest.approx((2 * 24 + 96 + 64 + 64 + 96 + 3 * 96) * 1e-9)
    assert first.flops == 128
    # bytes of x and y; in the backward gradients of y, w and b
    assert first.transient_bytes == 64 + 128 + 32
    assert loss.seconds == 0


def test_a_working_set_is_beyond_what_has_been_saved():
    """Of a sum of residuals: its other summand and itself, since a relu keeps the first and its gradients are one."""
    residual = graph(
        (X,),
        (parameter("a", 4, 4), parameter("b", 4, 4)),
        op("aten.linear.default", ("%x", "%a"), value("one", 2, 4)),
        op("aten.relu.default", ("%one",), value("kept", 2, 4)),
        op("aten.linear.default", ("%kept", "%b"), value("two", 2, 4)),
        op("aten.add.Tensor", ("%kept", "%two"), value("sum", 2, 4)),
        op("aten.relu.default", ("%sum",), value("out", 2, 4)),
    )
    costs = op_costs(Pricing(residual, graph_stats(residual), MACHINE, 2))
    assert costs["sum"].transient_bytes == 32 + 32


def test_a_backward_launches_a_kernel_for_each_gradient():
    slow = replace(MACHINE, launch=Launch(1.0, 1.0, 1.0))
    launches = {g.name: (round(g.forward_seconds), round(g.backward_seconds)) for g in priced(MLP, machine=slow).groups}
    assert launches == {"fc1": (1, 2), "act": (1, 1), "fc2": (1, 2), "loss": (0, 0)}  # of w and b; x and w


@pytest.mark.parametrize(
    ("target", "weight", "groups", "kind"),
    [
        ("aten.conv2d.default", (4, 1, 3, 3), 4, "depthwise"),
        ("aten.conv2d.default", (8, 1, 3, 3), 4, "depthwise"),
        ("aten.conv2d.default", (4, 2, 3, 3), 2, "convolution"),
        ("aten.conv2d.default", (4, 4, 3, 3), 1, "convolution"),
        ("aten.conv_transpose2d.input", (4, 1, 3, 3), 4, "depthwise"),
    ],
)
def test_kinds_of_convolutions(target: str, weight: tuple[int, ...], groups: int, kind: str):
    """A machine on which all but depthwise convolutions are nearly free, and with a backward of its own."""
    free = Efficiency(1e9, 0.0)
    machine = replace(
        MACHINE,
        memory_bytes_per_second=1e15,
        efficiency={**MACHINE.efficiency, "convolution": free, "depthwise": Efficiency(1.0, 0.0, backward=free)},
    )
    settings = ((1, 1), (1, 1), (0, 0), groups) if "transpose" in target else ((1, 1), (1, 1), (1, 1), groups)
    shape = (2, weight[0] if "transpose" not in target else groups * weight[1], 6, 6)
    model = graph(
        (value("image", 2, 4, 6, 6),),
        (parameter("w", *weight),),
        op(target, ("%image", "%w", None, *settings), value("out", *shape)),
    )
    group = priced(model, machine=machine).groups[0]
    assert group.flops > 0 and (group.forward_seconds > group.flops * 0.5e-6) == (kind == "depthwise")
    assert group.backward_seconds < group.flops * 1e-9


def test_activations_scale_with_the_batch_and_weights_do_not():
    small, large = priced(MLP, batch=2), priced(MLP, batch=6)
    assert large.groups[1].flops == 3 * small.groups[1].flops
    assert [f.num_bytes for f in large.edges] == [3 * f.num_bytes for f in small.edges] == [192, 72]
    assert [g.saved_bytes for g in large.groups] == [3 * g.saved_bytes for g in small.groups]
    assert large.weights == small.weights
    fast = replace(MACHINE, peak_flops={"float32": 1e15})
    assert priced(MLP, batch=6, machine=fast).groups[2].forward_seconds == pytest.approx((72 + 96 + 192) * 1e-9)


def test_flows_name_producer_consumers_and_gradient():
    skip = graph(
        (X,),
        (parameter("a", 4, 4), parameter("b", 4, 4), parameter("c", 4, 4)),
        op("aten.linear.default", ("%x", "%a"), value("one", 2, 4)),
        op("aten.linear.default", ("%one", "%b"), value("two", 2, 4)),
        op("aten.linear.default", ("%two", "%c"), value("three", 2, 4)),
        op("aten.add.Tensor", ("%three", "%one"), value("sum", 2, 4)),
        outputs="sum two",
    )
    assert [(f.value, f.producer, f.consumers, f.num_bytes, f.requires_grad) for f in priced(skip).edges] == [
        ("one", 0, (1, 2), 32, True),
        ("two", 1, (2, 3), 32, True),
        ("sum", 2, (3,), 32, True),
    ]


def test_weights_hold_value_gradient_and_optimizer_state():
    holdings = {h.name: h for h in priced(MLP).weights}
    assert (holdings["fc1.weight"].num_bytes, holdings["fc1.weight"].numel) == (32 * 16, 32)
    assert holdings["fc1.weight"].groups == (0,)
    assert holdings["fc1.weight"].optimizer_seconds == pytest.approx((4 + 2 * 16) * 32 * 1e-9)
    frozen = replace(MLP, weights=tuple(replace(w, requires_grad=False) for w in MLP.weights))
    assert [(h.num_bytes, h.optimizer_seconds) for h in priced(frozen).weights] == [(128, 0), (32, 0), (96, 0)]


def test_a_tied_weight_is_held_by_each_group_that_reads_it():
    tied = graph(
        (X,),
        (parameter("w", 4, 4), parameter("unread", 4)),
        op("aten.linear.default", ("%x", "%w"), value("one", 2, 4)),
        op("aten.linear.default", ("%one", "%w"), value("two", 2, 4)),
    )
    assert [(h.name, h.groups) for h in priced(tied).weights] == [("w", (0, 1))]


def test_a_storage_counts_once_for_the_groups_that_save_it():
    # both linears save the memory of `one`, the second through a view; the image x is saved by the first alone
    shared = graph(
        (X,),
        (parameter("a", 4, 4), parameter("b", 4, 4), parameter("c", 3, 8)),
        op("aten.linear.default", ("%x", "%a"), value("one", 2, 4)),
        op("aten.view.default", ("%one", (1, 8)), value("flat", 1, 8)),
        op("aten.linear.default", ("%one", "%b"), value("two", 2, 4)),
        op("aten.linear.default", ("%flat", "%c"), value("three", 1, 3)),
        outputs="two three",
    )
    cost = priced(shared)
    assert [g.saved_bytes for g in cost.groups] == [32, 0, 0, 0]
    assert [(h.name, h.num_bytes, h.groups) for h in cost.saved] == [("one", 32, (1, 2))]


def test_constants_wait_for_their_reader_and_counters_stay_with_their_module():
    positions = value("positions", 4, grad=False)
    model = graph(
        (X,),
        (parameter("a", 4, 4), parameter("b", 4, 4), parameter("token", 1, 4), buffer("count", dtype="int64")),
        op("aten.arange.default", (4,), positions, dtype=torch.float32, device=LocalDevice()),
        op("aten.expand.default", ("%token", (2, 4)), value("expanded", 2, 4)),
        op("aten.mul.Tensor", ("%x", 2.0), value("scaled", 2, 4, grad=False)),
        op("aten.linear.default", ("%scaled", "%a"), value("one", 2, 4), module="one"),
        op("aten.add_.Tensor", ("%count", 1), module="two", mutates=("count",)),
        op("aten.linear.default", ("%one", "%b"), value("two", 2, 4), module="two"),
        op("aten.add.Tensor", ("%two", "%expanded"), value("sum", 2, 4)),
        op("aten.add.Tensor", ("%sum", "%positions"), value("out", 2, 4)),
        colocated=(("two.update", "two"), ("one", "two")),
    )
    cost = priced(model)
    assert [g.ops for g in cost.groups] == [
        ("scaled", "one"), ("positions", "expanded", "two.update", "two", "sum", "out"), (),
    ]  # fmt: skip
    assert [g.name for g in cost.groups] == ["one", "two", "loss"]
    assert cost.colocated == ((0, 1),)
    assert [(h.name, h.num_bytes, h.numel) for h in cost.weights if h.name == "count"] == [("count", 8, 0)]


def test_a_dtype_without_peak():
    with pytest.raises(HardwareError, match=r"toy has no peak FLOP/s for float32, which a matmul"):
        priced(MLP, machine=replace(MACHINE, peak_flops={"bfloat16": 1e9}))


@settings(max_examples=examples(60))
@given(st.data())
def test_groups_of_random_graphs_cover_every_operation_once_and_in_order(data: st.DataObject):
    names, ops = ["x", "w"], []
    for i in range(data.draw(st.integers(1, 12))):
        one, two = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(names))
        target = data.draw(st.sampled_from(["mm.default", "add.Tensor", "t.default"]))
        args = (f"%{one}",) if target == "t.default" else (f"%{one}", f"%{two}")
        ops.append(op(f"aten.{target}", args, value(f"v{i}", 3, 3)))
        names.append(f"v{i}")
    model = graph((value("x", 3, 3),), (parameter("w", 3, 3),), *ops)
    cost = priced(model, batch=3)  # its invariant: every flow goes from a lower to a higher group
    assert sorted(name for g in cost.groups for name in g.ops) == sorted(o.name for o in ops)
    saved = sum(g.saved_bytes for g in cost.groups) + sum(h.num_bytes for h in cost.saved)
    assert saved <= 36 * (1 + len(ops))


# -- sharded graphs ----------------------------------------------------------------------------------------------------

SPLIT = {"fc1.weight": split_layout(0), "fc1.bias": split_layout(0), "fc2.weight": split_layout(1)}


def inserted(name: str, args: tuple, home: str, output: str, *shape: int) -> Op:
    """A collective as sharding inserts it."""
    made = op(f"autopar.{name}.default", args, value(output, *shape))
    return replace(made, home=home)


def sharded_mlp() -> Graph:
    """What each of two ranks runs of `MLP` with the rows of fc1 and the columns of fc2 split."""
    first, act, last = MLP.ops
    one, gelu, two = value("fc1", 2, 4), value("act", 2, 4), value("fc2", 2, 3)
    ops = (
        replace(first, outputs=(one,)),
        replace(act, outputs=(gelu,)),
        replace(last, outputs=(two,)),
        inserted("all_reduce", ("%fc2", "tp"), "fc2", "sum", 2, 3),
    )
    weights = (parameter("fc1.weight", 4, 4), parameter("fc1.bias", 4), parameter("fc2.weight", 3, 4))
    return graph((X,), weights, *ops)


def test_a_collective_belongs_to_its_home_and_costs_what_it_communicates():
    cost = price(sharded_mlp(), graph_stats(sharded_mlp()), MACHINE, 2, Sharing(tp=2, storage=SPLIT))
    assert [g.ops for g in cost.groups] == [("fc1", "act"), ("fc2", "sum"), ()]
    # 48 FLOPs, then 24 bytes at 1e6 bytes per second behind a latency of 1 ms; nothing for the gradient
    assert cost.groups[1].forward_seconds == pytest.approx(48e-6 + 1e-3 + 24e-6)
    # 12 weights of which the gradient is added to a sum
    assert cost.groups[1].backward_seconds == pytest.approx(96e-6 + 3 * 4 * 12e-9)
    assert [(f.value, f.producer, f.consumers) for f in cost.edges] == [("act", 0, (1,)), ("sum", 1, (2,))]
    assert [(h.name, h.num_bytes, h.numel) for h in cost.weights] == [
        ("fc1.weight", 16 * 16, 32), ("fc1.bias", 4 * 16, 8), ("fc2.weight", 12 * 16, 24),
    ]  # fmt: skip


COLLECTIVES = {
    # name: (arguments after the tensor, output shape, seconds forward, seconds backward) of a tensor [2, 4]
    "all_reduce": (("tp",), (2, 4), 1e-3 + 32e-6, 0.0),
    "reduce_scatter": ((0, 1, 2, "tp"), (1, 4), 1e-3 + 16e-6, 1e-3 + 16e-6),
    "all_gather": ((0, 1, 2, "tp", False), (4, 4), 1e-3 + 32e-6, 0.0),
    "all_gather, its gradient partial": ((0, 1, 2, "tp", True), (4, 4), 1e-3 + 32e-6, 1e-3 + 32e-6),
    "all_to_all": ((0, 1, 1, 1, 2, "tp"), (4, 2), 1e-3 + 16e-6, 1e-3 + 16e-6),
    "shard": ((0, 1, 2, "tp", False), (1, 4), 32e-9, 1e-3 + 16e-6),
    "shard, its gradient partial": ((0, 1, 2, "tp", True), (1, 4), 32e-9, 0.0),
    "sum_gradient": (("tp",), (2, 4), 0.0, 1e-3 + 32e-6),
    "share_gradient": ((2,), (2, 4), 0.0, 64e-9),
    "first_rank": (("tp",), (2, 4), 64e-9, 0.0),
}


@pytest.mark.parametrize("case", COLLECTIVES)
def test_seconds_of_every_collective(case: str):
    rest, shape, forward, backward = COLLECTIVES[case]
    one = op("aten.mul.Tensor", ("%h", 2.0), value("one", 2, 4))
    model = graph((value("h", 2, 4),), (), one, inserted(case.split(",")[0], ("%one", *rest), "one", "made", *shape))
    alone = price(graph((value("h", 2, 4),), (), one), graph_stats(graph((value("h", 2, 4),), (), one)), MACHINE, 2)
    cost = price(model, graph_stats(model), MACHINE, 2, Sharing(tp=2))
    assert cost.groups[0].forward_seconds - alone.groups[0].forward_seconds == pytest.approx(forward)
    assert cost.groups[0].backward_seconds - alone.groups[0].backward_seconds == pytest.approx(backward)


def test_a_converted_weight_still_makes_an_anchor_and_a_conversion_sits_with_its_lowest_reader():
    model = graph(
        (X,),
        (parameter("a", 4, 4), parameter("b", 2, 2)),
        op("aten.linear.default", ("%x", "%a"), value("one", 2, 4)),
        inserted("shard", ("%one", 1, 1, 2, "tp", False), "sum", "half", 2, 2),
        op("aten.relu.default", ("%one",), value("act", 2, 4)),
        inserted("sum_gradient", ("%b", "tp"), "two", "b.read", 2, 2),
        op("aten.linear.default", ("%half", "%b.read"), value("two", 2, 2)),
        op("aten.add.Tensor", ("%two", "%half"), value("sum", 2, 2)),
        op("aten.neg.default", ("%half",), value("light", 2, 2)),
        outputs="sum light act",
    )
    cost = price(model, graph_stats(model), MACHINE, 2, Sharing(tp=2))
    assert [g.ops for g in cost.groups] == [("one", "half", "act", "light"), ("b.read", "two", "sum"), ()]
    kept = price(model, graph_stats(model), MACHINE, 2, Sharing(tp=2), cost.groups)
    assert [g.ops for g in kept.groups] == [g.ops for g in cost.groups]


BUCKET = 25 * 2**20
# (sharing, layout of fc1.weight) -> (bytes, reduce and gather seconds, optimizer seconds) of a weight of 32 elements,
# half of a gradient bucket of 256 bytes
SHARES = {
    "alone": (Sharing(), (128 + 128 + 256, 0.0, 1152e-9)),
    "two replicas": (Sharing(replicas=Replicas(2)), (512, (1e-3 + 256e-6) / 2, 1152e-9)),
    "ZeRO-1": (
        Sharing(replicas=Replicas(2, 1)),
        (128 + 128 + 128, 2 * (1e-3 + 128e-6) / 2, 576e-9),
    ),
    "ZeRO-2": (
        Sharing(replicas=Replicas(2, 2)),
        (128 + 64 + 128, 2 * (1e-3 + 128e-6) / 2, 576e-9 + 128e-9),
    ),
    "bfloat16 between replicas": (
        Sharing(replicas=Replicas(2), reduce_dtype="bfloat16"),
        (512, (1e-3 + 128e-6) / 2, 1152e-9 + 2 * (128 + 64) * 1e-9),
    ),
    "ZeRO-2, bfloat16 between replicas": (
        Sharing(replicas=Replicas(2, 2), reduce_dtype="bfloat16"),
        (128 + 64 + 128, (1e-3 + 64e-6 + 1e-3 + 128e-6) / 2, 576e-9 + 1.5 * (128 + 64) * 1e-9),
    ),
    "summed over shards": (
        Sharing(tp=2, storage={"fc1.weight": broadcast_layout()}),
        (512, 0.0, 1152e-9 + 128e-6 + 1e-3 * 128 / BUCKET),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARES)
def test_what_a_weight_costs_the_ranks_that_share_it(case: str):
    sharing, (num_bytes, reduce_seconds, optimizer_seconds) = SHARES[case]
    holding = price(MLP, graph_stats(MLP), MACHINE, 2, sharing).weights[0]
    assert holding.num_bytes == num_bytes
    assert holding.reduce_seconds + holding.gather_seconds == pytest.approx(reduce_seconds)
    assert (holding.gather_seconds > 0) == (sharing.replicas.zero > 0)
    assert holding.num_buckets == (sharing.replicas.dp > 1) / 2
    assert holding.optimizer_seconds == pytest.approx(optimizer_seconds)


@pytest.mark.parametrize("case", SHARES)
def test_weights_alone_depend_on_the_replicas(case: str):
    sharing = SHARES[case][0]
    before = price(MLP, graph_stats(MLP), MACHINE, 2, Sharing(sharing.tp))
    assert with_weight_sharing(before, MLP, sharing, MACHINE) == price(MLP, graph_stats(MLP), MACHINE, 2, sharing)


def test_segments_that_do_not_move_together_start_one_after_another() -> None:
    """A large parameter and a small one have an owner each; padding the small one's segment would take longer."""
    large, small = parameter("large", 3000, 1024), parameter("small", 128)
    remote, zero1 = replace(MACHINE, peer_access=False), Sharing(replicas=Replicas(2, 1))
    counts = {
        (own.replicas.zero, machine.peer_access): gradient_buckets([large, small], own, machine)["large"]
        for own in (Sharing(replicas=Replicas(2)), zero1)
        for machine in (MACHINE, remote)
    }
    assert {key: bucket.num_collectives for key, bucket in counts.items()} == {
        (0, True): 1, (0, False): 1, (1, True): 1, (1, False): 2,
    }  # fmt: skip
    once, twice = (weight_cost(large, (0,), zero1, remote, bucket=counts[1, peers]) for peers in (True, False))
    share = 3000 * 1024 / (3000 * 1024 + 128)
    assert twice.reduce_seconds - once.reduce_seconds == pytest.approx(1e-3 * share)
    assert twice.gather_seconds - once.gather_seconds == pytest.approx(1e-3 * share)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_reduction_in_bfloat16_takes_half_the_time_and_a_gather_as_long(zero: ZeroStage):
    machine = replace(MACHINE, collective=Link(0.0, 1e6))
    wide, narrow = (
        price(MLP, graph_stats(MLP), machine, 2, Sharing(replicas=Replicas(2, zero), reduce_dtype=dtype)).weights
        for dtype in get_args(ReduceDtype)
    )
    assert all(w.reduce_seconds > 0 for w in wide)
    assert [w.reduce_seconds for w in narrow] == [pytest.approx(w.reduce_seconds / 2) for w in wide]
    assert [w.gather_seconds for w in narrow] == [w.gather_seconds for w in wide]


def test_replicas_on_other_nodes_communicate_over_the_network():
    machine = replace(MACHINE, network=Network(Port(1e-2, 1e5)))
    near, far = (price(MLP, graph_stats(MLP), machine, 2, Sharing(tp, Replicas(2))).weights[0] for tp in (2, 4))
    assert near.reduce_seconds == pytest.approx((1e-3 + 256e-6) / 2)
    assert far.reduce_seconds == pytest.approx((1e-2 + 2560e-6) / 2)

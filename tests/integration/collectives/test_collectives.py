"""Collective operators: parts by digit, shapes without data, compilation, memory, and what a failure says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.effort import full, only
from support.ranks import TIMEOUT_SECONDS, axis_key, connected, main, run_on_ranks, summed, tensor_axis

from autopar import UsageError
from autopar.ir.mesh import Mesh
from autopar.ops import collectives
from autopar.ops.collectives import join_parts, stack_parts
from autopar.ops.registry import operator
from autopar.runtime.comm.axis_communicators import GroupCommunicator, register_axes, unregister
from autopar.runtime.comm.connect import connect_rank
from autopar.runtime.comm.protocols import TransportError

ops = torch.ops.autopar


# -- on real ranks ---------------------------------------------------------------------------------------------------


def everything(tp: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that chains all operators; [24, 24] in, [24, 24] out."""
    axis = axis_key(tp)

    def chain(x: torch.Tensor) -> torch.Tensor:
        x = ops.sum_gradient.default(x, axis).sin()
        x = ops.shard.default(x, 1, 3, tp, axis, True)
        x = ops.all_to_all.default(x * x, 1, 3, 0, 1, tp, axis)
        x = ops.all_gather.default(x, 0, 1, tp, axis, True).cos()
        x = ops.reduce_scatter.default(x, 1, 1, tp, axis)
        x = ops.all_gather.default(x * 2, 1, 1, tp, axis, False)
        x = ops.shard.default(ops.share_gradient.default(x, tp), 0, 2, tp, axis, False)
        x = ops.first_rank.default(ops.all_gather.default(x, 0, 2, tp, axis, False), axis)
        return ops.all_reduce.default(x, axis)

    return chain


def compiled_equals_eager(tp: int) -> None:
    tensor_axis(tp)
    x = torch.randn(24, 24, dtype=torch.float64)
    eager = everything(tp)
    found = []
    for function in (eager, torch.compile(eager, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.square().sum().backward()
        assert leaf.grad is not None
        found.append((y, leaf.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found))
    with torch.no_grad():
        assert torch.equal(eager(x), found[0][0])


def linear_overlaps(tp: int, dtype: torch.dtype) -> None:
    """A linear layer fused with its collective against the two unfused: gradients of x, weight and bias."""
    axis = axis_key(tp)
    rank = tensor_axis(tp).rank

    def gathered(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, unfused: bool) -> torch.Tensor:
        if unfused:
            return torch.nn.functional.linear(ops.all_gather.default(x, 1, 2, tp, axis, True), weight, bias)
        return ops.all_gather_linear.default(x, weight, bias, 1, 2, tp, axis)

    def replicated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, unfused: bool) -> torch.Tensor:
        if unfused:
            return torch.nn.functional.linear(ops.sum_gradient.default(x, axis), weight, bias)
        return ops.linear_with_async_grad_allreduce.default(x, weight, bias, axis)

    def rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, unfused: bool) -> torch.Tensor:
        if unfused:
            return torch.nn.functional.linear(ops.all_gather.default(x, 0, 1, tp, axis, True), weight, bias)
        return ops.pipelined_all_gather_linear.default(x, weight, bias, tp, axis)

    def scattered(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, unfused: bool) -> torch.Tensor:
        x = x.repeat(tp, 1, 1).cos()
        if unfused:
            return ops.reduce_scatter.default(torch.nn.functional.linear(x, weight, bias), 0, 1, tp, axis)
        return ops.pipelined_linear_reduce_scatter.default(x, weight, bias, tp, axis)

    torch.manual_seed(rank)
    for layer in (gathered, replicated, rows, scattered):
        for trained, with_bias in ((True, True), (True, False), (False, True)):
            x = torch.randn(3, 4, 6, dtype=dtype)
            weight, bias = torch.randn(5, 6, dtype=dtype), torch.randn(5, dtype=dtype) if with_bias else None
            found = []
            compiled = torch.compile(layer, backend="aot_eager")
            for unfused, function in ((True, layer), (False, layer), (False, compiled)):
                leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_(trained)]
                leaves += [bias.clone().requires_grad_()] if bias is not None else []
                saved: list[torch.Tensor] = []
                with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
                    y = function(leaves[0], leaves[1], leaves[2] if bias is not None else None, unfused)
                if (
                    function is layer and not unfused
                ):  # the input of the cosine, and that of the layer if its weight is trained
                    assert sum(t.dim() == 3 for t in saved) == (layer is scattered) + trained, f"{layer.__name__}"
                y.sin().sum().backward()
                found.append([y, *(leaf.grad for leaf in leaves)])
            for values in zip(*found, strict=True):
                assert all(type(v) is type(values[0]) for v in values)
                for tensor in [v for v in values if v is not None]:  # products of some rows round otherwise
                    torch.testing.assert_close(tensor, values[0], msg=f"{layer.__name__}, {trained}, {with_bias}")
            assert found[0][1] is not None and (found[0][2] is not None) == trained


def ranks_get_the_same_sum(dtype: torch.dtype) -> None:
    axis = tensor_axis(4)
    torch.manual_seed(dist.get_rank())
    total = ops.all_reduce.default(torch.randn(1001).to(dtype).t(), axis_key(4))
    bits = total.view(torch.int32 if dtype == torch.float32 else torch.int16).long()
    assert torch.equal(summed(bits, axis), 4 * bits)


def strange_types_travel() -> None:
    axis, rank = axis_key(2), tensor_axis(2).rank
    mask = torch.tensor([rank == 0, True])
    assert ops.all_gather.default(mask, 0, 1, 2, axis, False).tolist() == [True, True, False, True]
    assert ops.all_to_all.default(mask[:, None], 1, 1, 0, 1, 2, axis).tolist() == [[True, rank == 1]]
    numbers = torch.full((2,), rank + 1j)
    assert ops.all_reduce.default(numbers, axis).tolist() == [1 + 2j, 1 + 2j]
    assert ops.all_gather.default(numbers, 0, 1, 2, axis, False).tolist() == [1j, 1j, 1 + 1j, 1 + 1j]
    assert ops.all_gather.default(torch.empty(0, 3), 1, 1, 2, axis, False).shape == (0, 6)


def program_for_other_ranks() -> None:
    tensor_axis(2)
    with pytest.raises(AssertionError, match=r"axis test2\.tp has 2 ranks, the program was made for 4"):
        ops.shard.default(torch.randn(8), 0, 1, 4, axis_key(2), False)
    with pytest.raises(AssertionError, match=r"no axis 'test3\.tp' among"):
        ops.all_reduce.default(torch.randn(8), "test3.tp")


def mesh_has_the_axes_with_several_ranks() -> None:
    rank = dist.get_rank()
    mesh = Mesh(2, 2, 1)
    transport = connected(mesh)
    keys = register_axes("mesh", mesh, transport)
    assert tuple(keys) == ("pp", "tp")
    place = mesh.place(rank)
    for axis, number in (("pp", place.stage), ("tp", place.shard)):
        communicator = collectives.on(keys[axis])
        assert isinstance(communicator, GroupCommunicator)
        assert communicator.rank == dist.get_group_rank(communicator.group, rank) == number
        assert communicator.members == tuple(dist.get_process_group_ranks(communicator.group))
    dist.barrier()
    unregister(keys)
    transport.close()


def a_silent_peer_is_named() -> None:
    mesh = Mesh(1, 2, 2)
    transport = connected(mesh, 1.0)
    keys = register_axes("silent", mesh, transport)
    if dist.get_rank() == 2:
        with pytest.raises(TransportError, match=r"all-reduce over axis tp \(ranks 2, 3\): "):
            ops.all_reduce.default(torch.ones(3), keys["tp"])
    dist.barrier()
    transport.close()


def symmetric_memory_needs_gpus() -> None:
    spec: Any = SimpleNamespace(
        rank=dist.get_rank(), mesh=Mesh(2, 2, 1), device="cpu", channels=(), collective_groups=(),
        transport="symmetric", checkpoint_seconds=TIMEOUT_SECONDS,
    )  # fmt: skip
    with pytest.raises(UsageError, match=r'^transport="symmetric" needs GPUs of one host .* Leave it out'):
        connect_rank(spec, {}, TIMEOUT_SECONDS, ExitStack())


CASES = {
    "compiled on 2": partial(compiled_equals_eager, 2),
    "compiled on 4": partial(compiled_equals_eager, 4),
    "linear on 2": partial(linear_overlaps, 2, torch.float64),
    "linear on 4, bfloat16": partial(linear_overlaps, 4, torch.bfloat16),
    "same sum in float32": partial(ranks_get_the_same_sum, torch.float32),
    "same sum in bfloat16": partial(ranks_get_the_same_sum, torch.bfloat16),
    "strange types": strange_types_travel,
    "program for other ranks": program_for_other_ranks,
    "mesh": mesh_has_the_axes_with_several_ranks,
    "symmetric memory": symmetric_memory_needs_gpus,
    "silent peer": a_silent_peer_is_named,
}


KEPT = [name for name in CASES if name not in ("compiled on 4", "linear on 4, bfloat16")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return run_on_ranks(__file__, tmp_path_factory.mktemp("collectives"))


@pytest.mark.parametrize("case", only(KEPT, CASES))
def test_on_ranks(found: Mapping[str, str], case: str) -> None:
    assert found[case] == ""


# -- in this process -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_is_a_digit_of_the_index(dim: int, outer: int) -> None:
    ranks, size = 4, 24
    x = torch.arange(size * 24).view(24, 24)
    stacked = stack_parts(x, dim, outer, ranks)
    for i in range(ranks):
        held = [j for j in range(size) if (j // (size // (outer * ranks))) % ranks == i]
        assert torch.equal(stacked[i], x.index_select(dim, torch.tensor(held)))
    assert torch.equal(join_parts(stacked.contiguous(), dim, outer), x)


def test_tensors_without_data_get_their_shapes() -> None:
    x = torch.empty(24, 24, device="meta", requires_grad=True).t()
    made = {
        "all_reduce": ops.all_reduce.default(x, "tp"),
        "first_rank": ops.first_rank.default(x, "tp"),
        "shard": ops.shard.default(x, 0, 2, 4, "tp", True),
        "reduce_scatter": ops.reduce_scatter.default(x, 1, 1, 4, "tp"),
        "all_gather": ops.all_gather.default(x, 0, 1, 4, "tp", True),
        "all_to_all": ops.all_to_all.default(x, 1, 1, 0, 3, 4, "tp"),
    }
    assert {name: (tuple(y.shape), y.is_contiguous()) for name, y in made.items()} == {
        "all_reduce": ((24, 24), True), "first_rank": ((24, 24), True), "shard": ((6, 24), True),
        "reduce_scatter": ((24, 6), True), "all_gather": ((96, 24), True), "all_to_all": ((6, 96), True),
    }  # fmt: skip
    for y in made.values():
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert gradient.shape == x.shape


def test_operators_on_the_gradient_alone_copy_nothing() -> None:
    x = torch.randn(4, requires_grad=True)
    summed_later, shared = ops.sum_gradient.default(x, "tp"), ops.share_gradient.default(x, 4)
    assert summed_later.data_ptr() == shared.data_ptr() == x.data_ptr()
    (gradient,) = torch.autograd.grad(shared.sum(), x)
    assert gradient.tolist() == [0.25] * 4
    with torch.no_grad():
        assert ops.sum_gradient.default(x, "tp").data_ptr() == x.data_ptr()


def test_operators_by_name() -> None:
    assert operator("aten.linear.default") is torch.ops.aten.linear.default
    assert operator("autopar.all_reduce.default") is torch.ops.autopar.all_reduce.default
    with pytest.raises(AttributeError):
        operator("autopar.nothing.default")


def test_keys_are_registered_once() -> None:
    class Alone:
        rank, ranks = 0, 1

    collectives.register("a key", Alone())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="two axes are called a key"):
        collectives.register("a key", Alone())  # type: ignore[arg-type]
    collectives.unregister("a key")


if __name__ == "__main__":
    main(CASES if full() else {name: CASES[name] for name in KEPT})

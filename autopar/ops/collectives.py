"""Operators that change a tensor's layout on one mesh axis, with their gradients.

They are true torch operators (``torch.ops.autopar.all_reduce.default`` and so on): differentiable, known to
torch.compile, and defined on meta tensors. ``axis`` names a communicator that the runtime registered in this process.
The communicator knows its rank, so one program serves all ranks of the axis. Every result is contiguous. The letters
are layouts of `autopar.ir.layout`: replicated R, split S, partial sums P, and B, replicated with partial gradients.
A tensor with layout R, P or B is whole: its ``dim`` has outer · ranks · rest elements, read as [outer, ranks, rest].
With layout S it is this rank's part, with outer · rest elements. The other dims have one size on all ranks.

``ragged`` (size, unit, rank) is given where ranks have parts of different sizes: the dim is read as [outer, size], and
``size // unit`` units are shared out by `autopar.ir.layout.part_of`. It names the rank, since the shapes of its program
are that rank's alone. Communicators see equal parts: smaller ones are padded to the first rank's.

| operator | from → to | backward |
|---|---|---|
| all_reduce(x, axis) | P → R | identity |
| reduce_scatter(x, dim, outer, ranks, axis, ragged) | P → S | all_gather |
| all_gather(x, dim, outer, ranks, axis, partial_gradient, ragged) | S → R, or S → B | own part, or reduce_scatter |
| all_to_all(x, src_dim, src_outer, dst_dim, dst_outer, ranks, axis, src_ragged, dst_ragged) | S → S | all_to_all |
| shard(x, dim, outer, ranks, axis, partial_gradient, ragged) | R → S, or B → S | all_gather, or zeros around the part |
| sum_gradient(x, axis) | R → B | all_reduce |
| share_gradient(x, ranks) | B → R | divided by the ranks |
| first_rank(x, axis) | R → P | identity |

This module knows neither graphs nor process groups: graphs name its operators, the runtime registers communicators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.ir.layout import part_of

Ragged = Sequence[int] | None  # size of each block, unit, and this rank; None where parts are equal


class Communicator(Protocol):
    """The ranks of one axis around this process, which is number ``rank`` of ``ranks``. All tensors are contiguous.

    A stacked tensor has one part per rank along its first dim: [ranks, *local].
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def reserve(self, num_bytes: int) -> None:
        """Reserve buffers for collectives of up to ``num_bytes`` per rank; all ranks call it, between steps."""
        ...

    def all_reduce(self, tensor: Tensor, overlapped: bool = False) -> None:
        """Sum in place; the result is bitwise equal on all ranks.

        Args:
            overlapped: whether other work runs concurrently and needs the device's multiprocessors.
        """
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, stacked: [ranks, *tensor.shape]."""
        ...

    def reduce_scatter(self, stacked: Tensor, overlapped: bool = False) -> Tensor:
        """The sum over the ranks of their parts for this rank, [*local].

        Args:
            stacked: this rank's parts for all ranks, [ranks, *local].
            overlapped: as in `all_reduce`.
        """
        ...

    def all_to_all(self, stacked: Tensor) -> Tensor:
        """The parts that all ranks have for this rank, stacked: [ranks, *local].

        Args:
            stacked: this rank's parts for all ranks, [ranks, *local].
        """
        ...

    # Calls of a linear layer that overlap with its matrix products, in the same order on each rank:

    def peer_order(self) -> list[int]:
        """The other ranks in ring order, starting after this one, so that no two ranks start with the same peer."""
        ...

    def publish(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, [ranks, *tensor.shape], readable until `unpublish`; this rank's own part is undefined."""
        ...

    def unpublish(self) -> None:
        """Declare that this rank has read what the others published."""
        ...

    def push_shard(self, rank: int, stacked: Tensor) -> None:
        """Send part ``rank`` of ``stacked`` [ranks, *local] to that rank, for its `reduce_pushed`."""
        ...

    def reduce_pushed(self, stacked: Tensor) -> Tensor:
        """The sum of the parts that all ranks have for this rank, [*local]; the other ranks pushed theirs.

        Args:
            stacked: this rank's parts for all ranks, [ranks, *local].
        """
        ...


COMMUNICATORS: dict[str, Communicator] = {}


def register(key: str, communicator: Communicator) -> None:
    """Make a communicator known to the operators of this process."""
    assert key not in COMMUNICATORS, f"two axes are called {key}"
    COMMUNICATORS[key] = communicator


def unregister(key: str) -> None:
    """Forget a communicator."""
    del COMMUNICATORS[key]


def on(axis: str, ranks: int | None = None) -> Communicator:
    """The communicator of an axis.

    Args:
        ranks: number of ranks for which the program was made; asserted where given.
    """
    assert axis in COMMUNICATORS, f"no axis {axis!r} among {sorted(COMMUNICATORS)}"
    communicator = COMMUNICATORS[axis]
    assert ranks in (None, communicator.ranks), (
        f"axis {axis} has {communicator.ranks} ranks, the program was made for {ranks}"
    )
    return communicator


# -- parts: a dim is read as (outer, ranks, rest) ------------------------------------------------------------------


def stack_parts(x: Tensor, dim: int, outer: int, ranks: int, ragged: Ragged = None) -> Tensor:
    """The parts of a whole tensor, stacked: [ranks, *local]. Ragged parts end with zeros up to the largest."""
    if ragged:
        parts = [ragged_part(x, dim, outer, ranks, (*ragged[:2], rank)) for rank in range(ranks)]
        return torch.stack([padded_part(part, dim, outer, ranks, ragged) for part in parts])
    rest = x.shape[dim] // (outer * ranks)
    return x.unflatten(dim, (outer, ranks, rest)).movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def join_parts(stacked: Tensor, dim: int, outer: int, ragged: Ragged = None) -> Tensor:
    """The whole tensor of stacked parts [ranks, *local]; inverse of `stack_parts`."""
    if ragged:
        blocks = stacked.unflatten(dim + 1, (outer, -1)).unbind()
        sizes = [part_size(len(blocks), (*ragged[:2], rank)) for rank in range(len(blocks))]
        whole = torch.cat([block.narrow(dim + 1, 0, size) for block, size in zip(blocks, sizes)], dim + 1)
        return whole.flatten(dim, dim + 1).contiguous()
    rest = stacked.shape[dim + 1] // outer
    return stacked.unflatten(dim + 1, (outer, rest)).movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()


def part_size(ranks: int, ragged: Sequence[int]) -> int:
    """Elements of each block in a rank's part."""
    size, unit, rank = ragged
    return len(part_of(size, unit, ranks, rank))


def ragged_part(x: Tensor, dim: int, outer: int, ranks: int, ragged: Sequence[int]) -> Tensor:
    """A rank's ragged part of a whole tensor."""
    size, unit, rank = ragged
    part = part_of(size, unit, ranks, rank)
    return x.unflatten(dim, (outer, size)).narrow(dim + 1, part.start, len(part)).flatten(dim, dim + 1)


def padded_part(part: Tensor, dim: int, outer: int, ranks: int, ragged: Ragged) -> Tensor:
    """A part with zeros after each block up to the largest part's size; the part itself if parts are equal."""
    if not ragged:
        return part.contiguous()
    largest = part_size(ranks, (*ragged[:2], 0))
    blocks = part.unflatten(dim, (outer, part.shape[dim] // outer))
    padded = blocks.new_zeros([*blocks.shape[: dim + 1], largest, *blocks.shape[dim + 2 :]])
    padded.narrow(dim + 1, 0, blocks.shape[dim + 1]).copy_(blocks)
    return padded.flatten(dim, dim + 1)


def without_padding(part: Tensor, dim: int, outer: int, ranks: int, ragged: Ragged) -> Tensor:
    """A part without the zeros of `padded_part`."""
    if not ragged:
        return part
    blocks = part.unflatten(dim, (outer, part.shape[dim] // outer))
    return blocks.narrow(dim + 1, 0, part_size(ranks, ragged)).flatten(dim, dim + 1).contiguous()


def empty_resized(x: Tensor, sizes: dict[int, int]) -> Tensor:
    """An empty contiguous tensor with the shape of ``x``, except for the sizes of some dims."""
    return x.new_empty([sizes.get(dim, size) for dim, size in enumerate(x.shape)])


# -- communication -------------------------------------------------------------------------------------------------


@torch.library.custom_op("autopar::all_reduce", mutates_args=())
def all_reduce(x: Tensor, axis: str) -> Tensor:
    """The sum over the ranks of an axis."""
    total = x.clone(memory_format=torch.contiguous_format)
    on(axis).all_reduce(total)
    return total


@torch.library.custom_op("autopar::reduce_scatter", mutates_args=())
def reduce_scatter(
    x: Tensor, dim: int, outer: int, ranks: int, axis: str, ragged: Sequence[int] | None = None
) -> Tensor:
    """This rank's part of the sum over the ranks."""
    total = on(axis, ranks).reduce_scatter(stack_parts(x, dim, outer, ranks, ragged).contiguous())
    return without_padding(total, dim, outer, ranks, ragged)


@torch.library.custom_op("autopar::all_gather", mutates_args=())
def all_gather(
    x: Tensor, dim: int, outer: int, ranks: int, axis: str, partial_gradient: bool,
    ragged: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """The whole tensor of the ranks' parts; ``partial_gradient`` says that each rank's gradient is a summand."""
    return join_parts(on(axis, ranks).all_gather(padded_part(x, dim, outer, ranks, ragged)), dim, outer, ragged)


@torch.library.custom_op("autopar::all_to_all", mutates_args=())
def all_to_all(
    x: Tensor, src_dim: int, src_outer: int, dst_dim: int, dst_outer: int, ranks: int, axis: str,
    src_ragged: Sequence[int] | None = None, dst_ragged: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """This rank's part along another dim than the dim that is split now."""
    assert src_dim != dst_dim
    padded = padded_part(x, src_dim, src_outer, ranks, src_ragged)
    stacked = stack_parts(padded, dst_dim, dst_outer, ranks, dst_ragged).contiguous()
    joined = join_parts(on(axis, ranks).all_to_all(stacked), src_dim, src_outer, src_ragged)
    return without_padding(joined, dst_dim, dst_outer, ranks, dst_ragged)


@torch.library.custom_op("autopar::shard", mutates_args=())
def shard(
    x: Tensor, dim: int, outer: int, ranks: int, axis: str, partial_gradient: bool,
    ragged: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """This rank's part of a whole tensor; with a partial gradient, the gradient of the other parts is zeros."""
    rank = on(axis, ranks).rank
    assert not ragged or ragged[2] == rank, f"a program of rank {ragged} on rank {rank}"
    part = ragged_part(x, dim, outer, ranks, ragged) if ragged else stack_parts(x, dim, outer, ranks)[rank]
    return part.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("autopar::pad", mutates_args=())
def pad(x: Tensor, dim: int, outer: int, ranks: int, axis: str, ragged: Sequence[int] | None = None) -> Tensor:
    """A whole tensor: this rank's part, and zeros elsewhere."""
    part = padded_part(x, dim, outer, ranks, ragged)
    stacked = part.new_zeros([ranks, *part.shape])
    stacked[on(axis, ranks).rank] = part
    return join_parts(stacked, dim, outer, ragged)


@torch.library.custom_op("autopar::first_rank", mutates_args=())
def first_rank(x: Tensor, axis: str) -> Tensor:
    """The tensor on the first rank of an axis and zeros on the others: summands whose sum is the tensor."""
    mine = x.clone(memory_format=torch.contiguous_format)
    return mine if on(axis).rank == 0 else mine.zero_()


# -- shapes for tensors without data -------------------------------------------------------------------------------


@all_reduce.register_fake
@first_rank.register_fake
def _same(x: Tensor, axis: str) -> Tensor:
    return empty_resized(x, {})


def local_size(size: int, outer: int, ranks: int, ragged: Ragged) -> int:
    """The size of a rank's part of a dim of this size."""
    return outer * part_size(ranks, ragged) if ragged else size // ranks


def whole_size(size: int, outer: int, ranks: int, ragged: Ragged) -> int:
    """The size of a dim of which a rank's part has this size."""
    return outer * ragged[0] if ragged else size * ranks


@reduce_scatter.register_fake
def _scattered(x: Tensor, dim: int, outer: int, ranks: int, axis: str, ragged: Sequence[int] | None = None) -> Tensor:
    return empty_resized(x, {dim: local_size(x.shape[dim], outer, ranks, ragged)})


@shard.register_fake
def _part(
    x: Tensor, dim: int, outer: int, ranks: int, axis: str, partial_gradient: bool,
    ragged: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    return empty_resized(x, {dim: local_size(x.shape[dim], outer, ranks, ragged)})


@all_gather.register_fake
def _gathered(
    x: Tensor, dim: int, outer: int, ranks: int, axis: str, partial_gradient: bool,
    ragged: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    return empty_resized(x, {dim: whole_size(x.shape[dim], outer, ranks, ragged)})


@pad.register_fake
def _padded(x: Tensor, dim: int, outer: int, ranks: int, axis: str, ragged: Sequence[int] | None = None) -> Tensor:
    return empty_resized(x, {dim: whole_size(x.shape[dim], outer, ranks, ragged)})


@all_to_all.register_fake
def _moved(
    x: Tensor, src_dim: int, src_outer: int, dst_dim: int, dst_outer: int, ranks: int, axis: str,
    src_ragged: Sequence[int] | None = None, dst_ragged: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    sizes = {
        src_dim: whole_size(x.shape[src_dim], src_outer, ranks, src_ragged),
        dst_dim: local_size(x.shape[dst_dim], dst_outer, ranks, dst_ragged),
    }
    return empty_resized(x, sizes)


# -- gradients -----------------------------------------------------------------------------------------------------


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.arguments = inputs[1:]


def _pass_on(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


def _gather_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    *where, ragged = ctx.arguments
    return all_gather(gradient, *where, False, ragged), *[None] * 5


def _take_or_sum_part(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    *where, partial_gradient, ragged = ctx.arguments
    if partial_gradient:
        return reduce_scatter(gradient, *where, ragged), *[None] * 6
    return shard(gradient, *where, False, ragged), *[None] * 6


def _pad_or_gather(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    *where, partial_gradient, ragged = ctx.arguments
    if partial_gradient:
        return pad(gradient, *where, ragged), *[None] * 6
    return all_gather(gradient, *where, False, ragged), *[None] * 6


def _move_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    src_dim, src_outer, dst_dim, dst_outer, *where, src_ragged, dst_ragged = ctx.arguments
    back = all_to_all(gradient, dst_dim, dst_outer, src_dim, src_outer, *where, dst_ragged, src_ragged)
    return back, *[None] * 8


all_reduce.register_autograd(_pass_on)
first_rank.register_autograd(_pass_on)
reduce_scatter.register_autograd(_gather_back, setup_context=_keep_arguments)
all_gather.register_autograd(_take_or_sum_part, setup_context=_keep_arguments)
shard.register_autograd(_pad_or_gather, setup_context=_keep_arguments)
all_to_all.register_autograd(_move_back, setup_context=_keep_arguments)


# -- operators on the gradient alone: their forward returns its argument uncopied, which custom_op forbids ------------


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(gradient, ctx.axis), None


class _ShareGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient / ctx.ranks, None


torch.library.define("autopar::sum_gradient", "(Tensor(a) x, str axis) -> Tensor(a)")
torch.library.define("autopar::share_gradient", "(Tensor(a) x, int ranks) -> Tensor(a)")


@torch.library.impl("autopar::sum_gradient", "CompositeImplicitAutograd")
def sum_gradient(x: Tensor, axis: str) -> Tensor:
    """The tensor itself; its gradients are summed over the ranks of an axis."""
    return _SumGradient.apply(x, axis)  # type: ignore[return-value]


@torch.library.impl("autopar::share_gradient", "CompositeImplicitAutograd")
def share_gradient(x: Tensor, ranks: int) -> Tensor:
    """The tensor itself; its gradient is divided by the number of ranks, whose equal gradients will be summed."""
    return _ShareGradient.apply(x, ranks)  # type: ignore[return-value]

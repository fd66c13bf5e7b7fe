"""Parts of tensors and back: exact for every layout, several axes on one dim included."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.layout import REPLICATED, Layout, Split, broadcast_layout, split_layout
from autopar.ir.mesh import Mesh
from autopar.ops.collectives import join_parts, padded_part, stack_parts, without_padding
from autopar.sharding.tensors import (
    assembled,
    boxes,
    boxes_of_piece,
    contiguous_copy,
    local_part,
    memory_order,
    narrowed,
    ranges_as_boxes,
    summed_gradients,
    whole_shape,
    whole_tensor,
    with_strides,
)

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def test_rows_of_a_fused_weight_are_split_by_heads() -> None:
    rows = torch.arange(12)  # query, key and value of two heads of two
    assert [local_part(rows, split_layout(0, 3), {"tp": 2}, {"tp": i}).tolist() for i in range(2)] == [
        [0, 1, 4, 5, 8, 9],
        [2, 3, 6, 7, 10, 11],
    ]
    assert local_part(rows, split_layout(0), {"tp": 4}, {"tp": 1}).tolist() == [3, 4, 5]


def test_each_axis_splits_the_part_of_the_axes_before_it() -> None:
    def parts(*splits: Split) -> list[list[int]]:
        indices = [{"tp0": i, "tp1": j} for i, j in product((0, 1), (0, 1))]
        found = [local_part(torch.arange(8), Layout(splits), {"tp0": 2, "tp1": 2}, index) for index in indices]
        assert [len(own) for own in found] == [
            *(Layout(splits).local_shape([8], {"tp0": 2, "tp1": 2}, index)[0] for index in indices)
        ]
        return [own.tolist() for own in found]

    assert parts(Split(0, 1, "tp0"), Split(0, 1, "tp1")) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert parts(Split(0, 2, "tp0"), Split(0, 2, "tp1")) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert parts(Split(0, 2, "tp0"), Split(0, 1, "tp1")) == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_copies_are_whole_already() -> None:
    tensor = torch.randn(3, 5)
    for layout in (REPLICATED, broadcast_layout()):
        assert local_part(tensor, layout, {"tp": 2}, {"tp": 1}) is tensor
        assert whole_tensor([({"tp": i}, tensor) for i in range(2)], layout, {"tp": 2}) is tensor


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], Layout, dict[str, int]]:
    """A shape, a layout that fits it, and the sizes of its axes."""
    ranks = {"tp": draw(st.integers(2, 4)), "cp": draw(st.integers(2, 3))}
    axes = draw(st.permutations(["tp", "cp"]))[: draw(st.integers(1, 2))]
    shape = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))]
    splits = []
    for axis in axes:
        dim, outer = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
        splits.append(Split(dim, outer, axis))
        shape[dim] *= ranks[axis] * outer
    return shape, Layout(tuple(splits)), ranks


@given(cases(), st.sampled_from(DTYPES))
def test_parts_come_back_bit_by_bit(case: tuple[list[int], Layout, dict[str, int]], dtype: torch.dtype) -> None:
    shape, layout, ranks = case
    tensor = torch.arange(prod(shape)).reshape(shape)
    tensor = tensor % 3 == 0 if dtype == torch.bool else tensor.to(dtype)
    axes = list(dict.fromkeys(s.axis for s in layout.splits))
    places = [dict(zip(axes, numbers)) for numbers in product(*(range(ranks[a]) for a in axes))]
    parts = [(place, local_part(tensor, layout, ranks, place)) for place in places]
    assert all(p.shape == layout.local_shape(shape, ranks) for _, p in parts)
    back = whole_tensor(reversed(parts), layout, ranks)
    assert back.dtype == dtype and torch.equal(back, tensor)


def test_gradients_of_a_mesh_add_up() -> None:
    mesh = Mesh(2, 2, 2)  # ranks 0 to 3 are stage 0: (replica, shard) 00 01 10 11
    storage = {"split": split_layout(0), "shared": broadcast_layout()}
    gradients = {rank: {"split": torch.tensor([float(rank)]), "shared": torch.tensor([1.0])} for rank in range(4)}
    for rank in (0, 2):
        gradients[rank] |= {"copied": torch.tensor([5.0]), "tied": torch.tensor([1.0])}
    gradients |= {rank: {"tied": torch.tensor([10.0])} for rank in (4, 6)}
    total = summed_gradients(gradients, storage, mesh)
    assert {n: t.tolist() for n, t in total.items()} == {
        "split": [0.0 + 2.0, 1.0 + 3.0],
        "shared": [4.0],
        "copied": [10.0],
        "tied": [22.0],
    }


@st.composite
def ragged_cases(draw: st.DrawFn) -> tuple[list[int], Split, int]:
    """A shape, a ragged split that fits it, and a number of ranks."""
    ranks, outer, unit = draw(st.integers(2, 8)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))]
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = outer * draw(st.integers(ranks, 3 * ranks)) * unit
    return shape, Split(dim, outer, "tp", unit), ranks


@given(ragged_cases())
def test_ragged_parts_come_back_and_are_stacked_with_zeros(case: tuple[list[int], Split, int]) -> None:
    shape, split, ranks = case
    layout, size = Layout((split,)), shape[split.dim] // split.outer
    whole = torch.arange(1, prod(shape) + 1).view(shape)
    parts = [local_part(whole, layout, {"tp": ranks}, {"tp": i}) for i in range(ranks)]
    assert [tuple(p.shape) for p in parts] == [
        layout.local_shape(shape, {"tp": ranks}, {"tp": i}) for i in range(ranks)
    ]
    numels = [part.numel() for part in parts]
    assert numels == sorted(numels, reverse=True) and numels[0] - numels[-1] in (0, prod(shape) // size * split.unit)
    assert torch.equal(whole_tensor([({"tp": i}, p) for i, p in enumerate(parts)], layout, {"tp": ranks}), whole)
    stacked = stack_parts(whole, split.dim, split.outer, ranks, (size, split.unit, 0))
    assert stacked.sum() == whole.sum()
    assert torch.equal(join_parts(stacked, split.dim, split.outer, (size, split.unit, 0)), whole)
    for i, part in enumerate(parts):
        ragged = (size, split.unit, i)
        assert torch.equal(padded_part(part, split.dim, split.outer, ranks, ragged), stacked[i])
        assert torch.equal(without_padding(stacked[i], split.dim, split.outer, ranks, ragged), part)
    assert Layout.parse(str(layout)) == layout
    assert not layout.fits(shape, {"tp": size // split.unit + 1})


def test_state_of_a_mesh_is_assembled() -> None:
    mesh = Mesh(1, 2, 1)
    parts = {0: {"split": torch.tensor([1]), "copied": torch.tensor([7])}, 1: {"split": torch.tensor([2])}}
    state = assembled(parts, {"split": split_layout(0)}, mesh)
    assert {n: t.tolist() for n, t in state.items()} == {"split": [1, 2], "copied": [7]}


def test_a_part_is_as_few_boxes_as_it_can_be() -> None:
    found = boxes((12, 5), split_layout(0, 3), {"tp": 2}, {"tp": 1})
    assert [(c.whole, c.part, c.sizes) for c in found] == [
        ((2, 0), (0, 0), (2, 5)),
        ((6, 0), (2, 0), (2, 5)),
        ((10, 0), (4, 0), (2, 5)),
    ]
    assert [(c.whole, c.sizes) for c in boxes((12, 5), split_layout(1), {"tp": 5}, {"tp": 2})] == [((0, 2), (12, 1))]
    assert [c.sizes for c in boxes((), REPLICATED, {"tp": 2}, {"tp": 1})] == [()]
    assert [c.sizes for c in boxes((0, 3), REPLICATED, {"tp": 2}, {"tp": 1})] == [(0, 3)]


@given(cases())
def test_the_boxes_of_all_ranks_tile_the_whole(case: tuple[list[int], Layout, dict[str, int]]) -> None:
    shape, layout, ranks = case
    axes = sorted({split.axis for split in layout.splits})
    source, tiled = torch.arange(prod(shape)).view(shape), torch.full(shape, -1)
    for numbers in product(*(range(ranks[axis]) for axis in axes)):
        index = dict(zip(axes, numbers))
        own = local_part(source, layout, ranks, index)
        assert whole_shape(own.shape, layout, ranks) == tuple(shape)
        covered = torch.zeros_like(own)
        for chunk in boxes(shape, layout, ranks, index):
            box = narrowed(tiled, chunk.whole, chunk.sizes)
            assert (box == -1).all()  # nobody else has it
            box.copy_(chunk.of_part(own))
            chunk.of_part(covered).add_(1)
        assert (covered == 1).all()
    assert torch.equal(tiled, source)


@given(cases(), st.data())
def test_the_boxes_of_pieces_tile_a_part(case: tuple[list[int], Layout, dict[str, int]], data: st.DataObject) -> None:
    """A piece is a range of a part's elements in memory order, which begins and ends anywhere."""
    shape, layout, ranks = case
    own = local_part(torch.arange(prod(shape)).view(shape), layout, ranks, dict.fromkeys(ranks, 0))
    order = data.draw(st.permutations(range(own.ndim)))
    own = own.permute(order).contiguous().permute([order.index(dim) for dim in range(own.ndim)])
    flat = own.permute(memory_order(own)).reshape(-1)
    cuts = sorted(data.draw(st.lists(st.integers(0, own.numel()), max_size=3)))
    tiled = torch.full(shape, -1)
    for low, high in pairwise([0, *cuts, own.numel()]):
        piece = flat[low:high].clone()
        for part in boxes(shape, layout, ranks, dict.fromkeys(ranks, 0)):
            for box, view in boxes_of_piece(part, own, range(low, high), piece):
                target = narrowed(tiled, box.whole, box.sizes)
                assert (target == -1).all() and view.data_ptr() >= piece.data_ptr()
                target.copy_(view)
    expected = torch.full(shape, -1)
    for part in boxes(shape, layout, ranks, dict.fromkeys(ranks, 0)):
        narrowed(expected, part.whole, part.sizes).copy_(part.of_part(own))
    assert torch.equal(tiled, expected)


def test_a_range_is_few_boxes() -> None:
    assert ranges_as_boxes([4, 5], 3, 18) == [([0, 3], [1, 2]), ([3, 0], [1, 3]), ([1, 0], [2, 5])]
    assert ranges_as_boxes([4, 5], 6, 9) == [([1, 1], [1, 3])]
    assert ranges_as_boxes([4, 5], 5, 15) == [([1, 0], [2, 5])]
    assert ranges_as_boxes([2, 3, 2], 4, 10) == [([0, 2, 0], [1, 1, 2]), ([1, 0, 0], [1, 2, 2])]


def test_tensors_in_another_order_of_memory() -> None:
    whole = torch.randn(4, 3, 1, 2)
    last = with_strides(whole, (6, 1, 6, 3))
    assert last.equal(whole) and last.is_contiguous(memory_format=torch.channels_last)
    assert with_strides(last, (6, 1, 99, 3)) is last  # a dim of one element has no stride
    again = contiguous_copy(last)
    assert again.equal(whole) and again.is_contiguous() and again.data_ptr() != last.data_ptr()

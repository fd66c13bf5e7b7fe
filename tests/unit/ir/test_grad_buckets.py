"""Flat buckets: every parameter in one place, owners balanced, values and memory formats kept."""

from __future__ import annotations

from itertools import pairwise

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples

from autopar.ir.grad_buckets import (
    MAX_PADDING_SHARE,
    NUM_PARAM_SLOTS,
    PARAM_ALIGNMENT,
    block_groups,
    group_weights,
    num_collectives,
    padded_numel,
    slot_bytes,
)
from autopar.ir.graph import Weight
from autopar.runtime.params.flat_buckets import (
    FlatBucket,
    block_buckets,
    flat_buckets,
    piece_of,
    replica_owners,
    view_like,
)
from autopar.runtime.params.sharded_params import assign_slots

CLASSES = (("float32", ""), ("bfloat16", "float32"), ("float64", ""))  # what programs read, and the master's dtype


def weight(name: str, shape: tuple[int, ...], dtype: str = "float32", master: str = "") -> Weight:
    return Weight(name, "parameter", shape, dtype, True, (name,), master)


@st.composite
def models(draw: st.DrawFn) -> list[Weight]:
    """Weights of several classes, some much larger than others."""
    drawn = draw(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(CLASSES)), min_size=1, max_size=25))
    return [weight(f"w{i}", (numel, 3) if i % 3 == 0 else (numel,), *kind) for i, (numel, kind) in enumerate(drawn)]


def all_weights(weights: list[Weight]) -> dict[str, torch.Tensor]:
    return {w.name: torch.randn(w.shape).to(getattr(torch, w.stored_dtype)) for w in weights}


@settings(max_examples=examples(150))
@given(models(), st.integers(1, 4), st.booleans(), st.integers(1, 20_000))
def test_every_parameter_has_one_place(weights: list[Weight], dp: int, shared: bool, limit: int) -> None:
    owners = replica_owners([weights], {}, dp) if shared else {}
    buckets = flat_buckets(weights, owners, dp)
    assert sorted(name for b in buckets for name in b.names) == sorted(w.name for w in weights)
    if shared:
        moved = [1 if bucket.even else sum(low < high for low, high in pairwise(bucket.bounds)) for bucket in buckets]
        assert moved == [num_collectives(group, dp) for group in group_weights(weights, dp)]
    groups = group_weights(weights, 1, limit)
    assert sorted(w.name for group in groups for w in group) == sorted(w.name for w in weights)
    for group in groups:
        assert len({(w.stored_dtype, w.dtype) for w in group}) == 1
        size = sum(padded_numel(w.numel) for w in group) * getattr(torch, group[0].stored_dtype).itemsize
        assert len(group) == 1 or size <= limit
    about = {w.name: w for w in weights}
    tensors = all_weights(weights)
    for bucket in buckets:
        assert {(w.stored_dtype, w.dtype) for w in map(about.get, bucket.names) if w} == {
            (str(bucket.dtype).removeprefix("torch."), str(bucket.copy_dtype or bucket.dtype).removeprefix("torch."))
        }
        ends = [(k, k + padded_numel(about[name].numel)) for name, k in zip(bucket.names, bucket.offsets, strict=True)]
        assert all(k % PARAM_ALIGNMENT == 0 for k, _ in ends)
        assert all(low[1] <= high[0] for low, high in pairwise(sorted(ends)))
        assert len(bucket.bounds) == (dp if shared else 1) + 1
        for owner, (low, high) in enumerate(pairwise(bucket.bounds)):
            inside = {name for name, (start, end) in zip(bucket.names, ends) if low <= start and end <= high}
            assert set(bucket.pieces(owner)) == inside
            if shared:
                assert inside == {name for name in bucket.names if owners[name] == owner}
        flat = torch.full((bucket.numel,), 7.0, dtype=bucket.dtype)
        views = bucket.views(flat, tensors)
        for name, view in views.items():
            view.copy_(tensors[name])
        assert all(torch.equal(view, tensors[name]) for name, view in views.items())
        for owner, segment in enumerate(bucket.segments(flat)):
            owned = bucket.owned_views(segment, owner, tensors)
            assert {*owned} == {*bucket.pieces(owner)}
            assert all(torch.equal(view, tensors[name]) for name, view in owned.items())


@settings(max_examples=examples(100))
@given(models(), st.integers(1, 5), st.integers(1, 6), st.integers(1, 20_000))
def test_pieces_of_blocks_cover_every_parameter_once(weights: list[Weight], dp: int, blocks: int, limit: int) -> None:
    """Segments are equal, so that one collective moves a bucket."""
    block_of = {w.name: f"b{i * blocks // len(weights)}" for i, w in enumerate(weights)}
    kept = {w.name for i, w in enumerate(weights) if i % 4 == 0}
    groups = block_groups(weights, block_of, lambda w: w.name in kept, limit)
    assert sorted(w.name for group in groups for w in group) == sorted(w.name for w in weights)
    for group in groups:
        assert len({(w.stored_dtype, w.dtype, w.name in kept) for w in group}) == 1
        several = len({block_of[w.name] for w in group}) > 1
        assert not several or sum(w.stored_bytes for w in group) <= limit
    tensors = all_weights(weights)
    for bucket in block_buckets(weights, block_of, kept, {}, dp):
        assert bucket.even and bucket.num_segments == dp and bucket.is_kept == (bucket.names[0] in kept)
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype)
        seen = {name: [0] * tensors[name].numel() for name in bucket.names}
        for owner, segment in enumerate(bucket.segments(flat)):
            for name, view in bucket.owned_views(segment, owner, tensors).items():
                elements = bucket.pieces(owner)[name]
                view.copy_(piece_of(tensors[name], elements, tensors[name]))
                for k in elements:
                    seen[name][k] += 1
        assert all(set(counts) <= {1} for counts in seen.values())
        assert all(torch.equal(view, tensors[name]) for name, view in bucket.views(flat, tensors).items())


@given(st.integers(0, 12), st.lists(st.frozensets(st.integers(0, 11), max_size=5), max_size=4))
def test_buckets_that_are_read_together_have_slots_of_their_own(count: int, together: list[frozenset[int]]) -> None:
    order = list(reversed(range(count)))
    groups = [frozenset(i for i in group if i < count) for group in together]
    slots = assign_slots(order, groups)
    assert slots.keys() == set(order)
    assert all(len({slots[i] for i in group}) == len(group) for group in groups)
    assert sorted({*slots.values()}) == list(range(len({*slots.values()})))
    if not together:
        assert slots == {index: number % NUM_PARAM_SLOTS for number, index in enumerate(order)}


def test_buckets_take_turns_in_the_slots() -> None:
    assert [slot_bytes(sizes) for sizes in ([], [5], [5, 7], [5, 7, 6, 1, 2])] == [0, 5, 12, 13]


@settings(max_examples=examples(100))
@given(models(), st.integers(2, 4))
def test_no_owner_has_more_than_the_others_by_a_bucket_s_largest(weights: list[Weight], dp: int) -> None:
    owners = replica_owners([weights], {}, dp)
    for group in group_weights(weights, dp):
        load = [sum(padded_numel(w.numel) for w in group if owners[w.name] == owner) for owner in range(dp)]
        assert max(load) - min(load) <= max(padded_numel(w.numel) for w in group)


@settings(max_examples=examples(60))
@given(models(), models(), st.integers(2, 3))
def test_a_tied_weight_has_one_owner_on_all_stages(first: list[Weight], second: list[Weight], dp: int) -> None:
    tied = weight("tied", (700,))
    stages = [[*first, tied], [tied, *(weight(f"v{w.name}", w.shape, w.dtype, w.master) for w in second)]]
    holders = {w.name: tuple(i for i, own in enumerate(stages) if w in own) for own in stages for w in own}
    owners = replica_owners(stages, holders, dp)
    assert owners.keys() == holders.keys()
    for own in stages:
        for bucket in flat_buckets(own, owners, dp):  # each stage finds the same buckets from the owners alone
            assert all(set(bucket.pieces(owner)) <= {n for n in owners if owners[n] == owner} for owner in range(dp))


@pytest.mark.parametrize("name", ["vit_large_patch16_224", "vit_base_patch16_224", "resnet50", "vit_giant_patch14_224"])
@pytest.mark.parametrize("dp", [2, 4, 8])
def test_padding_of_real_models(name: str, dp: int) -> None:
    """At most 6 % in all; buckets with more are not padded."""
    with torch.device("meta"):
        model = timm.create_model(name)
    low = ("bfloat16", "float32")
    weights = [
        weight(n, tuple(p.shape), *(low if p.ndim > 1 and "embed" not in n else ("float32", "")))
        for n, p in model.named_parameters()
    ]
    owners = replica_owners([weights], {}, dp)
    buckets = flat_buckets(weights, owners, dp)
    total = sum(w.numel for w in weights)
    assert total <= sum(b.numel for b in buckets) <= 1.06 * total
    load = [sum(w.numel for w in weights if owners[w.name] == owner) for owner in range(dp)]
    assert max(load) <= 1.11 * total / dp
    even = sum(b.numel for b in buckets if b.even)
    assert even >= 0.6 * total  # the rest is summed owner by owner


def test_a_bucket_that_would_be_mostly_padding_is_not_padded() -> None:
    weights = [weight("small", (128,)), weight("large", (3000, 1024))]
    (bucket,) = flat_buckets(weights, {"small": 1, "large": 0}, 2)
    assert bucket.bounds == (0, 3000 * 1024, 3000 * 1024 + 128) and not bucket.even
    assert bucket.names == ("large", "small") and bucket.pieces(1) == {"small": range(128)}
    few = [weight("small", (128,)), weight("large", (256,))]
    (padded,) = flat_buckets(few, {"small": 1, "large": 0}, 2)
    assert padded.bounds == (0, 256, 512) and padded.even and MAX_PADDING_SHARE < 128 / 384
    assert (num_collectives(weights, 2), num_collectives(few, 2)) == (2, 1)


def test_views_keep_memory_formats() -> None:
    weights = [weight("conv", (2, 3, 4, 5)), weight("bias", (3,)), weight("scale", ())]
    like = {w.name: torch.randn(w.shape) for w in weights}
    like["conv"] = like["conv"].contiguous(memory_format=torch.channels_last)
    (bucket,) = flat_buckets(weights, {}, 1)
    views = bucket.views(torch.zeros(bucket.numel), like)
    assert {n: t.stride() for n, t in views.items()} == {n: t.stride() for n, t in like.items()}
    assert bucket.dtype == torch.float32 and bucket.copy_dtype is None
    transposed = torch.randn(4, 6).t()
    assert view_like(torch.arange(24.0), transposed).stride() == transposed.stride()


def test_without_owners_buckets_end_at_the_limit() -> None:
    weights = [weight(name, (size,)) for name, size in (("a", 200), ("b", 300), ("c", 9000), ("d", 100))]
    assert [[w.name for w in group] for group in group_weights(weights, 1, 4096)] == [["d"], ["c"], ["b", "a"]]
    (bucket,) = flat_buckets(weights, {}, 4)
    assert isinstance(bucket, FlatBucket) and bucket.names == ("d", "c", "b", "a") and len(bucket.bounds) == 2

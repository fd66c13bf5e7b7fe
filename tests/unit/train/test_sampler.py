"""Images that each rank reads: all parts together are the epoch, on any mesh, from any position."""

from __future__ import annotations

import re

import pytest

from autopar.errors import UsageError
from autopar.train import PartSampler


def epoch_of(sampler: PartSampler, epoch: int, first: int = 0) -> list[list[int]]:
    sampler.start(epoch, first)
    batches = list(sampler)
    assert all(key.epoch == epoch for batch in batches for key in batch)
    return [[key.index for key in batch] for batch in batches]


def parts(data_size: int, **options) -> list[PartSampler]:
    return [PartSampler(103, 8, rank, data_size, **options) for rank in range(data_size)]


@pytest.mark.parametrize("data_size", [1, 2, 4, 8])
@pytest.mark.parametrize("epoch", [1, 2])
def test_parts_tile_each_training_batch_in_order(data_size: int, epoch: int):
    whole = epoch_of(PartSampler(103, 8, seed=3), epoch)
    read = [epoch_of(sampler, epoch) for sampler in parts(data_size, seed=3)]
    assert [[i for part in batch for i in part] for batch in zip(*read)] == whole
    assert len(whole) == 12 and len({i for batch in whole for i in batch}) == 96
    assert all(len(batch) == 8 // data_size for own in read for batch in own)


def test_the_order_depends_on_seed_and_epoch_alone():
    first, again, second, other = (
        epoch_of(PartSampler(103, 8, seed=seed), epoch) for seed, epoch in ((3, 1), (3, 1), (3, 2), (4, 1))
    )
    assert first == again and first != second and first != other
    assert epoch_of(PartSampler(103, 4, seed=3), 1)[:4] == [b[i : i + 4] for b in first[:2] for i in (0, 4)]


def test_an_epoch_restarts_and_can_start_in_its_middle():
    sampler = PartSampler(103, 8, 1, 2, seed=5)
    first = epoch_of(sampler, 1)
    assert epoch_of(sampler, 1) == first
    assert epoch_of(sampler, 1, first=7) == first[7:] and len(sampler) == 5
    assert epoch_of(sampler, 2) != first and len(sampler) == 12


def test_copies_of_an_image_share_a_batch_and_lie_apart():
    """As under timm's RepeatAugSampler, over which the order of the epoch is dealt out to ranks."""
    sampler = PartSampler(90, 12, seed=2, repeats=3)
    sampler.start(4)
    batches, order = list(sampler), sampler.order()
    assert len(batches) == 7
    for number, batch in enumerate(batches):
        images = order[4 * number : 4 * number + 4]
        assert [(key.index, key.repeat) for key in batch] == [(i, copy) for copy in range(3) for i in images]
    read = []
    for sampler in (PartSampler(90, 12, rank, 3, seed=2, repeats=3) for rank in range(3)):
        sampler.start(4)
        read.append(list(sampler))
    assert [[key for part in batch for key in part] for batch in zip(*read)] == batches
    assert all({key.repeat for batch in read[rank] for key in batch} == {rank} for rank in range(3))


def test_a_fraction_of_images_may_be_repeated():
    sampler = PartSampler(12, 6, repeats=1.5)
    sampler.start(1)
    order = sampler.order()
    first = sorted((order.index(key.index), key.repeat) for key in next(iter(sampler)))
    assert first == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0)]


def test_an_accumulated_batch_is_complete():
    sampler = PartSampler(103, 8, seed=1, group=5)  # 40 images an update: two updates of five batches
    assert sampler.num_batches == 10
    assert epoch_of(sampler, 1) == epoch_of(PartSampler(103, 8, seed=1), 1)[:10]


@pytest.mark.parametrize("data_size", [1, 2, 4, 8])
@pytest.mark.parametrize("samples", [103, 96, 97, 3])
def test_evaluation_counts_each_image_once(data_size: int, samples: int):
    seen: list[int] = []
    sizes = []
    for rank in range(data_size):
        sampler = PartSampler(samples, 8, rank, data_size, training=False)
        batches = epoch_of(sampler, 1)
        counts = list(sampler.counts())
        assert len(batches) == len(counts) == -(-samples // 8)
        sizes.append([len(batch) for batch in batches])
        seen += [i for batch, count in zip(batches, counts) for i in batch[:count]]
    assert sorted(seen) == list(range(samples))
    assert all(own == sizes[0] for own in sizes)  # every call takes parts of one size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 6, 0, 4), "A batch of 6 cannot be shared by 4 data-parallel ranks in equal parts. Use a multiple of 4."),
        ((7, 8), "A batch of 8 is more than the 7 training images. Use a batch (--batch-size) of 7 or less."),
    ],
)
def test_batches_that_cannot_be(arguments, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        PartSampler(*arguments)


def test_accumulation_needs_images_for_all_its_steps():
    with pytest.raises(UsageError, match="A batch of 32 in 4 accumulation steps of 8 is more than the 20 "):
        PartSampler(20, 8, group=4)
    with pytest.raises(UsageError, match=r"at least once; 0\.5 is too few"):
        PartSampler(20, 4, repeats=0.5)
    with pytest.raises(UsageError, match="no image to evaluate on"):
        PartSampler(0, 8, training=False)

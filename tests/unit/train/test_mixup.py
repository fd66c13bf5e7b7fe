"""Mixup and CutMix: alike on any mesh, and timm's own but for who is mixed with whom."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autopar.errors import UsageError
from autopar.train import Mixup
from autopar.train.data.mixup import STREAM, check_even, outside_in

KINDS = {"mixup": {"mixup": 0.8}, "cutmix": {"cutmix": 1.0}, "both": {"mixup": 0.8, "cutmix": 1.0, "prob": 0.7}}


def batch(count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 12, 12, generator=generator), torch.randint(5, (count,), generator=generator)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_are_mixed_as_the_whole(kind: str, parts: int):
    mixup = Mixup(5, **KINDS[kind], seed=3)
    x, y = batch()
    for step in range(6):
        whole = mixup(x, y, step)
        cut = [mixup(a, b, step) for a, b in zip(x.chunk(parts), y.chunk(parts))]
        assert torch.equal(torch.cat([images for images, _ in cut]), whole[0])
        assert torch.equal(torch.cat([soft for _, soft in cut]), whole[1])


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_timms_up_to_the_pairing(kind: str):
    from timm.data import Mixup as Timms

    x, y = batch()
    options = KINDS[kind]
    timms = Timms(
        options.get("mixup", 0.0), options.get("cutmix", 0.0), prob=options.get("prob", 1.0), label_smoothing=0.1,
        num_classes=5,
    )  # fmt: skip
    order = torch.tensor([0, 2, 4, 6, 7, 5, 3, 1])  # backwards, 0 meets 1, 2 meets 3, ...
    assert torch.equal(outside_in(8), order)
    changed = 0
    for step in range(6):
        np.random.seed([7, STREAM, step])
        mixed, soft = timms(x[order], y[order])
        own, own_soft = Mixup(5, **options, seed=7)(x, y, step)
        assert torch.equal(own[order], mixed) and torch.equal(own_soft[order], soft)
        changed += not torch.equal(own, x)
    assert changed >= 2


def test_ranks_without_images_draw_the_same_targets():
    mixup = Mixup(5, mixup=0.2, cutmix=1.0)
    x, y = batch()
    for step in range(4):
        assert torch.equal(mixup(x, y, step)[1], mixup(torch.empty_like(x, device="meta"), y, step)[1])


def test_steps_and_seeds_differ_and_nothing_else_is_touched():
    x, y = batch()
    before = x.clone()
    np.random.seed(1)
    expected = np.random.rand()
    np.random.seed(1)
    drawn = [Mixup(5, mixup=1.0, seed=seed)(x, y, step)[1] for seed, step in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert np.random.rand() == expected and torch.equal(x, before)
    assert torch.equal(drawn[0], drawn[3])
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_batches_without_whole_pairs():
    check_even(8, 4)
    with pytest.raises(UsageError, match=r"a batch of 7 leaves an image alone\. Use a multiple of 2 per accumulation"):
        check_even(7, 1)
    with pytest.raises(UsageError, match="a batch of 6, shared by 2 data-parallel ranks, leaves an image alone"):
        check_even(6, 2)
    with pytest.raises(UsageError, match="one of them above"):
        Mixup(5)

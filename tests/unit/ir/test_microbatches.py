"""Number and sizes of microbatches, against torch.chunk."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.microbatches import microbatch_mismatch


@pytest.mark.parametrize(
    ("batch", "replicas", "microbatches", "size", "text"),
    [
        (8, 1, 5, None,
         "microbatches=5 becomes 4 microbatches of 2: the batch has 8 samples, cut into parts of one size but for "
         "the last, as torch.chunk cuts. Use microbatches=4 or microbatches=8 to get what is asked for."),
        (8, 2, None, 3,
         "microbatch_size=3 becomes 2 microbatches of 2: each of 2 replicas has 4 samples, cut into parts of one "
         "size but for the last, as torch.chunk cuts. Use microbatch_size=2 or microbatch_size=4 to get what is asked "
         "for."),
        (8, 8, None, 2,
         "microbatch_size=2 becomes 1 microbatch of 1: each of 8 replicas has 1 sample, cut into parts of one "
         "size but for the last, as torch.chunk cuts. Use microbatch_size=1 to get what is asked for."),
        (11, 1, 7, None,
         "microbatches=7 becomes 5 microbatches of 2 and 1 of 1: the batch has 11 samples, cut into parts of one "
         "size but for the last, as torch.chunk cuts. Use microbatches=6 or microbatches=11 to get what is asked for."),
        (8, 1, 3, None, ""),
        (8, 2, None, None, ""),
    ],
)  # fmt: skip
def test_the_text(batch: int, replicas: int, microbatches: int | None, size: int | None, text: str) -> None:
    assert microbatch_mismatch(batch, replicas, microbatches, size) == text


@pytest.mark.parametrize("samples", range(1, 25))
def test_it_is_said_where_chunk_makes_another_number_or_size(samples: int) -> None:
    for asked in range(1, samples + 1):
        parts = torch.arange(samples).chunk(asked)
        assert bool(microbatch_mismatch(samples, 1, asked, None)) == (len(parts) != asked)
        parts = torch.arange(samples).chunk(-(-samples // asked))
        assert bool(microbatch_mismatch(samples, 1, None, asked)) == (len(parts[0]) != asked)

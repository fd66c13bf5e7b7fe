"""Random numbers that depend only on a seed, a step, an operation, a sample and an element: the same under every plan.

``torch.ops.autopar.uniform`` is Philox4x32-10. Its counter is (element // 4, hash of a name, sample, step), its key the
seed; element e takes word e % 4. There is no state. Every process that computes an element gets the same bits, in any
order and any part of the tensor, eager or compiled, on CPU or GPU. Elements are counted in the sample of the whole
tensor, so a rank that holds a part of the tensor computes only that part.

The numbers that change from call to call are a tensor ``draws`` of int64 [samples, 4] with rows (low word of the seed,
high word, step, sample), see `counter_rows`. A captured graph can therefore be replayed with new numbers.

`autopar.trace.passes.random_ops` writes dropout and other random operations with them.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; constants and test vectors of Random123.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
from torch import Tensor

from autopar.ir.layout import TP, Split, split_layout
from autopar.ops.collectives import on

WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORDS = 4  # words of a counter and of its result
BITS = 24  # random bits of a uniform number: all that float32 can represent in [0, 1)
NO_SAMPLE = WORD  # the sample of tensors without samples
# Counters per tile of a CPU thread. 100 passes over int64 took 8 ns per number at 16 Ki, which fit its cache,
# 15 at 4 Ki and 14 at 128 Ki; torch's own dropout took 10.
TILE = 1 << 14

PART = (
    "int sample_dim, int sample_outer, int split_dim=-1, int split_outer=1, int ranks=1, str axis='', "
    "int[]? ragged=None"
)
torch.library.define("autopar::uniform", f"(Tensor draws, int[] shape, str name, {PART}) -> Tensor")
torch.library.define("autopar::uniform_numbered", f"(Tensor draws, Tensor number, int[] shape, {PART}) -> Tensor")


def counter_rows(seed: int, step: int, first: int, count: int) -> Tensor:
    """The ``draws`` [count, 4] of samples ``first``, ``first`` + 1, … in a step."""
    draws = torch.empty(count, WORDS, dtype=torch.int64, device="cpu")
    for column, word in enumerate((seed & WORD, seed >> 32 & WORD, step & WORD)):
        draws[:, column] = word
    draws[:, 3] = torch.arange(first, first + count, device="cpu") & WORD
    return draws


def name_hash(name: str) -> int:
    """A word for a name. Two of a thousand names share one with a probability of 1e-4."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:WORDS], "little")


def philox(counter: Sequence[Tensor], key: Sequence[Tensor], in_place: bool = False) -> tuple[Tensor, ...]:
    """Four words of random bits, each an int64 tensor of the broadcast shape.

    Args:
        counter: four words, tensors that broadcast with the key's.
        key: two words of one shape.
        in_place: halves the time where every operation is a pass over memory; compilers cannot fuse in-place
            operations.
    """
    xor, cut = (Tensor.bitwise_xor_, Tensor.bitwise_and_) if in_place else (Tensor.bitwise_xor, Tensor.bitwise_and)
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    number = torch.arange(ROUNDS, device=c0.device).view(-1, *[1] * key[0].dim())
    for k0, k1 in zip(*((word + number * step & WORD for word, step in zip(key, KEY_STEPS)))):
        # Bits above the word in a 64-bit product, sign included, are cut off before the next multiplication.
        low, high = c2 * MULTIPLIERS[1], c0 * MULTIPLIERS[0]
        c0 = cut(xor(xor(low >> 32, c1), k0), WORD)
        c2 = cut(xor(xor(high >> 32, c3), k1), WORD)
        c1, c3 = low, high
    return c0, c1 & WORD, c2, c3 & WORD


# -- elements of a rank ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ElementRuns:
    """Elements of each sample that a rank draws: runs of consecutive elements.

    Args:
        dims: sizes of the result without the samples.
        at: position of the samples among ``dims``.
        shape: shape of the result.
        runs: number of runs.
        length: elements of a run.
        pitch: distance from the start of one run to the next, elements.
        start: first element of the first run.
    """

    dims: tuple[int, ...]
    at: int
    shape: tuple[int, ...]
    runs: int
    length: int
    pitch: int
    start: int

    @property
    def width(self) -> int:
        """Counters of a run; one more where a run can begin inside a counter."""
        return -(-self.length // WORDS) if self.starts_on_counter else (self.length + 2 * WORDS - 2) // WORDS

    @property
    def starts_on_counter(self) -> bool:
        """Whether every run begins with a counter."""
        return self.start % WORDS == 0 and (self.runs == 1 or self.pitch % WORDS == 0)


def element_runs(
    shape: Sequence[int], samples: int, sample_dim: int, sample_outer: int, split_dim: int, split_outer: int,
    ranks: int, rank: int, unit: int = 0,
) -> ElementRuns:  # fmt: skip
    """The elements that a rank draws of a tensor.

    Args:
        shape: of the tensor before it is split. sample_dim, sample_outer: the dim that is (outer, samples, rest); a
        negative dim means that no dim holds samples. split_dim, split_outer: the dim that is (outer, ranks, rest).
        unit: of a ragged split, whose dim is (outer, units, unit).
    """
    dims, at = list(shape), max(sample_dim, 0)
    split = split_dim + (split_dim > sample_dim >= 0)
    outer, own_unit = split_outer, unit  # of the split among ``dims``
    if sample_dim >= 0:
        rest = shape[sample_dim] // (sample_outer * samples)
        dims[sample_dim : sample_dim + 1] = [sample_outer, rest]
        at = sample_dim + 1
        if split_dim == sample_dim and split_outer % (sample_outer * samples) == 0:
            split, outer = split_dim + 1, split_outer // (sample_outer * samples)
        elif split_dim == sample_dim:  # the split is outside of the samples
            own_unit = unit // (samples * rest)
    whole = prod(dims)
    if ranks == 1:
        return ElementRuns(tuple(dims), at, tuple(shape), 1, whole, whole, 0)
    pitch = prod(dims[split:]) // outer
    part = Split(split, outer, unit=own_unit).part(dims[split], ranks, rank)
    each = pitch // (dims[split] // outer)  # elements of one position
    dims[split] = outer * len(part)
    length = each * len(part)
    local = local_shape(shape, split_dim, split_outer, ranks, rank, unit)
    return ElementRuns(tuple(dims), at, local, prod(dims) // length, length, pitch, each * part.start)


def local_shape(
    shape: Sequence[int], split_dim: int, split_outer: int, ranks: int, rank: int, unit: int
) -> tuple[int, ...]:
    """The shape of a rank's part of a tensor; arguments as in `element_runs`."""
    if split_dim < 0:
        return tuple(shape)
    return split_layout(split_dim, split_outer, unit=unit).local_shape(shape, {TP: ranks}, {TP: rank})


# -- the operators ---------------------------------------------------------------------------------------------------

Generate = Callable[[Tensor, Tensor, Any], Tensor]


def uniform(draws: Tensor, shape: Sequence[int], name: str, *part: Any, generate: Generate) -> Tensor:
    """Uniform float32 numbers in [0, 1), multiples of 2**-24.

    Args:
        draws: [samples, 4], a row per sample; only the first row counts where the tensor has no samples. shape: of the
        result before it is split over ranks. name: of the operation that draws. part: as in `uniform_numbered`.
        generate: `generate_whole`, `generate_tiled` or `generate_triton`.
    """
    return uniform_numbered(draws, name_hash(name), shape, *part, generate=generate)


def uniform_numbered(
    draws: Tensor, number: Tensor | int, shape: Sequence[int], sample_dim: int, sample_outer: int, split_dim: int = -1,
    split_outer: int = 1, ranks: int = 1, axis: str = "", ragged: Sequence[int] | None = None, *, generate: Generate,
) -> Tensor:  # fmt: skip
    """As `uniform`, for the hash of a name: an int64 tensor [] where code is shared by operations of other names.

    Args:
        sample_dim, sample_outer: the dim that is (outer, samples, rest); a negative dim means that no dim holds
        samples. split_dim, split_outer, ranks, axis: this rank draws its part of the dim that is (outer, ranks, rest),
        if any. ragged: as in `autopar.ops.collectives`.
    """
    if draws.is_meta:  # needs no communicator
        _, unit, rank = ragged or (0, 0, 0)
        local = local_shape(shape, split_dim, split_outer, ranks, rank, unit)
        return draws.new_empty(local, dtype=torch.float32)
    if sample_dim < 0:
        draws = torch.cat([draws[:1, :3], torch.full_like(draws[:1, 3:], NO_SAMPLE)], 1)
    rank = on(axis, ranks).rank if ranks > 1 else 0
    unit = ragged[1] if ragged else 0
    runs = element_runs(shape, len(draws), sample_dim, sample_outer, split_dim, split_outer, ranks, rank, unit)
    first = torch.arange(runs.runs, device=draws.device) * runs.pitch + runs.start
    counters = (first // WORDS)[:, None] + torch.arange(runs.width, device=draws.device)
    return arrange(generate(counters.flatten(), draws, number), first, runs)


def generate_whole(counters: Tensor, draws: Tensor, number: Tensor | int) -> Tensor:
    """Numbers of all counters for each sample, [samples, counters, 4]. A compiler fuses this into one pass."""
    return torch.stack(uniform_words(counters, draws, number, in_place=False), -1)


def generate_tiled(counters: Tensor, draws: Tensor, number: int) -> Tensor:
    """As `generate_whole`, in tiles that stay in a CPU's cache."""
    numbers = draws.new_empty(len(draws), len(counters), WORDS, dtype=torch.float32)
    tile = TILE * torch.get_num_threads()
    samples = max(1, tile // max(1, len(counters)))
    for some_draws, into in zip(draws.split(samples), numbers.split(samples)):
        for some_counters, made in zip(counters.split(tile), into.split(tile, 1)):
            for word, values in enumerate(uniform_words(some_counters, some_draws, number, in_place=True)):
                made[..., word] = values
    return numbers


def generate_triton(counters: Tensor, draws: Tensor, number: int) -> Tensor:
    """As `generate_whole`, on a GPU in one Triton kernel."""
    from autopar.ops.kernels.philox import generate

    return generate(counters, draws, number, ROUNDS)


def uniform_words(counters: Tensor, draws: Tensor, number: Tensor | int, in_place: bool) -> tuple[Tensor, ...]:
    """The four numbers of each counter, four tensors [samples, counters]."""
    seed_low, seed_high, step, sample = draws[:, :, None].unbind(1)
    numbers = torch.zeros_like(sample) + number
    # The mask changes no value. Without it inductor multiplies a plain range as an index, in 32 bits.
    words = philox((counters & WORD, numbers, sample, step), (seed_low, seed_high), in_place)
    return tuple((word >> (32 - BITS)).to(torch.float32) * 2.0**-BITS for word in words)


def arrange(numbers: Tensor, first: Tensor, runs: ElementRuns) -> Tensor:
    """The result, from the numbers of all counters of all runs.

    Args:
        numbers: [samples, counters, 4].
        first: the element with which each run begins, [runs].
    """
    samples = len(numbers)
    numbers = numbers.reshape(samples, runs.runs, runs.width * WORDS)
    if runs.starts_on_counter:
        numbers = numbers[..., : runs.length]
    else:
        index = (first % WORDS)[:, None] + torch.arange(runs.length, device=first.device)
        numbers = numbers.gather(2, index.expand(samples, -1, -1))
    unflattened = numbers.reshape(samples, *runs.dims).movedim(0, runs.at)
    return unflattened.reshape(runs.shape).contiguous()


# Compilers trace through the composite; eager calls find the kernels of their devices first.
torch.library.impl("autopar::uniform", "CompositeImplicitAutograd", partial(uniform, generate=generate_whole))
torch.library.impl("autopar::uniform", "CPU", partial(uniform, generate=generate_tiled))
torch.library.impl(
    "autopar::uniform_numbered", "CompositeImplicitAutograd", partial(uniform_numbered, generate=generate_whole)
)
if find_spec("triton"):
    torch.library.impl("autopar::uniform", "CUDA", partial(uniform, generate=generate_triton))

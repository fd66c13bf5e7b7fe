"""The counter-based generator: test vectors, statistics, parts of tensors, compilers."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.rule_oracle import cut, numbered

from autopar.ir.layout import TP, split_layout
from autopar.ops.counter_rng import WORD, counter_rows, philox

uniform = torch.ops.autopar.uniform.default
COUNT = 1 << 16
# Deviations that are this many standard errors wide or more happen once in 15,000 times; every draw here is fixed.
ERRORS = 4.0


def drawn(seed: int = 0, step: int = 0, name: str = "op", sample: int = 0) -> torch.Tensor:
    """Many numbers of one sample."""
    return uniform(counter_rows(seed, step, sample, 1), (1, COUNT), name, 0, 1)[0]


# -- the generator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_known_answers_of_random123(counter: str, key: str, words: str, in_place: bool) -> None:
    def tensors(text: str) -> list[torch.Tensor]:
        return [torch.tensor([int(word, 16)]) for word in text.split()]

    assert [int(word) for word in philox(tensors(counter), tensors(key), in_place)] == [
        int(word, 16) for word in words.split()
    ]


def test_a_number_is_a_word_of_its_counter() -> None:
    draws = counter_rows(seed=-1, step=7, first=WORD, count=2)
    assert draws.tolist() == [[WORD, WORD, 7, WORD], [WORD, WORD, 7, 0]]
    found = uniform(draws, (2, 10), "blocks.0.drop", 0, 1)
    name = torch.tensor([0x6CB1E5D7])  # the first four bytes of its SHA-256, lowest first
    for sample in range(2):
        for element in range(10):
            counter = torch.tensor([element // 4]), name, draws[sample, 3:], torch.tensor([7])
            word = int(philox(counter, draws[sample, :2].split(1))[element % 4])
            assert found[sample, element].item() == (word >> 8) / 2**24


# -- statistics ------------------------------------------------------------------------------------------------------


def test_numbers_are_uniform() -> None:
    u = torch.cat([drawn(sample=i) for i in range(16)]).double()
    n = len(u)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < ERRORS * math.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < ERRORS * math.sqrt((1 / 80 - 1 / 144) / n)
    bins = torch.histc(u, 1024, 0, 1)
    chi_square = ((bins - n / 1024) ** 2 / (n / 1024)).sum()
    assert abs(chi_square - 1023) < ERRORS * math.sqrt(2 * 1023)
    low_bits = torch.bincount((u * 2**24).long() % 256, minlength=256)
    assert abs(((low_bits - n / 256) ** 2 / (n / 256)).sum() - 255) < ERRORS * math.sqrt(2 * 255)


OTHERS = {
    "seed": [drawn(seed=seed) for seed in (1, 2, 1 << 32, -1)],
    "step": [drawn(step=step) for step in (1, 2, 1000)],
    "operation": [drawn(name=name) for name in ("op_1", "pp", "blocks.0.op")],
    "sample": [drawn(sample=sample) for sample in (1, 2, 1 << 20)],
    "element": [drawn().roll(shift) for shift in (1, 2, 3, 4, 5, 8, 17, 1024)],
}


@pytest.mark.parametrize("what", OTHERS)
def test_numbers_are_independent_of_those_of_another(what: str) -> None:
    """No correlation of the numbers, nor of their distances from the middle; pairs fill the square evenly."""
    u = drawn()
    for v in OTHERS[what]:
        for f in (lambda t: t - 0.5, lambda t: (t - 0.5).abs() - 0.25):
            a, b = f(u.double()), f(v.double())
            assert abs((a * b).mean() / (a.std() * b.std())) < ERRORS / math.sqrt(COUNT)
        pairs = torch.bincount((u * 16).long() * 16 + (v * 16).long(), minlength=256)
        assert abs(((pairs - COUNT / 256) ** 2 / (COUNT / 256)).sum() - 255) < ERRORS * math.sqrt(2 * 255)


# -- shapes and parts ------------------------------------------------------------------------------------------------


def test_numbers_belong_to_the_sample_wherever_it_lies() -> None:
    draws = counter_rows(5, 1, 0, 6)
    first = uniform(draws, (6, 5, 7), "op", 0, 1)
    assert torch.equal(uniform(draws, (5, 6, 7), "op", 1, 1), first.transpose(0, 1))
    assert torch.equal(uniform(draws, (30, 7), "op", 0, 1), first.flatten(0, 1))
    assert torch.equal(uniform(draws, (30, 7), "op", 0, 5), first.transpose(0, 1).flatten(0, 1))
    assert torch.equal(uniform(draws[2:4], (2, 5, 7), "op", 0, 1), first[2:4])


def test_a_tensor_of_no_sample_is_the_same_for_all() -> None:
    one, other = (uniform(counter_rows(5, 1, sample, count), (5, 7), "op", -1, 1) for sample, count in ((0, 3), (9, 1)))
    assert torch.equal(one, other)
    assert not torch.equal(one, uniform(counter_rows(5, 2, 0, 3), (5, 7), "op", -1, 1))


def test_no_element_changes_with_the_size_of_the_tensor_behind_it() -> None:
    draws = counter_rows(5, 1, 0, 2)
    long = uniform(draws, (2, 300_000), "op", 0, 1)  # several tiles
    assert torch.equal(long[:, :70_001], uniform(draws, (2, 70_001), "op", 0, 1))
    assert torch.equal(long[:, :3], uniform(draws, (2, 3), "op", 0, 1))


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, int, int, int, int]:
    """A shape, its samples, where they lie, and an even split of one of its dims."""
    samples, ranks = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([2, 3, 4]))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dim = draw(st.integers(-1, len(shape) - 1))
    outer = draw(st.sampled_from([1, 2])) if dim >= 0 else 1
    split_dim = draw(st.integers(0, len(shape) - 1))
    split_outer = draw(st.sampled_from([1, 2, 3]))
    if dim >= 0 and dim == split_dim:
        if draw(st.booleans()):  # inside the samples
            shape[dim] *= outer * samples * split_outer * ranks
            split_outer *= outer * samples
        else:  # around them
            outer = split_outer * ranks * draw(st.sampled_from([1, 2]))
            shape[dim] *= outer * samples
    else:
        shape[split_dim] *= split_outer * ranks
        if dim >= 0:
            shape[dim] *= outer * samples
    return tuple(shape), samples, dim, outer, split_dim, split_outer, ranks


@given(splits(), st.booleans())
def test_a_rank_makes_its_part_of_the_whole(
    case: tuple[tuple[int, ...], int, int, int, int, int, int], traced: bool
) -> None:
    shape, samples, dim, outer, split_dim, split_outer, ranks = case
    draws = counter_rows(1, 2, 3, samples)
    whole = uniform(draws, shape, "op", dim, outer)
    make = uniform.decompose if traced else uniform
    for rank in range(ranks):
        with numbered(rank, ranks):
            part = make(draws, shape, "op", dim, outer, split_dim, split_outer, ranks, TP)
        assert torch.equal(part, cut(whole, split_layout(split_dim, split_outer), ranks, rank))


# -- compilers -------------------------------------------------------------------------------------------------------

CALLS: list[tuple[int, tuple]] = [
    (3, ((3, 5, 7), "op", 0, 1)),
    (2, ((8, 6), "op", 0, 2)),
    (3, ((5, 3, 2), "op", 1, 1)),
    (2, ((4, 5), "op", -1, 1)),
    (2, ((2, 6, 5), "op", 0, 1, 1, 1, 2, TP)),
    (2, ((2, 3, 8), "op", 0, 1, 2, 1, 2, TP)),
]


def check_compiled(device: str, backend: str, calls: Sequence[tuple[int, tuple]]) -> None:
    """Compare calls, eager and compiled on a device, with the eager ones on CPU."""

    def masked(x: torch.Tensor, draws: torch.Tensor, call: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
        u = uniform(draws, *call)
        return u, x * (u >= 0.25)

    with numbered(1, 2):
        for samples, call in calls:
            torch._dynamo.reset()
            compiled = torch.compile(masked, fullgraph=True, backend=backend)
            for step in (1, 2):  # the content of what was compiled changes
                draws = counter_rows(1 << 35, step, 9, samples)
                wanted = uniform(draws, *call)
                x = torch.ones_like(wanted, device=device).requires_grad_()
                assert torch.equal(uniform(draws.to(device), *call).cpu(), wanted), call
                made, y = compiled(x, draws.to(device), call)
                assert torch.equal(made.cpu(), wanted), call
                (gradient,) = torch.autograd.grad(y.sum(), x)
                assert torch.equal(gradient.cpu(), (wanted >= 0.25).float()), call


def test_compiled_equals_eager_to_the_bit() -> None:
    check_compiled("cpu", "inductor", CALLS[-1:])  # a compiler takes its time
    check_compiled("cpu", "aot_eager", CALLS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same() -> None:
    check_compiled("cuda", "inductor", CALLS)
    draws = counter_rows(1, 2, 3, 4)
    shape = (4, 197, 768)
    assert torch.equal(uniform(draws.cuda(), shape, "op", 0, 1).cpu(), uniform(draws, shape, "op", 0, 1))


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
def test_the_kernel_of_gpus_draws_the_same() -> None:
    code = (
        "import torch, autopar.ops.counter_rng as r; counters = torch.arange(5, 2000, 3);"
        "draws = r.counter_rows(1 << 40, 7, 3, 2);"
        "made = r.generate_triton(counters, draws, 7); wanted = r.generate_tiled(counters, draws, 7);"
        "assert made.shape == (2, 665, 4) and torch.equal(made, wanted); print('same')"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "same", done.stderr[-2000:]


def test_it_runs_without_data() -> None:
    draws = counter_rows(0, 0, 0, 4).to("meta")
    made = uniform(draws, (4, 6), "op", 0, 1, 1, 1, 3, "no such axis")
    assert (made.shape, made.dtype, made.device.type) == ((4, 2), torch.float32, "meta")


def test_other_processes_draw_the_same() -> None:
    code = (
        "import torch, autopar.ops.counter_rng as r; torch.set_num_threads(2);"
        "print(torch.ops.autopar.uniform.default(r.counter_rows(3, 1, 4, 2), (2, 5), 'op', 0, 1).tolist())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONHASHSEED": "7"}
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert printed.stdout.strip() == str(uniform(counter_rows(3, 1, 4, 2), (2, 5), "op", 0, 1).tolist())

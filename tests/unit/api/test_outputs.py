"""Outputs of microbatches, joined: what the model returns for the batch, or an error."""

from __future__ import annotations

import re
import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples, only
from torch import Tensor, nn

import autopar
from autopar import MixedSamplesWarning, UsageError
from autopar.api.outputs import join_outputs, warn_of_mixed_samples
from autopar.api.parallelize import warn_of_synchronised_norms, warn_of_updated_state
from autopar.ir.microbatches import microbatch_sizes
from autopar.ir.pytree import leaves
from autopar.trace.trace import trace


class Head(nn.Module):
    """A linear layer, and what a function makes of its output."""

    def __init__(self, function: Callable[[Head, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function
        self.index = nn.Buffer(torch.tensor([0, 2, 2, 1]))
        self.lstm, self.gru = nn.LSTM(6, 5, 2), nn.GRU(6, 5, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.linear(x))


@dataclass
class Named:
    first: Tensor
    second: Any


torch.export.register_dataclass(Named, serialized_type_name="autopar.tests.Named")
Pair = namedtuple("Pair", "left right")


def joined_or_refused(model: nn.Module, x: Tensor, microbatches: int) -> tuple[Any, Any] | str:
    """The model's output for a batch and the output joined from those of its microbatches; the error if refused."""
    parts = x.split(microbatch_sizes(len(x), microbatches))
    graphs = {len(part): trace(model, (part,), mode="eval") for part in parts}
    model.eval()
    with torch.no_grad():
        expected = model(x)
        try:
            outputs = join_outputs(trace(model, (x,), mode="eval"), [graphs[len(part)] for part in parts])
        except UsageError as error:
            return str(error)
        return expected, outputs.join([leaves(model(part)) for part in parts])


def assert_equal(actual: Any, expected: Any) -> None:
    """Equal structure, values and dtypes; sums over samples may be rounded in another order."""
    assert type(actual) is type(expected)
    for one, other in zip(leaves(actual), leaves(expected), strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        else:
            assert one == other and type(one) is type(other)


def filled(head: Head, h: Tensor) -> Any:
    rows, ones, constant = torch.zeros(len(h), 3), torch.zeros(len(h), 3), torch.zeros(3)
    rows[:, 1:] += h[:, 0, :2]
    ones[:, 1:] += 1.0
    constant[1:] += 1.0
    return rows, ones, constant


def grouped(head: Head, h: Tensor) -> Tensor:
    """A convolution whose groups are the samples."""
    kernel = h[:, :2, :, None].reshape(-1, 6, 1) + h.new_ones(len(h) * 2, 6, 1)
    return F.conv1d(h.transpose(1, 2).reshape(1, -1, 4), kernel, groups=len(h)).view(len(h), 2, 4)


REDUCTIONS = ("none", "sum", "mean")
T = 4  # x is [batch, T, 6]
JOINED: dict[str, Callable[[Head, Tensor], Any]] = {
    "time first": lambda m, h: h.transpose(0, 1),
    "samples, then time": lambda m, h: h.flatten(0, 1),
    "time, then samples": lambda m, h: h.transpose(0, 1).flatten(0, 1),
    "back to samples": lambda m, h: h.transpose(0, 1).reshape(-1, 6).view(T, -1, 6).mean(0),
    "lstm": lambda m, h: m.lstm(h.transpose(0, 1)),
    "gru": lambda m, h: m.gru(h),
    "two views": lambda m, h: torch.cat([h, h * 2]).relu(),
    "two views in two": lambda m, h: torch.cat([h, h * 2]).chunk(2),
    "new first dim": lambda m, h: torch.stack([h, -h]),
    "class token": lambda m, h: torch.cat([m.linear.bias.expand(len(h), 1, 6), h], 1),
    "repeated samples": lambda m, h: (h.repeat(3, 1, 1), h.repeat_interleave(3, 0)),
    "zeros": lambda m, h: (h.new_zeros(2, len(h)), torch.full((len(h),), 3)),
    "in place": filled,
    "groups": grouped,
    "chosen token": lambda m, h: h[torch.arange(len(h)), h[..., 0].argmax(1)],
    "chosen tokens": lambda m, h: h[torch.arange(len(h))[:, None], (h[:, :2, 0] > 0).long()],
    "chosen by a list": lambda m, h: h[list(range(len(h))), 2],
    "looked up by all": lambda m, h: h[torch.arange(len(h))[:, None, None], torch.arange(T)[:, None], torch.arange(6)],
    "along other dims": lambda m, h: (h.softmax(1), h.sort(dim=2).values, h.topk(2, dim=1), torch.fft.fft(h).abs()),
    "distances": lambda m, h: torch.cdist(h, m.linear.weight),
    "determinants": lambda m, h: torch.det(h[:, :2, :2]),
    "matrices": lambda m, h: [
        torch.linalg.solve(4 * torch.eye(T) + h[..., :T], h),
        torch.linalg.svdvals(h),
        h[..., :T].matrix_exp(),
    ],
    "turned": lambda m, h: h.rot90(1, (1, 2)),
    "by index": lambda m, h: (h.index_add(1, m.index, h), torch.take_along_dim(h, h.argsort(1)[:, :2], 1)),
    "in a set": lambda m, h: torch.isin((9 * h).round(), m.index),
    "one slope": lambda m, h: F.prelu(h, m.linear.bias[:1]),
    "enlarged": lambda m, h: F.interpolate(h, size=9, mode="nearest-exact"),
    "special functions": lambda m, h: torch.special.xlogy(torch.special.i0(h), h.square()),
    "number per sample": lambda m, h: h * torch.tensor([2.0] * len(h))[:, None, None],
    "products": lambda m, h: h[:, :, :3].cross(h[:, :, 3:], dim=2),
    "mean": lambda m, h: h.mean(),
    "pooled": lambda m, h: m.linear(h.mean((0, 1))) * 2 + 1,
    "mean by hand": lambda m, h: h.sum((0, 1)) / (len(h) * T),
    "sum": lambda m, h: (h.sum(), (h > 0).sum(), h.square().sum((0, 2), keepdim=True)),
    "gram": lambda m, h: h.flatten(1).T @ h.flatten(1),
    "penalties": lambda m, h: 0.1 * sum([h.mean(), 1 - h.square().mean(), m.linear.weight.square().mean()]),
    "losses": lambda m, h: (F.mse_loss(h, -h), F.cross_entropy(h[:, 0], h[:, 1].softmax(1))),
    "losses of classes": lambda m, h: [F.cross_entropy(h[:, 0], h[:, 1].argmax(1), reduction=r) for r in REDUCTIONS],
    "weights": lambda m, h: (m.linear.weight, m.linear.bias * 2),
    "numbers": lambda m, h: {"batch": len(h), "half": h.shape[0] // 2, "share": 1 / len(h), "text": "a", "none": None},
    "structures": lambda m, h: Named(h, {"pair": Pair(h.mean(), [h, 3])}),
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[Head, Tensor], Any], str]] = {
    "similarity": (lambda m, h: {"rows": h, "similar": h[:, 0] @ h[:, 0].T}, r"Output \['similar'\] of Head .* matmul"),
    "maximum": (lambda m, h: h.max(), r"float32\[\] for the batch of 7 and float32\[\] for a microbatch of 2"),
    "variance": (lambda m, h: h.var(0), "through var"),
    "norm": (lambda m, h: h.norm(), "vector_norm"),
    "product of means": (lambda m, h: h.mean(0) ** 2, "through pow"),
    "ratio of sums": (lambda m, h: h.sum() / h.abs().sum(), "through div"),
    "sum and a number": (lambda m, h: h.sum() + 1, "through add"),
    "centred": (lambda m, h: h - h.mean(0), "through sub"),
    "scaled by the batch": (lambda m, h: h * len(h), "through mul"),
    "softmax of samples": (lambda m, h: h.softmax(0), "through softmax"),
    "sorted samples": (lambda m, h: h.sort(dim=0).values, "through sort"),
    "sorted by default": (lambda m, h: h[:, 0, 0].sort().values, "through sort"),
    "sorted in dim 0": (lambda m, h: torch.msort(h), "through msort"),
    "norms of columns": (lambda m, h: h.renorm(2, 1, 0.1), "through renorm"),
    "reversed": (lambda m, h: h.flip(0), "through flip"),
    "transformed": (lambda m, h: torch.fft.fftn(h).abs(), "through fft_fftn"),
    "one sample": (lambda m, h: h[0], "through select"),
    "window by the batch": (lambda m, h: h[:, 0, len(h) // 4 : len(h) // 4 + 2], "through slice"),
    "another sample": (lambda m, h: h[torch.arange(len(h)), h[:, 0].argmax(0)[:1] % T], "through argmax"),
    "swapped samples": (lambda m, h: h[(torch.arange(len(h)) + 1) % len(h)], "through add"),
    "indices": (lambda m, h: torch.arange(len(h)), r"Output 0 of Head is int64\[7\]"),
    "other numbers per sample": (
        lambda m, h: h * torch.tensor([*range(1, len(h) + 1)])[:, None, None],
        "a tensor in its code that depends on the batch",
    ),
    "matrix of samples": (lambda m, h: torch.linalg.svdvals(h[:, 0]), "through linalg_svdvals"),
    "set of samples": (lambda m, h: torch.isin(h, h), "through isin"),
    "indices of samples": (lambda m, h: h.index_fill(1, h[:, 0, 0].argsort() % T, 0.0), "through argsort"),
    "indices by samples": (lambda m, h: h.index_fill(1, h[:, 0].argmax(1) % T, 0.0), "through index_fill"),
    "number in a tensor": (lambda m, h: torch.tensor(len(h)), "a tensor in its code that depends on the batch"),
    "rounded mean": (lambda m, h: h.mean().long(), "through to"),
    "some classes": (lambda m, h: F.cross_entropy(h[:, 0], h[:, 1].argmax(1), ignore_index=2), "cross_entropy_loss"),
    "classes of tokens": (lambda m, h: F.cross_entropy(h.mT, h.argmax(2)), "through cross_entropy_loss"),
    "weighted": (
        lambda m, h: F.cross_entropy(h[:, 0], h[:, 1].argmax(1), m.linear.bias.detach()),
        "cross_entropy_loss",
    ),
    "other order": (lambda m, h: h[:, 0].reshape(6, len(h)), "through reshape"),
    "a list of samples": (lambda m, h: list(h), "it returns 7 values for the batch of 7 and 2 values for a microbatch"),
    "an updated sample": (lambda m, h: first_sample_zeroed(h), "Output 0 of Head"),
    "an updated list": (lambda m, h: sum_added(h), "Output 0 of Head"),
}  # fmt: skip


def first_sample_zeroed(h: Tensor) -> Tensor:
    rows = torch.zeros_like(h) + h
    rows[0] = 0.0
    return rows


def sum_added(h: Tensor) -> Tensor:
    rows = torch.zeros_like(h) + h
    torch._foreach_add_([rows], [rows.sum(0)])
    return rows


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize(("batch", "microbatches"), only([(7, 4)], [(7, 4), (8, 2), (8, 8), (4, 2), (6, 4)]))
def test_outputs_are_those_of_the_batch(name: str, batch: int, microbatches: int) -> None:
    torch.manual_seed(0)
    result = joined_or_refused(Head(JOINED[name]), torch.randn(batch, T, 6), microbatches)
    assert not isinstance(result, str), result
    assert_equal(result[1], result[0])


@pytest.mark.parametrize("name", REFUSED)
def test_outputs_that_do_not_follow_are_refused(name: str) -> None:
    function, message = REFUSED[name]
    result = joined_or_refused(Head(function), torch.randn(7, T, 6), 4)
    assert isinstance(result, str), "joined"
    assert re.search(message, result), result
    assert "Return one row per sample, or plan with microbatches=1 and dp=1." in result


MIXING = (
    "similarity", "centred", "softmax of samples", "sorted samples", "norms of columns", "reversed", "transformed",
    "an updated sample", "an updated list",
)  # fmt: skip


@pytest.mark.parametrize("name", [*JOINED, *MIXING, "batch norm"])
def test_training_warns_of_outputs_that_mix_samples(name: str) -> None:
    functions = JOINED | {mixing: REFUSED[mixing][0] for mixing in MIXING}
    x = torch.randn(10, T, 6)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(24)) if name == "batch norm" else Head(functions[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MixedSamplesWarning)
        warn_of_mixed_samples(trace(model, (x[:5],)), 10, lambda: trace(model, (x,)))
    assert {w.category for w in caught} == ({MixedSamplesWarning} if name in MIXING else set())


@pytest.mark.parametrize("name", ["class token", "along other dims", "products"])
def test_only_where_samples_may_be_mixed_the_batch_is_traced(name: str) -> None:
    part = trace(Head(JOINED[name]), (torch.randn(7, T, 6),))
    warn_of_mixed_samples(part, 14, lambda: pytest.fail("traced"))


class Rearranged(nn.Module):
    """Dims permuted and merged in several ways, one after the other; sizes may be written by the batch."""

    def __init__(self, steps: list[tuple[list[int], int, bool]]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x)
        for order, first, by_batch in self.steps:
            x = x.permute([dim for dim in order if dim < x.ndim])
            if by_batch and prod(x.shape) % batch == 0:
                x = x.reshape(-1, batch)
            elif first:
                x = x.reshape(first, -1) if prod(x.shape) % first == 0 else x.flatten()
        return x


STEP = st.tuples(st.permutations(range(3)), st.sampled_from([0, 2, 3, 4, 6]), st.booleans())


@settings(max_examples=examples(300))
@given(st.lists(STEP, min_size=1, max_size=3), st.sampled_from([(4, 2), (6, 4), (6, 6), (3, 2)]))
def test_any_order_of_the_samples_is_joined_or_refused(
    steps: list[tuple[list[int], int, bool]], case: tuple[int, int]
) -> None:
    batch, microbatches = case
    x = torch.arange(batch * 4 * 6).reshape(batch, 4, 6)
    result = joined_or_refused(Rearranged(steps), x, microbatches)
    assert isinstance(result, str) or torch.equal(result[0], result[1])


class Centred(nn.Module):
    """Rows less a running mean, by batch norm, of features or of a weight."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of, self.linear, self.norm = of, nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.mean = nn.Buffer(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.linear(x[:, 0]))
        if self.of != "nothing":
            with torch.no_grad():
                self.mean.lerp_((h if self.of == "features" else self.linear.weight).mean(0), 0.1)
        return h - self.mean


@pytest.mark.parametrize(
    ("of", "microbatches", "dp", "warns"),
    [
        ("features", 2, 1, True), ("features", 1, 1, False), ("features", 1, 2, True), ("weight", 2, 1, True),
        ("weight", 1, 2, False), ("nothing", 2, 2, False),
    ],
)  # fmt: skip
def test_training_warns_of_state_that_a_forward_updates(of: str, microbatches: int, dp: int, warns: bool) -> None:
    x = torch.randn(8, T, 6)
    plan = autopar.plan(Centred(of), dp, x, dp=dp, microbatches=microbatches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_updated_state(trace(Centred(of), (x[: 8 // microbatches // dp],), mode="train"), plan)
    assert len(caught) == warns
    if warns:
        message = r"The forward of Centred updates mean at .*test_outputs\.py:.*: for each microbatch"
        assert re.search(message, str(caught[0].message))


@pytest.mark.parametrize(("microbatches", "warns"), [(1, False), (2, True)])
def test_training_warns_of_norms_that_would_synchronise(microbatches: int, warns: bool) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten()))
    x = torch.randn(16, 3, 4, 4)
    plan = autopar.plan(model, 1, x, microbatches=microbatches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_synchronised_norms(model, plan)
    assert [str(warning.message)[:29] for warning in caught] == ["Sequential has 1 SyncBatchNorm"[:29]] * warns

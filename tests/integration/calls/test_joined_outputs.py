"""What a parallel model returns is what the model returns, whatever the mesh and the microbatches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.handmade import in_threads, plan_by_hand
from torch import Tensor, nn

import autopar
from autopar import UsageError
from autopar.ir.graph import Graph, Mode
from autopar.ir.plan import Plan
from autopar.ir.pytree import leaves
from autopar.trace.call import Call
from autopar.trace.lower import lower_planned


class Everywhere(nn.Module):
    """Outputs whose samples lie in other dims than the first, sums, means, numbers; largest: a maximum over samples."""

    def __init__(self, largest: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.lstm = nn.Linear(6, 6), nn.Linear(6, 4), nn.LSTM(6, 5, 2)
        self.largest = largest

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.first(x))
        steps, states = self.lstm(h.transpose(0, 1))
        rows = self.second(h.mean(1))
        outputs = {
            "rows": rows,
            "states": states,
            "steps": steps,
            "tokens": steps.flatten(0, 1),
            "gram": rows.T @ rows,
            "mean": rows.square().mean(),
            "sum": h.sum(),
            "batch": x.shape[0],
            "none": None,
        }
        return outputs | ({"largest": rows.amax(0)} if self.largest else {})


def rows_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return (output["rows"] - target).square().mean()


def model_and_batch(samples: int, **more: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Everywhere(**more), torch.randn(samples, 3, 6)


def assert_returns(actual: Any, expected: Any) -> None:
    assert list(actual) == list(expected)
    for one, other in zip(leaves(actual), leaves(expected), strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        else:
            assert one == other


@pytest.mark.parametrize(
    ("microbatches", "firsts", "dp"),
    [
        pytest.param(1, [], 1, id="one microbatch", marks=pytest.mark.full),
        pytest.param(3, [], 1, id="ragged microbatches"),
        pytest.param(2, ["second.linear"], 1, id="two stages", marks=pytest.mark.full),
        pytest.param(2, [], 2, id="two replicas"),
    ],
)
def test_a_batch_of_any_size_returns_what_the_model_returns(microbatches: int, firsts: list[str], dp: int) -> None:
    model, x = model_and_batch(8)
    with in_threads(model, plan_by_hand(model, x, microbatches, firsts, dp=dp), x, rows_loss) as pm:
        for samples in (8, 5, 1):  # 1 sample: fewer than two replicas
            assert_returns(pm(x[:samples]), model(x[:samples]))
        expected, target = model(x[:6]), torch.zeros(6, 4)
        assert_returns(pm.forward_backward(x[:6], target, return_outputs=True).outputs, expected)
        pm.eval()
        assert_returns(pm(x), model.eval()(x))


@pytest.mark.full
@pytest.mark.parametrize(("firsts", "dp"), [(["second.linear"], 1), ([], 2)], ids=["two stages", "two replicas"])
def test_workers_return_what_the_model_returns(firsts: list[str], dp: int) -> None:
    model, x = model_and_batch(8)
    plan = plan_by_hand(model, x, 2, firsts, dp=dp)
    with autopar.parallelize(model, 2, x, loss_fn=rows_loss, plan=plan) as pm:
        assert_returns(pm(x), model(x))
        assert_returns(pm(x[:1]), model(x[:1]))
        target = torch.zeros(8, 4)
        assert_returns(pm.forward_backward(x, target, return_outputs=True).outputs, model(x))


def test_a_refusal_names_the_output_and_leaves_no_gradients() -> None:
    model, x = model_and_batch(4, largest=True)
    target = torch.zeros(4, 4)
    with in_threads(model, plan_by_hand(model, x, 2, []), x, rows_loss) as pm:
        message = (
            r"Output \['largest'\] of Everywhere is float32\[4\] for the batch of 4 and float32\[4\] for a microbatch "
            r"of 2\..*through amax \(.*test_joined_outputs\.py.*amax\(0\)"
        )
        for call in (lambda: pm(x), lambda: pm.forward_backward(x, target, return_outputs=True)):
            with pytest.raises(UsageError, match=message):
                call()
        assert pm.gradients() == {}
        assert pm.forward_backward(x, target).loss > 0
        assert_returns(pm(x[:1]), model(x[:1]))  # one microbatch


class OfFour(nn.Module):
    """Takes four samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean(1)).reshape(4, 4)


def test_a_model_that_does_not_take_the_batch_has_no_outputs_for_it() -> None:
    model, x = OfFour(), torch.randn(8, 3, 6)
    with in_threads(model, plan_by_hand(model, x, 2, []), x, nn.functional.mse_loss) as pm:
        assert pm.forward_backward(x, torch.zeros(8, 4)).loss > 0
        with pytest.raises(UsageError, match=r"does not take inputs of shape \[8, 3, 6\] \(the whole batch"):
            pm(x)


def test_only_a_call_with_several_microbatches_traces_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []

    def counted(plan: Plan, model: nn.Module, call: Call, mode: Mode) -> Graph:
        batches.append(call.batch)
        return lower_planned(plan, model, call, mode)

    monkeypatch.setattr("autopar.api.program_cache.lower_planned", counted)
    model, x = model_and_batch(4)
    with in_threads(model, plan_by_hand(model, x, 2, []), x, rows_loss) as pm:
        before = len(batches)
        pm.forward_backward(x, torch.zeros(4, 4))
        assert len(batches) == before
        for _ in range(3):
            pm.eval()(x)
            pm(x[:1])
        assert batches[before:] == [4, 1]


class Similarities(nn.Module):
    """Products of all pairs of samples, as a contrastive loss compares them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embed(x)
        return rows @ rows.T


class FourSamples(nn.Module):
    """Takes batches of four samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.start = nn.Linear(6, 4), nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x) + self.start


def of_pairs(similarities: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(similarities, torch.arange(len(similarities)))


def test_outputs_that_mix_samples_are_warned_of_where_microbatches_have_other_ones() -> None:
    x = torch.randn(8, 6)
    with (
        pytest.warns(autopar.MixedSamplesWarning, match=r"Output 0 of Similarities .* through matmul .* of 8 .* of 4 "),
        autopar.parallelize(Similarities(), 1, x, loss_fn=of_pairs, microbatches=2),
    ):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.MixedSamplesWarning)
        with autopar.parallelize(Similarities(), 1, x, loss_fn=of_pairs, microbatches=1):
            pass
        four_classes = nn.Linear(6, 4)  # as many as a microbatch has samples
        with autopar.parallelize(four_classes, 1, x, microbatches=2):
            pass
        with autopar.parallelize(FourSamples(), 1, x, microbatches=2):
            pass

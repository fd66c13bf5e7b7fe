"""Evaluation: sums over ragged batches, top 5, inputs that a process needs."""

from __future__ import annotations

import pytest
import torch
from support.training import digits, parallel
from torch import nn

import autopar
from autopar.errors import UsageError
from autopar.train import (
    Batch,
    evaluate,
    evaluate_alone,
    evaluation_loader,
)
from autopar.train.evaluation import mean_scores, score_sums


def test_evaluation_counts_ragged_batches_and_leaves_out_what_fills_them():
    labels = torch.tensor([0, 1, 2, 3, 4, 5])
    scores = torch.eye(7)[labels] + torch.linspace(0, 0.1, 7)
    scores[4] = scores[3]
    whole = mean_scores(score_sums(scores, labels))
    assert (whole.right, whole.samples, whole.accuracy) == (5, 6, 5 / 6)
    assert whole.loss == pytest.approx(nn.functional.cross_entropy(scores, labels).item())
    batches = [Batch(scores[:4], labels[:4], 4), Batch(scores[4:], labels[4:], 1), Batch(scores[5:], labels[5:], 1)]
    assert evaluate_alone(lambda x: x, batches).samples == 6
    assert evaluate_alone(lambda x: x, batches).loss == pytest.approx(whole.loss)
    assert evaluate_alone(lambda x: x, [*batches, Batch(scores[:1], labels[:1], 0)]).right == 5


def test_top5_is_told_apart():
    scores = torch.arange(8.0).expand(8, 8)
    top = mean_scores(score_sums(scores, torch.arange(8)))
    assert (top.accuracy, top.top5) == (1 / 8, 5 / 8)


def test_outputs_that_are_no_scores():
    with (
        autopar.parallelize(nn.Flatten(0), 1, torch.empty(16, 1, 8, 8)) as pm,
        pytest.raises(
            UsageError, match=r"output is of shape \[1024\]; its accuracy needs scores of \[batch, classes\]"
        ),
    ):
        evaluate(pm, evaluation_loader(digits(), 16, pm).epoch(1))


def test_what_a_process_has_to_read():
    with parallel() as pm:
        assert pm.needs_inputs and pm.needs_targets and pm.data_sum([1, 2.5]) == [1, 2.5]
        x, y = torch.empty(20, 1, 8, 8), torch.zeros(20, dtype=torch.int64)
        message = r"Rank 0 was given {0}s on the meta device, .* Pass real ones where pm\.needs_{0}s is true"
        with pytest.raises(UsageError, match=message.format("input")):
            pm(x.to("meta"))
        with pytest.raises(UsageError, match=message.format("target")):
            pm.train_step(x, y.to("meta"))

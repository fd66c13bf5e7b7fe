"""Graphs that wait for their backwards: their numbers, and how they end."""

from __future__ import annotations

import pytest
import torch

from autopar.api.autograd import attached
from autopar.api.kept_graphs import MAX_AGREED, KeptGraphs
from autopar.errors import UsageError


def test_a_number_is_free_after_the_backward() -> None:
    graphs = KeptGraphs()
    first, second = graphs.open([True]), graphs.open([True])
    assert (first.number, second.number) == (0, 1)
    graphs.close(first)
    with pytest.raises(UsageError, match="has run already"):
        first.check_open()
    second.check_open()
    assert graphs.open([True]).number == 0


def test_a_number_is_free_once_all_ranks_have_dropped_the_outputs() -> None:
    graphs = KeptGraphs()
    kept = [graphs.open([True]) for _ in range(3)]
    assert graphs.unreachable() == 0
    del kept[1]
    assert graphs.unreachable() == 0b010
    assert graphs.forget(graphs.unreachable() & 0b100) == ()  # another rank still has its outputs
    assert graphs.forget(graphs.unreachable() & 0b110) == (1,)
    assert [graphs.open([True]).number, len(kept)] == [1, 2]


def test_numbers_beyond_those_that_ranks_agree_on_stay() -> None:
    graphs = KeptGraphs()
    kept = [graphs.open([True]) for _ in range(MAX_AGREED + 1)]
    kept.clear()
    assert graphs.unreachable().bit_length() == MAX_AGREED
    graphs.forget(graphs.unreachable())
    assert [*graphs.by_number] == [MAX_AGREED]


def test_a_change_of_the_weights_ends_all() -> None:
    graphs = KeptGraphs()
    graph = graphs.open([True])
    assert graphs.end_all() == (0,)
    with pytest.raises(UsageError, match="weights have changed"):
        graph.check_open()
    assert graphs.end_all() == ()


def test_gradients_of_all_outputs_come_together() -> None:
    """Of two microbatches with two outputs each; of the second one nothing is used, and no gradient is None."""
    received = []
    parts = [[torch.ones(2, 3), torch.ones(2), "text"], [torch.ones(1, 3), torch.ones(1), "text"]]
    first, second = attached(parts, [True, True, False], torch.device("cpu"), received.append)
    assert first[2] == second[2] == "text"
    (2 * first[0].sum() + second[0].square().sum()).backward()
    ((grad, no_grad, none), (other, *_)) = received[0]
    assert torch.equal(grad, torch.full((2, 3), 2.0)) and torch.equal(other, torch.full((1, 3), 2.0))
    assert (no_grad, none, len(received)) == (None, None, 1)


def test_outputs_that_do_not_depend_on_weights_have_no_graph() -> None:
    ((tracked, untracked),) = attached(
        [[torch.ones(2), torch.ones(2, dtype=torch.int64)]], [True, False], torch.device("cpu"), print
    )
    assert (tracked.requires_grad, untracked.requires_grad) == (True, False)

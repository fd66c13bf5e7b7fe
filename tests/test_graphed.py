"""What a captured step needs that can be seen without a GPU: answers, optimizers, places of messages."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import UsageError
from autopar.runtime.answers import Answers
from autopar.runtime.graphed import given_rates, is_capturable, prepare
from autopar.runtime.symmetric import ALIGNMENT, aligned, places
from autopar.runtime.transport import Hub, LocalTransport


def optimizer_of(kind: Any, **options: Any) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.ones(3))], lr=0.1, **options)


def test_answers_are_noted_and_recalled_without_asking() -> None:
    hub = Hub(timeout_seconds=5.0)
    here, there = Answers(LocalTransport(0, hub)), LocalTransport(1, hub)
    here.note()
    there.send_flags([True, False], 0, 7)
    assert here.receive_flags(2, 1, 7)().tolist() == [1, 0]
    there.start_sum(torch.tensor([1, 0], dtype=torch.int32), (0, 1))
    assert here.sum_flags([True, True], (0, 1)) == [2, 1]
    noted = here.stop()
    here.recall(noted)
    here.send_flags([True], 1, 9)
    assert here.receive_flags(2, 1, 7)().tolist() == [1, 0]
    assert here.sum_flags([True, True], (0, 1)) == [2, 1]
    assert here.stop() == noted
    assert hub.boxes.get((0, 1, 9)) is None, "flags were sent while answers were recalled"


def test_only_optimizers_that_count_on_the_device_are_captured() -> None:
    adamw, sgd = optimizer_of(torch.optim.AdamW), optimizer_of(torch.optim.SGD)
    assert not is_capturable(adamw)
    for optimizer in (adamw, sgd):
        prepare(optimizer)
    assert is_capturable(adamw)
    assert not is_capturable(sgd)


def test_rates_are_given_for_a_while() -> None:
    optimizer = optimizer_of(torch.optim.AdamW)
    rate = torch.tensor(0.5)
    with pytest.raises(RuntimeError), given_rates(optimizer, [rate]):
        assert optimizer.param_groups[0]["lr"] is rate
        raise RuntimeError
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_kind_of_a_step_is_all_but_its_content() -> None:
    """Ranks decide by it together what they capture, so it must not depend on what one of them alone is given."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 4), torch.randn(6, 8), torch.randint(0, 4, (6,))
    kinds = []
    with autopar.parallelize(model, 1, x, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), microbatches=2) as pm:
        rank = pm._ranks.rank  # type: ignore[union-attr]
        run = rank.compute
        rank.compute = lambda work: (kinds.append(work.kind), run(work))[1]
        cases: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = [
            (x, y, {}), (x + 1, y.flip(0), {}), (x, F.one_hot(y, 4).float(), {}), (x[:4], y[:4], {}),
            (x, y, {"return_outputs": True}), (x, y, {"share": 0.5}),
        ]  # fmt: skip
        for inputs, target, options in cases:
            pm.train_step(inputs, target, **options)
    assert kinds[0] == kinds[1]
    assert len(set(kinds)) == 5


def test_symmetric_memory_needs_gpus() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with pytest.raises(UsageError, match=r'transport="symmetric" needs GPUs of one host .* Leave it out'):
        autopar.parallelize(model, 2, torch.randn(4, 8), pp=2, transport="symmetric")
    with pytest.raises(UsageError, match=r"transport='mpi' is unknown\. It is one of auto, nccl, symmetric"):
        autopar.parallelize(model, 2, torch.randn(4, 8), transport="mpi")


@given(st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 50)), st.integers(1, 5000)))
def test_messages_lie_apart_and_both_ends_agree(messages: dict[tuple[int, int], int]) -> None:
    """The receiver lays out what each peer sends; a sender knows its own messages alone, and where they begin."""
    sizes = [sum(aligned(n) for (peer, _), n in messages.items() if peer == p) for p in range(4)]
    starts = {peer: sum(sizes[:peer]) for peer in range(4)}
    found = places(messages, starts)
    taken = sorted((place, place + messages[key]) for key, (place, _) in found.items())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))
    assert all(place % ALIGNMENT == 0 for place, _ in found.values())
    for peer in range(4):
        own = {(9, tag): n for (p, tag), n in messages.items() if p == peer}
        sent = places(own, {9: starts[peer]})
        assert {tag: at for (_, tag), at in sent.items()} == {tag: at for (p, tag), at in found.items() if p == peer}
        signals = [signal for (p, _), (_, signal) in found.items() if p == peer]
        assert sorted(signals) == list(range(len(own)))

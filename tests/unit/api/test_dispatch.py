"""Batches of one signature are cut alike: what that takes is worked out once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.faults import mlp
from support.handmade import in_threads, plan_by_hand

from autopar import UsageError
from autopar.api import dispatch
from autopar.api.program_cache import ProgramCache


def test_only_a_new_signature_is_cut_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[int] = []
    found = ProgramCache.microbatches

    def counted(self: ProgramCache, mode: Any, call: Any, parts: Any) -> Any:
        cuts.append(call.batch)
        return found(self, mode, call, parts)

    monkeypatch.setattr(ProgramCache, "microbatches", counted)
    torch.manual_seed(0)
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    model = mlp()
    pm = in_threads(model, plan_by_hand(model, x, 3, ["2.linear"]), x, F.cross_entropy, optimizer=torch.optim.Adam)
    losses = [pm.train_step(x, y).loss for _ in range(3)]
    assert cuts == [6] and len(set(losses)) == 3 and pm.num_drawn == 0
    pm.forward_backward(x[:4], y[:4])
    pm.forward_backward(x, y)
    assert cuts == [6, 4] and pm.num_drawn == 10
    assert pm.forward_backward(x, y, return_outputs=True).outputs.shape == (6, 4)  # outputs are joined somehow
    assert pm.eval()(x).shape == (6, 4)
    assert cuts == [6, 4, 6, 6] and pm.eval()(x).equal(pm(x)) and len(cuts) == 4
    pm.train()
    # What does not belong to the signature is still looked at every time.
    with pytest.raises(UsageError, match=r"A target has shape \[5\] for a batch of 6"):
        pm.train_step(x, y[:5])
    with pytest.raises(UsageError, match="Rank 1 was given targets on the meta device"):
        pm.train_step(x, y.to("meta"))
    with pytest.raises(UsageError, match="expected float32"):
        pm.train_step(x.double(), y)
    assert len(cuts) == 4


def test_programs_of_old_shapes_are_dropped_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_BATCH_SHAPES", 3)
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    model = mlp()
    pm = in_threads(model, plan_by_hand(model, x, 2, ["2.linear"]), x, F.cross_entropy)
    ranks: Any = pm._ranks
    for size in (6, 5, 4, 3, 2, 1, 5, 6):
        pm.train().forward_backward(x[:size], y[:size])
        assert pm.eval()(x[:size]).shape == (size, 4)
    # The last three shapes are 1, 5 and 6, cut into microbatches of 1, 3 and 2, and 3.
    sizes = {own.graph.batch for own in pm._programs.specializations.values()}
    assert sizes == {1, 2, 3} and len(pm._programs.specializations) == 6
    for rank in ranks.ranks:
        assert rank.chunks.keys() == {own.number for own in pm._programs.specializations.values()}
        assert len(rank.bound_steps) == 6
    assert len(pm._dispatcher.partitions) == 6


def test_the_planned_programs_are_never_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_BATCH_SHAPES", 1)
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    model = mlp()
    pm = in_threads(model, plan_by_hand(model, x, 2, ["2.linear"]), x, F.cross_entropy)
    pm.forward_backward(x[:4], y[:4])
    pm.forward_backward(x[:2], y[:2])
    assert {own.graph.batch for own in pm._programs.specializations.values()} == {3, 1}
    monkeypatch.setattr(ProgramCache, "split", None)
    pm.forward_backward(x, y)
    assert pm.eval()(x).shape == (6, 4)


class Agreed:
    """An agreement with one other rank, whose batches have shapes and a kind of some number."""

    def __init__(self, others: int) -> None:
        self.others = others
        self.kinds: tuple[int, ...] = ()
        self.shapes: tuple[int, ...] = ()
        self.unreachable = 0

    def start(self, call: str, batch: int, kind: int, shapes: int, given: Any, unreachable: int) -> Callable[[], None]:
        def agreed() -> None:
            self.kinds, self.shapes = (kind, self.others), (shapes, self.others)

        return agreed


def test_ranks_bind_a_step_whenever_any_of_them_has_new_shapes() -> None:
    """A rank to which nothing is new binds too: its peers wait for it, and it cannot tell whether they have to."""
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    model = mlp()
    pm = in_threads(model, plan_by_hand(model, x, 3, ["2.linear"]), x, F.cross_entropy, optimizer=torch.optim.Adam)
    ranks: Any = pm._ranks
    agreement: Any = Agreed(5)
    pm._dispatcher.agreement = agreement

    def bound() -> set[int]:
        return {len(rank.bound_steps) for rank in ranks.ranks}

    pm.train_step(x, y)
    pm.train_step(x + 1, y.flip(0))
    pm.train_step(x, F.one_hot(y, 4).float())  # targets are the last stage's alone
    assert bound() == {1}
    agreement.others = 6  # of another rank only
    pm.train_step(x, y)
    assert bound() == {2}
    pm.train_step(x[:4], y[:4])
    assert bound() == {3}

"""Collectives over boards that all ranks read: here ranks are threads, and boards tensors of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from autopar.runtime import symmetric_axis
from autopar.runtime.symmetric import Neighbour, reach_each_other
from autopar.runtime.symmetric_axis import SymmetricCommunicator


class ThreadBoards:
    """A rank's view of what all threads share."""

    def __init__(self, ranks: int) -> None:
        self.boards = torch.full([ranks, 4096], 255, dtype=torch.uint8)
        self.waiting = threading.Barrier(ranks)

    def reserve(self, num_bytes: int) -> None:
        assert num_bytes <= self.boards.shape[1]

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.boards[rank, :size].view(dtype).view(tuple(shape))

    def barrier(self) -> None:
        self.waiting.wait(timeout=10)


def on_all(ranks: int, call: Callable[[SymmetricCommunicator], Any]) -> list[Any]:
    """What each rank's call returns; every rank calls three times, so that boards are used again."""
    boards = ThreadBoards(ranks)
    members = [SymmetricCommunicator(rank, ranks, boards) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda member: [call(member) for _ in range(3)][-1], members))


def given(ranks: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn([ranks, *shape], generator=torch.Generator().manual_seed(ranks)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("most", "beside"), [(4096, False), (0, False), (4096, True)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_reduce(ranks: int, most: int, beside: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_axis, "ONE_SHOT_BYTES", most)
    own = given(ranks, 7, 9, dtype=dtype)

    def call(member: SymmetricCommunicator) -> torch.Tensor:
        tensor = own[member.rank].clone()
        member.all_reduce(tensor, beside)
        return tensor

    results = on_all(ranks, call)
    expected = own[0].clone()
    for other in own[1:]:
        expected += other
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_gather(ranks: int) -> None:
    own = given(ranks, 5, 3)
    assert all(torch.equal(result, own) for result in on_all(ranks, lambda m: m.all_gather(own[m.rank])))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_reduce_scatter(ranks: int, beside: bool) -> None:
    own = given(ranks, ranks, 5)
    for rank, result in enumerate(on_all(ranks, lambda m: m.reduce_scatter(own[m.rank], beside))):
        expected = own[0, rank].clone()
        for other in own[1:, rank]:
            expected += other
        assert torch.equal(result, expected)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_to_all(ranks: int) -> None:
    own = given(ranks, ranks, 5) > 0
    for rank, result in enumerate(on_all(ranks, lambda m: m.all_to_all(own[m.rank]))):
        assert torch.equal(result, own[:, rank])


def test_who_reaches_whom() -> None:
    def gpus(host: str, count: int) -> list[Neighbour]:
        return [Neighbour(host, i, frozenset(range(count)) - {i}) for i in range(count)]

    near, far = gpus("a", 4), gpus("b", 4)
    assert reach_each_other(near) and reach_each_other(near[1:3])
    assert not reach_each_other([*near, *far])
    assert not reach_each_other([near[0], far[1]])
    assert not reach_each_other([Neighbour("a", 0, frozenset()), Neighbour("a", 0, frozenset())])  # each sees its own
    assert not reach_each_other([near[0], Neighbour("a", 1, frozenset({2, 3}))])  # no link in one direction

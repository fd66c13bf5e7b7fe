"""Collectives over buffers that all ranks read: here ranks are threads, and buffers tensors of one process."""

from __future__ import annotations

import functools

import pytest
import torch
from support.symmetric_buffers import on_all

from autopar.runtime.comm import symmetric_collectives as symmetric_axis
from autopar.runtime.comm.symmetric_collectives import SymmetricBufferPool, SymmetricCommunicator
from autopar.runtime.comm.symmetric_p2p import PeerAccess, have_peer_access

ROUNDS = 4


def drawn(ranks: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Other data for each round and rank."""
    return torch.randn([ROUNDS, ranks, *shape], generator=torch.Generator().manual_seed(ranks)).to(dtype)


def in_order(summands: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks, rounded as they round it."""
    return functools.reduce(torch.add, summands)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("most", "overlapped"), [(4096, False), (0, False), (4096, True)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_reduce(
    ranks: int, most: int, overlapped: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric_axis, "ONE_SHOT_BYTES", most)

    def call(member: SymmetricCommunicator, given: torch.Tensor) -> torch.Tensor:
        tensor = given.clone()
        member.all_reduce(tensor, overlapped)
        return tensor

    own = drawn(ranks, 7, 9, dtype=dtype)
    for given, results in zip(own, on_all(own, call), strict=True):
        assert all(torch.equal(result, in_order(given)) for result in results)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_gather(ranks: int) -> None:
    own = drawn(ranks, 5, 3)
    for given, results in zip(own, on_all(own, SymmetricCommunicator.all_gather), strict=True):
        assert all(torch.equal(result, given) for result in results)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_reduce_scatter(ranks: int, overlapped: bool) -> None:
    own = drawn(ranks, ranks, 5)
    rounds = on_all(own, lambda member, given: member.reduce_scatter(given, overlapped))
    for given, results in zip(own, rounds, strict=True):
        assert all(torch.equal(result, in_order(given[:, rank])) for rank, result in enumerate(results))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_to_all(ranks: int) -> None:
    own = drawn(ranks, ranks, 5) > 0
    for given, results in zip(own, on_all(own, SymmetricCommunicator.all_to_all), strict=True):
        assert all(torch.equal(result, given[:, rank]) for rank, result in enumerate(results))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_give(ranks: int) -> None:
    def call(member: SymmetricCommunicator, given: torch.Tensor) -> torch.Tensor:
        stacked = member.publish(given).clone()
        member.unpublish()
        return stacked

    own = drawn(ranks, 5, 3)
    for given, results in zip(own, on_all(own, call), strict=True):
        for rank, result in enumerate(results):
            others = [k for k in range(ranks) if k != rank]
            assert torch.equal(result[others], given[others])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_put(ranks: int) -> None:
    def call(member: SymmetricCommunicator, given: torch.Tensor) -> torch.Tensor:
        for k in member.peer_order():
            member.push_shard(k, given)
        return member.reduce_pushed(given)

    own = drawn(ranks, ranks, 5)
    for given, results in zip(own, on_all(own, call), strict=True):
        assert all(torch.equal(result, in_order(given[:, rank])) for rank, result in enumerate(results))


def test_who_reaches_whom() -> None:
    def gpus(host: str, count: int) -> list[PeerAccess]:
        return [PeerAccess(host, i, frozenset(range(count)) - {i}) for i in range(count)]

    near, far = gpus("a", 4), gpus("b", 4)
    assert have_peer_access(near) and have_peer_access(near[1:3])
    assert not have_peer_access([*near, *far])
    assert not have_peer_access([near[0], far[1]])
    assert not have_peer_access([PeerAccess("a", 0, frozenset()), PeerAccess("a", 0, frozenset())])  # each sees its own
    assert not have_peer_access([near[0], PeerAccess("a", 1, frozenset({2, 3}))])  # no link in one direction


def test_buffers_that_grow_step_by_step_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps keep smaller buffers alive, so a run whose images grow must not have a buffer of each size."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        symmetric_axis, "allocate", lambda num_bytes, device, group: (torch.empty(num_bytes, dtype=torch.uint8), None)
    )
    pool = SymmetricBufferPool(0, torch.device("cpu"), None)
    for num_bytes in range(1000, 100_000, 1000):
        pool.reserve(num_bytes)
        assert pool.num_bytes >= num_bytes
    assert pool.allocations[0][0].numel() == 1000
    assert sum(buffer.numel() for buffer, _ in pool.allocations) < 3 * pool.num_bytes

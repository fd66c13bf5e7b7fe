"""Ranks agree on a name for their attempt, whatever earlier attempts left in the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist

from autopar import UsageError
from autopar.runtime.launch.attempt import attempt_name

SECONDS = 30.0


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


class Ranks:
    """Ranks in threads, each with a connection of its own."""

    def __init__(self, store: dist.Store, threads: ThreadPoolExecutor, world: int) -> None:
        self.store, self.threads, self.world = store, threads, world

    def start(self, rank: int, seconds: float = SECONDS) -> Future[str]:
        return self.threads.submit(attempt_name, self.store.clone(), rank, self.world, seconds)

    def names(self) -> set[str]:
        return {started.result() for started in [self.start(rank) for rank in range(self.world)]}


def wait_for_key(store: dist.Store, key: str) -> None:
    while not store.check([key]):
        time.sleep(0.01)


def test_each_attempt_has_a_name_of_its_own(store: dist.TCPStore, threads: ThreadPoolExecutor) -> None:
    ranks = Ranks(store, threads, 3)
    names = [ranks.names() for _ in range(3)]
    assert [len(name) for name in names] == [1] * 3 and len(set.union(*names)) == 3
    assert len(Ranks(store, threads, 2).names()) == 1  # torchrun goes on with fewer nodes


def test_an_attempt_whose_ranks_died_before_all_had_met(store: dist.TCPStore, threads: ThreadPoolExecutor) -> None:
    ranks = Ranks(store, threads, 3)
    for gone in ([0], [1, 2], [0, 1]):
        for started in [ranks.start(rank, 0.2) for rank in gone]:
            with pytest.raises(TimeoutError):
                started.result()
        assert len(ranks.names()) == 1


def test_rank_0_of_an_earlier_attempt_answers_first(store: dist.TCPStore, threads: ThreadPoolExecutor) -> None:
    ranks = Ranks(store, threads, 3)
    earlier = ranks.start(0)
    first = ranks.start(1)
    nonce = (wait_for_key(store, "hello/1"), store.get("hello/1").decode())[1]
    wait_for_key(store, f"answer/{nonce}")
    name = store.get(f"answer/{nonce}").decode()
    wait_for_key(store, f"{name}/heard/1")
    later = [ranks.start(0), ranks.start(2)]
    names = {started.result() for started in [first, *later]}
    assert len(names) == 1 and name not in names
    with pytest.raises(UsageError, match="Another process has started as rank 0"):
        earlier.result()


def test_a_rank_that_does_not_come_is_named(store: dist.TCPStore, threads: ThreadPoolExecutor) -> None:
    ranks = Ranks(store, threads, 4)
    started = [ranks.start(rank, 0.3) for rank in (0, 2)]
    for rank, text in zip(started, ("^rank 1, 3 did not answer$", "^rank 0 waits for other ranks$")):
        with pytest.raises(TimeoutError, match=text):
            rank.result()
    with pytest.raises(TimeoutError, match=r"^rank 0 did not answer$"):
        ranks.start(1, 0.1).result()

"""Waits for the replies of workers: limits, ranks that say where they are, and what arrives late."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from typing import Any

import pytest

from autopar.runtime.launch import replies as waits
from autopar.runtime.launch.ipc import WorkerChannel
from autopar.runtime.launch.replies import Replies
from autopar.runtime.launch.shared_memory import SharedMemory, shared_file
from autopar.runtime.launch.worker import WHERE, Position


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[WorkerChannel, WorkerChannel]]]:
    """Both ends of the channels to two ranks."""
    monkeypatch.setattr(waits, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(waits, "ANSWER_SECONDS", 0.2)
    pairs = []
    for _ in range(2):
        ours, theirs = Pipe()
        there, back = shared_file(), shared_file()
        caller = WorkerChannel(ours, SharedMemory(there), SharedMemory(back))
        pairs.append((caller, WorkerChannel(theirs, SharedMemory(os.dup(back)), SharedMemory(os.dup(there)))))
    yield pairs
    for pair in pairs:
        for end in pair:
            end.close()


def answering(end: WorkerChannel, rank: int, *messages: Any) -> Callable[[], None]:
    """Starts a thread that sends one of the messages, None for none, whenever it is asked `WHERE`; joins it."""

    def answer() -> None:
        for message in messages:
            assert end.decode(end.receive()) == WHERE
            if message is not None:
                end.send(end.encode(message))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread.join


def at(rank: int, waiting: bool) -> tuple[bool, Position]:
    return False, Position(rank, "0F1", "waiting for its inputs" if waiting else "computing", waiting, "stack")


def test_a_rank_that_computes_is_waited_for_with_one_warning(ends: Any) -> None:
    joins = [
        answering(ends[0][1], 0, at(0, True), at(0, True), (True, "a")),
        answering(ends[1][1], 1, at(1, False), at(1, False), (True, "b")),
    ]
    replies = Replies("stats", {rank: pair[0] for rank, pair in enumerate(ends)}, 0.05, 5.0)
    with pytest.warns(
        UserWarning, match=r"^No rank has replied to stats for 0\.1 s: rank 1 is still computing, in"
    ) as told:
        assert replies.collect()
    assert replies.results == {0: "a", 1: "b"} and len(told) == 1
    for join in joins:
        join()


def test_ranks_that_all_wait_have_failed(ends: Any) -> None:
    for rank in range(2):
        answering(ends[rank][1], rank, at(rank, True), at(rank, True) if rank else None)
    replies = Replies("stats", {rank: pair[0] for rank, pair in enumerate(ends)}, 0.05, 5.0)
    assert not replies.collect()
    errors = {rank: failure.error for rank, failure in replies.failures.items() if failure is not None}
    expected = ["no reply, and it does not say where it is", "no reply, it is still waiting for its inputs"]
    assert errors == dict(enumerate(expected))


def test_an_answer_that_comes_after_the_reply_is_no_reply_to_the_next_command(ends: Any) -> None:
    caller, worker = ends[0]
    worker.send(worker.encode(at(0, False)))
    worker.send(worker.encode((True, "next")))
    replies = Replies("stats", {0: caller}, 5.0, 5.0)
    assert replies.collect() and replies.results == {0: "next"}

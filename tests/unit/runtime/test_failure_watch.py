"""A rank hears of failures in the store, and of its own model's only."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest
import torch.distributed as dist

from autopar.runtime.launch.failure_watch import GONE, UNCAUGHT, FailureWatcher


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def watchers(store: dist.TCPStore) -> Iterator[list[FailureWatcher]]:
    """Watchers of two models of one rank."""
    with ExitStack() as opened:
        both = [FailureWatcher(store, f"failed/{model}", "rank 0", lambda: False) for model in range(2)]
        for watcher in both:
            opened.callback(watcher.close)
        yield both


def connections(store: dist.TCPStore) -> set[int]:
    """File descriptors of this process's connections to a store."""
    return {c.fd for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr[1] == store.port}


def publish(store: dist.TCPStore, key: str, text: str) -> None:
    """Writes and waits for the answer; ``set`` does not, so that another connection may read before it."""
    assert store.compare_set(key, "", text) == text.encode()


def test_a_failure_of_one_model_does_not_end_another(store: dist.TCPStore, watchers: list[FailureWatcher]) -> None:
    publish(store, "failed/0", "rank 1 failed")
    assert [watcher.poll_failure(0.0) for watcher in watchers] == ["rank 1 failed", None]
    with pytest.raises(ArithmeticError), watchers[1].report_failures("train_step"):
        raise ArithmeticError("no loss today")
    assert store.get("failed/1") == b"rank 0 failed during train_step: ArithmeticError: no loss today"
    assert store.get("failed/0") == b"rank 1 failed"


def test_a_process_that_ended_with_an_exception_ends_all_models(
    store: dist.TCPStore, watchers: list[FailureWatcher]
) -> None:
    publish(store, UNCAUGHT, "rank 1 ended with ArithmeticError")
    assert [watcher.poll_failure(0.0) for watcher in watchers] == ["rank 1 ended with ArithmeticError"] * 2


def test_a_lost_connection_is_made_again(store: dist.TCPStore) -> None:
    before = connections(store)
    watcher = FailureWatcher(store, "failed/0", "rank 0", lambda: False)
    try:
        for _ in range(2):
            for fd in connections(store) - before:
                with socket.socket(fileno=os.dup(fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
            assert watcher.poll_failure(0.0) is None
        publish(store, "failed/0", "rank 1 failed")
        assert watcher.poll_failure(0.0) == "rank 1 failed"
    finally:
        watcher.close()


def test_a_store_that_has_ended_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.launch.failure_watch.CONNECT_SECONDS", 0.1)
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", served.port, is_master=False)
    watcher = FailureWatcher(client, "failed/0", "rank 0", lambda: False)
    del served
    try:
        assert watcher.poll_failure(0.0) == GONE
    finally:
        watcher.close()

"""Ranks in threads report to rank 0 and hear its answer, or the error of whichever rank fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from autopar import InfeasibleError, TraceError, UsageError, WorkerError
from autopar.errors import AutoparError, MissingAttributeError
from autopar.runtime.launch import failure_watch, start_exchange
from autopar.runtime.launch.environment import Launched
from autopar.runtime.launch.failure_watch import GONE, UNCAUGHT
from autopar.runtime.launch.start_exchange import Message, StartExchange

Act = Callable[[StartExchange], Any]


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def exchanges(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> list[StartExchange]:
    """One call of three ranks."""
    monkeypatch.setattr(start_exchange, "launcher_store", lambda launch: dist.PrefixStore("attempt", store))
    monkeypatch.setattr(start_exchange, "publish_uncaught", lambda store, rank: None)
    ranks = [StartExchange(Launched(rank, 3, rank, 3)) for rank in range(3)]
    for rank in ranks:
        rank.start = 0  # as in processes of their own
    return ranks


def results(exchanges: list[StartExchange], act: Act) -> list[Any]:
    """What a function returns or raises on each rank, in threads."""

    def run(exchange: StartExchange) -> Any:
        try:
            return act(exchange)
        except Exception as error:
            return error

    with ThreadPoolExecutor() as threads:
        return list(threads.map(run, exchanges))


def texts(errors: list[Any]) -> list[tuple[type, str]]:
    return [(type(error), str(error)) for error in errors]


def test_rank_0_answers_all_reports(exchanges: list[StartExchange]) -> None:
    def act(exchange: StartExchange) -> list[str]:
        def join(reports: list[str]) -> str:
            assert exchange.rank == 0
            return " ".join(reports)

        with exchange.shared_errors():
            report = f"of {exchange.rank}"
        answers = [exchange.decide(report, join), exchange.decide(f"{report} again", join)]
        exchange.confirm()
        return answers

    assert results(exchanges, act) == [["of 0 of 1 of 2", "of 0 again of 1 again of 2 again"]] * 3


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (InfeasibleError("nothing fits"), InfeasibleError("nothing fits")),
        (MissingAttributeError("no such"), MissingAttributeError("no such")),
        (type("OfAPlugin", (TraceError,), {})("loops"), TraceError("loops")),
        (KeyError("x"), WorkerError("Rank 0 failed before training: KeyError: 'x'")),
    ],
)
@pytest.mark.parametrize("where", ["decision", "before"])
def test_an_error_of_rank_0_is_raised_on_all(
    exchanges: list[StartExchange], error: Exception, elsewhere: AutoparError, where: str
) -> None:
    def fail(reports: list[str]) -> str:
        raise error

    def act(exchange: StartExchange) -> str:
        with exchange.shared_errors():
            if where == "before" and exchange.rank == 0:
                raise error
        return exchange.decide("", fail)

    raised = results(exchanges, act)
    assert raised[0] is error
    assert texts(raised[1:]) == texts([elsewhere] * 2)


def test_an_error_of_another_rank_is_raised_on_all(exchanges: list[StartExchange]) -> None:
    def act(exchange: StartExchange) -> str:
        with exchange.shared_errors():
            if exchange.rank == 1:
                raise TraceError("loops")
        return exchange.decide("", lambda reports: "never")

    elsewhere = (TraceError, "Rank 1: loops")
    assert texts(results(exchanges, act)) == [elsewhere, (TraceError, "loops"), elsewhere]


def test_an_error_after_the_answer_is_raised_on_all(exchanges: list[StartExchange]) -> None:
    def act(exchange: StartExchange) -> None:
        exchange.decide("", lambda reports: "plan")
        with exchange.shared_errors():
            if exchange.rank == 2:
                raise ArithmeticError("no program")
        exchange.confirm()

    elsewhere = (WorkerError, "Rank 2 failed before training: ArithmeticError: no program")
    assert texts(results(exchanges, act)) == [elsewhere, elsewhere, (ArithmeticError, "no program")]


def test_a_process_that_has_ended_is_not_waited_for(
    exchanges: list[StartExchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_exchange, "PATIENT_SECONDS", 0.1)
    cause = "rank 2 ended with ValueError: no data"
    exchanges[0].ask(lambda store: store.set(UNCAUGHT, cause))
    raised = results(exchanges[:2], lambda exchange: exchange.decide("", lambda reports: "never"))
    assert texts(raised) == [(WorkerError, f"The ranks cannot start: {cause}")] * 2


def test_the_error_of_a_process_that_has_ended_comes_first(
    exchanges: list[StartExchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has raised and ended while rank 2 still traces."""
    monkeypatch.setattr(start_exchange, "PATIENT_SECONDS", 0.1)
    with pytest.raises(UsageError), exchanges[1].shared_errors():
        raise UsageError("no such model")
    exchanges[1].ask(lambda store: store.set(UNCAUGHT, "rank 1 ended with UsageError"))
    with pytest.raises(UsageError, match=r"^Rank 1: no such model$"):
        exchanges[0].decide("", lambda reports: "never")
    with pytest.raises(UsageError, match=r"^Rank 1: no such model$"):
        exchanges[2].decide("", lambda reports: "never")


def test_a_rank_without_rank_0s_answer_names_the_process_that_has_ended(
    exchanges: list[StartExchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_exchange, "GRACE_SECONDS", 0.1)
    exchanges[1].ask(lambda store: store.set(UNCAUGHT, "rank 0 ended with KeyboardInterrupt"))
    with pytest.raises(WorkerError, match=r"^Rank 2 cannot start: rank 0 ended with KeyboardInterrupt$"):
        exchanges[2].decide("", lambda reports: "never")


def test_silent_ranks_are_named(exchanges: list[StartExchange], monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("REPORT_SECONDS", "LEAVE_SECONDS", "ANSWER_SECONDS"):
        monkeypatch.setattr(start_exchange, limit, 0.2)
    with pytest.raises(WorkerError, match=r"^Rank 1 cannot start: rank 0 did not answer within 0 s\. Pass plan="):
        exchanges[1].decide("", lambda reports: "never")
    with pytest.raises(WorkerError, match=r"^The ranks cannot start: rank 2 did not answer within 0 s\."):
        exchanges[0].decide("", lambda reports: "never")


def test_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", served.port, is_master=False)
    monkeypatch.setattr(start_exchange, "launcher_store", lambda launch: client)
    monkeypatch.setattr(start_exchange, "publish_uncaught", lambda store, rank: None)
    monkeypatch.setattr(failure_watch, "CONNECT_SECONDS", 0.2)
    exchange = StartExchange(Launched(1, 2, 1, 2))
    del served
    with pytest.raises(WorkerError, match=f"^Rank 1 cannot start: {re.escape(GONE)}"):
        exchange.decide("", lambda reports: "never")
    with pytest.raises(TraceError, match="loops"), exchange.shared_errors():  # its own error, all the same
        raise TraceError("loops")


def test_a_message_is_its_text_or_its_error() -> None:
    assert Message("plan").checked() == "plan"
    with pytest.raises(InfeasibleError, match=r"^Rank 3: too large$"):
        Message.of(InfeasibleError("too large"), 3).checked()

"""Names of hosts: no resolver keeps a caller longer than its deadline, and none brings a wrong address."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from simm.errors import DeadlineError, TransportError
from simm.host.threads import lives
from simm.net import addresses
from simm.net.channel import Channel
from tests.support.client_values import forked
from tests.support.interrupts import everywhere
from tests.support.waiting import WAIT_S, wait_until

FOUR, SIX = socket.AF_INET, socket.AF_INET6


class Resolver:
    """Answers for ``names`` while it is told to, and counts the questions."""

    def __init__(self) -> None:
        self.names: dict[str, list[tuple[Any, str]]] = {"host": [(SIX, "::1"), (FOUR, "127.0.0.1")]}
        self.answers = threading.Event()
        self.answers.set()
        self.questions = 0

    def __call__(self, host: str, port: None, *, type: int) -> list[Any]:
        self.questions += 1
        assert self.answers.wait(WAIT_S)
        if host not in self.names:
            raise socket.gaierror(-2, "Name or service not known")
        return [(family, type, 6, "", (address, 0)) for family, address in self.names[host]]


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    monkeypatch.setattr(addresses, "_names", {})
    yield made
    made.answers.set()
    wait_until(lambda: not any(each.name == "simm-resolver" for each in threading.enumerate()), "all have ended")


def test_numbers_ask_nobody(resolver: Resolver) -> None:
    assert addresses.resolve("10.0.0.5", 0.0) == (FOUR, "10.0.0.5")
    assert addresses.resolve("fe80::1%lo", 0.0) == (SIX, "fe80::1%lo")
    assert not resolver.questions


def test_ipv4_comes_first_and_is_remembered(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [addresses.resolve("host", WAIT_S) for _ in range(3)] == [(FOUR, "127.0.0.1")] * 3
    assert resolver.questions == 1
    monkeypatch.setattr(addresses, "KNOWN_S", 0.0)
    resolver.names["host"] = [(SIX, "::2")]
    assert addresses.resolve("host", WAIT_S) == (SIX, "::2") and resolver.questions == 2


def test_a_resolver_that_hangs_costs_a_deadline_and_one_thread(resolver: Resolver) -> None:
    resolver.answers.clear()
    for _ in range(3):
        with pytest.raises(DeadlineError, match="resolver has not answered"):
            addresses.resolve("host", 0.02)
    assert resolver.questions == 1
    resolver.answers.set()
    assert addresses.resolve("host", WAIT_S) == (FOUR, "127.0.0.1")


def test_while_it_hangs_the_last_address_is_good(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses.resolve("host", WAIT_S) == (FOUR, "127.0.0.1")
    monkeypatch.setattr(addresses, "KNOWN_S", 0.0)
    resolver.answers.clear()
    assert addresses.resolve("host", 3600.0) == (FOUR, "127.0.0.1"), "without its whole deadline"
    resolver.answers.set()
    wait_until(lambda: addresses._names["host"].asked is None, "the question has ended")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        assert addresses.resolve("host", WAIT_S) == (FOUR, "127.0.0.1"), "no thread can be started"
    del resolver.names["host"]
    wait_until(lambda: addresses._names["host"].asked is None, "the question has ended")
    assert addresses.resolve("host", WAIT_S) == (FOUR, "127.0.0.1"), "an error is no other address"


def test_issue_a_question_whose_thread_dies_at_once_is_asked_again(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each later call for that host waited its whole deadline, until the process ended."""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "run", lambda _: None)
        with pytest.raises(DeadlineError):
            addresses.resolve("host", 0.0)
        question = addresses._names["host"].asked
        assert question is not None
        wait_until(lambda: not lives(question.thread), "its thread is dead")
    assert addresses.resolve("host", WAIT_S) == (FOUR, "127.0.0.1")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("started", [False, True], ids=["before the thread runs", "while it runs"])
def test_a_question_that_was_interrupted_is_asked_again(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException], started: bool
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if started:
            start(thread)
        raise interrupt

    resolver.answers.clear()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(interrupt):
            addresses.resolve("host", WAIT_S)
    assert addresses._names["host"].asked is None
    with pytest.raises(DeadlineError):
        addresses.resolve("host", 0.0)
    wait_until(lambda: resolver.questions == 1 + started, "it is asked again")
    resolver.answers.set()
    assert addresses.resolve("host", WAIT_S) == (FOUR, "127.0.0.1")


def test_a_resolver_that_fails_in_any_way_is_asked_again(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **_named: object) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", failing)
        with pytest.raises(TransportError, match="MemoryError"):
            addresses.resolve("host", WAIT_S)
    assert addresses.resolve("host", WAIT_S) == (FOUR, "127.0.0.1")


def test_names_that_are_none(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportError, match="Name or service not known"):
        addresses.resolve("elsewhere", WAIT_S)
    monkeypatch.undo()
    for name in ("\u00e4..b", "a\0b", "x" * 300):
        with pytest.raises(TransportError, match="there is no address for"):
            addresses.resolve(name, WAIT_S)


def test_all_who_wait_get_the_one_answer(resolver: Resolver) -> None:
    resolver.answers.clear()
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(addresses.resolve("host", WAIT_S))) for _ in range(8)]
    for each in threads:
        each.start()
    resolver.answers.set()
    for each in threads:
        each.join()
    assert found == [(FOUR, "127.0.0.1")] * 8 and resolver.questions == 1


def test_a_forked_child_asks_for_itself(resolver: Resolver) -> None:
    """The thread that asks is not in it, nor whoever holds the lock."""
    resolver.answers.clear()
    with pytest.raises(DeadlineError):
        addresses.resolve("host", 0.02)

    def in_child() -> bool:
        resolver.answers = threading.Event()
        resolver.answers.set()
        return addresses.resolve("host", WAIT_S) == (FOUR, "127.0.0.1")

    with addresses._lock:
        assert forked(in_child) == 0


@pytest.mark.parametrize("answers", [True, False], ids=["in time", "never"])
def test_a_channel_to_a_name(resolver: Resolver, answers: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if answers:
            Channel.tcp("host", port, WAIT_S).close()
            return
        resolver.answers.clear()
        with pytest.raises(DeadlineError):
            Channel.tcp("host", port, 0.05)


def test_issue_an_interrupted_wait_holds_up_nobody_else(resolver: Resolver) -> None:
    """It left a lock taken, for which the thread that had asked waited, and with it all others who did."""

    def begin() -> None:
        resolver.answers.clear()
        with pytest.raises(DeadlineError):
            addresses.resolve("host", 0.0)

    def wait() -> None:
        with contextlib.suppress(DeadlineError):
            addresses.resolve("host", 0.001)

    def check() -> None:
        resolver.answers.set()
        wait_until(lambda: not any(each.name == "simm-resolver" for each in threading.enumerate()), "it has ended")
        addresses._names.clear()
        begin()

    begin()
    assert everywhere(wait, check, ("simm.net.addresses", "simm.host.threads", "threading")) > 5

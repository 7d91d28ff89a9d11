"""A put by TCP that meets a stream without room sends the value again, for a while."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.constants import SHARD_COUNT
from simm.errors import TransportError
from simm.ipc.grant_pool import RoomWait
from simm.ipc.steps import Steps, finish
from simm.sdk import writes
from simm.sdk.batch import PutBatch
from simm.sdk.writes import Puts
from simm.wire.messages import Status

OK, FULL, REFUSED, UNKNOWN = Status.OK, Status.NO_SPACE, Status.WRONG_OWNER, Status.UNAVAILABLE


class Clock:
    """Time that goes on while somebody sleeps, and a little with each look."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Tcp:
    """A path whose stores have these statuses, one list after another; the last for ever. An empty one: it breaks."""

    def __init__(self, *answers: list[int], takes_s: float = 0.0) -> None:
        self.deadline_s = 60.0
        self.takes_s = takes_s
        self.no_wait_until = 0.0
        self.sent: list[list[bytes]] = []
        self._answers: Iterator[list[int]] = itertools.chain(answers, itertools.repeat(answers[-1]))

    def store(self, entries: list[Any], until: float) -> Steps[list[int]]:
        yield from ()
        assert not until or until > writes.time.monotonic()  # the test's clock
        writes.time.sleep(self.takes_s)
        self.sent.append([digest for digest, _, _, _ in entries])
        answer = next(self._answers)
        if not answer:
            raise TransportError("the connection broke")
        return answer


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """``put(tcp, [digests])``: the statuses of one put of a value for each of the digests."""
    clock = Clock()
    monkeypatch.setattr(writes, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    options = SimpleNamespace(checksum=False, deadline_s=60.0)

    def call_tcp(_target: Any, _tcp: Any, call: Steps[list[int]]) -> Steps[list[int]]:
        try:
            return (yield from call)
        except TransportError:
            return []

    routes = SimpleNamespace(call_tcp=call_tcp)
    puts = Puts(routes, None, None, options, {})  # type: ignore[arg-type]

    def run(tcp: Any, digests: list[bytes], room: RoomWait | None = None) -> list[int]:
        sources = [memoryview(b"value")] * len(digests)
        batch = PutBatch(digests, sources, [Status.UNAVAILABLE] * len(digests), room or RoomWait(30.0))
        target: Any = SimpleNamespace(bulk=True)
        finish(puts._put_tcp(target, tcp, list(range(len(digests))), batch, sources, 0.0))
        return batch.statuses

    return run


def test_what_had_no_room_is_sent_again(put: Callable[..., list[int]]) -> None:
    tcp = Tcp([OK, FULL, REFUSED, FULL], [FULL, OK], [OK])
    assert put(tcp, [b"a", b"b", b"c", b"d"]) == [OK, OK, REFUSED, OK]
    assert tcp.sent == [[b"a", b"b", b"c", b"d"], [b"b", b"d"], [b"b"]]


def test_it_ends_and_the_next_one_does_not_wait(put: Callable[..., list[int]]) -> None:
    tcp = Tcp([FULL])
    assert put(tcp, [b"a"]) == [FULL]
    often = len(tcp.sent)
    assert often > 2
    assert put(tcp, [b"a"]) == [FULL] and len(tcp.sent) == often + 1


def test_a_worker_that_makes_room_bit_by_bit_is_sent_the_value_again(put: Callable[..., list[int]]) -> None:
    """Each attempt has it evict for a quarter of a second; the second one was the last."""
    tcp = Tcp(*[[FULL]] * 9, [OK], takes_s=0.3)
    assert put(tcp, [b"a"]) == [OK] and tcp.no_wait_until == 0.0
    tcp = Tcp(*[[FULL]] * 9, [OK], takes_s=0.3)
    assert put(tcp, [b"a"], RoomWait(1.0)) == [FULL] and tcp.no_wait_until == 0.0, "it has no more time"


def test_issue_what_was_sent_again_as_the_connection_broke_may_be_stored(put: Callable[..., list[int]]) -> None:
    """It was called NO_SPACE, as it had been at first: that it is not stored."""
    tcp = Tcp([FULL, OK, FULL, REFUSED], [])
    assert put(tcp, [b"a", b"b", b"c", b"d"]) == [UNKNOWN, OK, UNKNOWN, REFUSED]
    assert tcp.sent == [[b"a", b"b", b"c", b"d"], [b"a", b"c"]], "it is not sent by a path that is closed"
    assert tcp.no_wait_until == 0.0


@pytest.mark.parametrize(("takes_s", "most"), [(0.3, 11), (0.1, 5)])
def test_a_slow_server_without_room_is_not_sent_a_value_for_ever(
    put: Callable[..., list[int]], takes_s: float, most: int
) -> None:
    tcp = Tcp([FULL], takes_s=takes_s)
    assert put(tcp, [b"a"]) == [FULL] and len(tcp.sent) <= most
    often = len(tcp.sent)
    assert put(tcp, [b"a"]) == [FULL] and len(tcp.sent) == often + 1


def test_all_waits_of_a_call_share_its_patience(put: Callable[..., list[int]]) -> None:
    tcp = Tcp([FULL])
    room = RoomWait(0.0)
    assert put(tcp, [b"a"], room) == [FULL] and len(tcp.sent) == 1


@pytest.mark.parametrize("left_s", [0.0, 0.1])
def test_a_call_that_may_not_wait_as_long_as_it_takes_forbids_no_other_to(
    put: Callable[..., list[int]], left_s: float
) -> None:
    tcp = Tcp([FULL])
    assert put(tcp, [b"a"], RoomWait(left_s)) == [FULL]
    assert tcp.no_wait_until == 0.0
    tcp = Tcp([FULL], [FULL], [OK])
    assert put(tcp, [b"a"], RoomWait(0.0)) == [FULL]
    assert put(tcp, [b"b"]) == [OK]


def test_a_wait_after_which_all_is_stored_was_not_in_vain(put: Callable[..., list[int]]) -> None:
    room = RoomWait(30.0)
    assert put(Tcp([FULL], [OK]), [b"a"], room) == [OK]
    assert room.vain_s == 0.0 and room.left_s < 30.0
    assert put(Tcp([FULL, OK]), [b"a", b"b"], room) == [FULL, OK]
    assert room.vain_s > 0.0


def test_of_a_duplicate_key_the_last_value_alone_is_sent_again(put: Callable[..., list[int]]) -> None:
    """The earlier one would replace it."""
    tcp = Tcp([FULL, OK], [OK])
    assert put(tcp, [b"a", b"a"]) == [FULL, OK]
    assert len(tcp.sent) == 1


@pytest.mark.parametrize("status", [Status.NO_SPACE, Status.OVER_QUOTA])
def test_issue_a_namespace_without_a_place_is_among_the_reasons(status: Status) -> None:
    """Its quota was said to be used up, of which it used nothing, or all memory to be in use."""
    target = SimpleNamespace(info=SimpleNamespace(node="host", worker=0))
    routes: Any = SimpleNamespace(router=SimpleNamespace(route=[target] * SHARD_COUNT))
    options: Any = SimpleNamespace(checksum=False, deadline_s=60.0)
    puts = Puts(routes, None, None, options, {"puts": 0, "put_failures": 0})  # type: ignore[arg-type]
    puts.count([bytes(16)], [status])
    assert "host/0" in puts.last_failure and "has no place" in puts.last_failure

"""Check the rules of ``cluster/lookup.py`` by one table of cases, run by each of its drivers.

A case is one read of one key: what the owner's shard word says, what the owner answers, what the map says by then.
The client, the simulated client and the bare rules must take the same steps. The stream runs a table of its own.
Then each rule is broken in turn: every driver must fail a case.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import pytest

from simm.arena.reader import Unsettled
from simm.cluster import lookup
from simm.cluster.lookup import ASK_OWNER, HOPS, Unresolved
from simm.errors import TransportError
from simm.host.count_log import CallLogs
from simm.ipc.counts import new_words
from simm.ipc.patience import Patience
from simm.sdk.batch import MISS
from simm.sdk.reads import Gets
from simm.server import worker_session
from simm.server.stream_get import look_up
from simm.sim.client import Ask, Found
from simm.sim.client import Client as SimulatedClient
from simm.wire import messages as M
from simm.wire.messages import Status
from simm.wire.shard_set import FROZEN, MOVING

DIGEST: Final = bytes(range(16))
#: The epoch in which the owner N got the shard from P.
SINCE: Final = 7


class Case(NamedTuple):
    """``word``: of the shard at N. ``answer``: N's to a question; None if it does not answer.

    ``owner``, ``previous``, ``since``: the map after the question. ``there``: workers that have the value from then on.
    """

    word: int
    answer: tuple[int, int] | None = None
    owner: str = "N"
    previous: str | None = "P"
    since: int = SINCE
    connected: bool = True
    there: tuple[str, ...] = ("P", "M")


class Outcome(NamedTuple):
    """Where the value was found, or empty; whether N was asked, how often; whether the map was."""

    found: str
    asked: int = 0
    refreshed: bool = False


PREVIOUS: Final = (Status.PREVIOUS, SINCE)
NOT_ADOPTED: Final = 0
MOVING_IN: Final = MOVING | SINCE
FROZEN_AT_N: Final = FROZEN | 9

CASES: Final[dict[str, tuple[Case, Outcome]]] = {
    "a plain word": (Case(SINCE), Outcome("")),
    "the owner has it by now": (Case(MOVING_IN, (Status.OK, 0), there=("N",)), Outcome("N", 1)),
    "it came and went, again and again": (Case(MOVING_IN, (Status.OK, 0), there=()), Outcome("", HOPS + 1)),
    "no worker has it": (Case(MOVING_IN, (Status.NOT_FOUND, 0)), Outcome("", 1)),
    "the owner does not answer": (Case(MOVING_IN, None), Outcome("", 1)),
    "adopted, at the previous owner": (Case(MOVING_IN, PREVIOUS), Outcome("P", 1)),
    "adopted, without a manager": (Case(MOVING_IN, PREVIOUS, connected=False), Outcome("P", 1)),
    "not adopted": (Case(NOT_ADOPTED, PREVIOUS), Outcome("P", 1)),
    "not adopted, without a manager": (Case(NOT_ADOPTED, PREVIOUS, connected=False), Outcome("", 1, True)),
    "another move than the map's": (Case(MOVING_IN, (Status.PREVIOUS, SINCE + 2)), Outcome("", 1, True)),
    "the map's move is later": (Case(MOVING_IN, PREVIOUS, since=SINCE + 2), Outcome("", 1, True)),
    "the move is over in the map": (Case(MOVING_IN, PREVIOUS, previous=None), Outcome("", 1, True)),
    "the map has changed since": (Case(MOVING_IN, PREVIOUS, owner="M", since=9), Outcome("M", 1)),
    "the map has no owner any more": (Case(MOVING_IN, PREVIOUS, owner="", previous=None), Outcome("", 1)),
    "not the owner": (Case(NOT_ADOPTED, (Status.WRONG_OWNER, 0)), Outcome("", 1, True)),
    "not the owner, a newer map is here": (
        Case(NOT_ADOPTED, (Status.WRONG_OWNER, 0), owner="M", since=9), Outcome("M", 1, True)
    ),
    "frozen": (Case(FROZEN_AT_N), Outcome("", 0, True)),
    "frozen, a newer map is here": (Case(FROZEN_AT_N, owner="M", since=9), Outcome("M", 0, True)),
}  # fmt: skip


class Table:
    """The map of a case: before the question N owns the shard, having got it from P."""

    def __init__(self, case: Case, workers: dict[str, Any]) -> None:
        self.case = case
        self.workers = workers

    def owner(self, _shard: int) -> Any:
        return self.workers.get(self.case.owner)

    def previous(self, _shard: int) -> Any:
        return self.workers.get(self.case.previous or "")

    def since(self, _shard: int) -> int:
        return self.case.since


def by_the_rules(case: Case) -> Outcome:
    """The bare state machine."""
    asked, refreshed, hops, owner = 0, False, HOPS, "N"
    while True:
        unresolved = Unresolved()
        unresolved.by_word(0, case.word)
        for each in unresolved.ask_owner:
            asked += 1
            if case.answer is not None:
                unresolved.answered(each, *case.answer)
        found = unresolved.next_reads(
            owner, Table(case, {name: name for name in "NPM"}), lambda _: 0, hops=hops, connected=case.connected
        )
        refreshed |= found.refresh
        for name in (*found.at_previous, *found.start_over):
            if name in case.there:
                return Outcome(name, asked, refreshed)
        if not found.start_over:
            return Outcome("", asked, refreshed)
        hops -= 1


def by_the_client(case: Case) -> Outcome:
    """``Gets`` with readers that find a value once the owner was asked, or in another arena than N's."""
    did = SimpleNamespace(asked=0, refreshed=False, at="")

    class Reader(CallLogs):
        def __init__(self, name: str) -> None:
            self.name = name
            self.data_offset = 0
            self.count_in(new_words())

        def locate(self, _digest: bytes) -> Any:
            there = self.name in case.there and (self.name != "N" or did.asked)
            return SimpleNamespace(slot=0, seq=0, flags=0, length=1) if there else None

        def shard_word(self, _digest: bytes) -> int:
            return case.word

        def value(self, _found: Any) -> bytes:
            did.at = self.name
            return b"v"

        def confirm(self, _digest: bytes, _slot: int, _seq: int) -> bool:
            return True

        confirm_previous = confirm

    class Session:
        broken = "it does not answer"

        def exchange(self, msg: M.Locate) -> M.Located:
            did.asked += 1
            if case.answer is None:
                raise TransportError("no answer")
            return M.Located([(case.answer[0], 0, 0, 0, case.answer[1], 0)] * len(msg.digests))

    class Worker:
        session, rdma, tcp, path, fresh = Session(), None, None, "shm", False

        def __init__(self, name: str) -> None:
            self.reader = Reader(name)

        def arena(self) -> Reader:
            return self.reader

    targets = {name: Worker(name) for name in "NPM"}

    def refresh() -> None:
        did.refreshed = True

    routes: Any = SimpleNamespace(
        table=lambda: Table(case, targets), manager_connected=lambda: case.connected, refresh=refresh,
        session_failed=lambda *_: None, patience=lambda began=None: Patience(1.0, began),
    )  # fmt: skip
    copier: Any = None
    gets = Gets(routes, copier, False, dict.fromkeys(("hits", "misses", "moved", "outages", "retries", "fallbacks"), 0))
    target: Any = targets["N"]
    got = gets.read(target, DIGEST, None)
    assert got in (MISS, b"v")
    return Outcome(did.at if got else "", did.asked, did.refreshed)


def by_the_simulator(case: Case) -> Outcome:
    """The simulated client's generator, answered by hand."""
    did = SimpleNamespace(asked=0, refreshed=False)
    infos = {name: M.WorkerInfo(0, 0, 1, 1, 0, name, "", "h", 1) for name in "NPM"}

    def shard_map(owner: str, previous: str | None, since: int) -> Any:
        at = list(infos)
        nobody = 0xFFFF
        return SimpleNamespace(
            workers=list(infos.values()), owners=_Everywhere(at.index(owner) if owner else nobody),
            previous=_Everywhere(at.index(previous) if previous else None), since=_Everywhere(since),
        )  # fmt: skip

    def refresh() -> None:
        did.refreshed = True

    client: Any = SimulatedClient.__new__(SimulatedClient)
    client.world = SimpleNamespace(plants=frozenset())
    client.down = {}
    client.linked = int(case.connected)
    client.refresh = refresh
    client._failed = lambda _info: None
    client.map = shard_map("N", "P", SINCE)
    steps = client.get(DIGEST)
    value: Any = None
    try:
        while True:
            ask = steps.send(value)
            assert isinstance(ask, Ask)
            name = ask.info.node
            if ask.kind == "resolve":
                did.asked += 1
                value = case.answer
                client.map = shard_map(case.owner, case.previous, case.since)
            else:
                value = Found(int(name in case.there and (name != "N" or did.asked > 0)), case.word)
                if case.word >= FROZEN:
                    client.map = shard_map(case.owner, case.previous, case.since)
    except StopIteration as stop:
        return Outcome(stop.value[1], did.asked, did.refreshed)


class _Everywhere:
    """A table with one entry for all shards."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, _shard: int) -> Any:
        return self.value

    def get(self, _shard: int) -> Any:
        return self.value


DRIVERS: Final[dict[str, Callable[[Case], Outcome]]] = {
    "rules": by_the_rules, "client": by_the_client, "simulator": by_the_simulator,
}  # fmt: skip


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", CASES)
def test_each_driver_takes_the_same_steps(driver: str, name: str) -> None:
    case, outcome = CASES[name]
    assert DRIVERS[driver](case) == outcome


# -- the stream ---------------------------------------------------------------------------------------

#: (found at first, word, asked as a previous owner, the worker's answer, found then) -> (status, epoch, was it found?)
STREAM_CASES: Final = {
    "a hit": ((True, SINCE, False, None, False), (Status.OK, 0, True)),
    "a hit while moving in": ((True, MOVING_IN, False, None, False), (Status.OK, 0, True)),
    "a plain miss": ((False, SINCE, False, None, False), (Status.NOT_FOUND, 0, False)),
    "frozen": ((True, FROZEN_AT_N, False, None, False), (Status.WRONG_OWNER, 0, False)),
    "at the previous owner": ((False, NOT_ADOPTED, False, PREVIOUS, False), (Status.PREVIOUS, SINCE, False)),
    "copied in meanwhile": ((False, MOVING_IN, False, (Status.OK, 0), True), (Status.OK, 0, True)),
    "came and went": ((False, MOVING_IN, False, (Status.OK, 0), False), (Status.NOT_FOUND, 0, False)),
    "frozen, for a new owner": ((True, FROZEN_AT_N, True, None, False), (Status.OK, 0, True)),
    "absent, for a new owner": ((False, FROZEN_AT_N, True, None, False), (Status.NOT_FOUND, 0, False)),
    "released, for a new owner": ((True, 0, True, None, False), (Status.WRONG_OWNER, 0, False)),
}


def by_the_stream(case: tuple[Any, ...]) -> tuple[int, int, bool]:
    at_first, word, previous, answer, then = case
    asked = []

    def resolve_misses(digests: list[bytes]) -> list[tuple[int, int]]:
        asked.extend(digests)
        return [(answer[0], answer[1])] if answer else [(Status.UNAVAILABLE, 0)]

    reader: Any = SimpleNamespace(
        locate=lambda _digest: SimpleNamespace(slot=0, length=1) if (then if asked else at_first) else None,
        shard_word=lambda _digest: word, touch=lambda _slot: None, visited=bytearray(1),
    )  # fmt: skip
    keeper: Any = SimpleNamespace(resolve_misses=resolve_misses)
    status, epoch, found = look_up(keeper, reader, [DIGEST], previous, touch=True)[0]
    return status, epoch, found is not None


@pytest.mark.parametrize("name", STREAM_CASES)
def test_the_stream_answers_by_the_same_rules(name: str) -> None:
    case, outcome = STREAM_CASES[name]
    assert by_the_stream(case) == outcome


@pytest.mark.parametrize(("answer", "status"), [(Status.OK, Status.OK), (Status.NOT_FOUND, Status.NOT_FOUND)])
def test_the_stream_asks_a_worker_that_was_interrupted_in_a_slot(
    answer: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers when it goes on. On a busy machine that is milliseconds later, and the key was a miss."""
    asked: list[bytes] = []

    def find(_digest: bytes) -> Any:
        if not asked:
            raise Unsettled
        return SimpleNamespace(slot=0, length=1)

    def resolve_misses(digests: list[bytes]) -> list[tuple[int, int]]:
        asked.extend(digests)
        return [(answer, 0)] * len(digests)

    monkeypatch.setattr(worker_session.time, "sleep", lambda _s: None)
    reader: Any = SimpleNamespace(
        locate=find, shard_word=lambda _digest: SINCE, touch=lambda _slot: None, visited=bytearray(1)
    )
    keeper: Any = SimpleNamespace(resolve_misses=resolve_misses)
    ((found, _, location),) = look_up(keeper, reader, [DIGEST], False, touch=True)
    assert (found, asked) == (status, [DIGEST]) and (location is not None) == (status == Status.OK)


# -- positive control: break each rule, and every driver that runs it fails ----------------------------------


def previous_without_a_word(self: Any, position: int, status: int, epoch: int, *, adopted: bool = False) -> bool:
    """An injected bug: a reader that is told WRONG_OWNER goes to the previous owner that its map names."""
    if status in (Status.PREVIOUS, Status.WRONG_OWNER):
        self.at_previous_owner.append((position, epoch or SINCE, True))
        return True
    return False


def never_over(next_reads: Any) -> Any:
    def broken(self: Any, *arguments: Any, **more: Any) -> Any:
        return next_reads(self, *arguments, **{**more, "hops": 0})

    return broken


BROKEN: Final[dict[str, tuple[Any, str, Any]]] = {
    "moving in is a plain miss": (lookup, "miss_status", lambda word, **_: 1 if 0 < word < FROZEN else ASK_OWNER),
    "the frozen ask the owner": (lookup, "miss_status", lambda word, **_: 1 if 0 < word < MOVING else ASK_OWNER),
    "any move will do": (lookup, "is_same_move", lambda *_, adopted, connected: adopted or connected),
    "cut off, it goes on": (lookup, "is_same_move", lambda epoch, since, **_: epoch == since),
    "by the map to the previous owner": (Unresolved, "by_status", previous_without_a_word),
    "it never starts over": (Unresolved, "next_reads", never_over(Unresolved.next_reads)),
}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_fails_every_driver(driver: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[name])
    failed = [name for name, (case, outcome) in CASES.items() if DRIVERS[driver](case) != outcome]
    assert failed
    print(failed)


@pytest.mark.parametrize(("name", "value"), [("PLAIN_BELOW", FROZEN), ("FROZEN", 1 << 64), ("PLAIN_BELOW", 0)])
def test_a_broken_rule_fails_the_stream(name: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, name, value)
    assert [name for name, (case, outcome) in STREAM_CASES.items() if by_the_stream(case) != outcome]

"""FOR_NAMESPACE at a worker: the namespace of each entry is looked at in the turn that carries the request out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from simm.arena.hashing import shard_of
from simm.config.tokens import Token, TokenRole
from simm.constants import OTHERS_NAMESPACE
from simm.errors import PeerError
from simm.ipc.session import WorkerSession
from simm.net.channel import Channel, greet
from simm.rpc import OPCODES
from simm.server import worker_session
from simm.wire import messages as M
from simm.wire.epoch_messages import ForNamespace, for_namespace
from simm.wire.group_messages import Group, joined
from simm.wire.hello import client_hello
from simm.wire.keep_messages import Keep
from simm.wire.messages import NAMESPACE_SHIFT, Role, Service, Status
from simm.wire.shard_set import MOVING
from simm.wire.trace_messages import Traced, traced
from tests.support import raw_stores
from tests.support.waiting import WAIT_S, wait_until
from tests.support.worker_thread import StreamThread, WorkerThread

RED = Token("the-token-of-team-red", TokenRole.CLIENT, "team-red", {"red": None})
#: Of one shard, so that they can be a group. The last one is not stored.
MINE, ALSO, THEIRS, NONE = (raw_stores.digest_of(f"{{x}}{name}") for name in ("mine", "also", "theirs", "none"))
LENGTHS = {MINE: 10, ALSO: 20, THEIRS: 30}
MIXED = [THEIRS, MINE, NONE, ALSO]


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    with WorkerThread() as made:
        yield made


@pytest.fixture
def stream(worker: WorkerThread) -> Iterator[WorkerSession]:
    """A stream's session, after it has stored two values of red's, and one of blue's."""
    with contextlib.closing(WorkerSession(worker.path, "default", WAIT_S, role=Role.STREAM)) as session:
        numbers = {name: session.exchange(M.Namespace(name)).items for name in ("red", "blue")}
        session.ask([(length, 1) for length in LENGTHS.values()])
        entries = []
        for digest, length in LENGTHS.items():
            number = numbers["blue" if digest == THEIRS else "red"]
            grant = session.pool.take(length)
            assert grant is not None
            entries.append((digest, grant[0], length, 0, 0, (number + 1) << NAMESPACE_SHIFT))
        assert session.exchange(M.Commit(entries, [])).statuses == [Status.OK] * len(entries)
        yield session


def ask(session: WorkerSession, request: Any, name: str = "red") -> list[int]:
    statuses: list[int] = session.exchange(for_namespace(name, request)).statuses
    return statuses


def stored(worker: WorkerThread) -> set[bytes]:
    with worker.frozen() as store:
        return {digest for digest in LENGTHS if store.table.lookup(digest) >= 0}


def test_each_item_is_answered_in_its_place(worker: WorkerThread, stream: WorkerSession) -> None:
    half = [Status.NOT_FOUND, Status.OK] * 2
    assert ask(stream, Keep(1, 60, MIXED)) == half
    assert ask(stream, joined([[MINE, THEIRS], [MINE, ALSO], [MINE, NONE], [THEIRS]])) == [
        Status.NOT_FOUND, Status.OK, Status.NOT_FOUND, Status.NOT_FOUND
    ]  # fmt: skip
    with worker.frozen() as store:
        assert (len(store.space.kept), store.groups.count) == (2, 1)
    sized = [(digest, LENGTHS.get(digest, 1) + (digest == ALSO)) for digest in MIXED]
    assert ask(stream, M.DeleteSized(sized)) == [Status.NOT_FOUND, Status.OK, Status.NOT_FOUND, Status.NOT_FOUND]
    assert stored(worker) == {THEIRS}, "the others of its group have left with it"
    assert ask(stream, M.Delete([THEIRS, THEIRS]), "blue") == [Status.OK, Status.NOT_FOUND]


@pytest.mark.parametrize("name", ["green", ""])
def test_a_name_without_a_number_has_no_entry_and_gets_none(
    worker: WorkerThread, stream: WorkerSession, name: str
) -> None:
    assert ask(stream, M.Delete(MIXED), name) == [Status.NOT_FOUND] * 4
    with worker.frozen() as store:
        assert name not in store.ledger.namespaces.names.values()


def test_a_value_of_an_old_epoch_is_deleted_and_not_kept(worker: WorkerThread, stream: WorkerSession) -> None:
    """Of a lease that has ended, it can be read again later: a delete that finds nothing would be undone then."""
    with worker.frozen() as store:
        store.ledger.namespaces.take_epochs({"red": 5})
    assert ask(stream, Keep(1, 60, MIXED)) == [Status.NOT_FOUND] * 4
    assert ask(stream, joined([[MINE, ALSO]])) == [Status.NOT_FOUND]
    assert ask(stream, M.DeleteSized([(MINE, LENGTHS[MINE])])) == ask(stream, M.Delete([ALSO])) == [Status.OK]
    assert stored(worker) == {THEIRS}


def test_what_is_hidden_is_as_what_is_not_here_unless_it_may_have_been_changed(
    worker: WorkerThread, stream: WorkerSession
) -> None:
    with worker.frozen() as store:
        store.shards[shard_of(MINE)] |= MOVING
        store.shard_words.moving += 1

    def hidden(*digests: bytes) -> list[Any]:
        entries: list[Any] = stream.exchange(M.Locate(M.LOCATE_HIDDEN, [*digests])).entries
        return entries

    def put(digest: bytes, name: str) -> None:
        number = stream.exchange(M.Namespace(name)).items
        stream.ask([(8, 1)])
        grant = stream.pool.take(8)
        assert grant is not None
        entry = digest, grant[0], 8, 0, 0, (number + 1) << NAMESPACE_SHIFT
        assert stream.exchange(M.Commit([entry], [])).statuses == [Status.OK]

    first, *others = hidden(MINE, THEIRS, NONE)
    assert first[0] == Status.PREVIOUS and first[4] > 0 and others == [first] * 2
    put(MINE, "red")
    assert hidden(MINE) == [first]
    put(MINE, "blue")
    put(THEIRS, OTHERS_NAMESPACE)
    put(NONE, OTHERS_NAMESPACE)
    assert [status for status, *_ in hidden(MINE, THEIRS, NONE)] == [Status.NOT_FOUND] * 3


def test_a_fenced_worker_refuses_all(worker: WorkerThread, stream: WorkerSession) -> None:
    with worker.frozen() as store:
        store.shard_words.fence()
    for request in (M.Delete(MIXED[:2]), Keep(1, 60, MIXED[:2]), joined([[MINE, THEIRS], [MINE, ALSO]])):
        assert ask(stream, request) == [Status.WRONG_OWNER] * 2
    assert stored(worker) == set(LENGTHS)


def test_a_stream_may_send_them_bare_too(worker: WorkerThread, stream: WorkerSession) -> None:
    """For clients that are bound to nothing."""
    assert stream.exchange(M.Delete(MIXED)).statuses == [Status.OK, Status.OK, Status.NOT_FOUND, Status.OK]
    assert not stored(worker)


NESTED = for_namespace("red", M.Delete([MINE]))
GARBAGE = [
    for_namespace("red", M.Exists([MINE])), for_namespace("red", M.Commit([], [])), for_namespace("red", NESTED),
    for_namespace("red", traced(bytes(16), M.Delete([MINE]))), traced(bytes(16), NESTED),
    ForNamespace("red", 0, b""), ForNamespace("red", 0xFFFF, b"x" * 100), ForNamespace("red", OPCODES[M.Delete], b"x"),
    for_namespace("red", Group([2], [MINE])), for_namespace("red", Group([0, 1], [MINE])),
    Traced(bytes(16), OPCODES[ForNamespace], b"\xff" * 9),
]  # fmt: skip


@pytest.mark.parametrize("msg", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_costs_its_sender_the_session(worker: WorkerThread, stream: WorkerSession, msg: Any) -> None:
    with pytest.raises(PeerError):
        stream.exchange(msg)
    assert stored(worker) == set(LENGTHS)
    with contextlib.closing(worker.session()) as other:
        assert other.exchange(M.Exists([MINE])).statuses == [Status.OK]
    assert worker.loop.handler_errors == 0


MUTATIONS: dict[str, Callable[[list[bytes]], Any]] = {
    "delete": M.Delete, "delete of a size": lambda digests: M.DeleteSized([(each, 5) for each in digests]),
    "keep": partial(Keep, 1, 60), "group": lambda digests: joined([digests]),
}  # fmt: skip


@pytest.mark.parametrize("kind", MUTATIONS)
def test_what_its_client_has_given_up_is_not_carried_out(
    worker: WorkerThread, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", WAIT_S)  # its worker is a thread of this process

    def connected() -> Channel:
        channel = threaded.channel(hello=False)
        greet(channel, Service.STREAM, client_hello(Role.CLIENT, namespace="red"), RED.secret)
        return channel

    with StreamThread(worker.path, tokens=(RED,)) as threaded:
        first, other = connected(), connected()
        assert raw_stores.store(other, {"{x}mine": b"mine's", "{x}also": b"also "}) == [Status.OK] * 2
        session = threaded.stream.keeper.session
        assert session is not None
        sent = session.channel._last_id
        with worker.frozen():
            first.submit(MUTATIONS[kind]([ALSO, MINE]))
            wait_until(lambda: session.channel._last_id > sent, "it has asked the worker")
            first.close()
            wait_until(lambda: session.withdrawals.words[0], "the stream has seen that its client has gone")
        assert other.call(M.Delete([NONE])).statuses == [Status.NOT_FOUND], "by the same session, after it"
        with worker.frozen() as store:
            assert store.exists([ALSO, MINE]) == [Status.OK] * 2
            assert not len(store.space.kept) and not store.groups.used
        other.close()

"""A client that is bound to a namespace reaches no other one's values by TCP, whatever digests it knows or makes up."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from simm.arena.hashing import Hasher, shard_of
from simm.arena.layout import ENTRY_BOUND
from simm.arena.reader import ArenaReader
from simm.arena.store import Store
from simm.config.client_options import ClientOptions
from simm.config.tokens import Token, TokenRole
from simm.errors import TransportError
from simm.ipc.session import WorkerSession
from simm.ipc.steps import finish
from simm.net.channel import Channel, Refused, greet
from simm.sdk.ops.parts import ranges_of
from simm.sdk.path import ClientContext
from simm.sdk.tcp import TcpPath
from simm.server import worker_session
from simm.server.stream import Stream
from simm.server.worker_session import WorkerSessionKeeper
from simm.wire import epoch_messages as E
from simm.wire import messages as M
from simm.wire.hello import client_hello
from simm.wire.keep_messages import Keep
from simm.wire.messages import Status
from simm.wire.shard_set import MOVING
from tests.support.store_world import digest_of
from tests.support.token_servers import ManagerThread
from tests.support.worker_thread import WAIT_S, StreamThread, WorkerThread

FREE = Token("a-token-that-is-not-bound", TokenRole.CLIENT, "free")
TEAMS = {
    name: Token(f"the-token-of-team-{name}", TokenRole.CLIENT, f"team-{name}", {name: None}) for name in ("red", "blue")
}
KIB = 1 << 10

Opener = Callable[..., Any]


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[WorkerThread]:
    with WorkerThread(getattr(request, "param", 16 << 20)) as made:
        yield made


class Finished:
    """A path by TCP whose operations are plain calls."""

    def __init__(self, path: TcpPath) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given, **named: finish(getattr(self._path, name)(*given, **named))


@pytest.fixture
def connect(worker: WorkerThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Connects to the worker's stream: by a token, in a namespace."""
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", WAIT_S)  # its worker is a thread of this process
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(StreamThread(worker.path, tokens=(FREE, *TEAMS.values())))

        def connected(token: Token, namespace: str) -> Finished:
            options = ClientOptions(deadline_s=WAIT_S, token=token.secret, namespace=namespace)
            path = TcpPath(ClientContext(options), *stream.address)
            stack.callback(path.close)
            path.connect()
            return Finished(path)

        yield connected


def put(path: Finished, key: str, value: bytes) -> int:
    (status,) = path.store([(digest_of(key), [memoryview(value)], 0, 0)])
    return status


def get(path: Finished, key: str) -> bytes | int:
    """The value, or the status."""
    memory = bytearray(64)
    ((status, length, _, _),) = path.fetch([(digest_of(key), 64, lambda length: memoryview(memory)[:length])])
    return bytes(memory[:length]) if status == Status.OK else status


def local(worker: WorkerThread, namespace: str) -> WorkerSession:
    return WorkerSession(worker.path, namespace, WAIT_S)


def reads_locally(session: WorkerSession, key: str) -> bool:
    """Whether a client of the host believes what it finds."""
    found = session.reader.locate(digest_of(key))
    return found is not None and session.reader.is_own(found)


def namespace_of(worker: WorkerThread, key: str) -> str:
    with worker.frozen() as store:
        return store.ledger.names[store.table.entry(store.table.lookup(digest_of(key))).namespace]


@pytest.mark.quick
def test_values_are_stored_in_the_namespace_of_their_client(worker: WorkerThread, connect: Opener) -> None:
    red, free, plain = connect(TEAMS["red"], "red"), connect(FREE, "blue"), connect(FREE, "default")
    for path, key, namespace in ((red, "r", "red"), (free, "f", "blue"), (plain, "p", "default")):
        assert put(path, key, b"value") == Status.OK and get(path, key) == b"value"
        assert namespace_of(worker, key) == namespace
        assert path.exists([digest_of(key)]) == [Status.OK]
    with worker.frozen() as store:
        bound = [bool(store.table.entry(store.table.lookup(digest_of(key))).flags & ENTRY_BOUND) for key in "rfp"]
    assert bound == [True, False, False]
    assert red.statuses(M.Delete, [digest_of("r")]) == [Status.OK] and get(red, "r") == Status.NOT_FOUND


@pytest.mark.quick
def test_a_bound_client_reaches_no_value_of_others(connect: Opener) -> None:
    """It knows the digests, by which all messages name a value."""
    red, free, other = connect(TEAMS["red"], "red"), connect(FREE, "blue"), connect(FREE, "default")
    assert put(free, "k", b"blue's") == put(other, "d", b"default's") == Status.OK
    for key, owner, value in (("k", free, b"blue's"), ("d", other, b"default's")):
        digest = digest_of(key)
        assert get(red, key) == Status.NOT_FOUND
        assert red.fetch([(digest, 0, lambda _: memoryview(b""))])[0][0] == Status.NOT_FOUND, "nor its length"
        assert red.fetch([(digest, 64, lambda _: memoryview(bytearray(64)))], previous=True)[0][0] == Status.NOT_FOUND
        for end, previous in ((1, False), (1, True), (64, False)):  # within the value, and beyond it
            wanted = (digest, ranges_of([(0, end, bytearray(end))]))
            assert red.fetch_ranges([wanted], previous=previous)[0][0] == Status.NOT_FOUND
        assert owner.fetch_ranges([(digest, ranges_of([(0, 1, bytearray(1))]))])[0][0] == Status.OK
        assert red.exists([digest, digest_of("none")]) == [Status.NOT_FOUND] * 2
        assert red.statuses(M.Delete, [digest]) == [Status.NOT_FOUND]
        assert red.statuses(M.DeleteSized, [(digest, len(value))]) == [Status.NOT_FOUND]
        assert red.statuses(partial(Keep, 2, 60), [digest]) == [Status.NOT_FOUND]
        assert owner.statuses(partial(Keep, 1, 60), [digest]) == [Status.OK]
        assert put(red, key, b"forged") == Status.UNAUTHORIZED
        assert get(owner, key) == value


@pytest.mark.quick
def test_a_bound_client_groups_no_value_of_others(worker: WorkerThread, connect: Opener) -> None:
    """Or it could delete a value by way of its own."""
    red, free = connect(TEAMS["red"], "red"), connect(FREE, "blue")
    mine, theirs = "{x}mine", "{x}theirs"
    assert put(red, mine, b"red's") == put(free, theirs, b"blue's") == Status.OK
    group, alone = [digest_of(mine), digest_of(theirs)], [digest_of("{x}2"), digest_of(mine)]
    assert red.group([[group, alone]]) == [Status.NOT_FOUND] * 2
    assert red.statuses(M.Delete, group[:1]) == [Status.OK] and get(free, theirs) == b"blue's"
    assert put(red, mine, b"red's") == put(red, "{x}2", b"red's") == Status.OK
    assert red.group([[group, alone]]) == [Status.NOT_FOUND, Status.OK]
    assert red.statuses(M.Delete, alone[:1]) == [Status.OK] and get(red, mine) == Status.NOT_FOUND
    assert put(free, "{x}3", b"blue's") == Status.OK
    assert free.group([[[digest_of("{x}3"), digest_of(theirs)], [group[1]]]]) == [Status.OK, Status.BAD_REQUEST]


class Guesser:
    """A bound client that tries random operations on digests of others and on digests that it has made up.

    What it was told must be what its own stores explain: ``own`` is the model, all else is a miss or a refusal.
    """

    def __init__(self, path: Finished, theirs: dict[bytes, bytes], seed: int) -> None:
        self.path, self.theirs, self.rng = path, theirs, random.Random(seed)
        made_up = [self.rng.randbytes(16) for _ in range(100)]
        for digest in list(theirs)[:100]:  # close to one that is there: a bit, a byte, its halves changed round
            at = self.rng.randrange(128)
            made_up.append((int.from_bytes(digest, "little") ^ 1 << at).to_bytes(16, "little"))
            made_up.append(digest[8:] + digest[:8])
        self.digests = [*theirs, *made_up]
        self.own: dict[bytes, bytes] = {}
        self.missed = self.refused = 0

    def try_one(self) -> None:
        what, digest, own = self.rng.randrange(7), self.rng.choice(self.digests), self.own
        mine = own.get(digest)
        absent = Status.OK if mine is not None else Status.NOT_FOUND
        if what == 0:
            memory = bytearray(64)
            previous = self.rng.random() < 0.3
            ((status, length, *_),) = self.path.fetch(
                [(digest, 64, lambda length: memoryview(memory)[:length])], previous=previous
            )
            assert status == absent or (previous and status == Status.NOT_FOUND)
            assert bytes(memory) == (mine if status == Status.OK and mine is not None else b"").ljust(64, b"\0")
            assert status == Status.OK or not length, "it tells the length"
        elif what == 1:
            part = bytearray(8)
            start = self.rng.randrange(40)
            ((status, *_),) = self.path.fetch_ranges([(digest, ranges_of([(start, 8, part)]))])
            assert status == absent if mine is None else status in (Status.OK, Status.OUT_OF_RANGE)
            assert bytes(part) == (bytes(8) if status != Status.OK or mine is None else mine[start : start + 8])
        elif what == 2:
            assert self.path.exists([digest]) == [absent]
        elif what == 3:
            assert self.path.statuses(M.Delete, [digest]) == [absent]
            own.pop(digest, None)
        elif what == 4:
            size = self.rng.choice((len(self.theirs.get(digest, b"")), 0, 40, 1 << 20))
            (status,) = self.path.statuses(M.DeleteSized, [(digest, size)])
            assert status == (Status.OK if mine is not None and len(mine) == size else Status.NOT_FOUND)
            if status == Status.OK:
                del own[digest]
        elif what == 5:
            many = self.rng.choices(self.digests, k=20)
            assert self.path.exists(many) == [Status.OK if each in own else Status.NOT_FOUND for each in many]
        else:
            value = self.rng.randbytes(self.rng.randrange(1, 60))
            (status,) = self.path.store([(digest, [memoryview(value)], 0, 0)])
            assert status == (Status.UNAUTHORIZED if digest in self.theirs else Status.OK)
            if status == Status.OK:
                own[digest] = value
        self.missed += mine is None and what < 6
        self.refused += what == 6 and digest in self.theirs


def guess(connect: Opener, tries: int) -> None:
    """Let one tenant guess at another's 300 values, and at those of clients that are not bound."""
    red, blue, free = connect(TEAMS["red"], "red"), connect(TEAMS["blue"], "blue"), connect(FREE, "blue")
    theirs = {Hasher("blue")(f"k{number}"): f"blue's {number}".encode() * (number % 4 + 1) for number in range(300)}
    for owner, digests in ((blue, list(theirs)[::2]), (free, list(theirs)[1::2])):
        statuses = owner.store([(digest, [memoryview(theirs[digest])], 0, 0) for digest in digests])
        assert set(statuses) == {Status.OK}
    guesser = Guesser(red, theirs, tries)
    for _ in range(tries):
        guesser.try_one()
    assert guesser.missed > tries // 2 and guesser.refused > tries // 30 and guesser.own
    for digest, value in theirs.items():
        memory = bytearray(64)
        ((status, length, *_),) = free.fetch([(digest, 64, lambda length, to=memory: memoryview(to)[:length])])
        assert (status, bytes(memory[:length])) == (Status.OK, value)


#: Its table has room for all digests, as an evicted value is a miss too.
ROOMY = pytest.mark.parametrize("worker", [128 << 20], indirect=True, ids=["128 MiB"])


@ROOMY
@pytest.mark.fault("F27", ci=2_000, whole=100_000)
def test_random_operations_on_the_digests_of_others(worker: WorkerThread, connect: Opener, amount: int) -> None:
    guess(connect, amount)
    with worker.frozen() as store:
        assert store.stats()["set_evictions"] == 0


@ROOMY
@pytest.mark.parametrize("check", ["reads", "stores"])
def test_control_guesses_without_a_check_are_seen(
    connect: Opener, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if check == "reads":
        monkeypatch.setattr(Stream, "_judge_owner", lambda *_: Status.OK)
    else:
        monkeypatch.setattr(Store, "_take_options", lambda _self, session, _digest, _options: (0, session.namespace))
    with pytest.raises(AssertionError):
        guess(connect, 1_000)


@pytest.mark.quick
def test_what_a_store_tells_of_another_namespace(connect: Opener) -> None:
    """One bit, as SECURITY.md says: the key is there. And nothing to who does not know the namespace's name."""
    red, free = connect(TEAMS["red"], "red"), connect(FREE, "blue")
    key, secret = Hasher("blue")("k"), Hasher("blue-5d0f1e7a")("k")

    def store(path: Finished, digest: bytes, size: int) -> int:
        return int(path.store([(digest, [memoryview(bytes(size))], 0, 0)])[0])

    assert store(free, key, 40) == store(free, secret, 40) == Status.OK
    assert {store(red, key, size) for size in (1, 40, 4096)} == {Status.UNAUTHORIZED}, "whatever its size"
    guesses = [Hasher(name)("k") for name in ("blue-", "blue-5d0f", "blue-00000000")]
    assert {store(red, digest, 40) for digest in guesses} == {Status.OK}
    assert red.exists([key, secret, digest_of("none")]) == [Status.NOT_FOUND] * 3


@pytest.mark.quick
def test_what_a_bound_client_plants_is_not_believed(worker: WorkerThread, connect: Opener) -> None:
    """It stores under the digest of another's key, which is not there yet."""
    red, blue, free = connect(TEAMS["red"], "red"), connect(TEAMS["blue"], "blue"), connect(FREE, "blue")
    assert put(red, "k", b"planted") == Status.OK and get(red, "k") == b"planted"
    with contextlib.closing(local(worker, "blue")) as near, contextlib.closing(local(worker, "red")) as friend:
        assert get(blue, "k") == get(free, "k") == Status.NOT_FOUND
        assert [path.exists([digest_of("k")]) for path in (red, blue, free)] == [
            [Status.OK], [Status.NOT_FOUND], [Status.NOT_FOUND]
        ], "or a put of what is absent would leave it alone"
        assert not reads_locally(near, "k") and reads_locally(friend, "k")
        for count in (1, 60):  # or an engine that asks first would never put it
            assert near.reader.contains_many([digest_of("k")] * count) == [False] * count
            assert friend.reader.contains_many([digest_of("k")] * count) == [True] * count
        assert near.pin_one(digest_of("k"))[0] == Status.NOT_FOUND and friend.pin_one(digest_of("k"))[0] == Status.OK
        assert put(free, "k", b"right") == Status.OK, "it does not keep the place from those who are not bound"
        assert get(blue, "k") == get(free, "k") == b"right" and reads_locally(near, "k")
        assert get(red, "k") == Status.NOT_FOUND and put(red, "k", b"again") == Status.UNAUTHORIZED


@pytest.mark.quick
@pytest.mark.parametrize("checked", [True, False], ids=["", "control"])
def test_issue_a_slot_that_changes_as_its_namespace_is_read(
    worker: WorkerThread, connect: Opener, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound client's own value is in the slot by then, the key asked for elsewhere: what is read is not the key's."""
    red, free = connect(TEAMS["red"], "red"), connect(FREE, "blue")
    assert put(free, "k", b"blue's") == put(red, "own", b"red's") == Status.OK
    namespace_in = ArenaReader.namespace_of
    with contextlib.closing(local(worker, "blue")) as near:
        own = near.reader.locate(digest_of("own"))

        def late(reader: ArenaReader, slot: int) -> int:
            if (found := near.reader.locate(digest_of("k"))) is None or slot != found.slot:
                return namespace_in(reader, slot)
            near.ask([(64, 1)])
            grant = near.pool.take(64)
            assert grant is not None and own is not None
            assert near.commit_one(digest_of("k"), grant[0], 64, 0, 0, 64, 0) == Status.OK
            return namespace_in(reader, own.slot)

        monkeypatch.setattr(ArenaReader, "namespace_of", late)
        if not checked:
            monkeypatch.setattr(ArenaReader, "holds", lambda *_: True)
        missed = [Status.NOT_FOUND] if checked else [Status.OK]
        assert red.exists([digest_of("own"), digest_of("k")]) == [Status.OK, *missed]


#: Mutations of the key that is named first, as a client by TCP asks for them; the second one is its own.
MUTATIONS: dict[str, Callable[[Finished, bytes, bytes], list[int]]] = {
    "delete": lambda path, digest, _: path.statuses(M.Delete, [digest]),
    "delete of a size": lambda path, digest, _: path.statuses(M.DeleteSized, [(digest, 64)]),
    "keep": lambda path, digest, _: path.statuses(partial(Keep, 2, 60), [digest]),
    "group": lambda path, digest, own: path.group([[[own, digest]]]),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", MUTATIONS)
def test_issue_a_value_of_others_that_comes_while_a_request_is_on_its_way(
    worker: WorkerThread, connect: Opener, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream had found the sender's own value there. The worker did not look, and changed another tenant's."""
    red, key, own = connect(TEAMS["red"], "red"), "{x}k", "{x}own"
    assert put(red, key, bytes(64)) == put(red, own, bytes(64)) == Status.OK
    mutate, sent = WorkerSessionKeeper.mutate, []
    with contextlib.closing(local(worker, "blue")) as near:

        def late(keeper: WorkerSessionKeeper, *arguments: Any) -> Any:
            if not sent:
                sent.append(arguments)
                near.ask([(64, 1)])
                grant = near.pool.take(64)
                assert grant is not None
                assert near.commit_one(digest_of(key), grant[0], 64, 0, 0, 64, 0) == Status.OK
            return mutate(keeper, *arguments)

        monkeypatch.setattr(WorkerSessionKeeper, "mutate", late)
        assert MUTATIONS[name](red, digest_of(key), digest_of(own)) == [Status.NOT_FOUND] and sent
        assert reads_locally(near, key)
    assert namespace_of(worker, key) == "blue"
    with worker.frozen() as store:
        assert not len(store.space.kept) and not store.groups.count


@pytest.mark.quick
def test_a_malformed_group_of_a_bound_client_ends_its_own_connection_alone(
    worker: WorkerThread, connect: Opener
) -> None:
    red, other = connect(TEAMS["red"], "red"), connect(TEAMS["red"], "red")
    assert put(other, "k", b"red's") == Status.OK
    with worker.frozen() as store:
        sessions = set(store.sessions.by_id)
    with pytest.raises(TransportError):
        red.group([[[]]])
    with worker.frozen() as store:
        assert set(store.sessions.by_id) == sessions
    assert other.statuses(M.Delete, [digest_of("k")]) == [Status.OK]


@pytest.mark.quick
def test_a_bound_client_deletes_nothing_that_a_previous_owner_may_have(worker: WorkerThread, connect: Opener) -> None:
    red, free = connect(TEAMS["red"], "red"), connect(FREE, "blue")
    with worker.frozen() as store:
        for key in ("mine", "k"):
            store.shards[shard_of(digest_of(key))] |= MOVING
            store.shard_words.moving += 1
    assert red.statuses(M.Delete, [digest_of("k")]) == [Status.UNAVAILABLE]
    assert red.statuses(M.DeleteSized, [(digest_of("k"), 5)]) == [Status.UNAVAILABLE]
    assert put(red, "mine", b"value") == Status.OK and red.statuses(M.Delete, [digest_of("mine")]) == [Status.OK]
    assert get(red, "mine") == Status.NOT_FOUND, "the previous owner may have what was deleted here"
    with worker.frozen() as store:
        assert store.shard_words.dropped == {digest_of("mine")}
    assert free.statuses(M.Delete, [digest_of("k")]) == [Status.OK], "the control: one that is not bound does"
    with worker.frozen() as store:
        assert digest_of("k") in store.shard_words.dropped


@pytest.mark.quick
def test_issue_what_a_bound_client_wants_of_a_shard_that_moves_is_tried_again(
    worker: WorkerThread, connect: Opener
) -> None:
    """It failed at once, where that of other clients waits for the shard. By the shard alone: it learns of no value."""
    red, free = connect(TEAMS["red"], "red"), connect(FREE, "blue")
    away, coming, here = ([digest_of(f"{{{shard}}}{number}") for number in "12"] for shard in ("a", "b", "c"))
    assert put(free, "{b}1", b"blue's") == put(free, "{c}1", b"blue's") == Status.OK
    with worker.frozen() as store:
        store.shards[shard_of(away[0])] = 0
        store.shards[shard_of(coming[0])] |= MOVING
        store.shard_words.moving += 1
    keep = partial(Keep, 1, 60)
    for path in (red, free):
        for kind in (keep, M.Delete, lambda some: M.DeleteSized([(each, 5) for each in some])):
            assert path.statuses(kind, away) == [Status.WRONG_OWNER] * 2
        assert path.group([[away]]) == [Status.WRONG_OWNER] and path.group([[coming]]) == [Status.NOT_FOUND]
    assert red.statuses(keep, coming) == [Status.PREVIOUS] * 2, "whether a value of others is here or not"
    assert free.statuses(keep, coming) == [Status.OK, Status.PREVIOUS]
    assert red.statuses(M.Delete, coming) == [Status.UNAVAILABLE] * 2
    for previous, status in ((False, Status.PREVIOUS), (True, Status.NOT_FOUND)):
        found = red.fetch([(each, 64, lambda _: memoryview(bytearray(64))) for each in coming], previous=previous)
        assert len(set(found)) == 1 and found[0][0] == status
        ranges = red.fetch_ranges([(each, ranges_of([(0, 1, bytearray(1))])) for each in coming], previous=previous)
        assert len(set(ranges)) == 1 and ranges[0][0] == status
        with contextlib.closing(red.take_out(time.monotonic() + WAIT_S)) as channel:
            entries = channel.call(M.Pin(previous, coming)).entries
        assert len(set(entries)) == 1 and entries[0][0] == status
    assert red.exists(coming) == [Status.PREVIOUS] * 2 and free.exists(coming) == [Status.OK, Status.PREVIOUS]
    assert red.exists(here) == [Status.NOT_FOUND] * 2
    assert red.statuses(keep, here) == red.statuses(M.Delete, here) == [Status.NOT_FOUND] * 2


def move_in(worker: WorkerThread, key: str) -> None:
    """Let the key's shard be one that is moving in."""
    with worker.frozen() as store:
        store.shards[shard_of(digest_of(key))] |= MOVING
        store.shard_words.moving += 1


def read_by_each_message(path: Finished, key: str) -> list[int]:
    """Return what FETCH, FETCH_RANGES, PIN and EXISTS answer."""
    digest = digest_of(key)
    with contextlib.closing(path.take_out(time.monotonic() + WAIT_S)) as channel:
        pinned = channel.call(M.Pin(0, [digest])).entries[0][0]
    return [
        path.fetch([(digest, 64, lambda length: memoryview(bytearray(length)))])[0][0],
        path.fetch_ranges([(digest, ranges_of([(0, 1, bytearray(1))]))])[0][0], pinned, path.exists([digest])[0],
    ]  # fmt: skip


def changes(worker: WorkerThread, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let red put its key again between the look for it and the look whose it is."""
    number = WorkerSessionKeeper.namespace

    def late(keeper: WorkerSessionKeeper, name: str) -> int:
        with contextlib.closing(local(worker, "red")) as near:
            near.ask([(64, 1)])
            grant = near.pool.take(64)
            assert grant is not None
            assert near.commit_one(digest_of(key), grant[0], 64, 0, 0, 64, 0) == Status.OK
        return number(keeper, name)

    monkeypatch.setattr(WorkerSessionKeeper, "namespace", late)


def tells_no_number(_worker: WorkerThread, _key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_keeper: WorkerSessionKeeper, _name: str) -> int:
        raise Refused(Status.UNAVAILABLE, "the worker is down")

    monkeypatch.setattr(WorkerSessionKeeper, "namespace", refused)


def is_outdated(_worker: WorkerThread, _key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArenaReader, "is_current", lambda *_: False)


@pytest.mark.quick
@pytest.mark.parametrize(
    "hinder, status",
    [(changes, Status.NOT_FOUND), (tells_no_number, Status.UNAVAILABLE), (is_outdated, Status.NOT_FOUND)],
)
def test_nobody_is_sent_to_a_previous_owner_for_what_may_be_its_own(
    worker: WorkerThread, connect: Opener, hinder: Callable[..., None], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous owner has a value that the one here has superseded."""
    red = connect(TEAMS["red"], "red")
    move_in(worker, "k")
    assert put(red, "k", b"new") == put(red, "here", b"new") == Status.OK
    assert read_by_each_message(red, "k") == [Status.OK] * 4, "the control"
    hinder(worker, "k", monkeypatch)
    assert read_by_each_message(red, "k") == [status] * 4
    if status == Status.UNAVAILABLE:
        assert read_by_each_message(red, "here") == [Status.NOT_FOUND] * 4, "of whatever namespace it is"


@pytest.mark.quick
@pytest.mark.parametrize("deleted", [False, True], ids=["replaced", "deleted"])
def test_nor_for_its_own_value_whose_place_another_namespace_has_taken(
    worker: WorkerThread, connect: Opener, deleted: bool
) -> None:
    red, free = connect(TEAMS["red"], "red"), connect(FREE, "blue")
    move_in(worker, "{x}k")
    assert put(red, "{x}k", b"new") == Status.OK
    if deleted:
        assert red.statuses(M.Delete, [digest_of("{x}k")]) == [Status.OK]
    assert put(free, "{x}k", b"blue's") == put(free, "{x}other", b"blue's") == Status.OK
    assert read_by_each_message(red, "{x}k") == [Status.NOT_FOUND] * 4
    assert read_by_each_message(red, "{x}other") == [Status.PREVIOUS] * 4, "the control: red has never changed it"


@pytest.mark.quick
def test_issue_a_group_takes_no_value_along_that_another_namespace_has_put_over_a_member(
    worker: WorkerThread, connect: Opener
) -> None:
    """A bound client made a group of its value and of another tenant's key, and chose when that key was dropped."""
    red, blue = connect(TEAMS["red"], "red"), connect(FREE, "blue")
    own, planted = "{x}own", "{x}planted"
    assert put(red, own, b"red's") == put(red, planted, b"planted") == Status.OK
    assert red.group([[[digest_of(own), digest_of(planted)]]]) == [Status.OK]
    assert put(red, planted, b"again") == Status.OK
    with worker.frozen() as store:
        assert store.groups.count == 1, "the control: a value of the same namespace is in its predecessor's group"
    assert put(blue, planted, b"blue's") == Status.OK
    with worker.frozen() as store:
        assert store.groups.count == 0
    assert red.statuses(M.Delete, [digest_of(own)]) == [Status.OK]
    assert get(blue, planted) == b"blue's"


@pytest.mark.quick
def test_issue_a_name_without_a_number_is_asked_for_once_for_all_keys(
    connect: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream asked its worker for each key of a request, and served nobody else meanwhile."""
    red, free = connect(TEAMS["red"], "red"), connect(FREE, "new")
    assert put(red, "k", b"red's") == Status.OK
    asked: list[str] = []
    exchange = WorkerSessionKeeper.exchange

    def full(keeper: WorkerSessionKeeper, msg: Any, *more: Any) -> Any:
        if isinstance(msg, M.Namespace):
            asked.append(msg.name)
            raise Refused(Status.NO_SPACE, "the ledger is full of names")
        return exchange(keeper, msg, *more)

    monkeypatch.setattr(WorkerSessionKeeper, "exchange", full)
    digests = [digest_of("k")] * 50
    answers = free.fetch([(digest, 64, lambda length: memoryview(bytearray(length))) for digest in digests])
    assert [status for status, *_ in answers] == [Status.NOT_FOUND] * 50 and asked == ["new"]
    assert free.exists(digests) == [Status.NOT_FOUND] * 50 and asked == ["new"] * 2
    assert get(red, "k") == b"red's", "the control: its number is known"


@pytest.mark.quick
def test_the_controls(worker: WorkerThread, connect: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without either check the tests above see the harm."""
    red, free = connect(TEAMS["red"], "red"), connect(FREE, "blue")
    put(free, "k", b"blue's")
    put(red, "planted", b"planted")
    monkeypatch.setattr(Stream, "_judge_owner", lambda *_: Status.OK)
    assert get(red, "k") == b"blue's" and get(free, "planted") == b"planted"
    monkeypatch.setattr(Store, "_take_options", lambda _self, session, _digest, _options: (0, session.namespace))
    assert put(red, "k", b"forged") == Status.OK and get(free, "k") == b"forged"


@pytest.mark.quick
def test_a_quota_holds_by_each_path(worker: WorkerThread, connect: Opener) -> None:
    with worker.frozen() as store:
        store.set_quotas({"red": 8 * KIB})
    red, value = connect(TEAMS["red"], "red"), memoryview(bytes(4 * KIB))
    entries = [(digest_of(f"k{n}"), [value], 0, 0) for n in range(4)]
    assert red.store(entries) == [Status.OK, Status.OK, Status.OVER_QUOTA, Status.OVER_QUOTA]
    with contextlib.closing(local(worker, "red")) as near, contextlib.closing(local(worker, "blue")) as other:
        for session, status in ((near, Status.OVER_QUOTA), (other, Status.OK)):
            session.ask([(64, 1)])
            number, _, _ = session.pool.take(64) or (0, 0, 0)
            assert session.commit_one(digest_of(f"{status}"), number, 64, 0, 0, 64, 0) == status
    assert red.statuses(M.Delete, [digest_of("k0")]) == [Status.OK] and red.store(entries[:1]) == [Status.OK]
    with worker.frozen() as store:
        assert store.stats()["put_failures"]["over_quota"] == 3


@pytest.mark.quick
def test_only_a_stream_speaks_for_namespaces(worker: WorkerThread) -> None:
    """It asks for their ids, and for their clients. A client's COMMIT is tests/unit/arena/test_quotas.py's."""
    for role, may in ((M.Role.CLIENT, False), (M.Role.MOVER, False), (M.Role.STREAM, True)):
        with contextlib.closing(WorkerSession(worker.path, "default", WAIT_S, role=role)) as session:
            if may:
                assert session.exchange(M.Namespace("another")).items == session.exchange(M.Namespace("another")).items
                with pytest.raises(Refused):
                    session.exchange(M.Namespace("n" * 65))
            else:
                with pytest.raises(TransportError):
                    session.exchange(M.Namespace("another"))
    for role, may in ((M.Role.CLIENT, False), (M.Role.MOVER, False), (M.Role.STREAM, True)):
        with contextlib.closing(WorkerSession(worker.path, "default", WAIT_S, role=role)) as session:
            request = E.for_namespace("another", M.Delete([digest_of("k")]))
            if may:
                assert session.exchange(request).statuses == [Status.NOT_FOUND]
            else:
                with pytest.raises(TransportError):
                    session.exchange(request)


@pytest.mark.quick
def test_issue_a_bound_client_learns_no_namespace_of_others_from_the_manager() -> None:
    """Of one that has advanced. By the name it could ask which keys are stored there."""
    server = Token("the-token-of-the-servers", TokenRole.SERVER, "nodes")
    made = ManagerThread((FREE, server, *TEAMS.values()))
    with contextlib.closing(made), contextlib.ExitStack() as stack:
        pushed: dict[str, list[list[str]]] = {}

        def connected(token: Token, role: int) -> Channel:
            told = pushed[token.label] = []

            def on_push(msg: Any) -> None:
                if isinstance(msg, E.Epochs):
                    told.append([each.name for each in msg.namespaces])

            channel = stack.enter_context(contextlib.closing(Channel.tcp(*made.address, WAIT_S, on_push)))
            greet(channel, M.Service.MANAGER, client_hello(role), token.secret)
            return channel

        channels = {
            token.label: connected(token, M.Role.SUPERVISOR if token is server else M.Role.CLIENT)
            for token in (FREE, server, *TEAMS.values())
        }  # fmt: skip
        everybody = {"free": ["blue", "red"], "nodes": ["blue", "red"], "team-red": ["red"], "team-blue": ["blue"]}

        def told() -> tuple[dict[str, list[list[str]]], dict[str, list[str]]]:
            """What each was told before a map, and in the status."""
            for told in pushed.values():
                told.clear()
            for channel in channels.values():
                channel.call(M.MapGet(0, E.SUBSCRIBE_MAPS | E.SUBSCRIBE_EPOCHS))
            status = {
                name: sorted(json.loads(channel.call(M.ClusterStatus(1)).json)["namespace_epochs"])
                for name, channel in channels.items()
            }  # fmt: skip
            return pushed, status

        advance(made, "blue")
        seen, status = told()
        assert status == {name: sorted({"blue"} & set(names)) for name, names in everybody.items()}
        assert {name: each[-1:] for name, each in seen.items()} == {
            name: [["blue"]] if "blue" in names else [] for name, names in everybody.items()
        }
        advance(made, "red")
        seen, status = told()
        assert status == everybody and {name: each[-1] for name, each in seen.items()} == everybody


def advance(made: ManagerThread, namespace: str) -> None:
    """Have a namespace advance. No server joins, so nobody waits for the end of it."""
    with pytest.raises(Refused), contextlib.closing(made.client(FREE, M.Role.CLIENT)) as client:
        client.call(E.Advance(namespace, 1), E.Advanced)

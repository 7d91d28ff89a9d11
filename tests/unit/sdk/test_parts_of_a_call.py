"""What the parts of a call share: lost time, waits for room, and half a deadline to undo what they have done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from simm.ipc.commit_ring import ANNOUNCE_BYTES
from simm.ipc.grant_pool import GrantPool, RoomWait, room_of_call
from simm.ipc.patience import Patience
from simm.ipc.put import ShmPut
from simm.ipc.steps import Steps, finish
from simm.net.allowance import ALLOWANCE, at_least, spend
from simm.sdk.batch import LARGE, MISS, UNAVAILABLE
from simm.sdk.calls.large import LargeCalls
from simm.sdk.large.kinds import ShmManifestPut
from simm.sdk.large.manifest import MANIFEST_BYTES, Manifest
from simm.sdk.large.values import PARTS_TOGETHER, Large
from simm.sdk.ops.replicas import Replicas
from simm.sdk.routing import Routes
from simm.sdk.writes import Puts
from simm.wire.status import Status

DEADLINE_S = 1.0


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def pass_s(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    yield clock
    assert ALLOWANCE.seconds == ALLOWANCE.until == ALLOWANCE.mine.least_s == math.inf
    assert ALLOWANCE.mine.room is None


class Server:
    """A server that is connected, or down."""

    fresh, session, tcp, rdma, reader = False, None, None, None, None

    def __init__(self, path: str = "tcp") -> None:
        self.path = path
        #: What it was asked for, in its order.
        self.asked: list[Any] = []

    def connect_soon(self) -> None: ...

    def ready(self) -> bool:
        return self.path != "down"


class Keys:
    """Routes to servers of which each has some keys, and puts that these answer."""

    has_servers, closed = True, False
    router: Any = None
    route: tuple[Any, ...] = ()

    def __init__(self, servers: Sequence[Server], clock: Clock) -> None:
        self.servers, self.clock = servers, clock
        #: What each of them says of a key.
        self.says: Callable[[Server], int] = lambda _: Status.OK
        #: For how long each waits for room, seconds.
        self.waits_s = 0.0
        self.waited_s = 0.0
        #: Whether none comes, although they may answer OK: there are two copies, and the other one is stored.
        self.in_vain = False
        puts: Any = Puts.__new__(Puts)
        self.puts = puts
        puts._routes, puts._deadline_s, puts.counters = self, DEADLINE_S, dict.fromkeys(("redirects", "outages"), 0)
        puts._put_at, puts._keep_at, puts._delete_at = self._put_at, self._keep_at, self._delete_at

    def patience(self, began: float | None = None) -> Patience:
        return Patience(DEADLINE_S, began)

    def group(self, digests: Sequence[bytes], among: Sequence[int] | None = None) -> Any:
        groups: dict[Server, list[int]] = {server: [] for server in self.servers}
        for at in range(len(digests)) if among is None else among:
            groups[self.servers[at % len(self.servers)]].append(at)
        return [(server, positions) for server, positions in groups.items() if positions]

    def _do(self, server: Server, what: Any, positions: Sequence[int], statuses: list[int]) -> Steps[None]:
        yield from ()
        self.clock.pass_s(0.001 * DEADLINE_S)
        if server.ready():
            server.asked.append(what)
            for at in positions:
                statuses[at] = self.says(server)

    def _put_at(self, batch: Any, server: Server, positions: Sequence[int], _together: bool) -> Steps[None]:
        wait_s = min(self.waits_s, batch.room.left_s)
        batch.room.take(wait_s, in_vain=self.in_vain)
        self.waited_s += wait_s
        return self._do(server, "put", positions, batch.statuses)

    def _keep_at(
        self, _digests: Any, _how: int, seconds: int, statuses: list[int], server: Server, positions: Sequence[int],
        _together: bool,
    ) -> Steps[None]:  # fmt: skip
        return self._do(server, seconds, positions, statuses)

    def _delete_at(
        self, _digests: Any, _sizes: Any, statuses: list[int], _twice: Any, server: Server, positions: Sequence[int],
        _together: bool,
    ) -> Steps[None]:  # fmt: skip
        return self._do(server, "delete", positions, statuses)


class Values(Large):
    """Values in parts at such servers."""

    def __init__(self, keys: Keys, parts: int = 6) -> None:
        puts: Any = keys.puts
        self.found: list[Any] = []
        manifests: Any = SimpleNamespace(read_many=self._manifests, put=lambda names, _: [Status.OK] * len(names))
        counters = dict.fromkeys(("large", "present", "put_failures"), 0)
        super().__init__(
            manifests, puts, None, manifests, manifests, None, counters, put_once=False, deadline_s=DEADLINE_S
        )
        self.stored = Manifest.new(parts, 1)

    def _manifests(self, digests: Sequence[bytes], rooms: Sequence[memoryview]) -> list[Any]:
        got = self.found.pop(0) if self.found else MANIFEST_BYTES
        for digest, room in zip(digests, rooms):
            room[:] = self.stored.encode(digest)
        return [got] * len(digests)

    def kept(self) -> int:
        statuses: list[int] = [Status.TOO_LARGE]
        self.keep([bytes(16)], statuses, 2, 60)
        return statuses[0]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simm.sdk.large.manifest.PART_BYTES", 1)


# -- what is undone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("down", [0, 1, 2])
def test_what_is_kept_is_given_up_at_all_servers_that_can_be_reached(clock: Clock, down: int) -> None:
    servers = [Server(), Server(), Server()]
    servers[down].path = "down"
    keys = Keys(servers, clock)
    assert Values(keys).kept() == Status.UNAVAILABLE
    assert [each.asked for each in servers] == [[] if number == down else [60, 0] for number in range(3)]


@pytest.mark.parametrize("down", [0, 1, 2])
def test_what_is_stored_is_dropped_at_all_servers_that_can_be_reached(
    clock: Clock, down: int, small_parts: None
) -> None:
    servers = [Server(), Server(), Server()]
    servers[down].path = "down"
    keys = Keys(servers, clock)
    keys.group = lambda digests, among=None: [  # type: ignore[method-assign]
        (server, [at for at in range(len(digests)) if digests[at][0] % 3 == number])
        for number, server in enumerate(servers)
    ]
    value = memoryview(bytes(2 * PARTS_TOGETHER))
    assert Values(keys).put([bytes(16)], [value], lambda *_: [], 1) == [Status.UNAVAILABLE]
    assert [each.asked for each in servers] == [[] if number == down else ["put", "delete"] for number in range(3)]


def test_an_undo_begins_no_exchange_with_less_than_half_of_its_time(clock: Clock) -> None:
    with Patience(DEADLINE_S):
        with at_least(DEADLINE_S / 2), Patience(DEADLINE_S / 2):
            with Patience(DEADLINE_S) as part:
                part.take_off(0.24 * DEADLINE_S)
                assert part.has_time_for(Server())
                part.take_off(0.02 * DEADLINE_S)
                assert not part.has_time_for(Server())
        with Patience(DEADLINE_S) as part:
            part.take_off(0.51 * DEADLINE_S)
            assert not part.has_time_for(Server()), "outside of it half a deadline is the least"


# -- a shard whose owner goes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.2, 0.45, 0.6, 0.7])
@pytest.mark.parametrize("call", ["store", "keep", "delete"])
def test_a_wait_for_the_next_owner_counts_once(clock: Clock, call: str, after_s: float) -> None:
    """The owner refuses, and goes: until the map names another one, the time of one wait passes."""
    leaving, coming = Server(), Server()
    keys = Keys([leaving], clock)
    there_at = clock.now + after_s * DEADLINE_S

    def says(server: Server) -> int:
        if server is leaving:
            leaving.path = "down"
            return Status.WRONG_OWNER
        return Status.OK

    def group(digests: Sequence[bytes], among: Sequence[int] | None = None) -> Any:
        owner = leaving if not leaving.asked else coming if clock.now >= there_at else None
        return [(owner, [0])]

    def target(_digest: bytes) -> Server | None:
        return coming if clock.now >= there_at else None

    routes: Any = keys
    routes.group, routes.target, keys.says = group, target, says
    keys.router = SimpleNamespace(
        epoch=1, subscription=SimpleNamespace(refresh=lambda: None),
        await_map=lambda _epoch, until: clock.pass_s(min(until - clock.now, 0.02)),
    )  # fmt: skip
    calls: dict[str, Callable[[], list[int]]] = {
        "store": lambda: keys.puts.store([bytes(16)], [memoryview(b"v")]),
        "keep": lambda: keys.puts.keep([bytes(16)], 2, 60),
        "delete": lambda: keys.puts.delete([bytes(16)]),
    }
    assert calls[call]() == [Status.OK]
    assert coming.asked


# -- keep ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "says", "result"),
    [
        ([MANIFEST_BYTES, UNAVAILABLE], Status.UNAVAILABLE, Status.UNAVAILABLE),
        ([MANIFEST_BYTES, UNAVAILABLE], Status.OVER_QUOTA, Status.OVER_QUOTA),
        ([MANIFEST_BYTES, UNAVAILABLE], Status.OK, Status.UNAVAILABLE),
        ([UNAVAILABLE], Status.OK, Status.UNAVAILABLE),
        ([MANIFEST_BYTES, MISS], Status.UNAVAILABLE, Status.NOT_FOUND),
        ([MISS], Status.OK, Status.NOT_FOUND),
        ([LARGE], Status.OK, Status.NOT_FOUND),
    ],
)
def test_a_keep_says_not_found_only_of_what_it_could_look_for(
    clock: Clock, found: list[Any], says: int, result: int
) -> None:
    keys = Keys([Server()], clock)
    keys.says = lambda _: says
    values = Values(keys)
    values.found = [*found]
    assert values.kept() == result


def lose_all(clock: Clock) -> bool:
    """Lose all that a call may wait for a server; return False if that is not enough to ask it."""
    with Patience(DEADLINE_S) as part:
        server = Server()
        if part.has_time_for(server):
            clock.pass_s(ALLOWANCE.seconds)
            server.path = "down"
            return True
    return False


# -- waits for room --------------------------------------------------------------------------------------------


def put_all(clock: Clock, values: int, status: int) -> tuple[list[int], float]:
    """Put values of three groups of parts, of which each waits 0.3 s for room; return statuses, and the waits."""
    keys = Keys([Server()], clock)
    keys.waits_s, keys.says = 0.3 * DEADLINE_S, lambda _: status
    value = memoryview(bytes(3 * PARTS_TOGETHER))
    names = [bytes([number]) * 16 for number in range(values)]
    return Values(keys).put(names, [value] * values, lambda *_: [], 1), keys.waited_s


def test_waits_for_room_that_were_in_vain_are_shared_by_a_call(clock: Clock, small_parts: None) -> None:
    statuses, waited_s = put_all(clock, 5, Status.NO_SPACE)
    assert statuses == [Status.NO_SPACE] * 5
    assert waited_s <= DEADLINE_S / 2 + 1e-9


def test_a_put_that_comes_forward_waits_for_room_as_often_as_it_must(clock: Clock, small_parts: None) -> None:
    statuses, waited_s = put_all(clock, 5, Status.OK)
    assert statuses == [Status.OK] * 5
    assert abs(waited_s - 5 * 3 * 0.3 * DEADLINE_S) < 1e-9


def test_ordinary_values_of_the_call_share_them_too(clock: Clock, small_parts: None) -> None:
    keys = Keys([Server()], clock)
    keys.waits_s, keys.says = DEADLINE_S, lambda _: Status.NO_SPACE
    sources = [memoryview(b"v"), memoryview(bytes(2 * PARTS_TOGETHER))]
    Values(keys).put([bytes(16), bytes([1]) * 16], sources, keys.puts.store, 1)
    assert keys.waited_s == DEADLINE_S / 2
    keys.puts.store([bytes(16)], [memoryview(b"v")])
    assert keys.waited_s == DEADLINE_S, "the next call has its own"


def test_a_put_that_is_interrupted_leaves_the_next_call_its_own_wait(clock: Clock, small_parts: None) -> None:
    class Interrupted(BaseException):
        """What a signal's handler raises."""

    def interrupted(_: Server) -> int:
        raise Interrupted

    keys = Keys([Server()], clock)
    keys.waits_s, keys.says = DEADLINE_S, interrupted
    with pytest.raises(Interrupted):
        Values(keys).put([bytes(16)], [memoryview(bytes(2))], lambda *_: [], 1)
    assert keys.waited_s == DEADLINE_S / 2, "the control"
    keys.says = lambda _: Status.OK
    keys.puts.store([bytes(16)], [memoryview(b"v")])
    assert keys.waited_s == DEADLINE_S


def test_a_wait_in_vain_is_not_given_back_to_a_value_that_is_stored(clock: Clock, small_parts: None) -> None:
    """The second copies' servers are full, and the first copies are stored."""
    keys = Keys([Server()], clock)
    keys.waits_s, keys.in_vain = 0.3 * DEADLINE_S, True
    value = memoryview(bytes(3 * PARTS_TOGETHER))
    names = [bytes([number]) * 16 for number in range(5)]
    assert Values(keys).put(names, [value] * 5, lambda *_: [], 1) == [Status.OK] * 5
    assert keys.waited_s <= DEADLINE_S / 2 + 1e-9


@pytest.mark.parametrize("in_vain_s", [0.1, 0.3, 0.5])
def test_waits_in_vain_and_silent_servers_have_one_deadline(clock: Clock, small_parts: None, in_vain_s: float) -> None:
    """The first value finds no room, the server of the second one falls silent, and so do those of what is undone."""
    asked = 0
    values = Values(Keys([Server()], clock))

    def put_parts(names: Sequence[bytes], _: Any) -> list[int]:
        nonlocal asked
        asked += 1
        if asked == 1:
            with Patience(DEADLINE_S):
                clock.pass_s(in_vain_s * DEADLINE_S)
                room_of_call(DEADLINE_S / 2).take(in_vain_s * DEADLINE_S, in_vain=True)
                spend(in_vain_s * DEADLINE_S)
            return [Status.NO_SPACE] * len(names)
        tried.append(lose_all(clock))
        return [Status.OK if tried[-1] else Status.UNAVAILABLE, *[Status.UNAVAILABLE] * (len(names) - 1)]

    tried: list[bool] = []
    any_values: Any = values
    any_values._put_parts, any_values._delete = put_parts, lambda _: lose_all(clock)
    began = clock.now
    names = [bytes([number]) * 16 for number in range(4)]
    statuses = values.put(names, [memoryview(bytes(2))] * 4, lambda *_: [], 1)
    assert statuses == [Status.NO_SPACE, *[Status.UNAVAILABLE] * 3]
    assert tried[0], "what is not to wait for room is tried"
    assert clock.now - began <= 1.6 * DEADLINE_S


class FullWorker:
    """A session with a worker without room."""

    deadline_s = DEADLINE_S
    reader = SimpleNamespace(geometry=SimpleNamespace(data_bytes=1 << 30))

    def __init__(self) -> None:
        self.pool: GrantPool[Any] = GrantPool()

    def ask(self, wants: Any) -> None: ...

    def return_grants(self, numbers: Any) -> None: ...


@pytest.mark.parametrize("kind", [ShmPut, ShmManifestPut])
@pytest.mark.parametrize("length", [100, ANNOUNCE_BYTES])
def test_puts_of_single_values_share_the_calls_waits_for_room(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, kind: type[ShmPut], length: int
) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        clock.pass_s(seconds)

    monkeypatch.setattr("time.sleep", sleep)
    put: Any = kind.__new__(kind)
    source = memoryview(bytes(length))
    with Patience(DEADLINE_S):
        mine = ALLOWANCE.mine
        mine.room = RoomWait(0.2 * DEADLINE_S)
        statuses = [put.put_one(FullWorker(), bytes(16), source) for _ in range(3)]
        if kind is ShmManifestPut:
            finish(put.put_steps(FullWorker(), [bytes(16)], [source], [0], statuses))
        assert statuses == [Status.NO_SPACE] * 3
        assert abs(sum(waited) - 0.2 * DEADLINE_S) < 1e-9 and mine.room.left_s < 1e-9


# -- puts whose end is not known -------------------------------------------------------------------------------


class Unsure(Values):
    """Values whose manifest's server does not say whether it has stored one."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch, *, replicated: bool = False) -> None:
        super().__init__(Keys([Server()], clock), 2)
        monkeypatch.setattr(self, "_put_once", replicated)
        #: Names of parts that are stored.
        self.parts = {*self.stored.digests(bytes(16))}
        #: Whether it does; what it says when it is asked then, None for what is stored; what is there instead.
        self.stores, self.other = True, self.stored
        self.says: Any = None
        made: Any = self
        made._put_parts, made._delete, made._put_manifests = self._put_some, self._delete_some, self._put_unsure
        self._asked = False

    def _put_some(self, names: Sequence[bytes], _: Any) -> list[int]:
        self.parts.update(names)
        return [Status.OK] * len(names)

    def _delete_some(self, names: Sequence[bytes], _: Any = None) -> list[int]:
        self.parts.difference_update(names)
        return [Status.OK] * len(names)

    def _put_unsure(self, names: Sequence[bytes], sources: Sequence[memoryview]) -> list[int]:
        with Patience(DEADLINE_S) as part:  # it has cost all that there was
            part.take_off(DEADLINE_S)
        made = Manifest.decode(names[0], bytes(sources[0]))
        assert made is not None
        self.new = made
        self.stored = made if self.stores else self.other
        if self.says is not None:
            self.found = [self.says]
        return [Status.UNAVAILABLE]

    def put_again(self) -> tuple[int, set[str]]:
        """Return the status of a put over the first value, and which value's parts are stored afterwards."""
        old = self.stored
        status = self.put([bytes(16)], [memoryview(bytes(3))], lambda *_: [], 1)[0]
        names = {"old": old, "new": self.new}
        return status, {name for name, each in names.items() if self.parts.issuperset(each.digests(bytes(16)))}


def test_a_put_whose_manifest_is_stored_drops_what_it_has_replaced(
    clock: Clock, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Unsure(clock, monkeypatch).put_again() == (Status.OK, {"new"})


@pytest.mark.parametrize(
    ("says", "left"), [(None, {"old", "new"}), (MISS, {"old", "new"}), (LARGE, {"new"})]
)
def test_a_put_whose_manifest_may_be_stored_later_leaves_its_parts(
    clock: Clock, small_parts: None, monkeypatch: pytest.MonkeyPatch, says: Any, left: set[str]
) -> None:
    """The server goes on with it once it wakes. An ordinary value's put has replaced the old one for certain."""
    values = Unsure(clock, monkeypatch)
    values.stores, values.says = False, says
    assert values.put_again() == (Status.UNAVAILABLE, left)


def test_a_put_that_is_replaced_at_once_leaves_nothing(
    clock: Clock, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = Unsure(clock, monkeypatch)
    values.stores, values.other = False, Manifest.new(1, 1)
    assert values.put_again() == (Status.UNAVAILABLE, set())


@pytest.mark.parametrize(("replicated", "says"), [(False, UNAVAILABLE), (True, UNAVAILABLE), (True, MISS)])
def test_no_parts_are_dropped_that_the_manifest_in_force_may_name(
    clock: Clock, small_parts: None, monkeypatch: pytest.MonkeyPatch, replicated: bool, says: Any
) -> None:
    values = Unsure(clock, monkeypatch, replicated=replicated)
    if replicated:
        values.found = [MISS]  # else nothing would be stored over it
    values.says = says
    assert values.put_again() == (Status.UNAVAILABLE, {"old", "new"})


def test_of_two_copies_one_whose_end_is_not_known_counts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first server is full, and the second one may have stored it."""
    puts: Any = SimpleNamespace(count=lambda *_: None)
    replicas: Any = Replicas(Keys([], clock), puts, puts, {"single_copies": 0})  # type: ignore[arg-type]
    monkeypatch.setattr(replicas, "stored_many", lambda digests, _: [False] * len(digests))
    monkeypatch.setattr(replicas, "second", lambda _: bytes([1]) * 16)
    for first, second, result in (
        (Status.NO_SPACE, Status.UNAVAILABLE, Status.UNAVAILABLE),
        (Status.UNAVAILABLE, Status.NO_SPACE, Status.UNAVAILABLE),
        (Status.OK, Status.UNAVAILABLE, Status.OK),
        (Status.UNAVAILABLE, Status.OK, Status.OK),
        (Status.NO_SPACE, Status.OVER_QUOTA, Status.NO_SPACE),
    ):
        puts.store = lambda *_, both=(first, second): [*both]
        assert replicas.put([bytes(16)], [memoryview(b"v")]) == [result]


def test_the_old_parts_are_dropped_although_the_call_has_no_time_left(
    clock: Clock, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: Any = Unsure(clock, monkeypatch)
    unsure, left_s = values._put_manifests, []

    def put_late(names: Sequence[bytes], sources: Sequence[memoryview]) -> list[int]:
        unsure(names, sources)
        return [Status.OK]

    def delete(names: Sequence[bytes]) -> list[int]:
        left_s.append(ALLOWANCE.seconds)
        return [Status.OK] * len(names)

    values._put_manifests, values._delete = put_late, delete
    assert values.put_again()[0] == Status.OK
    assert left_s == [DEADLINE_S / 2]


def test_a_manifest_that_cannot_be_read_again_is_the_one_that_was_replaced(
    clock: Clock, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = Unsure(clock, monkeypatch)
    values.found = [MANIFEST_BYTES, UNAVAILABLE]
    assert values.put_again() == (Status.OK, {"new"})


def test_what_may_be_kept_is_given_up_if_no_server_has_answered(clock: Clock) -> None:
    server = Server()
    keys = Keys([server], clock)
    keys.says = lambda _: Status.UNAVAILABLE
    assert Values(keys).kept() == Status.UNAVAILABLE
    assert server.asked == [60, 0]


def test_what_was_not_sent_is_not_given_up(clock: Clock) -> None:
    """Or each of a call's values would take half a deadline more."""
    server = Server()
    values = Values(Keys([server], clock))
    with Patience(DEADLINE_S):
        with Patience(DEADLINE_S) as part:
            part.take_off(0.6 * DEADLINE_S)
        assert values.kept() == Status.UNAVAILABLE
    assert server.asked == []


# -- what is lost ----------------------------------------------------------------------------------------------


def lose(clock: Clock, seconds: float) -> None:
    """Lose time with a server, in a part of a call."""
    with Patience(DEADLINE_S) as part:
        server = Server()
        assert part.has_time_for(server)
        clock.pass_s(seconds)
        server.path = "down"


def test_a_call_that_turns_to_servers_itself_remembers_what_its_parts_have_lost(clock: Clock) -> None:
    with Patience(DEADLINE_S) as outer:
        lose(clock, 0.3 * DEADLINE_S)
        assert outer.has_time_for(Server())
        assert abs(ALLOWANCE.seconds - 0.7 * DEADLINE_S) < 1e-9
        lose(clock, 0.3 * DEADLINE_S)
        assert not outer.has_time_for(Server())


@pytest.mark.parametrize("path", ["tcp", "down"])
def test_what_a_part_loses_during_the_time_of_a_server_counts_once(clock: Clock, path: str) -> None:
    with Patience(DEADLINE_S):
        with Patience(DEADLINE_S) as outer:
            server = Server()
            assert outer.has_time_for(server)
            clock.pass_s(0.1 * DEADLINE_S)
            lose(clock, 0.2 * DEADLINE_S)
            spend(0.1 * DEADLINE_S)
            clock.pass_s(0.1 * DEADLINE_S)
            server.path = path
            assert outer.has_time_for(Server())
            left_s = 0.7 if path == "tcp" else 0.6
            assert abs(ALLOWANCE.seconds - left_s * DEADLINE_S) < 1e-9
        left_s += 0.1  # room is waited for once more, if need be
        assert abs(ALLOWANCE.seconds - left_s * DEADLINE_S) < 1e-9


def test_what_a_part_loses_while_servers_work_at_the_same_time_counts_once(clock: Clock) -> None:
    servers = [Server(), Server()]
    given: list[float] = []

    def visit(server: Server, loses: bool) -> Steps[None]:
        given.append(ALLOWANCE.seconds)
        if loses:
            lose(clock, 0.2 * DEADLINE_S)
            clock.pass_s(0.1 * DEADLINE_S)
            server.path = "down"
        yield from ()

    with Patience(DEADLINE_S) as outer:
        outer.together([(servers[0], visit(servers[0], True)), (servers[1], visit(servers[1], False))])
        assert outer.has_time_for(Server())
        given.append(ALLOWANCE.seconds)
    assert [round(each, 9) for each in given] == [DEADLINE_S, 0.7 * DEADLINE_S, 0.7 * DEADLINE_S]


# -- reads of arenas -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("readers", "moving", "mapped"),
    [([1, 1], {}, True), ([1, None], {}, False), ([1, 1], {3: 0}, False), ([], {}, True)],
)
def test_reads_of_mapped_arenas_need_no_deadline(readers: list[Any], moving: dict[int, int], mapped: bool) -> None:
    routes: Any = Routes.__new__(Routes)
    targets = {number: SimpleNamespace(reader=reader) for number, reader in enumerate(readers)}
    routes.router = SimpleNamespace(table=SimpleNamespace(moving=moving), targets=targets, deadline_s=DEADLINE_S)
    assert routes.all_mapped() is mapped
    calls: Any = LargeCalls()
    bounded: list[bool] = []

    def read_many(digests: Sequence[bytes], _sinks: Any) -> list[Any]:
        bounded.append(ALLOWANCE.seconds != math.inf)
        return [LARGE] * len(digests)

    calls._routes, calls._replicas, calls._gets = routes, None, SimpleNamespace(read_many=read_many)
    calls._options = SimpleNamespace(deadline_s=DEADLINE_S)
    resolved: list[Any] = []
    calls._made_large = SimpleNamespace(resolve=lambda *given: resolved.append(given))
    assert calls._read_large([bytes(16)], [None]) == [LARGE]
    assert bounded == [not mapped] and resolved == [([bytes(16)], [None], [LARGE])]


@pytest.mark.parametrize("within", [False, True])
def test_a_shard_that_has_begun_to_move_costs_the_call_no_second_deadline(clock: Clock, within: bool) -> None:
    """By the map all arenas are mapped. The first key is at a silent server by now, and so are the parts."""
    calls: Any = LargeCalls()
    allowed_s: list[float] = []

    def read_many(_digests: Sequence[bytes], _sinks: Any) -> list[Any]:
        clock.pass_s(0.2 * DEADLINE_S)
        lose_all(clock)
        return [UNAVAILABLE, LARGE]

    def resolve(*_: Any) -> None:
        allowed_s.append(ALLOWANCE.seconds)
        lose_all(clock)

    calls._routes = SimpleNamespace(all_mapped=lambda: True, patience=lambda: Patience(DEADLINE_S))
    calls._options, calls._replicas = SimpleNamespace(deadline_s=DEADLINE_S), None
    calls._gets, calls._made_large = SimpleNamespace(read_many=read_many), SimpleNamespace(resolve=resolve)
    began = clock.now
    if within:
        with Patience(DEADLINE_S):
            calls._read_large([bytes(16)] * 2, [None] * 2)
    else:
        calls._read_large([bytes(16)] * 2, [None] * 2)
    assert allowed_s == [0.0]
    assert clock.now - began <= 1.2 * DEADLINE_S + 1e-9


def test_without_a_map_a_read_has_a_deadline() -> None:
    routes: Any = Routes.__new__(Routes)
    routes.router = None
    assert routes.all_mapped() is False

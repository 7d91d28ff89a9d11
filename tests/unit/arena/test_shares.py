"""What each session may hold of grants and hold lines, against the rule put naively; who is asked for idle grants."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from simm.arena.layout import Geometry
from simm.arena.sessions import FAIR, LINES_KEPT, RECALL_AGAIN_MS, Session, SessionTable
from simm.arena.store import Store
from simm.constants import VALUE_BYTES_MAX
from simm.errors import CapacityError
from simm.ipc.arena_files import OwnedArena
from simm.slab import chunk_bytes_for
from simm.wire.messages import Status
from tests.support.consistency import check
from tests.support.store_world import digest_of, new_segment, remove_segment

SIZES = (64, 4096, 65536, 300_000)


@pytest.fixture(scope="module")
def segment() -> Iterator[OwnedArena]:
    """Enough for slabs of all sizes at once."""
    made = new_segment(48 << 20)
    yield made
    remove_segment(made)


def join(store: Store, count: int) -> list[Session]:
    return [store.sessions.open(pid, 1, "a") for pid in range(1, count + 1)]


def allowed(store: Store, session: Session, chunk: int) -> bool:
    """The rule, put naively, for one chunk more."""
    sessions = store.sessions.by_id.values()
    granted = sum(chunk for each in sessions for _, chunk, _ in each.grants.values())
    mine = sum(chunk for _, chunk, _ in session.grants.values())
    lines = sum(len(each.grants) + len(each.pins) for each in sessions)
    left = store.sessions.granted_bytes_max - granted - chunk
    left_lines = store.geometry.hold_lines - lines - 1
    fair = mine + chunk <= FAIR * left and len(session.grants) + len(session.pins) + 1 <= FAIR * left_lines
    return left_lines >= 0 and (fair or not session.grants)


@pytest.mark.parametrize("seed", range(6))
def test_a_session_gets_what_the_rule_allows_and_no_more(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    players = join(store, rng.randint(1, 5))
    short = 0
    for _ in range(600):
        session, size = rng.choice(players), rng.choice(SIZES)
        if session.grants and rng.random() < 0.4:
            numbers = rng.sample(sorted(session.grants), rng.randint(1, len(session.grants)))
            store.sessions.return_grants(session, numbers)
            continue
        chunk, count = chunk_bytes_for(size), rng.choice((1, 1, 3, 40))
        expected = allowed(store, session, chunk)
        got = store.sessions.grant(session, size, count)
        assert bool(got) == expected
        if len(got) < count:
            short += 1
            assert not allowed(store, session, chunk)
    assert short
    check(store)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_busy_sessions_end_with_equal_shares(store: Store, count: int) -> None:
    """Each spends some grants in turn and asks for as much as it can get, whoever came first."""
    players = join(store, count)
    most = store.sessions.granted_bytes_max // 4096
    for _ in range(60):
        for session in players:
            store.sessions.return_grants(session, sorted(session.grants)[: len(session.grants) // 4 + 1])
            store.sessions.grant(session, 4096, most)
    share = most * FAIR / (1 + count * FAIR)
    assert all(share * 0.7 <= len(session.grants) <= share * 1.4 for session in players)


def test_who_comes_late_finds_bytes_and_lines(store: Store) -> None:
    hog, late = join(store, 2)
    while store.sessions.grant(hog, 64, 4096):
        pass
    assert len(store.sessions.grant(late, 4096, 8)) == 8
    assert store.ledger.free_holds > store.geometry.hold_lines // (FAIR + 2)


@pytest.mark.parametrize("slots", [1024, 2048, 100_000])
def test_no_session_pins_most_of_a_table(slots: int) -> None:
    """One that is made for few, large values had as many lines as slots, and a pin of a small value takes one."""
    geometry = Geometry.plan(1 << 30, slots)
    assert geometry.hold_lines * FAIR / (1 + FAIR) <= geometry.slots / 5


def test_pins_of_one_session_leave_lines_for_others(store: Store) -> None:
    hog, late = join(store, 2)
    ((grant, *_),) = store.sessions.grant(hog, 64, 1)
    assert store.commit(hog, [(digest_of("k"), grant, 64, 0, 0, 0)]) == [Status.OK]
    statuses = []
    while not statuses or statuses[-1] == Status.OK:
        statuses.append(store.locate(hog, [digest_of("k")])[0][0])
    assert statuses[-1] == Status.NO_SPACE
    assert store.locate(late, [digest_of("k")])[0][0] == Status.OK
    assert store.sessions.grant(late, 64, 5)


def test_pins_take_half_of_the_data_at_most_and_leave_bytes_for_others(store: Store) -> None:
    """test_issue: views were bounded in number alone, so 64 of them pinned a whole arena of large values."""
    hog, late, last = join(store, 3)
    size, keys = 300_000, []
    while store.space.free_bytes > 8 << 20:
        ((grant, *_),) = store.sessions.grant(hog, size, 1)
        keys.append(digest_of(f"k{len(keys)}"))
        assert store.commit(hog, [(keys[-1], grant, size, 0, 0, 0)]) == [Status.OK]
        store.apply_pending()
    half = store.geometry.data_bytes // 2

    def pin(session: Session) -> int:
        return sum(entry[0] == Status.OK for entry in store.locate(session, keys)) * chunk_bytes_for(size)

    assert half * 0.75 < pin(hog) <= half * FAIR / (FAIR + 1)
    left = half - store.sessions.pinned_bytes
    assert left * 0.75 - size < pin(late) and pin(last) > 0  # who comes late finds a part free
    assert store.sessions.pinned_bytes <= half
    assert store.sessions.grant(last, size, 5)  # and puts find something to evict
    store.sessions.end(hog)
    assert pin(last) > half * 0.5
    check(store)


def test_a_lone_value_may_be_pinned_whatever_its_size(store: Store) -> None:
    first, second = join(store, 2)
    size = store.sessions.pinned_bytes_max - (1 << 20)
    assert size > store.sessions.pinned_bytes_max * FAIR / (FAIR + 1)
    store.sessions.granted_bytes_max = store.geometry.data_bytes
    ((grant, *_),) = store.sessions.grant(first, size, 1)
    assert store.commit(first, [(digest_of("k"), grant, size, 0, 0, 0)]) == [Status.OK]
    assert store.locate(first, [digest_of("k")])[0][0] == Status.OK
    assert store.locate(first, [digest_of("k")])[0][0] == Status.NO_SPACE
    assert store.locate(second, [digest_of("k")])[0][0] == Status.NO_SPACE


def test_no_grant_is_for_more_than_a_value_may_have(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not because the arena has no room for it: the limit here is one that it has room for."""
    monkeypatch.setattr("simm.arena.sessions.VALUE_BYTES_MAX", 1 << 20)
    (session,) = join(store, 1)
    for size in (0, -1, (1 << 20) + 1, VALUE_BYTES_MAX + 1, 1 << 40):
        assert store.sessions.grant(session, size, 1) == []
        store.sessions.want(session, size, 1)
        store.apply_pending()
    assert not session.grants and not session.prepared
    assert len(store.sessions.grant(session, 1 << 20, 1)) == 1, "the control"


# -- recalls -----------------------------------------------------------------------------------------


def test_shortages_go_round_all_who_hold_grants(store: Store) -> None:
    """Also past one that never answers: it is asked, and not counted on."""
    asked: list[int] = []
    store.sessions.recall = lambda session, _bytes: asked.append(session.session)
    stopped, second, third, poor = join(store, 4)
    for session, count in ((stopped, 100), (second, 60), (third, 30), (poor, 1)):
        store.sessions.grant(session, 4096, count)
    many = 10_000
    for _ in range(4):
        store.sessions.grant(poor, 4096, many)
    assert asked == [stopped.session, second.session, third.session]  # each once, within the pause
    asked.clear()
    for session in (second, third):
        store.sessions.return_grants(session, sorted(session.grants)[:1])
    store.now_ms += RECALL_AGAIN_MS
    store.sessions.grant(poor, 4096, many)
    assert set(asked) == {poor.session, stopped.session, second.session} - {poor.session}
    store.now_ms -= 10 * RECALL_AGAIN_MS  # a wall clock may be set back
    asked.clear()
    store.sessions.grant(poor, 4096, many)
    assert asked


def test_failed_puts_are_counted_by_cause(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    session, other = join(store, 2)
    assert set(store.stats()["put_failures"].values()) == {0}
    ((first, *_), (second, *_), (third, *_)) = store.sessions.grant(session, 64, 3)
    entries = [(digest_of("a"), first, 65, 0, 0, 0), (digest_of("b"), first, 64, 0, 0, 0),
               (digest_of("c"), second, 64, 0, 0, 1 << 9), (bytes(16), third, 64, 0, 0, 0)]  # fmt: skip
    assert Status.OK not in store.commit(session, entries)
    ((number, *_),) = store.sessions.grant(session, 64, 1)
    store.shard_words.fence()
    assert store.commit(session, [(digest_of("a"), number, 64, 0, 0, 0)]) == [Status.WRONG_OWNER]
    assert store.sessions.grant(other, 1 << 30, 1) == []
    store.shard_words.take()
    ((number, *_),) = store.sessions.grant(session, 64, 1)
    monkeypatch.setattr(store.table, "publish", lambda *_: None)
    monkeypatch.setattr(store, "_evict_from_sets", lambda _: False)  # all of its set is pinned
    assert store.commit(session, [(digest_of("a"), number, 64, 0, 0, 0)]) == [Status.NO_SPACE]
    assert store.stats()["put_failures"] == {
        "bad_request": 3, "stale_grant": 1, "wrong_owner": 1, "no_room": 1, "table_full": 1, "over_quota": 0,
        "old_epoch": 0,
    }  # fmt: skip


def test_one_process_gets_no_more_by_many_sessions(store: Store) -> None:
    """Each of them got a large grant whatever its share was, until another process got none."""
    size = 2 << 20
    many = [store.sessions.open(1, 1, "a") for _ in range(60)]
    for session in many:
        store.sessions.grant(session, size, 1)
    assert store.sessions.granted_bytes < store.sessions.granted_bytes_max + size
    for pid in (2, 3):
        assert store.sessions.grant(store.sessions.open(pid, 1, "a"), size, 1)
    assert not store.sessions.grant(many[-1], size, 1)
    store.sessions.return_grants(many[0], list(many[0].grants))
    store.sessions.return_grants(many[1], list(many[1].grants))
    assert store.sessions.grant(many[-1], size, 1)


def test_issue_no_process_takes_all_sessions_and_clients_never_those_of_the_server(store: Store) -> None:
    def opened(pid: int, *, serves: bool = False) -> int:
        """Open sessions until there is none; how many there were."""
        for count in itertools.count():
            try:
                store.sessions.open(pid, 1, "a", serves)
            except CapacityError:
                return count
        raise AssertionError

    lines = store.ledger.free_sessions
    counts = [opened(pid) for pid in range(1, 20)]
    assert lines * 2 // 3 < counts[0] <= lines * 4 // 5, "a lone one has nearly all"
    assert counts[1] >= (lines - counts[0] - LINES_KEPT) // 2, "and one that comes late finds some left"
    assert sum(counts) == lines - LINES_KEPT
    assert opened(99, serves=True) == LINES_KEPT
    for session in list(store.sessions.by_id.values()):
        store.sessions.close(session)
    assert store.ledger.free_sessions == lines and opened(7) == counts[0]


@pytest.mark.parametrize("prepared", [False, True], ids=["GRANT", "wanted with a COMMIT"])
@pytest.mark.parametrize("sizes", ["alike", "falling"])
def test_a_request_without_room_costs_a_few_searches(
    store: Store, prepared: bool, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 wants, each of which asked all sessions for grants, held the worker up for seconds."""
    players = join(store, 40)
    greedy = players[0]
    store.sessions.grant(greedy, 4096, 1 << 20)  # all that it may have
    tries: list[int] = []
    real = type(store.sessions).allocate

    def allocate(self: SessionTable, session: Session, size: int, count: int) -> list[tuple[int, int, int]]:
        tries.append(size)
        return real(self, session, size, count)

    monkeypatch.setattr(SessionTable, "allocate", allocate)
    wants = [(VALUE_BYTES_MAX - 16384 * number if sizes == "falling" else 4096, 1) for number in range(4096)]
    if prepared:
        for size, count in wants:
            store.sessions.want(greedy, size, count)
        store.apply_pending()
    else:
        got, all_came = store.sessions.grant_each(greedy, wants)
        assert not all_came and len(got) < 8
    assert len(tries) < 30
    check(store)


def test_what_is_smaller_is_still_looked_for(store: Store) -> None:
    """One value is too large, and the others of the request get their chunks."""
    (session,) = join(store, 1)
    got, all_came = store.sessions.grant_each(session, [(64, 2), (VALUE_BYTES_MAX, 3), (4096, 2), (VALUE_BYTES_MAX, 1)])
    assert not all_came and sorted(chunk for _, _, chunk in got) == [64, 64, 4096, 4096]


def test_an_unpin_asks_no_closed_session_for_what_it_has_not(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have thousands of them, and one request thousands of ids. What it has is found all the same."""
    sessions = store.sessions
    mine = sessions.open(7, 1, "a")
    (grant, *_), = sessions.grant(mine, 64, 1)
    assert store.commit(mine, [(digest_of("k"), grant, 64, 0, 0, 0)]) == [Status.OK]
    store.apply_pending()
    ended: list[Session] = []
    pins: list[int] = []
    for number in range(50):
        session = sessions.open(7 if number % 2 else 8, 1, "a")
        ((*_, pin),) = store.locate(session, [digest_of("k")])
        session.closed = True
        ended.append(session)
        pins.append(pin)
    asked: list[Session] = []
    unpin = sessions.unpin
    monkeypatch.setattr(sessions, "unpin", lambda by, ids: asked.append(by) or unpin(by, ids))
    unknown = list(range(1 << 60, (1 << 60) + 4000))
    assert sessions.unpin_for(mine, unknown) == 0 and asked == [mine]
    asked.clear()
    assert sessions.unpin_for(mine, [*unknown, *pins[:9]]) == 4, "those of its own process"
    assert asked == [mine, *ended[1:9:2]]
    assert [bool(session.pins) for session in ended[:10]] == [True, False] * 4 + [True, True]
    for session in ended:
        unpin(session, list(session.pins))

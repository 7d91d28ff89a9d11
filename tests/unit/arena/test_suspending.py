"""An arena whose worker has died is suspended from its vault: the next server has what a successor would have had.

Whoever does it dies at every point, too: the next server finds an arena that is not suspended, or a right one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from simm.arena.hashing import shard_of
from simm.arena.layout import HEADER_BYTES, Geometry, State, Word
from simm.arena.ledger import Ledger
from simm.arena.sessions import SessionTable
from simm.arena.shard_words import ShardWords
from simm.arena.store import Store
from simm.arena.vault import Vault, suspend
from simm.cluster.assignment import DROP_ALL, FENCE
from simm.constants import SHARD_COUNT
from simm.errors import SegmentError
from simm.ipc.arena_files import OwnedArena
from simm.table import Table
from simm.wire.messages import ShardRole, Shards
from simm.wire.shard_set import FROZEN, MOVING
from tests.support.consistency import check
from tests.support.crash import chosen
from tests.support.store_world import digest_of
from tests.support.trace_replay import Tape

KEYS = [digest_of(f"s{number}") for number in range(40)]
SIZE = 3000
CLUSTER = 7
#: The epoch of the last map that the worker took, and of one that it missed; since when it has its shards.
TAKEN, MISSED, SINCE = 5, 9, 3
OWN = shard_of(KEYS[0])


class Cut(BaseException):
    """The worker ends here."""


def order(*changes: tuple[bytes, ShardRole, int], epoch: int = MISSED, cluster: int = CLUSTER) -> Shards:
    """All shards since SINCE, but those of some keys with another role and since another epoch."""
    since = np.full(SHARD_COUNT, SINCE, "<u8")
    roles = np.full(SHARD_COUNT, int(ShardRole.OWNER), np.uint8)
    for key, role, at in changes:
        since[shard_of(key)], roles[shard_of(key)] = at, role
    return Shards(epoch, since.tobytes(), roles.tobytes(), cluster)


MOVES_OUT = "one that moves them out"
#: What the worker has missed; None: it knows the newest map.
ORDERS: dict[str, Shards | None] = {
    "none": None,
    "a fence": FENCE,
    "the same map": order(epoch=TAKEN),
    "a map that changes nothing": order(),
    "one that takes shards away": order(*((key, ShardRole.NONE, 0) for key in KEYS[:20])),
    "one that gives them back later": order(*((key, ShardRole.OWNER, 8) for key in KEYS[:20])),
    MOVES_OUT: order(*((key, ShardRole.OUTGOING, 9) for key in KEYS[:20])),
    "one by which they come back": order(*((key, ShardRole.INCOMING, 8) for key in KEYS[:20])),
    "one by which they go again": order(*((key, ShardRole.OUTGOING, 2) for key in KEYS[:20])),
}


class Dead:
    """The arena and the vault of a worker with KEYS that has died."""

    def __init__(self, segment: OwnedArena) -> None:
        self.segment = segment
        tables = Geometry.plan(segment.size).data_offset
        segment.buf[:tables] = bytes(tables)
        self.words = segment.buf[:HEADER_BYTES].cast("Q")
        self.vault = Vault()
        self.store = store = Store.create(segment.mm, vault=self.vault)
        first = order(epoch=TAKEN)
        store.begin_shards(first.epoch, first.since, first.roles, CLUSTER)
        store.open()
        session = store.sessions.open(1, 2, "a name")
        for at, key in enumerate(KEYS):
            ((grant, offset, _),) = store.sessions.grant(session, SIZE, 1)
            segment.buf[offset : offset + SIZE] = bytes([at + 1]) * SIZE
            assert store.commit(session, [(key, grant, SIZE, 0, 0, 0)]) == [0]
        store.apply_pending()
        store.sessions.grant(session, SIZE, 5)
        self.ends = geometry_end(store.geometry)
        self.kept: tuple[bytes, ...] = ()

    def keep(self) -> None:
        """Remember all that the death has left."""
        vault = self.vault
        self.kept = bytes(self.segment.buf[: self.ends]), bytes(vault.header), bytes(vault.shards), bytes(vault.ledger)

    def again(self) -> None:
        """Set all of it again."""
        meta, header, shards, ledger = self.kept
        self.segment.buf[: self.ends] = meta
        self.vault.header[:] = memoryview(header).cast("Q")
        self.vault.shards[:] = memoryview(shards).cast("Q")
        self.vault.ledger[:] = ledger

    def recovered(self, vault: Vault, missed: Shards | None) -> dict[bytes, int]:
        """Return what a worker has that recovers the arena and takes the map, with the shards' words.

        Each value is the right one.
        """
        store = Store.recover(self.segment.mm, self.segment.name, vault=vault)
        assert not any("all entries dropped" in note for note in store.notes)
        if missed is not None and missed.since:
            store.begin_shards(missed.epoch, missed.since, missed.roles, missed.cluster)
            while store.drop_some():
                pass
        check(store)
        found = {}
        for at, key in enumerate(KEYS):
            slot = store.table.lookup(key)
            if slot >= 0:
                entry = store.table.entry(slot)
                assert bytes(self.segment.buf[entry.offset : entry.offset + entry.length]) == bytes([at + 1]) * SIZE
                found[key] = int(store.shards[shard_of(key)])
        self.store = store
        return found


def geometry_end(geometry: Geometry) -> int:
    """Return where the metadata ends, in whole words."""
    return geometry.ledger_offset + geometry.ledger_bytes + 7 & ~7


@pytest.fixture
def dead(segment: OwnedArena) -> Iterator[Dead]:
    yield Dead(segment)


def serving(_dead: Dead, _monkeypatch: pytest.MonkeyPatch) -> None:
    """It served."""


def recovering(step: type, name: str) -> Callable[[Dead, pytest.MonkeyPatch], None]:
    """It was a successor, and recovered the arena."""

    def end(dead: Dead, monkeypatch: pytest.MonkeyPatch) -> None:
        def cut(*_: object) -> None:
            raise Cut

        with monkeypatch.context() as patched, pytest.raises(Cut):
            patched.setattr(step, name, cut)
            Store.recover(dead.segment.mm, dead.segment.name, vault=dead.vault)
        assert dead.words[Word.STATE] == State.OPEN

    return end


def suspending(dead: Dead, _monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told to end, and the last store was missing."""
    dead.store.suspend()
    dead.words[Word.STATE] = State.OPEN


def suspended(dead: Dead, _monkeypatch: pytest.MonkeyPatch) -> None:
    """It has ended in time, but may have missed a map."""
    dead.store.suspend()


def untouched(dead: Dead, _monkeypatch: pytest.MonkeyPatch) -> None:
    """A server before has suspended it, and no worker of this one has taken it over yet."""
    dead.store.suspend()
    dead.vault = Vault()


def taken_over(dead: Dead, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and its first worker was about to recover it."""
    dead.store.suspend()
    dead.vault = Vault()

    def cut(*_: object) -> None:
        raise Cut

    with monkeypatch.context() as patched, pytest.raises(Cut):
        patched.setattr(SessionTable, "restore", cut)
        Store.recover(dead.segment.mm, dead.segment.name, vault=dead.vault)
    assert dead.words[Word.STATE] == State.SUSPENDED


def taking(dead: Dead, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had noted the epoch of a map that moves shards out, and was about to take what that gives."""

    def cut(*_: object) -> None:
        raise Cut

    newest = ORDERS[MOVES_OUT]
    assert newest is not None
    with monkeypatch.context() as patched, pytest.raises(Cut):
        patched.setattr(ShardWords, "take", cut)
        dead.store.begin_shards(newest.epoch, newest.since, newest.roles, newest.cluster)
    assert dead.words[Word.EPOCH] == MISSED


def moving(dead: Dead, _monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard moved in, and another one was frozen for its next owner."""
    words = dead.store.shard_words
    words._store(OWN, SINCE | MOVING)
    words._recount()
    assert words.freeze(MISSED, [shard_of(KEYS[-1])], TAKEN) is not None


ENDS: dict[str, Callable[[Dead, pytest.MonkeyPatch], None]] = {
    "serving": serving, "moving": moving, "suspending": suspending, "suspended": suspended, "untouched": untouched,
    "taken over": taken_over, "recovering slots": recovering(Table, "recover"),
    "recovering the ledger": recovering(Ledger, "recover"), "recovering entries": recovering(Table, "live"),
    "recovering sessions": recovering(SessionTable, "restore"),
}  # fmt: skip


@pytest.mark.parametrize("missed", ORDERS)
@pytest.mark.parametrize("end", ENDS)
def test_the_next_server_has_what_a_successor_would_have(
    dead: Dead, monkeypatch: pytest.MonkeyPatch, end: str, missed: str
) -> None:
    ENDS[end](dead, monkeypatch)
    dead.keep()
    found = dead.recovered(dead.vault, ORDERS[missed])
    words = dead.store.shards.tobytes()
    assert set(KEYS[21:-1]) <= set(found) <= set(KEYS)
    dead.again()
    assert suspend(dead.segment.mm, dead.segment.name, dead.vault, ORDERS[missed])
    newest = ORDERS[missed]
    assert dead.words[Word.STATE] == State.SUSPENDED
    assert dead.words[Word.EPOCH] == max(TAKEN, 0 if newest is None else newest.epoch)
    assert dead.recovered(Vault(), ORDERS[missed]) == found and dead.store.shards.tobytes() == words
    assert [each.namespace for each in dead.store.sessions.by_id.values()] and dead.store.cluster == CLUSTER


@pytest.mark.parametrize(
    ("end", "missed"),
    [*(("serving", each) for each in ORDERS if "them" in each or "they" in each), ("taking", MOVES_OUT)],
)
def test_before_its_map_comes_nothing_is_there_that_may_be_superseded(
    dead: Dead, monkeypatch: pytest.MonkeyPatch, end: str, missed: str
) -> None:
    """The next server says that its arenas know the map: so no shard has a word that the map does not mean."""
    newest = ORDERS[missed]
    assert newest is not None
    (taking if end == "taking" else ENDS[end])(dead, monkeypatch)
    dead.keep()
    assert suspend(dead.segment.mm, dead.segment.name, dead.vault, newest)
    found = dead.recovered(Vault(), None)
    since = np.frombuffer(newest.since, "<u8")
    roles = np.frombuffer(newest.roles, np.uint8)
    for shard, word in enumerate(dead.store.shards.tolist()):
        frozen = roles[shard] == ShardRole.OUTGOING and word == since[shard] | np.uint64(FROZEN)
        assert word in (0, since[shard]) or frozen, "neither its own since then, nor what only the next owner reads"
    lost = {key for key in KEYS if not dead.store.shards[shard_of(key)]}
    assert set(found) == set(KEYS) - lost and bool(lost) == (missed != MOVES_OUT)


@pytest.mark.parametrize("missed", ["none", "one that takes shards away", "one that gives them back later"])
@pytest.mark.parametrize("end", ["serving", "suspending", "suspended", "untouched", "taken over", "recovering entries"])
def test_whoever_suspends_it_may_die_at_any_point(
    dead: Dead, monkeypatch: pytest.MonkeyPatch, end: str, missed: str
) -> None:
    """The arena is not suspended, or it is right: as it was, and known to be so, or complete."""
    ENDS[end](dead, monkeypatch)
    dead.keep()
    before = dead.words[Word.STATE]
    alone = dead.recovered(dead.vault, None)
    dead.again()
    tape = Tape(dead.segment.buf, dead.ends)
    assert tape.record(lambda: suspend(dead.segment.mm, dead.segment.name, dead.vault, ORDERS[missed]))
    complete = dead.recovered(Vault(), None)
    states = set()
    for frame in chosen(tape.frames, 40):
        tape.show(frame)
        states.add(dead.words[Word.STATE])
        if dead.words[Word.STATE] != State.SUSPENDED:
            continue
        # Whatever map comes next, it goes by the words, as far as the arena is known to have seen the one before.
        assert dead.recovered(Vault(), None) == (alone if dead.words[Word.EPOCH] == TAKEN else complete)
    assert states <= {before, State.OPEN, State.SUSPENDED} and State.SUSPENDED in states


def test_what_is_not_kept(dead: Dead) -> None:
    """An arena that is closed, of no cluster, or of another one than the newest map."""
    dead.keep()
    name, mm = dead.segment.name, dead.segment.mm
    for missed in (order(cluster=8), DROP_ALL):
        assert not suspend(mm, name, dead.vault, missed) and dead.words[Word.STATE] == State.OPEN
    assert suspend(mm, name, dead.vault), "the control"
    dead.again()
    dead.store.begin_shards(DROP_ALL.epoch, DROP_ALL.since, DROP_ALL.roles, DROP_ALL.cluster)
    assert not suspend(mm, name, dead.vault)
    dead.again()
    dead.store.close()
    assert not suspend(mm, name, dead.vault) and dead.words[Word.STATE] == State.CLOSED
    dead.again()
    assert not suspend(mm, name, Vault()), "nobody has taken it over, and it was not suspended"


def test_one_that_is_foreign_is_refused(dead: Dead) -> None:
    dead.store.suspend()
    dead.words[Word.SIZE] = 1 << 50
    with pytest.raises(SegmentError):
        suspend(dead.segment.mm, dead.segment.name, Vault(), order())
    assert suspend(dead.segment.mm, dead.segment.name, Vault()), "unread: the next start looks at it"


def test_mutation_words_that_a_map_gives_would_make_old_entries_valid(
    dead: Dead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A map took a shard away and another one gave it back: others may have stored newer values between."""
    newest = ORDERS["one that gives them back later"]
    assert newest is not None
    dead.keep()
    assert suspend(dead.segment.mm, dead.segment.name, dead.vault, newest)
    assert KEYS[0] not in dead.recovered(Vault(), newest)
    dead.again()
    real = vars(ShardWords)["retire"]

    def retire_and_take(self: ShardWords, *arguments: object) -> bool:
        done = bool(real(self, *arguments))
        self.take()
        return done

    with monkeypatch.context() as patched:
        patched.setattr(ShardWords, "retire", retire_and_take)
        assert suspend(dead.segment.mm, dead.segment.name, dead.vault, newest)
    assert KEYS[0] in dead.recovered(Vault(), newest)
    assert 0 < dead.store.shards[OWN] < FROZEN

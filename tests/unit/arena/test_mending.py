"""A worker with a vault: whatever others store into the arena, it goes on, and so does its successor."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from simm.arena.layout import HEADER_BYTES, HEADER_WORDS, SHARDS_BYTES, Geometry, State, Word
from simm.arena.ledger import Ledger
from simm.arena.sessions import Session
from simm.arena.space import Space
from simm.arena.store import Store
from simm.arena.vault import Mender, Vault
from simm.constants import SHARD_COUNT, SLOT_BYTES
from simm.errors import CorruptionError, SimmError
from simm.ipc.arena_files import OwnedArena
from simm.table import Table
from simm.wire.messages import ShardRole, Status
from simm.wire.shard_set import FROZEN, MOVING
from tests.support.consistency import check
from tests.support.shards import set_shards
from tests.support.store_world import ALL_SHARDS, digest_of, owned

KEYS = [digest_of(f"m{number}") for number in range(60)]
SIZE = 5000


class Owner:
    """A worker's store with a vault, a client, and its values."""

    def __init__(self, segment: OwnedArena) -> None:
        self.segment = segment
        self.buf = segment.buf
        tables = Geometry.plan(segment.size).data_offset
        self.buf[:tables] = bytes(tables)
        self.vault = Vault()
        self.store = Store.create(segment.mm, vault=self.vault)
        self.due: list[Callable[[], None]] = []
        self.said: list[tuple[int, str]] = []
        self.mender = self.new_mender()
        self.store.open()
        set_shards(self.store, 1, *owned(ALL_SHARDS, 1), 7)
        self.session: Session = self.store.sessions.open(1, 2, "a name")
        assert self.put(KEYS) == {Status.OK}

    def put(self, digests: list[bytes]) -> set[int]:
        """Store values; return the statuses."""
        grants = self.store.sessions.grant(self.session, SIZE, len(digests))
        assert len(grants) == len(digests)
        for digest, (_, offset, _chunk) in zip(digests, grants):
            self.buf[offset : offset + SIZE] = digest * (SIZE // 16) + digest[: SIZE % 16]
        entries = [(digest, number, SIZE, 0, 0, 0) for digest, (number, *_) in zip(digests, grants)]
        statuses = self.store.commit(self.session, entries)
        self.store.apply_pending()
        return set(statuses)

    def new_mender(self) -> Mender:
        def later(_seconds: float, turn: Callable[[], None]) -> None:
            self.due.append(turn)

        return Mender(self.store, later, lambda count, what: self.said.append((count, what)))

    def successor(self) -> None:
        """The worker dies, and another one recovers."""
        self.store = Store.recover(self.segment.mm, self.segment.name, vault=self.vault)
        self.store.open()
        self.due.clear()
        self.mender = self.new_mender()
        self.session = next(iter(self.store.sessions.by_id.values()))

    def mend(self) -> None:
        """Do what the worker does at its heartbeats, until nothing is left to do."""
        self.mender.maintain()
        while self.due:
            self.due.pop()()

    def found(self) -> int:
        """Return how many keys have a value, each the right one."""
        count = 0
        for digest in KEYS:
            slot = self.store.table.lookup(digest)
            if slot >= 0:
                entry = self.store.table.entry(slot)
                assert self.store.space.offset(slot) == entry.offset - self.store.geometry.data_offset
                count += 1
        return count

    def metadata(self) -> bytes:
        """Return header, without the heartbeat, and shard words, as readers see them."""
        words = bytearray(self.buf[: HEADER_BYTES + SHARDS_BYTES])
        words[Word.HEARTBEAT * 8 : Word.HEARTBEAT * 8 + 8] = bytes(8)
        return bytes(words)

    def goes_on(self) -> None:
        """It takes values and gives room back."""
        check(self.store)
        set_shards(self.store, 2, *owned(ALL_SHARDS, 1), 7)
        more = [digest_of(f"more {number}") for number in range(20)]
        assert self.put(more) == {Status.OK}
        assert self.store.delete(more) == [Status.OK] * 20
        check(self.store)


@pytest.fixture
def owner(segment: OwnedArena) -> Iterator[Owner]:
    yield Owner(segment)


def scribble(owner: Owner, rng: random.Random, start: int, stop: int, count: int) -> None:
    for _ in range(count):
        at = rng.randrange(start, stop)
        piece = rng.randbytes(rng.randint(1, 64)) if rng.random() < 0.8 else bytes(64)
        piece = piece[: stop - at]
        owner.buf[at : at + len(piece)] = piece


def test_header_and_shard_words_are_mended(owner: Owner) -> None:
    before = owner.metadata()
    rng = random.Random(1)
    for _ in range(50):
        scribble(owner, rng, 0, HEADER_WORDS * 8, 3)
        scribble(owner, rng, HEADER_BYTES, HEADER_BYTES + SHARDS_BYTES, 20)
        owner.mender.maintain()
        assert owner.metadata()[: HEADER_WORDS * 8] == before[: HEADER_WORDS * 8]
        assert owner.metadata()[HEADER_BYTES:] == before[HEADER_BYTES:]
    assert owner.mender.mended > 50
    assert owner.store.cluster == 7 and owner.store.epoch == 1
    owner.mend()
    assert owner.found() == len(KEYS), "no slot was touched"
    owner.goes_on()


def test_what_is_believed_of_shards_is_not_in_the_arena(owner: Owner) -> None:
    """No word that somebody stores lets a mutation in, or keeps one out."""
    store = owner.store
    shown = owner.buf[HEADER_BYTES : HEADER_BYTES + SHARDS_BYTES].cast("Q")
    set_shards(store, 2, bytes(8 * SHARD_COUNT), bytes([ShardRole.NONE]) * SHARD_COUNT, 7)
    shown[:] = memoryview(bytes(b"\1\0\0\0\0\0\0\0" * SHARD_COUNT)).cast("Q")
    assert owner.put(KEYS[:3]) == {Status.WRONG_OWNER} and store.delete(KEYS[:1]) == [Status.WRONG_OWNER]
    set_shards(store, 3, *owned(ALL_SHARDS, 3), 7)
    shown[:] = memoryview(bytes(SHARDS_BYTES)).cast("Q")
    assert owner.put(KEYS[:3]) == {Status.OK}
    shown[:] = memoryview(b"\xff" * SHARDS_BYTES).cast("Q")
    assert owner.put(KEYS[3:5]) == {Status.OK} and not store.shard_words.frozen
    owner.mender.maintain()
    assert set(shown) == {3}


@pytest.mark.parametrize("seed", range(30))
def test_slots_are_mended_while_the_worker_serves(owner: Owner, seed: int) -> None:
    """Only the digest, but for its tag, and the value's bytes, checksum, flags and times are its word alone."""
    rng = random.Random(seed)
    geometry = owner.store.geometry
    for _ in range(rng.choice((1, 10, 300))):
        slot = rng.randrange(geometry.slots) if rng.random() < 0.5 else owner.store.table.lookup(rng.choice(KEYS))
        start = geometry.slots_offset + max(slot, 0) * SLOT_BYTES
        scribble(owner, rng, start, start + 48, 1)
    owner.mender._at = 0
    owner.mend()
    owner.found()
    check(owner.store)
    owner.said.clear()
    owner.mend()
    assert not owner.said and owner.mender._spoilt(0, geometry.slots) == []
    owner.goes_on()
    for digest in KEYS:
        owner.store.delete([digest])
    assert owner.mender._spoilt(0, geometry.slots) == []


def test_control_a_slot_that_is_not_mended_is_seen(owner: Owner) -> None:
    at = owner.store.geometry.slots_offset + owner.store.table.lookup(KEYS[0]) * SLOT_BYTES
    owner.buf[at + 24 : at + 32] = bytes(8)
    with pytest.raises((AssertionError, SimmError)):
        check(owner.store)
    owner.mend()  # no round was due
    with pytest.raises((AssertionError, SimmError)):
        check(owner.store)
    owner.mender._at = 0
    owner.mend()
    check(owner.store)
    assert owner.mender.mended == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_successor_takes_over_what_is_left(owner: Owner, seed: int) -> None:
    """All of the metadata may be hit. Shards, sessions, grants and pins are what they were."""
    rng = random.Random(seed)
    geometry = owner.store.geometry
    grants = owner.store.sessions.grant(owner.session, SIZE, 5)
    pins = [entry[5] for entry in owner.store.locate(owner.session, KEYS[:3])]
    held = {offset for _, offset, _ in grants}
    before = owner.metadata()
    scribble(owner, rng, 0, geometry.data_offset, rng.choice((10, 1000, 20_000)))
    with contextlib.suppress(CorruptionError):  # as if it had met one of them, or none
        owner.store.delete(KEYS[20:30])
    words = owner.store.shards.tolist()
    owner.successor()
    assert owner.store.shards.tolist() == words and owner.store.geometry == geometry
    assert owner.store.incarnation == 2 and owner.store.cluster == 7
    assert owner.metadata()[HEADER_BYTES:] == before[HEADER_BYTES:]
    # A slot that names a granted chunk by chance ends the grant. Nobody else gets the chunk while the slot is there.
    mine = {offset for offset, *_ in owner.session.grants.values()}
    assert mine <= held and set(owner.session.pins) <= set(pins)
    assert list(owner.store.ledger.names.values()) == ["a name"]
    owner.mend()
    owner.goes_on()


def test_a_recovery_that_fails_starts_without_entries(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    grants = owner.store.sessions.grant(owner.session, SIZE, 5)
    real = Space.restore
    calls = []

    def restore(self: Space, *arguments: object) -> list[tuple[int, str]]:
        calls.append(1)
        if len(calls) == 1:
            raise IndexError("it changed while it was read")
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Space, "restore", restore)
    owner.successor()
    assert owner.found() == 0 == owner.store.table.entries
    assert any("all entries dropped" in note for note in owner.store.notes)
    assert set(owner.session.grants) == {number for number, *_ in grants}, "clients may write there still"
    owner.goes_on()


def test_issue_without_threads_a_recovery_keeps_all_entries(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's successor could not start the thread that beats, and emptied the arena for that."""

    def start(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    owner.successor()
    assert owner.found() == len(KEYS) and not owner.store.notes


@pytest.mark.parametrize("step", [(Table, "live"), (Ledger, "recover"), (Table, "recover")], ids=repr)
@pytest.mark.parametrize("lacking", [MemoryError(), OSError(24, "no descriptor"), RuntimeError("no thread")], ids=repr)
def test_issue_what_the_system_lacks_costs_no_entry(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, step: tuple[type, str], lacking: Exception
) -> None:
    """The recovery fails, and the next one has all. Control, above: what the slots may have caused empties them."""

    def fail(_self: object, *_arguments: object) -> None:
        raise lacking

    with monkeypatch.context() as patched:
        patched.setattr(*step, fail)
        with pytest.raises(type(lacking)):
            owner.successor()
    owner.successor()
    assert owner.found() == len(KEYS) and not owner.store.notes


def test_the_end_of_a_successor_without_a_vault(owner: Owner) -> None:
    """Control: without it the same damage is believed, or is the end."""
    scribble(owner, random.Random(1), 0, HEADER_WORDS * 8, 20)
    with pytest.raises(Exception, match=r"magic|layout|contradicts"):
        Store.recover(owner.segment.mm, owner.segment.name)
    owner.successor()
    assert owner.found() == len(KEYS)


@pytest.mark.parametrize("kind", ["moving", "frozen"])
def test_a_suspended_arena_is_complete(owner: Owner, kind: str) -> None:
    """What the vault had is in the arena when the server ends, and in the next one's vault."""
    since, roles = owned(ALL_SHARDS, 1)
    if kind == "moving":
        set_shards(owner.store, 2, since, bytes([ShardRole.INCOMING]) + roles[1:], 7)
        owner.store.shard_words._store(0, 1 | MOVING)
    else:
        owner.store.freeze(2, [0])
    grants = owner.store.sessions.grant(owner.session, SIZE, 5)
    scribble(owner, random.Random(1), 0, HEADER_WORDS * 8, 20)
    scribble(owner, random.Random(1), owner.store.geometry.ledger_offset, owner.store.geometry.data_offset, 500)
    owner.store.suspend()
    words = owner.store.shards.tolist()
    assert owner.buf[:HEADER_BYTES].cast("Q")[Word.STATE] == State.SUSPENDED
    owner.vault = Vault()
    owner.successor()
    assert owner.store.shards.tolist() == [word & ~MOVING for word in words]
    assert (owner.store.shards[0] >= FROZEN) == (kind == "frozen")
    assert set(owner.session.grants) == {number for number, *_ in grants}
    assert list(owner.store.ledger.names.values()) == ["a name"]
    assert owner.store.cluster == 7 and owner.found() >= len(KEYS) - 1


def test_a_spoilt_slot_ends_fall_backs(owner: Owner) -> None:
    """Its key is not known, so it cannot be remembered as dropped: the previous owner might have an older value."""
    words = owner.store.shard_words
    words._store(5, 1 | MOVING)
    words._recount()
    slot = owner.store.table.lookup(KEYS[0])
    at = owner.store.geometry.slots_offset + slot * SLOT_BYTES
    owner.buf[at + 24 : at + 32] = b"\xff" * 8
    owner.mender._at = 0
    owner.mend()
    assert owner.store.table.lookup(KEYS[0]) < 0 and not words.moving


def test_namespaces_are_shown_again(owner: Owner) -> None:
    at = owner.store.geometry.ledger_offset + 128
    line = bytes(owner.buf[at : at + 14])
    assert line[8:] == b"a name"
    owner.buf[at : at + 14] = b"\xff" * 14
    owner.mender.maintain()
    assert owner.said == [(1, "words")]
    assert bytes(owner.buf[at : at + 14]) == line

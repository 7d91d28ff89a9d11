"""Mutation tests: each removes one safety check, and what the suite looks with must then find a violation.

Every interleaving is scripted. ``test_all_is_well_with_all_checks`` runs the same scripts on the code as it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import simm.arena.sessions
import simm.ipc.session
from simm.arena.ledger import GRANT, Ledger
from simm.arena.reader import ArenaReader
from simm.arena.sessions import Session, SessionTable
from simm.arena.shard_words import ShardWords
from simm.arena.space import Space
from simm.arena.store import Store
from simm.errors import CorruptionError, RemoteProtocolError, TransportError
from simm.ipc.arena_files import OwnedArena
from simm.ipc.commit_ring import HEAD, SLOTS, TAIL, Ring
from simm.ipc.session import WorkerSession
from simm.rpc import encode
from simm.server.worker import Worker
from simm.slab import chunk_bytes_for
from simm.table import Table
from simm.wire import messages as M
from simm.wire.one_key import parse_commit_one
from simm.wire.shard_set import EPOCH_MASK, epoch_limit
from tests.support import crash, move_scripts, store_moves
from tests.support.crash import (
    A,
    B,
    C,
    Cut,
    die_everywhere,
    read_a_lost_shard,
    read_everywhere,
    reuse_of_a_chunk,
    small,
)
from tests.support.dose import dose
from tests.support.invariants import InvariantViolation
from tests.support.store_world import Pin, Player, World, digest_of, is_value, new_segment, remove_segment
from tests.support.worker_thread import WorkerThread

MIB = 1 << 20
KIB = 1 << 10


# -- scripts: each raises when it sees a violation -----------------------------------------------------


def stopped_reader(segment: OwnedArena) -> None:
    """A reader is stopped at each of its steps while its value's chunk passes to another tenant."""
    world = World(segment, slots=64)
    tape, contents = reuse_of_a_chunk(world, lambda player: world.store.delete([A]))
    old = next(iter(contents[0].values()))
    small(tape, contents, 5)
    read_everywhere(world, tape, contents, lambda result: not isinstance(result, bytes) or result == old)


def stale_shard(segment: OwnedArena) -> None:
    """A shard is given up; its entry is still there for a while."""
    read_a_lost_shard(World(segment, slots=64))


def late_write(world: World, player: Player, number: int) -> None:
    """``player`` writes into its grant once more, long after; others have used all the room there is meanwhile."""
    grant = player.grants[number]
    other = Player(world.store.sessions.open(1, 1, "world"))
    for key in range(40):
        digest = digest_of(f"late {key}")
        for new, offset, chunk in world.store.sessions.grant(other.session, 300 * KIB, 1):
            world.fill(offset, chunk, digest)
            world.store.commit(other.session, [(digest, new, chunk, 0, 0, 0)])
    world.fill(grant.offset, grant.chunk, b"late write......")
    for key in range(40):
        digest = digest_of(f"late {key}")
        data = world.read(digest)
        if data is not None and data[:16] != digest:
            raise InvariantViolation("a late write went into another's value")


def broken_connection(segment: OwnedArena) -> None:
    """A client's connection ends while it is copying."""
    world = World(segment, slots=64)
    player = world.join()
    (number,) = world.grant(player, 300 * KIB)
    world.store.sessions.close(player.session)
    late_write(world, player, number)


def dead_worker(segment: OwnedArena) -> None:
    """The worker dies while a client is copying; the next one recovers."""
    world = World(segment, slots=64)
    player = world.join()
    (number,) = world.grant(player, 300 * KIB)
    world.store = Store.recover(segment.mm, segment.name)
    world.set_shards(world.mine)
    late_write(world, player, number)


def dead_overwrite(segment: OwnedArena) -> None:
    """The worker dies at every point of an overwrite."""
    die_everywhere(segment, crash.overwrite, twice=False)


def lost_entries(segment: OwnedArena) -> None:
    """The worker dies at every point of giving a shard up."""
    die_everywhere(segment, crash.lose_shards, twice=False)


def commit_twice(segment: OwnedArena) -> None:
    """A commit is sent twice, under two keys: say, by a client that got no answer and tried again."""
    world = World(segment, slots=64)
    player = world.join()
    (number,) = world.grant(player, 4096)
    grant = player.grants[number]
    for digest in (A, B):
        world.store.commit(player.session, [(digest, number, 4096, 0, 0, 0)])
        with contextlib.suppress(CorruptionError):  # bookkeeping; what counts is what readers see
            world.store.apply_pending()
    if world.store.table.lookup(B) >= 0:
        world.store.delete([A])
        for _, offset, chunk in world.store.sessions.grant(player.session, 4096, 100):
            world.fill(offset, chunk, b"the next tenant.")
        data = world.read(B)
        if data is not None and data != bytes(world.data[grant.offset : grant.offset]) + grant.token * 256:
            raise InvariantViolation("an entry's chunk was given away")


def pinned_value(segment: OwnedArena) -> None:
    """A value is being looked at while it is deleted and all room is used."""
    world = World(segment, slots=64)
    player = world.join()
    world.put(player, A, 300 * KIB)
    ((_, _, length, _, offset, _),) = world.store.locate(player.session, [A])
    pin = Pin(offset, world.values[A])
    world.store.delete([A])
    for key in range(60):
        for new, at, chunk in world.store.sessions.grant(player.session, 300 * KIB, 1):
            world.fill(at, chunk, b"another value...")
            world.store.commit(player.session, [(digest_of(f"other {key}"), new, chunk, 0, 0, 0)])
    if not is_value(world.data[pin.offset : pin.offset + length], pin.value):
        raise InvariantViolation("a pinned value was overwritten")


def hostile_tail(_segment: OwnedArena) -> None:
    """A client sets its ring's tail back: old frames must not be served again."""
    ring, fd = Ring.create()
    server = Ring.attach(fd)
    try:
        for number in range(SLOTS):  # every slot has an old frame then
            ring.post(encode(M.Ping(number)))
            if server.next_request() is None:
                raise InvariantViolation("a request is not seen")
            server.answer(b"")
        ring.words[TAIL] = ring.words[HEAD] - 1
        for take in (server.next_commit, server.next_request):
            with contextlib.suppress(RemoteProtocolError):
                if take() is not None:
                    raise InvariantViolation("an old frame is served again")
    finally:
        ring.close()
        server.close()


def guest_copy(_segment: OwnedArena) -> None:
    """A copy continues after its session broke; the process reconnects and returns what it has finished."""
    with WorkerThread() as worker:
        first = worker.session()
        first.ask([(MIB, 1)])
        grant = first.pool.take(MIB)
        assert grant is not None
        first.begin_copy()
        first.close(clean=False)
        second = worker.session()
        second.maintain()
        with worker.frozen() as store:
            held = {offset for session in store.sessions.by_id.values() for offset, _, _ in session.grants.values()}
        first.end_copy()
        second.maintain()
        second.close()
        if grant[1] not in held:
            raise InvariantViolation("a chunk was freed under a copy")


def copy_that_comes_late(_segment: OwnedArena) -> None:
    """A thread has taken its grant, and begins its copy only when the session has been retired and released."""
    with WorkerThread() as worker:
        first = worker.session()
        first.ask([(MIB, 1)])
        grant = first.pool.take(MIB)
        assert grant is not None
        first.close(clean=False)
        second = worker.session()
        with contextlib.suppress(TransportError):
            first.begin_copy()
            with worker.frozen() as store:
                held = {offset for session in store.sessions.by_id.values() for offset, _, _ in session.grants.values()}
            if grant[1] not in held:
                raise InvariantViolation("a copy begins in a chunk that is not ours any more")
        second.close()


@functools.cache
def _places() -> list[OwnedArena]:
    return [new_segment(8 * MIB) for _ in range(3)]


@pytest.fixture(scope="module", autouse=True)
def _no_places_left() -> Iterator[None]:
    yield
    if _places.cache_info().currsize:
        for made in _places():
            remove_segment(made)
        _places.cache_clear()


def moving_shards(_segment: OwnedArena) -> None:
    """Shards move between three stores, all processes lag, workers die."""
    for seed in range(12):
        store_moves.play(_places(), seed)


def late_mover(_segment: OwnedArena) -> None:
    """A mover goes on by an old map, and a client reads by one."""
    move_scripts.late_mover(_places())


def unheard_owner(_segment: OwnedArena) -> None:
    """A server has never heard that it was owner for a while."""
    move_scripts.unheard_owner(_places())


def old_map(_segment: OwnedArena) -> None:
    """A client's map names a previous owner of long ago."""
    move_scripts.old_map(_places())


# -- controls: what is taken away ----------------------------------------------------------------------


Patch = pytest.MonkeyPatch


def no_recheck(patch: Patch) -> None:
    patch.setattr(ArenaReader, "confirm", lambda self, digest, slot, seq: True)


def no_shard_check(patch: Patch) -> None:
    def confirm(self: ArenaReader, digest: bytes, slot: int, seq: int) -> bool:
        return bool(self.words[self._slot_word + slot * 8] == seq)

    patch.setattr(ArenaReader, "confirm", confirm)


def no_fence(patch: Patch) -> None:
    patch.setattr(SessionTable, "close", lambda self, session: self.end(session))


def no_quarantine(patch: Patch) -> None:
    real = Ledger.holds
    patch.setattr(Ledger, "holds", lambda self: (each for each in real(self) if each[1].kind != GRANT))


def no_undo_record(patch: Patch) -> None:
    patch.setattr(Table, "_save", lambda self, slot: None)


def no_drop_at_recovery(patch: Patch) -> None:
    patch.setattr(Table, "clear_shards", lambda self, lost, beat: 0)


class _Sticky(dict[int, Any]):
    pop = dict.get  # type: ignore[assignment]


class _StickySession(Session):
    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.grants = _Sticky()


def no_spent_grants(patch: Patch) -> None:
    patch.setattr(simm.arena.sessions, "Session", _StickySession)


def no_holds_for_pins(patch: Patch) -> None:
    patch.setattr(Space, "hold", lambda self, offset: None)


def no_tail_check(patch: Patch) -> None:
    patch.setattr(Ring, "next_commit", lambda self: parse_commit_one(self._bytes, 4096 + self.done % 4 * (32 << 10)))
    patch.setattr(Ring, "next_request", lambda self: self._frame(4096 + self.done % 4 * (32 << 10)))


def no_look_at_copies(patch: Patch) -> None:
    real = WorkerSession.release_retired

    def release(self: WorkerSession) -> None:
        for old in simm.ipc.session.RETIRED:
            old.copying.clear()
        real(self)

    patch.setattr(WorkerSession, "release_retired", release)
    patch.setattr(WorkerSession, "end_copy", lambda self: None)


def no_look_at_the_end(patch: Patch) -> None:
    patch.setattr(WorkerSession, "begin_copy", lambda self: self.copying.append(None))


def no_pidfd_no_quarantine(patch: Patch) -> None:
    """A worker that frees what a broken connection held, at once."""
    real = Worker.on_close

    def on_close(self: Worker, peer: Any, reason: str) -> None:
        session = peer.context.session
        real(self, peer, reason)
        if session is not None:
            self.store.sessions.end(session)

    patch.setattr(Worker, "on_close", on_close)


def no_freeze(patch: Patch) -> None:
    patch.setattr(ShardWords, "freeze", lambda self, _epoch, shards, *_: [each for each in shards if self.words[each]])


def no_memory_of_what_was_dropped(patch: Patch) -> None:
    patch.setattr(ShardWords, "note_dropped", lambda self, digest: None)
    patch.setattr(ShardWords, "note_dropped_many", lambda self, digests: None)


def no_put_if_absent(patch: Patch) -> None:
    patch.setattr(Store, "_take_options", lambda self, session, digest, options: (0, session.namespace))


def no_end_of_fall_back_at_recovery(patch: Patch) -> None:
    patch.setattr(ShardWords, "recover", lambda self: self._recount())


def no_look_at_frozen(patch: Patch) -> None:
    patch.setattr(ArenaReader, "confirm", ArenaReader.confirm_previous)


def no_drop_of_foreign(patch: Patch) -> None:
    patch.setattr(Table, "of_shards", lambda self, _lost, start: ([], self.geometry.slots))


def no_refusal_of_old_movers(patch: Patch) -> None:
    real = ShardWords.freeze
    patch.setattr(ShardWords, "freeze", lambda self, _, shards, known: real(self, epoch_limit(known), shards, known))


def no_epoch_of_movers(patch: Patch) -> None:
    adopt, finish, may_copy = ShardWords.adopt, ShardWords.finish, ShardWords.may_copy
    patch.setattr(ShardWords, "adopt", lambda self, epoch, *rest: adopt(self, EPOCH_MASK, *rest))
    patch.setattr(ShardWords, "finish", lambda self, shards, epoch=0: finish(self, shards))
    patch.setattr(ShardWords, "may_copy", lambda self, digest, epoch=0: may_copy(self, digest))


def no_comparison_of_moves(patch: Patch) -> None:
    patch.setattr(store_moves.Moves, "same_move", lambda self, since, mapped: True)


def no_need_of_a_newest_map(patch: Patch) -> None:
    patch.setattr(store_moves.Moves, "follows", lambda self, told: True)


def no_need_to_have_heard(patch: Patch) -> None:
    patch.setattr(store_moves.Moves, "heard", lambda self, place, shard: True)


CONTROLS: list[tuple[Callable[[Patch], None], Callable[[OwnedArena], None]]] = [
    (no_recheck, stopped_reader),
    (no_shard_check, stale_shard),
    (no_fence, broken_connection),
    (no_quarantine, dead_worker),
    (no_undo_record, dead_overwrite),
    (no_drop_at_recovery, lost_entries),
    (no_spent_grants, commit_twice),
    (no_holds_for_pins, pinned_value),
    (no_tail_check, hostile_tail),
    (no_look_at_copies, guest_copy),
    (no_pidfd_no_quarantine, guest_copy),
    (no_look_at_the_end, copy_that_comes_late),
    (no_freeze, moving_shards),
    (no_memory_of_what_was_dropped, moving_shards),
    (no_put_if_absent, moving_shards),
    (no_end_of_fall_back_at_recovery, moving_shards),
    (no_look_at_frozen, moving_shards),
    (no_drop_of_foreign, moving_shards),
    (no_refusal_of_old_movers, moving_shards),
    (no_epoch_of_movers, late_mover),
    (no_comparison_of_moves, late_mover),
    (no_need_of_a_newest_map, old_map),
    (no_need_to_have_heard, unheard_owner),
]


@pytest.mark.parametrize(
    ("take_away", "script"), dose(CONTROLS, quick=8), ids=lambda function: function.__name__
)
def test_the_harm_is_seen(
    segment: OwnedArena, take_away: Callable[[Patch], None], script: Callable[[OwnedArena], None],
    monkeypatch: Patch,
) -> None:  # fmt: skip
    take_away(monkeypatch)
    with pytest.raises((AssertionError, CorruptionError)):
        script(segment)


@pytest.mark.parametrize("script", dict.fromkeys(script for _, script in CONTROLS), ids=lambda script: script.__name__)
def test_all_is_well_with_all_checks(segment: OwnedArena, script: Callable[[OwnedArena], None]) -> None:
    script(segment)


def test_an_order_of_stores_that_is_wrong_is_seen(segment: OwnedArena, monkeypatch: Patch) -> None:
    """The hold line of a commit ended before its slot is published: a death in between loses the chunk's fence."""
    real = Table.publish

    def early(self: Table, digest: bytes, offset: int, *rest: Any) -> Any:
        for line, hold in list(world.store.ledger.holds()):
            if hold.offset == offset:
                world.store.ledger._hold_words[line * 4] = 0
        return real(self, digest, offset, *rest)

    world = World(segment, slots=64)
    monkeypatch.setattr(Table, "publish", early)
    cut = Cut(world, crash.new_commit)
    with pytest.raises(AssertionError, match="lost its grant"):
        for frame in cut.tape.frames:
            cut.show(frame)
            world.recover()
            world.settle_on(cut.before, cut.after)


def test_chunk_sizes_here_are_what_the_scripts_assume() -> None:
    """They count on 300 KiB values being extents of their own, and on the region holding less than 40 of them."""
    assert 40 * chunk_bytes_for(300 * KIB) > 8 * MIB and digest_of("x") != C

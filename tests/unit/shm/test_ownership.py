"""Who owns a segment: locks, the owner's end, maps across a fork, leftovers of the killed. Processes are real."""

from __future__ import annotations

import ctypes
import gc
import glob
import mmap
import os
import signal
from pathlib import Path

import pytest

from simm import shm
from simm.errors import CorruptionError, SegmentError, UsageError
from simm.host import pages
from tests.support.consistency import check
from tests.support.segments import (
    PREFIX,
    SIZE,
    Peer,
    await_end,
    child,
    expect_segv,
    fresh_name,
    lock_owner,
    owner_locked,
    status_of,
    writer_locked,
)

# --------------------------------------------------------------------------------------------------- locks


def test_locks_are_seen_by_all_and_taken_by_one(segment: shm.OwnedSegment) -> None:
    assert shm.is_locked(segment.name) and owner_locked(segment.name)
    assert not writer_locked(segment.name)
    lock_owner(segment)
    segment.lock_writer()
    segment.lock_writer()
    assert segment.is_owner and segment.is_writer and writer_locked(segment.name)

    def other() -> int:
        refused = 0
        for lock in (lambda: lock_owner(segment), segment.lock_writer):
            try:
                lock()
            except SegmentError:
                refused += 1
        return refused

    assert status_of(child(other)) == 2
    segment._drop("_writer_fd")
    assert not writer_locked(segment.name) and owner_locked(segment.name)
    segment.unlock()
    assert not shm.is_locked(segment.name)
    lock_owner(segment)
    assert shm.is_locked(segment.name)
    check(segment)
    assert not shm.is_locked(fresh_name())


def test_a_worker_takes_the_writer_lock_and_death_returns_it(segment: shm.OwnedSegment) -> None:
    def work(peer: Peer) -> None:
        segment.release_in_child()
        segment.lock_writer()
        segment.buf[0] = 42
        peer.tell()
        peer.hear()

    worker = Peer(work)
    assert worker.hear() == b"."
    assert writer_locked(segment.name)
    with pytest.raises(SegmentError, match="another writer"):
        segment.lock_writer()
    with pytest.raises(SegmentError, match="another writer"):
        segment.unlink()  # not while somebody writes
    check(segment)
    assert worker.end(signal.SIGKILL) == -signal.SIGKILL
    assert not writer_locked(segment.name)
    assert shm.is_locked(segment.name)
    assert segment.buf[0] == 42
    second = Peer(work)  # and its successor gets it
    assert second.hear() == b"."
    assert second.end() == 0


def test_an_orphaned_worker_keeps_the_segment_from_being_a_leftover() -> None:
    """The supervisor dies; its worker still writes: locked by the worker alone, removable when that ends."""
    name = fresh_name()

    def supervise(peer: Peer) -> None:
        segment = shm.OwnedSegment.create(name, SIZE)

        def work() -> None:
            segment.release_in_child()
            segment.lock_writer()
            peer.tell(b"%d" % os.getpid())
            peer.hear()

        child(work)
        signal.pause()

    supervisor = Peer(supervise)
    worker = supervisor.hear_pid()
    os.kill(supervisor.pid, signal.SIGKILL)
    assert status_of(supervisor.pid) == -signal.SIGKILL
    assert not owner_locked(name) and writer_locked(name) and shm.is_locked(name)
    assert shm.remove_leftovers(PREFIX) == []
    with pytest.raises(SegmentError, match="still in use"):
        shm.OwnedSegment.adopt(name)
    supervisor.tell()
    await_end(worker)
    supervisor.link.close()
    assert shm.remove_leftovers(PREFIX) == [name]


@pytest.mark.parametrize("released", [True, False])
def test_an_inherited_owner_lock(released: bool) -> None:
    """A child that keeps the descriptor keeps the dead owner's lock; one that releases it does not, even
    though it still has the mapping."""
    name = fresh_name()

    def supervise(peer: Peer) -> None:
        segment = shm.OwnedSegment.create(name, SIZE)

        def work() -> None:
            if released:
                segment.release_in_child()
            segment.unlink()  # inherited clean-up code must not remove what the parent owns
            peer.tell(b"%d" % os.getpid())
            peer.hear()
            segment.buf[1] = 1

        child(work)
        signal.pause()

    supervisor = Peer(supervise)
    worker = supervisor.hear_pid()
    assert owner_locked(name)
    os.kill(supervisor.pid, signal.SIGKILL)
    assert status_of(supervisor.pid) == -signal.SIGKILL
    assert owner_locked(name) is not released
    assert shm.remove_leftovers(PREFIX) == ([name] if released else [])
    supervisor.tell()
    await_end(worker)
    supervisor.link.close()
    assert shm.remove_leftovers(PREFIX) == ([] if released else [name])


def test_release_in_child_is_for_children(segment: shm.OwnedSegment) -> None:
    with pytest.raises(UsageError, match="forked child"):
        segment.release_in_child()

    def leave() -> int:
        segment.release_in_child()
        segment.release_in_child()
        segment.close()
        return 0 if not segment.is_owner else 1

    assert status_of(child(leave)) == 0
    assert owner_locked(segment.name)


# ------------------------------------------------------------------------------------------- the owner's end


def test_unlink_and_close_twice(segment: shm.OwnedSegment) -> None:
    segment.unlink()
    segment.unlink()
    assert not os.path.exists(f"/dev/shm/{segment.name}")
    segment.close()
    segment.close()
    segment.unlink()
    with pytest.raises(UsageError, match="closed"):
        segment.populate()
    with pytest.raises(CorruptionError, match="closed"):
        check(segment)


def test_closed_before_unlinked_is_an_error_not_a_leak_in_silence() -> None:
    segment = shm.OwnedSegment.create(fresh_name(), SIZE)
    segment.close()
    with pytest.raises(UsageError, match="comes before"):
        segment.unlink()
    assert shm.remove_leftovers(PREFIX) == [segment.name]


def test_views_outlive_close() -> None:
    segment = shm.OwnedSegment.create(fresh_name(), SIZE)
    view = segment.buf[8:12]
    segment.unlink()
    segment.close()
    segment.close()
    view[:] = b"here"
    assert bytes(view) == b"here"
    view.release()
    segment.close()
    assert segment.mm.closed


def test_unlink_spares_a_successor_of_the_same_name(segment: shm.OwnedSegment) -> None:
    os.unlink(f"/dev/shm/{segment.name}")
    with pytest.raises(CorruptionError, match="removed or replaced"):
        check(segment)
    successor = shm.OwnedSegment.create(segment.name, SIZE)
    with pytest.raises(CorruptionError):
        check(segment)
    with pytest.raises(SegmentError, match="replaced"):
        segment.lock_writer()
    segment.unlink()
    check(successor)
    successor.unlink()
    successor.close()


def test_check_finds_a_changed_size(segment: shm.OwnedSegment) -> None:
    os.ftruncate(segment.fd, SIZE * 2)
    with pytest.raises(CorruptionError, match="bytes"):
        check(segment)


def test_adopt_takes_over_bytes_and_ownership() -> None:
    name = fresh_name()
    first = shm.OwnedSegment.create(name, SIZE)
    first.buf[:4] = b"warm"
    with pytest.raises(SegmentError, match="still in use"):
        shm.OwnedSegment.adopt(name)
    first.close()
    second = shm.OwnedSegment.adopt(name)
    assert bytes(second.buf[:4]) == b"warm"
    assert second.is_owner and owner_locked(name) and not writer_locked(name)
    assert shm.remove_leftovers(PREFIX) == []
    check(second)
    second.unlink()
    second.close()
    with pytest.raises(SegmentError, match="no segment"):
        shm.OwnedSegment.adopt(name)


# ------------------------------------------------------------------------------------------- maps and forks


def _maps_in(start: int, stop: int) -> list[str]:
    """Lines of /proc/self/maps that overlap a range."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first < stop and start < last:
            found.append(line)
    return found


def test_a_forked_child_has_no_map_and_gives_nobody_elses_memory_away(segment: shm.OwnedSegment) -> None:
    segment.buf[:4] = b"mine"
    attached = shm.AttachedSegment.open(segment.name)
    mm = attached.map(0, SIZE, writable=False)
    kept = attached.map(0, 4096, writable=False, dontfork=False)
    with pages.address_of(mm) as address:
        pass

    def range_is_reserved() -> int:
        lines = _maps_in(address, address + SIZE)
        if len(lines) != 1 or "---p" not in lines[0] or segment.name in lines[0]:
            return 1
        if kept[:4] != b"mine":
            return 2
        attached.close()  # unmaps the reservation, nothing else
        return 3 if _maps_in(address, address + SIZE) and not mm.closed else 0

    def touch() -> None:
        expect_segv()
        bytes(mm[:4])

    assert status_of(child(range_is_reserved)) == 0
    assert status_of(child(touch)) == -signal.SIGSEGV
    assert mm[:4] == b"mine"
    attached.close()


def test_a_range_taken_before_the_hook_is_never_unmapped(
    segment: shm.OwnedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something allocated between fork and hook sits in the range: closing the inherited map must spare it."""
    attached = shm.AttachedSegment.open(segment.name)
    mm = attached.map(0, SIZE, writable=False)
    with pages.address_of(mm) as address:
        pass
    saved = dict(pages._DONTFORK)
    pages._DONTFORK.clear()  # the real hook finds nothing, and the test calls it late

    def late() -> int:
        nonlocal mm
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | pages._MAP_FIXED_NOREPLACE
        if pages._LIBC.mmap(address + 8192, 4096, 3, flags, -1, 0) != address + 8192:
            return 1
        ctypes.memset(address + 8192, 0x66, 4096)
        pages._DONTFORK.update(saved)
        pages._reserve_in_child()
        attached.close()
        del mm
        gc.collect()
        return 0 if ctypes.string_at(address + 8192, 4096) == b"\x66" * 4096 else 2

    assert status_of(child(late)) == 0
    pages._DONTFORK.update(saved)
    attached.close()


def test_the_register_of_maps_does_not_grow(segment: shm.OwnedSegment) -> None:
    gc.collect()
    before = len(pages._DONTFORK)
    with shm.AttachedSegment.open(segment.name) as attached:
        for _ in range(10):
            attached.map(0, 4096, writable=False)
        assert len(pages._DONTFORK) == before + 10
    gc.collect()
    assert len(pages._DONTFORK) == before


# ------------------------------------------------------------------------------------------------ leftovers


def test_leftovers_of_a_killed_owner_go_and_those_of_live_ones_stay(segment: shm.OwnedSegment) -> None:
    name = fresh_name()

    def own(peer: Peer) -> None:
        made = shm.OwnedSegment.create(name, SIZE)
        made.buf[0] = 1
        peer.tell()
        peer.hear()

    owner = Peer(own)
    assert owner.hear() == b"."
    assert shm.leftovers(PREFIX) == shm.remove_leftovers(PREFIX) == []
    assert owner.end(signal.SIGKILL) == -signal.SIGKILL
    assert shm.leftovers(PREFIX) == [name]
    told: list[tuple[str, bool]] = []

    def close_it(each: str) -> None:
        with shm.AttachedSegment.open(each, writable=True) as attached:
            attached.map(0, 4096, writable=True)[0] = 0xEE
            told.append((each, owner_locked(each) and writer_locked(each)))

    with shm.AttachedSegment.open(name) as reader:
        mm = reader.map(0, 4096, writable=False)
        assert mm[0] == 1
        assert shm.remove_leftovers(PREFIX, before_unlink=close_it) == [name]
        assert mm[0] == 0xEE  # whoever maps it still learns that it is closed
    assert told == [(name, True)]
    assert shm.remove_leftovers(PREFIX) == []
    check(segment)


def test_a_failing_before_unlink_keeps_the_segment() -> None:
    segment = shm.OwnedSegment.create(fresh_name(), SIZE)
    segment.close()

    def fail(_: str) -> None:
        raise RuntimeError("cannot store closed")

    with pytest.raises(RuntimeError):
        shm.remove_leftovers(PREFIX, before_unlink=fail)
    assert shm.leftovers(PREFIX) == [segment.name]
    assert shm.remove_leftovers(PREFIX) == [segment.name]


def test_what_is_not_ours_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "SHM_DIR", str(tmp_path))
    (tmp_path / "simm-directory").mkdir()
    os.mkfifo(tmp_path / "simm-fifo")
    (tmp_path / "simm-link").symlink_to(tmp_path / "target")
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "simm odd name").write_bytes(b"x")
    (tmp_path / "simm-mine").write_bytes(b"x")
    before = sorted(each.name for each in tmp_path.iterdir())
    assert shm.remove_leftovers("simm") == ["simm-mine"]
    assert sorted(each.name for each in tmp_path.iterdir()) == [each for each in before if each != "simm-mine"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 54321)
        (tmp_path / "simm-mine").write_bytes(b"x")
        assert shm.leftovers("simm") == shm.remove_leftovers("simm") == []
    with pytest.raises(UsageError):
        shm.remove_leftovers("")


def test_creators_and_removers_at_once() -> None:
    """Two removers run without pause against a creator: what create() returned is never removed, and what its
    owner dropped always is."""

    def remove(peer: Peer) -> int:
        peer.link.setblocking(False)
        while True:
            shm.remove_leftovers(PREFIX)
            try:
                peer.hear()
                return 0
            except BlockingIOError:
                continue

    removers = [Peer(remove), Peer(remove)]
    try:
        for _ in range(150):
            segment = shm.OwnedSegment.create(fresh_name(), 4096)
            check(segment)  # named, locked, ours
            segment.buf[0] = 1
            check(segment)
            segment.close()
    finally:
        assert [each.end() for each in removers] == [0, 0]
    shm.remove_leftovers(PREFIX)
    assert glob.glob(f"/dev/shm/{PREFIX}*") == []


@pytest.mark.parametrize("moment", ["before the open", "before the lock", "holding the lock"])
def test_a_remover_in_the_gap_of_creation(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """The same race, each interleaving once, by hand."""
    name = fresh_name()
    real_open, real_lock = shm._open, shm.try_lock
    removals: list[list[str]] = []

    def once() -> None:
        monkeypatch.setattr(shm, "_open", real_open)
        monkeypatch.setattr(shm, "try_lock", real_lock)

    def interrupted_open(path: str, *, writable: bool) -> int:
        once()
        removals.append(shm.remove_leftovers(PREFIX))
        return real_open(path, writable=writable)

    def interrupted_lock(fd: int, first: int, count: int = 1) -> bool:
        once()
        seen: list[bool] = []
        # With the lock held: the creator tries in the middle of the removal, and later again.
        hook = (lambda _: seen.append(real_lock(fd, first, count))) if moment == "holding the lock" else None
        removals.append(shm.remove_leftovers(PREFIX, before_unlink=hook))
        if hook:
            assert seen == [False]
            return False
        return real_lock(fd, first, count)

    if moment == "before the open":
        monkeypatch.setattr(shm, "_open", interrupted_open)
    else:
        monkeypatch.setattr(shm, "try_lock", interrupted_lock)
    segment = shm.OwnedSegment.create(name, SIZE)
    assert removals == [[name]]
    check(segment)
    assert shm.remove_leftovers(PREFIX) == []
    segment.unlink()
    segment.close()


def test_a_slow_remover_spares_the_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a remover's open and its lock the owner ends in order and a new owner takes the name."""
    name = fresh_name()
    first = shm.OwnedSegment.create(name, SIZE)
    real, successors = shm.try_lock, []

    def interrupted(fd: int, first_byte: int, count: int = 1) -> bool:
        monkeypatch.setattr(shm, "try_lock", real)
        first.unlink()
        first.close()
        successors.append(shm.OwnedSegment.create(name, SIZE))
        return real(fd, first_byte, count)

    monkeypatch.setattr(shm, "try_lock", interrupted)
    assert shm.remove_leftovers(PREFIX) == []
    check(successors[0])
    successors[0].unlink()
    successors[0].close()


def test_a_stuck_remover_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "CREATE_WAIT_S", 0.02)
    monkeypatch.setattr(shm, "try_lock", lambda *_: False)
    name = fresh_name()
    with pytest.raises(SegmentError, match="taken by another process"):
        shm.OwnedSegment.create(name, SIZE)
    monkeypatch.undo()
    assert shm.remove_leftovers(PREFIX) == [name]


def test_one_name_two_creators_one_segment() -> None:
    name = fresh_name()

    def create(peer: Peer) -> int:
        peer.hear()
        try:
            segment = shm.OwnedSegment.create(name, 4096)
        except SegmentError:
            return 1
        peer.tell()
        peer.hear()
        segment.unlink()
        segment.close()
        return 0

    peers = [Peer(create) for _ in range(4)]
    for each in peers:
        each.tell()
    results = []
    winners = []
    for each in peers:
        if each.hear() == b".":
            winners.append(each)
        else:
            results.append(status_of(each.pid))
            each.link.close()
    assert len(winners) == 1 and results == [1, 1, 1]
    assert winners[0].end() == 0

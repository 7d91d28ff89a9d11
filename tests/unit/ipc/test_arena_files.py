"""The two files of an arena: their modes, the seal, and the move over a warm restart."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from simm import shm
from simm.arena.layout import State, Word
from simm.arena.reader import ArenaReader
from simm.arena.store import Store
from simm.cluster.assignment import Member
from simm.errors import SegmentError
from simm.ipc import arena_files
from simm.ipc import segments as ipc_segments
from simm.ipc.arena_files import OwnedArena, SealedData, move_bytes, new_generation
from simm.server.arena_stock import ArenaStock
from simm.server.options import DataServerOptions
from simm.shm import data_name
from tests.support.left_arenas import (
    CLUSTER,
    MIB,
    files_of,
    fit,
    make_suspended,
    name_of,
    owner_of_all,
    put_some,
    values_in,
)
from tests.support.shards import set_shards


@pytest.fixture
def shm_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own in place of /dev/shm."""
    monkeypatch.setattr(shm, "SHM_DIR", str(tmp_path))
    return tmp_path


def suspended(arena: OwnedArena, count: int = 100) -> dict[bytes, bytes]:
    """Fill an arena as a worker that stops with ``--warm`` leaves it; its values."""
    arena.populate(huge=False)
    store = Store.create(arena.mm, generation=new_generation())
    set_shards(store, *owner_of_all(5), 7)
    put_some(store, count)
    values = values_in(store)
    store.header[Word.STATE] = State.SUSPENDED
    store.release()
    assert len(values) == count
    return values


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_who_may_open_what(shm_dir: Path) -> None:
    alone = OwnedArena.create(name_of("alone"), 8 * MIB)
    group = OwnedArena.create(name_of("group"), 8 * MIB, group=os.getegid())
    try:
        assert sorted(os.listdir(shm_dir)) == sorted([*files_of(alone.name), group.name]), "a sealed one has no name"
        assert mode_of(shm_dir / alone.name) == mode_of(shm_dir / data_name(alone.name)) == 0o600
        assert mode_of(shm_dir / group.name) == 0o640
        assert not alone.sealed and group.sealed
        assert alone.size == group.size == len(alone.mm) == len(group.mm) == 8 * MIB
    finally:
        for arena in (alone, group):
            arena.unlink()
            arena.close()
    assert not os.listdir(shm_dir)


@pytest.mark.parametrize("group", [None, os.getegid()], ids=["alone", "group"])
def test_a_supervisor_sees_the_heartbeat_without_a_map(group: int | None) -> None:
    arena = OwnedArena.create(name_of("beat"), 8 * MIB, group=group)
    try:
        assert arena.heartbeat() == 0, "nobody has written yet"
        store = Store.create(arena.mm)
        before = arena.heartbeat()
        for _ in range(3):
            store.beat()
        assert arena.heartbeat() == before + 3 == store.header[Word.HEARTBEAT]
        store.release()
    finally:
        arena.unlink()
        arena.close()


@pytest.mark.parametrize("size", [0, 4096, 16 * MIB])
def test_sealed_data_keeps_its_size(size: int) -> None:
    data = SealedData("simm-test", 8 * MIB)
    again = os.open(f"/proc/self/fd/{data.fd}", os.O_RDWR)
    try:
        for fd in (data.fd, again):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            os.open(f"/proc/self/fd/{data.fd}", os.O_RDWR | os.O_TRUNC)
    finally:
        os.close(again)
        data.close()


def test_mutation_without_the_seals_it_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_files, "_SEALS", 0)
    data = SealedData("simm-test", 8 * MIB)
    os.ftruncate(data.fd, 0)
    data.close()


def test_sealed_data_outlives_a_clean_stop(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved into its file and out of it again, a piece at a time; and another start needs no group."""
    monkeypatch.setattr(arena_files, "MOVE_BYTES", MIB)
    name = name_of("gpu")
    arena = OwnedArena.create(name, 8 * MIB, group=os.getegid())
    values = suspended(arena)
    for group in (os.getegid(), None):
        arena.keep()
        arena.close()
        assert sorted(os.listdir(shm_dir)) == files_of(name) and mode_of(shm_dir / data_name(name)) == 0o600
        assert set(fit("gpu", 1)[0]) == {0}
        arena = OwnedArena.adopt(name, group=group)
        assert arena.sealed == (group is not None)
        assert os.path.exists(shm_dir / data_name(name)) == (group is None)
        store = Store.recover(arena.mm, name)
        assert values_in(store) == values
        store.header[Word.STATE] = State.SUSPENDED
        store.release()
    arena.unlink()
    arena.close()
    assert not os.listdir(shm_dir)


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_move_that_was_cut_short_is_seen(shm_dir: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """As by SIGKILL: the next start is cold, and says why."""
    monkeypatch.setattr(arena_files, "MOVE_BYTES", MIB)
    name = name_of("gpu")
    arena = OwnedArena.create(name, 8 * MIB, group=os.getegid())
    suspended(arena)
    real, left = os.pwrite, [3]

    def cut(fd: int, data: memoryview, at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(fd, data, at)

    if way == "out":
        arena.keep()
        arena.close()
    monkeypatch.setattr(os, "pwrite", cut)
    if way == "in":
        monkeypatch.setattr(shm.OwnedSegment, "unlink", lambda self: None)
    with pytest.raises(KeyboardInterrupt):
        if way == "in":
            arena.keep()
        else:
            OwnedArena.adopt(name, group=os.getegid())
    arena.close()
    assert fit("gpu", 1)[0] == {}
    (why,) = fit("gpu", 1)[1].values()
    assert "pages of it are missing" in why


def test_no_room_for_the_data_leaves_nothing_of_it(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = OwnedArena.create(name_of("gpu"), 8 * MIB, group=os.getegid())
    suspended(arena)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SegmentError, match=r"No space left.*the next start has to be cold"):
        arena.keep()
    assert os.listdir(shm_dir) == [arena.name]
    arena.unlink()
    arena.close()
    assert not os.listdir(shm_dir)


def test_a_reader_checks_what_it_is_passed(shm_dir: Path) -> None:
    arena = OwnedArena.create(name_of("gpu"), 8 * MIB, group=os.getegid())
    suspended(arena)
    read_end, write_end = os.pipe()
    short = SealedData("simm-test", MIB)
    try:
        reader = ArenaReader(arena.name, data_fd=arena.data.fd)
        assert reader.data_end - reader.data_offset == reader.geometry.data_bytes == len(reader.data)
        assert reader._meta.readonly and not reader.data.readonly
        del reader
        for fd, text in ((read_end, "is no file"), (-1, "cannot use"), (short.fd, "contradicts itself or its size")):
            with pytest.raises(SegmentError, match=text):
                ArenaReader(arena.name, data_fd=fd)
        with pytest.raises(SegmentError, match="there is no segment"):
            ArenaReader(arena.name)
    finally:
        os.close(read_end)
        os.close(write_end)
        short.close()
        arena.unlink()
        arena.close()


def test_move_bytes_gives_the_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_files, "MOVE_BYTES", MIB)
    source, target = SealedData("simm-from", 4 * MIB), SealedData("simm-to", 4 * MIB)
    content = os.urandom(4 * MIB)
    source.buf[:] = content
    move_bytes(source, target)
    assert bytes(target.buf) == content and os.fstat(source.fd).st_blocks == 0
    source.close()
    target.close()
    assert ipc_segments.metadata_of(data_name("simm-x")) == "simm-x"


def taken_again(options: DataServerOptions, values: list[dict[bytes, bytes]]) -> None:
    """Check that the next start has all values, and remove the arenas."""
    taken = ArenaStock(options, 99).take_over(CLUSTER)
    assert sorted(taken) == list(range(len(values)))
    for number, arena in taken.items():
        assert arena.sealed
        store = Store.recover(arena.mm, arena.name)
        assert values_in(store) == values[number]
        store.release()
        arena.unlink()
        arena.close()


@pytest.mark.parametrize("fails", ["set_access", "tell_events", "remove_old"])
def test_issue_a_start_that_fails_leaves_the_arenas_to_the_next_one(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The data of the first worker's ended with that start, as it was in memory already: the next one was cold."""
    monkeypatch.setattr(ipc_segments, "LET_GO_S", 0.0)
    names = [name_of("gpu", number) for number in range(2)]
    values = [make_suspended(name, 20) for name in names]
    options = DataServerOptions("gpu", "", [0, 0], group=os.getegid(), events=MIB, warm=True)
    owner = {"set_access": shm.OwnedSegment, "tell_events": OwnedArena, "remove_old": ipc_segments}[fails]
    real = getattr(owner, fails)

    def once(of: Any, *arguments: object, **more: object) -> None:
        if fails == "remove_old" or of.name == names[1]:
            raise SegmentError("refused")
        real(of, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, fails, once)
        with pytest.raises(SegmentError, match="refused"):
            ArenaStock(options, 98).take_over(CLUSTER)
    assert sorted(os.listdir(shm_dir)) == files_of(*names)
    taken_again(options, values)
    assert not os.listdir(shm_dir)


@pytest.mark.parametrize("for_good", [False, True])
def test_issue_a_move_that_finds_no_memory_goes_back(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch, for_good: bool
) -> None:
    """What was moved ended with that start, and as one arena is no use without the others, so did all values.

    Others take what is free in the middle of the second worker's; ``for_good``: and then all that is given back.
    """
    monkeypatch.setattr(ipc_segments, "LET_GO_S", 0.0)
    monkeypatch.setattr(arena_files, "MOVE_BYTES", MIB)
    names = [name_of("gpu", number) for number in range(2)]
    values = [make_suspended(name, 20) for name in names]
    options = DataServerOptions("gpu", "", [0, 0], group=os.getegid(), warm=True)
    named = shm_dir / data_name(names[1])
    whole, real, room, sealed = named.stat().st_blocks, os.pwrite, list[int](), list[int]()

    def scarce(fd: int, data: memoryview, at: int) -> int:
        if names[1] in os.readlink(f"/proc/self/fd/{fd}"):
            left = named.stat().st_blocks
            if not sealed:
                sealed.append(fd)
            held = left + os.fstat(sealed[0]).st_blocks
            if not room and left < whole * 3 // 4:
                room.append(held)
            if room and (for_good or held + len(data) // 512 > room[0]):
                raise OSError(12, "Cannot allocate memory")
        return real(fd, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", scarce)
        with pytest.raises(SegmentError, match="left; the next start has" if for_good else "stays where it is"):
            ArenaStock(options, 98).take_over(CLUSTER)
    assert room and sorted(os.listdir(shm_dir)) == files_of(*names)
    assert bool(fit("gpu", 2)[0]) == (not for_good)
    if not for_good:
        taken_again(options, values)


def test_issue_a_ring_that_cannot_be_removed_costs_no_value(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was removed first, and sealed data was put into its file after that only."""
    monkeypatch.setattr(ipc_segments, "LET_GO_S", 0.0)
    name = name_of("gpu")
    values = [make_suspended(name, 20)]
    options = DataServerOptions("gpu", "", [0], group=os.getegid(), events=MIB, warm=True)

    def refuse(_: OwnedArena) -> None:
        raise SegmentError("refused")

    for end in ("of a start", "of a server"):
        stock = ArenaStock(options, 98)
        taken = stock.take_over(CLUSTER)
        with monkeypatch.context() as patch:
            patch.setattr(OwnedArena, "drop_events", refuse)
            if end == "of a start":
                with pytest.raises(KeyError), stock.handing_over(taken):
                    raise KeyError
            else:
                with pytest.raises(SegmentError, match="refused"):
                    stock.keep(taken[0], None, Member("gpu", 98, [0]).order(0))
                taken[0].close()
        assert set(os.listdir(shm_dir)) >= set(files_of(name))
    taken_again(options, values)
    assert not os.listdir(shm_dir)

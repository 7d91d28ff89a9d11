"""Arenas whose data is a file of huge pages: longer than the arena, on a boundary of its own, and counted elsewhere.

The file is one of ordinary pages here, as the host may have reserved no others; its size and its place are those of
huge ones. tests/system/test_hugetlb.py has real ones.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from simm import shm
from simm.arena.layout import Geometry, Word, laid_out
from simm.arena.reader import ArenaReader
from simm.arena.store import Store
from simm.arena.vault import Vault
from simm.constants import HUGE_PAGE_BYTES, SLAB_BYTES
from simm.errors import SegmentError, UsageError
from simm.host import memory, pages
from simm.host.memory import Bound
from simm.host.pages import address_of, map_side_by_side
from simm.ipc import arena_files
from simm.ipc.arena_files import OwnedArena, ReservedData, SealedData, new_generation
from simm.server.arena_stock import ArenaStock
from simm.server.options import DataServerOptions
from tests.support.left_arenas import MIB, digest_of, name_of, owner_of_all, put_some, values_in
from tests.support.shards import set_shards

#: Its data's file ends in the middle of a huge page.
ARENA = 9 * SLAB_BYTES


@pytest.fixture
def shm_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own in place of /dev/shm, and ordinary pages in place of reserved ones."""
    monkeypatch.setattr(shm, "SHM_DIR", str(tmp_path))
    monkeypatch.setattr(ReservedData, "flags", SealedData.flags)
    say_free(monkeypatch, 1 << 30)
    return tmp_path


def say_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Let so many bytes of reserved huge pages be free."""
    monkeypatch.setattr(memory, "reserved_bytes", lambda sys_root="/": free)


def test_the_file_is_of_whole_huge_pages(shm_dir: Path) -> None:
    geometry = Geometry.plan(ARENA)
    assert geometry.data_file_bytes % HUGE_PAGE_BYTES
    arena = OwnedArena.create(name_of("gpu"), ARENA, hugetlb=True)
    try:
        assert arena.sealed and os.listdir(shm_dir) == [arena.name]
        assert arena.data.size == os.fstat(arena.data.fd).st_size
        assert arena.data.size % HUGE_PAGE_BYTES == 0 and 0 < arena.data.size - geometry.data_file_bytes < SLAB_BYTES
        assert arena.size == ARENA and len(arena.mm) > ARENA
        with address_of(arena.mm) as base:
            assert (base + geometry.data_offset) % HUGE_PAGE_BYTES == 0
    finally:
        arena.unlink()
        arena.close()
    assert not os.listdir(shm_dir)


def test_a_worker_lays_it_out_and_its_successor_and_a_reader_find_it(shm_dir: Path) -> None:
    """The stamp is where the arena ends, not where the file does; a reader maps the file to its end."""
    arena = OwnedArena.create(name_of("gpu"), ARENA, hugetlb=True)
    try:
        arena.populate(huge=False)
        vault, generation = Vault(), new_generation()
        store = Store.create(arena.mm, generation=generation, vault=vault)
        set_shards(store, *owner_of_all(5), 7)
        put_some(store, 100)
        values = values_in(store)
        vault.save(store._whole)
        at = ARENA - 8
        assert arena.buf[at : at + 8].cast("Q")[0] == store.header[Word.GENERATION] == generation
        assert bytes(arena.buf[ARENA:]) == bytes(len(arena.buf) - ARENA), "nothing is beyond the arena"
        store.release()
        again = Store.recover(arena.mm, arena.name, vault=Vault())
        assert values_in(again) == values and len(values) == 100, "its header fits the length of the map"
        reader = ArenaReader(arena.name, data_fd=arena.data.fd)
        assert reader.geometry == Geometry.plan(ARENA) == again.geometry
        assert len(reader.data) + len(memoryview(reader.visited.obj)) == arena.data.size
        assert len(reader.visited) == reader.geometry.slots
        for number in range(100):
            found = reader.locate(digest_of(number))
            assert found is not None and bytes(reader.value(found)) == values[digest_of(number)]
        again.release()
        del reader
    finally:
        arena.unlink()
        arena.close()


def test_a_group_has_none(shm_dir: Path) -> None:
    with pytest.raises(UsageError, match="not for a group"):
        OwnedArena.create(name_of("gpu"), ARENA, hugetlb=True, group=os.getegid())
    assert not os.listdir(shm_dir)


def test_too_few_are_free(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is made, and when others were quicker."""
    say_free(monkeypatch, 4 * MIB)
    with pytest.raises(SegmentError, match=r"but only 4.0 MiB are free in reserved huge pages .* more than now"):
        OwnedArena.create(name_of("gpu"), ARENA, hugetlb=True)
    answers = iter([Bound(1 << 30, "", ""), Bound(2 * MIB, "are free", "reserve more")])
    monkeypatch.setattr(arena_files, "reserved_bound", lambda wanted: next(answers))

    def none_left(fd: int, size: int, **more: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("simm.host.mapped_file.mmap.mmap", none_left)
    with pytest.raises(SegmentError, match=r"but only 2.0 MiB are free; reserve more"):
        ReservedData("simm-test", ARENA)


@pytest.mark.parametrize(
    ("given", "free", "size"),
    [(0, 64 * MIB, 32 * MIB), (24 * MIB, 64 * MIB, 24 * MIB), (0, 8 * MIB, None), (40 * MIB, 64 * MIB, None)],
)
def test_the_size_of_two_arenas(monkeypatch: pytest.MonkeyPatch, given: int, free: int, size: int | None) -> None:
    """By default all that is free; what was asked for, if both fit."""
    say_free(monkeypatch, free)
    stock = ArenaStock(DataServerOptions("gpu", "", [0, 0], memory=given, hugetlb=True), 99)
    if size is not None:
        assert stock.size() == size
        return
    with pytest.raises(SegmentError, match=f"but only {free >> 20}.0 MiB are free in reserved huge pages"):
        stock.size()


def test_the_table_needs_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    say_free(monkeypatch, 1 << 40)
    monkeypatch.setattr(memory, "segment_bounds", lambda directory: [Bound(MIB, "are free in it", "give it more")])
    stock = ArenaStock(DataServerOptions("gpu", "", [0], memory=1 << 30, hugetlb=True), 99)
    with pytest.raises(SegmentError, match=r"1 table\(s\) of .* need .* but only 1.0 MiB are free in it; give it more"):
        stock.size()
    with pytest.raises(SegmentError, match="the arena needs"):
        stock.require_room(1 << 30, 0)


def test_one_more_arena_needs_free_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = ArenaStock(DataServerOptions("gpu", "", [0], hugetlb=True), 99)
    say_free(monkeypatch, 64 * MIB)
    stock.require_room(32 * MIB, 0)
    with pytest.raises(SegmentError, match=r"but only 64\.0 MiB are free in reserved huge pages"):
        stock.require_room(96 * MIB, 0)


@pytest.mark.parametrize("size", [0, 1, SLAB_BYTES - 1, SLAB_BYTES, 5 * SLAB_BYTES + 4096])
def test_laid_out(size: int) -> None:
    assert laid_out(size) % SLAB_BYTES == 0 and 0 <= size - laid_out(size) < SLAB_BYTES


@pytest.mark.parametrize("first", [4096, 3 * 4096, HUGE_PAGE_BYTES, 7 * HUGE_PAGE_BYTES + 4096])
def test_files_side_by_side_on_a_boundary(first: int) -> None:
    """Each is where it belongs, whatever lies at other addresses, and nothing stays mapped."""
    fds = [os.memfd_create(f"simm-{number}", os.MFD_CLOEXEC) for number in range(2)]
    sizes = [first, 3 * HUGE_PAGE_BYTES]
    try:
        for fd, size, fill in zip(fds, sizes, (b"a", b"b")):
            os.ftruncate(fd, size)
            os.pwrite(fd, fill, size - 1)
        before = Path("/proc/self/maps").read_text().count("\n")
        maps = [map_side_by_side(list(zip(fds, sizes)), HUGE_PAGE_BYTES) for _ in range(4)]
        for whole in maps:
            with address_of(whole) as base:
                assert (base + first) % HUGE_PAGE_BYTES == 0
            assert whole[first - 1 : first] == b"a" and whole[-1:] == b"b" and len(whole) == sum(sizes)
            whole.close()
        assert Path("/proc/self/maps").read_text().count("\n") - before < 4
    finally:
        for fd in fds:
            os.close(fd)


def test_no_range_on_a_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "RANGE_TRIES", 0)
    with pytest.raises(OSError, match="on a boundary of 2097152 bytes"):
        map_side_by_side([(-1, 4096)], HUGE_PAGE_BYTES)

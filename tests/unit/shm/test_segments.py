"""Shared memory segments: creation, too little memory, populating, attaching. Processes and full disks are real."""

from __future__ import annotations

import ctypes
import errno
import gc
import glob
import mmap
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from simm import shm
from simm.errors import SegmentError, UsageError
from simm.host import memory, numa, pages
from simm.host.file_locks import held
from tests.support.consistency import check
from tests.support.segments import MIB, PREFIX, SIZE, child, expect_segv, fresh_name, status_of
from tests.support.tmpfs import own_tmpfs

REPO = Path(__file__).resolve().parents[3]


# --------------------------------------------------------------------------------------------- creating


def test_a_new_segment(segment: shm.OwnedSegment) -> None:
    state = os.stat(f"/dev/shm/{segment.name}")
    assert stat.S_IMODE(state.st_mode) == 0o600
    assert state.st_size == segment.size == len(segment.buf) == len(segment.mm) == SIZE
    assert not segment.buf.readonly
    segment.buf[:4] = b"abcd"
    assert os.pread(segment.fd, 4, 0) == b"abcd"
    assert not os.get_inheritable(segment.fd)
    check(segment)
    assert "owner" in repr(segment)


def test_an_existing_name_is_refused_and_untouched(segment: shm.OwnedSegment) -> None:
    segment.buf[0] = 7
    with pytest.raises(SegmentError, match="in use by a live process"):
        shm.OwnedSegment.create(segment.name, SIZE * 2)
    check(segment)
    assert segment.buf[0] == 7


def test_a_foreign_file_of_that_name_is_not_taken_over() -> None:
    name = fresh_name()
    Path("/dev/shm", name).write_bytes(b"theirs")
    try:
        with pytest.raises(SegmentError, match="leftover"):
            shm.OwnedSegment.create(name, SIZE)
        assert Path("/dev/shm", name).read_bytes() == b"theirs"
    finally:
        os.unlink(f"/dev/shm/{name}")


def test_mode_and_group_whatever_the_umask() -> None:
    before = os.umask(0o077)
    try:
        segment = shm.OwnedSegment.create(fresh_name(), SIZE, mode=0o660, group=os.getgid())
    finally:
        os.umask(before)
    state = os.fstat(segment.fd)
    assert (stat.S_IMODE(state.st_mode), state.st_gid) == (0o660, os.getgid())
    segment.unlink()
    segment.close()


@pytest.mark.parametrize("mode", [0o666, 0o604, 0o400, 0o700, 0o662, 0o4600])
def test_modes_that_let_others_in_are_refused(mode: int) -> None:
    with pytest.raises(UsageError):
        shm.OwnedSegment.create(fresh_name(), SIZE, mode=mode)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "/x", "-x", ".hidden", "a\0b", "a b", "a\n", "x" * 201])
def test_names_that_could_lead_elsewhere(name: str) -> None:
    with pytest.raises(UsageError):
        shm.OwnedSegment.create(name, SIZE)
    with pytest.raises(SegmentError):  # a name from a server is not the caller's mistake
        shm.AttachedSegment.open(name)


def test_a_refused_group_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchown", refuse)
    name = fresh_name()
    with pytest.raises(SegmentError, match="member of"):
        shm.OwnedSegment.create(name, SIZE, mode=0o660, group=12345)
    assert not os.path.exists(f"/dev/shm/{name}")


def test_a_failed_map_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = mmap.mmap, []

    def second_fails(*arguments: Any, **keywords: Any) -> mmap.mmap:
        calls.append(arguments)
        if len(calls) > 1:  # the first is SharedMemory's own
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(*arguments, **keywords)

    monkeypatch.setattr(mmap, "mmap", second_fails)
    with pytest.raises(SegmentError, match="cannot map"):
        shm.OwnedSegment.create(fresh_name(), SIZE)
    assert len(calls) == 2


def test_no_resource_tracker_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.10 to 3.12 start it at any price, and where that fails (an embedded interpreter, a Python
    that this user may not execute) leave a created file and an exception."""

    def broken(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    for function in ("register", "unregister"):
        monkeypatch.setattr(resource_tracker, function, broken)
    segment = shm.OwnedSegment.create(fresh_name(), SIZE)
    check(segment)
    with pytest.raises(SegmentError, match="in use"):
        shm.OwnedSegment.create(segment.name, SIZE)
    segment.unlink()
    segment.close()


# ------------------------------------------------------------------------------------------ too little memory


class SmallDisk:
    f_bavail = 1024
    f_blocks = 1024
    f_frsize = 4096


def test_a_small_shm_is_found_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SmallDisk)
    assert memory.shm_free_bytes(shm.SHM_DIR) == 4 * MIB
    with pytest.raises(SegmentError, match=r"needs 8\.0 MiB, but only 4\.0 MiB are free in /dev/shm.*--shm-size"):
        shm.OwnedSegment.create(fresh_name(), 8 * MIB)
    assert memory.default_arena_bytes(shm.SHM_DIR) == 2 * MIB  # 80 % of 4 MiB, rounded down to 2 MiB
    with pytest.raises(SegmentError, match="too little for 2"):
        memory.default_arena_bytes(shm.SHM_DIR, 2)


def test_a_cgroup_limit_and_a_full_machine_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_limit_bytes", lambda: 5 * MIB)
    with pytest.raises(SegmentError, match=r"5\.0 MiB are left of the memory cgroup"):
        shm.OwnedSegment.create(fresh_name(), 6 * MIB)
    assert memory.default_arena_bytes(shm.SHM_DIR) == 4 * MIB
    monkeypatch.setattr(memory, "meminfo_bytes", lambda field: 3 * MIB if field == "MemAvailable" else None)
    with pytest.raises(SegmentError, match=r"3\.0 MiB of memory are available"):
        shm.OwnedSegment.create(fresh_name(), 4 * MIB)
    assert memory.default_arena_bytes(shm.SHM_DIR) == 2 * MIB


def test_default_arena_bytes_shares_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = memory.segment_bounds(shm.SHM_DIR)
    monkeypatch.setattr(memory, "segment_bounds", lambda _: bounds)  # other programs allocate meanwhile
    one, three = memory.default_arena_bytes(shm.SHM_DIR), memory.default_arena_bytes(shm.SHM_DIR, 3)
    assert one % SIZE == three % SIZE == 0
    assert one // 3 - SIZE <= three <= one // 3
    with pytest.raises(UsageError):
        memory.default_arena_bytes(shm.SHM_DIR, 0)


def test_a_missing_shm_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "SHM_DIR", "/nonexistent/shm")
    with pytest.raises(SegmentError, match="mount a tmpfs"):
        shm.OwnedSegment.create(fresh_name(), SIZE)
    assert shm.remove_leftovers(PREFIX) == []


@pytest.fixture
def tiny_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tmpfs of 8 MiB as SHM_DIR."""
    with own_tmpfs(tmp_path / "shm", "8m") as at:
        monkeypatch.setattr(shm, "SHM_DIR", str(at))
        try:
            yield at
        finally:
            gc.collect()


@pytest.mark.parametrize("kernel", ["with MADV_POPULATE", "without"])
def test_a_full_tmpfs_is_an_error_not_a_signal(
    tiny_shm: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """Two owners each find 8 MiB free and take 6: the second one's populate fails, and neither dies."""
    if kernel == "without":
        without_populate(monkeypatch)
    with pytest.raises(SegmentError, match=r"8\.0 MiB are free"):
        shm.OwnedSegment.create("big", 9 * MIB)
    first = shm.OwnedSegment.create("first", 6 * MIB)
    second = shm.OwnedSegment.create("second", 6 * MIB)

    def both() -> int:
        first.populate()
        try:
            second.populate()
        except SegmentError as error:
            return 0 if "second" in str(error) and "still needs" in str(error) and "MiB" in str(error) else 2
        return 1

    assert status_of(child(both)) == 0  # in a child, as a SIGBUS would end the test run
    for each in (second, first):
        each.unlink()
        each.close()
    third = shm.OwnedSegment.create("third", 6 * MIB)
    third.populate()  # what the others had is free again
    assert os.fstat(third.fd).st_blocks * 512 >= 6 * MIB
    third.unlink()
    third.close()
    assert list(tiny_shm.iterdir()) == []
UNSHARED = """
import os, sys
from simm import shm
from simm.errors import SegmentError
first = shm.OwnedSegment.create("first", 6 << 20)
second = shm.OwnedSegment.create("second", 6 << 20)
first.populate()
try:
    second.populate()
except SegmentError as error:
    assert "still needs" in str(error), error
else:
    sys.exit("no error")
try:
    shm.OwnedSegment.create("third", 6 << 20)
except SegmentError as error:
    assert "are free in /dev/shm" in str(error), error
else:
    sys.exit("no error")
first.unlink(); second.unlink()
assert os.listdir("/dev/shm") == []
print("done")
"""


def test_a_full_dev_shm_itself() -> None:
    """The same on the real path, by SharedMemory, in a mount namespace with a /dev/shm of 8 MiB."""
    script = 'mount -t tmpfs -o size=8m tmpfs /dev/shm || exit 77; exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", UNSHARED]
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("needs root and unshare")
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("mount namespaces are not allowed here")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# ------------------------------------------------------------------------------------------------ populate


def without_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kernel look like one before 5.14."""
    real = pages._madvise

    def old(address: int, length: int, advice: int) -> int:
        return errno.EINVAL if advice in (22, 23) else real(address, length, advice)

    monkeypatch.setattr(pages, "_madvise", old)


def test_populate_takes_the_pages_and_keeps_the_bytes(
    segment: shm.OwnedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "POPULATE_STEP_BYTES", 256 << 10)  # several steps
    segment.buf[5000:5004] = b"kept"
    assert segment.populate() is memory.huge_pages_allowed()
    assert os.fstat(segment.fd).st_blocks * 512 == SIZE
    assert bytes(segment.buf[5000:5004]) == b"kept"
    assert segment.populate(huge=False) is False
    segment.populate(node=0)  # on one node nothing, on several a binding; an error on neither


def test_populate_of_a_part_takes_that_part(segment: shm.OwnedSegment) -> None:
    segment.populate(4096 * 3 + 5, 4096, huge=False)
    assert os.fstat(segment.fd).st_blocks * 512 == 4096 * 2
    for offset, length in ((-1, 4096), (0, SIZE + 1), (SIZE, 1), (0, -1)):
        with pytest.raises(UsageError):
            segment.populate(offset, length)


def test_populate_on_an_old_kernel(segment: shm.OwnedSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    without_populate(monkeypatch)
    segment.buf[5000:5004] = b"kept"
    segment.populate()
    assert os.fstat(segment.fd).st_blocks * 512 == SIZE
    assert bytes(segment.buf[5000:5004]) == b"kept"
    assert pages.populate_read(segment.mm) is False


def test_a_full_numa_node_is_asked_before_it_is_bound_to_death(
    segment: shm.OwnedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "bind_memory", lambda *_: numa.Outcome(True))
    monkeypatch.setattr(numa, "node_free_bytes", lambda _: MIB)
    with pytest.raises(SegmentError, match=r"needs 2\.0 MiB on NUMA node 1, which has 1\.0 MiB"):
        segment.populate(node=1)
    segment.populate()
    segment.populate(node=1)  # the pages are there already, so none are missing


def test_populate_read(segment: shm.OwnedSegment) -> None:
    with shm.AttachedSegment.open(segment.name) as attached:
        mm = attached.map(0, SIZE, writable=False)
        if not pages.populate_read(mm):
            pytest.skip("this kernel has no MADV_POPULATE_READ")
        assert os.fstat(segment.fd).st_blocks * 512 == SIZE
        assert pages.populate_read(mm, 4096, 1) is True
        for offset, length in ((-1, 1), (0, SIZE + 1), (SIZE, 1)):
            with pytest.raises(UsageError):
                pages.populate_read(mm, offset, length)
        beyond = attached.map(0, SIZE, writable=False)
        os.ftruncate(segment.fd, 4096)  # nobody does this; a populate must still not be a SIGBUS
        with pytest.raises(SegmentError, match="cut short"):
            pages.populate_read(beyond)
        os.ftruncate(segment.fd, SIZE)
    with pytest.raises(UsageError, match="closed"):
        pages.populate_read(mm)


def test_a_map_cannot_be_closed_while_it_is_populated(
    segment: shm.OwnedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The foreign call runs without the GIL; a close by another thread must not pull the pages from under it."""
    inside, leave = threading.Event(), threading.Event()
    real = pages._madvise

    def slow(address: int, length: int, advice: int) -> int:
        inside.set()
        assert leave.wait(120)
        return real(address, length, advice)

    monkeypatch.setattr(pages, "_madvise", slow)
    attached = shm.AttachedSegment.open(segment.name)
    mm = attached.map(0, 8192, writable=False, dontfork=False)
    thread = threading.Thread(target=pages.populate_read, args=(mm,))
    thread.start()
    assert inside.wait(120)
    attached.close()
    assert not mm.closed
    leave.set()
    thread.join(120)
    assert not thread.is_alive()
    mm.close()


# ------------------------------------------------------------------------------------------------ attaching


def test_a_read_only_map_is_read_only(segment: shm.OwnedSegment) -> None:
    """Not by Python's word alone: a store by address dies, and mprotect is refused."""
    segment.buf[:4] = b"safe"
    with shm.AttachedSegment.open(segment.name) as attached:
        mm = attached.map(0, 4096, writable=False, dontfork=False)
        assert mm[:4] == b"safe"
        with pytest.raises(TypeError):
            mm[0] = 1

        def store() -> None:
            expect_segv()
            with pages.address_of(mm) as address:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), 3) != -1:
                    os._exit(3)
                ctypes.memset(address, 0x55, 4)

        assert status_of(child(store)) == -signal.SIGSEGV
        with pytest.raises(UsageError, match="read-only"):
            attached.map(0, 4096, writable=True)
    assert bytes(segment.buf[:4]) == b"safe"


def test_maps_of_parts_and_for_writing(segment: shm.OwnedSegment) -> None:
    with shm.AttachedSegment.open(segment.name, writable=True) as attached:
        assert (attached.size, attached.owner_uid) == (SIZE, os.geteuid())
        head = attached.map(0, 4096, writable=False)
        data = attached.map(8192, 4096, writable=True)
        data[:5] = b"hello"
        assert bytes(segment.buf[8192:8197]) == b"hello"
        segment.buf[7] = 9
        assert head[7] == 9
        for offset, length in ((1, 4096), (-4096, 4096), (0, 0), (0, -1)):
            with pytest.raises(UsageError):
                attached.map(offset, length, writable=False)
        for offset, length in ((0, SIZE + 1), (SIZE, 4096), (4096, SIZE)):
            with pytest.raises(SegmentError, match="too few"):
                attached.map(offset, length, writable=False)
        assert "2 maps" in repr(attached)
    assert head.closed and data.closed
    assert "closed" in repr(attached)


def test_close_never_raises_and_spares_exported_views(segment: shm.OwnedSegment) -> None:
    segment.buf[:4] = b"view"
    attached = shm.AttachedSegment.open(segment.name)
    view = memoryview(attached.map(0, 4096, writable=False))
    attached.close()
    attached.close()
    assert bytes(view[:4]) == b"view"
    with pytest.raises(UsageError, match="closed"):
        attached.map(0, 4096, writable=False)


def test_the_writer_lock_by_an_attached_descriptor(segment: shm.OwnedSegment) -> None:
    with shm.AttachedSegment.open(segment.name) as attached:
        assert not held(attached.fd, shm._WRITER_BYTE)
        segment.lock_writer()
        assert held(attached.fd, shm._WRITER_BYTE)
        segment.unlink()
        assert held(attached.fd, shm._WRITER_BYTE)  # without its name too
        segment.close()
        assert not held(attached.fd, shm._WRITER_BYTE)


def test_opening_what_is_no_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "SHM_DIR", str(tmp_path))
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")  # opening it must not wait for a writer
    (tmp_path / "file").write_bytes(b"x" * 4096)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in ("directory", "fifo", "link", "socket"):
            with pytest.raises(SegmentError, match="no segment"):
                shm.AttachedSegment.open(name)
    with pytest.raises(SegmentError, match="--ipc=host"):
        shm.AttachedSegment.open("absent")


def test_a_refused_attach_names_the_owner_and_the_remedy(
    segment: shm.OwnedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if os.geteuid():
            os.chmod(f"/dev/shm/{segment.name}", 0)
        else:
            real = os.open

            def refuse(path: Any, *rest: Any, **keywords: Any) -> int:
                if str(path).endswith(segment.name):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
                return real(path, *rest, **keywords)

            patch.setattr(os, "open", refuse)
        with pytest.raises(SegmentError, match=rf"belongs to .*uid {os.geteuid()}.*mode.*reading.*group"):
            shm.AttachedSegment.open(segment.name)
    os.chmod(f"/dev/shm/{segment.name}", 0o600)


def test_a_failed_map_never_unlinks(segment: shm.OwnedSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trap of SharedMemory: its failed attach removes the owner's name."""
    attached = shm.AttachedSegment.open(segment.name)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", fail)
        with pytest.raises(SegmentError, match="cannot map"):
            attached.map(0, 4096, writable=False)
    attached.close()
    check(segment)
ATTACH_AND_EXIT = """
import sys
from simm import shm
assert "numpy" not in sys.modules
a = shm.AttachedSegment.open(sys.argv[1], writable=True)
m = a.map(0, 4096, writable=True)
m[0] = 77
v = memoryview(m)
print(shm.is_locked(sys.argv[1]), shm.remove_leftovers(sys.argv[2]))
"""
CREATE_AND_EXIT = """
import os, sys
from simm import shm
s = shm.OwnedSegment.create(sys.argv[1], 4096)
print(oct(os.fstat(s.fd).st_mode), shm.is_locked(sys.argv[1]))
"""


def interpreters() -> list[str]:
    """This interpreter and every other CPython 3.10 to 3.13 to be found."""
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    for minor in range(10, 14):
        places = glob.glob(os.path.expanduser(f"~/.pyenv/versions/3.{minor}.*/bin/python3"))
        other = next(iter(sorted(places)), None) or shutil.which(f"python3.{minor}")
        if other:
            found.setdefault(f"3.{minor}", other)
    return [found[version] for version in sorted(found) if os.access(found[version], os.X_OK)]


@pytest.mark.parametrize("python", interpreters())
def test_other_interpreters_attach_and_exit_without_a_trace(segment: shm.OwnedSegment, python: str) -> None:
    """The second trap: up to 3.12 the resource tracker removes what was merely attached. And a creator's
    exit leaves its segment to be found as a leftover, not to a tracker that races with the next start."""

    def run(script: str, *arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [python, "-c", script, *arguments], cwd=REPO, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout, done.stderr

    assert run(ATTACH_AND_EXIT, segment.name, PREFIX) == (0, "True []\n", "")
    check(segment)
    assert segment.buf[0] == 77
    name = fresh_name()
    assert run(CREATE_AND_EXIT, name) == (0, "0o100600 True\n", "")
    assert shm.remove_leftovers(PREFIX) == [name]

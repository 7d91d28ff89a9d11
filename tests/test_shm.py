"""simm.shm: who may remove a segment, who may write it, and that nothing is ever a SIGBUS.

Processes are real here (fork, kill -9, other interpreters), and so are full file systems: a tmpfs of a few MiB
where this user may mount one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import gc
import glob
import mmap
import os
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from simm import pages, shm, topology
from simm.errors import CorruptionError, SegmentError, UsageError

REPO = Path(__file__).resolve().parent.parent
MIB = 1 << 20
SIZE = 2 * MIB
PREFIX = f"simmtest-{os.getpid()}-"
_COUNTER = iter(range(1 << 30))


def fresh_name() -> str:
    return f"{PREFIX}{next(_COUNTER)}"


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test ends with the descriptors and segments it began with."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    after = len(os.listdir("/proc/self/fd"))
    left = glob.glob(f"/dev/shm/{PREFIX}*")
    for path in left:
        os.unlink(path)
    assert not left
    # The resource tracker of CPython 3.10 to 3.12 keeps one pipe from its first use on.
    assert after <= before + 1


@pytest.fixture
def segment() -> Iterator[shm.OwnedSegment]:
    made = shm.OwnedSegment.create(fresh_name(), SIZE)
    yield made
    with contextlib.suppress(UsageError):
        made.unlink()
    made.close()


def child(code: Callable[[], Any]) -> int:
    """Fork, run, and return the pid. The child's exit status is what `code` returns, 99 for an exception."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = int(code() or 0)
        finally:
            os._exit(status)
    return pid


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def expect_segv() -> None:
    """In a child that is about to die of SIGSEGV on purpose: no report, no core file."""
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Peer:
    """A forked child that runs `code(peer)` and trades single bytes with the test: no sleeping, no polling."""

    def __init__(self, code: Callable[[Peer], Any]) -> None:
        self.link, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            status = 99
            try:
                self.link.close()
                self.link = theirs
                status = int(code(self) or 0)
            finally:
                os._exit(status)
        theirs.close()
        self.link.settimeout(30)

    def tell(self, byte: bytes = b".") -> None:
        self.link.sendall(byte)

    def hear(self) -> bytes:
        return self.link.recv(1)

    def hear_pid(self) -> int:
        """Descriptor of the process (a grandchild) that sent its pid."""
        return os.pidfd_open(int(self.link.recv(20)))

    def end(self, how: int = 0) -> int:
        if how:
            os.kill(self.pid, how)
        else:
            self.tell()
        try:
            return status_of(self.pid)
        finally:
            self.link.close()


def await_end(pidfd: int) -> None:
    """Wait until a process that is not our child is gone, with all its locks (its sockets close before them)."""
    ready, _, _ = select.select([pidfd], [], [], 30)
    os.close(pidfd)
    assert ready


# --------------------------------------------------------------------------------------------- creating


def test_a_new_segment(segment: shm.OwnedSegment) -> None:
    state = os.stat(f"/dev/shm/{segment.name}")
    assert stat.S_IMODE(state.st_mode) == 0o600
    assert state.st_size == segment.size == len(segment.buf) == len(segment.mm) == SIZE
    assert not segment.buf.readonly
    segment.buf[:4] = b"abcd"
    assert os.pread(segment.fd, 4, 0) == b"abcd"
    assert not os.get_inheritable(segment.fd)
    segment.check()
    assert "owner" in repr(segment)


def test_an_existing_name_is_refused_and_untouched(segment: shm.OwnedSegment) -> None:
    segment.buf[0] = 7
    with pytest.raises(SegmentError, match="in use by a live process"):
        shm.OwnedSegment.create(segment.name, SIZE * 2)
    segment.check()
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
    segment.check()
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
    assert shm.shm_free_bytes() == 4 * MIB
    with pytest.raises(SegmentError, match=r"needs 8\.0 MiB, but only 4\.0 MiB are free in /dev/shm.*--shm-size"):
        shm.OwnedSegment.create(fresh_name(), 8 * MIB)
    assert shm.default_arena_bytes() == 2 * MIB  # 80 % of 4 MiB, rounded down to 2 MiB
    with pytest.raises(SegmentError, match="too little for 2"):
        shm.default_arena_bytes(2)


def test_a_cgroup_limit_and_a_full_machine_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "memory_limit_bytes", lambda: 5 * MIB)
    with pytest.raises(SegmentError, match=r"5\.0 MiB are left of the memory cgroup"):
        shm.OwnedSegment.create(fresh_name(), 6 * MIB)
    assert shm.default_arena_bytes() == 4 * MIB
    monkeypatch.setattr(topology, "meminfo_bytes", lambda field: 3 * MIB if field == "MemAvailable" else None)
    with pytest.raises(SegmentError, match=r"3\.0 MiB of memory are available"):
        shm.OwnedSegment.create(fresh_name(), 4 * MIB)
    assert shm.default_arena_bytes() == 2 * MIB


def test_default_arena_bytes_shares_out() -> None:
    one, three = shm.default_arena_bytes(), shm.default_arena_bytes(3)
    assert one % SIZE == three % SIZE == 0
    assert 0 < three <= one // 3 + SIZE + one // 50  # other programs allocate meanwhile
    with pytest.raises(UsageError):
        shm.default_arena_bytes(0)


def test_a_missing_shm_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "SHM_DIR", "/nonexistent/shm")
    with pytest.raises(SegmentError, match="mount a tmpfs"):
        shm.OwnedSegment.create(fresh_name(), SIZE)
    assert shm.remove_leftovers(PREFIX) == []


@pytest.fixture
def tiny_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tmpfs of 8 MiB as SHM_DIR."""
    at = tmp_path / "shm"
    at.mkdir()
    if os.geteuid() or subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(at)], capture_output=True, check=False
    ).returncode:
        pytest.skip("this user may not mount a tmpfs")
    monkeypatch.setattr(shm, "SHM_DIR", str(at))
    try:
        yield at
    finally:
        gc.collect()
        subprocess.run(["umount", "-l", str(at)], check=True)


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
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)
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
    assert segment.populate() is topology.huge_pages_allowed()
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
    monkeypatch.setattr(topology, "bind_memory", lambda *_: topology.Outcome(True))
    monkeypatch.setattr(topology, "node_free_bytes", lambda _: MIB)
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
        assert leave.wait(30)
        return real(address, length, advice)

    monkeypatch.setattr(pages, "_madvise", slow)
    attached = shm.AttachedSegment.open(segment.name)
    mm = attached.map(0, 8192, writable=False, dontfork=False)
    thread = threading.Thread(target=pages.populate_read, args=(mm,))
    thread.start()
    assert inside.wait(30)
    attached.close()
    assert not mm.closed
    leave.set()
    thread.join(30)
    assert not thread.is_alive()
    mm.close()


# --------------------------------------------------------------------------------------------------- locks


def test_locks_are_seen_by_all_and_taken_by_one(segment: shm.OwnedSegment) -> None:
    assert shm.is_locked(segment.name) and shm.owner_locked(segment.name)
    assert not shm.writer_locked(segment.name)
    segment.lock()
    segment.lock_writer()
    segment.lock_writer()
    assert segment.is_owner and segment.is_writer and shm.writer_locked(segment.name)

    def other() -> int:
        refused = 0
        for lock in (segment.lock_owner, segment.lock_writer):
            try:
                lock()
            except SegmentError:
                refused += 1
        return refused

    assert status_of(child(other)) == 2
    segment.unlock_writer()
    assert not shm.writer_locked(segment.name) and shm.owner_locked(segment.name)
    segment.unlock()
    assert not shm.is_locked(segment.name)
    segment.lock()
    assert shm.is_locked(segment.name)
    segment.check()
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
    assert shm.writer_locked(segment.name)
    with pytest.raises(SegmentError, match="another writer"):
        segment.lock_writer()
    with pytest.raises(SegmentError, match="another writer"):
        segment.unlink()  # not while somebody writes
    segment.check()
    assert worker.end(signal.SIGKILL) == -signal.SIGKILL
    assert not shm.writer_locked(segment.name)
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
    assert not shm.owner_locked(name) and shm.writer_locked(name) and shm.is_locked(name)
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
    assert shm.owner_locked(name)
    os.kill(supervisor.pid, signal.SIGKILL)
    assert status_of(supervisor.pid) == -signal.SIGKILL
    assert shm.owner_locked(name) is not released
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
    assert shm.owner_locked(segment.name)


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
        segment.check()


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
        segment.check()
    successor = shm.OwnedSegment.create(segment.name, SIZE)
    with pytest.raises(CorruptionError):
        segment.check()
    with pytest.raises(SegmentError, match="replaced"):
        segment.lock_writer()
    segment.unlink()
    successor.check()
    successor.unlink()
    successor.close()


def test_check_finds_a_changed_size(segment: shm.OwnedSegment) -> None:
    os.ftruncate(segment.fd, SIZE * 2)
    with pytest.raises(CorruptionError, match="bytes"):
        segment.check()


def test_adopt_takes_over_bytes_and_ownership() -> None:
    name = fresh_name()
    first = shm.OwnedSegment.create(name, SIZE)
    first.buf[:4] = b"warm"
    with pytest.raises(SegmentError, match="still in use"):
        shm.OwnedSegment.adopt(name)
    first.close()
    second = shm.OwnedSegment.adopt(name)
    assert bytes(second.buf[:4]) == b"warm"
    assert second.is_owner and shm.owner_locked(name) and not shm.writer_locked(name)
    assert shm.remove_leftovers(PREFIX) == []
    second.check()
    second.unlink()
    second.close()
    with pytest.raises(SegmentError, match="no segment"):
        shm.OwnedSegment.adopt(name)


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
    for use in (lambda: attached.map(0, 4096, writable=False), attached.writer_locked):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_the_writer_lock_by_an_attached_descriptor(segment: shm.OwnedSegment) -> None:
    with shm.AttachedSegment.open(segment.name) as attached:
        assert not attached.writer_locked()
        segment.lock_writer()
        assert attached.writer_locked()
        segment.unlink()
        assert attached.writer_locked()  # without its name too
        segment.close()
        assert not attached.writer_locked()


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
    if os.geteuid():
        os.chmod(f"/dev/shm/{segment.name}", 0)
    else:
        real = os.open

        def refuse(path: Any, *rest: Any, **keywords: Any) -> int:
            if str(path).endswith(segment.name):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return real(path, *rest, **keywords)

        monkeypatch.setattr(os, "open", refuse)
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
    segment.check()


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
            [python, "-c", script, *arguments], cwd=REPO, capture_output=True, text=True, timeout=60, check=False
        )
        return done.returncode, done.stdout, done.stderr

    assert run(ATTACH_AND_EXIT, segment.name, PREFIX) == (0, "True []\n", "")
    segment.check()
    assert segment.buf[0] == 77
    name = fresh_name()
    assert run(CREATE_AND_EXIT, name) == (0, "0o100600 True\n", "")
    assert shm.remove_leftovers(PREFIX) == [name]


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
            told.append((each, shm.owner_locked(each) and shm.writer_locked(each)))

    with shm.AttachedSegment.open(name) as reader:
        mm = reader.map(0, 4096, writable=False)
        assert mm[0] == 1
        assert shm.remove_leftovers(PREFIX, before_unlink=close_it) == [name]
        assert mm[0] == 0xEE  # whoever maps it still learns that it is closed
    assert told == [(name, True)]
    assert shm.remove_leftovers(PREFIX) == []
    segment.check()


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
            segment.check()  # named, locked, ours
            segment.buf[0] = 1
            segment.check()
            segment.close()
    finally:
        assert [each.end() for each in removers] == [0, 0]
    shm.remove_leftovers(PREFIX)
    assert glob.glob(f"/dev/shm/{PREFIX}*") == []


@pytest.mark.parametrize("moment", ["before the open", "before the lock", "holding the lock"])
def test_a_remover_in_the_gap_of_creation(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """The same race, each interleaving once, by hand."""
    name = fresh_name()
    real_open, real_lock = shm._open, shm._try_lock
    removals: list[list[str]] = []

    def once() -> None:
        monkeypatch.setattr(shm, "_open", real_open)
        monkeypatch.setattr(shm, "_try_lock", real_lock)

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
        monkeypatch.setattr(shm, "_try_lock", interrupted_lock)
    segment = shm.OwnedSegment.create(name, SIZE)
    assert removals == [[name]]
    segment.check()
    assert shm.remove_leftovers(PREFIX) == []
    segment.unlink()
    segment.close()


def test_a_slow_remover_spares_the_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a remover's open and its lock the owner ends in order and a new owner takes the name."""
    name = fresh_name()
    first = shm.OwnedSegment.create(name, SIZE)
    real, successors = shm._try_lock, []

    def interrupted(fd: int, first_byte: int, count: int = 1) -> bool:
        monkeypatch.setattr(shm, "_try_lock", real)
        first.unlink()
        first.close()
        successors.append(shm.OwnedSegment.create(name, SIZE))
        return real(fd, first_byte, count)

    monkeypatch.setattr(shm, "_try_lock", interrupted)
    assert shm.remove_leftovers(PREFIX) == []
    successors[0].check()
    successors[0].unlink()
    successors[0].close()


def test_a_stuck_remover_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "CREATE_WAIT_S", 0.02)
    monkeypatch.setattr(shm, "_try_lock", lambda *_: False)
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

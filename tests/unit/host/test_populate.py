"""simm.host.populate: many files at once, one that fails, and an end in the middle."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from simm.errors import SegmentError
from simm.host import numa, populate
from simm.host.mapped_file import MappedFile
from simm.host.populate import Wanted, populate_all, threads_of

MIB = 1 << 20


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MappedFile]]:
    """Files of 3, 2 and 1 MiB and a page, of pieces of 256 KiB."""
    monkeypatch.setattr(populate, "PIECE_BYTES", 256 << 10)
    monkeypatch.setattr(populate, "LOOK_S", 0.001)
    made = []
    for number, size in enumerate((3 * MIB, 2 * MIB, MIB + 4096)):
        fd = os.memfd_create("t", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        made.append(MappedFile(f"file {number}", size, fd))
    yield made
    for each in made:
        each.close()


def on(progress: bool = True) -> populate.Progress:
    return lambda *_: progress


def at_work() -> list[threading.Thread]:
    """Threads that fault in. Others of this process may end at any time."""
    return [each for each in threading.enumerate() if each.name.startswith("simm-populate")]


def all_there(files: list[MappedFile]) -> bool:
    return all(not each.missing_bytes for each in files)


def test_all_pages_are_there_and_keep_their_bytes(files: list[MappedFile]) -> None:
    files[1].buf[5000:5004] = b"kept"
    seen: list[tuple[int, int, int]] = []
    assert populate_all([Wanted(each, 0) for each in files], progress=lambda *step: not seen.append(step))
    assert all_there(files) and bytes(files[1].buf[5000:5004]) == b"kept"
    assert not at_work()
    total = sum(each.size for each in files)
    assert sum(new for _, new, _ in seen) == seen[-1][0] <= total and {step[2] for step in seen} == {total}
    assert populate_all([], progress=on())


def test_each_piece_is_faulted_in_once(files: list[MappedFile], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, int, int]] = []
    monkeypatch.setattr(MappedFile, "fault_in", lambda file, start, stop: taken.append((file.name, start, stop)))
    assert populate_all([Wanted(each, node) for node, each in enumerate(files)], progress=on())
    wanted = [
        (each.name, at, min(at + (256 << 10), each.size)) for each in files for at in range(0, each.size, 256 << 10)
    ]
    assert sorted(taken) == sorted(wanted)


def test_threads_of_all_nodes_run_at_once(files: list[MappedFile], monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of each node waits for the others: one node after the other would never end."""
    everywhere = threading.Barrier(len(files))
    pinned: set[int] = set()
    monkeypatch.setattr(populate, "threads_of", lambda _: 1)
    monkeypatch.setattr(numa, "pin", pinned.add)
    monkeypatch.setattr(MappedFile, "fault_in", lambda *_: everywhere.wait(120))
    for each in files:
        each.size = populate.PIECE_BYTES
    assert populate_all([Wanted(each, node) for node, each in enumerate(files)], progress=on())
    assert pinned == {0, 1, 2}


def test_an_end_in_the_middle(files: list[MappedFile], monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread touches a page after the return: the caller unmaps them. Each is within a piece at the end."""
    looks: list[int] = []
    looked = threading.Event()
    real = MappedFile.fault_in

    def slow(file: MappedFile, start: int, stop: int) -> None:
        assert looked.wait(120)
        real(file, start, stop)

    def second_look(done: int, *_: int) -> bool:
        looks.append(done)
        if len(looks) > 2:  # what the second one has said is known by now
            looked.set()
        return len(looks) < 2

    monkeypatch.setattr(populate, "threads_of", lambda _: 2)
    monkeypatch.setattr(MappedFile, "fault_in", slow)
    assert populate_all([Wanted(each, 0) for each in files], progress=second_look) is False
    assert not at_work() and not all_there(files)
    assert populate_all([Wanted(each, 0) for each in files], progress=on(False)) is False


def test_an_error_ends_all_threads_and_is_raised(files: list[MappedFile], monkeypatch: pytest.MonkeyPatch) -> None:
    real = MappedFile.fault_in

    def fails(file: MappedFile, start: int, stop: int) -> None:
        if file is files[1] and start:
            raise SegmentError("no room")
        real(file, start, stop)

    monkeypatch.setattr(MappedFile, "fault_in", fails)
    with pytest.raises(SegmentError, match="no room"):
        populate_all([Wanted(each, 0) for each in files], progress=on())
    assert not at_work()


def test_progress_that_raises_leaves_no_thread(files: list[MappedFile]) -> None:
    def interrupted(*_: int) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        populate_all([Wanted(each, 0) for each in files], progress=interrupted)
    assert not at_work()


def test_a_host_without_threads_is_an_error(files: list[MappedFile], monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    with pytest.raises(SegmentError, match="can't start new thread"):
        populate_all([Wanted(each, 0) for each in files], progress=on())


def test_files_of_one_node_are_added_up(files: list[MappedFile], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds room for itself, and not for all: the kernel would end a process."""
    bound: list[tuple[str, int]] = []
    monkeypatch.setattr(MappedFile, "bind", lambda file, _start, _stop, node: not bound.append((file.name, node)))
    monkeypatch.setattr(numa, "node_free_bytes", lambda _: 4 * MIB)
    wanted = [Wanted(files[0], 1, True), Wanted(files[1], 1, True), Wanted(files[2], 0, True)]
    with pytest.raises(SegmentError, match=r"need 5\.0 MiB on NUMA node 1, which has 4\.0 MiB left"):
        populate_all(wanted, progress=on())
    assert bound == [("file 0", 1), ("file 1", 1), ("file 2", 0)]
    monkeypatch.setattr(MappedFile, "bind", lambda *_: False)  # refused: other nodes may have the pages
    assert populate_all(wanted, progress=on()) and all_there(files)
    monkeypatch.setattr(MappedFile, "bind", lambda *_: True)  # nothing is missing any more
    assert populate_all(wanted, progress=on())


def test_threads_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [numa.Node(0, (0, 1, 2, 3, 8), 1), numa.Node(1, (4, 5, 6, 7), 1)]
    monkeypatch.setattr(numa, "nodes", lambda _root: nodes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4})
    assert [threads_of(node) for node in (0, 1)] == [2, 1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9})
    assert threads_of(0) == 1, "a node without a CPU of this process"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert threads_of(99) == populate.THREADS_MAX

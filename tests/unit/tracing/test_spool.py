"""The folder of traces: whose it is, how large it gets, and what an operator asks for in it."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simm.constants import TRACE_CONTROL
from simm.errors import ConfigError, UsageError
from simm.tracing import spool
from simm.tracing.spans import Operation
from tests.support.acl import USER, named, set_acl
from tests.support.client_values import forked
from tests.support.ended import ended
from tests.support.interrupts import everywhere
from tests.support.other_user import needs_root
from tests.support.waiting import wait_until

#: Of a process, as in the names of its files.
START = f"{1_700_000_000 * 10**9:016x}"


class User:
    """Whoever wants what is recorded to be written."""


ONE, TWO = User(), User()


def operation(name: str = "get") -> Operation:
    one = Operation(name, os.urandom(16), b"", kept=True)
    one.segment("copy", one.began, one.began + 5)
    return one


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_what_a_process_records_is_collected(folder: Path) -> None:
    mine = spool.spool_in(folder)
    assert spool.spool_in(folder) is mine
    mine.join(ONE)
    mine.join(TWO)
    mine.recorder.add(operation())
    wait_until(lambda: len(spool.collect(folder)[0]) == 2, "the thread has written the spans")
    mine.leave(ONE)
    mine.recorder.add(operation("put"))
    mine.leave(TWO)  # the last one writes what is left
    events, bad, refused, _ = spool.collect(folder)
    assert [event["name"] for event in events] == ["get", "copy", "put", "copy"] and (bad, refused) == (0, 0)
    assert folder.stat().st_mode & 0o777 == 0o700 and mine.path.stat().st_mode & 0o777 == 0o600


def test_files_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "FILE_BYTES_MAX", 4096)
    mine = spool.spool_in(folder)
    for _ in range(40):
        for _ in range(20):
            mine.recorder.add(operation())
        mine.write()
    sizes = [path.stat().st_size for path in spool.files_in(folder)]
    assert len(sizes) == 2 and max(sizes) <= 4096 and min(sizes) > 0
    assert spool.collect(folder)[1:] == (0, 0, 0)


def test_issue_what_no_file_can_hold_is_not_encoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a disk had hung, the writer took ten seconds of the program's for what it then wrote over."""
    monkeypatch.setattr(spool, "FILE_BYTES_MAX", 4096)
    encoded: list[Operation] = []
    real = spool.events_of

    def events_of(one: Operation, pid: int) -> Any:
        encoded.append(one)
        return real(one, pid)

    monkeypatch.setattr(spool, "events_of", events_of)
    mine = spool.spool_in(folder)
    every = [operation() for _ in range(500)]
    for one in every:
        mine.recorder.add(one)
    mine.write()
    assert len(encoded) < 30 and encoded == every[: -len(encoded) - 1 : -1]
    found = [event["args"]["span_id"] for event in spool.collect(folder)[0] if event["args"].get("op")]
    assert found == [one.span_id.hex() for one in every[-len(found) :]] and len(found) >= 8


def test_issue_the_newest_spans_are_collected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All were, which took thirteen times the size of the files. Of no process they are left out as a whole."""
    mine = spool.spool_in(folder)
    for written, times in ((1006, (0, 1, 2)), (1009, (4, 9, 3)), (1008, (5, 8, 7))):
        for at in times:
            one = operation()
            one.began, one.ended, one.segments[:] = at * 10**9, at * 10**9 + 5, ()
            mine.recorder.add(one)
        mine.write()
        os.utime(mine.path, (written, written))
        mine._begin()
    monkeypatch.setattr(spool, "EVENTS_MAX", 4)
    events, bad, refused, left_out = spool.collect(folder)
    assert (bad, refused, left_out) == (0, 0, 5)
    assert sorted(event["ts"] for event in events) == [2e6, 7e6, 8e6, 9e6], "2 was written at 1006: 2 s after 4"


def test_issue_spans_before_a_reboot_do_not_count_as_the_newest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of spans starts again with the host: those of a long uptime before took the place of all new ones."""
    mine = spool.spool_in(folder)
    for began, written in ((10**12, 1), (1000, 2)):
        for at in range(4):
            one = operation(f"written {written}")
            one.began, one.ended, one.segments[:] = began + at * 1000, began + at * 1000 + 5, ()
            mine.recorder.add(one)
        mine.write()
        os.utime(mine.path, (written, written))
        mine._begin()
    monkeypatch.setattr(spool, "EVENTS_MAX", 4)
    events, _, _, left_out = spool.collect(folder)
    assert {event["name"] for event in events} == {"written 2"} and (len(events), left_out) == (4, 4)


def test_issue_who_cannot_join_is_no_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as one, so the thread that writes never ended."""
    mine = spool.spool_in(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", no_descriptor)
        with pytest.raises(ConfigError, match="Too many open files"):
            mine.join(ONE)
    assert not mine._users and mine._thread is None


def no_descriptor(*_: object) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_issue_a_client_that_ends_within_the_lock_of_its_spool_ends(folder: Path) -> None:
    """A finalizer, or a signal's handler, that ended one there waited for ever."""
    mine = spool.spool_in(folder)
    mine.join(ONE)
    mine.join(TWO)

    def within() -> None:
        with mine._lock:
            mine.leave(ONE)

    assert ended(within), "it hangs"
    mine.leave(TWO)
    assert not mine._users


def test_the_files_of_the_oldest_processes_go(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    for number in range(9):
        path = folder / f"{number}-{START}.spans"
        path.write_bytes(b"")
        os.utime(path, ns=(number, number))
    (folder / "other").write_bytes(b"")
    assert spool.forget_oldest(folder, keep=2) == 5
    kept = [f"{each}-{START}.spans" for each in range(5, 9)]
    assert sorted(path.name for path in folder.iterdir()) == [*kept, "other"]
    assert spool.forget_oldest(folder / "nowhere") == 0


def test_forked_children_are_bounded_as_other_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that forks a child for each request, with a client that traces."""
    monkeypatch.setattr(spool, "PROCESSES_MAX", 3)
    mine = spool.spool_in(folder)
    mine.join(ONE)
    for _ in range(20):
        mine._after_fork()
        mine.recorder.add(operation())
        mine.write()
    assert len(spool.files_in(folder)) == 2 * 3 - 1
    assert mine.path in spool.files_in(folder)
    mine.leave(ONE)


def test_a_disk_that_refuses_costs_the_spans_and_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = spool.spool_in(folder)
    folder.rmdir()
    for _ in range(3):
        mine.recorder.add(operation())
        mine.write()
    assert len(mine.recorder) == 0
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [f"traces cannot be written to {folder}"]


@pytest.mark.parametrize("full", [False, True])
def test_issue_a_folder_that_was_away_is_written_to_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """What was traced while there was none counted as written, and a full file that is gone could not be replaced."""
    mine = spool.spool_in(folder)

    def trace() -> None:
        for _ in range(5):
            mine.recorder.add(operation())
        mine.write()

    trace()
    size = mine.path.stat().st_size
    monkeypatch.setattr(spool, "FILE_BYTES_MAX", size if full else 2 * size)
    shutil.rmtree(folder)
    for _ in range(4):
        trace()
    spool.open_folder(folder)
    trace()
    assert len(spool.collect(folder)[0]) == 10


def test_issue_what_a_full_disk_refuses_does_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as written, so files with hardly a span took the place of the full one before them."""
    monkeypatch.setattr(spool, "FILE_BYTES_MAX", 1 << 20)
    mine = spool.spool_in(folder)
    mine.recorder.add(operation())
    mine.write()
    limits, took = resource.getrlimit(resource.RLIMIT_FSIZE), mine.path.stat().st_size
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:  # a write beyond it fails, as on a full disk, behind what still fits
        resource.setrlimit(resource.RLIMIT_FSIZE, (took + 100, limits[1]))
        for _ in range(40):
            mine.recorder.add(operation())
            mine.write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert mine.path.stat().st_size == mine._size == took + 100


def test_a_folder_that_becomes_unsafe_costs_the_spans_and_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = spool.spool_in(folder)
    folder.parent.chmod(0o777)
    for _ in range(3):
        mine.recorder.add(operation())
        mine.write()
    assert len(mine.recorder) == 0 and not list(folder.iterdir())
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [f"traces cannot be written to {folder}"]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    for name in ("file", "link", "file/below"):
        with pytest.raises(ConfigError, match="--trace-dir"):
            spool.spool_in(tmp_path / name)


def test_others_are_shut_out_of_a_folder(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    spool.open_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_folder_with_files_of_ours_alone_is_tightened(folder: Path, mode: int) -> None:
    spool.ask(folder, "1", 0, 60.0)
    for name in (f"12-{START}.spans", f"12-{START}.old", f".{TRACE_CONTROL}.12"):
        (folder / name).write_bytes(b"")
    folder.chmod(mode)
    spool.open_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", [
    "notes.old", f"1-{START}.spans.gz", f"1-{START}.spans/", f"-1-{START}.old", "1-x.old", "control.json.1",
    "2024-10.old", "123-abc.old", "20241130-1.spans", f"1-0{START}.old", f"12345678901-{START}.old",
])  # fmt: skip
def test_issue_a_folder_with_files_of_others_stays_as_it_is(folder: Path, name: str) -> None:
    """``--trace-dir ~/shared`` shut others out of it, and files of other programs were removed for their names."""
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    foreign = folder / name
    foreign.mkdir() if name.endswith("/") else foreign.write_bytes(b"mine")
    for call in (lambda: spool.open_folder(folder), lambda: spool.ask(folder, "1", 0, 60.0)):
        with pytest.raises(ConfigError, match=r"files that are no traces, as .*: name an empty folder by --trace-dir"):
            call()
    assert folder.stat().st_mode & 0o777 == 0o755 and [path.name for path in folder.iterdir()] == [foreign.name]
    assert spool.forget_oldest(folder, keep=0) == 0 and foreign.exists()
    folder.chmod(0o700)  # as its owner may decide
    spool.open_folder(folder)
    mine = spool.spool_in(folder)
    mine.recorder.add(operation())
    mine.write()
    assert spool.forget_oldest(folder, keep=0) == 1 and [path.name for path in folder.iterdir()] == [foreign.name]


def others_may_write(parent: Path) -> None:
    parent.chmod(0o777)


def a_group_may_write(parent: Path) -> None:
    """One that has other members."""
    os.chown(parent, -1, 12345)
    parent.chmod(0o770)


def an_acl_lets_another_user_write(parent: Path) -> None:
    set_acl(parent, named((USER, 7, 12345)))


def others_own(parent: Path) -> None:
    os.chown(parent, 12345, 12345)


@pytest.mark.parametrize(
    "change",
    [
        others_may_write, an_acl_lets_another_user_write, pytest.param(a_group_may_write, marks=needs_root),
        pytest.param(others_own, marks=needs_root),
    ],
)  # fmt: skip
def test_a_folder_that_others_could_replace_is_refused(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """In /tmp anybody makes /tmp/simm-UID first, and a link in it to any folder of this user."""
    parent, victim = tmp_path / "simm-0", tmp_path / "victim"
    for each in (parent, victim):
        each.mkdir(mode=0o700)
    (victim / "precious.old").write_bytes(b"mine")
    spool.open_folder(parent / "trace")  # the control: as long as the parent is this user's
    change(parent)
    for call in (
        lambda: spool.open_folder(parent / "trace"), lambda: spool.ask(parent / "trace", "1", 0, 60.0),
        lambda: spool.end(parent / "trace"), lambda: spool.collect(parent / "trace"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"other users can replace.*--trace-dir"):
            call()
    (parent / "trace").rmdir()
    (parent / "trace").symlink_to(victim, target_is_directory=True)
    with pytest.raises(ConfigError, match="--trace-dir"):
        spool.forget_oldest(parent / "trace", keep=0)
    assert (victim / "precious.old").read_bytes() == b"mine"


def test_a_parent_with_the_sticky_bit_is_none_that_others_could_use(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert spool.open_folder(tmp_path / "trace").is_dir()


def test_garbage_and_links_in_the_folder_are_left_out(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o700)
    secret = tmp_path / "secret"
    secret.write_text("{}\n")
    (folder / f"1-{START}.spans").symlink_to(secret)
    (folder / f"2-{START}.spans").write_bytes(b"\x00" * 20_000 + b"\nnull\n")
    os.mkfifo(folder / f"3-{START}.spans")
    events, bad, refused, _ = spool.collect(folder)
    assert events == [] and bad == 2 and refused == 2


# -- what an operator asks for ---------------------------------------------------------------------------


def test_an_operator_asks_and_ends_it(folder: Path) -> None:
    control = spool.Control(folder / TRACE_CONTROL)
    now = time.time()
    assert control.look(now) is None
    asked = spool.ask(folder, "0.5", 20, 60.0)
    assert control.look(now) == asked and asked.ratio == 0.5 and asked.slow_ms == 20
    assert control.look(now) is control.look(now)
    assert control.look(now + 120.0) is None, "its time is over"
    assert spool.end(folder) and control.look(now) is None
    assert not spool.end(folder)


def test_issue_a_control_file_that_could_not_be_read_is_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a descriptor at that moment it counted as read, and asked for nothing until it changed."""
    asked = spool.ask(folder, "1", 0, 60.0)
    control = spool.Control(folder / TRACE_CONTROL)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_descriptor)
        assert control.look(time.time()) is None
    assert control.look(time.time()) == asked
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_descriptor)
        os.utime(folder / TRACE_CONTROL, ns=(1, 1))
        assert control.look(time.time()) == asked, "what it asked for counts until it can be read"


@pytest.mark.parametrize("name", ["directory", "link", "broken"])
def test_issue_a_control_file_that_cannot_be_read_is_told_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """It was tried each second without a word."""

    def broken(*_: object) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    asked = spool.ask(folder, "1", 0, 60.0)
    path = folder / TRACE_CONTROL
    control = spool.Control(path)
    assert control.look(time.time()) == asked
    with monkeypatch.context() as patch:
        if name == "broken":
            os.utime(path, ns=(1, 1))
            patch.setattr(os, "read", broken)
        else:
            path.unlink()
            path.mkdir() if name == "directory" else path.symlink_to(folder / "elsewhere")
        for _ in range(3):
            assert control.look(time.time()) is None
    said = {"directory": "or is no file", "link": "Too many levels of symbolic links", "broken": "Input/output error"}
    assert len(caplog.messages) == 1 and str(path) in caplog.messages[0] and said[name] in caplog.messages[0]
    if name == "broken":
        assert control.look(time.time()) == asked, "it is tried again"


def test_a_control_file_that_goes_while_it_is_looked_at_is_not_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool.ask(folder, "1", 0, 60.0)
    real = os.open

    def gone(path: Path, flags: int) -> int:
        spool.end(folder)
        return real(path, flags)

    monkeypatch.setattr(os, "open", gone)
    assert spool.Control(folder / TRACE_CONTROL).look(time.time()) is None and not caplog.records


@pytest.mark.parametrize("text", [
    "", "null", "[]", "{}", '{"ratio": 2, "slow_ms": 0, "until": 1e12}', '{"ratio": 1, "slow_ms": -1, "until": 1e12}',
    '{"ratio": "1", "slow_ms": 0, "until": 1}', '{"ratio": 1, "slow_ms": 0, "until": NaN}', "[" * 4000, "\x00",
    '{"ratio": 1, "slow_ms": 0, "until": 1e300}', '{"ratio": 1, "slow_ms": 0, "until": 1' + "0" * 400 + "}",
])  # fmt: skip
def test_a_control_file_that_is_none_asks_for_nothing(folder: Path, text: str) -> None:
    folder.mkdir(mode=0o700)
    (folder / TRACE_CONTROL).write_text(text)
    assert spool.Control(folder / TRACE_CONTROL).look(time.time()) is None


def test_a_control_file_of_others_is_not_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool.ask(folder, "1", 0, 60.0)
    assert spool.Control(folder / TRACE_CONTROL).look(time.time()) is not None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(spool, "_own", lambda fd: os.fstat(fd).st_uid == os.geteuid())
    assert spool.Control(folder / TRACE_CONTROL).look(time.time()) is None


def test_a_control_file_that_changes_again_and_again_costs_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(mode=0o700)
    path = folder / TRACE_CONTROL
    control = spool.Control(path)
    for at in range(20):
        path.write_bytes(b"nothing")
        os.utime(path, ns=(at, at))
        assert control.look(time.time()) is None
    assert len(caplog.records) == 1
    spool.ask(folder, "1", 0, 60.0)
    assert control.look(time.time()) is not None
    path.write_bytes(b"nothing")
    assert control.look(time.time()) is None and len(caplog.records) == 2


def test_a_link_for_a_control_file_is_not_followed(folder: Path, tmp_path: Path) -> None:
    spool.ask(folder, "1", 0, 60.0)
    (folder / TRACE_CONTROL).rename(tmp_path / "elsewhere")
    (folder / TRACE_CONTROL).symlink_to(tmp_path / "elsewhere")
    assert spool.Control(folder / TRACE_CONTROL).look(time.time()) is None


@pytest.mark.parametrize(("ratio", "seconds"), [("off", 60.0), ("2", 60.0), ("1", 0.0), ("1", 1e9)])
def test_a_wish_that_cannot_be_is_refused(folder: Path, ratio: str, seconds: float) -> None:
    with pytest.raises(UsageError):
        spool.ask(folder, ratio, 0, seconds)
    assert not (folder / TRACE_CONTROL).exists()


def test_what_is_asked_for_is_plain_json(folder: Path) -> None:
    spool.ask(folder, "0.01", 0, 60.0)
    assert set(json.loads((folder / TRACE_CONTROL).read_text())) == {"ratio", "slow_ms", "until"}


# -- a disk that hangs -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_nobody_waits_for_a_thread_whose_folder_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a fork nor who uses another folder, nor the child."""
    hangs, goes_on = threading.Event(), threading.Event()
    real, got, done = spool.open_folder, [], []

    def hanging(path: Path) -> Path:
        if path == folder and not goes_on.is_set():
            hangs.set()
            goes_on.wait()
        return real(path)

    def others() -> None:
        done.append(forked(lambda: spool.spool_in(folder.with_name("child")).folder.is_dir()))
        done.append(spool.spool_in(folder.with_name("other")).folder)

    monkeypatch.setattr(spool, "open_folder", hanging)
    waiting = threading.Thread(target=lambda: got.append(spool.spool_in(folder)))
    meanwhile = threading.Thread(target=others)
    waiting.start()
    try:
        assert hangs.wait(60)
        meanwhile.start()
        wait_until(lambda: len(done) == 2, "the others have what they want")
    finally:
        goes_on.set()
        waiting.join()
        meanwhile.join()
    assert done == [0, folder.with_name("other")] and got == [spool.spool_in(folder)]


@pytest.mark.parametrize("users", [1, 2])
def test_who_leaves_does_not_write_to_a_disk_that_hangs(
    folder: Path, users: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    append = spool.Spool._append

    def hanging(mine: spool.Spool, lines: list[bytes]) -> None:
        hangs.set()
        goes_on.wait()
        append(mine, lines)

    mine = spool.spool_in(folder)
    monkeypatch.setattr(spool.Spool, "_append", hanging)
    monkeypatch.setattr(spool, "WRITE_S", 3600.0)  # nothing is written before the end
    all_users = [User() for _ in range(users)]
    for user in all_users:
        mine.join(user)
    monkeypatch.setattr(spool, "WRITE_S", 0.01)
    mine.recorder.add(operation())
    leaving = threading.Thread(target=mine.leave, args=(all_users[0],))
    leaving.start()
    try:
        assert hangs.wait(60)
        wait_until(lambda: not leaving.is_alive(), "it has left")
    finally:
        goes_on.set()
        leaving.join()
    wait_until(lambda: len(spool.collect(folder)[0]) == 2, "once the disk goes on, it is written")
    for user in all_users[1:]:
        mine.leave(user)


def test_issue_an_interrupted_end_leaves_no_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It left a lock taken, for which the thread that writes waited for ever; or the thread was told nothing."""
    monkeypatch.setattr(spool, "WRITE_S", 0.05)
    mine = spool.spool_in(folder)
    running: list[Any] = []

    def begin() -> None:
        mine._users, mine._thread = weakref.WeakSet(), None
        mine.join(ONE)
        running.append(mine._thread)

    def check() -> None:
        mine.leave(ONE)  # made again
        thread = running.pop()
        wait_until(lambda: not any(each is thread for each in threading.enumerate()), "the thread has ended")
        begin()

    begin()
    assert everywhere(lambda: mine.leave(ONE), check, ("simm.tracing.spool", "simm.host.threads", "threading")) > 5
    mine.leave(ONE)


def test_issue_a_thread_that_was_not_told_to_end_ends_beside_its_successor(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between forgetting and waking it left one thread more each time, for as long as the process ran."""
    monkeypatch.setattr(spool, "WRITE_S", 0.05)
    mine = spool.spool_in(folder)
    mine.join(ONE)
    former, mine._thread = mine._thread, None  # as leave() does first
    mine.join(TWO)
    try:
        wait_until(lambda: former is not None and not former.is_alive(), "the former has ended")
        assert mine._thread is not None and mine._thread.is_alive()
    finally:
        mine.leave(ONE)
        mine.leave(TWO)


def test_issue_a_user_that_is_dropped_ends_what_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that nobody closed was kept in part, and the thread with it, for as long as the process ran."""
    monkeypatch.setattr(spool, "WRITE_S", 0.05)
    mine, user = spool.spool_in(folder), User()
    mine.join(user)
    mine.recorder.add(operation())
    thread, gone = mine._thread, weakref.ref(user)
    del user
    assert gone() is None and thread is not None
    wait_until(lambda: not thread.is_alive(), "the thread has ended")
    assert len(spool.collect(folder)[0]) == 2 and mine._thread is None
    mine.join(ONE)
    assert mine._thread is not None
    mine.leave(ONE)

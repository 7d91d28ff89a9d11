"""``simm top``: what its view says, and that the terminal is as it was afterwards, whatever ends it."""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simm.config.parsers import Address
from simm.config.settings import Settings, load
from simm.ipc.counts import BUCKETS, COUNTERS, Word
from simm.tools.ctl import top
from simm.tools.ctl.top import Look, grown, spark, view
from simm.tools.ctl.workers import Asked
from tests.support.waiting import WAIT_S

STATS: dict[str, Any] = {
    "pid": 7, "entries": 3, "data_bytes": 1 << 30, "free_bytes": 1 << 29, "granted_bytes": 0, "pins": 0,
    "sessions_quarantined": 0, "epoch": 4, "shards": 16384, "fenced": False, "evictions": {"own": 2},
    "set_evictions": 1, "group_evictions": 0, "evicted_with_groups": 0, "put_failures": {"no_room": 0}, "policy": "lru",
    "poll_us": 50, "segment": "simm-none", "clients": [], "clients_left_out": 0,
}  # fmt: skip
CLIENT = {
    "session": 1, "pid": 1 << 30, "namespace": "a", "kind": "client", "quarantined": False, "grants": 0,
    "granted_bytes": 5, "pins": 2, "idle_s": 7.0, "believed": True,
}  # fmt: skip


def look(at: float, status: Any = None, trouble: tuple[str, ...] = (), **words: int) -> Look:
    counts = [0] * COUNTERS
    for name, count in words.items():
        counts[getattr(Word, name)] = count
    latencies = [0] * (BUCKETS + 1)
    latencies[3] = words.get("HITS", 0)
    counted = {"namespaces": {"a\x1b[2J": counts, "idle": [0] * COUNTERS}, "latencies": {"get": latencies}}
    made = Look([Asked("host", 0, "/n", {**STATS, "counted": counted, "clients": [CLIENT]})], status, trouble)
    made.at = at
    return made


def test_that_no_manager_answers_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(top, "ask_all", lambda *_: [])
    sight = top.Sight(Settings(runtime_dir=tmp_path, manager=(Address("127.0.0.1", 1),)))
    (said,) = sight.look().trouble
    assert said.startswith("no manager answers (127.0.0.1:1: ") and said.count("no manager answers") == 1


def test_it_believes_the_users_that_the_settings_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    def nobody(*arguments: Any) -> list[Asked]:
        seen.append(arguments)
        return []

    monkeypatch.setattr(top, "ask_all", nobody)
    monkeypatch.setattr(top.Sight, "_status", lambda _: {})
    settings = load("client", {"runtime_dir": str(tmp_path), "server_uid": "4711"}, {})
    top.Sight(settings, "host").look()
    assert seen == [(tmp_path, "host", (4711,))]


def test_rates_are_those_between_two_looks() -> None:
    before, now = look(10.0, HITS=100, PUTS=10), look(12.0, HITS=300, ABSENT=100, HIT_BYTES=4096, PUTS=30)
    text = "\n".join(view(now, before, [50.0, 150.0], 200, 50))
    assert "gets 150/s, 2K/s" in text and "puts 10/s" in text and "hit ratio 66.7%" in text
    assert "get 4us/4us (p50/p99)" in text and "this host alone" in text and "512M of 1G (50%)" in text
    assert "\x1b" not in text and text.index("(others)") < text.index("idle"), "what no namespace is called"
    first = "\n".join(view(before, None, [], 200, 50))
    assert "after the next look" in first
    assert grown(look(13.0, HITS=5), now)[0]["(others)"]["hits"] == 0, "a worker that began anew"


@pytest.mark.parametrize("pid", [7, 8])
def test_issue_a_worker_that_missed_a_look_has_no_rates(pid: int) -> None:
    """All that it had ever done was shown as done since the look before. A new process may have taken its place."""

    def both(at: float, hits: int, asked: list[Asked]) -> Look:
        made = Look([*look(at, HITS=hits).asked, *asked], None, ())
        made.at = at
        return made

    def other(hits: int, pid: int = 7) -> list[Asked]:
        (asked,) = look(0.0, HITS=hits).asked
        return [Asked("other", 0, "/n", {**asked.stats, "pid": pid})]

    silent = [Asked("other", 0, "/n", {}, "it is silent")]
    looks = [both(0, 10, other(5_000_000)), both(2, 30, silent), both(4, 50, other(5_000_900, pid)),
             both(6, 70, other(5_000_920, pid))]  # fmt: skip
    history: list[float] = []
    for before, now in itertools.pairwise(looks):
        top._remember(history, now, before)
    assert history == [10.0, 10.0, 20.0]
    if pid == 8:
        assert grown(looks[2], looks[0])[0]["(others)"]["hits"] == 10.0
    for before, now, hits in ((looks[1], looks[2], 20), (looks[2], looks[3], 40)):
        newer, older = (sum(each.of(now.workers & before.workers)[1]["get"]) for each in (now, before))
        assert newer - older == hits


def test_the_manager_tells_of_the_whole_cluster() -> None:
    worker = {"used_bytes": 1, "capacity_bytes": 4, "entries": 5, "shards": 6, "puts": 7, "evictions": 8}
    status = {
        "cluster": "c", "epoch": 3, "shards_without_owner": 9, "shards_moving": 0,
        "nodes": [{"name": name, "state": state, "draining": False, "drained": False, "workers": [worker]}
                  for name, state in (("far", "running"), ("gone", "dead"))],
    }  # fmt: skip
    text = "\n".join(view(look(1.0, status), None, [], 200, 50))
    assert "1 dead, 1 running, 9 shards without an owner" in text and "far" in text and "gone" in text
    assert "1 of 4 (25%)" in text, "what is dead holds nothing"


@pytest.mark.parametrize(
    ("width", "shown"), [(10, "a  12  166"), (9, "a  12  …"), (7, "a  12 …"), (5, "a  …"), (2, "a…"), (1, "…")]
)
def test_a_number_is_whole_or_not_there(width: int, shown: str) -> None:
    assert top._cut("a  12  166", width) == shown


def test_a_narrow_terminal_shows_no_part_of_a_number() -> None:
    """On 60 columns 166 evictions were shown as 1."""
    worker = {"used_bytes": 1, "capacity_bytes": 1, "entries": 1, "shards": 1, "puts": 1, "evictions": 166}
    node = {"name": "n", "state": "running", "draining": False, "drained": False, "workers": [worker]}
    status = {"cluster": "c", "epoch": 1, "nodes": [node], "shards_moving": 0, "shards_without_owner": 0}

    def row(width: int) -> str:
        return next(line for line in view(look(12.0, status), None, [], width, 40) if line.startswith("n "))

    whole = row(200)
    assert whole.split()[-1] == "166" and row(len(whole)) == whole
    assert row(len(whole) - 2).split() == [*whole.split()[:-1], "…"]


@pytest.mark.parametrize("height", range(1, 40, 3))
@pytest.mark.parametrize("width", [1, 20, 300])
def test_every_size_is_kept(width: int, height: int) -> None:
    now = look(12.0, trouble=("no manager answers: \x1b[31m",), HITS=3)
    lines = view(now, look(10.0), [1.0] * 100, width, height)
    assert len(lines) <= height and all(len(line) <= width and line.isprintable() for line in lines)
    if height > 12 and width > 100:
        text = "\n".join(lines)
        assert "SERVER" in text and "NAMESPACE" in text and "no manager answers" in text


def test_sparks() -> None:
    assert spark([0, 4, 8], 10) == " ▄█" and spark([1, 2, 3], 2)[-1] == "█" and spark([], 5) == spark([1], 0) == ""
    assert spark([0, 0], 5) == "  "


# -- under a real terminal ---------------------------------------------------------------------------

PROGRAM = """
import sys
from simm.tools.ctl import top
from simm.tools.console import end_cleanly_on_signals, guarded
class Sight:
    def __init__(self, *_): pass
    def look(self):
        if FAILS: raise RuntimeError("no such luck")
        return top.Look([], None, ["no manager answers: none"])
    def close(self): pass
top.Sight = Sight
end_cleanly_on_signals()
sys.exit(guarded(lambda: top.main(["--every", "100s"]), "simm top"))
"""


class Terminal:
    """A program under a pty."""

    def __init__(self, fails: bool, folder: Path) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(30, 100)
        self.before = termios.tcgetattr(self.slave)
        self.seen = b""
        environment = {**os.environ, "TERM": "xterm", "XDG_RUNTIME_DIR": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"FAILS = {fails}\n{PROGRAM}"], stdin=self.slave, stdout=self.slave,
            stderr=self.slave, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, wanted: bytes) -> None:
        end = time.monotonic() + WAIT_S
        while wanted not in self.seen:
            assert time.monotonic() < end, self.seen[-500:]
            if select.select([self.master], [], [], 0.5)[0]:
                self.seen += os.read(self.master, 1 << 16)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture(params=[False])
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(request.param, tmp_path)
    yield made
    made.close()


ENTER, LEAVE = b"\x1b[?1049h\x1b[?25l", b"\x1b[?25h\x1b[?1049l"


def ended(terminal: Terminal) -> int:
    terminal.until(LEAVE)
    code = terminal.process.wait(WAIT_S)
    assert termios.tcgetattr(terminal.slave) == terminal.before, "the terminal is as it was"
    assert terminal.seen.count(ENTER) == terminal.seen.count(LEAVE) == 1
    return code


@pytest.mark.parametrize(("keys", "code"), [(b"q", 0), (b"xyQ", 0), (b"\x03", 130), (b"\x1a\x1aq", 0)])
def test_keys_leave_the_terminal_as_it_was(terminal: Terminal, keys: bytes, code: int) -> None:
    terminal.until(b"no manager answers")
    mine = termios.tcgetattr(terminal.slave)
    assert not mine[3] & termios.ECHO and not mine[3] & termios.ICANON, "control: it was changed"
    terminal.type(keys)
    assert ended(terminal) == code


def test_a_signal_leaves_it_so_too(terminal: Terminal) -> None:
    terminal.until(b"no manager answers")
    terminal.process.send_signal(signal.SIGTERM)
    assert ended(terminal) == 143


@pytest.mark.parametrize("terminal", [True], indirect=True)
def test_an_error_of_ours_leaves_it_so_too(terminal: Terminal) -> None:
    assert ended(terminal) == 1
    terminal.until(b"no such luck")
    assert terminal.seen.index(LEAVE) < terminal.seen.index(b"Traceback"), "where one can read it"


def test_another_size_is_used_at_once(terminal: Terminal) -> None:
    terminal.until(b"no manager answers")
    terminal.resize(5, 12)
    terminal.until("! no manage…\x1b[0m\x1b[K\x1b[J".encode())
    drawn = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", terminal.seen[terminal.seen.rindex(b"\x1b[H") :])
    assert all(len(line) <= 12 for line in drawn.decode().split("\r\n"))
    terminal.type(b"q")
    assert ended(terminal) == 0


def test_issue_a_size_that_changed_while_a_view_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for the size of the view, and used at the next look only."""
    master, slave = pty.openpty()
    with open(slave) as stdin, open(slave, "w", closefd=False) as stdout:
        screen = top.Screen(stdin, stdout)
        size = screen.size()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 7, 33, 0, 0))
        assert size != screen.size() == (33, 7)
        clock = iter(range(10))  # a second each time: a wait that sees no change ends by an error
        monkeypatch.setattr(top, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        assert screen.wait(100.0, size) == ""
        assert next(clock) == 2, "at the first look"
    os.close(master)


def test_without_a_terminal_it_prints_views(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Sight:
        def __init__(self, *_: Any) -> None:
            self.at = 0.0

        def look(self) -> Look:
            self.at += 2.0
            return look(self.at, HITS=int(self.at) * 10)

        def close(self) -> None:
            pass

    monkeypatch.setattr(top, "Sight", Sight)
    monkeypatch.setattr(top.time, "sleep", lambda _seconds: None)
    assert top.main(["--count", "3"]) == 0
    text = capsys.readouterr().out
    assert text.count("simm top") == 3 and text.count("gets 10/s") == 2 and "\x1b[?" not in text

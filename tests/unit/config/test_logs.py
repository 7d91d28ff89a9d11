"""How log lines look, that none is lost when the file is renamed, and that their number is limited."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.config.logs import (
    LINE_CHARACTERS_MAX,
    LINES_MAX,
    TRACEBACKS_MAX,
    WINDOW_S,
    JsonFormatter,
    LineFormatter,
    LogFile,
    RateLimit,
    log_as,
    reopen_logs,
    set_up_logging,
    timestamp,
)
from simm.config.settings import Settings
from simm.errors import line_about

LOG = logging.getLogger("simm.test")


@pytest.fixture
def path(tmp_path: Path, logging_as_it_was: None) -> Iterator[Path]:
    """Where lines go; the file is closed at the end."""
    yield tmp_path / "log"
    for handler in logging.getLogger("simm").handlers:
        if isinstance(handler, LogFile):
            handler.close()


def record(message: str = "moved %d", *details: Any, trace: bool = False) -> logging.LogRecord:
    exc_info: Any = None
    if trace:
        try:
            raise ValueError("evil\x1b[2J")
        except ValueError:
            exc_info = sys.exc_info()
    return logging.LogRecord("simm.a", logging.WARNING, "a.py", 1, message, details, exc_info)


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A zone that is ahead of UTC by half an hour more than a whole number of them."""
    monkeypatch.setenv("TZ", "XXX-05:30")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_times_have_their_zone(zone: None) -> None:
    assert timestamp(0.25) == "1970-01-01T05:30:00.250+05:30"


def test_a_line_says_when_who_and_what(zone: None) -> None:
    made = record("moved %d", 3)
    made.created = 1.5
    line = LineFormatter("host-21", "worker-0").format(made)
    assert line == f"1970-01-01T05:30:01.500+05:30 WARNING host-21 worker-0[{os.getpid()}] simm.a: moved 3"


def test_json_lines_are_objects(zone: None) -> None:
    formatter = JsonFormatter("host-21", "worker-0")
    made = record("moved %d\n\x1b[2J \u202e", 3)
    made.created = 1.5
    line = formatter.format(made)
    assert line.isascii() and line.isprintable()
    assert json.loads(line) == {
        "time": "1970-01-01T05:30:01.500+05:30", "level": "warning", "server": "host-21", "process": "worker-0",
        "pid": os.getpid(), "logger": "simm.a", "message": "moved 3\n\x1b[2J \u202e",
    }  # fmt: skip
    line = formatter.format(record("failed", trace=True))
    assert line.isprintable() and json.loads(line)["exception"].splitlines()[-1] == "ValueError: evil\x1b[2J"


def test_a_line_names_the_session_and_the_trace_that_it_is_about() -> None:
    made = record("closing %s", "unix#17")
    made.__dict__.update(line_about(0x2A, bytes(15) + b"\x01"))
    trace = "0" * 31 + "1"
    assert LineFormatter("s", "p").format(made).endswith(f"closing unix#17 (session 0x2a, trace_id {trace})")
    found = json.loads(JsonFormatter("s", "p").format(made))
    assert (found["session"], found["trace_id"], found["message"]) == ("0x2a", trace, "closing unix#17")
    made = record("session %#x closed", 0x2A)
    made.__dict__.update(line_about(0x2A))
    assert LineFormatter("s", "p").format(made).endswith("session 0x2a closed"), "once is enough"
    assert not line_about()


def test_issue_other_codes_session_is_no_text() -> None:
    """Another library logs with a field of that name. And a number is not part of a longer one."""
    for formatter in (LineFormatter("s", "p"), JsonFormatter("s", "p")):
        made = record("closing session %#x", 0x12)
        made.__dict__["session"] = 7
        assert "7" in formatter.format(made)
    made = record("closing session %#x", 0x12)
    made.__dict__.update(line_about(0x1))
    assert LineFormatter("s", "p").format(made).endswith("(session 0x1)")


@pytest.mark.parametrize("formatter", [LineFormatter, JsonFormatter])
def test_a_line_has_a_bound(formatter: type[LineFormatter]) -> None:
    assert len(formatter("s", "p").format(record("x" * 100_000))) < LINE_CHARACTERS_MAX + 300


def test_the_setting_chooses_the_form(path: Path) -> None:
    set_up_logging(Settings(log_file=path, log_format="json", name="host-21"), "manager")
    LOG.warning("first")
    log_as("stream of worker 3")
    LOG.warning("second")
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["server"], first["process"], second["process"]) == ("host-21", "manager", "stream-3")
    set_up_logging(Settings(log_file=path, name="host-21"), "manager")
    log_as("worker 3")
    LOG.warning("third")
    assert re.search(r"\d WARNING host-21 worker-3\[\d+\] simm.test: third$", path.read_text().rstrip())


# -- rotation ----------------------------------------------------------------------------------------


def test_no_line_goes_into_a_renamed_file(path: Path) -> None:
    set_up_logging(Settings(log_file=path), "test")
    LOG.warning("before")
    old = path.rename(path.with_suffix(".1"))
    LOG.warning("after")
    path.unlink()
    LOG.warning("anew")
    assert "before" in old.read_text() and "after" not in old.read_text()
    assert "anew" in path.read_text() and "after" not in path.read_text()


def test_a_process_without_lines_leaves_a_renamed_file_too(path: Path) -> None:
    """Else it would keep the space of a file that was removed, for as long as it has nothing to say."""
    set_up_logging(Settings(log_file=path), "test")
    (handler,) = logging.getLogger("simm").handlers
    assert isinstance(handler, LogFile) and handler.stream is not None
    number = handler.stream.fileno()
    path.rename(path.with_suffix(".1"))
    reopen_logs()
    assert os.readlink(f"/proc/self/fd/{number}") == str(path), "another thread may have the number in its hand"
    assert not os.get_inheritable(number)
    before = os.stat(path)
    reopen_logs()
    assert os.stat(path).st_ino == before.st_ino, "nothing has changed"


def test_a_new_file_that_cannot_be_opened(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(Settings(log_file=path), "test")
    path.rename(path.with_suffix(".1"))
    path.mkdir()
    for number in range(3):
        LOG.warning("line %d", number)
    assert capsys.readouterr().err.count("cannot write to the log file") == 1
    assert path.with_suffix(".1").read_text().count("line") == 3, "the old one stays in use"
    path.rmdir()
    LOG.warning("line 4")
    assert "line 4" in path.read_text()


def test_issue_a_line_after_the_file_was_closed_raises_nothing(path: Path) -> None:
    """Another thread logs while a store replaces the file, or at exit."""
    handler = LogFile(path)
    handler.close()
    handler.emit(record())
    handler.follow()
    assert handler.stream is None, "nobody would close it"
    assert path.read_text() == ""


def test_a_device_is_no_file_to_follow(path: Path) -> None:
    handler = LogFile(Path("/dev/null"))
    with contextlib.closing(handler):
        assert handler.stream is not None
        opened = os.fstat(handler.stream.fileno())
        handler.follow()
        assert os.fstat(handler.stream.fileno()) == opened


# -- how many ----------------------------------------------------------------------------------------


def texts(limit: RateLimit, *records: logging.LogRecord) -> list[str]:
    return [each.getMessage() for each in records if limit.filter(each)]


def test_lines_of_one_text_have_a_limit_and_are_counted() -> None:
    now = [50.0]
    limit = RateLimit(lambda: now[0])
    lines = texts(limit, *(record("node %d is dead", number) for number in range(LINES_MAX + 7)))
    assert len(lines) == LINES_MAX and lines[0] == "node 0 is dead"
    assert lines[-1] == f"node {LINES_MAX - 1} is dead (more lines like this are left out for {WINDOW_S:.0f} s)"
    assert texts(limit, record("another")) == ["another"], "each text has a number of its own"
    now[0] += WINDOW_S
    assert texts(limit, record("node %d is dead", 1)) == ["node 1 is dead (and 7 lines like this were left out)"]
    now[0] += WINDOW_S
    assert texts(limit, record("node %d is dead", 2)) == ["node 2 is dead"]


def test_tracebacks_have_a_lower_limit_and_debug_has_none() -> None:
    limit = RateLimit()
    assert len(texts(limit, *(record("failed", trace=True) for _ in range(TRACEBACKS_MAX + 5)))) == TRACEBACKS_MAX
    debug = [record("seen %d", number) for number in range(LINES_MAX + 5)]
    for each in debug:
        each.levelno = logging.DEBUG
    assert len(texts(limit, *debug)) == len(debug)


def test_texts_without_end_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simm.config.logs.TEXTS_MAX", 10)
    limit = RateLimit()
    for number in range(100):
        assert limit.filter(record(f"text {number}"))
    assert len(limit._counted) <= 10


def test_the_limit_is_in_use(path: Path) -> None:
    set_up_logging(Settings(log_file=path), "test")
    for _ in range(TRACEBACKS_MAX + 5):
        try:
            raise ValueError
        except ValueError:
            LOG.exception("failed")
    assert path.read_text().count("Traceback") == TRACEBACKS_MAX

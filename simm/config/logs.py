"""Log lines of all SiMM processes: how they look, where they go, and how many there may be.

    2026-11-23T06:53:07.647+01:00 WARNING host-21 worker-0[10081] simm.arena.store: recovery: 2 slots were ...
    {"time": "2026-11-23T06:53:07.647+01:00", "level": "warning", "server": "host-21", "process": "worker-0", ...}

``server`` is the data server's name, else the host's; ``process`` is what this one does there. A line about a client's
session with a worker, or a call in a trace, names it: ``session`` as ``simm ctl sessions`` does, and ``trace_id``.

All processes of a server append to one file. A process that finds another file under the name, or none, continues in a
new one: before each line, and when SIGHUP asks it to (``net/process.py``). So no line is lost to a rotated file, and no
process keeps one open for long.

Lines without end are held back twice. What peers cause goes through ``net/admission.py``, a few lines a level. What is
left has a limit for each text here, and a much lower one for tracebacks. DEBUG has none.

Keys of users and tokens are in no line above DEBUG (``tests/unit/config/test_logged_text.py``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from ..errors import printable
from .settings import Settings

LINE_CHARACTERS_MAX: Final = 8192
#: Lines of one text, and tracebacks, in so many seconds.
LINES_MAX: Final = 1000
TRACEBACKS_MAX: Final = 20
WINDOW_S: Final = 10.0
#: Texts whose lines are counted; more than the program has.
TEXTS_MAX: Final = 4096


class LineFormatter(logging.Formatter):
    """Formats lines without control characters, whatever a peer has put into their details."""

    def __init__(self, server: str, process: str) -> None:
        super().__init__()
        self.server = server
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and below it the lines of a traceback."""
        where = f"{self.server} {self.process}[{record.process}] {record.name}"
        head = f"{timestamp(record.created)} {record.levelname} {where}: {record.getMessage()}"
        ids = [f"{name} {each}" for name, each in ids_of(record).items() if not _has_word(head, each)]
        head += f" ({', '.join(ids)})" if ids else ""
        lines = [printable(head, LINE_CHARACTERS_MAX)]
        if trace := self.trace(record):
            lines += [printable(line, LINE_CHARACTERS_MAX) for line in trace.splitlines()]
        return "\n".join(lines)

    def trace(self, record: logging.LogRecord) -> str:
        """Return a record's traceback, empty without one."""
        return self.formatException(record.exc_info) if record.exc_info else ""


class JsonFormatter(LineFormatter):
    """Formats each record as a JSON object in a line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, Any] = {
            "time": timestamp(record.created), "level": record.levelname.lower(), "server": self.server,
            "process": self.process, "pid": record.process, "logger": record.name,
            **ids_of(record), "message": record.getMessage()[:LINE_CHARACTERS_MAX],
        }  # fmt: skip
        if trace := self.trace(record):
            fields["exception"] = trace[-LINE_CHARACTERS_MAX:]
        return json.dumps(fields)


def ids_of(record: logging.LogRecord) -> dict[str, str]:
    """Return what a line is about, as far as it was logged with that (``net/admission.py``)."""
    return {name: str(record.__dict__[name]) for name in ("session", "trace_id") if name in record.__dict__}


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text) is not None


FORMATTERS: Final = {"text": LineFormatter, "json": JsonFormatter}


def timestamp(seconds: float) -> str:
    """Return a time since 1970 as ISO 8601 has it, in this host's zone."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


class RateLimit(logging.Filter):
    """Lets through ``LINES_MAX`` lines of one text in ``WINDOW_S`` seconds, and says that and how many were left out.

    Memory: one entry for each text, ``TEXTS_MAX`` at most.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        #: By text: until when its lines are counted, and their number.
        self._counted: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a line too many."""
        if record.levelno <= logging.DEBUG:
            return True
        most = TRACEBACKS_MAX if record.exc_info else LINES_MAX
        text = record.name, record.levelno, str(record.msg)[:200]
        now = self._clock()
        until, lines = self._counted.get(text, (0.0, 0))
        left_out = 0
        if now >= until:
            left_out = max(0, lines - most)
            until, lines = now + WINDOW_S, 0
            if len(self._counted) >= TEXTS_MAX:
                self._counted.clear()
        lines += 1
        self._counted[text] = until, lines
        if left_out:
            _add(record, f" (and {left_out} lines like this were left out)")
        if lines == most:
            _add(record, f" (more lines like this are left out for {until - now:.0f} s)")
        return lines <= most


def _add(record: logging.LogRecord, text: str) -> None:
    record.msg, record.args = record.getMessage() + text, ()


class LogFile(logging.FileHandler):
    """A log file. Lines that cannot be written are lost, which is reported on stderr once and raises nothing.

    So are lines of other threads that come after it was closed, without a report.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self._complained = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line to the file that has the name now."""
        self.follow()
        if self.stream is not None:  # else it would be opened again, and nobody would close it
            super().emit(record)

    def follow(self) -> None:
        """Continue in the file that has the name now, or in a new one, if the name is not that of the open file.

        The descriptor keeps its number, so another thread may be writing. If no file can be opened, the old one stays.
        """
        stream = self.stream
        if stream is None:  # closed
            return
        try:
            number = stream.fileno()
            ours = os.fstat(number)
            try:
                theirs = os.stat(self.baseFilename)
                if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
                    return
            except FileNotFoundError:
                pass
            opened = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as exc:
            self._complain(exc)
            return
        os.dup2(opened, number, inheritable=False)
        os.close(opened)
        self._complained = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Handle a line that could not be written."""
        exc = sys.exc_info()[1]
        if isinstance(exc, OSError):
            self._complain(exc)
        else:
            super().handleError(record)

    def _complain(self, exc: Exception) -> None:
        if not self._complained:
            self._complained = True
            with contextlib.suppress(OSError, ValueError):
                why = getattr(exc, "strerror", None) or exc
                print(f"simm: cannot write to the log file {self.baseFilename}: {why}", file=sys.stderr)


#: What else this process does at SIGHUP; a forked child does it too.
_HOOKS: list[Callable[[], object]] = []


def on_reload(hook: Callable[[], object]) -> None:
    """Have :func:`reopen_logs` call a function as well, here and in children forked later. It must not wait."""
    _HOOKS.append(hook)


def reopen_logs() -> None:
    """Let the log files of this process be those that have their names now: others may have been renamed."""
    for handler in logging.getLogger("simm").handlers:
        if isinstance(handler, LogFile):
            handler.follow()
    for hook in _HOOKS:
        hook()


def log_as(process: str) -> None:
    """Name what this process does in each line from now on: a forked child is not its supervisor."""
    for handler in logging.getLogger("simm").handlers:
        if isinstance(handler.formatter, LineFormatter):
            handler.formatter.process = process.replace(" of worker ", "-").replace(" ", "-")


def log_handler(settings: Settings, process: str) -> tuple[logging.Handler, str]:
    """Return a handler for the settings' file, or for stderr without one; and the reason if it is for stderr instead.

    ``process``: what this process does.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    trouble = ""
    path = settings.log_file
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handler = LogFile(path)
        except OSError as exc:
            trouble = f"cannot log to {path} ({exc.strerror or exc}): logging to stderr"
    handler.setFormatter(FORMATTERS[settings.log_format](settings.name, process))
    handler.addFilter(RateLimit())
    return handler, trouble


def set_up_logging(settings: Settings, process: str) -> None:
    """Log to the settings' file, or to stderr if it cannot be opened. Call this before opening any file.

    Afterwards descriptors 0, 1 and 2 are open. ``process``: what this process does.
    """
    hold_standard_descriptors()
    handler, trouble = log_handler(settings, process)
    root = logging.getLogger("simm")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(settings.log_level.upper())
    if trouble:
        root.warning("%s", trouble)


#: The standard streams that this process was started without, and has the null device for.
CLOSED: Final[set[str]] = set()


def hold_standard_descriptors() -> None:
    """Open the null device as each of stdin, stdout and stderr that is closed.

    Otherwise the next file or socket would get the number, and messages for stderr would go into it.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, fd)  # even if it has that number already: standard streams are inheritable
            os.set_inheritable(fd, True)
            if opened != fd:
                os.close(opened)
    CLOSED.update(name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None)
    # Python sets None for a closed descriptor, and print() then uses stdout instead of stderr.
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")

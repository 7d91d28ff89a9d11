"""The end of every SiMM command: an exit code, and at most one sentence on stderr.

Exit codes
    0    success; for exists: every key is stored
    1    a key was not found or not stored; a check failed; a server could not start, or the system lacks what it needs
    2    wrong usage, wrong settings, or the cluster cannot be reached; of other commands, the system lacks something
    130  Ctrl-C (143 for SIGTERM, 129 for SIGHUP), after all started processes have ended
    141  the reader of stdout closed it early (``| head``); prints no message
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn

from ..errors import ConfigError, SimmError, TransportError, UsageError, may_pass, printable

EXIT_OK: Final = 0
EXIT_NO: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_PIPE: Final = 141

#: What the system lacks at the moment. A unit tries again, which it does not after EXIT_USAGE.
_OF_NOW: Final = frozenset((
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EADDRINUSE, errno.EADDRNOTAVAIL,
    errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.EIO, errno.ESTALE,
))  # fmt: skip


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence and a hint at --help, without a list of flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def end_cleanly_on_signals() -> None:
    """Turn SIGTERM and SIGHUP into SystemExit, so that a command that started processes runs its ``finally``.

    With ``nohup`` a SIGHUP stays ignored.
    """
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _terminated)


def _terminated(signum: int, _frame: Any) -> NoReturn:
    # The clean-up takes a moment, and a terminal that closes may send both.
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + signum)


def print_any_text() -> None:
    """Let stdout and stderr print each character: one that their encoding lacks is escaped, as ``\\u2588``.

    Bytes that are written to their buffers stay as they are, and so does what PYTHONIOENCODING says of such characters.
    """
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        # In UTF-8, surrogateescape prints the names of files as they are; other encodings lack more than those.
        whole = "strict" if codecs.lookup(stream.encoding).name == "utf-8" else "surrogateescape"
        if stream.errors in ("strict", whole):
            with contextlib.suppress(ValueError):  # it is closed
                stream.reconfigure(errors="backslashreplace")


def require_shown(value: bytes, remedy: str) -> None:
    """Raise UsageError if stdout is a terminal, which would obey a value's control characters. Text may be shown.

    ``remedy``: what to do instead.
    """
    if not sys.stdout.isatty():
        return
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\0"
    if not all(character.isprintable() or character in "\n\r\t" for character in text):
        raise UsageError(f"the value is binary, and stdout is a terminal: {remedy}")


def guarded(run: Callable[[], int], prog: str, *, serves: bool = False) -> int:
    """Call ``run`` and return an exit code. Prints at most one sentence for an error.

    ``serves``: it is a server, which a unit starts again after EXIT_NO, so it ends with that for what may pass. Of
    other commands EXIT_NO is an answer, as of ``exists``: those that could not ask end with EXIT_USAGE.
    """
    print_any_text()
    try:
        try:
            code = run()
        except SystemExit as exc:  # argparse, SIGTERM
            code = exc.code if isinstance(exc.code, int) else EXIT_OK if exc.code is None else EXIT_NO
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout at its end, which must not fail.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except SimmError as exc:
        print(f"{prog}: {printable(str(exc))}", file=sys.stderr)
        passes = serves and isinstance(exc, ConfigError) and may_pass(exc)
        return EXIT_USAGE if isinstance(exc, (UsageError, ConfigError, TransportError)) and not passes else EXIT_NO
    except OSError as exc:
        print(f"{prog}: {printable(_os_text(exc))}", file=sys.stderr)
        # Below 0 are those of names that are not known, or not yet.
        return EXIT_NO if serves and (exc.errno in _OF_NOW or (exc.errno or 0) < 0) else EXIT_USAGE
    except MemoryError:
        print(f"{prog}: out of memory; use smaller values or a smaller --working-set", file=sys.stderr)
        return EXIT_NO if serves else EXIT_USAGE


def _os_text(exc: OSError) -> str:
    """Return the text of an OSError, with a remedy if one is known."""
    name = f"{exc.filename}: " if exc.filename is not None else ""
    remedy = {
        errno.ENOSPC: "; make room there and try again",
        errno.ENOENT: "; check the name",
        errno.EACCES: "; check the file's owner and mode",
        errno.EISDIR: "; name a file",
        errno.EMFILE: "; raise `ulimit -n`",
    }.get(exc.errno or 0, "")
    return f"{name}{exc.strerror or exc}{remedy}"

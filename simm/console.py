"""How every SiMM command ends: an exit code, and at most one sentence on stderr.

Exit codes
    0    done; for exists: every key is there
    1    a key was not there or not stored; a check failed; a server could not start
    2    bad usage, bad settings, or the cluster cannot be reached
    130  Ctrl-C (143 for SIGTERM), after everything that was started has ended
    141  whoever read our stdout closed it early (``| head``), which is no error worth a word
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn

from .errors import ConfigError, SimmError, TransportError, UsageError

EXIT_OK: Final = 0
EXIT_NO: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_PIPE: Final = 141


class Parser(argparse.ArgumentParser):
    """One sentence and where to read on, instead of a screen of flags before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def end_cleanly_on_sigterm() -> None:
    """SIGTERM becomes SystemExit, so that a command which started processes gets to its ``finally``."""
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(_signum: int, _frame: Any) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def guarded(run: Callable[[], int], prog: str) -> int:
    """Run, and turn every way to end into an exit code and at most one sentence."""
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
        # The interpreter flushes stdout once more at its end; let that go nowhere.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except SimmError as exc:
        print(f"{prog}: {exc}", file=sys.stderr)
        return EXIT_USAGE if isinstance(exc, (UsageError, ConfigError, TransportError)) else EXIT_NO
    except OSError as exc:
        print(f"{prog}: {_os_text(exc)}", file=sys.stderr)
        return EXIT_USAGE
    except MemoryError:
        print(f"{prog}: out of memory; use smaller values or a smaller --working-set", file=sys.stderr)
        return EXIT_NO


def _os_text(exc: OSError) -> str:
    """What the system refused, with what can be done where that is known."""
    name = f"{exc.filename}: " if exc.filename is not None else ""
    remedy = {
        errno.ENOSPC: "; make room there and try again",
        errno.ENOENT: "; check the name",
        errno.EACCES: "; check the file's owner and mode",
        errno.EISDIR: "; name a file",
        errno.EMFILE: "; raise `ulimit -n`",
    }.get(exc.errno or 0, "")
    return f"{name}{exc.strerror or exc}{remedy}"

"""Exceptions that a signal's handler raises, at each place where CPython runs one.

It does so as a Python function begins and after a call of C code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Interrupted(BaseException):
    """What the handler raises."""


def everywhere(
    call: Callable[[], object], check: Callable[[], object], modules: tuple[str, ...] = ("simm.",), *,
    waits: bool = False,
) -> int:  # fmt: skip
    """Interrupt a call at each of its places, and check after each; return their number.

    The places are in modules whose names begin so, and in functions called ``acquire``. Not in that of logging: a lock
    that is left there stops every other thread that logs, for the rest of the process.

    ``waits``: also in the middle of each wait for a lock, which the exception ends without it.
    """
    left = 0

    def look(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        module = frame.f_globals["__name__"]
        ours = module.startswith(modules) or (frame.f_code.co_name == "acquire" and module != "logging")
        waiting = waits and event == "c_call" and argument.__name__ == "acquire"
        if ours and (waiting or event in ("call", "c_return")):
            left -= 1
            if left == -1:
                sys.setprofile(None)
                raise Interrupted

    for stop in range(1000):
        left = stop
        sys.setprofile(look)
        try:
            call()
        except Interrupted:
            pass
        finally:
            sys.setprofile(None)
        check()
        if left >= 0:
            return stop
    raise AssertionError("it does not end")

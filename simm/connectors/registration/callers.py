"""Who calls: the engine's objects on the stack, for what an engine makes without saying what it makes it for.

Looked at once, when a connector is made. What is found is kept by weak references, so nothing of the engine lives
longer.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final

#: Frames that are looked at.
_DEPTH_MAX: Final = 48


def _frames(names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the local variables of those calls around this one that have all of these, the innermost first.

    Until Python 3.12 whoever looks at a call's variables keeps what they are now as long as the call: no other call's
    are looked at.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEPTH_MAX):
        if frame is None:
            return
        code = frame.f_code
        if {*code.co_varnames, *code.co_cellvars, *code.co_freevars}.issuperset(names):
            yield frame.f_locals
        frame = frame.f_back


def caller(module: str, kind: str) -> Callable[[], Any] | None:
    """Return a reference to the innermost caller of a class: its name, in a module whose name begins so."""
    try:
        for names in _frames(("self",)):
            own = names.get("self")
            if type(own).__name__ == kind and type(own).__module__.startswith(module):
                return weakref.ref(own)
    except Exception:  # whatever else is on the stack of a program
        return None
    return None


def local_values(names: Sequence[str]) -> list[Any] | None:
    """Return the local variables of the innermost call that has all of these names."""
    try:
        for found in _frames(names):
            if all(each in found for each in names):
                return [found[each] for each in names]
    except Exception:
        return None
    return None

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


def _frames() -> Iterator[Mapping[str, Any]]:
    """Yield the local variables of the calls that this one is part of, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEPTH_MAX):
        if frame is None:
            return
        yield frame.f_locals
        frame = frame.f_back


def caller(module: str, kind: str) -> Callable[[], Any] | None:
    """Return a reference to the innermost caller of a class: its name, in a module whose name begins so."""
    for names in _frames():
        own = names.get("self")
        if type(own).__name__ == kind and type(own).__module__.startswith(module):
            try:
                return weakref.ref(own)
            except TypeError:
                return None
    return None


def local_values(names: Sequence[str]) -> list[Any] | None:
    """Return the local variables of the innermost call that has all of these names."""
    for found in _frames():
        if all(each in found for each in names):
            return [found[each] for each in names]
    return None

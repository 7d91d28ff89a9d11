"""Copies of mapped bytes for forked children, which do not inherit the map itself.

A view of an arena is pinned for the process that asked for it. A forked child has no pin. If it inherited the map, the
bytes under its copy of the view could become another value's, and the map would keep a dead server's memory in use
(``pages.py``). Without anything at the address, touching the view would be a SIGSEGV. So the child gets a copy:

1. Before the fork the parent copies the pages of all lent ranges to one anonymous map. The pins still hold, so the
   bytes are the values.
2. The child moves those pages to their addresses, over the reservation that ``pages.py`` has put there.
3. The parent unmaps the copy.

An interrupt may cut any of these short. The interpreter then prints it and goes on. So the lock is taken and released
by hooks of its own, which are C functions. A fork without the lock, as the wait for it was interrupted, copies
nothing. What the parent has not unmapped goes at its next fork; up to ``COPY_BYTES_MAX`` stay mapped until then, or for
good if the interrupt comes in the very moment in which they are mapped. An owner whose copy a child has not moved loses
its range, unless the interrupt comes as the hook of the child begins.

A signal's handler may fork while its thread does. If that is copying, the handler's child gets no copies, and the other
fork goes on with its own. A handler that forks after that, and before the other fork, leaves that one without copies.

``COPY_BYTES_MAX`` bounds what a fork costs in time and memory. An owner whose range is beyond it, or for which there is
no memory, is told so in the child. Buffers that were made from it before the fork lead to the reservation there, and
touching them is a SIGSEGV: there is no right byte that such a load could return.

A lock is held across the fork. Without it another thread could lend a range after the copy was made.
``subprocess`` runs no fork hooks, unless it is given a ``preexec_fn``: its children execute another program at once.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import math
import threading
import traceback
import weakref
from typing import Any, Final, NamedTuple, Protocol

from ..constants import PAGE_BYTES
from . import fork, pages

#: Bytes that one fork copies at most, in whole pages: a value of any size.
COPY_BYTES_MAX: Final = 65 << 20


class Owner(Protocol):
    """Who has exported a lent range."""

    def lose(self) -> None:
        """Give the range up: this is a child, and the range is not there."""


class _Lent(NamedTuple):
    address: int
    length: int
    #: Keeps the memory mapped.
    keep: Any
    owner: weakref.ref[Owner]

    @property
    def pages(self) -> tuple[int, int]:
        """Return the addresses of the first page and of the end of the last one."""
        return self.address // PAGE_BYTES * PAGE_BYTES, -(-(self.address + self.length) // PAGE_BYTES) * PAGE_BYTES


#: Gives each range its number.
numbers: Final = itertools.count()
_LENT: Final[dict[int, _Lent]] = {}
#: What the parent had lent at the fork. It keeps the reservation at the copies' addresses from being unmapped.
_INHERITED: Final[dict[int, _Lent]] = {}
#: Reentrant, as a signal handler may fork while this thread lends.
_LOCK: Final = threading.RLock()
#: The copies for the fork that is under way: (address in the map, page range).
_copies: list[tuple[int, tuple[int, int]]] = []
#: The map that they are in, (address, bytes); one, unless an interrupt has left another.
_maps: list[tuple[int, int]] = []
#: :func:`_copy` is at it. A handler of a signal may fork meanwhile.
_copying = False


def lend(number: int, address: int, length: int, keep: Any, owner: Owner) -> None:
    """Let forked children have copies of these bytes until :meth:`end`. ``keep`` is kept until then. O(1).

    The map is one of ``pages.keep_from_forks``. The bytes do not change until then. ``number`` is of :data:`numbers`.
    """
    lent = _Lent(address, length, keep, weakref.ref(owner))
    with _LOCK:
        _LENT[number] = lent


def end(number: int) -> None:
    """End what :func:`lend` began. Takes no lock, as finalizers call it. Twice is harmless."""
    if _LENT.pop(number, None) is None:
        _INHERITED.pop(number, None)


def _chosen(lent: list[_Lent]) -> list[tuple[int, int]]:
    """Return the pages to copy, as disjoint ranges in order: those of the oldest entries, as far as the bound goes."""
    chosen: list[tuple[int, int]] = []
    left = COPY_BYTES_MAX
    for start, stop in (each.pages for each in lent):
        if stop - start <= left:
            chosen.append((start, stop))
            left -= stop - start
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(chosen):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _copy() -> None:
    """Copy what is lent, in the parent before the fork."""
    global _copying
    if not fork.holds(_LOCK) or _copying:
        return
    copies, maps, _copying = _copies, _maps, True  # with no call since it was looked at, nor before the ``try``
    try:
        _unmap(copies, maps)  # what an interrupt has left
        lent = list(_LENT.values())
        ranges = _chosen(lent)
        size = sum(stop - start for start, stop in ranges)
        at = pages.map_anonymous(size) if ranges else None
        if at is None:
            return
        maps.append((at, size))  # before the copies, which take the longest
        for start, stop in ranges:
            if not _copying:  # this is the child of a handler, which has returned: nothing is mapped there
                return
            ctypes.memmove(at, start, stop - start)  # without the GIL
            copies.append((at, (start, stop)))
            at += stop - start
    finally:
        _copying = False


def _drop() -> None:
    """Unmap the copies, in the parent."""
    if fork.holds(_LOCK) and not _copying:
        _unmap(_copies, _maps)


def _unmap(copies: list[tuple[int, tuple[int, int]]], maps: list[tuple[int, int]]) -> None:
    copies.clear()
    while maps:
        pages.unmap(*maps.pop())


def _place() -> None:
    """Move the copies to their addresses. The owners of all other ranges lose them."""
    global _copies, _maps, _copying
    copies, maps, partial = _copies, _maps, _copying
    _copies, _maps, _copying = [], [], False  # with no call in between: a handler that forks here finds nothing
    lent = list(_LENT.values())
    placed: list[tuple[int, int]] = []
    try:
        _INHERITED.update(_LENT)
        _LENT.clear()  # the child's own children inherit the copies
        if partial or not fork.holds(_LOCK):  # of the thread, or of the fork, around this one
            _unmap(copies, maps)
        for at, wanted in copies:
            if pages.move_to_reserved(at, wanted[1] - wanted[0], wanted[0]):
                placed.append(wanted)
    finally:
        _lose(lent, placed)


def _lose(lent: list[_Lent], placed: list[tuple[int, int]]) -> None:
    """Let the owners of ranges that are in none of those placed, in order, lose them. Empties ``lent``."""
    tried: _Lent | None = None
    while lent:
        each = lent[-1]
        try:
            while lent:
                each = lent[-1]
                first, last = each.pages
                found = bisect.bisect_right(placed, (first, math.inf)) - 1
                owner = each.owner()
                if owner is not None and (found < 0 or last > placed[found][1]):
                    owner.lose()
                del lent[-1]
        except BaseException:  # of an owner, or an interrupt: it gets another try, and the others their turn
            traceback.print_exc()
            if tried is each:
                del lent[-1]
            tried = each


fork.in_child(_place)
fork.around(_copy, _drop)
fork.hold(_LOCK)  # the last one, so around the two

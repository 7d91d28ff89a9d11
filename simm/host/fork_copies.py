"""Copies of mapped bytes for forked children, which do not inherit the map itself.

A view of an arena is pinned for the process that asked for it. A forked child has no pin. If it inherited the map, the
bytes under its copy of the view could become another value's, and the map would keep a dead server's memory in use
(``pages.py``). Without anything at the address, touching the view would be a SIGSEGV. So the child gets a copy:

1. Before the fork the parent copies the pages of all lent ranges to one anonymous map. The pins still hold, so the
   bytes are the values.
2. The child moves those pages to their addresses, over the reservation that ``pages.py`` has put there.
3. The parent unmaps the copy.

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
import threading
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
#: The copy for the fork that is under way: (address in the copy, page range).
_copies: list[tuple[int, tuple[int, int]]] = []


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


def _before() -> None:
    """Copy what is lent, in the parent, with the lock held until after the fork."""
    _LOCK.acquire()
    if not _LENT:
        return
    lent = list(_LENT.values())
    ranges = _chosen(lent)
    if not ranges:
        return
    at = pages.map_anonymous(sum(stop - start for start, stop in ranges))
    if at is None:
        return
    for start, stop in ranges:
        ctypes.memmove(at, start, stop - start)  # without the GIL
        _copies.append((at, (start, stop)))
        at += stop - start


def _in_parent() -> None:
    for at, (start, stop) in _copies:
        pages.unmap(at, stop - start)
    _copies.clear()
    _LOCK.release()


def _place() -> None:
    """Move the copies to their addresses. The owners of all other ranges lose them."""
    placed = [wanted for at, wanted in _copies if pages.move_to_reserved(at, wanted[1] - wanted[0], wanted[0])]
    starts = [start for start, _ in placed]
    _copies.clear()
    lent = list(_LENT.values())
    _INHERITED.update(_LENT)
    _LENT.clear()  # the child's own children inherit the copies
    for each in lent:
        first, last = each.pages
        at = bisect.bisect_right(starts, first) - 1
        owner = each.owner()
        if owner is not None and (at < 0 or last > placed[at][1]):
            owner.lose()


fork.in_child(_place)
fork.around(_before, _in_parent, _LOCK.release)

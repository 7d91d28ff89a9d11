"""The part of an arena that must outlive its worker besides the entries: namespaces, sessions, grants and pins.

Only the worker writes the ledger, and only its successor reads it. Each line has a valid word. It is stored last when
the line is created and first when it ends, so a line cut off by the writer's death does not count.

    undo        128 B   one record, written by ``table.py``
    namespaces  256 x 128 B    see ``namespaces.py``
    sessions    n x 64 B       valid = session id
    holds       n x 32 B       valid = grant or pin id (never used twice)

A *hold* names a chunk that another process may be writing (grant) or reading (pin). The chunk is not reused until the
hold has ended. A valid slot outranks a grant line: the worker clears the line only after the entry is published, and
may die in between.

A worker with a vault (``arena/vault.py``) has its ledger there. The arena then has a copy of the namespaces for those
who list its values, and of everything else only while it is suspended.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np

from ..errors import CapacityError
from .layout import HOLD_LINE_BYTES, NAMESPACE_LINE_BYTES, NAMESPACES, SESSION_LINE_BYTES, UNDO_BYTES, Geometry
from .namespaces import NamespaceTable

_SESSION: Final = struct.Struct("@QQQQ")
_HOLD_BODY: Final = struct.Struct("@QQII")
_SIZE_KIND: Final = struct.Struct("@II")
#: Hold lines from which on they are written by numpy, each field of all of them at once.
COLUMNS_FROM: Final = 24
assert _SESSION.size <= SESSION_LINE_BYTES and _HOLD_BODY.size + 8 == HOLD_LINE_BYTES

#: Kinds of a hold line.
GRANT: Final = 1
PIN: Final = 2


class SessionLine(NamedTuple):
    """A session in the ledger. ``started`` is the process's start time, which detects a reused pid."""

    session: int
    pid: int
    started: int
    namespace: int


class HoldLine(NamedTuple):
    """A grant or pin in the ledger. ``offset`` is from the segment's start."""

    hold: int
    session: int
    offset: int
    chunk: int
    kind: int


class Ledger:
    """The ledger of one arena. Adding or ending a line is O(1).

    ``mm`` maps the arena. ``own``: where the ledger lies if not there, from its undo record on.
    """

    def __init__(self, mm: mmap.mmap, geometry: Geometry, own: memoryview | None = None) -> None:
        buf = memoryview(mm)
        start = geometry.ledger_offset + UNDO_BYTES
        end = start + NAMESPACES * NAMESPACE_LINE_BYTES
        shown = None if own is None else buf[start:end]
        if own is not None:
            buf.release()
            buf = own[: geometry.ledger_bytes]
            start, end = UNDO_BYTES, UNDO_BYTES + end - start
        self.namespaces = NamespaceTable(buf[start:end], shown)
        self.names = self.namespaces.names
        start, end = end, end + geometry.session_lines * SESSION_LINE_BYTES
        self._sessions = buf[start:end]
        self._session_words = self._sessions.cast("Q")
        start, end = end, end + geometry.hold_lines * HOLD_LINE_BYTES
        self._holds = buf[start:end]
        self._hold_words = self._holds.cast("Q")
        self._hold_columns = tuple(np.frombuffer(self._hold_words, np.uint64).reshape(-1, 4).T)
        self._buf = buf
        self._pack_hold = _HOLD_BODY.pack_into
        self._free_sessions = list(range(geometry.session_lines - 1, -1, -1))
        self._free_holds = list(range(geometry.hold_lines - 1, -1, -1))

    # -- sessions ---------------------------------------------------------------------------

    def add_session(self, session: int, pid: int, started: int, namespace: int) -> int:
        """Write a session's line, and return its number. Raise CapacityError if none is free."""
        if not self._free_sessions:
            raise CapacityError("all session lines of the arena are in use: too many clients")
        line = self._free_sessions.pop()
        at = line * SESSION_LINE_BYTES
        _SESSION.pack_into(self._sessions, at, 0, pid, started, namespace)
        self._session_words[at // 8] = session
        return line

    def end_session(self, line: int) -> None:
        """End a session's line."""
        self._session_words[line * SESSION_LINE_BYTES // 8] = 0
        self._free_sessions.append(line)

    @property
    def free_sessions(self) -> int:
        """Return the number of free session lines."""
        return len(self._free_sessions)

    # -- holds ------------------------------------------------------------------------------

    @property
    def free_holds(self) -> int:
        """Return the number of free hold lines."""
        return len(self._free_holds)

    def add_hold(self, hold: int, session: int, offset: int, chunk: int, kind: int) -> int:
        """Write a hold's line, and return its number, -1 if none is free."""
        if not self._free_holds:
            return -1
        line = self._free_holds.pop()
        self._pack_hold(self._holds, line * HOLD_LINE_BYTES + 8, session, offset, chunk, kind)
        self._hold_words[line * 4] = hold
        return line

    def add_holds(
        self, first: int, session: int, offsets: Sequence[int], chunk: int | Sequence[int], kind: int
    ) -> list[int]:
        """Do :meth:`add_hold` for many chunks, with ids from ``first`` on. Return their lines.

        ``chunk``: the size of all of them, or of each.

        The caller checks ``free_holds`` first: too few raise IndexError.
        """
        free, count = self._free_holds, len(offsets)
        if count > len(free):
            raise IndexError(f"{count} hold lines, {len(free)} are free")
        lines = free[: -count - 1 : -1]
        del free[len(free) - count :]
        if count < COLUMNS_FROM:
            pack, holds, words = self._pack_hold, self._holds, self._hold_words
            each = repeat(chunk) if isinstance(chunk, int) else chunk
            for hold, offset, line, size in zip(range(first, first + count), offsets, lines, each):
                pack(holds, line * HOLD_LINE_BYTES + 8, session, offset, size, kind)
                words[line * 4] = hold
            return lines
        at = np.array(lines)
        numbers, sessions, places, kinds = self._hold_columns
        sessions[at] = session
        places[at] = offsets
        kinds[at] = np.array(chunk, np.uint64) + np.uint64(int.from_bytes(_SIZE_KIND.pack(0, kind), sys.byteorder))
        numbers[at] = np.arange(first, first + count, dtype=np.uint64)
        return lines

    def end_hold(self, line: int) -> None:
        """End a hold's line."""
        self._hold_words[line * 4] = 0
        self._free_holds.append(line)

    def end_holds(self, lines: Sequence[int]) -> None:
        """Do :meth:`end_hold` for many."""
        words = self._hold_words
        for line in lines:
            words[line * 4] = 0
        self._free_holds += lines

    # -- recovery ---------------------------------------------------------------------------

    def recover(self) -> list[str]:
        """Find the free lines of a predecessor's ledger, and return notes for the log. O(lines)."""
        notes = self.namespaces.recover()
        used = {line for line, _ in self.sessions()}
        self._free_sessions = [n for n in range(len(self._sessions) // SESSION_LINE_BYTES - 1, -1, -1) if n not in used]
        used = {line for line, _ in self.holds()}
        self._free_holds = [n for n in range(len(self._holds) // HOLD_LINE_BYTES - 1, -1, -1) if n not in used]
        return notes

    def sessions(self) -> Iterator[tuple[int, SessionLine]]:
        """Yield (line, session) of all valid lines. O(lines)."""
        for line in range(len(self._sessions) // SESSION_LINE_BYTES):
            fields = SessionLine(*_SESSION.unpack_from(self._sessions, line * SESSION_LINE_BYTES))
            if fields.session:
                yield line, fields

    def holds(self) -> Iterator[tuple[int, HoldLine]]:
        """Yield (line, hold) of all valid lines. O(lines)."""
        for line in range(len(self._holds) // HOLD_LINE_BYTES):
            hold = self._hold_words[line * 4]
            if hold:
                yield line, HoldLine(hold, *_HOLD_BODY.unpack_from(self._holds, line * HOLD_LINE_BYTES + 8))

    def release(self) -> None:
        """Drop every view, so that the segment can be unmapped."""
        del self._hold_columns
        for view in (self._hold_words, self._session_words, self._holds, self._sessions, self.namespaces, self._buf):
            view.release()

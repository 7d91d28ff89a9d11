"""What must outlive a worker besides the entries: namespaces, sessions, grants and pins.

The ledger lies in the arena; only the worker writes it, only its successor reads it. Each line has a
valid word that is stored last when the line is made and first when it is ended, so a line cut
off by the writer's death is no line.

    undo        128 B   one record, written by ``table.py``
    namespaces  256 x 128 B    valid = byte length of the name; id = position
    sessions    n x 64 B       valid = session id
    holds       n x 32 B       valid = grant or pin id (one-use, never drawn twice)

A *hold* is a chunk that someone outside this process may be writing (grant) or reading (pin).
Its chunk is not reused until the hold has ended. What the valid slot says outranks a grant
line: the worker clears the line only after the entry is published, and may die in between.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from .errors import CapacityError, CorruptionError
from .layout import (
    HOLD_LINE_BYTES,
    NAMESPACE_LINE_BYTES,
    NAMESPACES,
    SESSION_LINE_BYTES,
    UNDO_BYTES,
    Geometry,
)

_SESSION: Final = struct.Struct("@QQQQ")
_HOLD_BODY: Final = struct.Struct("@QQII")
assert _SESSION.size <= SESSION_LINE_BYTES and _HOLD_BODY.size + 8 == HOLD_LINE_BYTES


class HoldKind(IntEnum):
    """What a hold line stands for."""

    GRANT = 1
    PIN = 2


class SessionLine(NamedTuple):
    """A session as the ledger keeps it. ``started`` is the process's start time, to tell a reused pid."""

    session: int
    pid: int
    started: int
    namespace: int


class HoldLine(NamedTuple):
    """A grant or pin as the ledger keeps it; ``offset`` from the segment's start."""

    hold: int
    session: int
    offset: int
    chunk: int
    kind: int


class Ledger:
    """Lines in the arena. O(1) to add and end a line."""

    def __init__(self, mm: mmap.mmap, geometry: Geometry) -> None:
        buf = memoryview(mm)
        start = geometry.ledger_offset + UNDO_BYTES
        end = start + NAMESPACES * NAMESPACE_LINE_BYTES
        self._names = buf[start:end]
        start, end = end, end + geometry.session_lines * SESSION_LINE_BYTES
        self._sessions = buf[start:end]
        self._session_words = self._sessions.cast("Q")
        start, end = end, end + geometry.hold_lines * HOLD_LINE_BYTES
        self._holds = buf[start:end]
        self._hold_words = self._holds.cast("Q")
        self._buf = buf
        self._pack_hold = _HOLD_BODY.pack_into
        self._free_sessions = list(range(geometry.session_lines - 1, -1, -1))
        self._free_holds = list(range(geometry.hold_lines - 1, -1, -1))
        self.names: list[str] = []

    # -- namespaces -------------------------------------------------------------------------

    def namespace(self, name: str) -> int:
        """The namespace's id, a new one at first sight. Raises CapacityError when the table is full."""
        if name in self.names:
            return self.names.index(name)
        number = len(self.names)
        if number >= NAMESPACES:
            raise CapacityError(f"an arena has at most {NAMESPACES} namespaces")
        raw = name.encode()
        at = number * NAMESPACE_LINE_BYTES
        self._names[at + 8 : at + 8 + len(raw)] = raw
        self._names[at : at + 8].cast("Q")[0] = len(raw)
        self.names.append(name)
        return number

    # -- sessions ---------------------------------------------------------------------------

    def add_session(self, session: int, pid: int, started: int, namespace: int) -> int:
        """Write a session's line; its number. Raises CapacityError when all lines are taken."""
        if not self._free_sessions:
            raise CapacityError("all session lines of the arena are taken: too many clients")
        line = self._free_sessions.pop()
        at = line * SESSION_LINE_BYTES
        _SESSION.pack_into(self._sessions, at, 0, pid, started, namespace)
        self._session_words[at // 8] = session
        return line

    def end_session(self, line: int) -> None:
        """End a session's line."""
        self._session_words[line * SESSION_LINE_BYTES // 8] = 0
        self._free_sessions.append(line)

    # -- holds ------------------------------------------------------------------------------

    @property
    def free_holds(self) -> int:
        """Hold lines not in use."""
        return len(self._free_holds)

    def add_hold(self, hold: int, session: int, offset: int, chunk: int, kind: int) -> int:
        """Write a hold's line; its number, or -1 when all lines are taken."""
        if not self._free_holds:
            return -1
        line = self._free_holds.pop()
        self._pack_hold(self._holds, line * HOLD_LINE_BYTES + 8, session, offset, chunk, kind)
        self._hold_words[line * 4] = hold
        return line

    def add_holds(self, first: int, session: int, offsets: Sequence[int], chunk: int, kind: int) -> list[int]:
        """:meth:`add_hold` for many chunks of one size, ids counting up from ``first``; their lines.

        The caller looks at ``free_holds`` before: raises IndexError when there are too few.
        """
        free, pack, holds, words = self._free_holds, self._pack_hold, self._holds, self._hold_words
        lines = []
        for hold, offset in enumerate(offsets, first):
            line = free.pop()
            pack(holds, line * HOLD_LINE_BYTES + 8, session, offset, chunk, kind)
            words[line * 4] = hold
            lines.append(line)
        return lines

    def end_hold(self, line: int) -> None:
        """End a hold's line."""
        self._hold_words[line * 4] = 0
        self._free_holds.append(line)

    def end_holds(self, lines: Sequence[int]) -> None:
        """:meth:`end_hold` for many."""
        words = self._hold_words
        for line in lines:
            words[line * 4] = 0
        self._free_holds += lines

    # -- recovery ---------------------------------------------------------------------------

    def recover(self) -> None:
        """Learn from a predecessor's ledger what is free. O(lines)."""
        self.names = []
        for number in range(NAMESPACES):
            at = number * NAMESPACE_LINE_BYTES
            size = self._names[at : at + 8].cast("Q")[0]
            if not size:
                break
            if size > NAMESPACE_LINE_BYTES - 8:
                raise CorruptionError(f"namespace {number} has a name of {size} bytes")
            self.names.append(bytes(self._names[at + 8 : at + 8 + size]).decode())
        used = {line for line, _ in self.sessions()}
        self._free_sessions = [n for n in range(len(self._sessions) // SESSION_LINE_BYTES - 1, -1, -1) if n not in used]
        used = {line for line, _ in self.holds()}
        self._free_holds = [n for n in range(len(self._holds) // HOLD_LINE_BYTES - 1, -1, -1) if n not in used]

    def sessions(self) -> Iterator[tuple[int, SessionLine]]:
        """(line, session) of all valid lines. O(lines)."""
        for line in range(len(self._sessions) // SESSION_LINE_BYTES):
            fields = SessionLine(*_SESSION.unpack_from(self._sessions, line * SESSION_LINE_BYTES))
            if fields.session:
                yield line, fields

    def holds(self) -> Iterator[tuple[int, HoldLine]]:
        """(line, hold) of all valid lines. O(lines)."""
        for line in range(len(self._holds) // HOLD_LINE_BYTES):
            hold = self._hold_words[line * 4]
            if hold:
                yield line, HoldLine(hold, *_HOLD_BODY.unpack_from(self._holds, line * HOLD_LINE_BYTES + 8))

    def check(self) -> None:
        """Raise CorruptionError unless valid and free lines add up. O(lines)."""
        lines = len(self._holds) // HOLD_LINE_BYTES
        used = [line for line, _ in self.holds()]
        if len(used) + len(self._free_holds) != lines or set(used) & set(self._free_holds):
            raise CorruptionError(f"{len(used)} holds and {len(self._free_holds)} free lines of {lines}")
        lines = len(self._sessions) // SESSION_LINE_BYTES
        used = [line for line, _ in self.sessions()]
        if len(used) + len(self._free_sessions) != lines or set(used) & set(self._free_sessions):
            raise CorruptionError(f"{len(used)} sessions and {len(self._free_sessions)} free lines of {lines}")

    def release(self) -> None:
        """Drop every view, so that the segment can be unmapped."""
        for view in (self._hold_words, self._session_words, self._holds, self._sessions, self._names, self._buf):
            view.release()

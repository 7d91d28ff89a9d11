"""Every state of shared memory while an operation runs, and what a death or a reader finds there.

A kill -9 between two stores leaves exactly what was stored before. Instead of killing a worker at its k-th store for
every k, the tests run the operation once under a tracer. The tracer compares the arena's metadata after each bytecode
instruction that may have stored, and keeps every state that differs from the one before: a *tape*. A death at any point
leaves a frame of the tape. A reader that is stopped between its steps meets one frame after the other. This module
names no fields of the structures and counts no stores, so it works for later code too.

One instruction may store several words (``pack_into``, a slice), and the kernel may stop it in between. The tape
therefore has made-up frames: each prefix, by words and with a torn word, each word by itself, and zeros in all of a
row, with which ``pack_into`` begins. Words of a column, of many slots or of many lines of the ledger, are not torn:
numpy stores each by one aligned store.
"""

from __future__ import annotations

import contextlib
import dis
import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

import simm
from simm.arena.reader import ArenaReader, Located, Unsettled
from tests.support.store_world import World

_PACKAGE = os.path.dirname(simm.__file__) + os.sep
#: Words of the shortest rows, which the ledger has: columns have one word of each.
_COLUMN_WORDS = 4
#: The longest rows, which are slots.
_ROW_BYTES = 64
_STORING = ("STORE_SUBSCR", "STORE_SLICE", "CALL", "PRECALL", "DELETE_SUBSCR")


class Frame(NamedTuple):
    """A state of the metadata; ``torn``: between the stores of a single instruction."""

    meta: bytes
    torn: bool


def _storing_offsets(code: CodeType) -> frozenset[int]:
    return frozenset(at.offset for at in dis.get_instructions(code) if at.opname.startswith(_STORING))


@contextlib.contextmanager
def _each_instruction(callback: Callable[[CodeType, int], None]) -> Iterator[None]:
    """Call back with (code, offset) before each instruction of a module of SiMM."""
    if sys.version_info >= (3, 12):  # where opcode events of settrace come late, or in 3.13.0 not at all
        monitoring = sys.monitoring
        tool = monitoring.DEBUGGER_ID

        def event(code: CodeType, at: int) -> Any:
            if not code.co_filename.startswith(_PACKAGE):
                return monitoring.DISABLE
            return callback(code, at)

        monitoring.use_tool_id(tool, "simm tape")
        try:
            monitoring.register_callback(tool, monitoring.events.INSTRUCTION, event)
            monitoring.set_events(tool, monitoring.events.INSTRUCTION)
            yield
        finally:
            monitoring.set_events(tool, monitoring.events.NO_EVENTS)
            monitoring.register_callback(tool, monitoring.events.INSTRUCTION, None)
            monitoring.free_tool_id(tool)
        return

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "call":
            if not frame.f_code.co_filename.startswith(_PACKAGE):
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event == "opcode":
            callback(frame.f_code, frame.f_lasti)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Tape:
    """Record with :meth:`record`; ``frames[0]`` is the state before, ``frames[-1]`` the one after.

    Args:
        buf: the segment.
        size: bytes of its head that are recorded.
        every: keep the states of every so many steps only, and the last one. Each state is a copy of all bytes.
    """

    def __init__(self, buf: memoryview, size: int, every: int = 1) -> None:
        self._buf = buf[:size]
        self._every = every
        self.frames: list[Frame] = []
        self.steps = 0
        self._last = b""
        self._stored = False
        self._codes: dict[CodeType, frozenset[int]] = {}

    @classmethod
    def of(cls, world: World, every: int = 1) -> Tape:
        """Return a tape of a world's metadata: header, shards, slots, visited bytes, ledger."""
        geometry = world.geometry
        return cls(world.segment.buf, (geometry.ledger_offset + geometry.ledger_bytes + 7) & ~7, every)

    def record(self, operation: Callable[[], Any]) -> Any:
        """Run the operation, keep what it stores on the tape, and return its result."""
        self._last = bytes(self._buf)
        self.frames = [Frame(self._last, False)]
        self._stored = False
        try:
            with _each_instruction(self._instruction):
                return operation()
        finally:
            self._look()
            if self.frames[-1].meta != self._last:
                self.frames.append(Frame(self._last, False))

    def _instruction(self, code: CodeType, at: int) -> None:
        """Compare the memory before an instruction of SiMM, if the instruction before may have stored."""
        if self._stored:
            self._look()
        storing = self._codes.get(code)
        if storing is None:
            storing = self._codes[code] = _storing_offsets(code)
        self._stored = at in storing

    def _look(self) -> None:
        """Keep the state if it is new."""
        self._stored = False
        new = bytes(self._buf)
        if new == self._last:  # a memcmp; comparing the memoryview itself goes item by item
            return
        self.steps += 1
        if self.steps % self._every == 0:
            self.frames.extend(Frame(meta, True) for meta in _between(self._last, new))
            self.frames.append(Frame(new, False))
        self._last = new

    def show(self, frame: Frame) -> None:
        """Copy a state into the segment."""
        self._buf[:] = frame.meta


def _between(old: bytes, new: bytes) -> Iterator[bytes]:
    """Yield the states within one instruction that stored more than one word."""
    changed = np.flatnonzero(np.frombuffer(old, np.uint64) != np.frombuffer(new, np.uint64)).tolist()
    if len(changed) < 2 or len(changed) > 64:  # one word is never torn; recovery's own bulk stores are in rows
        return
    seen = {old, new}
    column = len({word % _COLUMN_WORDS for word in changed}) == 1
    first, end = changed[0] * 8, changed[-1] * 8 + 8
    if not column and end - first <= _ROW_BYTES:
        seen.add(meta := old[:first] + bytes(end - first) + old[end:])
        yield meta
    for number, word in enumerate(changed):
        at = word * 8
        for meta in (
            new[:at] + old[at:],  # all words before this one
            old if column else new[: at + 4] + old[at + 4 :],  # and half of it
            old[:at] + new[at : at + 8] + old[at + 8 :],  # this one alone
            old[:at] + new[at:],  # from the end
        ):
            if number and meta not in seen:
                seen.add(meta)
                yield meta


# -- readers that live on a tape -------------------------------------------------------------------


class _Words:
    """A reader's view of the words, which lets time pass before each load."""

    def __init__(self, words: memoryview, tick: Callable[[], None]) -> None:
        self._words = words
        self._tick = tick

    def __getitem__(self, at: int) -> int:
        self._tick()
        word: int = self._words[at]
        return word


def read_in_time(
    reader: ArenaReader, digest: bytes, tick: Callable[[], None], copy: Callable[[Located], bytes]
) -> bytes | type[Unsettled] | None:
    """Get a value, and call ``tick`` before each load of a word and before the copy.

    Return the value's bytes, None for a miss, or Unsettled where a client would start over or ask the worker.
    """
    words = reader.words
    reader.words = _Words(words, tick)  # type: ignore[assignment]
    try:
        tick()
        try:
            found = reader.locate(digest)
        except Unsettled:
            return Unsettled
        if found is None:
            return None
        tick()
        data = copy(found)
        return data if reader.confirm(digest, found.slot, found.seq) else Unsettled
    finally:
        reader.words = words


class _Column:
    """A reader's view of an array of words, which lets time pass before each gather, and before each word of a row.

    numpy may load the words of a row in any order.
    """

    def __init__(self, array: np.ndarray, tick: Callable[[], None]) -> None:
        self._array = array
        self._tick = tick

    def take(self, at: np.ndarray, axis: int | None = None) -> np.ndarray:
        self._tick()
        if axis is None:
            return self._array.take(at)
        rows = np.empty((len(at), self._array.shape[1]), self._array.dtype)
        for word in (4, 1, 3, 5, 2, 0, 6, 7):
            rows[:, word] = self._array[at, word]
            self._tick()
        return rows


def read_by_column(
    reader: ArenaReader, digest: bytes, tick: Callable[[], None], copy: Callable[[Located], bytes]
) -> bytes | type[Unsettled] | None:
    """Do :func:`read_in_time` by the reader's forms for a batch."""
    names = ("_np_slots", "_np_rows", "_np_shards")
    arrays = [getattr(reader, name) for name in names]
    words = reader.words
    for name, array in zip(names, arrays):
        setattr(reader, name, _Column(array, tick))
    reader.words = _Words(words, tick)  # type: ignore[assignment]
    try:
        keys, slots = reader.candidates([digest])
        if slots[0] < 0:
            return None
        found = reader.locate_many(keys, slots)
        if not found.settled[0]:
            return Unsettled
        (slot,), (seq,), (start,), (length,) = (
            column.tolist() for column in (found.slots, found.seqs, found.starts, found.lengths)
        )
        data = copy(Located(slot, seq, start + reader.data_offset, length, 0, 0))
        return data if reader.confirm_many(found)[0] else Unsettled
    finally:
        reader.words = words
        for name, array in zip(names, arrays):
            setattr(reader, name, array)


class Clock:
    """Shows a tape's frames as time passes: ``jumps[n]`` frames at the n-th tick, then none."""

    def __init__(self, show: Callable[[int], None], frames: int, start: int, jumps: tuple[int, ...]) -> None:
        self._show = show
        self._last = frames - 1
        self.now = start
        self._jumps = iter(jumps)
        show(start)

    def tick(self) -> None:
        """Let time pass."""
        jump = next(self._jumps, 0)
        if jump and self.now < self._last:
            self.now = min(self._last, self.now + jump)
            self._show(self.now)

"""A value in place, for as long as somebody looks at it."""

from __future__ import annotations

import contextlib
import ctypes
import weakref

from .errors import UsageError
from .reader import ArenaReader
from .session import WorkerSession


class View:
    """A value in place: ``data`` is a read-only memoryview, of the arena where that is on this host.

    The pin goes when the view is closed *and* nothing made from ``data`` (slices, numpy arrays) is alive any
    more, so the bytes stay right as long as anyone can see them. Usable as a context manager.
    """

    __slots__ = ("_data", "length")

    def __init__(self, data: memoryview) -> None:
        self._data: memoryview | None = data
        self.length = len(data)

    @classmethod
    def pinned(cls, reader: ArenaReader, session: WorkerSession, offset: int, length: int, pin: int) -> View:
        """A view of the arena that gives ``pin`` back at its end, and ends the copy that its maker has begun."""
        base = (ctypes.c_ubyte * length).from_address(reader.data_address + offset - reader.data_offset)
        weakref.finalize(base, _unpin, session, reader, pin).atexit = False
        return cls(memoryview(base).cast("B").toreadonly())

    @property
    def data(self) -> memoryview:
        """The value. Raises UsageError once closed."""
        if self._data is None:
            raise UsageError("this view is closed; take another with client.view(key)")
        return self._data

    def __len__(self) -> int:
        return self.length

    def close(self) -> None:
        """Give the value back. Twice is harmless."""
        data, self._data = self._data, None
        if data is not None:
            with contextlib.suppress(BufferError):
                data.release()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<View of {self.length} bytes{'' if self._data is not None else ', closed'}>"


def _unpin(session: WorkerSession, _reader: ArenaReader, pin: int) -> None:
    """Finalizer of a view's memory: no lock, no I/O. Holds the reader, and so the mapping, until now."""
    session.unpin_later(pin)
    session.end_copy()

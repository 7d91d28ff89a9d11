"""Calls on parts of values: ranges of them, and values out of pieces (docs/parts.md)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...arena.hashing import SHARD_MASK
from ...errors import DeviceError, UsageError
from ...wire.status import Status
from ..batch import LARGE, Answer, LargeValue, Mistake, Result, WrongSize, awaitable

if TYPE_CHECKING:
    from ...arena.hashing import Hasher
    from ...host.buffers import Ranges
    from ..large.values import Large
    from ..ops.parts import Wanted
    from ..ops.replicas import Replicas
    from ..reads import Gets
    from ..routing import Routes


class PartCalls:
    """A part of :class:`simm.client.Client`."""

    _digest: Callable[[str], bytes]
    _hasher: Hasher
    _routes: Routes
    _gets: Gets
    _replicas: Replicas | None
    #: What the functions of ``sdk/ops/parts.py`` make of the caller's arguments.
    _ranges_of: Callable[..., Any]
    _ranges_of_many: Callable[..., Any]
    _pieces_of: Callable[..., Any]
    if TYPE_CHECKING:
        in_thread: Callable[..., Coroutine[Any, Any, Any]]

        @property
        def _large(self) -> Large:
            """What reads and puts values in parts."""

    def put_digests(self, digests: Sequence[bytes], sources: Sequence[Any], if_absent: bool | None = None) -> list[int]:
        """Store values; return a Status for each."""
        raise NotImplementedError

    def get_digests(self, digests: Sequence[bytes], sinks: Sequence[Any]) -> list[Result]:
        """Copy values out; return each value's length, or why there is none."""
        raise NotImplementedError

    def put_mixed(self, digests: Sequence[bytes], sources: Sequence[Any], if_absent: bool | None = None) -> list[int]:
        """:meth:`put_digests` of values of which some must be stored in parts."""
        raise NotImplementedError

    def get_mixed(self, digests: Sequence[bytes], sinks: Sequence[Any]) -> list[Result]:
        """:meth:`get_digests` into ranges of which some only a value in parts can have."""
        raise NotImplementedError

    def put_gather(self, key: str, pieces: Iterable[Any]) -> bool:
        """:meth:`put` a value that consists of these pieces of memory, in their order: at most 4,096, none empty."""
        digest = self._digest(key)
        try:
            return self.put_digests([digest], [self._pieces_of(pieces)])[0] == Status.OK
        except LargeValue as exc:
            return self.put_mixed([digest], [exc.memory])[0] == Status.OK

    def get_ranges(self, key: str, ranges: Wanted) -> int | None:
        """Copy ranges of the value, (offset, length, buffer) each, to their buffers' heads; return the value's length.

        Or (offsets, lengths, buffer): an array of offsets, the length of each or an array of them, and one buffer that
        the ranges go to one after the other. Of many ranges that costs less.

        All are parts of one value. None for a miss; the buffers may then hold parts of a value that was replaced. At
        most 4,096 ranges, together of the largest value's size. They may overlap in the value, their buffers may not.

        Raises UsageError for a range that ends beyond the value (then nothing is written), of no byte, longer than its
        buffer, or with a read-only buffer. What :meth:`prepare_ranges` returned is not checked again.
        """
        digest = self._digest(key)
        got: Answer
        try:
            sink = self._ranges_of(ranges)
        except LargeValue as wide:
            sink, got = wide.memory, LARGE
        else:
            if self._replicas is not None:
                got = self.get_digests([digest], [sink])[0]
            else:
                route = self._routes.route
                owner = route[(digest[0] | digest[1] << 8) & SHARD_MASK] if route else self._routes.target(digest)
                try:
                    got = self._gets.read_ranges(owner, digest, sink)
                except DeviceError as exc:
                    got = self._gets.device_failed(exc)
        if got is LARGE:
            got = self._large.read(digest, sink)
        if type(got) is int:
            return got
        if type(got) is WrongSize:
            raise UsageError(sink.ends_beyond(key, got.length))
        return None

    @staticmethod
    def prepare_ranges(ranges: Wanted) -> Ranges:
        """Return these ranges in a form that ``get_ranges`` and ``get_ranges_many`` take for any key, of pins too.

        For ranges that are read of one value after the other: they are checked once, here. O(n log n) for n ranges.
        The buffers must stay where they are, and writable, as long as the result is used. Raises UsageError as
        :meth:`get_ranges` does.
        """
        from ..ops.parts import prepared  # loads with the first client

        return prepared(ranges)

    def get_ranges_many(self, keys: Sequence[str], ranges: Sequence[Wanted]) -> list[int | None]:
        """:meth:`get_ranges` for many keys, each with a list of ranges. No two buffers of the call may overlap.

        Raises UsageError if a range ends beyond its value, after the ranges of all other values are read.
        """
        digests = self._hasher.many(keys)
        try:
            sinks = self._ranges_of_many(keys, ranges)
            results = self.get_digests(digests, sinks)
        except LargeValue as wide:
            sinks = wide.memory
            results = self.get_mixed(digests, sinks)
        for key, sink, got in zip(keys, sinks, results):
            if type(got) is WrongSize:
                raise UsageError(sink.ends_beyond(key, got.length))
            if type(got) is Mistake:
                raise UsageError(got.text)
        return [got if got > 0 else None for got in results]

    def put_gather_many(self, keys: Sequence[str], pieces: Sequence[Iterable[Any]]) -> list[bool]:
        """:meth:`put_gather` for many keys, each with a list of pieces. A duplicate key gets the later value."""
        if len(keys) != len(pieces):
            raise UsageError(f"{len(keys)} keys and {len(pieces)} lists of pieces")
        digests = self._hasher.many(keys)
        sources, put = [], self.put_digests
        for each in pieces:
            try:
                sources.append(self._pieces_of(each))
            except LargeValue as exc:
                sources.append(exc.memory)
                put = self.put_mixed
        return [status == Status.OK for status in put(digests, sources)]

    put_gather_async = awaitable(put_gather)
    get_ranges_async = awaitable(get_ranges)
    get_ranges_many_async = awaitable(get_ranges_many)
    put_gather_many_async = awaitable(put_gather_many)

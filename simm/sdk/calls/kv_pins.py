"""Pinned values as ``simm.kv`` returns them: codes in place of exceptions, and no key that affects another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from ...constants import RANGES_MAX
from ...errors import Code, UsageError
from ..ops.kv_memory import BlockView, PartedViews, ViewRanges, complain
from ..ops.pins import Pins, Want

_INVALID: Final = int(Code.INVALID_ARGUMENT)
_GET_FAILED: Final = int(Code.GET_FAILED)


class PinnedKeys:
    """Values that stay as they were when ``Store.mpin`` was called, until :meth:`release`. A context manager.

    A method takes a key's number, or the key itself. Results are lengths of values, or codes: GET_FAILED for a miss and
    for a range that ends beyond its value, INVALID_ARGUMENT for a mistake, and once released.
    """

    def __init__(
        self, keys: Sequence[Any], pins: Pins | None, positions: Sequence[int] | None,
        refuse: Callable[..., None],
    ) -> None:  # fmt: skip
        self.keys = tuple(keys)
        self._pins = pins
        #: For each key its number among those that are pinned, -1 for a wrong key.
        self._numbers = [-1] * len(self.keys)
        #: Where each key is first, once a key is named.
        self._position_of: dict[str, int] | None = None
        #: Each value's length, or a code.
        self.lengths: list[int] = [_INVALID] * len(self.keys)
        self._refuse = refuse
        if pins is not None:
            for number, position in enumerate(range(len(self.keys)) if positions is None else positions):
                self._numbers[position] = number
                length = pins.lengths[number]
                self.lengths[position] = _GET_FAILED if length is None else length

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.keys)

    def __enter__(self) -> PinnedKeys:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<PinnedKeys: {len(self)} keys, {self._pins!r}>"

    def release(self) -> None:
        """Release all values. Twice is harmless."""
        if self._pins is not None:
            self._pins.release()

    def get_ranges(self, key: int | str, ranges: ViewRanges) -> int:
        """Copy ranges of a value, (offset, length, view) each, to their views' heads; return its length or a code."""
        return self.mget_ranges([key], [ranges])[0]

    def mget_ranges(self, keys: Sequence[int | str], ranges: Sequence[ViewRanges]) -> list[int]:
        """:meth:`get_ranges` for many values, each with a list of ranges; return a length or code for each.

        No two views of the call may share memory: of two keys whose views do, the later one is refused.
        """
        results = [_INVALID] * len(keys)
        pins = self._pins
        if pins is None or len(keys) != len(ranges):
            self._refuse(len(keys), "%d keys and %d lists of ranges", len(keys), len(ranges))
            return results
        wants: list[tuple[int, Want]] = []
        for place, (key, parts) in enumerate(zip(keys, PartedViews.to_get(ranges, wide=True))):
            position = self._position(key)
            number = -1 if position is None else self._numbers[position]
            if parts.problem or number < 0:
                self._refuse(1, "%s", parts.problem or f"{key!r} is no key that was pinned")
                continue
            sink: Any = parts._piece
            length = pins.lengths[number]
            if length is not None and length >= sink.least:
                wants.append((place, (number, sink)))
                continue
            results[place] = _GET_FAILED
            if length is not None:
                complain("get_ranges: a range ends beyond its value, which has %d bytes", length)
        try:
            got = self._read_wants(pins, wants)
        except UsageError as exc:  # released, or the store was closed
            self._refuse(len(keys), "%s", exc)
            return [_INVALID] * len(keys)
        for (place, _), length in zip(wants, got):
            results[place] = _GET_FAILED if length is None else length
        return results

    def _read_wants(self, pins: Pins, wants: list[tuple[int, Want]]) -> list[int | None]:
        """Do :meth:`Pins.read_wants`, and take out of ``wants`` what is refused. Raises UsageError if all would be."""
        try:
            return pins.read_wants([want for _, want in wants])
        except UsageError:
            problems = [pins.problem_of(want) for _, want in wants]
            if not any(problems):
                raise
        wants[:] = [each for each, problem in zip(wants, problems) if not problem]
        got = pins.read_wants([want for _, want in wants])
        for problem in filter(None, problems):
            self._refuse(1, "%s", problem)
        return got

    def read(self, ranges: Sequence[tuple[int, int, Sequence[BlockView]]]) -> list[int]:
        """Copy the same ranges of every value, (offset, length, views) each with a view for each key.

        Return a length or code for each. As a layer has the same place in all pages, this reads a layer.
        """
        pins, count = self._pins, len(self.keys)
        if pins is not None and len(pins) == count:
            try:
                got = pins.read([(offset, length, [each._piece for each in views]) for offset, length, views in ranges])
                return [_GET_FAILED if length is None else length for length in got]
            except (UsageError, AttributeError, TypeError, ValueError):
                pass  # key by key, so that a mistake is its own key's
        try:
            wrong = not ranges or any(len(views) != count for _, _, views in ranges)
            lists = [[(offset, length, views[at]) for offset, length, views in ranges] for at in range(count)]
        except (TypeError, ValueError, IndexError, KeyError):
            wrong = True
        if wrong:
            self._refuse(count, "a range of all values is (offset, length, views), with %d views", count)
            return [_INVALID] * count
        results = self.mget_ranges(range(count), [each[:RANGES_MAX] for each in lists])
        for start in range(RANGES_MAX, len(ranges), RANGES_MAX):
            left = [at for at, length in enumerate(results) if length >= 0]
            more = self.mget_ranges(left, [lists[at][start : start + RANGES_MAX] for at in left])
            for at, length in zip(left, more):
                results[at] = length
        return results

    def _position(self, key: Any) -> int | None:
        if isinstance(key, str):
            if self._position_of is None:
                places = reversed(range(len(self.keys)))
                self._position_of = {each: at for at in places if isinstance(each := self.keys[at], str)}
            return self._position_of.get(key)
        return key if type(key) is int and 0 <= key < len(self.keys) else None

    # -- asyncio ----------------------------------------------------------------------------------

    async def get_ranges_async(self, key: int | str, ranges: ViewRanges) -> int:
        """:meth:`get_ranges`, awaitable."""
        return (await self._in_thread(self.mget_ranges, [key], [ranges]))[0]

    async def mget_ranges_async(self, keys: Sequence[int | str], ranges: Sequence[ViewRanges]) -> list[int]:
        """:meth:`mget_ranges`, awaitable."""
        return await self._in_thread(self.mget_ranges, keys, ranges)

    async def read_async(self, ranges: Sequence[tuple[int, int, Sequence[BlockView]]]) -> list[int]:
        """:meth:`read`, awaitable."""
        return await self._in_thread(self.read, ranges)

    async def _in_thread(self, call: Callable[..., list[int]], *arguments: Any) -> list[int]:
        if self._pins is None or self._pins.in_thread is None:
            return call(*arguments)  # refuses at once
        try:
            got: list[int] = await self._pins.in_thread(call, *arguments)
            return got
        except UsageError:
            return call(*arguments)  # the client was closed meanwhile: the same

"""Values of many keys, pinned together, to read ranges of them as often as wanted: layer by layer.

:class:`Pins` is what a caller holds. Each of its values is of one version: the one that was stored when the keys were
pinned. A read gives bytes of that version, or it is a miss; what happens to the key meanwhile does not matter. The
values are held where they were found, by a holder for each worker:

* **In an arena of this host** (``sdk/ops/arena_pins.py``): by pins of the client's own session. Such a pin ends with
  the process and by nothing else, so reads confirm nothing. It outlasts the worker, and the move of its shard.
* **At a server elsewhere** (``sdk/ops/remote_pins.py``): by a lease of a stream, which ends with one connection.

A value that finds no room among the pins, which are bounded in number and bytes, is held by its version alone: a read
confirms after its copy that the slot has not changed. If it has, the value is gone, for good.

A client with checksums checks what it delivers at each read (``sdk/ops/checked.py``).

A value in parts is held by pins of its parts (``sdk/large/pinned.py``).

``sdk/ops/pinner.py`` finds the values.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from ...constants import RANGES_MAX, VALUE_BYTES_MAX
from ...errors import DeviceError, UsageError
from ...host.buffers import RELEASE_BYTES, SAMPLES_FROM, Copier, DeviceCopy, Ranges
from ...ipc.steps import Steps
from ...net.allowance import allowed
from ..routing import Routes
from .arena_pins import ArenaPins
from .parts import (
    Rows,
    Wanted,
    check_apart,
    check_rows_apart,
    is_wide,
    rounds_of,
    row_of,
    rows_of,
    runs_of,
    wide_ranges_of,
)

if TYPE_CHECKING:
    from .remote_pins import RemotePins

log = logging.getLogger("simm.client")

#: So many keys that are released are news for their workers at once: they take as long as the next keys' pins.
WAKE_KEYS: Final = 64
#: Rows that are copied twice go in groups of so many bytes, which stay in a core's cache.
_SCRATCH_BYTES: Final = 256 << 10
#: What is read of a value: its position among the keys, and the ranges. The result is of :data:`~..batch.Result`.
Want = tuple[int, Ranges]


class InParts(Protocol):
    """What holds a value in parts: see ``sdk/large/pinned.py``."""

    @property
    def total(self) -> int: ...
    @property
    def pins(self) -> Pins: ...
    def divide(self, ranges: Ranges) -> list[Want]: ...
    def read(self, wants: Sequence[Want]) -> bool: ...


class Pins:
    """Values that stay as they were when their keys were pinned, until :meth:`release`. Any thread may call it.

    Made by ``Client.pin``. A context manager. The values are numbered as their keys: a method takes a number, or the
    key itself. Values that are not stored are misses: None, in ``lengths`` and from each read.

    All methods raise UsageError once released, after the client was closed, and in a forked child.
    """

    def __init__(
        self, keys: Sequence[str], routes: Routes, copier: Copier, failed: Callable[[DeviceError], Any],
        deadline_s: float,
    ) -> None:  # fmt: skip
        self.keys = tuple(keys)
        #: The values' lengths in bytes; None for what is not stored.
        self.lengths: list[int | None] = [None] * len(self.keys)
        self._routes = routes
        self._copier = copier
        self._failed = failed
        self._deadline_s = deadline_s
        self._number_of: dict[str, int] | None = None
        #: Who holds each value.
        self._holders: list[ArenaPins | RemotePins | None] = [None] * len(self.keys)
        #: Numbers of what has turned out to be in parts, and what holds each of those.
        self.parted: set[int] = set()
        self._parts: dict[int, InParts] = {}
        self._lock = threading.Lock()
        #: An item for each call that reads now.
        self._calls: set[object] = set()
        self._released = False
        self._pid = os.getpid()
        #: Where each value is in this process, if all are pinned there and none is checked: 0 for a miss.
        self._addresses: list[int] | None = None
        #: Bytes of the shortest value, once that is needed.
        self._shortest: int | None = None
        #: Runs a call in a thread of the client.
        self.in_thread: Callable[..., Any] | None = None

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.keys)

    def __repr__(self) -> str:
        held = sum(length is not None for length in self.lengths)
        return f"<Pins: {held} of {len(self)} values{', released' if self._released else ''}>"

    def __enter__(self) -> Pins:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    # -- reads ------------------------------------------------------------------------------------

    def get_ranges(self, key: int | str, ranges: Wanted) -> int | None:
        """Copy ranges of a value, (offset, length, buffer) each, to their buffers' heads; return the value's length.

        None for a miss; the buffers may then hold anything. See ``Client.get_ranges`` for what a range may be. Raises
        UsageError for a range that ends beyond the value, and has then written nothing.
        """
        number = self._number(key)
        return self.read_wants([(number, wide_ranges_of(ranges))])[0]

    def get_ranges_many(self, keys: Sequence[int | str], ranges: Sequence[Wanted]) -> list[int | None]:
        """:meth:`get_ranges` for many values, each with a list of ranges. No two buffers of the call may overlap."""
        if len(keys) != len(ranges):
            raise UsageError(f"{len(keys)} keys and {len(ranges)} lists of ranges")
        numbers = [self._number(key) for key in keys]
        sinks = [wide_ranges_of(each, apart=False) for each in ranges]
        check_apart(sinks)
        return self.read_wants(list(zip(numbers, sinks)))

    def read(self, ranges: Sequence[tuple[int, int, Any]]) -> list[int | None]:
        """Copy the same ranges of every value, (offset, length, buffers) each; return each value's length, or None.

        ``buffers`` has a buffer for each key: a list of them, or an array whose rows they are, which costs least. As a
        layer has the same place in all pages of a model, this reads a layer. Errors as in :meth:`get_ranges`.
        """
        rows = [rows_of(each, len(self.keys)) for each in ranges]
        if not rows:
            raise UsageError("a value is read in at least one range")
        if len(rows) > 1 or type(rows[0].addresses) is not range or rows[0].addresses.step < rows[0].length:
            check_rows_apart(rows)
        self._check_end(max([each.offset + each.length for each in rows]))
        addresses = self._addresses
        if addresses is not None and all(each.addresses is not None for each in rows):
            with self._in_use():
                for each in rows:
                    self._copy(each, addresses)
            return list(self.lengths)
        if addresses is not None and all(each.devices is not None for each in rows):
            try:
                with self._in_use():
                    self._copy_to_devices(rows, addresses)
            except DeviceError as exc:
                self._failed(exc)
                return [None] * len(self.keys)
            return list(self.lengths)
        with self._in_use(), self._patience(len(rows) > RANGES_MAX):
            results: list[int | None] = []
            left: Sequence[int] = range(len(self.keys))
            for run in runs_of(rows):
                if results:
                    left = [number for number in left if results[number] is not None]
                    if not left:
                        break
                results = self._read_run(run, left)
            return results

    def _patience(self, several: bool) -> contextlib.AbstractContextManager[object]:
        """Return what gives the reads within one deadline in all, if there are ``several``: one has its own."""
        return self._routes.patience() if several else contextlib.nullcontext()

    def _read_run(self, rows: Sequence[Rows], numbers: Sequence[int]) -> list[int | None]:
        """Do :meth:`read` for as many ranges as an exchange may have, of the values with these numbers.

        Call it within :meth:`_in_use`. The results of other values are None.
        """
        if not self._parts and all(each.addresses is not None for each in rows):
            elsewhere = self._elsewhere(numbers)
            if elsewhere and sum(each.length for each in rows) <= VALUE_BYTES_MAX:
                return self._read_rows(rows, elsewhere)
        got = self._read_wants([(number, row_of(rows, number)) for number in numbers])
        if len(got) == len(self.keys):
            return got
        results: list[int | None] = [None] * len(self.keys)
        for number, length in zip(numbers, got):
            results[number] = length
        return results

    def _elsewhere(self, numbers: Sequence[int]) -> dict[RemotePins, list[int]]:
        """Return which of these values each server has; none if some are on this host, or need more than bytes."""
        holders = {*self._holders} - {None}
        if any(isinstance(holder, ArenaPins) or not holder.reads_rows for holder in holders if holder is not None):
            return {}
        at: dict[RemotePins, list[int]] = {}
        for holder in holders:
            assert not isinstance(holder, ArenaPins) and holder is not None
            at[holder] = [number for number in numbers if self._holders[number] is holder]
        return at

    def _read_rows(self, rows: Sequence[Rows], at: Mapping[RemotePins, Sequence[int]]) -> list[int | None]:
        """Read the same ranges of values, none of which is on this host."""
        results: list[int | None] = [None] * len(self.keys)
        self._together(
            [(holder, len(mine), holder.read_rows(mine, rows, self.lengths, results)) for holder, mine in at.items()]
        )
        return results

    def _copy(self, rows: Rows, addresses: Sequence[int]) -> None:
        """Copy a range of all values that are pinned in this process."""
        offset = rows.offset
        if self._gather(rows, addresses):
            return
        targets: Sequence[int] = rows.addresses or ()
        if None in self.lengths:
            targets = [target for target, source in zip(targets, addresses) if source]
        nodes = {each.reader.node for each in set(self._holders) if isinstance(each, ArenaPins)}
        sources = [source + offset for source in addresses if source]
        self._copier.copy_equal(targets, sources, rows.length, nodes.pop() if len(nodes) == 1 else -1)

    def _gather(self, rows: Rows, addresses: Sequence[int]) -> bool:
        """Do :meth:`_copy` by few calls, if it is of many small ranges that are rows of a table; return whether it is.

        A layer of pages is: their chunks have one size, and a layer is a fraction of it. One after the other the copies
        of 8 KiB take a microsecond more each than the bytes do.
        """
        targets, length, count = rows.addresses, rows.length, len(self.keys)
        holder = self._holders[0] if count else None
        if not (
            length < RELEASE_BYTES and count >= SAMPLES_FROM and type(targets) is range and targets.step >= length
            and isinstance(holder, ArenaPins) and self._holders.count(holder) == count
            and not self._copier.shares(count * length)
        ):  # fmt: skip
            return False
        reader, memory = holder.reader, rows.memory()
        assert memory is not None
        starts = np.array(addresses, np.intp) + (rows.offset - reader.data_address)
        first, last = int(starts.min()), int(starts.max())
        numbers, odd = np.divmod(starts - first, length)
        if odd.any():
            return False
        table = np.frombuffer(reader.data, np.uint8)[first : last + length].reshape(-1, length)
        if targets.step == length:
            table.take(numbers, 0, memory, "clip")
            return True
        # There are gaps between the rows, as between the keys and the values of a layer. ``take`` writes no such array,
        # but what it has just written is in the caches.
        some = max(SAMPLES_FROM, _SCRATCH_BYTES // length)
        for at in range(0, count, some):
            memory[at : at + some] = table.take(numbers[at : at + some], 0, mode="clip")
        return True

    def _copy_to_devices(self, rows: Sequence[Rows], addresses: Sequence[int]) -> None:
        """Do :meth:`_copy` into memory of devices: one chain for all, and one wait. Raises DeviceError."""
        copies: list[DeviceCopy] = []
        #: What a device knows an arena by.
        pinned: dict[tuple[int, int], Any] = {}
        for each in rows:
            offset, length = each.offset, each.length
            for buffer, source, holder in zip(each.devices or (), addresses, self._holders):
                if source:
                    assert isinstance(holder, ArenaPins)
                    known = (buffer.device, id(holder))
                    if known not in pinned:
                        pinned[known] = buffer.pinned(holder.reader)
                    copies.append((buffer, source + offset, length, pinned[known]))
        if copies:
            copies[0][0].copy_to_device(copies)

    def _check_end(self, end: int) -> None:
        if self._shortest is None:
            self._shortest = min((length for length in self.lengths if length is not None), default=0)
        if end <= self._shortest:
            return
        for key, length in zip(self.keys, self.lengths):
            if length is not None and length < end:
                raise UsageError(f"the value of {key!r} has {length} bytes, and a range of it ends at byte {end}")

    def read_wants(self, wants: Sequence[Want]) -> list[int | None]:
        """Read ranges of values, which are given by number, into memory that does not overlap. Raises UsageError."""
        lengths = self.lengths
        for number, ranges in wants:
            length = lengths[number]
            if length is not None and length < ranges.least:
                raise UsageError(
                    f"the value of {self.keys[number]!r} has {length} bytes, and a range of it ends at byte "
                    f"{ranges.least}"
                )
        with self._in_use():
            return self._read_wants(wants)

    def _read_wants(self, wants: Sequence[Want]) -> list[int | None]:
        """Do :meth:`read_wants` within :meth:`_in_use`, for ranges that end within their values."""
        for number, ranges in wants:
            if self.lengths[number] is not None and is_wide(ranges) and number not in self._parts:
                raise UsageError(_too_wide(ranges))
        # Results are by place: a value may be read twice in one call.
        results: list[int | None] = [None] * len(wants)
        divided = [
            (place, number, self._parts[number].divide(ranges))
            for place, (number, ranges) in enumerate(wants)
            if number in self._parts
        ]
        local: dict[ArenaPins, list[tuple[int, Want]]] = {}
        remote: dict[RemotePins, list[tuple[int, Want]]] = {}
        for place, want in enumerate(wants):
            holder = self._holders[want[0]]
            if isinstance(holder, ArenaPins):
                local.setdefault(holder, []).append((place, want))
            elif holder is not None:
                remote.setdefault(holder, []).append((place, want))
        with self._patience(bool(divided)):
            if remote:
                self._together(
                    [(holder, len(each), self._visit(holder, each, results)) for holder, each in remote.items()],
                    lambda: self._read_local(local, results),
                )
            else:
                self._read_local(local, results)
            for place, number, parts in divided:
                if self._parts[number].read(parts):
                    results[place] = self.lengths[number]
        return results

    def problem_of(self, want: Want) -> str:
        """Return for what mistake in this want alone :meth:`read_wants` refuses it; empty for none. Reads nothing."""
        number, ranges = want
        parts = self._parts.get(number)
        if parts is None:
            return _too_wide(ranges) if is_wide(ranges) else ""
        try:
            parts.divide(ranges)
        except UsageError as exc:
            return str(exc)
        return ""

    def _read_local(self, at: Mapping[ArenaPins, Sequence[tuple[int, Want]]], results: list[int | None]) -> None:
        """Read in arenas."""
        for holder, parts in at.items():
            for wants in rounds_of(parts):
                got: dict[int, Any] = {}
                try:
                    holder.read([(number, ranges) for number, (_, ranges) in wants.items()], got)
                except DeviceError as exc:
                    self._failed(exc)
                else:
                    self._note(wants, got, results)

    def _together(
        self, visits: Sequence[tuple[RemotePins, int, Steps[None]]], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Do work at servers at the same time, for so many values of each lease."""
        with self._routes.patience() as patience:
            patience.together(
                [(holder.target, holder.in_turn(work, count, patience)) for holder, count, work in visits], meanwhile
            )

    def _visit(self, holder: RemotePins, parts: Sequence[tuple[int, Want]], results: list[int | None]) -> Steps[None]:
        for wants in rounds_of(parts):
            got: dict[int, Any] = {}
            try:
                yield from holder.read([(number, ranges) for number, (_, ranges) in wants.items()], got)
            except DeviceError as exc:
                self._failed(exc)
            else:
                self._note(wants, got, results)

    def _note(self, wants: Mapping[int, tuple[int, Ranges]], got: Mapping[int, Any], results: list[int | None]) -> None:
        for number, (place, _) in wants.items():
            if got.get(number, 0) > 0:
                results[place] = self.lengths[number]

    def _number(self, key: int | str) -> int:
        """Return the number of a value. Raises UsageError."""
        if isinstance(key, str):
            if self._number_of is None:
                self._number_of = {each: number for number, each in reversed(list(enumerate(self.keys)))}
            number = self._number_of.get(key)
            if number is None:
                raise UsageError(f"{key!r} is not among the {len(self.keys)} keys that were pinned")
            return number
        if type(key) is not int or not 0 <= key < len(self.keys):
            raise UsageError(f"a value is named by its key or by a number below {len(self.keys)}, not by {key!r}")
        return key

    # -- asyncio ----------------------------------------------------------------------------------

    async def get_ranges_async(self, key: int | str, ranges: Wanted) -> int | None:
        """:meth:`get_ranges`, awaitable."""
        assert self.in_thread is not None
        got: int | None = await self.in_thread(self.get_ranges, key, ranges)
        return got

    async def get_ranges_many_async(self, keys: Sequence[int | str], ranges: Sequence[Wanted]) -> list[int | None]:
        """:meth:`get_ranges_many`, awaitable."""
        assert self.in_thread is not None
        got: list[int | None] = await self.in_thread(self.get_ranges_many, keys, ranges)
        return got

    async def read_async(self, ranges: Sequence[tuple[int, int, Any]]) -> list[int | None]:
        """:meth:`read`, awaitable."""
        assert self.in_thread is not None
        got: list[int | None] = await self.in_thread(self.read, ranges)
        return got

    # -- end --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the values for one call. Raises UsageError."""
        if self._pid != os.getpid():
            raise UsageError("these keys were pinned before the fork; pin them again with client.pin(keys)")
        mine = object()
        try:
            with self._lock:
                if self._released:
                    raise UsageError("these values are released; pin them again with client.pin(keys)")
                if self._routes.closed:
                    raise UsageError("this client is closed")
                self._calls.add(mine)
            yield
        finally:
            self._calls.discard(mine)  # also what an interrupt has kept from being noted; atomic, as add() is
            end_together(self._unused(), self._deadline_s)

    def release(self) -> None:
        """Release all values, once the calls in flight have ended. Twice is harmless. Does not raise."""
        held = self.give_up()
        end_together(held, self._deadline_s)
        if held and len(self.keys) >= WAKE_KEYS:
            self._routes.wake()  # whose thread tells the workers, so that the next pin() need not

    def give_up(self) -> list[ArenaPins | RemotePins]:
        """Mark all values as released. Return the holders that the caller must end: none while calls are in flight."""
        if self._pid != os.getpid():
            return []  # they are the parent's
        with self._lock:
            self._released = True
        return self._unused()

    def _unused(self) -> list[ArenaPins | RemotePins]:
        with self._lock:
            if not self._released or self._calls:
                return []
            self._addresses = None
            holders, self._holders = self._holders, [None] * len(self.keys)
            parts, self._parts = self._parts, {}
        mine = [each for each in set(holders) if each is not None]
        return [*mine, *(holder for each in parts.values() for holder in each.pins.give_up())]

    # -- for the Pinner ---------------------------------------------------------------------------

    def take(self, number: int, holder: ArenaPins | RemotePins, length: int) -> None:
        """Note who holds a value."""
        self._holders[number] = holder
        self.lengths[number] = length

    def take_all(self, numbers: Sequence[int], holder: ArenaPins, lengths: Sequence[int]) -> None:
        """Do :meth:`take` for many."""
        if len(numbers) == len(self.keys) and numbers == [*range(len(numbers))]:
            self._holders, self.lengths = [holder] * len(numbers), list(lengths)
            return
        for number, length in zip(numbers, lengths):
            self._holders[number] = holder
            self.lengths[number] = length

    def drop(self, numbers: Sequence[int]) -> None:
        """Give up values: they are misses from now on. No call reads them."""
        self._addresses = None
        at: dict[ArenaPins | RemotePins, list[int]] = {}
        for number in numbers:
            self.lengths[number] = None
            if (holder := self._holders[number]) is not None:
                at.setdefault(holder, []).append(number)
        for holder, mine in at.items():
            holder.drop(mine)

    def take_parts(self, number: int, held: InParts) -> None:
        """Note what holds a value in parts, once :meth:`settle` was called."""
        self._parts[number] = held
        self.lengths[number] = held.total
        self._addresses = None

    def settle(self) -> None:
        """Note that all values have been found, and make the fast form of reads if they are all in this process."""
        addresses = [0] * len(self.keys)
        for holder in set(self._holders):
            if holder is not None and not (isinstance(holder, ArenaPins) and holder.note_addresses(addresses)):
                return
        self._addresses = addresses


def end_together(holders: Sequence[ArenaPins | RemotePins], deadline_s: float) -> None:
    """End holders, those of all servers within one deadline. Does not raise for a server that is gone."""
    until = time.monotonic() + allowed(deadline_s)
    for holder in holders:
        if not isinstance(holder, ArenaPins):
            holder.begin_end(until)
    for holder in holders:
        holder.end()


def _too_wide(ranges: Ranges) -> str:
    return f"the ranges of this value have at most {VALUE_BYTES_MAX} bytes together, not {ranges.total}"

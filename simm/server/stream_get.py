"""A stream's FETCHes: find values in the arena, keep what is being sent, and pin values for clients on other hosts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from ..arena.layout import ENTRY_LARGE, PINNED_FLAGS
from ..arena.reader import ArenaReader, Located, Unsettled
from ..arena.sessions import PINNED_SHARE
from ..cluster.lookup import ASK_OWNER, hidden_status, miss_status, previous_status
from ..errors import TransportError
from ..ipc.session import WorkerSession
from ..table import ZERO_DIGEST
from ..wire import messages as M
from ..wire.messages import Status
from ..wire.shard_set import FROZEN
from .worker_session import WorkerSessionKeeper

log = logging.getLogger("simm.server.stream")

_OK: Final = int(Status.OK)

#: Values that all clients of a stream together may have in their leases.
LEASED_KEYS_MAX: Final = 65_536
#: A client that asks for nothing for so long loses its pins, seconds.
LEASE_S: Final = 60.0
#: How often, and how many seconds apart, :func:`locate_many` looks again at slots that the worker is writing.
SETTLE_TRIES: Final = 4
SETTLE_S: Final = 0.0005
#: What :func:`locate_many` says of a value that a lease does not have.
_UNKNOWN: Final = (int(Status.NOT_FOUND), 0, None)


class Leased:
    """A value of a lease: a version of an entry, and the pin that keeps it, if it has one."""

    __slots__ = ("digest", "found", "pin", "reader", "session")

    def __init__(self, digest: bytes, found: Located, reader: ArenaReader) -> None:
        self.digest = digest
        self.found = found
        self.reader = reader
        #: The pin's id, and the session that has it; 0 and None without one.
        self.pin = 0
        self.session: WorkerSession | None = None

    def is_whole(self) -> bool:
        """Return True if bytes that were read until now are of this version. Without a pin its slot tells."""
        found = self.found
        return self.pin != 0 or self.reader.confirm_previous(self.digest, found.slot, found.seq)


class Lease:
    """The values that one client has pinned by its connection, which ends them."""

    __slots__ = ("bytes", "last", "pins", "used_at", "values")

    def __init__(self) -> None:
        self.values: dict[int, Leased] = {}
        #: The values that are pinned, and their bytes.
        self.pins = self.bytes = 0
        self.last = 0
        self.used_at = time.monotonic()


class Leases:
    """The values that a stream pins for its clients, each of whom is on another host and holds no pin by itself.

    A lease ends with its connection. A client that is stopped keeps its connection: so a lease that is not used for
    LEASE_S loses its pins. Its values stay readable as long as their slots do not change; then they are misses.

    All leases together pin at most what an arena may have pinned, by a quarter of its lines for holds, and none more
    than is left for the others. What has no room is a value of the lease without a pin. The worker's bound
    (``arena/sessions.py``) holds in addition.

    Pins outlive the worker: they stay with the session that got them, which is not released while it has any.
    """

    def __init__(self, keeper: WorkerSessionKeeper) -> None:
        self._keeper = keeper
        #: Of all leases: values, those that are pinned, and the bytes of these.
        self.keys = 0
        self.pins = self.bytes = 0

    def take(
        self, lease: Lease, reader: ArenaReader | None, digests: Sequence[bytes],
        looked: Sequence[tuple[int, int, Located | None]], *, previous: bool,
    ) -> list[tuple[int, int, int, int, int, int, int]]:  # fmt: skip
        """Add values that have been found to a lease, pinned as far as there is room; return PINNED's entries.

        ``looked``: (status, epoch with PREVIOUS, location or None) for each. ``reader`` has found them: the worker may
        have another arena by now. One exchange with the worker.
        """
        lease.used_at = time.monotonic()
        entries: list[tuple[int, int, int, int, int, int, int]] = []
        taken: list[Leased] = []
        values, last = lease.values, lease.last
        for digest, (status, epoch, found) in zip(digests, looked):
            if found is None or reader is None:
                entries.append((status, 0, 0, 0, epoch, 0, 0))
                continue
            slot, seq, _, length, crc, flags = found
            if flags & ~PINNED_FLAGS:
                entries.append((Status.NOT_FOUND, flags & ENTRY_LARGE, 0, 0, 0, 0, 0))  # its parts can be pinned
            elif len(values) >= LEASED_KEYS_MAX - self.keys:
                entries.append((Status.NO_SPACE, 0, 0, 0, 0, 0, 0))
            else:
                last += 1
                values[last] = leased = Leased(digest, found, reader)
                self.keys += 1
                taken.append(leased)
                entries.append((_OK, flags, length, crc, last, seq, slot))
        lease.last = last
        if taken and reader is not None:
            self._pin(lease, taken, reader, previous)
        return entries

    def _pin(self, lease: Lease, taken: Sequence[Leased], reader: ArenaReader, previous: bool) -> None:
        """Pin values as far as the lease's share goes."""
        session = self._keeper.worker()
        if session is None or session.channel.late or session.reader is not reader:
            return
        geometry = reader.geometry
        room = (geometry.data_bytes // PINNED_SHARE - self.bytes - lease.bytes) // 2
        lines = max(0, (geometry.hold_lines // 4 - self.pins - lease.pins) // 2)
        wanted: list[Leased] = []
        for leased in taken[:lines]:
            room -= leased.found.length
            if room < 0:
                break
            wanted.append(leased)
        if not wanted:
            return
        try:
            session.begin_copy()
        except TransportError:
            return
        try:
            how = M.LOCATE_PREVIOUS if previous else 0
            entries = session.pin_many([leased.digest for leased in wanted], how)
            confirm, begin_copy = reader.confirm_previous, session.begin_copy
            for leased, (status, _flags, _length, _crc, offset, pin) in zip(wanted, entries):
                if status != _OK:
                    continue
                slot, seq, place, length, _, _ = leased.found
                # The slot has not changed since the entry was found, so it is this version that was pinned in between.
                if offset == place and confirm(leased.digest, slot, seq):
                    begin_copy()
                    leased.pin, leased.session = pin, session
                    lease.pins += 1
                    lease.bytes += length
                    self.pins += 1
                    self.bytes += length
                else:
                    session.unpin_later(pin)
        except TransportError as exc:
            log.warning("pins for a client: %s", exc)
        finally:
            session.end_copy()

    def release(self, lease: Lease, numbers: Sequence[int]) -> int:
        """Take values out of a lease. Ignore unknown numbers; return the number of known ones."""
        lease.used_at = time.monotonic()
        known = 0
        for number in numbers:
            leased = lease.values.pop(number, None)
            if leased is not None:
                self._unpin(lease, leased)
                self.keys -= 1
                known += 1
        return known

    @staticmethod
    def held(
        lease: Lease | None, numbers: Sequence[int], now: float
    ) -> tuple[list[Leased | None], list[tuple[int, int, Located | None]], list[memoryview | None]]:
        """Return the values with these numbers: what they are, what :func:`locate` would say of them, their bytes.

        The lease counts as used ``now``.
        """
        known: dict[int, Leased] = {}
        if lease is not None:
            known, lease.used_at = lease.values, now
        leased = [known.get(number) for number in numbers]
        looked: list[tuple[int, int, Located | None]] = []
        values: list[memoryview | None] = []
        for each in leased:
            looked.append(_UNKNOWN if each is None else (_OK, 0, each.found))
            values.append(None if each is None else each.reader.value(each.found))
        return leased, looked, values

    def lapse(self, lease: Lease) -> None:
        """Unpin the values of a lease, which keeps them. None of them is being sent."""
        if lease.bytes:
            for leased in lease.values.values():
                self._unpin(lease, leased)

    def _unpin(self, lease: Lease, leased: Leased) -> None:
        session, leased.session = leased.session, None
        if session is not None:
            session.unpin_later(leased.pin)
            session.end_copy()
            leased.pin = 0
            lease.pins -= 1
            lease.bytes -= leased.found.length
            self.pins -= 1
            self.bytes -= leased.found.length


#: Bytes to send: (position of the key, digest, location, the bytes of the value or of a range of it).
Part = tuple[int, bytes, Located, "memoryview | bytes"]


class Sending:
    """A FETCHED in flight: what is still to send, verdicts so far."""

    __slots__ = (
        "at", "bound", "current", "entries", "leased", "moving", "previous", "request_id", "size", "todo", "verdicts",
    )  # fmt: skip

    def __init__(
        self, request_id: int, todo: Iterable[Part], entries: Sequence[tuple[int, int, int, int]], size: int,
        *, previous: bool, bound: bool, leased: Sequence[Leased | None] | None, moving: bool,
    ) -> None:  # fmt: skip
        #: For a mover: values of old epochs are judged where they come to.
        self.moving = moving
        #: What FETCHED says, and the bytes of all values.
        self.entries, self.size = entries, size
        self.request_id = request_id
        self.previous = previous
        #: By position, for FETCH_PINNED.
        self.leased = leased
        #: The client may see no other namespace's bytes, whatever their verdict: they are copied and judged first.
        self.bound = bound
        #: Bytes of the current part that were handed to the kernel.
        self.at = 0
        self.todo = iter(todo)
        self.verdicts = [Status.OK] * len(entries)
        self.current: Part | None = None


def locate_many(
    reader: ArenaReader, digests: Sequence[bytes], previous: bool, *, asked: bool = False, touch: bool = True
) -> list[tuple[int, int, Located | None]]:
    """Return (status, 0, location) for each digest: ASK_OWNER if the worker must be asked, unless it was ``asked``.

    Hits count as used for the eviction policy if ``touch``: not where nobody wants the values.

    Waits for slots that the worker is writing: 2 ms at most for all of them together, as it does so in the loop's
    thread, and a worker that stands still leaves up to thousands. Plain hits take the fewest steps.
    """
    looked: list[tuple[int, int, Located | None]] = []
    unsettled: list[int] = []
    find, shard_word, visited = reader.locate, reader.shard_word, reader.visited
    if ZERO_DIGEST in digests:  # which is no key's, but any empty slot's
        find = partial(_locate_key, reader)
    for digest in digests:
        try:
            found = find(digest)
        except Unsettled:
            unsettled.append(len(looked))
            found = None
        if found is not None and found.length and (0 < shard_word(digest) < FROZEN):
            if touch:
                visited[found.slot] = 1
            looked.append((_OK, 0, found))
        else:
            looked.append(_verdict(reader, digest, found, previous, asked, touch))
    for _ in range(SETTLE_TRIES if unsettled else 0):
        time.sleep(SETTLE_S)
        waiting, unsettled = unsettled, []
        for at in waiting:
            try:
                looked[at] = _verdict(reader, digests[at], find(digests[at]), previous, asked, touch)
            except Unsettled:
                unsettled.append(at)
        if not unsettled:
            break
    for at in unsettled:
        # The worker was interrupted while it wrote the slot, for longer than this waits. It answers when it goes on.
        looked[at] = (Status.BUSY if asked or previous else ASK_OWNER, 0, None)
    return looked


def look_up(
    keeper: WorkerSessionKeeper, reader: ArenaReader | None, digests: Sequence[bytes], previous: bool, *, touch: bool
) -> list[tuple[int, int, Located | None]]:
    """Return (status, epoch with PREVIOUS, location) for each digest; ``touch`` as for :func:`locate_many`.

    Asks the worker once, about all misses for which that is needed.
    """
    if reader is None:
        return [(Status.UNAVAILABLE, 0, None)] * len(digests)
    looked = locate_many(reader, digests, previous, touch=touch)
    asked = [position for position, (status, _, _) in enumerate(looked) if status == ASK_OWNER]
    if asked:
        answers = keeper.resolve_misses([digests[position] for position in asked])
        for position, (status, since) in zip(asked, answers):
            looked[position] = (status, since, None)
        # Copied in between the two looks.
        again = [position for position in asked if looked[position][0] == Status.OK]
        found = locate_many(reader, [digests[position] for position in again], previous, asked=True, touch=touch)
        for position, each in zip(again, found):
            looked[position] = each
    return looked


def _locate_key(reader: ArenaReader, digest: bytes) -> Located | None:
    return reader.locate(digest) if digest != ZERO_DIGEST else None


def _verdict(
    reader: ArenaReader, digest: bytes, found: Located | None, previous: bool, asked: bool, touch: bool
) -> tuple[int, int, Located | None]:
    """Return what :func:`locate_many` does for an entry that was found, or None."""
    if found is not None and not found.length:
        return Status.BUSY, 0, None  # a stray store, as no value is empty: a client would end the connection for it
    word = reader.shard_word(digest)
    if previous:
        if found is None or not word:
            return previous_status(word), 0, None
    elif found is None or not 0 < word < FROZEN:
        return miss_status(word, asked=asked), 0, None
    if touch:
        reader.touch(found.slot)
    return Status.OK, 0, found


def exist(
    keeper: WorkerSessionKeeper, digests: Sequence[bytes], judge_owners: Callable[[Sequence[bytes]], list[int]], *,
    bound: bool,
) -> list[int]:  # fmt: skip
    """Return a Status for each digest. Asks the worker once, about all misses for which that is needed.

    An entry that a client bound to a namespace has stored is none that others would get, nor leave alone: so whose it
    is counts for all clients, and of all entries for a ``bound`` one. ``judge_owners`` returns OK or what :func:`hide`
    takes for each digest.
    """
    if (reader := keeper.arena()) is None:
        return [Status.UNAVAILABLE] * len(digests)
    doubtful: set[bytes] = set(digests) if bound else set()

    def doubt(digest: bytes) -> bool:
        doubtful.add(digest)
        return True

    statuses: list[int] = [
        Status.OK if hit and digest != ZERO_DIGEST else miss_status(reader.shard_word(digest))
        for digest, hit in zip(digests, reader.current_many(digests, doubt))
    ]
    asked = [at for at, status in enumerate(statuses) if status == ASK_OWNER]
    if asked:
        for at, status in zip(asked, keeper.statuses(M.Exists([digests[at] for at in asked]))):
            statuses[at] = status
            doubtful.add(digests[at])
    hits = [at for at, status in enumerate(statuses) if status == Status.OK and digests[at] in doubtful]
    hidden: list[tuple[int, int]] = []
    for at, why in zip(hits, judge_owners([digests[at] for at in hits])):
        if why != _OK:
            statuses[at] = Status.NOT_FOUND
            hidden.append((at, why))
    if hidden and bound:
        for (at, _), (status, _) in zip(hidden, hide(keeper, reader, [(digests[at], why) for at, why in hidden])):
            statuses[at] = status
    return statuses


def hide(
    keeper: WorkerSessionKeeper, reader: ArenaReader, entries: Sequence[tuple[bytes, int]]
) -> list[tuple[int, int]]:
    """Return (status, epoch with PREVIOUS) for digests of entries that a client bound to a namespace may not see.

    With each digest comes why. ASK_OWNER: the entry is surely another namespace's. The client hears the same as of a
    key that is not here. Otherwise the answer would tell it, while a shard moves in, which keys of others are here. So
    the worker is asked once. Any other status is what the client hears in a shard that moves in. It is never PREVIOUS,
    as the value may be the client's own, of which the previous owner has a superseded one.
    """
    told = [(hidden_status(reader.shard_word(digest), why), 0) for digest, why in entries]
    asked = [at for at, (status, _) in enumerate(told) if status == ASK_OWNER]
    if asked:
        answers = keeper.resolve_misses([entries[at][0] for at in asked], M.LOCATE_HIDDEN)
        for at, answer in zip(asked, answers):
            told[at] = answer
    return told

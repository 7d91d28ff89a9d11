"""The same-host PUT: copy into a granted chunk, then commit.

Each value is copied into a granted chunk, then named in a COMMIT, which spends its grant id. No put waits for a grant
while it holds an uncommitted one: before asking, it commits what is copied.

Every commit asks for as many grants as it spends, so the pool keeps its level. A pool that is low asks for a few more,
a full one for none (:func:`~simm.ipc.grant_pool.refill_count`). The worker makes them after its answer and sends them
with the next one. So a single put costs one exchange and never waits for an allocation, and all its messages have the
one-key form.

Large values cost what their copy costs, and waking a sleeping worker on top, which can take as long as the copy:

* A single put announces its commit when its copy begins (:meth:`WorkerSession.announce_commit`), so that a worker
  which still polls does not go to sleep in the middle. It wakes a sleeping one a MiB before the end.
* From the second put of a size on, the next one's grant is there already (:meth:`GrantPool.repeats_large`).
* A batch asks for its grants before the first copy, and takes them when it has used up the pool. It commits in frames
  that wake nothing, and wakes the worker once, when a few MiB are left. The worker then commits what lies in the ring
  while those are copied, and the batch waits only for their own commit.

``python -m simm bench`` measures single puts and batches of each size.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

from ..arena.layout import ENTRY_CRC
from ..arena.reader import ArenaReader
from ..constants import SLAB_CHUNK_BYTES_MAX
from ..errors import TransportError, UnfinishedCopy
from ..host.buffers import HOST_TYPES, RELEASE_BYTES, Copier, DeviceCopy, Span, address_of, host_view, on_device
from ..net.allowance import at_most
from ..slab import chunk_bytes_for
from ..wire import messages as M
from ..wire.messages import Status
from .commit_ring import SLOTS
from .grant_pool import GrantTuple, RoomWait, obtain, refill_count, request_count, target_count
from .session import ANNOUNCE_BYTES, WorkerSession

#: Keys and bytes of one commit frame in a batch: few, so that the worker commits one while the next is copied.
COMMIT_KEYS: Final = 16
COMMIT_BYTES: Final = 16 << 20
#: A batch wakes the worker when no more than this is left to copy. What was copied before is committed by then.
LAST_BYTES: Final = 4 << 20
#: A sleeping worker is woken so many bytes before the end of a copy.
WAKE_BYTES: Final = 1 << 20
#: Values that a batch copies out of GPU memory before it waits for the device.
DEVICE_KEYS: Final = 64


class ShmPut:
    """Puts into arenas on this host; one for each client. It has no state but its settings: any thread may call it."""

    __slots__ = ("_checksum", "_copier")

    def __init__(self, copier: Copier, checksum: bool) -> None:
        self._copier = copier
        self._checksum = checksum

    def put_one(self, session: WorkerSession, digest: bytes, source: memoryview | Span) -> int:
        """Put one value and return its Status. Raises TransportError when the session breaks."""
        length = len(source)
        if length >= ANNOUNCE_BYTES:
            return self._put_large(session, digest, source, length)
        known = session.pool.by_length.get(length)
        pool, keep = known if known is not None else session.pool.for_length(length)
        try:
            grant = pool.pop()
        except IndexError:
            return self._put_asking(session, digest, source, length)
        crc, flags = self._fill(session, grant, source, length)
        have = len(pool)
        count = 1 if keep <= 2 * have < 2 * keep else refill_count(have, 1, 0, keep)
        return session.commit_one(digest, grant[0], length, crc, flags, length, count)

    def _put_asking(self, session: WorkerSession, digest: bytes, source: memoryview | Span, length: int) -> int:
        """:meth:`put_one` with an empty pool, and one deadline for all its exchanges."""
        pool, keep = session.pool.for_length(length)
        with at_most(session.deadline_s):
            grant = _obtain(session, length, 1, RoomWait(session.deadline_s / 2))
            if grant is None:
                return Status.NO_SPACE
            crc, flags = self._fill(session, grant, source, length)
            count = refill_count(len(pool), 1, 0, keep)
            return session.commit_one(digest, grant[0], length, crc, flags, length, count)

    def _put_large(self, session: WorkerSession, digest: bytes, source: memoryview | Span, length: int) -> int:
        """:meth:`put_one` of a value whose commit is announced."""
        pool, keep = session.pool.for_length(length)
        count = 1
        if not keep and session.pool.repeats_large(chunk_bytes_for(length)):
            count = 2  # one for this and one for the next
        grant = session.pool.take(length)
        if grant is None:
            with at_most(session.deadline_s):
                grant = _obtain(session, length, count, RoomWait(session.deadline_s / 2))
        if grant is None:
            return Status.NO_SPACE
        crc, flags = self._fill(session, grant, source, length)
        have = len(pool)
        want = refill_count(have, 1, 0, keep) if keep else 1 if count > 1 and have < 2 else 0
        status = session.commit_one(digest, grant[0], length, crc, flags, length, want)
        session.clear_announcement()
        return status

    def put_many(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span],
        positions: Sequence[int], statuses: list[int], room: RoomWait | None = None,
    ) -> None:  # fmt: skip
        """Put what stands at ``positions``, and fill their Statuses in. Raises TransportError when the session breaks.

        Copying goes on while the worker commits what came before. ``room``: of a call that puts to other workers too.
        """
        if not positions:
            return
        room = room or RoomWait(session.deadline_s / 2)
        if type(sources[positions[0]]) not in HOST_TYPES:
            self._put_from_device(session, digests, sources, positions, statuses, room)
            return
        fill = self._fill
        left = len(positions)
        length = len(sources[positions[0]])
        asked = self._ask_ahead(session, length, left)
        topped = False  # the grants for the next batch's first values are asked for
        if asked is not None or left * length <= LAST_BYTES:
            session.wake()
        pending = 0  # bytes copied and not yet committed
        #: Copied, not yet committed; and the positions of their statuses.
        entries: list[tuple[bytes, int, int, int, int, int]] = []
        mine: list[int] = []
        #: Committed, not yet answered.
        in_flight: list[tuple[int, list[int]]] = []
        pool: list[GrantTuple] = []
        pooled = -1
        try:
            for position in positions:
                source = sources[position]
                length = len(source)
                if length != pooled:  # found once for a run of one length
                    pool, pooled = session.pool.for_length(length)[0], length
                grant: GrantTuple | None
                try:
                    grant = pool.pop()
                except IndexError:
                    if entries:
                        in_flight.append((_commit(session, entries, left, False), mine))
                        entries, mine, pending = [], [], 0
                    if asked is not None:
                        awaited, asked = asked, None
                        _gather(session, awaited)
                    grant = session.pool.take(length)
                    if grant is None:
                        collect(session, in_flight, statuses)
                        in_flight = []
                        grant = _obtain(session, length, left, room)
                left -= 1
                if grant is None:
                    statuses[position] = Status.NO_SPACE
                    continue
                full = len(entries) >= COMMIT_KEYS - 1
                after = 0
                if length >= ANNOUNCE_BYTES:
                    pending += length
                    after = left * length  # as far as one can tell
                    full = full or pending >= COMMIT_BYTES or after <= LAST_BYTES < after + length
                wake = after if full or not left else -1
                if left and not pool:  # this was the last one: more come while it is filled
                    wake = after
                    if asked is None:
                        asked = self._ask_ahead(session, length, left)
                elif after > LAST_BYTES and len(in_flight) < SLOTS - 2:
                    wake = -1
                crc, flags = fill(session, grant, source, length, wake)
                entries.append((digests[position], grant[0], length, crc, flags, 0))
                mine.append(position)
                if left and full:
                    top = after <= LAST_BYTES and not topped
                    in_flight.append((_commit(session, entries, left, top), mine))
                    topped = topped or top
                    entries, mine, pending = [], [], 0
        finally:
            # Also when interrupted: what is copied is complete, and grants in answers that are not read would be lost.
            if entries:
                in_flight.append((_commit(session, entries, 0, not topped), mine))
            if asked is not None:
                _gather(session, asked)
            collect(session, in_flight, statuses)
        session.clear_announcement()

    def _fill(
        self, session: WorkerSession, grant: GrantTuple, source: memoryview | Span, length: int, after: int = 0
    ) -> tuple[int, int]:
        """Copy a value into its chunk and return (crc, flags). An interruption returns the grant to the pool.

        With ``after`` >= 0 a commit follows at once: this wakes a sleeping worker, and asks it to poll for as long as
        copying ``after`` more bytes takes. With -1 no commit follows.
        """
        copying = session.copying  # begin_copy() and end_copy() inlined: this runs once a key
        copying.append(None)
        try:
            if session.closed:
                raise TransportError("the session was closed")
            reader = session.reader
            start = grant[1] - reader.data_offset
            if type(source) is Span:
                self._copy(session, reader.data_address + start, source.address, length, after)
            elif length < RELEASE_BYTES:
                try:
                    reader.data[start : start + length] = source  # type: ignore[assignment]
                except TypeError:  # a device buffer: host memory does not pay for a test
                    source.copy_to_mapping(reader, start, length)  # type: ignore[union-attr]
            elif type(source) is memoryview:
                self._copy(session, reader.data_address + start, address_of(source), length, after)
            else:
                source.copy_to_mapping(reader, start, length)  # type: ignore[attr-defined]
            if self._checksum:
                return _checksum_of(source, reader, start), ENTRY_CRC
            return 0, 0
        except UnfinishedCopy:
            copying.append(None)  # for good: the device may still write the chunk, so no other value may get it
            raise
        except BaseException:
            session.pool.release(grant)
            raise
        finally:
            copying.pop()

    def _put_from_device(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span],
        positions: Sequence[int], statuses: list[int], room: RoomWait,
    ) -> None:  # fmt: skip
        """Carry out :meth:`put_many` from device buffers.

        A group's copies are one chain on the device. While the worker commits them, the next group's are in flight.
        """
        in_flight: list[tuple[int, list[int]]] = []
        left = list(reversed(positions))
        try:
            while left:
                group: list[tuple[int, GrantTuple]] = []
                size = 0
                while left and len(group) < DEVICE_KEYS and size < COMMIT_BYTES:
                    length = len(sources[left[-1]])
                    grant = session.pool.take(length)
                    if grant is None:
                        if group:
                            break  # no put waits for a grant while it holds an uncommitted one
                        collect(session, in_flight, statuses)
                        in_flight = []
                        grant = _obtain(session, length, len(left), room)
                    position = left.pop()
                    if grant is None:
                        statuses[position] = Status.NO_SPACE
                    else:
                        group.append((position, grant))
                        size += length
                entries = self._fill_group(session, digests, sources, group)
                for start in range(0, len(entries), COMMIT_KEYS):
                    part = entries[start : start + COMMIT_KEYS]
                    mine = [position for position, _ in group[start : start + COMMIT_KEYS]]
                    last = not left and start + COMMIT_KEYS >= len(entries)
                    in_flight.append((_commit(session, part, len(left), last), mine))
        finally:
            collect(session, in_flight, statuses)

    def _fill_group(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span],
        group: Sequence[tuple[int, GrantTuple]],
    ) -> list[tuple[bytes, int, int, int, int, int]]:  # fmt: skip
        """Copy a group's values into their chunks and return what to commit. A failure releases all grants."""
        reader = session.reader
        entries = []
        finished = True
        session.begin_copy()
        try:
            copies: list[DeviceCopy] = []
            for position, grant in group:
                source, start = sources[position], grant[1] - reader.data_offset
                if on_device(source):
                    copies.append((source, reader.data_address + start, source.size, source.pinned(reader)))
                else:
                    view = host_view(source)
                    self._copier.copy(reader.data_address + start, address_of(view), len(view))
            if copies:
                copies[0][0].copy_to_host(copies)
            for position, grant in group:
                length, start = len(sources[position]), grant[1] - reader.data_offset
                source = sources[position]
                crc, flags = (_checksum_of(source, reader, start), ENTRY_CRC) if self._checksum else (0, 0)
                entries.append((digests[position], grant[0], length, crc, flags, 0))
        except UnfinishedCopy:
            finished = False  # see _fill
            raise
        except BaseException:
            for _position, grant in group:
                session.pool.release(grant)
            raise
        finally:
            if finished:
                session.end_copy()
        return entries

    def _copy(self, session: WorkerSession, target: int, source: int, length: int, after: int) -> None:
        """Copy, and wake the worker when the rest takes about as long as its waking."""
        copy = self._copier.copy
        if after < 0:
            copy(target, source, length)
            return
        head = length - WAKE_BYTES
        if head > 0:
            if length <= LAST_BYTES:
                session.announce_commit(length)
            copy(target, source, head)
            session.wake(WAKE_BYTES + after)
            copy(target + head, source + head, WAKE_BYTES)
        else:
            session.wake(length + after)
            copy(target, source, length)

    @staticmethod
    def _ask_ahead(session: WorkerSession, length: int, left: int) -> tuple[int, int] | None:
        """Ask for grants that the pool lacks for ``left`` values. Return what :func:`_gather` waits for, or None."""
        chunk = chunk_bytes_for(length)
        lack = left - len(session.pool.stock(chunk))
        if lack <= 0:
            return None
        count = request_count(chunk, lack)
        return session.submit(M.Grant([(length, count)])), count


def _obtain(session: WorkerSession, length: int, left: int, room: RoomWait) -> GrantTuple | None:
    """Return a grant for a value of this size from the worker; None if it has no room. Asks for ``left`` in all."""
    chunk = chunk_bytes_for(length)
    count = request_count(chunk, left)
    fits = chunk <= session.reader.geometry.data_bytes
    return obtain(session, length, count, retry=count, room=room if fits else None)


def _commit(session: WorkerSession, entries: list[tuple[bytes, int, int, int, int, int]], left: int, top: bool) -> int:
    """Send what is copied, with the grants that are wanted next, and return a ticket for the answer.

    With ``top`` it also wants grants for large values: as many as the pool is to have when ``left`` more are put. They
    come with the answer after this one's.
    """
    spent: dict[int, int] = {}
    for entry in entries:
        length = entry[2]
        spent[length] = spent.get(length, 0) + 1
    wants = []
    for length, count in spent.items():
        chunk = chunk_bytes_for(length)
        keep = target_count(chunk)
        have = len(session.pool.stock(chunk))
        if chunk > SLAB_CHUNK_BYTES_MAX:  # each batch asks for what it lacks, while it copies what these have room for
            count = max(0, keep - max(0, have - left)) if top else 0
        else:
            count = refill_count(have, count, left, keep)
        if count:
            wants.append((length, count))
    return session.submit(M.Commit(entries, wants))


def _gather(session: WorkerSession, asked: tuple[int, int]) -> None:
    """Wait for grants that were asked for ahead, given a ticket and their number, and add them to the pool."""
    session.acquire()
    try:
        answer = session.wait_locked(*asked)
        if not isinstance(answer, M.Granted):
            session.channel.fail("the worker answered GRANT with something else")
        session.pool.add(answer.grants)
    finally:
        session.lock.release()


def collect(session: WorkerSession, in_flight: Sequence[tuple[int, list[int]]], statuses: list[int]) -> None:
    """Wait for the answers to all commits in flight."""
    if not in_flight:
        return
    session.acquire()
    try:
        for ticket, positions in in_flight:
            answer = session.wait_locked(ticket, len(positions))
            if not isinstance(answer, M.Committed) or len(answer.statuses) != len(positions):
                session.channel.fail("the worker answered COMMIT with something else")
            session.pool.add(answer.grants)
            for position, status in zip(positions, answer.statuses):
                statuses[position] = status
    finally:
        session.lock.release()


def _checksum_of(source: memoryview | Span, reader: ArenaReader, start: int) -> int:
    """Return the CRC-32 of a value that was copied to ``start`` in the data.

    Not of the copy, which others may have overwritten by now, but where the value is in a device's memory.
    """
    return zlib.crc32(reader.data[start : start + len(source)] if on_device(source) else host_view(source))

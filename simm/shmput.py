"""The same-host PUT: copy into a granted chunk, then commit.

Each value is copied into a chunk of ours, then named in a COMMIT; its grant id is spent from then on. Nobody waits
for a grant while holding an uncommitted one: before asking, what is copied is committed.

Every commit asks for as many grants as it spends, so the pool keeps its level; a pool that is low asks for a
few more, a full one for none (:func:`wanted`). The worker makes them after its answer and sends them with the next
one. A single put so costs one exchange and never waits for an allocation, and all its messages have the
one-key form: 4 KiB by the ring in 9 us, where every fourth put took 33 when the pool was topped up in steps.

Large values cost what their copy costs, and a sleeping worker on top: 25 us to send a message that wakes it,
50 to 70 until it answers, and 150 where nobody has woken it ahead of time. So

* a single one announces its commit when its copy begins (:meth:`WorkerSession.expect`), so that a worker which
  still looks does not go to sleep in the middle, and wakes a sleeping one a MiB before the end;
* from the second of one size on, the next one's grant is there already (:meth:`WorkerSession.learn`): 45 us;
* a batch asks for its grants before the first copy and takes them when it has used up what was in the pool (100 us a
  batch), commits in frames that nobody is woken for, and wakes the worker once, when a few MiB are left: it then
  commits what lies in the ring while we copy those, and only their own commit is waited for.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

from . import gpu
from . import messages as M
from .buffers import RELEASE_BYTES, Copier, Span, address_of
from .constants import SLAB_CHUNK_BYTES_MAX
from .errors import TransportError
from .gpu import DeviceSpan, Unfinished
from .layout import EntryFlag
from .messages import Status
from .ring import SLOTS
from .session import EXPECT_BYTES, GrantTuple, WorkerSession, ahead
from .sizes import chunk_bytes_for

_NO_SPACE: Final = int(Status.NO_SPACE)
_CRC: Final = int(EntryFlag.CRC)

#: Keys and bytes of one commit frame in a batch: small, so that the worker works on one while we copy the next.
COMMIT_KEYS: Final = 16
COMMIT_BYTES: Final = 16 << 20
#: A batch wakes the worker when no more than this is left to copy, and what was copied before is committed by then.
LAST_BYTES: Final = 4 << 20
#: So many bytes before the end of a copy a sleeping worker is woken.
WAKE_BYTES: Final = 1 << 20
#: A batch asks for so many bytes of grants at once, and at most so many.
ASK_BYTES: Final = 32 << 20
ASK_MAX: Final = 1024
#: Values that a batch copies out of GPU memory before it waits for the device.
DEVICE_KEYS: Final = 64
#: How many more grants than it spends a commit wants while the pool is low: a few, as the worker makes them
#: between two puts.
TOP_UP: Final = 4


def wanted(have: int, spent: int, left: int, keep: int) -> int:
    """How many grants a commit wants that spends ``spent``, where the pool has ``have`` and ``left`` puts follow.

    ``keep`` is :func:`session.ahead`. What earlier commits wanted and no answer has brought yet is not counted:
    while the pool has half of what it should, giving back what is spent keeps the sum of both as it is.
    """
    most = keep + min(left, keep)
    if have >= most:
        return 0
    if have * 2 >= most:
        return spent
    return spent + min(max(TOP_UP, spent), most - have)


class ShmPut:
    """Puts into arenas on this host; one for a client. No state but its settings: any thread may call it."""

    __slots__ = ("_checksum", "_copier")

    def __init__(self, copier: Copier, checksum: bool) -> None:
        self._copier = copier
        self._checksum = checksum

    def put_one(self, session: WorkerSession, digest: bytes, source: memoryview | Span) -> int:
        """Put one value; its Status. Raises TransportError when the session breaks."""
        length = len(source)
        if length >= EXPECT_BYTES:
            return self._put_large(session, digest, source, length)
        known = session.pools.get(length)
        pool, keep = known if known is not None else session.learn_size(length)
        try:
            grant = pool.pop()
        except IndexError:
            asked = self._ask(session, length, 1)
            if asked is None:
                return _NO_SPACE
            grant = asked
        crc, flags = self._fill(session, grant, source, length)
        have = len(pool)
        count = 1 if keep <= 2 * have < 2 * keep else wanted(have, 1, 0, keep)
        return session.commit_one(digest, grant[0], length, crc, flags, length, count)

    def _put_large(self, session: WorkerSession, digest: bytes, source: memoryview | Span, length: int) -> int:
        """:meth:`put_one` of a value whose commit is announced."""
        pool, keep = session.learn_size(length)
        count = 1
        if not keep and session.learn(chunk_bytes_for(length)):
            count = 2  # one for this and one for the next
        grant = session.take(length) or self._ask(session, length, count)
        if grant is None:
            return _NO_SPACE
        crc, flags = self._fill(session, grant, source, length)
        have = len(pool)
        want = wanted(have, 1, 0, keep) if keep else 1 if count > 1 and have < 2 else 0
        status = session.commit_one(digest, grant[0], length, crc, flags, length, want)
        session.came()
        return status

    def put_many(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span],
        positions: Sequence[int], statuses: list[int],
    ) -> None:  # fmt: skip
        """Put what stands at ``positions``, and fill their Statuses in. Raises TransportError when the session breaks.

        Copying goes on while the worker commits what came before.
        """
        if not positions:
            return
        if type(sources[positions[0]]) is DeviceSpan:
            self._put_from_device(session, digests, sources, positions, statuses)
            return
        fill = self._fill
        left = len(positions)
        length = len(sources[positions[0]])
        asked = self._ask_ahead(session, length, left)
        topped = False  # the grants for the next batch's first values are asked for
        if asked is not None or left * length <= LAST_BYTES:
            session.wake()
        pending = 0  # bytes copied and not yet committed
        #: Copied, not yet committed; and where their statuses go.
        entries: list[tuple[bytes, int, int, int, int, int]] = []
        mine: list[int] = []
        #: Committed, not yet answered.
        flying: list[tuple[int, list[int]]] = []
        pool: list[GrantTuple] = []
        pooled = -1
        try:
            for position in positions:
                source = sources[position]
                length = len(source)
                if length != pooled:  # 0.3 us a key less than session.take
                    pool, pooled = session.learn_size(length)[0], length
                grant: GrantTuple | None
                try:
                    grant = pool.pop()
                except IndexError:
                    if entries:
                        flying.append((_commit(session, entries, left, False), mine))
                        entries, mine, pending = [], [], 0
                    if asked is not None:
                        awaited, asked = asked, None
                        _gather(session, awaited)
                    grant = session.take(length)
                    if grant is None:
                        collect(session, flying, statuses)
                        flying = []
                        grant = self._ask(session, length, left)
                left -= 1
                if grant is None:
                    statuses[position] = _NO_SPACE
                    continue
                full = len(entries) >= COMMIT_KEYS - 1
                after = 0
                if length >= EXPECT_BYTES:
                    pending += length
                    after = left * length  # as far as one can tell
                    full = full or pending >= COMMIT_BYTES or after <= LAST_BYTES < after + length
                wake = after if full or not left else -1
                if left and not pool:  # this was the last one: more come while it is filled
                    wake = after
                    if asked is None:
                        asked = self._ask_ahead(session, length, left)
                elif after > LAST_BYTES and len(flying) < SLOTS - 2:
                    wake = -1
                crc, flags = fill(session, grant, source, length, wake)
                entries.append((digests[position], grant[0], length, crc, flags, 0))
                mine.append(position)
                if left and full:
                    top = after <= LAST_BYTES and not topped
                    flying.append((_commit(session, entries, left, top), mine))
                    topped = topped or top
                    entries, mine, pending = [], [], 0
        finally:
            # Interrupted, too: what is copied is complete, and the grants in answers that nobody takes would be lost.
            if entries:
                flying.append((_commit(session, entries, 0, not topped), mine))
            if asked is not None:
                _gather(session, asked)
            collect(session, flying, statuses)
        session.came()

    def _fill(
        self, session: WorkerSession, grant: GrantTuple, source: memoryview | Span, length: int, after: int = 0
    ) -> tuple[int, int]:
        """Copy a value into its chunk: (crc, flags). Interrupted, the chunk goes back to the pool unused.

        ``after``: a commit follows at once, a sleeping worker is woken for it, and shall look on for as long as
        copying so many more bytes takes; -1: none does.
        """
        copying = session.copying  # begin_copy() and end_copy(), spelt out: 0.15 us a key
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
                except TypeError:  # GPU memory; asked in this way, it is a question that others do not pay for
                    gpu.fill(reader, start, source, length)  # type: ignore[arg-type]
            elif type(source) is DeviceSpan:
                gpu.fill(reader, start, source, length)
            else:
                self._copy(session, reader.data_address + start, address_of(source), length, after)  # type: ignore[arg-type]
            if self._checksum:
                return zlib.crc32(reader.data[start : start + length]), _CRC
            return 0, 0
        except Unfinished:
            copying.append(None)  # for ever: the chunk may still be written, so it must never be anybody else's
            raise
        except BaseException:
            session.untake(grant)
            raise
        finally:
            copying.pop()

    def _put_from_device(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span],
        positions: Sequence[int], statuses: list[int],
    ) -> None:  # fmt: skip
        """:meth:`put_many` out of GPU memory: a group's copies are one chain on the device, and while the worker
        commits them the next group's are under way."""
        flying: list[tuple[int, list[int]]] = []
        left = list(reversed(positions))
        try:
            while left:
                group: list[tuple[int, GrantTuple]] = []
                size = 0
                while left and len(group) < DEVICE_KEYS and size < COMMIT_BYTES:
                    length = len(sources[left[-1]])
                    grant = session.take(length)
                    if grant is None:
                        if group:
                            break  # nobody waits for a grant while holding an uncommitted one
                        collect(session, flying, statuses)
                        flying = []
                        grant = self._ask(session, length, len(left))
                    position = left.pop()
                    if grant is None:
                        statuses[position] = _NO_SPACE
                    else:
                        group.append((position, grant))
                        size += length
                entries = self._fill_group(session, digests, sources, group)
                for start in range(0, len(entries), COMMIT_KEYS):
                    part = entries[start : start + COMMIT_KEYS]
                    mine = [position for position, _ in group[start : start + COMMIT_KEYS]]
                    last = not left and start + COMMIT_KEYS >= len(entries)
                    flying.append((_commit(session, part, len(left), last), mine))
        finally:
            collect(session, flying, statuses)

    def _fill_group(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span],
        group: Sequence[tuple[int, GrantTuple]],
    ) -> list[tuple[bytes, int, int, int, int, int]]:  # fmt: skip
        """Copy a group's values into their chunks; what to commit. After a failure all chunks are back in the pool."""
        reader = session.reader
        entries = []
        finished = True
        session.begin_copy()
        try:
            ours: list[tuple[int, DeviceSpan]] = []
            for position, grant in group:
                source, start = sources[position], grant[1] - reader.data_offset
                if type(source) is DeviceSpan:
                    ours.append((start, source))
                else:
                    view = gpu.host_view(source)
                    self._copier.copy(reader.data_address + start, address_of(view), len(view))
            gpu.fill_many(reader, ours)
            for position, grant in group:
                length, start = len(sources[position]), grant[1] - reader.data_offset
                crc, flags = (zlib.crc32(reader.data[start : start + length]), _CRC) if self._checksum else (0, 0)
                entries.append((digests[position], grant[0], length, crc, flags, 0))
        except Unfinished:
            finished = False  # see _fill
            raise
        except BaseException:
            for _position, grant in group:
                session.untake(grant)
            raise
        finally:
            if finished:
                session.end_copy()
        return entries

    def _copy(self, session: WorkerSession, target: int, source: int, length: int, after: int) -> None:
        """Copy; the worker is woken when about as much is left as its waking takes."""
        copy = self._copier.copy
        if after < 0:
            copy(target, source, length)
            return
        head = length - WAKE_BYTES
        if head > 0:
            if length <= LAST_BYTES:
                session.expect(length)
            copy(target, source, head)
            session.wake(WAKE_BYTES + after)
            copy(target + head, source + head, WAKE_BYTES)
        else:
            session.wake(length + after)
            copy(target, source, length)

    @staticmethod
    def _ask_ahead(session: WorkerSession, length: int, left: int) -> tuple[int, int] | None:
        """Ask for the grants that the pool lacks for so many values, without waiting: for :func:`_gather`, or None."""
        chunk = chunk_bytes_for(length)
        lack = left - len(session.pool(chunk))
        if lack <= 0:
            return None
        count = min(lack, ASK_MAX, max(1, ASK_BYTES // chunk))
        session.acquire()
        try:
            return session.submit_locked(M.Grant([(length, count)])), count
        finally:
            session.lock.release()

    @staticmethod
    def _ask(session: WorkerSession, length: int, left: int) -> GrantTuple | None:
        """Get grants for values of this size from the worker; None when there is no room."""
        chunk = chunk_bytes_for(length)
        count = max(1, min(left, ASK_MAX, max(ahead(chunk), ASK_BYTES // chunk)))
        for attempt in range(2):
            session.ask([(length, count)])
            grant = session.take(length)
            if grant is not None or attempt or not session.return_idle():
                return grant
        return None


def _commit(session: WorkerSession, entries: list[tuple[bytes, int, int, int, int, int]], left: int, top: bool) -> int:
    """Send what is copied, and say which grants come next; a ticket for its answer.

    ``top``: of large values, too, as many as shall be in the pool when the ``left`` ones are put. They come with the
    answer after this one's.
    """
    spent: dict[int, int] = {}
    for entry in entries:
        length = entry[2]
        spent[length] = spent.get(length, 0) + 1
    wants = []
    for length, count in spent.items():
        chunk = chunk_bytes_for(length)
        keep = ahead(chunk)
        have = len(session.pool(chunk))
        if chunk > SLAB_CHUNK_BYTES_MAX:  # each batch asks for what it lacks, while it copies what these have room for
            count = max(0, keep - max(0, have - left)) if top else 0
        else:
            count = wanted(have, count, left, keep)
        if count:
            wants.append((length, count))
    session.acquire()
    try:
        return session.submit_locked(M.Commit(entries, wants))
    finally:
        session.lock.release()


def _gather(session: WorkerSession, asked: tuple[int, int]) -> None:
    """Wait for grants asked for ahead, a ticket and how many; they land in the pool."""
    session.acquire()
    try:
        session.add_grants_locked(session.wait_locked(*asked).grants)
    finally:
        session.lock.release()


def collect(session: WorkerSession, flying: Sequence[tuple[int, list[int]]], statuses: list[int]) -> None:
    """Wait for the answers of all commits sent."""
    if not flying:
        return
    session.acquire()
    try:
        for ticket, positions in flying:
            answer = session.wait_locked(ticket, len(positions))
            if not isinstance(answer, M.Committed) or len(answer.statuses) != len(positions):
                session.channel.fail("the worker answered COMMIT with something else")
            session.add_grants_locked(answer.grants)
            for position, status in zip(positions, answer.statuses):
                statuses[position] = status
    finally:
        session.lock.release()

"""The same-host PUT: copy into a granted chunk, then commit.

Each value is copied into a chunk of ours, then named in a COMMIT; its grant id is spent from then on. Nobody waits
for a grant while holding an uncommitted one: before asking, what is copied is committed.

Every commit asks for as many grants as it spends, so the pool keeps its level; a pool that is low asks for a
few more, a full one for none (:func:`wanted`). The worker makes them after its answer and sends them with the next
one. A single put so costs one exchange and never waits for an allocation, and all its messages have the
one-key form: 4 KiB by the ring in 9 us, where every fourth put took 33 when the pool was topped up in steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

from . import messages as M
from .buffers import RELEASE_BYTES, Copier, Span, address_of
from .layout import EntryFlag
from .messages import Status
from .session import GrantTuple, WorkerSession, ahead
from .slab import chunk_bytes_for

_NO_SPACE: Final = int(Status.NO_SPACE)
_CRC: Final = int(EntryFlag.CRC)

#: Keys and bytes of one commit frame in a batch: small, so that the worker works on one while we copy the next;
#: not so small that it falls asleep in between and each of them pays for waking it.
COMMIT_KEYS: Final = 16
COMMIT_BYTES: Final = 4 << 20
#: So many bytes before the end of a copy a sleeping worker is woken.
WAKE_BYTES: Final = 1 << 20
#: A batch asks for so many bytes of grants at once, and at most so many.
ASK_BYTES: Final = 32 << 20
ASK_MAX: Final = 1024
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
        chunk = chunk_bytes_for(length)
        pool = session.pool(chunk)
        try:
            grant = pool.pop()
        except IndexError:
            asked = self._ask(session, length, 1)
            if asked is None:
                return _NO_SPACE
            grant = asked
        crc, flags = self._fill(session, grant, source, length)
        keep = ahead(chunk)
        have = len(pool)
        count = 1 if keep <= 2 * have < 2 * keep else wanted(have, 1, 0, keep) if keep else 0
        return session.commit_one(digest, grant[0], length, crc, flags, length, count)

    def put_many(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span],
        positions: Sequence[int], statuses: list[int],
    ) -> None:  # fmt: skip
        """Put what stands at ``positions``, and fill their Statuses in. Raises TransportError when the session breaks.

        Copying goes on while the worker commits what came before.
        """
        session.wake()
        fill = self._fill
        left = len(positions)
        pending = 0  # bytes copied and not yet committed
        #: Copied, not yet committed; and where their statuses go.
        entries: list[tuple[bytes, int, int, int, int, int]] = []
        mine: list[int] = []
        #: Committed, not yet answered.
        flying: list[tuple[int, list[int]]] = []
        pool: list[GrantTuple] = []
        pooled = -1
        for position in positions:
            source = sources[position]
            length = len(source)
            if length != pooled:  # 0.3 us a key less than session.take
                pool, pooled = session.pool(chunk_bytes_for(length)), length
            grant: GrantTuple | None
            try:
                grant = pool.pop()
            except IndexError:
                if entries:
                    flying.append((_commit(session, entries, left), mine))
                    entries, mine, pending = [], [], 0
                collect(session, flying, statuses)
                flying = []
                grant = self._ask(session, length, left)
            left -= 1
            if grant is None:
                statuses[position] = _NO_SPACE
                continue
            pending += length
            full = pending >= COMMIT_BYTES or len(entries) + 1 >= COMMIT_KEYS
            crc, flags = fill(session, grant, source, length, full or not left)
            entries.append((digests[position], grant[0], length, crc, flags, 0))
            mine.append(position)
            if left and full:
                flying.append((_commit(session, entries, left), mine))
                entries, mine, pending = [], [], 0
        if entries:
            flying.append((_commit(session, entries, 0), mine))
        collect(session, flying, statuses)

    def _fill(
        self, session: WorkerSession, grant: GrantTuple, source: memoryview | Span, length: int, commits: bool = True
    ) -> tuple[int, int]:
        """Copy a value into its chunk: (crc, flags). Interrupted, the chunk goes back to the pool unused.

        ``commits``: a commit follows at once, and a sleeping worker is woken for it.
        """
        session.begin_copy()
        try:
            reader = session.reader
            start = grant[1] - reader.data_offset
            if type(source) is Span:
                self._copy(session, reader.data_address + start, source.address, length, commits)
            elif length < RELEASE_BYTES:
                reader.data[start : start + length] = source  # type: ignore[assignment]
            else:
                self._copy(session, reader.data_address + start, address_of(source), length, commits)  # type: ignore[arg-type]
            if self._checksum:
                return zlib.crc32(reader.data[start : start + length]), _CRC
            return 0, 0
        except BaseException:
            session.untake(grant)
            raise
        finally:
            session.end_copy()

    def _copy(self, session: WorkerSession, target: int, source: int, length: int, commits: bool) -> None:
        """Copy; the worker is woken when about as much is left as its waking takes."""
        copy = self._copier.copy
        if not commits:
            copy(target, source, length)
            return
        ahead_of_end = length - WAKE_BYTES
        if ahead_of_end > 0:
            copy(target, source, ahead_of_end)
            session.wake()
            copy(target + ahead_of_end, source + ahead_of_end, WAKE_BYTES)
        else:
            session.wake()
            copy(target, source, length)

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


def _commit(session: WorkerSession, entries: list[tuple[bytes, int, int, int, int, int]], left: int) -> int:
    """Send what is copied, and say which grants come next; a ticket for its answer."""
    spent: dict[int, int] = {}
    for entry in entries:
        length = entry[2]
        spent[length] = spent.get(length, 0) + 1
    wants = []
    for length, count in spent.items():
        chunk = chunk_bytes_for(length)
        keep = ahead(chunk)
        if keep:
            count = wanted(len(session.pool(chunk)), count, left, keep)
            if count:
                wants.append((length, count))
    session.acquire()
    try:
        return session.submit_locked(M.Commit(entries, wants))
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

"""The same-host PUT: copy into a granted chunk, then commit.

Each value is copied into a granted chunk, then named in a COMMIT, which spends its grant id. No put waits for a grant
while it holds an uncommitted one: before asking, it commits what is copied.

Every commit of a batch asks for as many grants as it spends, so the pool keeps its level. A pool that is low asks for a
few more, a full one for none (:func:`~simm.ipc.grant_pool.refill_count`). Single puts ask for a quarter of the pool
when so many are missing, as one eviction of 16 entries takes the worker a third of 16 evictions. The worker makes the
grants after its answer and sends them with the next one. So a single put is one exchange and waits for no allocation.

Large values cost what their copy costs, and waking a sleeping worker on top, which can take as long as the copy:

* A single put announces its commit when its copy begins (:meth:`WorkerSession.announce_commit`), so that a worker
  which still polls does not go to sleep in the middle. It wakes a sleeping one a MiB before the end.
* From the second put of a size on, the next one's grant is there already (:meth:`GrantPool.repeats_large`).
* A batch asks for its grants before the first copy, and takes them when it has used up the pool. It commits in frames
  that wake nothing, and wakes the worker once, when a few MiB are left. The worker then commits what lies in the ring
  while those are copied, and the batch waits only for their own commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

from ..arena.layout import ENTRY_CRC
from ..errors import PeerError, TransportError, UnfinishedCopy
from ..host.buffers import RELEASE_BYTES, Copier, DeviceCopy, Pieces, Span, address_of, host_view, memmove
from ..host.parts import HOST_TYPES, checksum_of, gather, on_device
from ..net.allowance import at_most
from ..slab import chunk_bytes_for
from ..wire.messages import Status
from . import answer_wait
from .answer_wait import AnswerWait, ask_ahead, collect, collect_grants, commit, ending, forsake_batch
from .commit_ring import ANNOUNCE_BYTES, SLOTS
from .grant_pool import GrantTuple, RoomWait, room_of_call, single_count
from .session import WorkerSession
from .steps import Steps, finish

#: Keys and bytes of one commit frame in a batch: few, so that the worker commits one while the next is copied. More in
#: a batch for several workers, where each commits its own while those of the others are copied.
COMMIT_KEYS: Final = 16
COMMIT_KEYS_TOGETHER: Final = 64
#: Of values of so many bytes and less the first frame has 12, the next ones 24 and 32: a copy takes a quarter of the
#: commit's time, and a frame has its price. Longer ones would keep other clients waiting.
COMMIT_GROW_BYTES, COMMIT_KEYS_FIRST, COMMIT_KEYS_MOST = 16 << 10, 12, 32
COMMIT_BYTES: Final = 16 << 20
#: A batch wakes the worker when no more than this is left to copy. What was copied before is committed by then.
LAST_BYTES: Final = 4 << 20
#: A sleeping worker is woken so many bytes before the end of a copy.
WAKE_BYTES: Final = 1 << 20
#: A value to copy: its grant, memory, length and position in the batch.
_Planned = tuple[GrantTuple, memoryview | Span, int, int]
#: What COMMIT says of a value: digest, grant id, length, CRC, flags, options.
_Entry = tuple[bytes, int, int, int, int, int]
#: In the place of a Status, after an error: nothing of this value was sent.
NOT_SENT: Final = -1
_PLAIN: Final = frozenset((memoryview, Span))
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
        length = source.size if type(source) is Span else len(source)
        if length >= ANNOUNCE_BYTES:
            return self._put_large(session, digest, source, length)
        known = session.pool.by_length.get(length)
        pool, keep, pops = known if known is not None else session.pool.for_length(length)
        try:
            for grant in pops:  # noqa: B007 -- no call from here to the next try: an interrupt would lose the grant
                break
        except IndexError:
            return self._put_asking(session, digest, source, length)
        crc = -1  # until it is copied
        try:
            crc, flags = self._fill(session, grant, source, length)
            if (count := single_count(len(pool), keep)) and session.pool.line:
                count = 0
            return session.commit_one(digest, grant[0], length, crc, flags, length, count)
        except BaseException:
            session.pool.give_back(grant, crc)
            raise

    def _put_asking(self, session: WorkerSession, digest: bytes, source: memoryview | Span, length: int) -> int:
        """:meth:`put_one` with an empty pool, and one deadline for all its exchanges."""
        pool, keep, _ = session.pool.for_length(length)
        grant, crc = None, -1
        with at_most(session.deadline_s):
            try:
                if (grant := answer_wait.obtain_some(session, length, 1, room_of_call(session.deadline_s / 2))) is None:
                    return Status.NO_SPACE
                count = session.pool.refill(len(pool), 1, 0, keep)
                crc, flags = self._fill(session, grant, source, length)
                return session.commit_one(digest, grant[0], length, crc, flags, length, count)
            except BaseException:
                session.pool.give_back(grant, crc)
                raise

    def _put_large(self, session: WorkerSession, digest: bytes, source: memoryview | Span, length: int) -> int:
        """:meth:`put_one` of a value whose commit is announced."""
        pool, keep, _ = session.pool.for_length(length)
        repeats = not keep and session.pool.repeats_large(chunk_bytes_for(length))
        grant, crc = session.pool.take(length), -1
        try:
            if grant is None:
                with at_most(session.deadline_s):  # one for this and one for the next
                    grant = answer_wait.obtain_some(session, length, 1 + repeats, room_of_call(session.deadline_s / 2))
            if grant is None:
                return Status.NO_SPACE
            have = len(pool)
            want = session.pool.refill(have, 1, 0, keep) if keep else repeats and have < 2 and not session.pool.line
            crc, flags = self._fill(session, grant, source, length)
            status = session.commit_one(digest, grant[0], length, crc, flags, length, int(want))
        except BaseException:
            session.pool.give_back(grant, crc)
            raise
        session.clear_announcement()
        return status

    def put_many(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span],
        positions: Sequence[int], statuses: list[int], room: RoomWait | None = None,
    ) -> None:  # fmt: skip
        """Put what stands at ``positions``, and fill their Statuses in. Raises TransportError when the session breaks.

        Copying goes on while the worker commits what came before. ``room``: of a call that puts to other workers too.
        After an error of the peer, values that are known not to be sent are NOT_SENT; nothing is known of the others.
        """
        finish(self.put_steps(session, digests, sources, positions, statuses, room))

    def put_steps(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span],
        positions: Sequence[int], statuses: list[int], room: RoomWait | None = None, *, together: bool = False,
    ) -> Steps[None]:  # fmt: skip
        """Do :meth:`put_many` in steps. ``together``: the call puts to other workers at the same time.

        The worker is then woken by its commits alone, and commits while values for the others are copied.
        """
        if not positions:
            return
        room = room or room_of_call(session.deadline_s / 2)
        if type(sources[positions[0]]) not in HOST_TYPES:
            self._put_from_device(session, digests, sources, positions, statuses, room)
            return
        left = len(positions)
        length = len(sources[positions[0]])
        asked: list[tuple[int, int]] = []
        topped = False  # the grants for the next batch's first values are asked for
        #: Values that have grants and are to be copied together, by several threads.
        planned: list[_Planned] = []
        planned_bytes = 0
        spread = self._copier.threads > 1 and not self._checksum and length >= RELEASE_BYTES
        most = COMMIT_KEYS_TOGETHER if together or spread else COMMIT_KEYS
        pending = 0  # bytes copied and not yet committed
        #: Copied, not yet committed; and the positions of their statuses.
        entries: list[_Entry] = []
        mine: list[int] = []
        #: Committed, not yet answered.
        in_flight: list[tuple[int, list[int]]] = []
        grant: GrantTuple | None = None  # taken, and not yet among these
        under_way: BaseException | None = None
        (pool, _, pops), pooled = session.pool.for_length(length), length
        try:
            ask_ahead(session, length, left, asked)
            if together:
                if asked:
                    session.kick()
            elif asked or left * length <= LAST_BYTES:
                session.wake()
            if length < RELEASE_BYTES:
                ready = entries, mine
                left = 0  # it says itself what it has not sent
                done = self._put_runs(session, digests, sources, positions, statuses, most, ready, in_flight, together)
                positions = positions[done:]
                left = len(positions)
            for position in positions:
                source = sources[position]
                length = len(source)
                if length != pooled:  # found once for a run of one length
                    (pool, _, pops), pooled = session.pool.for_length(length), length
                try:
                    for grant in pops:  # noqa: B007 -- see put_one
                        break
                except IndexError:
                    if planned:
                        self._fill_planned(session, digests, planned, entries, mine, -1)
                        planned_bytes = 0
                    if entries:
                        commit(session, entries, left, False, in_flight, mine)
                        entries, mine, pending = [], [], 0
                    if asked:
                        if together:
                            yield AnswerWait(session, asked[0][0])
                        collect_grants(session, asked)
                    grant = session.pool.take(length)
                    if grant is None:
                        if together and in_flight:
                            session.kick()
                            yield AnswerWait(session, in_flight[-1][0])
                        collect(session, in_flight, statuses)
                        in_flight = []
                        if together:
                            ask_ahead(session, length, left, asked)
                        if asked:
                            session.kick()
                            yield AnswerWait(session, asked[0][0])
                            collect_grants(session, asked)
                            grant = session.pool.take(length)
                        if grant is None:
                            grant = answer_wait.obtain_some(session, length, left, room)
                left -= 1
                if grant is None:
                    statuses[position] = Status.NO_SPACE
                    continue
                full = len(entries) + len(planned) >= most - 1
                after = 0
                if length >= ANNOUNCE_BYTES:
                    pending += length
                    after = left * length  # as far as one can tell
                    full = full or pending >= COMMIT_BYTES or after <= LAST_BYTES < after + length
                wake = after if full or not left else -1
                if left and not pool:  # this was the last one: more come while it is filled
                    wake = after
                    if not asked:
                        ask_ahead(session, length, left, asked)
                elif after > LAST_BYTES and len(in_flight) < SLOTS - 2:
                    wake = -1
                if spread and length >= RELEASE_BYTES and type(source) in _PLAIN:
                    plan, grant = (grant, source, length, position), None
                    planned.append(plan)
                    planned_bytes += length
                    if full or not left or not pool or planned_bytes >= COMMIT_BYTES:
                        self._fill_planned(session, digests, planned, entries, mine, -1 if together else wake)
                        planned_bytes = 0
                else:
                    if planned:  # of a duplicate key the later value is committed later
                        self._fill_planned(session, digests, planned, entries, mine, -1)
                        planned_bytes = 0
                    crc, flags = self._fill(session, grant, source, length, -1 if together else wake)
                    mine.append(position)
                    entry, grant = (digests[position], grant[0], length, crc, flags, 0), None
                    entries.append(entry)
                if left and full:
                    if together and len(in_flight) >= SLOTS:
                        yield AnswerWait(session, in_flight[-SLOTS][0])
                    top = after <= LAST_BYTES and not topped
                    commit(session, entries, left, top, in_flight, mine)
                    entries, mine, pending = [], [], 0
                    topped = topped or top
                    if together:
                        session.kick()
            if planned:
                self._fill_planned(session, digests, planned, entries, mine, -1)
            if together:
                if entries:
                    commit(session, entries, 0, not topped, in_flight, mine)
                    entries = []
                if in_flight:
                    session.kick()
                    yield AnswerWait(session, in_flight[-1][0], last=True)
        except BaseException as exc:
            under_way = exc
            raise
        finally:  # also when interrupted: what is copied is complete, and grants in answers not read would be lost
            try:
                if isinstance(under_way, PeerError):
                    _not_sent(positions[len(positions) - left :], statuses)
                for plan in planned:
                    session.pool.release(plan[0])
                if grant is not None:
                    session.pool.give_back(grant, -1)
                with ending(session, in_flight, asked, statuses):
                    if entries and not (in_flight and in_flight[-1][1] is mine):  # else interrupted once it was sent
                        del mine[len(entries) :]
                        commit(session, entries, 0, not topped, in_flight, mine)
                    entries = []
            except BaseException as exc:  # nobody tries again to commit what is left; ``ending`` may not have begun
                session.pool.unsent += [entry[1] for entry in entries]
                forsake_batch(session, in_flight, asked)
                if answer_wait.outranks(under_way, exc):
                    raise under_way from None
                raise
            finally:
                under_way = None  # else it and this frame hold each other, and with them the arena
        session.clear_announcement()

    def _put_runs(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span],
        positions: Sequence[int], statuses: list[int], most: int, ready: tuple[list[_Entry], list[int]],
        in_flight: list[tuple[int, list[int]]], together: bool,
    ) -> int:  # fmt: skip
        """Put the first values, small ones in plain memory, as long as a frame's all have one length and grants.

        Return their number. Commits are in ``in_flight``, after an exception in ``ready``. One grant stays in the pool.
        """
        entries, mine = ready
        done, count = 0, len(positions)
        length = len(sources[positions[0]])
        pool, _, pops = session.pool.for_length(length)
        grows = not together and count >= 2 * most and length <= COMMIT_GROW_BYTES
        most = COMMIT_KEYS_FIRST if grows else most
        grants: list[GrantTuple] = []  # taken, and not among ``entries``
        sent: list[int] = []  # the positions of the frame that was sent last
        try:
            while done < count and not (together and len(in_flight) >= SLOTS):
                if grows and 3 * (count - done) <= 4 * most:
                    most = count - done  # no short frame at the end
                part = positions[done : done + most]
                run = [sources[position] for position in part]
                if not len(run) < len(pool) or not _PLAIN.issuperset(map(type, run)) or {*map(len, run)} != {length}:
                    break
                try:
                    grants += islice(pops, len(run))  # no call once it takes them
                except IndexError:  # another thread was faster
                    break
                filled = [
                    (digests[each], grant[0], length, crc, flags, 0)
                    for each, grant, (crc, flags) in zip(part, grants, self._fill_run(session, grants, run, length))
                ]  # fmt: skip
                entries += filled
                mine += part
                grants, sent = [], [*part]
                done += len(run)
                commit(session, entries, count - done, False, in_flight, sent)
                del entries[:], mine[:]
                if together:
                    session.kick()
                most = min(2 * most, COMMIT_KEYS_MOST) if grows else most
        except PeerError:
            _not_sent(positions[done:], statuses)
            raise
        finally:
            if in_flight and in_flight[-1][1] is sent:  # an interrupt may have come before this was done
                del entries[:], mine[:]
            if grants:
                session.pool.add(grants)
        return done

    def _fill_run(
        self, session: WorkerSession, grants: Sequence[GrantTuple], run: Sequence[memoryview | Span], length: int
    ) -> Sequence[tuple[int, int]]:
        """Do :meth:`_fill` for small values of one length in plain memory; return (crc, flags) of each."""
        reader, copying = session.reader, session.copying
        copying += (None,)  # see _fill
        try:
            if session.closed:
                raise TransportError("the session was closed")
            base, data, address = reader.data_offset, reader.data, reader.data_address
            for grant, source in zip(grants, run):
                start = grant[1] - base
                if type(source) is Span:
                    memmove(address + start, source.address, length)
                else:
                    data[start : start + length] = source  # type: ignore[assignment]
            if not self._checksum:
                return [(0, 0)] * len(run)
            return [(checksum_of(source, data, grant[1] - base), ENTRY_CRC) for grant, source in zip(grants, run)]
        finally:
            copying.pop()

    def _fill(
        self, session: WorkerSession, grant: GrantTuple, source: memoryview | Span, length: int, after: int = 0
    ) -> tuple[int, int]:
        """Copy a value into its chunk and return (crc, flags). After an exception the caller has the grant still.

        With ``after`` >= 0 a commit follows at once: this wakes a sleeping worker, and asks it to poll for as long as
        copying ``after`` more bytes takes. With -1 no commit follows.
        """
        finished = True
        copying = session.copying  # begin_copy() inlined: an interrupt may come as it returns, and this runs once a key
        copying += (None,)
        try:
            if session.closed:
                raise TransportError("the session was closed")
            reader = session.reader
            start = grant[1] - reader.data_offset
            if type(source) is Span:
                if length < RELEASE_BYTES:  # the commit follows within a microsecond, and wakes the worker
                    memmove(reader.data_address + start, source.address, length)
                else:
                    self._copy(session, reader.data_address + start, source.address, length, after)
            elif length < RELEASE_BYTES:
                try:
                    reader.data[start : start + length] = source  # type: ignore[assignment]
                except TypeError:  # pieces or a device buffer: plain memory does not pay for a test
                    self._fill_apart(session, source, start, length, after)
            elif type(source) is memoryview:
                self._copy(session, reader.data_address + start, address_of(source), length, after)
            else:
                self._fill_apart(session, source, start, length, after)
            return (checksum_of(source, reader.data, start), ENTRY_CRC) if self._checksum else (0, 0)
        except UnfinishedCopy:
            finished = False  # for good: the device may still write the chunk, so no other value may get it
            session.pool.running += (grant[0],)  # an interrupt may take the exception's place
            raise
        finally:
            if finished:
                copying.pop()

    def _fill_planned(
        self, session: WorkerSession, digests: Sequence[bytes], planned: list[_Planned],
        entries: list[_Entry], mine: list[int], after: int,
    ) -> None:  # fmt: skip
        """Copy values into their chunks by several threads, and add them to what is to be committed.

        After a failure they are planned still, and no copy runs any more. ``after`` as in _fill().
        """
        copying = session.copying
        copying += (None,)  # see _fill
        try:
            if session.closed:
                raise TransportError("the session was closed")
            reader = session.reader
            base = reader.data_address - reader.data_offset
            copies = [
                (base + grant[1], source.address if isinstance(source, Span) else address_of(source), length)
                for grant, source, length, _ in planned
            ]
            tail, size = len(copies), 0
            if after >= 0:  # the worker is woken before the last of them
                while tail and size < WAKE_BYTES * self._copier.threads:
                    tail -= 1
                    size += copies[tail][2]
                if tail:
                    session.announce_commit(sum(length for _, _, length in copies[:tail]))
                    self._copier.copy_all(copies[:tail], reader.node)
                session.wake(size + after)
            self._copier.copy_all(copies[:tail] if after < 0 else copies[tail:], reader.node)
        finally:
            copying.pop()
        filled = [(digests[position], grant[0], length, 0, 0, 0) for grant, _, length, position in planned]
        mine += [plan[3] for plan in planned]
        entries += filled
        del planned[:]  # with no call since the line before: a grant is in one of the two

    def _fill_apart(self, session: WorkerSession, source: Any, start: int, length: int, after: int) -> None:
        """Copy a value that is no single piece of host memory to ``start`` in the data. ``after`` as in _fill()."""
        reader = session.reader
        if type(source) is not Pieces:
            if after >= 0:  # the device copies, and the CPU has time
                session.wake(length + after)
            source.copy_to_mapping(reader, start, length)
            return
        parts = source.parts
        last = len(parts)
        rest = 0  # bytes of the parts from ``last`` on, before which the worker is woken
        while after >= 0 and last and (not rest or rest + len(parts[last - 1]) <= WAKE_BYTES):
            last -= 1
            rest += len(parts[last])
        if last and rest and length <= LAST_BYTES:
            session.announce_commit(length)
        gather(parts[:last], reader.data, reader.data_address, start, self._copier, reader)
        if rest:
            session.wake(rest + after)
            gather(parts[last:], reader.data, reader.data_address, start + length - rest, self._copier, reader)

    def _put_from_device(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span],
        positions: Sequence[int], statuses: list[int], room: RoomWait,
    ) -> None:  # fmt: skip
        """Carry out :meth:`put_many` from device buffers.

        A group's copies are one chain on the device. Meanwhile the worker wakes, commits the group before it, and
        grants what the next one needs.
        """
        in_flight: list[tuple[int, list[int]]] = []
        left = list(reversed(positions))
        asked: list[tuple[int, int]] = []
        under_way: BaseException | None = None
        group: list[tuple[int, GrantTuple]] = []  # not yet copied
        entries: list[_Entry] = []  # copied, not yet committed
        try:
            while left:
                if not asked:
                    ask_ahead(session, len(sources[left[-1]]), len(left), asked)
                size = 0
                while left and len(group) < DEVICE_KEYS and size < COMMIT_BYTES:
                    length = len(sources[left[-1]])
                    grant = session.pool.take(length)
                    if grant is None:
                        if group:
                            break  # no put waits for a grant while it holds an uncommitted one
                        if asked:
                            collect_grants(session, asked)
                            grant = session.pool.take(length)
                        if grant is None:
                            collect(session, in_flight, statuses)
                            in_flight = []
                            grant = answer_wait.obtain_some(session, length, len(left), room)
                    if grant is None:
                        statuses[left[-1]] = Status.NO_SPACE
                    else:
                        group += ((left[-1], grant),)
                        size += length
                    del left[-1]
                copied = [each[0] for each in group]
                entries = self._fill_group(session, digests, sources, group, size)
                group = []  # with no call since the line before: a grant is in one of the two
                for start in range(0, len(entries), COMMIT_KEYS):
                    part, mine = entries[:COMMIT_KEYS], copied[start : start + COMMIT_KEYS]
                    top = not left and len(part) == len(entries)
                    commit(session, part, len(left), top, in_flight, mine)
                    del entries[:COMMIT_KEYS]  # if not, they are spent and ``unsent``, which is harmless
        except BaseException as exc:
            under_way = exc
            raise
        finally:
            try:
                session.pool.unsent += [entry[1] for entry in entries]
                for _, grant in group:
                    session.pool.give_back(grant, -1)
                if isinstance(under_way, PeerError):
                    _not_sent(left, statuses)
                with ending(session, in_flight, asked, statuses):
                    pass
            except BaseException as exc:  # as in put_steps
                forsake_batch(session, in_flight, asked)
                if answer_wait.outranks(under_way, exc):
                    raise under_way from None
                raise
            finally:
                under_way = None
        session.clear_announcement()

    def _fill_group(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span],
        group: Sequence[tuple[int, GrantTuple]], size: int,
    ) -> list[_Entry]:  # fmt: skip
        """Copy a group's values, of so many bytes, and return what to commit."""
        reader = session.reader
        entries, finished = [], True
        numbers = [grant[0] for _, grant in group]
        copying = session.copying
        copying += (None,)  # see _fill
        try:
            if session.closed:
                raise TransportError("the session was closed")
            session.wake(size)
            copies: list[DeviceCopy] = []
            pinned: Any = None
            for position, grant in group:
                source, start = sources[position], grant[1] - reader.data_offset
                if on_device(source):
                    pinned = pinned or source.pinned(reader)
                    copies.append((source, reader.data_address + start, source.size, pinned))
                else:
                    view = host_view(source)
                    self._copier.copy(reader.data_address + start, address_of(view), len(view))
            if copies:
                copies[0][0].copy_to_host(copies)
            for position, grant in group:
                source, start = sources[position], grant[1] - reader.data_offset
                crc, flags = (checksum_of(source, reader.data, start), ENTRY_CRC) if self._checksum else (0, 0)
                entries.append((digests[position], grant[0], len(source), crc, flags, 0))
        except UnfinishedCopy:
            finished = False  # see _fill
            session.pool.running += numbers
            raise
        finally:
            if finished:
                copying.pop()
        return entries

    def _copy(self, session: WorkerSession, target: int, source: int, length: int, after: int) -> None:
        """Copy, and wake the worker when the rest takes about as long as its waking."""
        copy, node = self._copier.copy, session.reader.node
        if after < 0:
            copy(target, source, length, node)
        elif (head := length - WAKE_BYTES) > 0:
            if length <= LAST_BYTES:
                session.announce_commit(length)
            copy(target, source, head, node)
            session.wake(WAKE_BYTES + after)
            copy(target + head, source + head, WAKE_BYTES)
        else:
            session.wake(length + after)
            copy(target, source, length, node)


def _not_sent(positions: Sequence[int], statuses: list[int]) -> None:
    for position in positions:
        statuses[position] = NOT_SENT

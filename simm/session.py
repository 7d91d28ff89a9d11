"""A client's session with a worker on its own host: grants, ring, pins, and the way they end.

What must never happen: that we write into a chunk which is no longer ours. Hence

* a grant is taken from the pool before the copy, and its id is spent by the commit; once the commit is
  sent the chunk is forgotten here, whatever comes back;
* a session that ends is *buried*, not forgotten: copies into its chunks may still be running in other threads,
  and views of its pins be alive. ``copying`` has an item for each; when it is empty, a later session of this
  process with the same arena tells the worker to release the old one. A thread that has taken a grant and not
  begun its copy would be overlooked by that, so ``begin_copy`` comes before the look at ``closed``, and
  ``closed`` is set before the look at ``copying``: one of the two sees the other;
* grants are handed back only from the pool, where nobody copies into them.

Lock order: ``lock`` is the only lock here. It is held for one exchange with the worker, never during
a copy of a value.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from . import messages as M
from .channel import Channel
from .errors import RemoteProtocolError, SegmentError, TransportError
from .reader import ArenaReader
from .ring import COMING, COMING_MAX_NS, HEAD, RING_BYTES, SLEEPING, SLOT_BYTES, SLOTS, TAIL, Ring
from .rpc import Frame, committed_one_of, encode, encode_commit_one
from .sizes import chunk_bytes_for
from .topology import current_cpu

log = logging.getLogger("simm.session")

#: (grant id, offset in the segment, chunk bytes)
GrantTuple = tuple[int, int, int]

#: Grants kept ahead of need, for each chunk size: so many bytes, but at least one and at most so many.
AHEAD_BYTES: Final = 4 << 20
AHEAD_MAX: Final = 64
#: Values above this keep one grant ahead, and only while more of that very size are put: see learn().
AHEAD_VALUE_BYTES_MAX: Final = 4 << 20
#: So many of them must fit what all sessions together may hold; one is in the pool and one on its way.
LARGE_SHARE: Final = 8
#: After so long without another large value its grants go back.
LARGE_IDLE_S: Final = 1.0
#: Copies of at least this size are announced to a worker that looks; shorter ones end before it would stop.
EXPECT_BYTES: Final = 256 << 10
#: An announced commit is expected within so many ns, and half a one for each byte still to be copied (2 GB/s).
_EXPECT_NS: Final = 100_000
#: Looks at the ring before the client kicks and sleeps, about 100 us: less than two wake-ups of a core cost.
_SPINS: Final = 3000 if len(os.sched_getaffinity(0)) > 1 else 0
#: Looks at the socket before the client sleeps, about as long. A put of 4 KiB by socket takes 60 to 90 us where
#: both ends sleep in between, 22 where both look first.
_LOOKS: Final = 150 if _SPINS else 0
#: Kicks closer than this are a sign of taking turns on one CPU.
KICKS_APART_S: Final = 1e-3
#: Sizes of values that a session remembers the pools of.
POOLS_MAX: Final = 1024
#: Pins given back together.
_UNPIN_BATCH: Final = 16


@functools.lru_cache(maxsize=1024)
def ahead(chunk: int) -> int:
    """How many grants of a chunk size to keep."""
    if chunk > AHEAD_VALUE_BYTES_MAX:
        return 0
    return max(2, min(AHEAD_MAX, AHEAD_BYTES // chunk))


class WorkerSession:
    """One session. Raises TransportError when the worker cannot be reached, Refused when it says no.

    Args:
        path: the worker's UNIX socket.
        namespace: keys' namespace.
        deadline_s: for each exchange.
        ring: also make a commit ring, where the system lets us.
    """

    def __init__(
        self, path: str, namespace: str, deadline_s: float, *, ring: bool = True, role: M.Role = M.Role.CLIENT,
        token: str = "",
    ) -> None:  # fmt: skip
        self.path = path
        self.deadline_s = deadline_s
        self.lock = threading.Lock()
        #: An item for each copy into or out of this session's chunks that is under way, and for each view of one.
        #: A list, as its append and pop are atomic, safe in finalizers, and cost a quarter of a lock.
        self.copying: list[None] = []
        #: No copy may begin any more.
        self.closed = False
        self.grants: dict[int, list[GrantTuple]] = {}
        #: By the value's size: its pool, and how many grants to keep in it. A put looks here: 0.2 us less than pool().
        self.pools: dict[int, tuple[list[GrantTuple], int]] = {}
        self.unpins: deque[int] = deque()
        self.recall_bytes = 0
        #: All bytes that the worker has ever asked back.
        self.recalled = 0
        #: Chunk bytes of the large value put last, and when.
        self._large = (0, 0.0)
        self.ring: Ring | None = None
        self._ring_frames: dict[int, Frame] = {}
        #: A WAKE is on its way: the sleeping flag may still be up, and yet a look is worth it.
        self._woken = False
        #: Look at the socket before sleeping.
        self._looks = False
        self._kicked_at = 0.0
        self.ring_calls = 0
        self.kicks = 0
        until = time.monotonic() + deadline_s
        self.channel = Channel.unix(path, deadline_s, self._on_push)
        self.channel.bound(until)  # connecting is one thing to whoever waits for it
        try:
            welcome = self.channel.call(
                M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, role, 0, os.getpid(), namespace, token, [])
            )
            if not isinstance(welcome, M.Welcome):
                raise TransportError(f"{path} answered HELLO with {type(welcome).__name__}")
            self.welcome = welcome
            self.session = welcome.session
            self.reader = ArenaReader(welcome.segment)
            self.release_buried()
            if ring:
                self._attach_ring()
            self._looks = self.ring is None and role == M.Role.CLIENT
            self.channel.bound()
        except (SegmentError, TransportError):
            self.channel.close()
            raise

    def __repr__(self) -> str:
        state = self.channel.broken or "open"
        return f"<WorkerSession {self.session:#x} {state} grants={sum(map(len, self.grants.values()))}>"

    @property
    def broken(self) -> str:
        """Why the session is of no use any more; empty while it is."""
        return self.channel.broken

    def _attach_ring(self) -> None:
        try:
            ring, fd = Ring.create()
        except OSError as exc:  # no descriptor or memory left: the socket does the same, slower
            log.warning("no commit ring: %s", exc)
            return
        try:
            self.channel.call(M.RingAttach(RING_BYTES), fds=(fd,))
        except TransportError:
            ring.close()
            raise
        finally:
            os.close(fd)
        self.ring = ring

    def _on_push(self, msg: Any) -> None:
        if isinstance(msg, M.Recall):
            self.recall_bytes += msg.bytes
            self.recalled += msg.bytes

    # -- exchanges; the caller holds the lock -------------------------------------------------

    def acquire(self) -> None:
        """Take the lock within the deadline. Raises TransportError."""
        if not self.lock.acquire(timeout=self.deadline_s):
            raise TransportError("deadline passed while another thread waited for the worker")
        if self.channel.broken:
            self.lock.release()
            raise TransportError(self.channel.broken)

    def call(self, msg: Any) -> Any:
        """One exchange by the socket."""
        self.acquire()
        try:
            return self.channel.call(msg)
        finally:
            self.lock.release()

    def submit_locked(self, msg: Any) -> int:
        """Send a request by ring or socket; a ticket for :meth:`wait_locked`."""
        ring = self.ring
        if ring is not None:
            frame = encode(msg)
            if len(frame) <= SLOT_BYTES:
                while ring.words[TAIL] - ring.done >= SLOTS:
                    self._collect(ring)
                return ring.post(frame)
        return -1 - self.channel.submit(msg)

    def expect(self, nbytes: int) -> None:
        """Tell a worker that is looking to go on: a commit comes once so many bytes are copied. No system call."""
        ring = self.ring
        if ring is not None and nbytes >= EXPECT_BYTES:
            ring.words[COMING] = time.monotonic_ns() + min(_EXPECT_NS + (nbytes >> 1), COMING_MAX_NS - 1)

    def came(self) -> None:
        """What :meth:`expect` announced has been committed."""
        ring = self.ring
        if ring is not None:
            ring.words[COMING] = 0

    def wake(self, nbytes: int = 0) -> None:
        """:meth:`expect`, and wake the worker up if it sleeps.

        Waking an idle core takes 50 us and more, the copy of a MiB about as long; sending the message takes 25.
        Never waits: if the lock is taken, someone talks to the worker already.
        """
        self.expect(nbytes)
        ring = self.ring
        if ring is None or not ring.words[SLEEPING] or not self.lock.acquire(blocking=False):
            return
        try:
            if not self.channel.broken:
                self.channel.submit(M.Wake(current_cpu()))
                self._woken = True
        except TransportError:
            pass  # the commit will meet it
        finally:
            self.lock.release()

    def wait_locked(self, ticket: int, items: int = 1) -> Any:
        """The reply to a submitted request of ``items`` keys: the more, the longer we look before we kick."""
        if ticket < 0:
            return self.channel.result(self._wait_socket(-1 - ticket, items))
        ring = self.ring
        assert ring is not None
        while ticket >= ring.done:
            self._collect(ring, _SPINS + min(items, 64) * _SPINS // 8)
        return self.channel.result(self._ring_frames.pop(ticket))

    def _await(self, ring: Ring, spins: int = _SPINS) -> int:
        """Wait for at least one more reply: the ring's head, checked."""
        words = ring.words
        done = ring.done
        self.ring_calls += 1
        if words[HEAD] == done and (self._woken or not words[SLEEPING]):
            self._woken = False
            for _ in range(spins):
                if words[HEAD] != done:
                    break
        head: int = words[HEAD]
        if head == done:
            self._kick(words[TAIL])
            head = words[HEAD]
            if head == done:
                self.channel.fail("the worker answered a kick but not the ring")
        if not done < head <= words[TAIL]:
            self.channel.fail(f"the worker moved the ring's head to {head}, {done} handled of {words[TAIL]}")
        return head

    def _kick(self, tail: int) -> None:
        """Have the worker look at the ring now.

        Kicks in quick succession mean that it sits on our CPU: it polls while we are kept from running and
        sleeps when we run, at 100 us and more a put. A WAKE says where we are, and it steps aside.
        """
        self._make_way()
        self.channel.call(M.Kick(tail))

    def _make_way(self) -> None:
        """The worker had to be woken: see :meth:`_kick`."""
        self.kicks += 1
        now = time.monotonic()
        if now - self._kicked_at < KICKS_APART_S:
            self.channel.submit(M.Wake(current_cpu()))
        self._kicked_at = now

    def _wait_socket(self, number: int, items: int = 1) -> Frame:
        """The reply to a request sent by socket."""
        channel = self.channel
        slept = channel.slept
        frame = channel.wait(number, _LOOKS + min(items, 64) * _LOOKS // 8 if self._looks else 0)
        if channel.slept != slept:
            self._make_way()
        return frame

    def _collect(self, ring: Ring, spins: int = _SPINS) -> None:
        """Wait for at least one more reply and take all that are there."""
        head = self._await(ring, spins)
        try:
            while ring.done < head:
                self._ring_frames[ring.done] = ring.reply(ring.done)
                ring.done += 1
        except RemoteProtocolError as exc:
            self.channel.fail(str(exc))

    def commit_one(self, digest: bytes, grant: int, length: int, crc: int, flags: int, want: int, count: int) -> int:
        """COMMIT of one entry that wants ``count`` grants for ``want`` bytes: its Status. Grants go to the pool."""
        lock = self.lock
        # Without a timeout at first: 0.1 us instead of 0.4.
        if not lock.acquire(False) and not lock.acquire(timeout=self.deadline_s):
            raise TransportError("deadline passed while another thread waited for the worker")
        try:
            channel = self.channel
            if channel.broken:
                raise TransportError(channel.broken)
            ring = self.ring
            if ring is None:
                number = channel.next_id()
                channel.send_raw(encode_commit_one(digest, grant, length, crc, flags, want, count, number))
                frame = self._wait_socket(number)
                answered = committed_one_of(frame)
                if answered is not None:
                    status, granted = answered
                    if granted is not None:
                        self.untake(granted)
                    return status
            else:
                while ring.words[TAIL] - ring.done >= SLOTS:
                    self._collect(ring)
                ticket = ring.post(encode_commit_one(digest, grant, length, crc, flags, want, count))
                if ticket == ring.done:  # nothing else is in flight
                    self._await(ring)
                    answered = ring.committed_one(ticket)
                    if answered is not None:
                        ring.done = ticket + 1
                        status, granted = answered
                        if granted is not None:
                            self.untake(granted)
                        return status
                while ticket >= ring.done:
                    self._collect(ring)
                frame = self._ring_frames.pop(ticket)
            answer = channel.result(frame)
            if not isinstance(answer, M.Committed) or len(answer.statuses) != 1:
                channel.fail("the worker answered COMMIT with something else")
            self.add_grants_locked(answer.grants)
            outcome: int = answer.statuses[0]
            return outcome
        finally:
            lock.release()

    # -- grants ---------------------------------------------------------------------------------

    def take(self, size: int) -> GrantTuple | None:
        """A grant for a value of ``size`` bytes from the pool, or None. Lock-free (list.pop is atomic)."""
        pool = self.grants.get(chunk_bytes_for(size))
        if pool:
            try:
                return pool.pop()
            except IndexError:  # another thread was faster
                return None
        return None

    def pool(self, chunk: int) -> list[GrantTuple]:
        """The grants of one chunk size."""
        pool = self.grants.get(chunk)
        return pool if pool is not None else self.grants.setdefault(chunk, [])

    def learn_size(self, length: int) -> tuple[list[GrantTuple], int]:
        """The pool for values of a size and how many grants to keep in it; found in ``pools`` from now on."""
        known = self.pools.get(length)
        if known is None:
            if len(self.pools) >= POOLS_MAX:
                self.pools.clear()
            chunk = chunk_bytes_for(length)
            known = self.pools[length] = self.pool(chunk), ahead(chunk)
        return known

    def add_grants_locked(self, grants: Sequence[GrantTuple]) -> None:
        """Put fresh grants into the pool."""
        pools = self.grants
        for grant in grants:
            pool = pools.get(grant[2])
            if pool is None:
                pool = pools[grant[2]] = []
            pool.append(grant)

    def ask(self, wants: Sequence[tuple[int, int]]) -> None:
        """Ask for grants: (value bytes, count). What comes lands in the pool; nothing when there is no room."""
        self.acquire()
        try:
            reply = self.wait_locked(self.submit_locked(M.Grant(list(wants))), sum(count for _, count in wants))
            self.add_grants_locked(reply.grants)
        finally:
            self.lock.release()

    def untake(self, grant: GrantTuple) -> None:
        """Put an unused grant back into the pool."""
        self.grants.setdefault(grant[2], []).append(grant)

    def learn(self, chunk: int) -> bool:
        """A large value is put. Shall a grant for another be kept: is it like the last one, and not too large?

        Large grants are a good part of what all sessions may hold, and each costs the store as many bytes of
        values; a size that comes once shall not leave any behind.
        """
        now = time.monotonic()
        (last, at), self._large = self._large, (chunk, now)
        return last == chunk and now - at < LARGE_IDLE_S and chunk * LARGE_SHARE <= self.welcome.grant_bytes_max

    def _return_large(self) -> None:
        """Large grants go back when no more such values come: those in the pool, and the one that is prepared."""
        chunk, at = self._large
        if chunk and time.monotonic() - at > LARGE_IDLE_S:
            self._large = (0, 0.0)
            self.ask([])  # what is prepared comes with any answer
            self.return_idle(above=AHEAD_VALUE_BYTES_MAX)

    def return_idle(self, wanted: int | None = None, *, above: int = 0) -> int:
        """Hand pooled grants back to the worker: about ``wanted`` bytes, or all; how many bytes.

        Only those of chunks of more than ``above`` bytes.
        """
        given: list[int] = []
        freed = 0
        for size, pool in list(self.grants.items()):
            while size > above and pool and (wanted is None or freed < wanted):
                try:
                    number, _, chunk = pool.pop()
                except IndexError:
                    break
                given.append(number)
                freed += chunk
        if given:
            self.call(M.ReturnGrants(given))
        return freed

    # -- copies ---------------------------------------------------------------------------------

    def begin_copy(self) -> None:
        """A copy into or out of a chunk starts. Raises TransportError when the session has been closed."""
        self.copying.append(None)
        if self.closed:
            self.copying.pop()
            raise TransportError("the session was closed")

    def end_copy(self) -> None:
        """It has ended."""
        self.copying.pop()

    # -- pins -----------------------------------------------------------------------------------

    def pin(self, digest: bytes) -> tuple[int, int, int, int, int, int]:
        """LOCATE with a pin: (status, flags, length, crc, offset, pin id). The caller has begun a copy before."""
        self.flush_unpins()
        reply = self.exchange(M.Locate(1, [digest]))
        if not isinstance(reply, M.Located) or len(reply.entries) != 1:
            raise TransportError("the worker answered LOCATE with something else")
        return reply.entries[0]

    def exchange(self, msg: Any) -> Any:
        """One exchange by ring or socket."""
        self.acquire()
        try:
            return self.wait_locked(self.submit_locked(msg))
        finally:
            self.lock.release()

    def unpin_later(self, pin: int) -> None:
        """Give a pin back soon. Safe from finalizers: takes no lock and does no I/O."""
        self.unpins.append(pin)

    def flush_unpins(self, *, at_least: int = _UNPIN_BATCH) -> None:
        """Give queued pins back when there are enough of them."""
        if len(self.unpins) < at_least:
            return
        pins: list[int] = []
        with contextlib.suppress(IndexError):
            while len(pins) < 1000:
                pins.append(self.unpins.popleft())
        if pins:
            self.exchange(M.Unpin(pins))

    # -- upkeep and end -------------------------------------------------------------------------

    def tend(self) -> None:
        """Idle work, from the client's background thread: pushes, recalls, unpins. Raises TransportError."""
        if self.lock.acquire(blocking=False):
            try:
                self.channel.poll_pushes()
            finally:
                self.lock.release()
        if self.recall_bytes:
            wanted, self.recall_bytes = self.recall_bytes, 0
            self.return_idle(wanted)
        self._return_large()
        self.flush_unpins(at_least=1)
        self.release_buried()

    def release_buried(self) -> None:
        """Tell the worker which ended sessions of this process nothing here uses any more. Raises TransportError."""
        if not _BURIED:
            return
        segment = self.welcome.segment
        free = [old for old in list(_BURIED) if old.segment == segment and not old.copying]
        if free:
            self.call(M.ReleaseSessions([old.session for old in free]))
            for old in free:
                with contextlib.suppress(ValueError):
                    _BURIED.remove(old)

    def close(self, *, clean: bool = True) -> None:
        """End the session; with ``clean``, hand back grants and pins first. Never raises. Twice is harmless."""
        if self.closed:
            return
        self.closed = True
        if clean and not self.channel.broken:
            with contextlib.suppress(TransportError):
                self.flush_unpins(at_least=1)
                self.return_idle()
                self.release_buried()
        got = self.lock.acquire(timeout=self.deadline_s)
        try:
            self.channel.close()
            self.grants.clear()
            self.pools.clear()
            if got:
                self.ring = None  # unmapped when its last user lets go: wake() looks at it without the lock
        finally:
            if got:
                self.lock.release()
            _BURIED.append(Buried(self.welcome.segment, self.session, self.copying))


class Buried(NamedTuple):
    """An ended session, as far as the worker must hear of it. Holds no mapping."""

    segment: str
    session: int
    copying: list[None]


#: Of this process, whichever client they belonged to. Ends of the list are atomic; removal is by value.
_BURIED: Final[list[Buried]] = []
os.register_at_fork(after_in_child=_BURIED.clear)

"""When a worker polls its clients' commit rings, and when it sleeps in its selector.

``ipc/commit_ring.py`` says what lies in a ring, and why a lost wake-up costs microseconds and never a hang. This module
is the worker's side: a ring is *active* while it is polled, and its ``sleeping`` word is 1 while it is not.

Polling ends when there was no work for a window, unless a client has announced a commit. The window starts at
``--poll-us`` and adapts, as halt polling in a hypervisor does. Work that comes soon after polling ended doubles it, up
to POLL_GROWTH times; a long pause resets it. So a client that puts values of a MiB, with a copy of 60 us between two
commits, meets a worker that polls. A ring that says *brief* is not polled. On one CPU a worker never polls: it would
only keep its client from running.

Each pass over the active rings serves one request of each. So a client that keeps its ring full delays another by one
request, not for as long as it likes. Sockets and timers get their turn after a bounded number of passes, and after
TURN_S at the latest.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Final, Protocol

from ..arena.sessions import Session
from ..errors import CorruptionError, RemoteProtocolError
from ..host.numa import avoid_cpu
from ..host.threads import CLOSER
from ..ipc.commit_ring import ANNOUNCED, ANNOUNCED_MAX_NS, BRIEF, SLEEPING, SLOTS, TAIL, Ring, Withdrawals
from ..net.loop import Loop
from ..net.peer import Peer
from ..rpc import Frame, decode
from ..wire import messages as M
from ..wire.one_key import CommitOne

log = logging.getLogger("simm.server.worker")

#: Of several active rings, one without work for this long is no longer polled, seconds.
RING_IDLE_S: Final = 0.01
#: The polling window grows to at most this many times --poll-us.
POLL_GROWTH: Final = 8
#: After a WAKE the commit may take this long, seconds: the copy of the value's last MiB, on a slow machine.
WAKE_POLL_S: Final = 400e-6
#: Polls of the rings between two polls of the sockets, and the time after which a busy worker begins no further one.
_POLLS: Final = 60
TURN_S: Final = 0.005
#: A COMMIT of 16 keys. A request counts as one more for each so many bytes of it.
_FRAME_BYTES: Final = 640
#: A round of polls that took longer than this was interrupted, seconds: it does not say what a poll costs.
_ROUND_MAX_S: Final = 200e-6


class RingClient(Protocol):
    """The state of a connection, as far as its ring needs it: ``peer.context``."""

    session: Session | None
    ring: Ring | None
    withdrawals: Withdrawals | None
    #: When the ring brought a request last, or its client rang, by the loop's clock.
    ring_used: float


class RingPoller:
    """Serves the commit rings of a worker, and runs its loop.

    ``poll_us`` is the shortest polling window, microseconds; 0 never polls. ``commit_one`` answers a COMMIT in the
    one-key form, ``handle`` any request. ``apply_pending`` does the bookkeeping that answers did not wait for.
    """

    def __init__(
        self, loop: Loop, poll_us: int, commit_one: Callable[[Session, CommitOne], bytes],
        handle: Callable[[Peer, Frame], bytes], apply_pending: Callable[[], None],
    ) -> None:  # fmt: skip
        self.loop = loop
        #: Shortest window, seconds; 0 where it does not poll.
        self.poll_s = 0.0
        self.set_poll_us(poll_us)
        #: Requests served by rings; those of them that came as frames, and not as a COMMIT of one key.
        self.requests = self.frames = 0
        #: Passes over the rings that found nothing. Rounds of ``_POLLS`` of them, and the seconds that these took.
        self._idle_passes = 0
        self._idle_rounds = 0
        self._idle_rounds_s = 0.0
        self.active: list[tuple[Ring, Peer]] = []
        self._commit_one = commit_one
        self._handle = handle
        self._apply_pending = apply_pending
        #: A client has sent WAKE: poll until then, monotonic seconds.
        self._woken_until = 0.0
        #: A client without a ring has committed, or is about to: poll the sockets until then; 0 for none.
        self._sockets_until = 0.0
        #: Requests answered whose bookkeeping is pending; a long one counts as several.
        self._pending = 0

    def set_poll_us(self, poll_us: int) -> None:
        """Take another shortest window, from the next time on that the worker has slept."""
        self.poll_s = poll_us / 1e6 if len(os.sched_getaffinity(0)) > 1 else 0.0

    def serve_by(
        self, commit_one: Callable[[Session, CommitOne], bytes], handle: Callable[[Peer, Frame], bytes]
    ) -> None:
        """Carry out requests by these functions from now on."""
        self._commit_one, self._handle = commit_one, handle

    def run(self) -> None:
        """Serve until the loop is stopped."""
        loop = self.loop
        clock = time.monotonic
        shortest = self.poll_s
        longest = shortest * POLL_GROWTH
        window = shortest
        last_work = clock()
        while loop.running:
            if not self.active:
                if self._sockets_until:
                    if clock() < self._sockets_until:
                        loop.run_once(0.0)
                        continue
                    self._sockets_until = 0.0
                if loop.run_once(None) and self.active:
                    now, shortest = clock(), self.poll_s  # it may have been set meanwhile
                    longest = shortest * POLL_GROWTH
                    window = min(longest, window * 2) if now - last_work < longest else shortest
                    last_work = now
                continue
            if loop.run_once(0.0):
                last_work = clock()
            turn_ends = loop.now + TURN_S
            idle = 0
            for _ in range(_POLLS):
                busy = False
                active = self.active
                for ring, peer in active:
                    if ring.words[TAIL] != ring.done:
                        self._serve(ring, peer)
                        busy = True
                        if self.active is not active:
                            break  # a ring is unmapped, perhaps the next one
                if busy:
                    last_work = clock()
                    if last_work > turn_ends:
                        break
                else:
                    idle += 1
            self._leave_brief()
            now = clock()
            self._idle_passes += idle
            if idle == _POLLS and now - loop.now < _ROUND_MAX_S:
                self._idle_rounds += 1
                self._idle_rounds_s += now - loop.now
            if now - last_work > window and now > self._woken_until and not self._commit_announced(now):
                self._sleep()
            elif len(self.active) > 1:
                self._retire_idle(now)

    @property
    def idle_s(self) -> float:
        """Seconds of polling that found nothing so far: what is not work of this process's processor time.

        Nothing is timed while there is work: passes are counted, and rounds without any work say what one costs.
        """
        return self._idle_passes * self._idle_rounds_s / (self._idle_rounds * _POLLS) if self._idle_rounds else 0.0

    def poll_sockets(self) -> None:
        """Poll the sockets for a while: a client without a ring has committed, and may do so again."""
        self._sockets_until = max(self._sockets_until, time.monotonic() + self.poll_s)

    def attach(self, peer: Peer, connection: RingClient, nbytes: int) -> None:
        """Map the ring of a session, or its page of withdrawals: the descriptor came with the message.

        Raises RemoteProtocolError.
        """
        has_one = connection.ring is not None or connection.withdrawals is not None
        if connection.session is None or has_one or nbytes not in (Ring.BYTES, Withdrawals.BYTES) or len(peer.fds) != 1:
            raise RemoteProtocolError("RING_ATTACH needs a session without a ring, the right size and one descriptor")
        fd = peer.fds.pop()
        try:
            if nbytes == Withdrawals.BYTES:
                connection.withdrawals = Withdrawals.attach(fd)
            else:
                connection.ring = ring = Ring.attach(fd)
                ring.words[SLEEPING] = 1
        finally:
            CLOSER.close([fd])
        peer.take_fds = False

    def detach(self, ring: Ring) -> None:
        """Unmap a ring: its connection is closed."""
        self._deactivate(ring)
        ring.close()

    def on_doorbell(self, peer: Peer, frame: Frame) -> None:
        """A KICK or a WAKE: serve what the ring has, and poll it from now on. Raises RemoteProtocolError."""
        connection: RingClient = peer.context
        msg = decode(frame)
        if isinstance(msg, M.Wake) and self.poll_s:
            avoid_cpu(msg.cpu)
            self._woken_until = time.monotonic() + WAKE_POLL_S
        ring = connection.ring
        if ring is None:
            if frame.opcode == M.OP_WAKE:
                self._sockets_until = max(self._sockets_until, self._woken_until)
                return
            raise RemoteProtocolError("KICK without a ring")
        if self.poll_s and not ring.words[BRIEF] and all(ring is not other for other, _ in self.active):
            ring.words[SLEEPING] = 0  # first: what is posted while this serves the ring needs no second KICK
            self.active.append((ring, peer))
        connection.ring_used = self.loop.now  # or _retire_idle undoes it before what is announced has come
        for _ in range(SLOTS):  # what was there when the KICK was sent; a client that goes on posting has to wait
            if ring.words[TAIL] == ring.done:
                break
            self._serve(ring, peer)
            if peer.closed:
                return
        if frame.opcode == M.OP_KICK:
            peer.send_message(M.Done(ring.done & 0xFFFF_FFFF), frame.request_id)

    def _serve(self, ring: Ring, peer: Peer) -> None:
        """Serve the ring's next request; its bookkeeping comes after its answer."""
        connection: RingClient = peer.context
        try:
            commit = ring.next_commit()
            if commit is not None and (session := connection.session) is not None:
                ring.answer(self._commit_one(session, commit))
            elif (frame := ring.next_request()) is not None:
                answer = self._handle(peer, frame)
                if peer.closed:  # by the handler, and its ring is unmapped
                    return
                ring.answer(answer)
                self.frames += 1
                self._pending += len(frame.body) // _FRAME_BYTES
            else:
                if ring.abandoned:
                    peer.close("the client has given up what its ring still had")
                return
            self.requests += 1
            connection.ring_used = self.loop.now
            # The next frame of a batch does not wait for the bookkeeping of the one before, nor for more than that of a
            # ring of short frames.
            self._pending += 1
            if ring.words[TAIL] == ring.done or self._pending >= SLOTS:
                self._pending = 0
                self._apply_pending()
        except RemoteProtocolError as exc:
            self.loop.noise(logging.WARNING, "closing %s: %s", peer.address, exc, session=peer.session)
            self.loop.protocol_errors += 1
            peer.close(str(exc))
        except CorruptionError:
            raise  # see net/peer.py
        except Exception:
            self.loop.noise(
                logging.ERROR, "a ring request of %s failed", peer.address, exc_info=True, session=peer.session
            )
            self.loop.handler_errors += 1
            peer.close("internal error")

    def _commit_announced(self, now: float) -> bool:
        """Return True if the client of an active ring has announced a commit for about now."""
        moment = int(now * 1e9)
        return any(0 < ring.words[ANNOUNCED] - moment <= ANNOUNCED_MAX_NS for ring, _ in self.active)

    def _sleep(self) -> None:
        """Stop polling: raise the flags, look once more, and serve what came in between."""
        active, self.active = self.active, []
        for ring, _ in active:
            ring.words[SLEEPING] = 1
        for ring, peer in active:
            if not peer.closed and ring.words[TAIL] != ring.done:
                self._serve(ring, peer)
                if not peer.closed:
                    ring.words[SLEEPING] = 0
                    self.active.append((ring, peer))

    def _leave_brief(self) -> None:
        """Stop polling the rings whose clients ask for that."""
        for ring, _ in self.active:
            if ring.words[BRIEF]:
                self._retire(ring)
                return  # another one next time

    def _retire_idle(self, now: float) -> None:
        """Of several rings, poll only those in use."""
        for ring, peer in list(self.active):
            if now - peer.context.ring_used > RING_IDLE_S:
                self._retire(ring)

    def _retire(self, ring: Ring) -> None:
        """Stop polling a ring, unless something has come just now."""
        ring.words[SLEEPING] = 1
        if ring.words[TAIL] == ring.done:
            self._deactivate(ring)
        else:
            ring.words[SLEEPING] = 0

    def _deactivate(self, ring: Ring) -> None:
        self.active = [(other, peer) for other, peer in self.active if other is not ring]

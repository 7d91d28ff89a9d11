"""The client's RDMA path to one worker: a pool of lanes, what is known of where values lie, and is the worker alive.

What can go wrong, and what stands against it
---------------------------------------------
* *A slot is overwritten while it is READ*: its words come in any order. The whole image is compared with those of two
  more READs (``remote_arena.py`` says why one is not enough).
* *A value is replaced under its READ.* The last image is READ behind a fence, after the data: it differs then. Data
  that came by several links is complete on all of them before the slot is READ at all; a fence orders one link only.
* *The cached location is of long ago.* It is an image like any other, and compared like any other. An entry that has
  changed costs one round trip more, and its location is dropped.
* *The shard has moved.* Its word is READ in this very call, before the slot: frozen, zero and moving words are not for
  this path. The key goes to TCP, whose server knows what they mean.
* *A deadline passes while a device is still writing into the caller's buffer.* The links are closed before the buffer
  is given back: that is the fence (``lane.py``). What is left of the deadline is TCP's: RDMA may use half of it.
* *A lane breaks half-way through a batch.* What was confirmed by then is done; all other keys go to TCP. Whichever
  error it was, the lane is closed: no attempt is made to find out what could still be used.
* *A PUT's commit was sent and not answered.* Nobody knows what became of it: UNAVAILABLE, and not put again by TCP,
  where it might come after what somebody else has put meanwhile. What was not committed is put by TCP.
* *A bounce buffer is used again while in flight.* Loans go back when everything that used them is done, or the links
  are closed.
* *Ctrl-C anywhere.* The same as an error: the lane is closed, then the exception goes on.
* *A fork.* The child touches nothing of its parent's: descriptors of devices are shared, and closing here would
  destroy there. Memory that devices write into is not inherited (MADV_DONTFORK).
* *The worker is gone, the arena still there*: READs need no worker, nor does anybody notice. So about ten times a
  second a lane that is idle READs the header's STATE and HEARTBEAT, and the rules are those of ``target.py`` for an
  arena that is mapped: a closed arena is let go of; a heartbeat that stands still is enough only while no newer map
  would reach us. After that the path comes back with a heartbeat that moves, not before.

Which path is taken
-------------------
Up, or down with a reason (``why``). Any failure of a lane puts it down: idle lanes are closed, operations go by TCP,
and the background makes a new lane after a jittered, doubling pause. A lane is there when each of its links has READ
the arena's header, so a rail that is broken takes itself out of it and comes back with the next lane.

What it costs: a lane has about 0.1 MiB of pinned scratch memory a link, some descriptors and a connection; LANES_MAX a
worker.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from .bounce import BouncePool
from .breaker import Breaker
from .errors import RemoteProtocolError, TransportError
from .fabric import Absence, Fabric, FabricError, Rail
from .lane import Lane
from .layout import State
from .registry import sweep
from .remote_arena import Locations, RemoteArena

log = logging.getLogger("simm.client")

LANES_MAX: Final = 4
LOCATIONS_MAX: Final = 1 << 15
#: Pauses between tries to come back, seconds.
PAUSES_S: Final = (0.1, 5.0)
#: A heartbeat that stands still for so long means something where no map would reach us.
STALE_S: Final = 0.5
#: How long a tick waits for the header, and after how long the path counts as broken.
GLANCE_S: Final = 0.02
PULSE_S: Final = 1.0
#: The share of a deadline that RDMA may use up before TCP has its turn.
SHARE: Final = 0.5

_GONE: Final = frozenset((int(State.CLOSED), int(State.SUSPENDED)))


class RdmaPath:
    """One worker by RDMA. Any thread may call it; :meth:`tend` from one.

    Args:
        fabric: gives this process's fabric, or why there is none.
        address: of the worker's endpoint.
        fresh: would a new map reach us?
        refresh: ask for one.
        bounce: registered memory for values whose own is not.
    """

    def __init__(
        self, fabric: Callable[[], Fabric | Absence], address: tuple[str, int], namespace: str, deadline_s: float,
        *, token: str = "", fresh: Callable[[], bool] = lambda: True, refresh: Callable[[], None] = lambda: None,
        bounce: BouncePool | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.address = address
        self.namespace = namespace
        self.deadline_s = deadline_s
        self.token = token
        self.bounce = bounce if bounce is not None else BouncePool()
        self.locations = Locations(LOCATIONS_MAX)
        self.arena: RemoteArena | None = None
        #: Ours that its lanes have used.
        self.rails: tuple[Rail, ...] = ()
        #: Why the path is of no use now; empty while it is up.
        self.why = "not connected yet"
        self.absent = False
        self.closed = False
        self.breaker = Breaker(pauses=PAUSES_S)
        self.connecting = False
        self._fabric = fabric
        self._fresh = fresh
        self._refresh = refresh
        self._clock = clock
        #: Guards what follows; never held during I/O.
        self._changed = threading.Condition(threading.Lock())
        self._idle: list[Lane] = []
        self._lanes = 0
        self._turn = 0
        #: Pairs of rails that did not work: see Lane.
        self._failed: dict[tuple[str, int], float] = {}
        #: Value of the last heartbeat, and when it was seen to change.
        self._beat = (-1, 0.0)
        self._stale = False
        #: A lane in the background's hands, and whether it waits for one.
        self._watched: Lane | None = None
        self._asking = False

    def __repr__(self) -> str:
        return f"<RdmaPath {self.address[0]}:{self.address[1]} {self.why or 'up'} lanes={self._lanes}>"

    @property
    def up(self) -> bool:
        """May it be used?"""
        return not self.why

    # -- lanes ------------------------------------------------------------------------------------

    def connect(self, until: float) -> bool:
        """Make the first lane, until ``until`` (monotonic seconds); is the path up? Never raises."""
        lane: Lane | None = None
        why = "internal error, see the log"
        try:
            lane = self._open(until)
            self._prove(lane, until)
            why = ""
        except (TransportError, RemoteProtocolError) as exc:
            why = str(exc)
        except Exception:
            log.exception("connecting to %s:%d by RDMA", *self.address)
        if why and lane is not None:
            _end(lane, why)
            lane = None
        with self._changed:
            self.connecting = False
            if lane is not None and not self.closed:
                self._adopt(lane)
                self._lanes += 1
                self._idle.append(lane)
                self.why = ""
                self.breaker.worked()
                lane = None
            elif lane is None:
                self.why = why
                self.breaker.failed(self._clock())
            self._changed.notify_all()
        if lane is not None:
            _end(lane)
        return self.up

    def _open(self, until: float) -> Lane:
        fabric = self._fabric()
        if isinstance(fabric, Absence):
            self.absent = True
            raise FabricError(str(fabric))
        with self._changed:
            turn, self._turn = self._turn, self._turn + 1
            known = self.arena
        return Lane(
            fabric, self.address, self.namespace, self.deadline_s, until, token=self.token, turn=turn, known=known,
            failed=self._failed,
        )  # fmt: skip

    def _adopt(self, lane: Lane) -> None:
        """Lanes of one endpoint share the arena, and what is cached of it. The lock is held."""
        self.rails += tuple(wire.rail for wire in lane.wires if wire.rail not in self.rails)
        if lane.arena is not self.arena:
            if self.arena is not None and lane.arena.key == self.arena.key:
                lane.arena = self.arena
                for wire in lane.wires:
                    side = self.arena.sides[wire.side.rail]
                    assert side is not None
                    wire.side = side
            else:
                self.arena = lane.arena
                # Another one: calls that are still at the old arena go on filling its own.
                self.locations = Locations(LOCATIONS_MAX)
        lane.locations = self.locations

    def _prove(self, lane: Lane, until: float) -> None:
        """Is the worker alive? Raises FabricError. Where its heartbeat stood still before, it must move."""
        before = self._beat[0]
        while True:
            state, beat = self._pulse(lane, until)
            if state in _GONE:
                raise FabricError("the worker's arena is closed")
            if not self._stale or beat != before:
                break
            if time.monotonic() + 0.05 > until:
                raise FabricError("the worker's heartbeat stands still, and no manager is followed")
            time.sleep(0.05)
        self._stale = False
        self._beat = (beat, self._clock())

    @staticmethod
    def _pulse(lane: Lane, until: float) -> tuple[int, int]:
        lane.ask_pulse()
        assert lane.watching is not None
        lane.wires[0].link.wait(lane.watching[0], until)
        seen = lane.pulse()
        if seen is None:
            raise FabricError("a READ that was waited for is not done")
        return seen

    def take(self, until: float) -> Lane:
        """A lane for this thread: an idle one, a new one, or the next that comes back. Raises TransportError."""
        with self._changed:
            while True:
                if self.why:
                    raise TransportError(self.why)
                if self._idle:
                    return self._idle.pop()
                if self._lanes < LANES_MAX:
                    self._lanes += 1
                    break
                left = until - time.monotonic()
                if left <= 0:
                    raise TransportError("deadline passed while all lanes were in use")
                self._changed.wait(left)
        try:
            lane = self._open(until)
        except BaseException as exc:
            with self._changed:
                self._lanes -= 1
                alone = not self._lanes
                self._changed.notify()
            if not isinstance(exc, (TransportError, RemoteProtocolError)):
                raise
            if alone:  # nothing says that the endpoint is there
                self.drop(str(exc))
            raise TransportError(str(exc)) from exc
        with self._changed:
            if self.up:
                self._adopt(lane)
                return lane
        self.lost(lane, self.why)
        raise TransportError(self.why)

    def give(self, lane: Lane) -> None:
        """Give a lane back, with nothing under way on it."""
        with self._changed:
            if not self.why and not lane.broken and lane.arena is self.arena:
                if self._asking and self._watched is None:
                    self._asking = False
                    self._watched = lane
                else:
                    self._idle.append(lane)
                    self._changed.notify()
                return
            self._lanes -= 1
            self._changed.notify()
        _end(lane)

    def lost(self, lane: Lane, reason: str) -> None:
        """An exchange failed: when this returns, nothing of the lane touches local memory any more.

        Raises FabricError when that cannot be had: a link could not be destroyed.
        """
        try:
            lane.close(reason)
        finally:
            with self._changed:
                self._lanes -= 1
                self._changed.notify()
            self.drop(reason)

    def drop(self, reason: str) -> None:
        """The path is down from now on, and idle lanes are closed."""
        with self._changed:
            idle, self._idle = self._idle, []
            self._lanes -= len(idle)
            news = not self.why
            if news:
                self.why = reason
                self.breaker.failed(self._clock())
            self._changed.notify_all()
        if news:
            log.info("RDMA to %s:%d is down: %s", *self.address, reason)
        for lane in idle:
            _end(lane, reason)

    # -- background -------------------------------------------------------------------------------

    def wants_connection(self, now: float) -> bool:
        """Is it time to try again?"""
        return bool(self.why) and not self.closed and not self.connecting and not self.absent and self.breaker.due(now)

    def connect_soon(self) -> None:
        """Connect in a thread of its own, if none does so already."""
        with self._changed:
            if self.connecting or self.closed:
                return
            self.connecting = True
        thread = threading.Thread(target=self._connect, name="simm-rdma-connect", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # no more threads, or the interpreter is ending
            self.connecting = False
            self.why = f"cannot connect: {exc}"
            self.breaker.failed(self._clock())

    def _connect(self) -> None:
        self.connect(time.monotonic() + self.deadline_s)

    def tend(self, now: float) -> None:
        """Look at the worker's pulse and at what the endpoint has said. Waits GLANCE_S at most; where it has asked for
        grants, for one exchange with it more."""
        sweep()
        with self._changed:
            lane, self._watched = self._watched, None
            if lane is None:
                if self.why:
                    return
                if not self._idle:
                    self._asking = True  # the next that comes back is for the next tick
                    return
                self._asking = False
                lane = self._idle.pop(0)
        try:
            done = self._look(lane, now)
        except (TransportError, RemoteProtocolError) as exc:
            self.lost(lane, str(exc))
            return
        except BaseException:
            self.lost(lane, "interrupted")
            raise
        if not done:
            with self._changed:
                if not self.why:  # else nobody would close it any more
                    self._watched = lane
                    return
        self.give(lane)

    def _look(self, lane: Lane, now: float) -> bool:
        """Has the pulse come? Drops the path when it says that the worker has gone. Raises TransportError."""
        if lane.watching is None:
            lane.tend()
            lane.ask_pulse()
        until = time.monotonic() + GLANCE_S
        seen = lane.pulse()
        while seen is None and time.monotonic() < until:
            time.sleep(0.001)
            seen = lane.pulse()
        if seen is None:
            assert lane.watching is not None
            if time.monotonic() - lane.watching[1] > PULSE_S:
                raise FabricError("the server's memory does not answer")
            return False
        state, beat = seen
        if beat != self._beat[0]:
            self._beat = (beat, now)
        if state in _GONE:
            self.drop("the worker's arena is closed")
            self._refresh()
        elif now - self._beat[1] > STALE_S and not self._fresh():
            self._stale = True
            self.drop("the worker's heartbeat stands still, and no manager is followed")
        return True

    # -- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close idle lanes; those in use close when they come back."""
        with self._changed:
            self.closed = True
            self.why = self.why or "closed"
            idle, self._idle = self._idle, []
            watched, self._watched = self._watched, None
            if watched is not None:
                idle.append(watched)
            self._lanes -= len(idle)
            self._changed.notify_all()
        for lane in idle:
            _end(lane)

    @property
    def over(self) -> bool:
        """Closed, with all its lanes, for good."""
        return self.closed and not self._lanes and not self.connecting

    def gone(self, until: float) -> bool:
        """Closed, with all its lanes? Waits for those in use until ``until`` (monotonic seconds)."""
        self.close()
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._lanes and not self.connecting, max(0.0, until - time.monotonic())
            )

    def abandon(self) -> None:
        """After a fork, in the child: close the sockets' copies, touch no memory, take no lock."""
        self.closed = True
        self.why = "forked"
        for lane in (*self._idle, *([self._watched] if self._watched is not None else [])):
            with contextlib.suppress(OSError):
                lane.abandon()


def _end(lane: Lane, reason: str = "closed") -> None:
    """Close a lane that no call is on. A link that cannot be destroyed is logged there, and tried again by sweep()."""
    with contextlib.suppress(FabricError):
        lane.close(reason)


class Paths:
    """All RDMA paths that a client has made, as long as they may have lanes; any thread may call it.

    Its rails must not be closed before the last lane, and a path that was given up long ago, with its target or
    without, may still be in the middle of somebody's call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: list[RdmaPath] = []

    def add(self, path: RdmaPath) -> None:
        """One more."""
        with self._lock:
            self._paths = [each for each in self._paths if not each.over]
            self._paths.append(path)

    def gone(self, until: float) -> bool:
        """Close all; are all their lanes closed? Waits for those in use until ``until`` (monotonic seconds)."""
        with self._lock:
            paths = list(self._paths)
        for path in paths:
            path.close()
        return all([path.gone(until) for path in paths])  # noqa: C419 -- each of them waits for something

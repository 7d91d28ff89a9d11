"""An endpoint process: where clients on other hosts open RDMA lanes to one worker's arena.

It registers the arena, connects links to it, hands chunks out and passes commits on. Values never pass
through it: a client reads and writes them by itself, and asks here only for room and for the publishing of
what it has written. It is a process of its own because registering holds the interpreter for seconds, because a
fault inside a verbs library must end neither worker nor stream, and because what is registered here outlives
the worker: reads go on while that restarts.

A *lane* is one TCP connection and the links that were connected by it: HELLO, RDMA_OPEN, RDMA_CONNECT for each pair of
rails; then GRANT, COMMIT and RETURN_GRANTS as to a worker. All that a lane has ends with its connection.

What can go wrong: who may still write where
--------------------------------------------
A WRITE arrives without asking any program here. The client that sent it may have been thought dead for minutes, or
have a bug. So a chunk changes hands only when the device itself refuses what comes late:

* *A value is committed.* The windows of its chunk are invalidated, and then the COMMIT goes to the worker: what is
  published can be written no more. A link on which that fails is destroyed first, with its lane; nothing is
  committed then.
* *A grant is returned,* by the client's own will or because others need the room: likewise.
* *A client goes,* whatever became of it, or one of its links breaks: the whole lane is closed. Its links are destroyed,
  its windows freed, and then its grants go back. A client that vanishes without a word is found by TCP keepalive
  within a minute and a half (``loop.tune``), and its grants with it; what it holds meanwhile is bounded.
* *The worker dies.* Links and grants stay, and reads go on. The grants are not the new worker's to give, nor to reuse:
  to this process's next session they are copies under way (``session.py``) until the lanes have let go of
  them. A commit that names one is answered with STALE_GRANT, as nothing was done, and the client asks anew.
* *We die.* The kernel destroys our links before our end can be seen (``exit_files`` comes before ``exit_notify``),
  and that is the worker's rule for every process with grants.
* *A link cannot be destroyed.* Then the process ends itself, see above, and gives nothing back.

Devices without memory windows let every lane write all of the data (``arena_regions.py``). Fencing by the links' ends
holds there too; what is lost is the protection from a client that writes where it has no grant any more.

What else
---------
A client names grants by id; only ids of its own lane count, each once. Grants are bounded for a lane and for all
together, at three quarters of what all sessions may hold, so that others get theirs. Lanes that are idle are asked
for theirs, and all of them when the worker asks us. A device that is missing or breaks costs nothing but lanes
(``devices.py``): RDMA_OPEN is answered with the reason.

Costs: one exchange with the worker for a commit, blocking, by a ring: transfers take no core here that a polling worker
could take from them, and a commit takes 90 us instead of 140 (two cores, loaded). A bind and an invalidation (a few us)
a grant and link, the bind after the answer has left: fresh grants come with the next one, as a worker's do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

from . import messages as M
from .arena_regions import PIECE_BYTES, Registration
from .constants import BATCH_KEYS_MAX, VALUE_BYTES_MAX
from .devices import Devices
from .errors import CorruptionError, RemoteProtocolError, SimmError, TransportError
from .fabric import Absence, Fabric, FabricError, LinkAddress
from .greeting import agreed_protocol, token_fits
from .lane_end import LINKS_MAX, Held, LaneEnd, NoWindows
from .loop import Loop, Peer, Service
from .messages import Status
from .process import stop_on_signals
from .rpc import Frame, decode
from .session import WorkerSession
from .shmput import collect
from .sizes import chunk_bytes_for
from .upstream import Upstream

log = logging.getLogger("simm.endpoint")

TICK_S: Final = 0.1
LANES_MAX: Final = 4096
#: All lanes' grants together may have this share (percent) of what all sessions may hold; one lane's this part of that.
GRANTED_PERCENT: Final = 75
LANE_SHARE: Final = 4
LANE_BYTES_MAX: Final = 128 << 20
#: A lane that says nothing for so long is asked for its grants; after as long without any, our own pool goes back.
IDLE_S: Final = 5.0
#: Grants told in one answer: with a key for each of a lane's links they fill a quarter of a frame.
ANSWER_GRANTS_MAX: Final = 1024
MTUS: Final = frozenset((256, 512, 1024, 2048, 4096))

_COUNTS: Final = (
    "lanes_opened", "lanes_broken", "commits", "commit_failures", "stale_commits", "recalls",
)  # fmt: skip
_STALE: Final = int(Status.STALE_GRANT)
_UNAVAILABLE: Final = int(Status.UNAVAILABLE)


class Endpoint(Service):
    """Serves lanes to one worker's arena.

    Args:
        uds: the worker's UNIX socket.
        open_fabric: opens this process's rails, or says why there are none.
        tokens: one of them must be in HELLO, where there are any.
        windows: let chunks be written by memory windows, where all devices have them.
        piece_bytes: the most that is registered at a time.
    """

    read_bytes = 64 << 10

    def __init__(
        self, loop: Loop, uds: str, open_fabric: Callable[[], Fabric | Absence], tokens: tuple[str, ...] = (), *,
        windows: bool = True, piece_bytes: int = PIECE_BYTES,
    ) -> None:  # fmt: skip
        self.loop = loop
        self.upstream = Upstream(uds, ring=True)
        self.tokens = tokens
        self.devices = Devices(
            loop, self.upstream, open_fabric, windows=windows, piece_bytes=piece_bytes, on_lost=self._on_lost
        )
        #: Why the process has to end.
        self.failed = ""
        self.lanes: set[Peer] = set()
        self.granted_bytes = 0
        self.counts = dict.fromkeys(_COUNTS, 0)
        #: When a client sent something last, and whether what was kept for it has gone back since.
        self._heard = 0.0
        self._quiet = True
        #: The session whose RECALLs are counted, and how many bytes of them have been seen to.
        self._recalls: tuple[WorkerSession | None, int] = (None, 0)
        loop.call_later(0.0, self._tick)
        loop.call_every(TICK_S, self._tick)

    # -- the devices ------------------------------------------------------------------------------

    def _on_lost(self, why: str) -> None:
        for peer in list(self.lanes):
            peer.close(why)

    def _end(self, why: str) -> None:
        """Only the end of this process makes sure that nothing is written any more."""
        log.error("the endpoint ends: %s", why)
        self.failed = self.failed or why
        self.loop.stop()

    # -- connections ------------------------------------------------------------------------------

    def on_connect(self, peer: Peer) -> None:
        peer.context = lane = LaneEnd()
        lane.heard = self.loop.now

    def adopt_supervisor(self, sock: socket.socket) -> None:
        """Answer the supervisor on a socket pair; the endpoint ends when it closes."""
        self.loop.adopt(sock, self, "supervisor").context.role = M.Role.SUPERVISOR

    def on_close(self, peer: Peer, reason: str) -> None:
        lane: LaneEnd = peer.context
        self.lanes.discard(peer)
        if lane.role == M.Role.SUPERVISOR:
            self.loop.stop()
        granted = lane.granted_bytes
        try:
            holds = lane.close()
        except Exception as exc:  # whatever it is: as long as a link may be there its chunks are not reused
            self._end(f"a link cannot be destroyed: {exc!r}")
            return
        self.granted_bytes -= granted
        self._give_back(holds)

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        lane: LaneEnd = peer.context
        lane.heard = self.loop.now
        if lane.role != M.Role.SUPERVISOR:  # which asks all the time
            self._heard = self.loop.now
            self._quiet = False
        lane.recalled = False
        msg = decode(frame)
        if lane.role is None and not isinstance(msg, M.Hello | M.Ping):
            raise RemoteProtocolError("the first message must be HELLO")
        try:
            if isinstance(msg, M.Commit):
                self._commit(peer, lane, frame.request_id, msg)
            elif isinstance(msg, M.Grant):
                self._grant(peer, lane, frame.request_id, msg)
            elif isinstance(msg, M.ReturnGrants):
                self._return(peer, lane, frame.request_id, msg)
            elif isinstance(msg, M.RdmaOpen):
                self._open_lane(peer, lane, frame.request_id)
            elif isinstance(msg, M.RdmaConnect):
                self._connect(peer, lane, frame.request_id, msg)
            elif isinstance(msg, M.RdmaDisconnect):
                peer.send_message(M.Done(int(lane.disconnect(msg.link))), frame.request_id)
            elif isinstance(msg, M.Hello):
                self._hello(peer, lane, frame.request_id, msg)
            elif isinstance(msg, M.Ping):
                peer.send_message(M.Pong(msg.cookie), frame.request_id)
            elif isinstance(msg, M.Stats):
                peer.send_message(M.StatsReply(json.dumps(self.stats()).encode()), frame.request_id)
            else:
                raise RemoteProtocolError(f"{type(msg).__name__} is not for an endpoint")
        except FabricError as exc:
            self._broken(peer, str(exc))

    def _broken(self, peer: Peer, why: str) -> None:
        self.counts["lanes_broken"] += 1
        log.warning("closing the lane of %s: %s", peer.address, why)
        peer.close(f"a link broke: {why}")

    def _hello(self, peer: Peer, lane: LaneEnd, request_id: int, msg: M.Hello) -> None:
        if lane.role is not None:
            raise RemoteProtocolError("a second HELLO on one connection")
        proto, text = agreed_protocol(msg, "server")
        if not proto:
            peer.send_error(request_id, Status.VERSION, text)
            return
        if self.tokens and not token_fits((token.encode() for token in self.tokens), msg.token.encode()):
            peer.send_error(request_id, Status.UNAUTHORIZED, "wrong or missing token: see --token-file")
            peer.close("unauthorized")
            return
        lane.role = M.Role.CLIENT
        peer.send_message(M.Welcome(proto, 0, M.PathBit.RDMA, 0, 0, 0, 0, ""), request_id)

    def _open_lane(self, peer: Peer, lane: LaneEnd, request_id: int) -> None:
        devices = self.devices
        registration = devices.registration
        if devices.why or registration is None:
            peer.send_error(request_id, Status.UNAVAILABLE, devices.reason)
            return
        if not lane.opened:
            lane.opened = True
            lane.windows = devices.windows
            self.lanes.add(peer)
            self.counts["lanes_opened"] += 1
        rails = [
            M.RdmaRail(rail.gid, rail.lid, rail.mtu, rail.limits.reads, rail.name) for rail in registration.rails
        ]
        arena = registration.arena
        flags = M.RDMA_WINDOWS if registration.windows else 0
        peer.send_message(
            M.RdmaOpened(arena.geometry.size, arena.incarnation, flags, rails, registration.regions), request_id
        )

    def _opened(self, lane: LaneEnd, msg: Any) -> Registration:
        registration = self.devices.registration
        if not lane.opened or registration is None:
            raise RemoteProtocolError(f"{type(msg).__name__} before RDMA_OPEN")
        return registration

    def _connect(self, peer: Peer, lane: LaneEnd, request_id: int, msg: M.RdmaConnect) -> None:
        rails = self._opened(lane, msg).rails
        if msg.rail >= len(rails):
            raise RemoteProtocolError(f"RDMA_CONNECT to rail {msg.rail} of {len(rails)}")
        if msg.mtu not in MTUS:
            raise RemoteProtocolError(f"no link has an MTU of {msg.mtu} bytes")
        if len(lane.links) >= LINKS_MAX:
            raise RemoteProtocolError(f"more than {LINKS_MAX} links in one lane")
        theirs = LinkAddress(msg.gid, msg.lid, msg.qpn, msg.psn, msg.mtu, msg.reads)
        rail = rails[msg.rail]
        link = None
        try:
            link = rail.link()
            number, ours = lane.connect(link, msg.rail, theirs)
        except FabricError as exc:
            log.warning("%s: no link on %s: %s", peer.address, rail.name, exc)
            if link is None:  # not for what the client said
                self.devices.suspect = str(exc)
            peer.send_error(request_id, Status.UNAVAILABLE, str(exc))
            return
        peer.send_message(
            M.RdmaConnected(number, ours.lid, ours.gid, ours.qpn, ours.psn, ours.mtu, ours.reads), request_id
        )

    # -- grants -----------------------------------------------------------------------------------

    def _obtain(self, lane: LaneEnd, wants: Sequence[tuple[int, int]]) -> bool:
        """Grants as wanted, to be found in ``lane.prepared``; were there as many?

        Raises FabricError: close the lane then.
        """
        session = self.upstream.worker()
        if session is None:
            return False
        enough = True
        old = len(lane.prepared)
        for size, count in wants:
            chunk = chunk_bytes_for(size)
            allowed = min(count, self._room(lane, session, chunk))
            grants = _taken(session, size, allowed)
            try:
                if len(grants) < allowed:
                    session.ask([(size, allowed - len(grants))])
                    grants += _taken(session, size, allowed - len(grants))
                if not grants and (allowed or old) and self._spare(lane, session, old, chunk):
                    old = 0
                    if self._room(lane, session, chunk):
                        session.ask([(size, 1)])
                        grants += _taken(session, size, 1)
            except FabricError:
                raise
            except TransportError as exc:
                log.warning("no grants: %s", exc)
                for grant in grants:  # the session may go on
                    session.untake(grant)
                return False
            if grants:
                before = lane.granted_bytes
                try:
                    lane.hold(session, grants)
                except NoWindows as exc:
                    log.warning("%s", exc)
                    self._return_to_worker(session, [number for number, _, _ in grants])
                    return False
                finally:
                    self.granted_bytes += lane.granted_bytes - before
            if len(grants) < count:
                enough = False
                log.debug(
                    "%d of %d chunks of %d bytes: %d allowed, the lane has %d bytes, all have %d",
                    len(grants), count, chunk, allowed, lane.granted_bytes, self.granted_bytes,
                )  # fmt: skip
                if not grants or allowed < count:
                    self._recall(chunk * (count - len(grants)), lane)
        return enough

    def _spare(self, lane: LaneEnd, session: WorkerSession, old: int, chunk: int) -> bool:
        """There is no room: give back what nobody uses yet, of other sizes as it is: the first ``old`` prepared grants,
        and our pool. Was there any? Nothing goes back where some of the prepared ones are just what is wanted.

        Each slab with a single chunk of it cannot become one of the size that is wanted. Raises FabricError: close the
        lane then.
        """
        prepared = lane.prepared[:old]
        if any(held.chunk == chunk for held in prepared):
            return False
        self._release(lane, prepared)
        return session.return_idle() > 0 or bool(prepared)

    def _room(self, lane: LaneEnd, session: WorkerSession, chunk: int) -> int:
        """How many more such chunks the lane may have; one at least if it has none."""
        total = session.welcome.grant_bytes_max * GRANTED_PERCENT // 100
        mine = min(total // LANE_SHARE, LANE_BYTES_MAX) - lane.granted_bytes
        room = min(mine, total - self.granted_bytes) // chunk
        return max(room, 0 if lane.granted_bytes else 1)

    def _answer(self, peer: Peer, lane: LaneEnd, request_id: int, statuses: list[int], status: int = 0) -> None:
        told = lane.tell(ANSWER_GRANTS_MAX)
        keys = lane.keys(told)
        peer.send_message(M.RdmaGranted(statuses, [held.grant for held in told], keys), request_id, status=status)

    def _grant(self, peer: Peer, lane: LaneEnd, request_id: int, msg: M.Grant) -> None:
        self._opened(lane, msg)
        _check_wants(msg.wants)
        enough = self._obtain(lane, msg.wants)
        if not enough and not lane.prepared and self.upstream.worker() is None:
            peer.send_error(request_id, Status.UNAVAILABLE, "the worker is down")
            return
        self._answer(peer, lane, request_id, [], 0 if enough else int(Status.NO_SPACE))

    def _commit(self, peer: Peer, lane: LaneEnd, request_id: int, msg: M.Commit) -> None:
        self._opened(lane, msg)
        _check_wants(msg.wants)
        if len(msg.entries) > BATCH_KEYS_MAX:
            raise RemoteProtocolError(f"{len(msg.entries)} keys in a COMMIT, at most {BATCH_KEYS_MAX}")
        if any(entry[5] for entry in msg.entries):
            raise RemoteProtocolError("COMMIT with an option, which only movers have")
        if peer.gave_up(self.loop.now):  # it may have put newer values elsewhere since
            peer.close("the client gave up")
            return
        session = self.upstream.worker()
        statuses = [_STALE] * len(msg.entries)
        #: By id, so that an id that is named twice is spent by the first.
        spent: dict[int, Held] = {}
        entries, positions = [], []
        for position, entry in enumerate(msg.entries):
            held = lane.grants.get(entry[1])
            if held is None or held.number in spent:
                continue
            spent[held.number] = held
            if held.session is session:
                entries.append(entry)
                positions.append(position)
        holds = list(spent.values())
        lane.fence(holds)
        if peer.gave_up(self.loop.now):  # once more: a device may take its time
            peer.close("the client gave up")
            return
        self._let_go(lane, holds)
        if entries and session is not None:
            for position in positions:
                statuses[position] = _UNAVAILABLE
            self._publish(session, entries, self._ahead(lane, session, msg.wants), positions, statuses)
        good = statuses.count(0)
        self.counts["commits"] += good
        self.counts["stale_commits"] += statuses.count(_STALE)
        self.counts["commit_failures"] += len(statuses) - good
        self._answer(peer, lane, request_id, statuses)
        if msg.wants and not lane.closed:
            self._obtain(lane, msg.wants)

    def _ahead(self, lane: LaneEnd, session: WorkerSession, wants: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """What our pool will lack when these wants have been met from it, for as many once more.

        The worker makes it while we answer the client, and it comes with the answer after: a lane that puts one batch
        after another never waits for grants. Asked for when they were missing, half of the commits took two exchanges.
        """
        found = []
        for size, count in wants:
            chunk = chunk_bytes_for(size)
            allowed = min(count, self._room(lane, session, chunk))
            lacking = allowed - max(0, len(session.pool(chunk)) - allowed)
            if lacking > 0:
                found.append((size, lacking))
        return found

    def _publish(
        self, session: WorkerSession, entries: list[tuple[bytes, int, int, int, int, int]],
        wants: list[tuple[int, int]], positions: list[int], statuses: list[int],
    ) -> None:  # fmt: skip
        """Have the worker publish values that nobody can write any more, and fill their statuses in."""
        try:
            session.acquire()
            try:
                ticket = session.submit_locked(M.Commit(entries, wants))
            finally:
                session.lock.release()
            collect(session, [(ticket, positions)], statuses)
        except TransportError as exc:
            log.warning("commit of %d values: %s", len(entries), exc)

    def _return(self, peer: Peer, lane: LaneEnd, request_id: int, msg: M.ReturnGrants) -> None:
        self._opened(lane, msg)
        holds = [lane.grants[number] for number in dict.fromkeys(msg.grants) if number in lane.grants]
        self._release(lane, holds)
        peer.send_message(M.Done(len(holds)), request_id)

    def _release(self, lane: LaneEnd, holds: list[Held]) -> None:
        """Take grants of a lane back. Raises FabricError: close the lane then."""
        lane.fence(holds)
        self._let_go(lane, holds, spent=False)

    def _let_go(self, lane: LaneEnd, holds: list[Held], *, spent: bool = True) -> None:
        """Fenced grants are no longer the lane's."""
        before = lane.granted_bytes
        lane.forget(holds)
        self.granted_bytes += lane.granted_bytes - before
        if spent:
            for held in holds:
                held.session.end_copy()
        else:
            self._give_back(holds)

    def _give_back(self, holds: list[Held]) -> None:
        """Grants that nobody can write into any more, to whom they came from; those of ended sessions need nothing but
        not to be counted any longer."""
        session = self.upstream.session
        if session is not None and not session.broken:
            self._return_to_worker(session, [held.number for held in holds if held.session is session])
        for held in holds:
            held.session.end_copy()

    @staticmethod
    def _return_to_worker(session: WorkerSession, numbers: list[int]) -> None:
        if numbers:
            try:
                session.exchange(M.ReturnGrants(numbers))
            except TransportError as exc:
                log.warning("grants not returned: %s", exc)

    # -- upkeep -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.upstream.tend()
        try:
            self.devices.look(bool(self.lanes))
        except FabricError as exc:
            self._end(f"devices cannot be closed: {exc}")
            return
        now = self.loop.now
        for peer in list(self.lanes):
            lane: LaneEnd = peer.context
            why = lane.broken
            if why:
                self._broken(peer, why)
            elif lane.granted_bytes and not lane.recalled and now - lane.heard > IDLE_S:
                lane.recalled = True
                self._ask_back(peer, lane, lane.granted_bytes)
        session = self.upstream.session
        if session is None or session.broken:
            return
        seen = self._recalls[1] if self._recalls[0] is session else 0
        self._recalls = (session, session.recalled)
        if session.recalled > seen:
            self._recall(session.recalled - seen)
        if not self._quiet and now - self._heard > IDLE_S:
            self._quiet = True
            with contextlib.suppress(TransportError):
                session.ask([])  # what is prepared for us comes with any answer
                session.return_idle()

    def _recall(self, wanted: int, asking: LaneEnd | None = None) -> None:
        """Others need about so many bytes: ask the lanes for them, the greatest holders first."""
        others = [peer for peer in self.lanes if peer.context is not asking and peer.context.granted_bytes]
        for peer in sorted(others, key=lambda peer: -int(peer.context.granted_bytes)):
            if wanted <= 0:
                return
            lane: LaneEnd = peer.context
            asked = min(wanted, lane.granted_bytes)
            wanted -= asked
            self._ask_back(peer, lane, asked)

    def _ask_back(self, peer: Peer, lane: LaneEnd, wanted: int) -> None:
        """Take what the client has not been told of, and ask it for the rest."""
        before = lane.granted_bytes
        try:
            self._release(lane, list(lane.prepared))
        except FabricError as exc:
            self._broken(peer, str(exc))
            return
        wanted = min(wanted - (before - lane.granted_bytes), lane.granted_bytes)
        if wanted > 0:
            self.counts["recalls"] += 1
            peer.push(M.Recall(wanted))

    def stats(self) -> dict[str, Any]:
        """Counters of this process."""
        registration, windows = self.devices.registration, self.devices.windows
        return {
            "pid": os.getpid(),
            "ready": not self.devices.why,
            "why": self.devices.why,
            "lanes": len(self.lanes),
            "links": sum(peer.context.link_count for peer in self.lanes),
            "connections": len(self.loop.peers),
            "granted_bytes": self.granted_bytes,
            "registered_bytes": registration.done_bytes if registration is not None else 0,
            "to_register_bytes": registration.total_bytes if registration is not None else 0,
            "rails": [rail.name for rail in registration.rails] if registration is not None else [],
            "windows": windows.made if windows is not None else 0,
            "protected": windows is not None,
            "opens_failed": self.devices.opens_failed,
            "protocol_errors": self.loop.protocol_errors,
            "handler_errors": self.loop.handler_errors,
            **self.counts,
        }

    def check(self) -> None:
        """Raises CorruptionError when the books contradict themselves. O(grants)."""
        lanes: list[LaneEnd] = [peer.context for peer in self.lanes]
        for lane in lanes:
            lane.check()
        if sum(lane.granted_bytes for lane in lanes) != self.granted_bytes:
            raise CorruptionError(f"the lanes' grants do not have {self.granted_bytes} bytes")
        holds = [held for lane in lanes for held in lane.holds()]
        if len({held.offset for held in holds if held.session is self.upstream.session}) != sum(
            held.session is self.upstream.session for held in holds
        ):
            raise CorruptionError("two lanes have the same chunk")
        for session in {held.session for held in holds}:
            if len(session.copying) != sum(held.session is session for held in holds):
                raise CorruptionError(f"session {session.session:#x} does not count its grants that lanes hold")
        if self.devices.windows is not None:
            self.devices.windows.check(sum(len(held.covers) for held in holds))

    def close(self) -> None:
        """After the loop has been closed, and all lanes with it: give back what we hold, and close the devices."""
        self.upstream.close()
        self.devices.close()


def _taken(session: WorkerSession, size: int, most: int) -> list[tuple[int, int, int]]:
    """Grants from the session's pool, at most so many."""
    grants: list[tuple[int, int, int]] = []
    while len(grants) < most and (grant := session.take(size)) is not None:
        grants.append(grant)
    return grants


def _check_wants(wants: list[tuple[int, int]]) -> None:
    """A request's work is bounded. Raises RemoteProtocolError."""
    if len(wants) > BATCH_KEYS_MAX or sum(count for _, count in wants) > BATCH_KEYS_MAX:
        raise RemoteProtocolError(f"more than {BATCH_KEYS_MAX} grants in one request")
    for size, _ in wants:
        if not 0 < size <= VALUE_BYTES_MAX:
            raise RemoteProtocolError(f"a grant for a value of {size} bytes")


def run_endpoint(
    listener: socket.socket, uds: str, supervisor: socket.socket, open_fabric: Callable[[], Fabric | Absence],
    tokens: tuple[str, ...] = (), *, windows: bool = True,
) -> None:  # fmt: skip
    """Body of an endpoint process, after the fork: serve until SIGTERM or until the supervisor has gone.

    Raises SimmError when the process has to end, at once, because a link cannot be destroyed.
    """
    loop = Loop()
    endpoint = Endpoint(loop, uds, open_fabric, tokens, windows=windows)
    stop_on_signals(loop)
    endpoint.adopt_supervisor(supervisor)
    loop.listen(listener, endpoint, connections_max=LANES_MAX)
    loop.run()
    if not endpoint.failed:
        loop.close()
    if endpoint.failed:
        raise SimmError(endpoint.failed)
    endpoint.close()

"""An RDMA connection: how one thread at a time reads and writes another machine's arena.

docs/architecture.md, "RDMA data path", says what it consists of. It is closed after any failure, never repaired. Memory
safety rests on the order of closing:

1. The queue pairs. Once ``QueuePair.close`` has returned, no operation touches local memory: neither the scratch
   memory, nor a staging block, nor the caller's buffer.
2. The TCP connection. Its end makes the endpoint destroy its ends of the queue pairs, and only then reuse the grants.
3. Only then may the memory be reused. Interrupts (Ctrl-C) are deferred until that point.

Rail i of the client first tries rail i + n of the server, then its other rails. n differs between connections, so many
clients with one rail each spread over all rails of a server.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

from ..arena.layout import HEADER_BYTES, HEADER_WORDS, Geometry, State, Word
from ..config.client_options import ClientOptions
from ..constants import SET_BYTES, SLOT_BYTES, WAYS
from ..errors import DeadlineError, RemoteProtocolError, SegmentError, TransportError
from ..ipc import grant_pool
from ..ipc.grant_pool import GrantPool, KeyedGrant
from ..net.channel import Channel, greet, weakly
from ..rdma.api import READ, Fabric, FabricError, Op, QueuePair, QueuePairAddress, Rail
from ..rdma.registration import close_later
from ..rdma.remote_arena import Locations, RegionMap, RemoteArena
from ..rdma.staging import StagingMemory
from ..wire import messages as M
from ..wire import rdma_messages as R
from ..wire.hello import client_hello

log = logging.getLogger("simm.client")

#: Keys whose sets, words and slot images one page of scratch has room for.
PAGE_KEYS: Final = 32
#: For each queue pair: a page that is being filled, one that is being examined, and one that is posted next.
PAGES_PER_QUEUE_PAIR: Final = 3
QUEUE_PAIRS_MAX: Final = 8
#: RDMA_CONNECTs of one connection, in vain or not: the endpoint closes it at one more (docs/protocol.md).
CONNECTS_MAX: Final = 64
#: A pair of rails that did not work is tried last for so long, seconds. In networks of separate rails each connection
#: that is made in the middle of a call would find that out anew.
FAILED_S: Final = 60.0
#: Once a pair works, further ones are begun in this share of the time for opening, and after it only as SPARED allows.
#: Of those that failed lately one of each rail is. What nobody answers takes a while, and at the end of the time the
#: connection is lost with all links. A pair that was begun after this share is not filed as failed for that end.
MORE_LINKS: Final = 0.5
#: Once a pair works, a further one has all but this share of the time that is left. More are begun after MORE_LINKS as
#: long as this share has room for the slowest link and exchange so far: a connection keeps its links for its life.
SPARED: Final = 0.25
#: Interrupts that closing a connection puts up with.
CLOSE_TRIES: Final = 100

_SETS_BYTES: Final = 2 * SET_BYTES
_IMAGES_AT: Final = PAGE_KEYS * _SETS_BYTES
_WORDS_AT: Final = _IMAGES_AT + PAGE_KEYS * SLOT_BYTES
_PAGE_BYTES: Final = -(-(_WORDS_AT + PAGE_KEYS * 8) // 4096) * 4096
assert SLOT_BYTES * WAYS == SET_BYTES


class Page:
    """A page of scratch memory for PAGE_KEYS keys: where READs land, as addresses and as positions in the memory."""

    __slots__ = ("between", "between_at", "images", "images_at", "sets", "sets_at", "words", "words_at")

    def __init__(self, address: int, at: int) -> None:
        self.sets, self.sets_at = address + at, at
        #: In the second step, after the sets were examined: the images that are READ with the values.
        self.between, self.between_at = address + at, at
        self.images, self.images_at = address + at + _IMAGES_AT, at + _IMAGES_AT
        #: ``words_at`` counts in words.
        self.words, self.words_at = address + at + _WORDS_AT, (at + _WORDS_AT) // 8


class PairedLink:
    """A queue pair of a connection: its rails, its number at the server, and the lkey of the scratch memory."""

    __slots__ = ("_chains", "_in_flight", "depth", "lkey", "number", "qp", "rail", "region_map")

    def __init__(self, qp: QueuePair, rail: Rail, region_map: RegionMap, number: int, lkey: int) -> None:
        self.qp = qp
        self.rail = rail
        self.region_map = region_map
        self.number = number
        self.lkey = lkey
        self.depth = qp.depth
        #: (ticket, operations) of the chains that may be in flight, and the sum of the operations.
        self._chains: deque[tuple[int, int]] = deque()
        self._in_flight = 0

    def post(self, ops: Sequence[Op], until: float) -> int:
        """Post operations in one chain, or in several if the queue pair takes fewer; return the last ticket.

        Waits for room where there is none, until ``until`` (monotonic seconds): a queue pair would by itself, but
        longer than the caller's deadline. Raises FabricError, Timeout.
        """
        count, depth = len(ops), self.depth
        if count > depth:
            step = max(1, depth // 2)
            ticket = 0
            for start in range(0, count, step):
                ticket = self.post(ops[start : start + step], until)
            return ticket
        while self._in_flight + count > depth:
            oldest, size = self._chains.popleft()
            self.qp.wait(oldest, until)
            self._in_flight -= size
        ticket = self.qp.post(ops)
        self._chains.append((ticket, count))
        self._in_flight += count
        return ticket


class RdmaConnection:
    """See above. For one thread at a time.

    Args:
        fabric: this process's.
        address: host and port of the endpoint.
        options: the client's.
        until: when it must be there, monotonic seconds.
        turn: which of the server's rails is tried first by our first one.
        known: the arena as the last connection found it; taken over if it is the same, and with it all that is cached.
        failed: pairs, our rail's name and their number, that did not work, and until when (monotonic seconds) they are
            tried after all others; kept up to date.

    Raises TransportError (Refused: the endpoint says no) with the reason when there is no connection to be had.
    """

    def __init__(
        self, fabric: Fabric, address: tuple[str, int], options: ClientOptions, until: float, *, turn: int,
        known: RemoteArena | None, failed: dict[tuple[str, int], float], cluster: int,
        server: str = "",
    ) -> None:  # fmt: skip
        self.broken = ""
        #: How often its path had gone down when the path took it (``sdk/rdma_pool.py``).
        self.era = 0
        self.links: list[PairedLink] = []
        self.pool: GrantPool[KeyedGrant] = GrantPool()
        #: Staging memory that the rails of all links know, for as long as there are any.
        self.staged: set[StagingMemory] = set()
        #: Where values of this arena lie; the path's, that all its connections share.
        self.locations = Locations(0)
        #: What a watcher has posted and not seen done: a ticket of the first wire, and since when.
        self.watching: tuple[int, float] | None = None
        self._numbers = 0
        #: The slowest exchange for a pair, seconds.
        self._exchange_s = 0.0
        queue_pairs = max(1, min(QUEUE_PAIRS_MAX, len(fabric.rails)))
        self.pages_count = PAGES_PER_QUEUE_PAIR * queue_pairs
        left = until - time.monotonic()
        if left <= 0:
            raise DeadlineError("deadline passed before the connection was made")
        self._scratch = StagingMemory(4096 + HEADER_BYTES + self.pages_count * _PAGE_BYTES)
        try:
            self.memory = self._scratch.memory
            self.words = memoryview(self.memory).cast("Q")
            #: A byte that is 1, to be stored into visited bytes; 64 further on the words that flushes READ.
            self.one = self._scratch.address
            self.memory[0] = 1
            self.flushed = self.one + 64
            self._header = self.one + 4096
            start = 4096 + HEADER_BYTES
            self.pages = [
                Page(self._scratch.address, start + number * _PAGE_BYTES) for number in range(self.pages_count)
            ]
            self.channel = Channel.tcp(*address, left, weakly(self._on_push), options.tls)
        except BaseException:
            self._scratch.close()
            raise
        try:
            self.channel.deadline_s = options.deadline_s
            self.channel.bound(until)
            hello = client_hello(M.Role.CLIENT, namespace=options.namespace, cluster=cluster, pid=os.getpid())
            welcome = greet(self.channel, M.Service.ENDPOINT, hello, options.token, server, options.server_uids)
            #: The endpoint says what requests in a trace take it.
            self.tells = bool(welcome.paths & M.PathBit.TRACE)
            self._open(fabric, turn, known, failed, until)
            self.channel.bound()
        except BaseException as exc:
            self.close(str(exc) or "interrupted")
            raise

    def __repr__(self) -> str:
        return f"<RdmaConnection {len(self.links)} queue pairs {self.broken or 'open'}>"

    # -- opening ----------------------------------------------------------------------------------

    def _open(
        self, fabric: Fabric, turn: int, known: RemoteArena | None, failed: dict[tuple[str, int], float], until: float
    ) -> None:
        channel = self.channel
        opened = channel.call(R.RdmaOpen(0))
        if not isinstance(opened, R.RdmaOpened):
            channel.fail("the endpoint answered RDMA_OPEN with something else")
        if not opened.rails:
            raise TransportError("the server has no rails")
        self.windows = bool(opened.flags & R.RDMA_WINDOWS)
        reasons: list[str] = []
        arena: RemoteArena | None = None
        count = len(opened.rails)
        pairs: list[tuple[int, int, Rail, int, int]] = []
        now = time.monotonic()
        for number, rail in enumerate(list(fabric.rails)[:QUEUE_PAIRS_MAX]):
            lkey = self._scratch.registration.lkey(rail)
            if lkey is None:
                reasons.append(f"{rail.name}: its scratch memory cannot be registered")
                continue
            steps = [(number + turn + step) % count for step in range(count)]
            tried = {theirs: until_s for theirs in steps if (until_s := failed.get((rail.name, theirs), 0.0)) > now}
            fresh = [theirs for theirs in steps if theirs not in tried]
            pairs += ((len(tried) + step, number, rail, lkey, theirs) for step, theirs in enumerate(fresh))
            again = sorted(tried, key=tried.__getitem__)  # the one that failed longest ago may work by now
            pairs += ((2 * count + step, number, rail, lkey, theirs) for step, theirs in enumerate(again))
        # In rounds: a rail that reaches none of theirs would use up all tries, or all time, before the others had one.
        # The connections that follow go on with these rounds, as each has time for some pairs only.
        pairs.sort(key=itemgetter(0, 1))
        tries = CONNECTS_MAX
        linked: set[int] = set()
        slowest = 0.0
        more_until = now + (until - now) * MORE_LINKS
        for step, number, rail, lkey, theirs in pairs:
            if number in linked:
                continue
            begun = time.monotonic()
            # The time of an exchange is the server's, not ours: one that meets the deadline costs the connection.
            late = begun >= more_until and max(slowest, self._exchange_s) > (until - begun) * SPARED
            if linked and (late or step > 2 * count):
                reasons.append("other pairs were not tried, as one works")
                break
            if not tries:
                reasons.append(f"other pairs were not tried after {CONNECTS_MAX}")
                break
            tries -= 1
            try:
                its_end = until - (until - begun) * SPARED if linked else until
                arena = self._pair(rail, theirs, lkey, opened, arena, known, its_end)
                failed.pop((rail.name, theirs), None)
                linked.add(number)
                slowest = max(slowest, time.monotonic() - begun)
            except (FabricError, DeadlineError) as exc:
                reasons.append(f"{rail.name} to {opened.rails[theirs].name}: {exc}")
                if isinstance(exc, FabricError) or begun < more_until:  # else it may just have come too late
                    failed[rail.name, theirs] = time.monotonic() + FAILED_S
                if not isinstance(exc, FabricError):  # the channel is broken, too
                    raise
        if arena is None:
            raise TransportError("no pair of rails works: " + ("; ".join(reasons) or "this host has no rails"))
        for reason in reasons:
            log.info("a pair of rails is not used: %s", reason)
        self.arena = arena
        #: Is a queue pair's queue long enough for whole pages?
        self.keys = max(1, min(PAGE_KEYS, min(link.depth for link in self.links) // 6))

    def _pair(
        self, rail: Rail, theirs: int, lkey: int, opened: R.RdmaOpened, arena: RemoteArena | None,
        known: RemoteArena | None, until: float,
    ) -> RemoteArena:  # fmt: skip
        """Connect two rails and prove it: the arena. Raises FabricError, and the pair is gone then."""
        qp = rail.queue_pair()
        number = -1
        try:
            mine, asked = qp.address(), time.monotonic()
            try:
                answer = self.channel.call(
                    R.RdmaConnect(theirs, mine.lid, mine.gid, mine.qpn, mine.psn, mine.mtu, mine.reads)
                )
            finally:
                self._exchange_s = max(self._exchange_s, time.monotonic() - asked)
            if not isinstance(answer, R.RdmaConnected):
                self.channel.fail("the endpoint answered RDMA_CONNECT with something else")
            number = answer.link
            self._numbers = max(self._numbers, number + 1)
            qp.connect(QueuePairAddress(answer.gid, answer.lid, answer.qpn, answer.psn, answer.mtu, answer.reads))
            # A pair that has no way to each other shall not use up the time of those that have one.
            patience = min(until, time.monotonic() + max(0.25, (until - time.monotonic()) / 2))
            arena = self._read_header(qp, theirs, lkey, opened, arena, known, patience)
            region_map = arena.region_maps[theirs]
            if region_map is None:
                raise FabricError("the server has registered nothing with that rail")
        except BaseException as exc:
            qp.close()
            if number >= 0 and not self.channel.broken and isinstance(exc, FabricError):
                self.channel.call(R.RdmaDisconnect(number))
            if isinstance(exc, TransportError) and not isinstance(exc, FabricError) and not self.channel.broken:
                raise FabricError(str(exc)) from exc  # refused: the next pair may do
            raise
        self.links.append(PairedLink(qp, rail, region_map, number, lkey))
        return arena

    def _read_header(
        self, qp: QueuePair, theirs: int, lkey: int, opened: R.RdmaOpened, arena: RemoteArena | None,
        known: RemoteArena | None, until: float,
    ) -> RemoteArena:  # fmt: skip
        """READ the arena's header by a new pair. Return the arena, which the first pair makes of it.

        The header lies where the first region of a rail begins. Every later pair must bring the same one.
        """
        first = next((each for each in opened.regions if each.rail == theirs and each.start == 0), None)
        if first is None or first.length < HEADER_BYTES:
            raise FabricError("the server has not registered the arena's header with that rail")
        self.memory[4096 : 4096 + HEADER_BYTES] = bytes(HEADER_BYTES)
        qp.wait(qp.post([(READ, self._header, lkey, HEADER_BYTES, first.address, first.rkey)]), until)
        words = self.words[4096 // 8 :][: HEADER_BYTES // 8]
        try:
            geometry = Geometry.read(words, opened.size, "the server's arena")
            if arena is None:
                if words[Word.STATE] in (State.CLOSED, State.SUSPENDED):
                    raise SegmentError("the server's arena is closed")
                arena = RemoteArena(geometry, len(opened.rails), opened.regions, words[Word.GENERATION])
                return known if known is not None and known.key == arena.key else arena
        except (SegmentError, RemoteProtocolError) as exc:
            raise FabricError(str(exc)) from exc
        if geometry != arena.geometry or words[Word.GENERATION] != arena.generation:
            raise FabricError("another arena lies behind that rail")
        return arena

    # -- the worker's heartbeat -------------------------------------------------------------------

    def request_heartbeat(self) -> None:
        """Post a READ of the header's words, for :meth:`read_heartbeat`. Raises TransportError."""
        link = self.links[0]
        address, rkey = link.region_map.meta(0, HEADER_BYTES)
        now = time.monotonic()
        read: Op = (READ, self._header, link.lkey, 8 * HEADER_WORDS, address, rkey)
        self.watching = link.post([read], now + self.channel.deadline_s), now

    def read_heartbeat(self) -> tuple[int, int] | None:
        """(STATE, HEARTBEAT) once that READ is done, None before. Raises TransportError."""
        if self.watching is None:
            return None
        if self.links[0].qp.poll() < self.watching[0]:
            return None
        self.watching = None
        at = 4096 // 8
        return self.words[at + Word.STATE], self.words[at + Word.HEARTBEAT]

    # -- grants -----------------------------------------------------------------------------------

    def _on_push(self, msg: Any) -> None:
        if isinstance(msg, M.Recall):
            self.pool.recall(msg.bytes)

    def ask(self, wants: Sequence[tuple[int, int]]) -> None:
        """Ask for grants, (value bytes, count) each. What comes is in the pool. Raises TransportError."""
        self.granted(self.channel.call(M.Grant(list(wants))), 0)

    def return_grants(self, numbers: Sequence[int]) -> None:
        """Return grants by id, as many as a message has room for; see :func:`grant_pool.return_idle`.

        Raises TransportError.
        """
        self.channel.call(M.ReturnGrants(list(numbers)))

    def granted(self, answer: Any, statuses: int) -> list[int]:
        """Take what an RDMA_GRANTED brings; its statuses. Raises TransportError for anything else."""
        if not isinstance(answer, R.RdmaGranted) or len(answer.statuses) != statuses:
            self.channel.fail("the endpoint answered with something else")
        queue_pairs, keys = self._numbers, answer.keys
        windows = self.windows
        if len(keys) != (len(answer.grants) * queue_pairs if windows else 0):
            self.channel.fail(f"{len(keys)} keys for {len(answer.grants)} grants and {queue_pairs} queue pairs")
        at = 0
        for number, offset, chunk in answer.grants:
            self.pool.release((number, offset, chunk, keys[at : at + queue_pairs] if windows else ()))
            at += queue_pairs
        return answer.statuses

    def maintain(self) -> None:
        """Handle what the endpoint has pushed. Raises TransportError when it has gone."""
        self.channel.poll_pushes()
        grant_pool.maintain(self)

    # -- end --------------------------------------------------------------------------------------

    def close(self, reason: str = "closed") -> None:
        """Queue pairs, then the connection, then the scratch memory: see above. Twice is harmless.

        Afterwards nothing of this connection touches local memory. An interrupt is raised when that is so.
        """
        self.broken = self.broken or reason
        interrupted: BaseException | None = None
        tries = 0
        while self.links:
            try:
                self.links[-1].qp.close()
                self.links.pop()
            except BaseException as exc:
                # Whatever a signal's handler raises is raised when this is over.
                tries += 1
                if isinstance(exc, FabricError) or tries == CLOSE_TRIES:
                    # What cannot be destroyed may still write: its memory, and the caller's, must not be given back.
                    log.critical("a queue pair cannot be closed: %s", exc)
                    self.channel.close()  # the other end can be
                    raise
                interrupted = exc
        if reason != "closed":
            self.channel.broken = self.channel.broken or reason  # reset, with what it has not sent yet
        self.channel.close()
        self.pool.clear()  # they went back with the connection
        self._scratch.close()
        if interrupted is not None:
            try:
                raise interrupted
            finally:
                del interrupted  # else the exception and this frame hold each other, and with them the connection

    def __del__(self) -> None:
        links = getattr(self, "links", None)
        if links:  # dropped, with its client
            close_later([link.qp for link in links], self.memory)

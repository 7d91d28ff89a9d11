"""A lane: how one thread at a time reads and writes another machine's arena.

It is a control connection to the worker's endpoint, a link for each pair of rails that works, scratch memory, and
grants for values to come. All of it lives and dies together: after any failure a lane is closed, never mended.

The order in which it is closed is what memory safety stands on. First the links: once ``Link.close`` has returned,
nothing of ours touches local memory any more, neither the scratch, nor a bounce buffer, nor the caller's own. Then the
control connection, whose end has the endpoint destroy its ends of the links and only then reuse our grants. Only then
may anybody have the memory back. Interrupts (Ctrl-C in the middle of it) are kept until that is done.

A pair of rails counts after a real transfer: a READ of the arena's header, with its magic and geometry checked. Which
pairs are tried: rail i of ours with rail i + n of theirs, n differing from lane to lane, so that many clients with one
rail spread over all of a server's; where that fails, with the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from . import messages as M
from .bounce import Pages
from .channel import Channel
from .constants import SET_BYTES, SLOT_BYTES, WAYS
from .errors import RemoteProtocolError, SegmentError, TransportError
from .fabric import READ, Fabric, FabricError, Link, LinkAddress, Op, Rail
from .layout import HEADER_BYTES, Geometry, State, Word
from .registry import orphan
from .remote_arena import Locations, RemoteArena, Side
from .sizes import chunk_bytes_for

log = logging.getLogger("simm.client")

#: Keys whose sets, words and slot images one page of scratch has room for.
PAGE_KEYS: Final = 32
#: Pages under way at a time: for each link a page that is filled, one that is looked at, one that is posted next.
PAGES_A_LINK: Final = 3
LINKS_MAX: Final = 8
#: A pair of rails that did not work is tried last for so long, seconds. In networks of separate rails each lane that is
#: made in the middle of a call would find that out anew.
FAILED_S: Final = 60.0
#: Interrupts that closing a lane puts up with.
_CLOSE_TRIES: Final = 100

_SETS_BYTES: Final = 2 * SET_BYTES
_IMAGES_AT: Final = PAGE_KEYS * _SETS_BYTES
_WORDS_AT: Final = _IMAGES_AT + PAGE_KEYS * SLOT_BYTES
_PAGE_BYTES: Final = -(-(_WORDS_AT + PAGE_KEYS * 8) // 4096) * 4096
assert SLOT_BYTES * WAYS == SET_BYTES

#: (grant id, offset in the segment, chunk bytes, one key a link)
LaneGrant = tuple[int, int, int, Sequence[int]]


class Page:
    """A page of scratch: where what is READ for PAGE_KEYS keys lies, as addresses and as positions in the memory."""

    __slots__ = ("between", "between_at", "images", "images_at", "sets", "sets_at", "words", "words_at")

    def __init__(self, address: int, at: int) -> None:
        self.sets, self.sets_at = address + at, at
        #: Of the second step, when the sets have been looked at: the images that are READ with the values.
        self.between, self.between_at = address + at, at
        self.images, self.images_at = address + at + _IMAGES_AT, at + _IMAGES_AT
        #: ``words_at`` counts in words.
        self.words, self.words_at = address + at + _WORDS_AT, (at + _WORDS_AT) // 8


class Wire:
    """One link of a lane: which rails, which number the server gave it, the key of the scratch memory."""

    __slots__ = ("_chains", "_under_way", "depth", "link", "lkey", "number", "rail", "side")

    def __init__(self, link: Link, rail: Rail, side: Side, number: int, lkey: int) -> None:
        self.link = link
        self.rail = rail
        self.side = side
        self.number = number
        self.lkey = lkey
        self.depth = link.depth
        #: (ticket, operations) of the chains that may still be under way, and the sum of these.
        self._chains: deque[tuple[int, int]] = deque()
        self._under_way = 0

    def post(self, ops: Sequence[Op], until: float) -> int:
        """Post operations in one chain, or in several where they are more than the link takes; the last ticket.

        Waits for room where there is none, until ``until`` (monotonic seconds): a link would by itself, but longer than
        the caller's deadline. Raises FabricError, Timeout.
        """
        count, depth = len(ops), self.depth
        if count > depth:
            step = max(1, depth // 2)
            ticket = 0
            for start in range(0, count, step):
                ticket = self.post(ops[start : start + step], until)
            return ticket
        while self._under_way + count > depth:
            oldest, size = self._chains.popleft()
            self.link.wait(oldest, until)
            self._under_way -= size
        ticket = self.link.post(ops)
        self._chains.append((ticket, count))
        self._under_way += count
        return ticket


class Lane:
    """See above. For one thread at a time.

    Args:
        fabric: this process's.
        address: host and port of the endpoint.
        until: when it must be there, monotonic seconds.
        turn: which of the server's rails is tried first by our first one.
        known: the arena as the last lane found it; taken over if it is the same, and with it all that is cached.
        failed: pairs, our rail's name and their number, that did not work, and until when (monotonic seconds) they are
            tried after all others; kept up to date.

    Raises TransportError (Refused: the endpoint says no) with the reason when there is no lane to be had.
    """

    def __init__(
        self, fabric: Fabric, address: tuple[str, int], namespace: str, deadline_s: float, until: float, *,
        token: str = "", turn: int = 0, known: RemoteArena | None = None,
        failed: dict[tuple[str, int], float] | None = None,
    ) -> None:  # fmt: skip
        self.namespace = namespace
        self.broken = ""
        self.wires: list[Wire] = []
        self.pool: dict[int, list[LaneGrant]] = {}
        self.recall_bytes = 0
        #: Where values of this arena lie; the path's, that all its lanes share.
        self.locations = Locations(0)
        #: What a watcher has posted and not seen done: a ticket of the first wire, and since when.
        self.watching: tuple[int, float] | None = None
        self._numbers = 0
        links = max(1, min(LINKS_MAX, len(fabric.rails)))
        self.pages_count = PAGES_A_LINK * links
        left = until - time.monotonic()
        if left <= 0:
            raise TransportError("deadline passed before the lane was made")
        self._scratch = Pages(4096 + HEADER_BYTES + self.pages_count * _PAGE_BYTES)
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
            self.channel = Channel.tcp(*address, left, self._on_push)
        except BaseException:
            self._scratch.close()
            raise
        try:
            self.channel.deadline_s = deadline_s
            self.channel.bound(until)
            self._open(fabric, token, turn, known, {} if failed is None else failed, until)
            self.channel.bound()
        except BaseException as exc:
            self.close(str(exc) or "interrupted")
            raise

    def __repr__(self) -> str:
        return f"<Lane {len(self.wires)} links {self.broken or 'open'}>"

    # -- opening ----------------------------------------------------------------------------------

    def _open(
        self, fabric: Fabric, token: str, turn: int, known: RemoteArena | None, failed: dict[tuple[str, int], float],
        until: float,
    ) -> None:  # fmt: skip
        channel = self.channel
        hello = M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, M.Role.CLIENT, 0, os.getpid(), self.namespace, token, [])
        if not isinstance(channel.call(hello), M.Welcome):
            channel.fail("the endpoint answered HELLO with something else")
        opened = channel.call(M.RdmaOpen(0))
        if not isinstance(opened, M.RdmaOpened):
            channel.fail("the endpoint answered RDMA_OPEN with something else")
        if not opened.rails:
            raise TransportError("the server has no rails")
        self.windows = bool(opened.flags & M.RDMA_WINDOWS)
        reasons: list[str] = []
        arena: RemoteArena | None = None
        count = len(opened.rails)
        for number, rail in enumerate(list(fabric.rails)[:LINKS_MAX]):
            lkey = self._scratch.registration.lkey(rail)
            if lkey is None:
                reasons.append(f"{rail.name}: its scratch memory cannot be registered")
                continue
            now = time.monotonic()
            steps = sorted(
                ((number + turn + step) % count for step in range(count)),
                key=lambda theirs: failed.get((rail.name, theirs), 0.0) > now,
            )
            for theirs in steps:
                try:
                    arena = self._pair(rail, theirs, lkey, opened, arena, known, until)
                    failed.pop((rail.name, theirs), None)
                    break
                except FabricError as exc:
                    reasons.append(f"{rail.name} to {opened.rails[theirs].name}: {exc}")
                    failed[rail.name, theirs] = time.monotonic() + FAILED_S
        if arena is None:
            raise TransportError("no pair of rails works: " + ("; ".join(reasons) or "this host has no rails"))
        for reason in reasons:
            log.info("a pair of rails is not used: %s", reason)
        self.arena = arena
        #: Is a link's queue long enough for whole pages?
        self.keys = max(1, min(PAGE_KEYS, min(wire.depth for wire in self.wires) // 6))

    def _pair(
        self, rail: Rail, theirs: int, lkey: int, opened: M.RdmaOpened, arena: RemoteArena | None,
        known: RemoteArena | None, until: float,
    ) -> RemoteArena:  # fmt: skip
        """Connect two rails and prove it: the arena. Raises FabricError, and the pair is gone then."""
        link = rail.link()
        number = -1
        try:
            mine = link.address()
            answer = self.channel.call(
                M.RdmaConnect(theirs, mine.lid, mine.gid, mine.qpn, mine.psn, mine.mtu, mine.reads)
            )
            if not isinstance(answer, M.RdmaConnected):
                self.channel.fail("the endpoint answered RDMA_CONNECT with something else")
            number = answer.link
            self._numbers = max(self._numbers, number + 1)
            link.connect(LinkAddress(answer.gid, answer.lid, answer.qpn, answer.psn, answer.mtu, answer.reads))
            # A pair that has no way to each other shall not use up the time of those that have one.
            patience = min(until, time.monotonic() + max(0.25, (until - time.monotonic()) / 2))
            if arena is None:
                arena = self._read_header(link, theirs, lkey, opened, known, patience)
            else:
                self._fetch_header(link, arena.sides[theirs], lkey, patience)
            side = arena.sides[theirs]
            if side is None:
                raise FabricError("the server has registered nothing with that rail")
        except BaseException as exc:
            link.close()
            if number >= 0 and not self.channel.broken and isinstance(exc, FabricError):
                self.channel.call(M.RdmaDisconnect(number))
            if isinstance(exc, TransportError) and not isinstance(exc, FabricError) and not self.channel.broken:
                raise FabricError(str(exc)) from exc  # refused: the next pair may do
            raise
        self.wires.append(Wire(link, rail, side, number, lkey))
        return arena

    def _read_header(
        self, link: Link, theirs: int, lkey: int, opened: M.RdmaOpened, known: RemoteArena | None, until: float
    ) -> RemoteArena:
        """The arena, by its header. It lies where the first region of a rail begins."""
        first = next((each for each in opened.regions if each.rail == theirs and each.start == 0), None)
        if first is None or first.length < HEADER_BYTES:
            raise FabricError("the server has not registered the arena's header with that rail")
        self._read_words(link, lkey, first.address, first.rkey, until)
        at = 4096 // 8
        words = self.words[at : at + HEADER_BYTES // 8]
        try:
            geometry = Geometry.read(words, opened.size, "the server's arena")
            if words[Word.STATE] in (State.CLOSED, State.SUSPENDED):
                raise SegmentError("the server's arena is closed")
            arena = RemoteArena(geometry, len(opened.rails), opened.regions, opened.incarnation)
        except (SegmentError, RemoteProtocolError) as exc:
            raise FabricError(str(exc)) from exc
        return known if known is not None and known.key == arena.key else arena

    def _fetch_header(self, link: Link, side: Side | None, lkey: int, until: float) -> None:
        """A second pair: the same header must come by it."""
        if side is None:
            raise FabricError("the server has registered nothing with that rail")
        address, rkey = side.meta(0, HEADER_BYTES)
        self._read_words(link, lkey, address, rkey, until)
        try:
            geometry = Geometry.read(self.words[4096 // 8 :][: HEADER_BYTES // 8], side.geometry.size, "the arena")
        except SegmentError as exc:
            raise FabricError(str(exc)) from exc
        if geometry != side.geometry:
            raise FabricError("another arena lies behind that rail")

    def _read_words(self, link: Link, lkey: int, address: int, rkey: int, until: float) -> None:
        self.memory[4096 : 4096 + HEADER_BYTES] = bytes(HEADER_BYTES)
        link.wait(link.post([(READ, self._header, lkey, HEADER_BYTES, address, rkey)]), until)

    # -- the worker's pulse -----------------------------------------------------------------------

    def ask_pulse(self) -> None:
        """Post a READ of the header's words, for :meth:`pulse`. Raises TransportError."""
        wire = self.wires[0]
        address, rkey = wire.side.meta(0, HEADER_BYTES)
        now = time.monotonic()
        read: Op = (READ, self._header, wire.lkey, 8 * (max(Word) + 1), address, rkey)
        self.watching = wire.post([read], now + self.channel.deadline_s), now

    def pulse(self) -> tuple[int, int] | None:
        """(STATE, HEARTBEAT) once that READ is done, None before. Raises TransportError."""
        if self.watching is None:
            return None
        if self.wires[0].link.poll() < self.watching[0]:
            return None
        self.watching = None
        at = 4096 // 8
        return self.words[at + Word.STATE], self.words[at + Word.HEARTBEAT]

    # -- grants -----------------------------------------------------------------------------------

    def _on_push(self, msg: Any) -> None:
        if isinstance(msg, M.Recall):
            self.recall_bytes += msg.bytes

    def take(self, size: int) -> LaneGrant | None:
        """A grant for a value of ``size`` bytes from the pool, or None."""
        pool = self.pool.get(chunk_bytes_for(size))
        return pool.pop() if pool else None

    def have(self, size: int) -> int:
        """How many grants for such values there are."""
        return len(self.pool.get(chunk_bytes_for(size), ()))

    def untake(self, grant: LaneGrant) -> None:
        """Put a grant back that nothing was written into, or that no WRITE into is under way any more."""
        self.pool.setdefault(grant[2], []).append(grant)

    def ask(self, size: int, count: int) -> None:
        """Ask for grants; what comes lands in the pool. Raises TransportError."""
        self.granted(self.channel.call(M.Grant([(size, count)])), 0)

    def granted(self, answer: Any, statuses: int) -> list[int]:
        """Take what an RDMA_GRANTED brings; its statuses. Raises TransportError for anything else."""
        if not isinstance(answer, M.RdmaGranted) or len(answer.statuses) != statuses:
            self.channel.fail("the endpoint answered with something else")
        links, keys = self._numbers, answer.keys
        windows = self.windows
        if len(keys) != (len(answer.grants) * links if windows else 0):
            self.channel.fail(f"{len(keys)} keys for {len(answer.grants)} grants and {links} links")
        at = 0
        for number, offset, chunk in answer.grants:
            grant = number, offset, chunk, keys[at : at + links] if windows else ()
            at += links
            self.pool.setdefault(chunk, []).append(grant)
        return answer.statuses

    def give_back(self, grants: Sequence[LaneGrant]) -> None:
        """Return grants that nothing is being written into. Raises TransportError."""
        if grants:
            self.channel.call(M.ReturnGrants([grant[0] for grant in grants]))

    def return_idle(self, wanted: int | None = None) -> int:
        """Return pooled grants, about ``wanted`` bytes or all; how many bytes. Raises TransportError."""
        given: list[LaneGrant] = []
        freed = 0
        for pool in self.pool.values():
            while pool and (wanted is None or freed < wanted):
                grant = pool.pop()
                given.append(grant)
                freed += grant[2]
        self.give_back(given)
        return freed

    def tend(self) -> None:
        """What the endpoint has said in between. Raises TransportError when it has gone."""
        self.channel.poll_pushes()
        if self.recall_bytes:
            wanted, self.recall_bytes = self.recall_bytes, 0
            self.return_idle(wanted)

    # -- end --------------------------------------------------------------------------------------

    def close(self, reason: str = "closed") -> None:
        """Links, then the connection, then the scratch memory: see above. Twice is harmless.

        Afterwards nothing of this lane touches local memory. An interrupt is raised when that is so.
        """
        self.broken = self.broken or reason
        interrupted: BaseException | None = None
        tries = 0
        while self.wires:
            try:
                self.wires[-1].link.close()
                self.wires.pop()
            except BaseException as exc:
                # Whatever a signal's handler raises is raised when this is over.
                tries += 1
                if isinstance(exc, FabricError) or tries == _CLOSE_TRIES:
                    # What cannot be destroyed may still write: its memory, and the caller's, must not be given back.
                    log.critical("a link cannot be closed: %s", exc)
                    self.channel.close()  # the other end can be
                    raise
                interrupted = exc
        if reason != "closed":
            self.channel.broken = self.channel.broken or reason  # reset, with what it has not sent yet
        self.channel.close()
        self.pool.clear()  # they went back with the connection
        self._scratch.close()
        if interrupted is not None:
            raise interrupted

    def __del__(self) -> None:
        wires = getattr(self, "wires", None)
        if wires:  # dropped, with its client
            orphan([wire.link for wire in wires], self.memory)

    def abandon(self) -> None:
        """After a fork, in the child: close the socket's copy, touch nothing else."""
        with contextlib.suppress(OSError):
            self.channel.sock.close()

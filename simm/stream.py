"""A stream process: the bulk path by TCP for clients on other hosts.

It is itself a local client of its worker's arena: it reads by the seqlock and writes into grants.
It has a process of its own so that a 64 MiB transfer never delays a 100-byte commit.

GET    FETCH names digests; the answer is a FETCHED frame with lengths, then the values' bytes
       bare, then a VERDICT frame. Bytes go from the arena into the socket without a copy in
       between. After the last byte of a value has been handed to the kernel its slot's seq is
       read again: an entry overwritten meanwhile gets the verdict TORN, and the client, which
       waits for the verdict, asks again. So nothing is pinned, and a client that reads one byte
       a second costs one socket buffer and holds up no eviction.
PUT    STORE names digests and lengths, bytes follow bare and are received straight into granted
       chunks, then committed together (streamput.py).
MOVE   A new owner's mover says FREEZE, which goes on to the worker, then LIST (listing.py) and
       FETCH_PREVIOUS: a FETCH in which the values of frozen shards count too.

What a miss means only the worker can say where a shard is moving in, or has not been adopted yet: it alone
remembers what was deleted since. So those digests, and no others, cost a LOCATE.

Nothing a client sends blocks the loop. Exchanges with the worker do, for microseconds; a worker
that does not answer costs ``WORKER_DEADLINE_S`` once, then the session counts as down and is
retried in the background while reads go on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

from . import messages as M
from .channel import Refused
from .constants import BATCH_KEYS_MAX
from .errors import RemoteProtocolError, SegmentError, UsageError
from .greeting import agreed_protocol, token_fits
from .loop import Loop, Peer, Service
from .messages import Status
from .process import stop_on_signals
from .reader import ArenaReader, Located, Unsettled
from .rpc import Frame, decode, reply
from .shards import EPOCH_MASK, FROZEN, MOVING, shards_in
from .streamput import Link as PutLink
from .streamput import Receiver
from .upstream import Upstream

log = logging.getLogger("simm.stream")

#: Answers up to this size leave in one piece, verdict included.
SMALL_ANSWER_BYTES: Final = 128 << 10
#: Socket buffers of a connection, and the one for answers of those that come when there are more than so many.
BUFFER_BYTES: Final = 4 << 20
BUFFER_BYTES_MANY: Final = 256 << 10
MANY_PEERS: Final = 32

_OK: Final = int(Status.OK)
_NOT_FOUND: Final = int(Status.NOT_FOUND)
_WRONG_OWNER: Final = int(Status.WRONG_OWNER)
#: The worker has to be asked.
_ASK: Final = -1


class Sending:
    """A FETCHED under way: values still to send, verdicts so far."""

    __slots__ = ("current", "previous", "request_id", "todo", "verdicts")

    def __init__(
        self, request_id: int, todo: list[tuple[int, bytes, Located, memoryview]], keys: int, previous: bool
    ) -> None:
        self.request_id = request_id
        self.previous = previous
        self.todo = todo
        self.verdicts = [_OK] * keys
        self.current: tuple[int, bytes, Located, memoryview] | None = None


class Link(PutLink):
    """Per-connection state. ``role`` is None before HELLO."""

    __slots__ = ("role", "sending")

    def __init__(self) -> None:
        super().__init__()
        self.role: int | None = None
        self.sending: Sending | None = None


class Stream(Service):
    """Serves one worker's values by TCP."""

    read_bytes = 4096
    unsent_bytes = 0

    def __init__(self, loop: Loop, uds: str, tokens: tuple[str, ...] = (), rdma_port: int = 0) -> None:
        self.loop = loop
        self.tokens = tokens
        #: Where the worker's endpoint listens, 0 without one.
        self.rdma_port = rdma_port
        self.upstream = Upstream(uds)
        self.receiver = Receiver(self.upstream)
        self.fetched_bytes = 0
        self.torn = 0
        self.listed = 0
        loop.call_every(0.1, self.upstream.tend)

    # -- connections ----------------------------------------------------------------------------

    def on_connect(self, peer: Peer) -> None:
        peer.context = Link()
        # The kernel takes twice that for what a peer does not read, on nobody's account: much for few, little for many.
        out = BUFFER_BYTES if len(self.loop.peers) <= MANY_PEERS else BUFFER_BYTES_MANY
        for option, size in ((socket.SO_SNDBUF, out), (socket.SO_RCVBUF, BUFFER_BYTES)):
            with contextlib.suppress(OSError):
                peer.sock.setsockopt(socket.SOL_SOCKET, option, size)

    def on_close(self, peer: Peer, reason: str) -> None:
        link: Link = peer.context
        if link.receiving is not None:
            self.receiver.abandon(link.receiving)
            link.receiving = None
        link.sending = None

    def on_bulk(self, peer: Peer, size: int) -> None:
        self.receiver.on_bulk(peer, peer.context)

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        link: Link = peer.context
        msg = decode(frame)
        if link.role is None and not isinstance(msg, M.Hello | M.Ping):
            raise RemoteProtocolError("the first message must be HELLO")
        if isinstance(msg, M.Fetch | M.FetchPrevious):
            self._fetch(peer, link, frame.request_id, msg)
        elif isinstance(msg, M.Store):
            self.receiver.store(peer, link, frame.request_id, msg)
        elif isinstance(msg, M.Exists):
            peer.send_message(M.Statuses(self._exists(msg.digests)), frame.request_id)
        elif isinstance(msg, M.Delete):
            peer.send_message(M.Statuses(self.upstream.statuses(msg)), frame.request_id)
        elif isinstance(msg, M.Freeze | M.List) and link.role == M.Role.MOVER:
            self._move(peer, frame.request_id, msg)
        elif isinstance(msg, M.Hello):
            self._hello(peer, link, frame.request_id, msg)
        elif isinstance(msg, M.Ping):
            peer.send_message(M.Pong(msg.cookie), frame.request_id)
        elif isinstance(msg, M.Stats):
            peer.send_message(M.StatsReply(json.dumps(self.stats()).encode()), frame.request_id)
        else:
            raise RemoteProtocolError(f"{type(msg).__name__} is not for a stream")

    def _hello(self, peer: Peer, link: Link, request_id: int, msg: M.Hello) -> None:
        proto, text = agreed_protocol(msg, "server")
        if not proto:
            peer.send_error(request_id, Status.VERSION, text)
            return
        if self.tokens and not token_fits((token.encode() for token in self.tokens), msg.token.encode()):
            peer.send_error(request_id, Status.UNAUTHORIZED, "wrong or missing token: see --token-file")
            peer.close("unauthorized")
            return
        link.role = msg.role
        port = self.rdma_port if msg.role == M.Role.CLIENT else 0
        paths = M.PathBit.TCP | (M.PathBit.RDMA if port else 0)
        peer.send_message(M.Welcome(proto, 0, paths, port, 0, 0, 0, ""), request_id)

    # -- get --------------------------------------------------------------------------------------

    def _fetch(self, peer: Peer, link: Link, request_id: int, msg: M.Fetch | M.FetchPrevious) -> None:
        if len(msg.keys) > BATCH_KEYS_MAX:
            raise RemoteProtocolError(f"{len(msg.keys)} keys in a FETCH, at most {BATCH_KEYS_MAX}")
        previous = isinstance(msg, M.FetchPrevious)
        reader = self.upstream.arena()
        looked = self._look(reader, [digest for digest, _ in msg.keys], previous)
        entries: list[tuple[int, int, int, int]] = []
        todo: list[tuple[int, bytes, Located, memoryview]] = []
        total = 0
        for position, ((digest, most), (status, since, found)) in enumerate(zip(msg.keys, looked)):
            if found is None or reader is None:
                entries.append((status, 0, since & 0xFFFF_FFFF, since >> 32))
            elif found.length > most:
                entries.append((int(Status.TOO_LARGE), found.flags, found.length, found.crc))
            else:
                entries.append((_OK, found.flags, found.length, found.crc))
                todo.append((position, digest, found, reader.value(found)))
                total += found.length
        head = reply(M.Fetched(entries), request_id)
        sending = Sending(request_id, todo, len(entries), previous)
        self.fetched_bytes += total
        if total <= SMALL_ANSWER_BYTES:
            parts = [head]
            for position, digest, found, value in todo:
                parts.append(bytes(value))
                self._judge(sending, position, digest, found)
            parts.append(reply(M.Verdict(sending.verdicts), request_id))
            peer.send(b"".join(parts))
            return
        peer.bulk = True  # nothing more is parsed until the verdict is out
        link.sending = sending
        sending.todo.reverse()
        peer.send(head)
        if not peer.out:
            self._pump(peer, link, sending)

    def _look(
        self, reader: ArenaReader | None, digests: Sequence[bytes], previous: bool
    ) -> list[tuple[int, int, Located | None]]:
        """(status, epoch with PREVIOUS, where it lies) for each digest; the worker is asked together about those that
        only it can tell."""
        if reader is None:
            return [(int(Status.UNAVAILABLE), 0, None)] * len(digests)
        looked = [_locate(reader, digest, previous) for digest in digests]
        asked = [position for position, (status, _, _) in enumerate(looked) if status == _ASK]
        if asked:
            answers = self.upstream.meanings([digests[position] for position in asked])
            for position, (status, since) in zip(asked, answers):
                looked[position] = (status, since, None)
                if status == _OK:  # copied in between the two looks
                    again, _, found = _locate(reader, digests[position], previous)
                    looked[position] = (_NOT_FOUND if again == _ASK else again, 0, found)
        return looked

    def _judge(self, sending: Sending, position: int, digest: bytes, found: Located) -> None:
        reader = self.upstream.reader
        if reader is not None:
            confirm = reader.confirm_previous if sending.previous else reader.confirm
            if confirm(digest, found.slot, found.seq):
                return
        sending.verdicts[position] = int(Status.TORN)
        self.torn += 1

    def _pump(self, peer: Peer, link: Link, sending: Sending) -> None:
        """Hand values to the kernel until it takes no more, then go on at on_drain."""
        while not peer.closed:
            current = sending.current
            if current is not None:
                self._judge(sending, *current[:3])
                sending.current = None
            if not sending.todo:
                link.sending = None
                peer.bulk = False
                peer.send_message(M.Verdict(sending.verdicts), sending.request_id)
                if peer.paused:
                    peer.pause(False)
                return
            sending.current = sending.todo.pop()
            peer.send(sending.current[3])
            if peer.out:
                peer.pause(True)  # requests wait until the verdict is out
                return

    def on_drain(self, peer: Peer) -> None:
        link: Link = peer.context
        if link.sending is not None:
            self._pump(peer, link, link.sending)

    # -- the rest -----------------------------------------------------------------------------------

    def _exists(self, digests: list[bytes]) -> list[int]:
        reader = self.upstream.arena()
        if reader is None:
            return [int(Status.UNAVAILABLE)] * len(digests)
        statuses = [_OK if hit else _NOT_FOUND for hit in reader.contains_many(digests)]
        asked = []
        for position, status in enumerate(statuses):
            if status:
                statuses[position] = meaning = _meaning_of_miss(reader.shard_word(digests[position]))
                if meaning == _ASK:
                    asked.append(position)
        if asked:
            answers = self.upstream.statuses(M.Exists([digests[position] for position in asked]))
            for position, status in zip(asked, answers):
                statuses[position] = status
        return statuses

    def _move(self, peer: Peer, request_id: int, msg: M.Freeze | M.List) -> None:
        """What a new owner's mover asks of us, the previous owner."""
        try:
            if isinstance(msg, M.Freeze):
                shards_in(msg.shards)  # what the worker would close its session with us for
                if not 0 < msg.epoch <= EPOCH_MASK:
                    raise UsageError(f"no map has epoch {msg.epoch}")
                answer = self.upstream.exchange(msg)
            else:
                answer = self.upstream.lister().page(msg.shards, msg.cursor, msg.most)
                self.listed += len(answer.entries)
        except UsageError as exc:
            raise RemoteProtocolError(str(exc)) from None
        except Refused as exc:
            peer.send_error(request_id, exc.status, str(exc))
        except SegmentError as exc:
            peer.send_error(request_id, Status.UNAVAILABLE, str(exc))
        else:
            peer.send_message(answer, request_id)

    def stats(self) -> dict[str, Any]:
        """Counters of this process."""
        return {
            "pid": os.getpid(),
            "connections": len(self.loop.peers),
            "fetched_bytes": self.fetched_bytes,
            "stored_bytes": self.receiver.stored_bytes,
            "torn": self.torn,
            "listed": self.listed,
            "stalled": self.loop.stalled,
            "protocol_errors": self.loop.protocol_errors,
            "handler_errors": self.loop.handler_errors,
        }


def _locate(reader: ArenaReader, digest: bytes, previous: bool) -> tuple[int, int, Located | None]:
    """(status, 0, where it lies); the status is _ASK where only the worker can say what the miss means."""
    for _ in range(4):
        try:
            found = reader.locate(digest)
        except Unsettled:
            time.sleep(0.0005)
            continue
        word = reader.shard_word(digest)
        if previous:
            if not word:
                return _WRONG_OWNER, 0, None
            if found is None:
                return _NOT_FOUND, 0, None
        elif found is None or not 0 < word < FROZEN:
            return _meaning_of_miss(word), 0, None
        reader.touch(found.slot)
        return _OK, 0, found
    return int(Status.BUSY), 0, None


def _meaning_of_miss(word: int) -> int:
    """What a miss in a shard with this word means."""
    if 0 < word < MOVING:
        return _NOT_FOUND
    return _WRONG_OWNER if word >= FROZEN else _ASK


def run_stream(
    listener: socket.socket, uds: str, supervisor: socket.socket, tokens: tuple[str, ...] = (), rdma_port: int = 0
) -> None:
    """Body of a stream process, after the fork: serve until SIGTERM or until the supervisor has gone."""
    loop = Loop()
    stream = Stream(loop, uds, tokens, rdma_port)
    stop_on_signals(loop)
    loop.watch(supervisor, lambda _mask: loop.stop())
    loop.listen(listener, stream)
    loop.run()
    loop.close()
    stream.upstream.close()

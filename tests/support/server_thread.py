"""What the tests of moving shards share: two workers and a stream in this process, and a previous owner that lies."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import struct
import threading
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from simm.arena.hashing import shard_of
from simm.arena.layout import ENTRY_CRC
from simm.cluster.assignment import Member
from simm.cluster.shard_map import ShardMap, pack_since
from simm.config.client_options import ClientOptions
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.ipc.session import WorkerSession
from simm.ipc.steps import finish
from simm.net.channel import Channel
from simm.net.listeners import listen_tcp
from simm.net.loop import Loop
from simm.rpc import Connection, Flag, decode, encode, reply
from simm.sdk.path import ClientContext
from simm.sdk.tcp import TcpPath
from simm.server.migration import Mover, MoverSettings
from simm.server.stream import Stream
from simm.wire import messages as M
from simm.wire.messages import MapReply, Status, WorkerInfo
from simm.wire.shard_set import MOVING, shards_in
from tests.support.consistency import check
from tests.support.tokens import old_tokens
from tests.support.worker_thread import WAIT_S, WorkerThread

P, N = 0, 1


def digest_in(shard: int, key: object) -> bytes:
    """A digest in a shard."""
    return struct.pack("<H", shard) + hashlib.blake2b(repr(key).encode(), digest_size=14).digest()


def value_of(key: object, length: int) -> bytes:
    """The bytes that belong to a key."""
    return random.Random(repr(key)).randbytes(length)


class StreamThread:
    """A worker's stream in a thread."""

    def __init__(self, uds: str, tokens: tuple[str, ...] = ()) -> None:
        self.loop = Loop()
        self.stream = Stream(self.loop, uds, old_tokens(*tokens))
        listener = listen_tcp("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self.loop.listen(listener, self.stream)
        self._stop, far = socket.socketpair()
        self._far = far
        self.loop.watch(far, lambda _mask: self.loop.stop())
        self.thread = threading.Thread(target=self.loop.run, name="test-stream", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Ends it as a kill would: connections and listener are gone."""
        if self.thread.is_alive():
            self._stop.send(b"x")
            self.thread.join(WAIT_S)
            assert not self.thread.is_alive()
            self.loop.close()
            session = self.stream.keeper.session
            if session is not None:
                session.close(clean=False)
            self._stop.close()
            self._far.close()


class Side:
    """One server: its worker, its stream, its view of the map."""

    def __init__(self, name: str, instance: int, tokens: tuple[str, ...] = ()) -> None:
        self.worker = WorkerThread(all_shards=False)
        self.stream = StreamThread(self.worker.path, tokens)
        self.member = Member(name, instance, [0])
        self.stream.stream.server = self.info.server
        self._path = TcpPath(
            ClientContext(ClientOptions(deadline_s=WAIT_S, token=tokens[0] if tokens else "")),
            "127.0.0.1", self.stream.port, server=self.info.server,
        )  # fmt: skip

    @property
    def info(self) -> WorkerInfo:
        """As a map names it."""
        name, instance = self.member.name, self.member.instance
        return WorkerInfo(0, 0, 1, instance, 1 << 24, name, self.worker.path, "127.0.0.1", self.stream.port)

    def tell(self, shard_map: ShardMap) -> None:
        """The supervisor's part: SHARDS."""
        assert self.member.take_map(shard_map) is not None
        self.worker.supervisor.call(self.member.order(0))

    def put(
        self, digest: bytes, value: bytes, *, namespace: str = "default", crc: bool = False, more: int = 0
    ) -> None:  # fmt: skip
        """A client's PUT, which must succeed. ``more``: further flags of the entry."""
        session = WorkerSession(self.worker.path, namespace, WAIT_S, ring=False)
        try:
            session.ask([(len(value), 1)])
            grant = session.pool.take(len(value))
            assert grant is not None
            start = grant[1] - session.reader.data_offset
            session.reader.data[start : start + len(value)] = value
            flags, check = (ENTRY_CRC, zlib.crc32(value)) if crc else (0, 0)
            answer = session.exchange(M.Commit([(digest, grant[0], len(value), check, flags | more, 0)], []))
            assert answer.statuses == [Status.OK], answer
        finally:
            session.close()

    def flags(self, digest: bytes) -> int | None:
        """The flags of an entry, None if it is not there."""
        with contextlib.closing(WorkerSession(self.worker.path, "default", WAIT_S, ring=False)) as session:
            status, flags, *_ = session.exchange(M.Locate(0, [digest])).entries[0]
            return flags if status == Status.OK else None

    def delete(self, digest: bytes) -> int:
        """A client's DELETE: its status."""
        with contextlib.closing(WorkerSession(self.worker.path, "default", WAIT_S, ring=False)) as session:
            status: int = session.exchange(M.Delete([digest])).statuses[0]
            return status

    def get(self, digest: bytes) -> bytes | None:
        """The value, by TCP, as a client who asks the owner would have it."""
        return self.fetch([digest])[0]

    def fetch(self, digests: Sequence[bytes]) -> list[bytes | None]:
        """Values of many keys."""
        taken: dict[int, bytearray] = {}

        def target(at: int) -> Callable[[int], memoryview]:
            def make(length: int) -> memoryview:
                taken[at] = bytearray(length)
                return memoryview(taken[at])

            return make

        wants = [(digest, 1 << 26, target(at)) for at, digest in enumerate(digests)]
        got = finish(self._path.fetch(wants))
        return [bytes(taken[at]) if status == Status.OK else None for at, (status, *_) in enumerate(got)]

    def word(self, shard: int) -> int:
        """The shard's word."""
        word: int = self.worker.store.shards[shard]
        return word

    def stats(self) -> dict[str, Any]:
        """The store's counters."""
        with self.worker.frozen() as store:
            store.apply_pending()
            return store.stats()

    def close(self) -> None:
        """End both."""
        self._path.close()
        self.stream.close()
        self.worker.__exit__(None, None, None)


class MoverThread:
    """A mover in a thread, and the supervisor's end of its socket pair."""

    def __init__(self, side: Side, *, bytes_per_s: int = 0, token: str = "") -> None:
        self.sock, theirs = socket.socketpair()
        self.theirs = theirs
        settings = MoverSettings(side.member.name, side.member.instance, 0, side.worker.path, token, bytes_per_s)
        self.mover = Mover(settings, theirs)
        self.outcome: BaseException | bool | None = None
        self.reports: list[M.MoveProgress] = []
        self._conn = Connection()
        self.thread = threading.Thread(target=self._run, name="test-mover", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self.mover.run()
        except BaseException as exc:
            self.outcome = exc

    def feed(self, shard_map: MapReply) -> None:
        """Hand it a map."""
        self.sock.sendall(encode(shard_map, 0, flags=Flag.PUSH))

    def wait(self, timeout_s: float = WAIT_S) -> BaseException | bool:
        """How it ended."""
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), "the mover does not end"
        assert self.outcome is not None
        return self.outcome

    def progress(self) -> list[M.MoveProgress]:
        """Everything it has reported."""
        self.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while data := self.sock.recv(1 << 16):
                self._conn.receive_data(data)
        while (frame := self._conn.next_frame()) is not None:
            self.reports.append(decode(frame))
        return self.reports

    def close(self) -> None:
        """As when the supervisor dies; waits for its threads."""
        self.sock.close()
        self.thread.join(WAIT_S)
        self.mover.plan.update({})  # jobs under way end at their next look
        self.mover.close()
        self.theirs.close()


class Pair:
    """P and N, a map for both, and movers of N's."""

    def __init__(self, tokens: tuple[str, ...] = ()) -> None:
        self.tokens = tokens
        self.p = Side("p", 11, tokens)
        self.n = Side("n", 22, tokens)
        self.epoch = 1
        self.owners = [P] * SHARD_COUNT
        self.since = [1] * SHARD_COUNT
        self.previous: dict[int, int] = {}
        #: Stands where P stands in maps, if set.
        self.instead: WorkerInfo | None = None
        self.movers: list[MoverThread] = []
        self.tell()

    def message(self) -> MapReply:
        """The map as a message."""
        owners, since = array("H", self.owners), array("Q", self.since)
        workers = [self.instead or self.p.info, self.n.info]
        return MapReply(self.epoch, 7, workers, owners.tobytes(), sorted(self.previous.items()), pack_since(since))

    def tell(self) -> None:
        """Both servers take the map."""
        shard_map = ShardMap(self.message())
        for side in (self.p, self.n):
            side.tell(shard_map)

    def move(self, shards: Sequence[int], *, to: int = N, previous: bool = True) -> None:
        """A new map: these go to another owner."""
        self.epoch += 1
        for shard in shards:
            if previous and self.owners[shard] != NO_OWNER:
                self.previous[shard] = self.owners[shard]
            else:
                self.previous.pop(shard, None)
            self.owners[shard] = to
            self.since[shard] = self.epoch
        self.tell()

    def forget(self, shards: Sequence[int]) -> None:
        """A new map, as after MOVED."""
        self.epoch += 1
        for shard in shards:
            self.previous.pop(shard, None)
        self.tell()

    def mover(self, side: Side | None = None, **arguments: Any) -> MoverThread:
        """Start N's mover (or another side's) with the map as it is."""
        arguments.setdefault("token", self.tokens[0] if self.tokens else "")
        made = MoverThread(side or self.n, **arguments)
        self.movers.append(made)
        made.feed(self.message())
        return made

    def moved(self) -> list[int]:
        """What N would report as MOVED."""
        return self.n.member.finished(0, bytes(self.n.worker.store.shards))

    def adopted(self, shards: Sequence[int]) -> bool:
        """Does N accept mutations of them?"""
        return all(self.n.word(shard) & ~MOVING == self.since[shard] for shard in shards)

    def close(self) -> None:
        """End everything; both stores must be sound."""
        for mover in self.movers:
            mover.close()
        for side in (self.n, self.p):
            if side.worker.thread.is_alive():
                with side.worker.frozen() as store:
                    store.apply_pending()
                    check(store)
            side.close()


@contextlib.contextmanager
def pair(tokens: tuple[str, ...] = ()) -> Iterator[Pair]:
    """A Pair, closed afterwards."""
    made = Pair(tokens)
    try:
        yield made
    finally:
        made.close()


class Liar:
    """A scripted previous owner: a stream that answers FREEZE, LIST and FETCH_PREVIOUS as the test says.

    ``script`` maps a request's type to a function (request) -> bytes to send, or None for silence, or an
    exception to close the connection with.
    """

    def __init__(self, script: Mapping[type, Callable[[Any], bytes | None]]) -> None:
        self.script = {M.Hello: lambda _msg: reply(M.Welcome(1, 0, 2, 0, 0, 0, 0, ""), 1), **script}
        self.asked: list[Any] = []
        self.listener = listen_tcp("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._accept, name="test-liar", daemon=True).start()

    @property
    def info(self) -> WorkerInfo:
        """As a map names it."""
        return WorkerInfo(0, 0, 1, 99, 1 << 24, "liar", "", "127.0.0.1", self.port)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                self._open.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        conn = Connection()
        try:
            while data := sock.recv(1 << 16):
                conn.receive_data(data)
                while (frame := conn.next_frame()) is not None:
                    msg = decode(frame)
                    self.asked.append(msg)
                    answer = self.script[type(msg)](msg)
                    if answer is not None:
                        # The script does not know the request's id; every answer carries it at offset 12.
                        sock.sendall(_with_id(answer, frame.request_id))
        except (OSError, ConnectionError):
            pass
        finally:
            sock.close()

    def close(self) -> None:
        """No connection is left."""
        self._closed = True
        for sock in (self.listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class Answer(bytes):
    """Frames and bare bytes of an answer, cut so that each frame's id can be set."""

    parts: list[bytes | tuple[Any, int]]


def answer(*parts: bytes | Any, status: int = 0) -> bytes:
    """An answer of messages and bare bytes, in order."""
    made = Answer()
    made.parts = [part if isinstance(part, bytes) else (part, status) for part in parts]
    return made


def _with_id(data: bytes, request_id: int) -> bytes:
    if not isinstance(data, Answer):
        return data[:12] + struct.pack("<Q", request_id) + data[20:]
    out = b""
    for part in data.parts:
        out += part if isinstance(part, bytes) else reply(part[0], request_id, part[1])
    return out


def honest(values: Mapping[bytes, bytes], *, namespace: str = "default") -> dict[type, Callable[[Any], bytes | None]]:
    """The script of a previous owner that has these values and tells the truth."""

    def freeze(msg: M.Freeze) -> bytes:
        return answer(M.Frozen(msg.shards))

    def list_(msg: M.List) -> bytes:
        asked = set(shards_in(msg.shards))
        found = [(digest, len(value), 0, 3) for digest, value in values.items() if shard_of(digest) in asked]
        return answer(M.Listed(0, found, [M.NamespaceName(3, namespace)]))

    def fetch(msg: M.FetchPrevious) -> bytes:
        found = [values.get(digest, b"") for digest, _ in msg.keys]
        entries = [(int(Status.OK if value else Status.NOT_FOUND), 0, len(value), 0) for value in found]
        bare = b"".join(found)
        return answer(M.Fetched(entries), bare, M.Verdict([0] * len(entries)))

    return {M.Freeze: freeze, M.List: list_, M.FetchPrevious: fetch}


def frozen_channel(port: int) -> Channel:
    """A connection as a mover's, for tests that ask a stream themselves."""
    channel = Channel.tcp("127.0.0.1", port, WAIT_S)
    channel.call(M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, M.Role.MOVER, 0, 0, "default", "", []))
    return channel

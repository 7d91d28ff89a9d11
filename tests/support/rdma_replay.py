"""A recorded arena, store by store, under a client's READs: time passes between two steps of the network.

A ``StoreTrace`` runs operations of a real store (puts, deletes, a shard that leaves and comes back). It keeps each word
that they store to the segment, in order, and the words of the values as they land; and it knows which value was current
at each point. A ``TraceReplay`` replays it under ``rdma_get``, on a connection whose server end is no process, but two
calls. There is one thread, so the seed determines everything.

Here a READ may last for a thousand stores, which no hardware does; what a replay finds may be rare on hardware.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pytest

import simm.rdma.registration
import simm.sdk.rdma_connection
from simm.arena.hashing import shard_of
from simm.arena.layout import HEADER_BYTES
from simm.config.client_options import ClientOptions
from simm.constants import SET_BYTES
from simm.errors import TransportError
from simm.host.buffers import Copier
from simm.ipc.steps import finish
from simm.rdma.api import FENCED_READ, Access, QueuePairAddress
from simm.rdma.staging import StagingPool
from simm.sdk import rdma_get
from simm.sdk.batch import Batch
from simm.sdk.path import ClientContext, ClientRdma
from simm.sdk.rdma_pool import RdmaPath
from simm.wire import messages as M
from simm.wire import rdma_messages as R
from tests.support.client_checks import forget
from tests.support.fake_fabric import FakeNetwork, all_closed
from tests.support.invariants import InvariantViolation
from tests.support.store_world import ALL_SHARDS, Value, World, bytes_of, digest_of, new_segment, remove_segment
from tests.support.trace_replay import Tape

A, B = digest_of("A"), digest_of("B")
SEGMENT_BYTES: Final = 8 << 20
VALUE_BYTES: Final = 128
FOREVER: Final = 3600.0
#: The operations of a trace: on A, but for "other".
OVERWRITES: Final = ("put",)
SHARDS: Final = ("put", "put", "other", "shard", "freeze")
EVERYTHING: Final = ("put", "put", "put", "put", "other", "delete", "shard", "freeze")


class StoreTrace:
    """The words that a store stored.

    ``stores``: (byte, eight bytes) in order; ``right[n]``: the values of A that are current around the n-th, None for
    "none". ``cuts``: where half of a value has landed, and where a commit is over.
    """

    def __init__(self, seed: int, length: int, does: Sequence[str] = EVERYTHING) -> None:
        rng = random.Random(seed)
        self.segment = new_segment(SEGMENT_BYTES)
        self.stores: list[tuple[int, bytes]] = []
        self.right: list[tuple[bytes | None, ...]] = []
        self.cuts: list[int] = []
        try:
            world = World(self.segment, slots=16)
            self._record(world, rng, length, does)
        except BaseException:
            remove_segment(self.segment)
            raise

    def _record(self, world: World, rng: random.Random, length: int, does: Sequence[str]) -> None:
        player = world.join()
        world.put(player, A, VALUE_BYTES)
        self._tape = Tape.of(world)
        self.geometry = world.geometry
        self.first = bytes(self.segment.buf)
        shard = shard_of(A)
        without = bytearray(ALL_SHARDS)
        without[shard >> 3] &= ~(1 << (shard & 7))
        fills: list[tuple[int, int, bytes]] = []
        world.fill = lambda *fill: fills.append(fill)  # type: ignore[method-assign]

        def put(key: bytes) -> None:
            (number,) = self._do(world, lambda: world.grant(player, VALUE_BYTES), rng)
            self._land(*fills.pop(), rng)
            self.cuts.append(len(self.stores) - VALUE_BYTES // 16)
            self._do(world, lambda: world.commit(player, number, key, VALUE_BYTES), rng)
            self.cuts.append(len(self.stores))

        while len(self.stores) < length:
            before = self._value(world)
            what = rng.choice(does)
            if what in ("put", "other"):
                put(A if what == "put" else B)
            elif what == "delete":
                self._do(world, lambda: world.delete(A), rng)
            else:
                if what == "freeze":
                    self._do(world, lambda: world.store.freeze(world.epoch + 1, [shard]), rng)
                    self._lose(before, HEADER_BYTES + 8 * shard)
                    for _ in range(3):
                        put(B)
                self._do(world, lambda: world.set_shards(bytes(without)), rng)
                self._lose(before, HEADER_BYTES + 8 * shard)
                before = None
                self._do(world, lambda: world.set_shards(ALL_SHARDS), rng)
            self._mark(before, self._value(world))
        self.segment.buf[:] = self.first
        world.store.release()

    @staticmethod
    def _value(world: World) -> bytes | None:
        value = world.values.get(A)
        return bytes_of(Value(value.token, VALUE_BYTES)) if value is not None else None

    def _do(self, world: World, operation: Callable[[], Any], rng: random.Random) -> Any:
        """Run an operation and keep the words that it stored; those of one instruction in any order."""
        result = self._tape.record(operation)
        frames = [np.frombuffer(frame.meta, np.uint64) for frame in self._tape.frames if not frame.torn]
        for old, new in itertools.pairwise(frames):
            words = np.flatnonzero(old != new).tolist()
            rng.shuffle(words)
            self.stores += [(8 * word, new[word].tobytes()) for word in words]
        return result

    def _land(self, offset: int, chunk: int, token: bytes, rng: random.Random) -> None:
        """Keep the words of a client's WRITE, in any order."""
        data = (token * (chunk // len(token) + 1))[:chunk]
        stores = [(offset + at, data[at : at + 8]) for at in range(0, chunk, 8)]
        rng.shuffle(stores)
        self.stores += stores

    def _mark(self, *values: bytes | None) -> None:
        self.right += [values] * (len(self.stores) - len(self.right))

    def _lose(self, value: bytes | None, word: int) -> None:
        """Mark the value as wrong from the moment when the shard word is not ours: others may store newer values."""
        start = len(self.right)
        gone = next((at for at in range(start, len(self.stores)) if self.stores[at][0] == word), start)
        self.right += [(value,)] * (gone - start)
        self._mark(None)

    def rewind(self) -> None:
        """Restore the segment as it was at the start."""
        self.segment.buf[:] = self.first

    def close(self) -> None:
        """Remove the segment."""
        remove_segment(self.segment)


class _Server:
    """The server's end of an RDMA connection's control connection: in the same thread, and without a worker."""

    def __init__(self, network: FakeNetwork, trace: StoreTrace, rails: int) -> None:
        self.fabric = network.fabric([f"s{number}" for number in range(rails)])
        self.trace = trace
        address = ctypes.addressof(ctypes.c_char.from_buffer(trace.segment.mm))
        size = trace.geometry.size
        rights = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
        self.regions = [
            R.RdmaRegion(number, R.REGION_WRITABLE, 0, size, address, rail.register(address, size, rights).rkey)
            for number, rail in enumerate(self.fabric.rails)
        ]


class _Connection:
    """Stands for a Channel."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._links = itertools.count()
        self.deadline_s = 0.0
        self.broken = ""
        self._on_push: Any = None

    def call(self, msg: Any) -> Any:
        server = self._server
        if isinstance(msg, M.Hello):
            return M.Welcome(1, 0, 0, 0, 1, 1, 1 << 20, "")
        if isinstance(msg, R.RdmaOpen):
            rails = [
                R.RdmaRail(rail.gid, rail.lid, rail.mtu, rail.limits.reads, rail.name) for rail in server.fabric.rails
            ]
            return R.RdmaOpened(server.trace.geometry.size, 1, 0, rails, server.regions)
        if isinstance(msg, R.RdmaConnect):
            qp = server.fabric.rails[msg.rail].queue_pair()
            qp.connect(QueuePairAddress(msg.gid, msg.lid, msg.qpn, msg.psn, msg.mtu, msg.reads))
            mine = qp.address()
            return R.RdmaConnected(next(self._links), mine.lid, mine.gid, mine.qpn, mine.psn, mine.mtu, mine.reads)
        raise TransportError(f"nobody answers {type(msg).__name__}")

    def submit(self, msg: Any) -> Any:
        return self.call(msg)

    def wait(self, number: Any) -> Any:
        return number

    def result(self, frame: Any) -> Any:
        return frame

    def bound(self, until: float | None = None) -> None:
        pass

    def foreign_server(self, _trusted: Any) -> str:
        return ""

    def poll_pushes(self) -> None:
        pass

    def fail(self, why: str) -> None:
        raise TransportError(why)

    def close(self) -> None:
        pass


class TraceReplay:
    """Replays a trace under a client's reads; a context manager."""

    def __init__(
        self, trace: StoreTrace, seed: int, monkeypatch: pytest.MonkeyPatch, *, rails: int = 1, jumps: bool = False
    ) -> None:
        self.trace = trace
        #: Time passes in leaps, see ``_leap``, and each read looks its location up again.
        self.jumps = jumps
        self.rng = random.Random(seed)
        self.network = FakeNetwork(seed, between=self._between)
        server = _Server(self.network, trace, rails)
        self._server = server
        monkeypatch.setattr(simm.sdk.rdma_connection.Channel, "tcp", lambda *_arguments: _Connection(server))
        self.fabric = self.network.fabric([f"c{number}" for number in range(rails)])
        self.staging = StagingPool()
        trace.rewind()
        self.at = self._pace = self._wait = self._leaps = 0
        self.path = RdmaPath(
            ClientContext(
                ClientOptions(namespace="world", deadline_s=FOREVER),
                rdma=ClientRdma(fabric=lambda: self.fabric, staging=self.staging),
            ),
            ("nowhere", 1),
        )
        self.hits = self.misses = self.left = 0
        self.copier = Copier()
        self.counters = {"rdma_gets": 0, "rdma_retries": 0, "rdma_fallbacks": 0}
        self.network.between = None
        assert self.path.connect(FOREVER + 1e9), self.path.down_reason
        self.network.between = self._between

    def __enter__(self) -> TraceReplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.network.between = None
        self.path.close()
        self.staging.close()
        simm.rdma.registration.close_dropped()
        self.fabric.close()
        self._server.fabric.close()
        all_closed(self.network)

    def _between(self) -> None:
        """Let time pass: nothing for a while, then some stores at once or one by one."""
        if self.jumps:
            self._leap()
            return
        if self._wait > 0:
            self._wait -= 1
            return
        self._wait = int(self.rng.expovariate(1) * self._pace)
        self.advance(1 if self.rng.random() < 0.7 else self.rng.randrange(1, 60))

    def _leap(self) -> None:
        """Let puts come at the worst moments.

        One is committed while the sets are READ; half of the next one has landed when the value is READ, and it is
        committed while the slot is READ last.
        """
        qp = self.fabric.fakes[0].queue_pairs[-1]
        if not qp.queue:
            return
        looking = any(flight.op[3] == SET_BYTES for flight in qp.queue)
        last = qp.queue[0].op[0] == FENCED_READ and qp.begun
        now = self._leaps
        if (
            (now == 0 and looking and self.rng.random() < 0.01)
            or (now == 1 and not looking)
            or (now == 2 and last and self.rng.random() < 0.2)
        ):
            self._leaps += 1
            self._to_cut(now == 1)

    def _to_cut(self, half: bool) -> None:
        """Advance to where half of a value has landed, or a commit is over."""
        cuts = self.trace.cuts[0 if half else 1 :: 2]
        self.advance(next((cut for cut in cuts if cut > self.at), self.at) - self.at)

    def advance(self, count: int) -> None:
        """Advance by ``count`` stores."""
        stores, buf = self.trace.stores, self.trace.segment.buf
        until = min(self.at + count, len(stores))
        for at, data in stores[self.at : until]:
            buf[at : at + len(data)] = data
        self.at = until

    def read(self) -> None:
        """Get A once.

        Raises:
            InvariantViolation: the value was never right for this read.
        """
        if self.at > len(self.trace.stores) - 300:
            self.trace.rewind()
            forget(self.path.locations)
            self.at = 0
        self._pace = self.rng.choice((1, 3, 10, 30, 100, 300))
        if self.jumps:
            forget(self.path.locations)
            self._leaps = 0
            if self.at not in self.trace.cuts[1::2]:
                self._to_cut(False)
        elif self.rng.random() < 0.7:
            self.advance(self.rng.randrange(40))
        start = self.at
        batch = Batch([A], [None])
        left, _ = finish(rdma_get.read(self.path, [0], batch, self.copier, None, self.counters))
        results = batch.results
        if left:
            self.left += 1
        elif not results[0]:
            self.misses += 1
        else:
            self.hits += 1
            right = set(itertools.chain.from_iterable(self.trace.right[max(0, start - 1) : self.at + 1]))
            if results[0] not in right:
                known = any(results[0] in values for values in self.trace.right)
                torn = len({results[0][at : at + 16] for at in range(0, VALUE_BYTES, 16)}) > 1
                raise InvariantViolation(
                    "a torn value" if torn else "an old or a future value" if known else "another's bytes"
                )


def reads(
    trace: StoreTrace, seed: int, monkeypatch: pytest.MonkeyPatch, count: int, **more: Any
) -> Iterator[TraceReplay]:
    """After each of so many GETs, the replay."""
    with TraceReplay(trace, seed, monkeypatch, **more) as replay:
        for _ in range(count):
            replay.read()
            yield replay

"""Leases of pinned values at a real stream against a reference model: every read is the pinned version, or is refused.

The model remembers which bytes each handle stands for. A value with a pin must come; one without may be TORN once its
key has changed, and comes as long as it has not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from simm.arena.hashing import Hasher
from simm.net.channel import Channel
from simm.server import stream_get
from simm.server.stream_get import Lease, Leased
from simm.slab import chunk_bytes_for
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.consistency import check
from tests.support.dose import dose, dosed
from tests.support.waiting import wait_until
from tests.support.worker_thread import StreamThread, WorkerThread

digest_of = Hasher("default")
KEYS = [digest_of(f"k{number}") for number in range(12)]
SIZES = (3, 5000, 70_000, 600_000)


class Client:
    """A connection, and what its handles stand for: key, value, number of its version, whether it has a pin."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.handles: dict[int, tuple[bytes, bytes, int]] = {}


class Wrong(AssertionError):
    """The stream and the model differ."""


class Model:
    """Clients of one stream, and the versions of all keys."""

    def __init__(self, worker: WorkerThread, stream: StreamThread, seed: int) -> None:
        self.worker, self.stream = worker, stream
        self.rng = random.Random(seed)
        self.writer = stream.channel()
        self.clients: list[Client] = []
        self.values: dict[bytes, bytes] = {}
        #: Changes of each key.
        self.changes = dict.fromkeys(KEYS, 0)
        self.kept = self.torn = 0

    def close(self) -> None:
        for channel in (self.writer, *(each.channel for each in self.clients)):
            channel.close()

    # -- operations -------------------------------------------------------------------------------

    def step(self) -> None:
        """Do something at random."""
        what = self.rng.random()
        if what < 0.3:
            self.put(self.rng.choice(KEYS))
        elif what < 0.4:
            self.delete(self.rng.choice(KEYS))
        elif what < 0.5:
            self.flood()
        elif not self.clients or (what < 0.55 and len(self.clients) < 4):
            self.clients.append(Client(self.stream.channel()))
        elif what < 0.7:
            self.pin(self.rng.choice(self.clients))
        elif what < 0.9:
            self.fetch(self.rng.choice(self.clients))
        elif what < 0.97:
            self.unpin(self.rng.choice(self.clients))
        else:
            self.leave()

    def put(self, key: bytes) -> None:
        value = self.rng.randbytes(self.rng.choice(SIZES))
        number = self.writer.submit(M.Store([(key, len(value), 0, 0, 0)]))
        self.writer.sock.sendall(value)
        self.changes[key] += 1
        self.values.pop(key, None)
        if self.writer.result(self.writer.wait(number)).statuses == [Status.OK]:
            self.values[key] = value
        self.note_evicted()

    def delete(self, key: bytes) -> None:
        self.writer.call(M.Delete([key]))
        self.changes[key] += 1
        self.values.pop(key, None)

    def flood(self) -> None:
        """Store other values, so that some keys are evicted and their chunks are others'."""
        for number in range(6):
            value = self.rng.randbytes(600_000)
            submitted = self.writer.submit(M.Store([(digest_of(f"flood {number}"), len(value), 0, 0, 0)]))
            self.writer.sock.sendall(value)
            self.writer.result(self.writer.wait(submitted))
        self.note_evicted()

    def note_evicted(self) -> None:
        there = self.writer.call(M.Exists(KEYS)).statuses
        for key, status in zip(KEYS, there):
            if status != Status.OK and self.values.pop(key, None) is not None:
                self.changes[key] += 1

    def pin(self, client: Client) -> None:
        keys = self.rng.choices(KEYS, k=self.rng.randint(1, 5))
        for key, (status, _, length, _, handle, *_) in zip(keys, client.channel.call(M.Pin(0, keys)).entries):
            if status == Status.NOT_FOUND:
                self.note_evicted()  # grants that are made ahead of need may have evicted it
            value = self.values.get(key)
            if (status == Status.OK) != (value is not None):
                raise Wrong(f"PIN answered {status}, and the model has {'a' if value is not None else 'no'} value")
            if value is not None:
                if length != len(value) or handle in client.handles:
                    raise Wrong(f"a value of {len(value)} bytes has {length}, and handle {handle}")
                client.handles[handle] = key, value, self.changes[key]

    def fetch(self, client: Client) -> None:
        """Read ranges by some handles, and by one that is none."""
        handles = self.rng.sample(sorted(client.handles), min(3, len(client.handles))) + [1 << 40]
        wants = []
        for handle in handles:
            size = len(client.handles[handle][1]) if handle in client.handles else 1
            offset = self.rng.randrange(size)
            wants.append((offset, self.rng.randint(1, size - offset)))
        pinned = self.pinned()
        number = client.channel.submit(M.FetchPinned([(handle, 1) for handle in handles], wants))
        entries = client.channel.result(client.channel.wait(number)).entries
        got: list[Any] = []
        for (status, *_), (_, length) in zip(entries, wants):
            room = bytearray(length if status == Status.OK else 0)
            if room:
                client.channel.receive_bulk(memoryview(room))
            got.append(bytes(room))
        verdict = client.channel.result(client.channel.wait(number)).statuses
        for handle, (offset, length), (status, *_), judged, data in zip(handles, wants, entries, verdict, got):
            if handle not in client.handles:
                if status != Status.NOT_FOUND:
                    raise Wrong(f"a handle that is none has status {status}")
                continue
            key, value, change = client.handles[handle]
            if status != Status.OK:
                raise Wrong(f"a value of the lease has status {status}")
            if judged == Status.OK:
                self.kept += change != self.changes[key]
                if data != value[offset : offset + length]:
                    raise Wrong("other bytes than those of the version that was pinned")
                continue
            self.note_evicted()
            if change == self.changes[key] or (client.channel.sock.getsockname(), handle) in pinned:
                raise Wrong(f"verdict {judged} for a value that is there")
            self.torn += 1

    def unpin(self, client: Client) -> None:
        handles = self.rng.sample(sorted(client.handles), min(2, len(client.handles)))
        if client.channel.call(M.Unpin([*handles, 1 << 50])).items != len(handles):
            raise Wrong("the stream knows other handles than the client")
        for handle in handles:
            del client.handles[handle]

    def leave(self) -> None:
        client = self.clients.pop(self.rng.randrange(len(self.clients)))
        client.channel.close()
        self.wait_noticed()

    # -- what the stream says -----------------------------------------------------------------------

    def leases(self) -> dict[Any, Lease]:
        """Return the leases of the clients by their addresses. Nothing is in flight."""
        return {
            peer.sock.getpeername(): peer.context.lease for peer in list(self.stream.loop.peers)
            if peer.context.lease is not None
        }  # fmt: skip

    def pinned(self) -> set[tuple[Any, int]]:
        """Return the handles that have a pin, by address."""
        return {
            (address, handle)
            for address, lease in self.leases().items()
            for handle, each in lease.values.items()
            if each.pin
        }

    def wait_noticed(self) -> None:
        wait_until(lambda: len(self.stream.loop.peers) == len(self.clients) + 1, "the stream has noticed who left")

    def check(self) -> None:
        """Compare all counts."""
        self.wait_noticed()
        leases = self.leases()
        for client in self.clients:
            lease = leases.get(client.channel.sock.getsockname())
            if set(lease.values if lease is not None else ()) != set(client.handles):
                raise Wrong("the stream has other values than the client")
        values: list[Leased] = [each for lease in leases.values() for each in lease.values.values()]
        sizes = sum(each.found.length for each in values if each.pin)
        counted = self.stream.stream.leases
        # A peer that has left is none any more before its lease ends.
        wait_until(
            lambda: (counted.keys, counted.bytes) == (len(values), sizes),
            f"{len(values)} values and {sizes} bytes are there, and as many are counted",
        )
        chunks = sum(chunk_bytes_for(each.found.length) for each in values if each.pin)

        def same() -> bool:
            with self.worker.frozen() as store:
                check(store)
                if sizes > store.sessions.pinned_bytes_max:
                    raise Wrong("more is pinned than may be")
                return bool(store.sessions.pinned_bytes == chunks)

        wait_until(same, "the worker has the pins that the stream has")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(stream_get, "PINNED_SHARE", 16)  # the largest values find no room for a pin
    with WorkerThread(16 << 20) as worker, StreamThread(worker.path) as stream:
        made: list[Model] = []

        def model(seed: int) -> Model:
            made.append(Model(worker, stream, seed))
            return made[-1]

        yield model
        for each in made:
            each.close()


@pytest.mark.parametrize("seed", dose(range(4), quick=1))
def test_random_operations(make: Any, seed: int) -> None:
    model = make(seed)
    for turn in range(dosed(500, quick=200)):
        model.step()
        if turn % 50 == 49:
            model.check()
    assert model.kept and model.torn, "nothing was shown"
    while model.clients:
        model.leave()
    model.check()


def test_mutation_without_the_verdict(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased, "is_whole", lambda _: True)
    model = make(1)
    with pytest.raises(Wrong, match="other bytes"):
        for _ in range(3000):
            model.step()

"""Processes that write at random into all they can map of an arena, and clients that judge what they get meanwhile.

Each is told lines on its stdin and goes on until that ends; then it says in JSON what it has done.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from simm.arena.layout import HEADER_BYTES, HEADER_WORDS, SHARDS_BYTES, Geometry
from simm.client import Client
from simm.errors import SimmError, UsageError
from simm.ipc.session import WorkerSession
from simm.sdk.ops.pins import Pins
from simm.shm import AttachedSegment

#: Keys of a judge, and bytes of their values.
KEYS: Final = 60
SIZES: Final = (1, 100, 4096, 20_000, 70_000, 300_000)
#: A scribbler writes so many pieces, of so many bytes, and then pauses for so long, at most.
BURST: Final = 300
PIECE: Final = 64
PAUSE_S: Final = 0.02

Write = Callable[[int, bytes], None]


def told(timeout_s: float = 0.0) -> str | None:
    """Return a line from stdin, "" at its end, or None if there is none yet."""
    if not select.select([sys.stdin], [], [], timeout_s)[0]:
        return None
    return sys.stdin.readline()


# -- clients ----------------------------------------------------------------------------------------------


def value_of(key: str) -> bytes:
    """Return the one value that a key ever has."""
    rng = random.Random(key)
    return rng.randbytes(rng.choice(SIZES))


class Judge:
    """A client that puts and gets in every way, and compares."""

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.values = {key: value_of(key) for key in (f"{name} {number}" for number in range(KEYS))}
        self.counts = {"puts": 0, "refused": 0, "hits": 0, "misses": 0, "wrong": 0, "calls": 0}
        self.wrong: list[str] = []
        self.longest_s = 0.0

    def look(self, key: str, got: bytes | None, how: str) -> None:
        """Compare an answer with what was stored."""
        if got is None:
            self.counts["misses"] += 1
        elif got == self.values[key]:
            self.counts["hits"] += 1
        else:
            self.counts["wrong"] += 1
            at = next((at for at, (one, two) in enumerate(zip(got, self.values[key])) if one != two), -1)
            self.wrong.append(f"{how} {key}: {len(got)} of {len(self.values[key])} bytes, other from {at} on")

    def look_at(self, keys: list[str], pins: Pins) -> None:
        """Read the values of these keys from pins, and compare."""
        rooms = [bytearray(length or 1) for length in pins.lengths]
        with contextlib.suppress(UsageError):  # a spoilt slot may name more bytes than a value has
            got = pins.get_ranges_many(range(len(keys)), [[(0, len(room), room)] for room in rooms])
            for key, room, length in zip(keys, rooms, got):
                self.look(key, None if length is None else bytes(room), "pins")

    def put(self, keys: list[str]) -> bool:
        """Put values; return True if all were taken."""
        done = self.client.put_many(keys, [self.values[key] for key in keys])
        self.counts["puts"] += sum(done)
        self.counts["refused"] += len(done) - sum(done)
        return all(done)

    def note(self, began: float) -> float:
        """Note what a call has taken. Return when the next one begins."""
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - began)
        return now

    def step(self, rng: random.Random) -> None:
        """Do one call, of any kind."""
        began = time.monotonic()
        some = rng.sample(list(self.values), rng.choice((1, 3, 20)))
        kind = rng.randrange(9)
        if kind < 2:
            self.put(some)
        elif kind < 4:
            for key, got in zip(some, self.client.get_many(some)):
                self.look(key, got, "get_many")
        elif kind == 4:
            self.look(some[0], self.client.get(some[0]), "get")
        elif kind == 5:
            buffer = bytearray(max(SIZES))
            with contextlib.suppress(UsageError):  # the length that a spoilt slot names does not fit
                length = self.client.get_into(some[0], buffer)
                self.look(some[0], None if length is None else bytes(buffer[:length]), "get_into")
        elif kind == 6:
            with self.client.pin(some) as pins:
                began = self.note(began)  # each call has a deadline of its own
                self.look_at(some, pins)
                began = self.note(began)
        elif kind == 7:
            self.client.exists_many(some)
            self.client.delete(some[0])
        else:
            with self.client.view(some[0]) as view:  # of the memory itself: nobody says that it stays as it is
                view.data.tobytes() if view else None
        self.counts["calls"] += 1
        self.note(began)


def judge(manager: str, token: str, path: str, checksum: str) -> None:
    """Do as a client until stdin ends. Answer each line with the counts so far."""
    rng = random.Random(path + checksum)
    with Client(
        manager, namespace="judged", token=token or None, path=path, deadline_s=5.0, checksum=checksum == "checksum"
    ) as client:
        one = Judge(client, f"{path} {checksum}")
        while (line := told()) != "":
            if line is not None:
                report = {**one.counts, "longest_s": one.longest_s, "paths": client.stats()["workers"][0]["path"]}
                print(json.dumps({**report, "examples": one.wrong[:5]}), flush=True)
            one.step(rng)


# -- scribblers -------------------------------------------------------------------------------------------


def run(places: list[tuple[int, int, int, Write]], between: Callable[[random.Random], None] | None = None) -> None:
    """Write at random until stdin ends. A place: how often it is chosen, from where to where, and how to write."""
    rng = random.Random()
    weights = [weight for weight, *_ in places]
    writes = 0
    print("begun", flush=True)
    while told(rng.random() * PAUSE_S) != "":
        for _ in range(rng.randrange(BURST)):
            _, start, stop, write = rng.choices(places, weights)[0]
            piece = rng.randbytes(rng.randint(1, PIECE))
            if stop - start <= HEADER_BYTES + SHARDS_BYTES and rng.random() < 0.3:  # values that mean something there
                piece = rng.choice((b"\0", b"\xff", b"\1")) * len(piece)
            at = rng.randrange(start, stop)
            write(at, piece[: stop - at])
            writes += 1
        if between is not None:
            between(rng)
    print(json.dumps({"writes": writes}), flush=True)


def into(memory: memoryview) -> Write:
    """Return a way to write into a map."""

    def write(at: int, piece: bytes) -> None:
        memory[at : at + len(piece)] = piece

    return write


def owner(server: str) -> None:
    """Write into both files of an arena, which a process of the server's own user opens by their names."""
    (meta,) = (path for path in Path("/dev/shm").iterdir() if f"-{server}-" in path.name and path.suffix != ".data")
    whole = []
    for path in (meta, meta.with_name(f"{meta.name}.data")):
        with open(path, "r+b") as file:
            whole.append(memoryview(mmap.mmap(file.fileno(), 0)))
    metadata, data = whole
    geometry = Geometry.read(metadata[:HEADER_BYTES].cast("Q"), len(metadata) + len(data), meta.name)
    shards_end, ledger = HEADER_BYTES + SHARDS_BYTES, geometry.ledger_offset
    write = into(metadata)
    run([
        (2, 0, HEADER_WORDS * 8, write), (2, HEADER_BYTES, shards_end, write), (20, shards_end, ledger, write),
        (10, ledger, len(metadata), write), (10, 0, len(data), into(data)),
        (2, geometry.data_bytes, len(data), into(data)),
    ])  # fmt: skip


def member(uds: str) -> None:
    """Write into what a member of the group is given: the data's descriptor and map, and commit rings of its own."""
    taken: list[int] = []
    real = AttachedSegment.from_fd

    def from_fd(name: str, fd: int) -> AttachedSegment:
        taken.append(os.dup(fd))
        return real(name, fd)

    AttachedSegment.from_fd = staticmethod(from_fd)  # type: ignore[assignment]
    session = WorkerSession(uds, "attack", 60.0)
    with contextlib.suppress(PermissionError):
        os.open(f"/dev/shm/{session.reader.name}", os.O_RDWR)
        raise AssertionError("he may open the metadata for writing")
    data = taken[0]
    size = os.fstat(data).st_size
    wild: list[WorkerSession] = []

    def scribble_on_a_ring(rng: random.Random) -> None:
        """The worker ends a session whose ring makes no sense; then there is another one."""
        with contextlib.suppress(SimmError):
            if not wild or wild[0].broken:
                for each in wild:
                    each.close(clean=False)
                wild[:] = [WorkerSession(uds, "attack", 10.0)]
            ring = wild[0].ring
            assert ring is not None
            for _ in range(rng.randrange(8)):
                piece = rng.randbytes(rng.randint(1, PIECE))
                at = rng.randrange(len(ring._map) - PIECE)
                ring._map[at : at + len(piece)] = piece
            wild[0].channel.poll_pushes()

    by_descriptor: Write = lambda at, piece: (os.pwrite(data, piece, at), None)[1]  # noqa: E731
    values = session.reader.geometry.data_bytes
    run([
        (10, 0, values, into(memoryview(mmap.mmap(data, size)))), (10, 0, size, by_descriptor),
        (5, values, size, by_descriptor),
    ], scribble_on_a_ring)  # fmt: skip


def main(kind: str, *arguments: Any) -> None:
    """Be a judge, an owner or a member."""
    {"judge": judge, "owner": owner, "member": member}[kind](*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])

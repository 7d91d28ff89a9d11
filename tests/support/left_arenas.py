"""Arenas that servers have left, whole and damaged, and servers with names of their own that find them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from simm.arena.layout import (
    HEADER_BYTES,
    NAMESPACE_LINE_BYTES,
    NAMESPACES,
    SESSION_LINE_BYTES,
    UNDO_BYTES,
    State,
    Word,
)
from simm.arena.ledger import GRANT
from simm.arena.store import Store
from simm.client import Client
from simm.constants import SHARD_COUNT
from simm.ipc import segments as ipc_segments
from simm.ipc.arena_files import OwnedArena, new_generation
from simm.ipc.segments import ArenaName, metadata_of
from simm.net.loop import Loop
from simm.server.worker import Worker, WorkerSettings
from simm.shm import data_name
from simm.wire.messages import ShardRole
from tests.support.consistency import check
from tests.support.processes import Cluster, new_folder
from tests.support.shards import set_shards
from tests.support.waiting import wait_until

MIB = 1 << 20
KEYS = 50
CLUSTER = 0xC1


def name_of(server: str, number: int = 0, instance: int = 0xABC) -> str:
    return str(ArenaName(os.geteuid(), server, number, instance))


def values_in(store: Store) -> dict[bytes, bytes]:
    """Digest -> bytes of all entries."""
    found = {}
    for slot in store.table:
        entry = store.table.entry(slot)
        found[entry.digest] = bytes(store._whole[entry.offset : entry.offset + entry.length])
    return found


def digest_of(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest()


def put_some(store: Store, count: int, size: int = 3000) -> None:
    """Values by a client that has ended, and grants and pins that one has left."""
    session = store.sessions.open(os.getpid(), 1, "some")
    for number, (grant, offset, _chunk) in enumerate(store.sessions.grant(session, size, count)):
        value = hashlib.blake2b(b"%d" % number, digest_size=60).digest() * (size // 60)
        store._whole[offset : offset + len(value)] = value
        assert store.commit(session, [(digest_of(number), grant, len(value), 0, 0, 0)]) == [0]
    store.apply_pending()
    store.sessions.grant(session, 5000, 3)
    assert store.locate(session, [digest_of(1)])[0][0] == 0


def owner_of_all(epoch: int) -> tuple[int, bytes, bytes]:
    """What a map says that gives a worker everything since its epoch."""
    return epoch, array("Q", [epoch] * SHARD_COUNT).tobytes(), bytes([ShardRole.OWNER]) * SHARD_COUNT


def clean(server: str) -> list[str]:
    """Remove what a server has left."""
    return ipc_segments.remove_old([left.name for left in ipc_segments.left_by(server)])


def make_suspended(
    name: str, count: int = 200, size: int = 8 * MIB, epoch: int = 5, cluster: int = CLUSTER, slots: int = 0
) -> dict[bytes, bytes]:
    """An arena as a server with ``--warm`` leaves it; its values."""
    segment = OwnedArena.create(name, size, slots=slots)
    segment.populate(huge=False)
    store = Store.create(segment.mm, generation=new_generation(), slots=slots)
    set_shards(store, *owner_of_all(epoch), cluster)
    put_some(store, count)
    values = values_in(store)
    assert len(values) == count
    store.header[Word.STATE] = State.SUSPENDED
    store.release()
    segment.close()
    return values


def make_arena(name: str, size: int = 8 * MIB, state: int = State.OPEN) -> OwnedArena:
    """As a data server leaves it, and still held."""
    segment = OwnedArena.create(name, size)
    segment.populate(huge=False)
    store = Store.create(segment.mm)
    store.header[Word.STATE] = state
    store.release()
    return segment
Damage = Callable[[bytearray], bytearray | None]


def header_word(word: int, change: Callable[[int], int]) -> Damage:
    def damage(raw: bytearray) -> None:
        words = memoryview(raw)[:HEADER_BYTES].cast("Q")
        words[word] = change(words[word])

    return damage


def ledger_bytes(raw: bytearray, at: int, new: bytes) -> None:
    with memoryview(raw)[:HEADER_BYTES].cast("Q") as words:
        start = words[Word.LEDGER_OFFSET] + UNDO_BYTES + at
    raw[start : start + len(new)] = new


def grant_line(raw: bytearray, pid: int, offset: int) -> None:
    """Add a session of this process to the ledger, and a grant of it at this offset."""
    with memoryview(raw)[:HEADER_BYTES].cast("Q") as words:
        lines = words[Word.SESSION_LINES]
    at = NAMESPACES * NAMESPACE_LINE_BYTES
    ledger_bytes(raw, at, struct.pack("@QQQQ", 1, pid, 1, 0))
    ledger_bytes(raw, at + lines * SESSION_LINE_BYTES, struct.pack("@QQQII", 7, 1, offset, 4096, GRANT))


#: What is seen before anything of ours is mapped, and what the reason says.
SEEN: dict[str, tuple[Damage, str]] = {
    "the next layout": (header_word(Word.VERSION, lambda version: version + 1), "arena layout"),
    "the previous layout": (header_word(Word.VERSION, lambda version: version - 1), "arena layout"),
    "cut short": (lambda raw: raw[: 4 * MIB], "contradicts itself or its size of 4194304"),
    "cut short by a byte": (lambda raw: raw[:-1], "contradicts itself or its size"),
    "longer": (lambda raw: raw + bytes(2 * MIB), "contradicts itself or its size"),
    "another size in its header": (header_word(Word.SIZE, lambda size: size * 2), "contradicts itself"),
    "fewer sets": (header_word(Word.SETS, lambda sets: sets - 64), "no SiMM chooses"),
    "more sets": (header_word(Word.SETS, lambda sets: sets + (1 << 40)), "contradicts itself"),
    "another ledger": (header_word(Word.HOLD_LINES, lambda lines: lines - 1), "no SiMM chooses"),
}
#: What recovery gives up without losing a value.
HARMLESS: dict[str, Damage] = {
    "a namespace with an endless name": lambda raw: ledger_bytes(raw, 0, (1 << 40).to_bytes(8, "little")),
    "a namespace that is no text": lambda raw: ledger_bytes(raw, 8, b"\xff\xff"),
    "a session of a process that cannot be": lambda raw: grant_line(raw, 1 << 31, 1 << 20),
    "a session of a process beyond all numbers": lambda raw: grant_line(raw, (1 << 64) - 1, 1 << 20),
    "a grant beyond all numbers": lambda raw: grant_line(raw, 1, (1 << 64) - 1),
    "a grant before the data": lambda raw: grant_line(raw, 1, 0),
}


def spoil(path: Path, damage: Damage) -> None:
    """Change the bytes of an arena, whose metadata lies at ``path``; no page of it is a hole afterwards."""
    files = (path, path.with_name(data_name(path.name)))
    raw = bytearray(b"".join(file.read_bytes() for file in files))
    size = path.stat().st_size
    raw = damage(raw) or raw
    for file, part in zip(files, (raw[:size], raw[size:])):
        file.write_bytes(part)


def files_of(*names: str) -> list[str]:
    """Return the names of the files of arenas, sorted."""
    return sorted([*names, *map(data_name, names)])


def fit(server: str, *arguments: Any) -> tuple[dict[int, ipc_segments.Left], dict[str, str]]:
    return ipc_segments.fit_for_warm(ipc_segments.left_by(server), *arguments)


def start_warm(name: str, tmp_path: Path) -> dict[bytes, bytes]:
    """What a worker does with an arena that is fit; the values that it serves then. Raises what that raises."""
    segment = OwnedArena.adopt(name)
    loop = Loop()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "w.sock"))
        os.unlink(tmp_path / "w.sock")
        listener.listen()
        try:
            store = Store.recover(segment.mm, name)
            worker = Worker(store, WorkerSettings(name, segment.data.fd), loop)
            worker.start(listener)
            check(store)
            assert store.header[Word.STATE] == State.OPEN
            found = values_in(store)
            set_shards(store, *owner_of_all(9), CLUSTER)
            put_some(store, 50)
            check(store)
            return found
        finally:
            loop.close()
            segment.close()


def segments(*servers: str) -> set[str]:
    """The arenas of servers, by name."""
    found = {metadata_of(name): ArenaName.parse(name) for name in os.listdir("/dev/shm")}
    return {name for name, parts in found.items() if parts is not None and parts.server in servers}


@contextlib.contextmanager
def connected(cluster: Cluster) -> Iterator[Client]:
    """Yield a client that reaches the worker: on a busy machine its first try may come to nothing."""
    with Client(cluster.manager, namespace="arenas", path="shm", deadline_s=30.0) as client:
        wait_until(lambda: client.put("probe", b"probe"), "the worker takes a put")
        yield client


def fill(cluster: Cluster, tag: str = "") -> int:
    """Store KEYS values and return how many were stored."""
    with connected(cluster) as client:
        return sum(client.put(f"key {number}", value_of(number, tag)) for number in range(KEYS))


def value_of(number: int, tag: str) -> bytes:
    return f"{tag} {number} ".encode() * 50


def found(cluster: Cluster) -> list[bytes | None]:
    """Return what a cluster has for each of the keys."""
    with connected(cluster) as client:
        return [client.get(f"key {number}") for number in range(KEYS)]


def all_of(tag: str = "") -> list[bytes | None]:
    return [value_of(number, tag) for number in range(KEYS)]


def stop_server(cluster: Cluster) -> None:
    """SIGTERM to the data server."""
    cluster.processes["dataserver"].end()


@contextlib.contextmanager
def named(name: str, *arguments: str, memory: str = "32M") -> Iterator[Cluster]:
    cluster = Cluster(new_folder(), memory, server_arguments=arguments)
    cluster.name = name
    with cluster:
        yield cluster


def said(cluster: Cluster) -> str:
    return cluster.log("dataserver").read_text(errors="replace")


def the_segment(cluster: Cluster) -> Path:
    (name,) = segments(cluster.name)
    return Path("/dev/shm", name)

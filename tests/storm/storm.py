"""Real servers and clients, and somebody who kills them.

    python -m tests.storm --kills 50 --seconds 120 --seed 7

Writers put, overwrite and delete values of 4 KiB to 4 MiB, three times as much as the arena holds; readers get them
in every form, on both paths; victims are killed in the middle of puts; the worker is killed with -9 again and
again. What is looked for:

* *Torn or foreign bytes.* Each value says its key, length, writer and count, and repeats 16 bytes made of these to
  its end. All of it is looked at.
* *Going back.* Each key has one writer, which counts: no reader may see a lower count than before, and
  the writer none below the last that was acknowledged.
* *Losing.* With ``--fits`` everything fits, nothing is ever evicted, and no victims come: then what a writer was
  told is stored must be there until it deletes it, whatever dies.
* *Leaks.* When all clients have gone, nothing is granted or pinned, and after deleting all keys every byte is free.
* *Contradictions.* A copy of the arena, taken at the end, is recovered and checked.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from simm import messages as M
from simm.channel import Channel
from simm.client import Client
from simm.constants import DEFAULT_NAMESPACE
from simm.errors import SimmError, TransportError
from simm.hashing import Hasher
from simm.local import LocalCluster
from simm.session import WorkerSession
from simm.shm import SHM_DIR
from simm.store import Store

MIB = 1 << 20
TESTS = Path(__file__).resolve().parent.parent
#: Of a storm in which everything fits.
SMALL = (2000, 4096, 5000, 16 << 10, 40_000)
SIZES = (4096, 4096, 5000, 16 << 10, 64 << 10, 100_000, 300_000, MIB, 2 * MIB + 100, 4 * MIB)
KEYS_PER_WRITER = 60
_HEAD = struct.Struct("<QQQQ")
#: How long a worker may take to come back, seconds; a bound for hangs, not a figure.
BACK_S = 30.0


# -- values ------------------------------------------------------------------------------------------


def value_of(key: str, writer: int, count: int, length: int) -> bytes:
    """A value that says what it is at every place."""
    token = blake2b(f"{key} {writer} {count} {length}".encode(), digest_size=16).digest()
    name = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
    head = _HEAD.pack(name, writer, count, length)
    return (head + token * (length // 16 + 1))[:length]


def count_in(key: str, data: bytes | memoryview) -> int:
    """The count of a value that is whole and the key's own; -1 for any other."""
    if len(data) < _HEAD.size:
        return -1
    _, writer, count, length = _HEAD.unpack_from(data)
    if length != len(data):
        return -1
    right = np.frombuffer(value_of(key, writer, count, length), np.uint8)
    return count if np.array_equal(np.frombuffer(data, np.uint8), right) else -1


def keys_of(writer: int) -> list[str]:
    """The keys that only this writer writes."""
    return [f"storm/{writer}/{number}" for number in range(KEYS_PER_WRITER)]


# -- clients: processes of their own ---------------------------------------------------------------------


class Wrongs:
    """What a client must not see, counted, the first few in words."""

    def __init__(self) -> None:
        self.counts = {"wrong": 0, "back": 0, "lost": 0}
        self.said: list[str] = []

    def note(self, what: str, text: str) -> None:
        """Count one."""
        self.counts[what] += 1
        if len(self.said) < 5:
            self.said.append(text)


def write(manager: str, number: int, seed: int, seconds: float, path: str, *, fits: bool) -> dict[str, Any]:
    """Put, overwrite and delete this writer's keys, and look after them."""
    rng = random.Random(f"write {seed} {number}")
    wrongs = Wrongs()
    sizes = SMALL if fits else SIZES
    #: key -> the least count that a get may return
    floor: dict[str, int] = {}
    count = ops = stored = hits = deleted = 0
    with Client(manager, path=path) as client:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            ops += 1
            what = rng.random()
            key = rng.choice(keys_of(number))
            if what < 0.5:
                count += 1
                if client.put(key, value_of(key, number, count, rng.choice(sizes))):
                    floor[key] = count
                    stored += 1
            elif what < 0.6:
                chosen = rng.sample(keys_of(number), 12)
                counts = list(range(count + 1, count + 1 + len(chosen)))
                count = counts[-1]
                values = [value_of(key, number, at, rng.choice(sizes[:5])) for key, at in zip(chosen, counts)]
                for key, at, done in zip(chosen, counts, client.put_many(chosen, values)):
                    if done:
                        floor[key] = at
                        stored += 1
            elif what < 0.65:
                deleted += client.delete(key)
                floor.pop(key, None)
            else:
                misses = client.counters["misses"]
                data = client.get(key)
                if data is None:
                    if fits and key in floor and client.counters["misses"] > misses:
                        wrongs.note("lost", f"{key}: count {floor[key]} was acknowledged and is not there")
                else:
                    hits += 1
                    seen = count_in(key, data)
                    if seen < 0:
                        wrongs.note("wrong", f"{key}: {len(data)} bytes that are no value of it")
                    elif seen < floor.get(key, 0):
                        wrongs.note("back", f"{key}: count {seen}, acknowledged was {floor[key]}")
        outages = client.stats()["outages"]
    return {"ops": ops, "stored": stored, "deleted": deleted, "hits": hits, "outages": outages, **report(wrongs)}


def read(manager: str, number: int, writers: int, seed: int, seconds: float, path: str) -> dict[str, Any]:
    """Get in every form; hold a few views and look at them again later."""
    rng = random.Random(f"read {seed} {number}")
    wrongs = Wrongs()
    floor: dict[str, int] = {}
    ops = hits = 0
    keys = [key for writer in range(writers) for key in keys_of(writer)]
    buffers = [bytearray(4 * MIB) for _ in range(20)]
    views: list[tuple[str, Any, int]] = []

    def look(key: str, data: bytes | memoryview) -> int:
        seen = count_in(key, data)
        if seen < 0:
            wrongs.note("wrong", f"{key}: {len(data)} bytes that are no value of it")
        elif seen < floor.get(key, 0):
            wrongs.note("back", f"{key}: count {seen} after {floor[key]}")
        else:
            floor[key] = seen
        return seen

    with Client(manager, path=path) as client:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            ops += 1
            what = rng.random()
            key = rng.choice(keys)
            if what < 0.4:
                got = client.get_into(key, buffers[0])
                if got is not None:
                    hits += 1
                    look(key, memoryview(buffers[0])[:got])
            elif what < 0.7:
                data = client.get(key)
                if data is not None:
                    hits += 1
                    look(key, data)
            elif what < 0.8:
                chosen = rng.sample(keys, len(buffers))
                for key, buffer, got in zip(chosen, buffers, client.get_into_many(chosen, buffers)):
                    if got is not None:
                        hits += 1
                        look(key, memoryview(buffer)[:got])
            elif what < 0.9:
                client.exists_many(rng.sample(keys, 40))
            else:
                view = client.view(key)
                if view is not None:
                    hits += 1
                    views.append((key, view, look(key, view.data)))
            if len(views) > 2:
                key, view, seen = views.pop(0)
                if count_in(key, view.data) != seen:
                    wrongs.note("wrong", f"{key}: a view's bytes changed")
                view.close()
        outages = client.stats()["outages"]
        for _, view, _ in views:
            view.close()
    return {"ops": ops, "hits": hits, "outages": outages, **report(wrongs)}


def be_killed(manager: str, number: int, seconds: float) -> dict[str, Any]:
    """Put large values without end: whoever kills this finds it in the middle of one."""
    key = f"victim/{number}"
    with Client(manager) as client:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            client.put(key, bytes(4 * MIB))
    return {}


def come_late(uds: str) -> dict[str, Any]:
    """Be stopped in the middle of a copy into a grant; finish it long after, and try to commit it in every way."""
    size = MIB
    session = WorkerSession(uds, DEFAULT_NAMESPACE, BACK_S)
    session.ask([(size, 1)])
    grant = session.take(size)
    assert grant is not None
    data = session.reader.data
    start = grant[1] - session.reader.data_offset
    session.begin_copy()
    data[start : start + size // 2] = b"L" * (size // 2)
    print("stopped", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    data[start + size // 2 : start + size] = b"L" * (size // 2)
    session.end_copy()
    entry = (Hasher(DEFAULT_NAMESPACE)("late"), grant[0], size, 0, 0, 0)
    first = "answered"
    try:
        session.exchange(M.Commit([entry], []))
    except TransportError:
        first = "broken"
    session.close(clean=False)
    second = WorkerSession(uds, DEFAULT_NAMESPACE, BACK_S)
    return {"first": first, "second": second.exchange(M.Commit([entry], [])).statuses[0]}


def report(wrongs: Wrongs) -> dict[str, Any]:
    """For a client's line."""
    return {**wrongs.counts, "said": wrongs.said}


def client_main(arguments: list[str]) -> int:
    """``client ROLE MANAGER-OR-SOCKET NUMBER WRITERS SEED SECONDS PATH``: one line of JSON at the end."""
    role, manager, number, writers, seed, seconds, path = arguments
    if role.startswith("write"):
        result = write(manager, int(number), int(seed), float(seconds), path, fits=role == "write-small")
    elif role == "read":
        result = read(manager, int(number), int(writers), int(seed), float(seconds), path)
    elif role == "come-late":
        result = come_late(manager)
    else:
        result = be_killed(manager, int(number), float(seconds))
    print(json.dumps(result), flush=True)
    return 0


def start_client(
    role: str, manager: str, number: int, *, writers: int, seed: int, seconds: float, path: str = "auto"
) -> subprocess.Popen[str]:
    """A client process."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SIMM_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    words = ["client", role, manager, *map(str, (number, writers, seed, seconds)), path]
    command = [sys.executable, "-m", "storm", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, stdin=subprocess.DEVNULL)


# -- the server, from outside --------------------------------------------------------------------------


class Server:
    """The worker of a local cluster, as somebody sees it who wants to kill it."""

    def __init__(self, cluster: LocalCluster) -> None:
        with Client(cluster.manager) as client:
            if not client.wait_ready(BACK_S):
                raise SimmError("the cluster does not get ready")
            assert client._router is not None
            (target,) = client._router.targets.values()
            assert target.reader is not None
            self.uds = target.info.uds
            self.segment = target.reader.name

    def stats(self, timeout_s: float = BACK_S) -> dict[str, Any]:
        """The worker's counters, as soon as there is one that answers."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                with contextlib.closing(Channel.unix(self.uds, BACK_S)) as channel:
                    stats: dict[str, Any] = json.loads(channel.call(M.Stats(0)).json)
                    return stats
            except TransportError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.002)

    def kill(self) -> float:
        """kill -9; how long until the next worker answered, seconds."""
        pid = self.stats()["pid"]
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        until = began + BACK_S
        while self.stats(until - time.monotonic())["pid"] == pid:
            if time.monotonic() > until:
                raise AssertionError("the worker does not end")
        return time.monotonic() - began

    def check_copy(self) -> Store:
        """Recover a copy of the arena, while the worker stands still, and check all of it."""
        pid = self.stats()["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            data = Path(SHM_DIR, self.segment).read_bytes()
        finally:
            os.kill(pid, signal.SIGCONT)
        memory = mmap.mmap(-1, len(data))
        memory[:] = data
        store = Store.recover(memory, "copy")
        store.check()
        if store.notes:
            raise AssertionError(f"an idle worker's arena needed repair: {store.notes[:3]}")
        return store


@dataclass
class Figures:
    """What came of a storm."""

    ops: int = 0
    stored: int = 0
    deleted: int = 0
    hits: int = 0
    wrong: int = 0
    back: int = 0
    lost: int = 0
    outages: int = 0
    kills: int = 0
    client_kills: int = 0
    evictions: int = 0
    recoveries: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def add(self, result: dict[str, Any]) -> None:
        """A client's line."""
        for name in ("ops", "stored", "deleted", "hits", "wrong", "back", "lost", "outages"):
            setattr(self, name, getattr(self, name) + result.get(name, 0))
        self.said += result.get("said", [])

    def lines(self) -> str:
        """For people."""
        ordered = sorted(self.recoveries) or [0.0]
        return (
            f"operations        {self.ops} ({self.stored} stored, {self.deleted} deleted, {self.hits} hits)\n"
            f"evictions         {self.evictions}, since the last worker's start\n"
            f"workers killed    {self.kills}, clients in the middle of a put {self.client_kills}\n"
            f"back in service   p50 {statistics.median(ordered) * 1e3:.0f} ms, max {ordered[-1] * 1e3:.0f} ms\n"
            f"outages seen      {self.outages}\n"
            f"wrong bytes       {self.wrong}\n"
            f"went back         {self.back}\n"
            f"lost              {self.lost}"
        )


def storm(
    *, kills: int, seconds: float, seed: int, writers: int = 8, readers: int = 16, memory: str = "128M",
    fits: bool = False,
) -> Figures:  # fmt: skip
    """Run one; raises AssertionError where something is wrong that no client can see."""
    rng = random.Random(seed)
    figures = Figures()
    with LocalCluster(memory=memory, arguments=("--streams", "1")) as cluster:
        server = Server(cluster)
        clients: list[subprocess.Popen[str]] = []
        victims: list[subprocess.Popen[str]] = []
        try:
            for role, count in (("write-small" if fits else "write", writers), ("read", readers)):
                for number in range(count):
                    path = "tcp" if number % 4 == 3 else "auto"
                    clients.append(
                        start_client(
                            role, cluster.manager, number, writers=writers, seed=seed, seconds=seconds, path=path
                        )
                    )
            began = time.monotonic()
            while time.monotonic() < began + seconds:
                while len(victims) < 2 and not fits:
                    number = rng.randrange(10)
                    victims.append(
                        start_client(
                            "be-killed", cluster.manager, number, writers=0, seed=seed, seconds=seconds, path="shm"
                        )
                    )
                time.sleep(seconds / (kills + 1) * rng.uniform(0.3, 0.9))
                if figures.kills < kills:
                    figures.recoveries.append(server.kill())
                    figures.kills += 1
                if victims and rng.random() < 0.6:
                    victim = victims.pop(rng.randrange(len(victims)))
                    victim.kill()
                    victim.communicate()
                    figures.client_kills += 1
            for client in clients:
                said, _ = client.communicate(timeout=seconds + 60)
                assert client.returncode == 0, "a client failed: a cache problem went through to the engine"
                figures.add(json.loads(said.splitlines()[-1]))
        finally:
            for process in clients + victims:
                process.kill()
                process.communicate()
        wind_up(cluster, server, figures, list(range(writers)))
    return figures


def wind_up(cluster: LocalCluster, server: Server, figures: Figures, writers: list[int]) -> None:
    """All clients have gone: nothing of theirs is left, and every byte comes back."""
    stats = server.stats()
    figures.evictions = sum(stats["evictions"].values()) + stats["set_evictions"]
    server.kill()  # the stream's session, which lives on, keeps grants ahead of need: a new one has none
    until = time.monotonic() + BACK_S
    while True:
        stats = server.stats()
        if not stats["grants"] and not stats["pins"] and stats["sessions"] <= 1:
            break
        assert time.monotonic() < until, f"dead clients still hold something: {stats}"
        time.sleep(0.05)
    store = server.check_copy()
    with Client(cluster.manager) as client:
        for writer in writers:
            for key in keys_of(writer):
                data = client.get(key)
                if data is not None and count_in(key, data) < 0:
                    figures.wrong += 1
                    figures.said.append(f"{key}: at rest")
                assert (data is not None) == store.contains(client.digest(key)), f"{key}: the reader sees another table"
        keys = [key for writer in writers for key in keys_of(writer)] + [f"victim/{number}" for number in range(10)]
        client.delete_many(keys)
    stats = server.stats()
    assert stats["entries"] == 0, stats
    assert stats["free_bytes"] == stats["data_bytes"] - stats["granted_bytes"], f"bytes are lost: {stats}"
    assert stats["granted_bytes"] == 0, stats

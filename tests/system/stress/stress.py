"""Real servers and clients, and somebody who kills them.

    python -m tests.system.stress --kills 50 --seconds 120 --seed 7

Writers put, overwrite and delete values of 4 KiB to 4 MiB, three times as much as the arena holds; readers get them
in every form, on both paths; victims are killed in the middle of puts; the worker is killed with -9 again and
again. The clients are load processes (``tests.support.load``), which verify every byte and every count. With ``--fits``
everything fits, nothing is ever evicted, and no victims come: then they also verify that nothing gets lost, whatever
dies. This module verifies:

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
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from simm.arena.hashing import Hasher
from simm.arena.layout import HEADER_BYTES, SHARDS_BYTES
from simm.arena.store import Store
from simm.arena.vault import VAULT_BYTES, Vault
from simm.client import Client
from simm.constants import DEFAULT_NAMESPACE
from simm.errors import SimmError, TransportError
from simm.ipc.session import WorkerSession
from simm.net.channel import Channel
from simm.sdk.local_cluster import LocalCluster
from simm.shm import SHM_DIR, data_name
from simm.wire import messages as M
from tests.support.child import Child, module_command
from tests.support.consistency import check
from tests.support.load import FAULTS, LoadProcess, key_of, load, total
from tests.support.values import count_in
from tests.support.waiting import wait_until

MIB = 1 << 20
#: Of a storm in which everything fits.
SMALL = (2000, 4096, 5000, 16 << 10, 40_000)
SIZES = (4096, 4096, 5000, 16 << 10, 64 << 10, 100_000, 300_000, MIB, 2 * MIB + 100, 4 * MIB)
KEYS_PER_WRITER = 60
PREFIX = "storm"
#: Keys that victims put.
VICTIMS = 10
#: How long a worker may take to come back, seconds; a bound for hangs, not a figure.
BACK_S = 60.0
#: Keys of calls that each client makes at least, however busy the machine is.
KEYS_LEAST = 200


# -- clients: processes of their own ---------------------------------------------------------------------


def keys_of(writer: int) -> list[str]:
    """Return the keys that only this writer writes."""
    return [key_of(writer, number, PREFIX) for number in range(KEYS_PER_WRITER)]


def roles(writers: int, readers: int, *, fits: bool) -> list[dict[str, Any]]:
    """Return the settings of all clients: writers that look after their keys, and readers in every form."""
    write = {
        "own_only": True, "sizes": SMALL if fits else SIZES, "batch": 12, "complete": fits,
        "batch_sizes": SMALL if fits else SIZES[:5],
        "mix": {"put": 0.5, "put_many": 0.1, "delete": 0.05, "get": 0.35},
    }  # fmt: skip
    read = {
        "sizes": [4 * MIB], "batch": 20,
        "mix": {"get_into": 0.4, "get": 0.3, "get_into_many": 0.1, "exists_many": 0.1, "view": 0.1},
    }  # fmt: skip
    return [
        {"number": number, "path": "tcp" if number % 4 == 3 else "auto", "writers": writers, **role}
        for role, count in ((write, writers), (read, readers)) for number in range(count)
    ]  # fmt: skip


def victim(manager: str, number: int) -> LoadProcess:
    """Start a client that puts one large value without end: a kill finds it in the middle of a put."""
    return LoadProcess(
        manager, number, path="shm", prefix="victim", keys=1, sizes=[4 * MIB], mix={"put": 1}, constant=True, pause_s=0
    )


def victim_key(number: int) -> str:
    """Return the key of a victim."""
    return key_of(number, 0, "victim")


def late_client(uds: str) -> Child:
    """Start a client that runs :func:`come_late`."""
    return Child(module_command("tests.system.stress", "come-late", uds), name="late client")


def come_late(uds: str) -> dict[str, Any]:
    """Be stopped in the middle of a copy into a grant; finish it long after, and try to commit it in every way."""
    size = MIB
    session = WorkerSession(uds, DEFAULT_NAMESPACE, BACK_S)
    session.ask([(size, 1)])
    grant = session.pool.take(size)
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

    def kill(self) -> tuple[float, float]:
        """kill -9; how long until the next worker was forked, and until it answered, seconds."""
        pid = self.stats()["pid"]
        supervisor = psutil.Process(pid).parent()
        assert supervisor is not None
        before = {child.pid for child in supervisor.children()}
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        until = began + BACK_S
        while not {child.pid for child in supervisor.children()} - before:
            assert time.monotonic() < until, "no worker is started"
            time.sleep(0.002)
        forked = time.monotonic() - began
        while self.stats(until - time.monotonic())["pid"] == pid:
            if time.monotonic() > until:
                raise AssertionError("the worker does not end")
        return forked, time.monotonic() - began

    def wait_at_rest(self) -> dict[str, Any]:
        """Wait until nobody holds anything, and the stream's session is the only one; return the worker's counters."""

        def at_rest() -> dict[str, Any] | None:
            stats = self.stats()
            return stats if not stats["grants"] and not stats["pins"] and stats["sessions"] == 1 else None

        found: dict[str, Any] = wait_until(at_rest, lambda: f"nothing is held: {self.stats()}", BACK_S, 0.05)
        return found

    def check_copy(self) -> Store:
        """Recover a copy of the arena, while the worker stands still, and check all of it."""
        pid = self.stats()["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            data = Path(SHM_DIR, self.segment).read_bytes() + Path(SHM_DIR, data_name(self.segment)).read_bytes()
            vault = copy_of_vault(pid)
        finally:
            os.kill(pid, signal.SIGCONT)
        memory = mmap.mmap(-1, len(data))
        memory[:] = data
        store = Store.recover(memory, "copy", vault=vault)
        check(store)
        if store.notes:
            raise AssertionError(f"an idle worker's arena needed repair: {store.notes[:3]}")
        return store


def copy_of_vault(pid: int) -> Vault:
    """Return a copy of a worker's vault: of its anonymous shared memory, the piece of that size."""
    vault = Vault()
    size = -(-VAULT_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            start, stop = (int(each, 16) for each in line.split(None, 1)[0].split("-"))
            if "/dev/zero" not in line or stop - start != size:
                continue
            memory.seek(start)
            found = memory.read(VAULT_BYTES)
            vault.header[:] = memoryview(found)[:HEADER_BYTES].cast("Q")
            vault.shards[:] = memoryview(found)[HEADER_BYTES : HEADER_BYTES + SHARDS_BYTES].cast("Q")
            vault.ledger[:] = found[HEADER_BYTES + SHARDS_BYTES :]
            if vault.filled:
                return vault
    raise AssertionError(f"process {pid} has no vault")


@dataclass
class Figures:
    """What came of a storm."""

    ops: int = 0
    stored: int = 0
    deleted: int = 0
    hits: int = 0
    wrong: int = 0
    back: int = 0
    raised: int = 0
    lost: int = 0
    late: int = 0
    written: int = 0
    outages: int = 0
    kills: int = 0
    client_kills: int = 0
    evictions: int = 0
    #: Until another worker process was there, and until it answered; seconds after each kill.
    restarts: list[float] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    #: The longest call of a client, seconds.
    longest: float = 0.0
    said: list[str] = field(default_factory=list)

    def add(self, sums: dict[str, Any]) -> None:
        """Take in what all clients counted."""
        for name in ("ops", "stored", "deleted", "hits", "outages", *FAULTS):
            setattr(self, name, sums[name])
        self.said += sums["said"]

    def assert_right(self) -> None:
        """Assert that no client saw what it must not."""
        assert not any(getattr(self, name) for name in FAULTS), self.said

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
            f"lost              {self.lost}\n"
            f"exceptions        {self.raised}"
        )


def storm(
    *, kills: int, seconds: float, seed: int, writers: int = 8, readers: int = 16, memory: str = "128M",
    fits: bool = False,
) -> Figures:  # fmt: skip
    """Run one; raises AssertionError where something is wrong that no client can see."""
    rng = random.Random(seed)
    figures = Figures()
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(memory=memory, arguments=("--streams", "1")))
        server = Server(cluster)
        with load(
            cluster.manager, None, each=roles(writers, readers, fits=fits), seed=seed, prefix=PREFIX,
            keys=KEYS_PER_WRITER, fill=False, pause_s=0,
        ) as clients, contextlib.ExitStack() as started:  # fmt: skip
            victims: list[LoadProcess] = []
            began = time.monotonic()
            while time.monotonic() < began + seconds or figures.kills < kills:
                while len(victims) < 2 and not fits:
                    victims.append(started.enter_context(victim(cluster.manager, rng.randrange(VICTIMS))))
                time.sleep(seconds / (kills + 1) * rng.uniform(0.3, 0.9))
                if figures.kills < kills:
                    forked, served = server.kill()
                    figures.restarts.append(forked)
                    figures.recoveries.append(served)
                    figures.kills += 1
                if victims and rng.random() < 0.6:
                    victims.pop(rng.randrange(len(victims))).kill()
                    figures.client_kills += 1
            for client in clients.clients:
                wait_until(lambda client=client: client.progress()[0] >= KEYS_LEAST, "each client makes calls")  # type: ignore[misc]
            reports = clients.end()
            figures.add(total(reports))
            figures.longest = max(report["longest"] for report in reports)
        wind_up(cluster, server, figures, list(range(writers)))
    return figures


def wind_up(cluster: LocalCluster, server: Server, figures: Figures, writers: list[int]) -> None:
    """All clients have gone: nothing of theirs is left, and every byte comes back."""
    stats = server.stats()
    figures.evictions = sum(stats["evictions"].values()) + stats["set_evictions"]
    server.kill()  # the stream's session, which lives on, keeps grants ahead of need: a new one has none
    server.wait_at_rest()
    store = server.check_copy()
    with Client(cluster.manager, deadline_s=20.0) as client:
        for writer in writers:
            for key in keys_of(writer):
                data = client.get(key)
                if data is not None and count_in(key, data) < 0:
                    figures.wrong += 1
                    figures.said.append(f"{key}: at rest")
                there = store.table.lookup(client.digest(key)) >= 0
                assert (data is not None) == there, f"{key}: the reader sees another table"
        keys = [key for writer in writers for key in keys_of(writer)] + [
            victim_key(number) for number in range(VICTIMS)
        ]
        client.delete_many(keys)
    stats = server.stats()
    assert stats["entries"] == 0, stats
    assert stats["free_bytes"] == stats["data_bytes"] - stats["granted_bytes"], f"bytes are lost: {stats}"
    assert stats["granted_bytes"] == 0, stats

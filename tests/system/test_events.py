"""Events of a real data server: a storm with evictions and deaths of the worker, two indexes, and ``simm events``."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
zmq = pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm import Client  # noqa: E402
from simm.arena.hashing import Hasher  # noqa: E402
from simm.arena.reader import ArenaReader  # noqa: E402
from simm.index.blocks import Blocks  # noqa: E402
from simm.index.publish.publisher import EventPublisher  # noqa: E402
from simm.index.publishers import Publishers  # noqa: E402
from simm.index.sources import Registration, Source  # noqa: E402
from simm.ipc.event_files import EventFile, told_by_servers  # noqa: E402
from tests.support.child import child_environment  # noqa: E402
from tests.support.event_claims import Claims, apply, listed  # noqa: E402
from tests.support.http_page import page  # noqa: E402
from tests.support.processes import Cluster, new_folder, remove_folder  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

KEYS = [f"key {number}" for number in range(3000)]


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(memory="64M", server_arguments=["--events", "1M"])


class Index:
    """An index of its own, with no thought of others."""

    def __init__(self, stream: str, replay: str) -> None:
        self.blocks = Blocks()
        self.publishers = Publishers(self.blocks)
        self.source: Source = self.publishers.register(
            Registration("pool", "m", "simm", endpoint=stream, replay=replay, pool="p")
        )

    def names(self) -> set[int]:
        """Return what it has, empty as long as it says that this may be wrong or is not all."""
        stream = self.publishers.stream(self.source)
        with self.blocks.lock:
            if stream is None or not stream.complete or self.source.stale or self.source.lost:
                return set()
            held = self.blocks.held(1 << 30)
            return {key for holder, keys, _ in held if holder.source is self.source for key in keys.tolist()}


def _names(claims: Claims) -> set[int]:
    return {int.from_bytes(digest[:8], "little") for digest in claims}


def _worker(cluster: Cluster, before: int = 0) -> int:
    """Wait for a worker that serves, another one than before. Return its process."""
    pid = 0

    def serves() -> bool:
        nonlocal pid
        with contextlib.suppress(Exception):
            pid = int(cluster.worker_stats()["pid"])
        return pid not in (0, before)

    wait_until(serves, "a worker", pause_s=0.05)
    return pid


def _stop(pid: int) -> None:
    """Stop a process, and wait until it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the stopped worker")


def test_a_storm(cluster: Cluster, tmp_path: Path) -> None:
    """No claim is ever false: the worker is stopped or killed at any instruction, and the ring compared with the table.

    In the end both indexes have the listing.
    """
    rng = random.Random(5)
    at = f"ipc://{tmp_path}/stream", f"ipc://{tmp_path}/replay"
    publisher = EventPublisher({"rfc1527": at}, "host-7", server=cluster.name)
    ended = threading.Event()

    def publish() -> None:
        while not ended.is_set():
            publisher.turn()

    def store(seed: int) -> None:
        mine = random.Random(seed)
        with Client(cluster.manager) as client:
            while not ended.is_set() and not calm.is_set():
                keys = mine.sample(KEYS, 20)
                client.put_many(keys, [bytes([mine.randrange(256)]) * mine.choice((4096, 40_000, 70_000))] * 20)
                client.delete_many(mine.sample(KEYS, 2))

    calm = threading.Event()
    threads = [threading.Thread(target=publish), *(threading.Thread(target=store, args=(n,)) for n in range(2))]
    indexes: list[Index] = []
    try:
        for thread in threads:
            thread.start()
        indexes += [Index(*at), Index(*at)]
        pid = _worker(cluster)
        (name,) = told_by_servers(cluster.name)
        reader = ArenaReader(name)
        file = EventFile(name)
        claims: Claims = {}
        looked = most = 0
        ring = file.ring
        for number in range(24):
            more = ring.head + rng.randrange(50, 600)
            wait_until(lambda more=more: ring.head > more, "events", pause_s=rng.random() / 100)  # type: ignore[misc]
            if number % 6 == 5:
                looks = publisher.host.looks
                psutil.Process(pid).kill()
                pid = _worker(cluster, pid)
                wait_until(lambda looks=looks: publisher.host.looks > looks, "the publisher looks at the table")  # type: ignore[misc]
                continue
            _stop(pid)
            for _ in range(1000):
                step = file.step()
                apply(claims, step)
                if step.empty and not file.follower.due:
                    break
            real = listed(reader)
            wrong = [each for each in claims if each not in real and not reader.contains(each)]
            looked, most = looked + 1, max(most, len(claims))
            os.kill(pid, signal.SIGCONT)
            assert not wrong
            wait_until(lambda: publisher.host.claims.entries > 0, "claims")
        assert looked > 15 and most > 100
        stats = cluster.worker_stats()
        assert sum(stats["evictions"].values()) > 0 or stats["incarnation"] > 1
        calm.set()
        for thread in threads[1:]:
            thread.join()
        for index in indexes:
            wait_until(lambda index=index: index.names() == _names(listed(reader)) != set(), "the listing", pause_s=0.1)  # type: ignore[misc]
        assert publisher.host.looks >= 4
        # A whole server that ends takes all its claims with it.
        cluster.kill("dataserver")
        for index in indexes:
            wait_until(lambda index=index: index.source.blocks == 0, "the end of all claims")  # type: ignore[misc]
    finally:
        calm.set()
        ended.set()
        for thread in threads:
            thread.join()
        for index in indexes:
            index.publishers.close()
        publisher.close()


@pytest.mark.quick
def test_the_command(cluster: Cluster, tmp_path: Path) -> None:
    at = f"ipc://{tmp_path}/stream", f"ipc://{tmp_path}/replay"
    with Client(cluster.manager, deadline_s=30.0) as client:
        assert all(client.put_many(KEYS[:100], [b"v"] * 100))
        process = subprocess.Popen(
            [sys.executable, "-m", "simm", "events", "--rfc1527", ",".join(at), "--server", cluster.name,
             "--http", "127.0.0.1:0"],
            stdout=subprocess.PIPE, text=True, env=child_environment(),
        )  # fmt: skip
        index = None
        try:
            assert process.stdout is not None
            ready = process.stdout.readline().split()
            assert ready[:2] == ["READY", "events"]
            http = ready[-1].removeprefix("http=")
            index = Index(*at)
            names = [int.from_bytes(digest[:8], "little") for digest in Hasher("default").many(KEYS)]
            wait_until(lambda: index.names() == set(names[:100]), "all values")
            assert all(client.delete_many(KEYS[:30])) and client.put(KEYS[200], b"v")
            wait_until(lambda: index.names() == {*names[30:100], names[200]}, "the changes")
            assert page(http, "/readyz") == (200, "ready\n")
            text = page(http, "/metrics")[1]
            shown = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line[0] != "#"}
            assert shown["simm_publisher_workers"] == 1 and shown["simm_publisher_blocks"] == 71
            assert shown['simm_publisher_peers{form="rfc1527",socket="stream"}'] == 1
            assert shown['simm_publisher_replays_total{form="rfc1527"}'] >= 1 <= shown["simm_publisher_looks_total"]
            assert shown['simm_publisher_changes_total{form="rfc1527"}'] >= 100 + 30 + 1
            stats = cluster.worker_stats()
            assert stats["events"] >= 131 and stats["event_bytes"] == 1 << 20 and stats["event_turns"] == 0
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
            process.stdout.close()  # type: ignore[union-attr]
            if index is not None:
                index.publishers.close()
    assert code == 0


def test_a_server_without_events(tmp_path: Path) -> None:
    folder = new_folder()
    try:
        with Cluster(folder, memory="64M") as cluster:
            assert told_by_servers(cluster.name) == []
    finally:
        remove_folder(folder)

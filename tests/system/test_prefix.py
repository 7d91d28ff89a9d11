"""What is said of a prompt in the store is true: in a storm with evictions and kill -9, when a namespace advances."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm.arena.hashing import Hasher
from simm.arena.reader import ArenaReader
from simm.client import Client
from simm.index.blocks import Blocks
from simm.index.service import Service, asking
from simm.ipc.event_files import told_by_servers
from simm.schemes import registry
from simm.schemes.scheme import Scheme
from tests.support.event_claims import listed
from tests.support.processes import Cluster, new_folder, remove_folder
from tests.support.waiting import wait_until

SCHEME = Scheme("m", "sglang-simm", page=64)
#: Pages of a prompt, and how many of them all prompts begin with.
PAGES, SHARED = 16, 8
SIZES = (20_000, 40_000, 90_000)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    folder = new_folder()
    try:
        with Cluster(
            folder, memory="64M", heartbeat_ms=200, server_arguments=["--events", "1M"],
            manager_arguments=("--epoch-lease-ms", "500"),
        ) as made:  # fmt: skip
            yield made
    finally:
        remove_folder(folder)


def _prompts(count: int) -> list[list[int]]:
    rng = random.Random(7)
    head = [rng.randrange(90_000) for _ in range(64 * SHARED)]
    return [head + [rng.randrange(90_000) for _ in range(64 * (PAGES - SHARED))] for _ in range(count)]


def _stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the stopped process")


def _worker(cluster: Cluster, before: int = 0) -> int:
    """Wait for a worker that serves, another one than before. Return its process."""

    def serving() -> int:
        try:
            pid = int(cluster.worker_stats()["pid"])
        except Exception:
            return 0
        return pid if pid != before else 0

    found: int = wait_until(serving, "a worker", pause_s=0.05)
    return found


def test_no_claim_is_false_in_a_storm(cluster: Cluster) -> None:
    """The worker is stopped, or killed, at any instruction. Then both answers are compared with the arena's listing.

    ``Client.prefix`` and ``POST /query`` of a prompt must name no key that is not there. A worker that was killed is
    not begun again before they have been asked: its arena is as it has left it.
    """
    prompts = _prompts(100)
    keys = [SCHEME.keys(tokens)[0] for tokens in prompts]
    calm = threading.Event()

    def store(seed: int) -> None:
        mine = random.Random(seed)
        with Client(cluster.manager, deadline_s=10.0) as client:
            while not calm.is_set():
                some = mine.choice(keys)
                client.put_many(some, [bytes(mine.choice(SIZES))] * len(some))
                client.delete_many(mine.sample(mine.choice(keys), 1))

    threads = [threading.Thread(target=store, args=(seed,)) for seed in range(2)]
    supervisor = cluster.processes["dataserver"].pid
    with Client(cluster.manager, path="shm", deadline_s=30.0) as asker:
        assert asker.wait_ready(60.0) and registry.register(asker, SCHEME)
        assert asker.put_many(keys[0], [b"v"] * len(keys[0])) and asker.prefix(keys[0]).keys == len(keys[0])
        service = Service(Blocks(), shared=asking(asker))
        digests = {key: Hasher(asker.namespace)(key) for some in keys for key in some}
        (name,) = told_by_servers(cluster.name)
        reader = ArenaReader(name)

        def checked() -> tuple[int, int]:
            """Ask for all prompts while nothing changes. Return how many keys are claimed, and how many of holes."""
            there = listed(reader)
            claimed = holes = 0
            for tokens, mine in zip(prompts, keys):
                found = asker.prefix(mine, group=2)
                stored = [digests[key] in there or reader.contains(digests[key]) for key in mine]
                assert found.exact and all(stored[: found.keys]), (found, stored)
                last = asker.prefix(mine, group=2, exact=False)
                assert all(stored[max(0, last.keys - 2) : last.keys]), "what it has looked at is there, too"
                holes += not all(stored[: last.keys])
                answer: Any = service.query({"model": "m", "token_ids": tokens, "block_size": 16})["shared"]
                if answer is not None:  # else the registration is evicted
                    assert answer["tokens"] == found.keys // 2 * 64
                claimed += found.keys
            return claimed, holes

        claims: list[tuple[int, int]] = []
        try:
            for thread in threads:
                thread.start()
            rng, pid, evicted = random.Random(3), _worker(cluster), 0
            for number in range(8):
                more = cluster.worker_stats()["events"] + rng.randrange(100, 900)
                wait_until(
                    lambda more=more: cluster.worker_stats()["events"] > more, "more events", pause_s=rng.random() / 50
                )  # type: ignore[misc]
                evicted += sum(cluster.worker_stats()["evictions"].values())
                if number % 4 == 3:
                    _stopped(supervisor)  # it would begin another worker
                    psutil.Process(pid).kill()
                    claims.append(checked())
                    os.kill(supervisor, signal.SIGCONT)
                    pid = _worker(cluster, pid)
                    registry.register(asker, SCHEME)
                else:
                    _stopped(pid)
                    claims.append(checked())
                    os.kill(pid, signal.SIGCONT)
            assert evicted > 0, "there was no room for all"
        finally:
            for each in (supervisor, pid):
                if psutil.pid_exists(each):
                    os.kill(each, signal.SIGCONT)
            calm.set()
            for thread in threads:
                thread.join()
        assert sum(claimed > 0 for claimed, _ in claims) > 5, claims
        assert any(holes for _, holes in claims), "a control: there are holes, which only the exact answer sees"
        assert wait_until(lambda: asker.put_many(keys[1], [b"v"] * len(keys[1])) == [True] * len(keys[1]), "calm again")
        assert asker.prefix(keys[1], group=2).keys == len(keys[1])


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_nothing_is_left_of_a_namespace_that_has_advanced(cluster: Cluster, path: str) -> None:
    """In the moment in which ``advance`` returns: for clients by any path, which have not heard of it otherwise."""
    keys = SCHEME.keys(_prompts(1)[0])[0]
    with (
        Client(cluster.manager, namespace="weights", deadline_s=30.0) as one,
        Client(cluster.manager, path=path, namespace="weights", deadline_s=30.0) as other,
    ):
        assert one.wait_ready(60.0) and other.wait_ready(60.0)
        for _ in range(3):
            assert all(one.put_many(keys, [b"v"] * len(keys)))
            wait_until(lambda: other.prefix(keys, group=2).keys == len(keys), "the other client knows the epoch")
            one.advance()
            for client in (one, other):
                assert client.prefix(keys, group=2).keys == 0 == client.prefix(keys, group=2, exact=False).keys

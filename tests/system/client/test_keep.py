"""Kept values on a cluster: the worker is killed in the middle of a scan, and /metrics shows them."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import numpy as np

from simm.client import Client
from tests.support.waiting import wait_until

PAGE = np.ones(128 << 10, np.uint8)
PAGES = 64  # a fifth of what fits


def stored(client: Client, keys: list[str]) -> bool:
    return all(client.put_many(keys, [PAGE] * len(keys)))


def scan(client: Client, name: str, pages: int) -> None:
    for first in range(0, pages, 64):
        keys = [f"{name} {number}" for number in range(first, first + 64)]
        wait_until(functools.partial(stored, client, keys), f"{name} is stored")


def test_kept_values_survive_the_worker_and_a_scan(make_cluster: Any, path: str) -> None:
    cluster = make_cluster(memory="64M", heartbeat_ms=200)
    with Client(cluster.manager, path=path, deadline_s=30.0, namespace="agent") as client:
        assert client.wait_ready(60.0)
        kept = [f"kept {number}" for number in range(PAGES)]
        assert all(client.put_many(kept, [PAGE] * PAGES, ttl=600, keep="hard"))
        scan(client, "before", 512)
        pid = cluster.worker_stats()["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: client.put("again", b"1"), "puts are stored again")
        assert cluster.worker_stats()["pid"] != pid
        scan(client, "after", 1024)
        assert client.exists_many(kept) == [True] * PAGES and client.get(kept[3]) == PAGE.tobytes()
        found = cluster.worker_stats()["kept"]
        assert found["bytes"] == {"agent": {"soft": 0, "hard": PAGES * len(PAGE)}}
        assert client.unkeep(kept) == [True] * PAGES
        scan(client, "last", 1024)
        assert not any(client.exists_many(kept))

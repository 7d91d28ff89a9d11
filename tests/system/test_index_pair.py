"""Two indexes of one store, as processes: each is complete by itself, whichever of them or `simm events` is killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm.arena.hashing import Hasher
from simm.client import Client
from tests.support.child import Child
from tests.support.http_page import ask_json
from tests.support.ports import reserve_port
from tests.support.processes import Cluster
from tests.support.waiting import wait_until

KEYS = [f"key {number}" for number in range(2000)]


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(memory="64M", server_arguments=["--events", "1M"])


def test_each_of_two_indexes_is_complete_by_itself(cluster: Cluster, tmp_path: Path) -> None:
    at = f"ipc://{tmp_path}/stream", f"ipc://{tmp_path}/replay"
    told = [{"endpoint": at[0], "replay_endpoint": at[1], "type": "simm", "pool": "main", "modelname": "m",
             "instance_id": "store"}]  # fmt: skip
    (tmp_path / "publishers.json").write_text(json.dumps(told))
    ports = [reserve_port() for _ in range(2)]

    def events() -> Child:
        command = [sys.executable, "-m", "simm", "events", "--rfc1527", ",".join(at), "--server", cluster.name]
        child = Child(command, name="simm events")
        child.expect("READY events")
        return child

    def index(number: int) -> Child:
        command = [sys.executable, "-m", "simm", "index", "--at", f"127.0.0.1:{ports[number]}",
                   "--register", str(tmp_path / "publishers.json")]  # fmt: skip
        child = Child(command, name="simm index")
        child.expect("READY index")
        return child

    def names(number: int) -> set[int]:
        """What an index has; nothing as long as it says that this may not be all."""
        address = f"127.0.0.1:{ports[number]}"
        (worker,) = ask_json(address, "/workers")
        if not worker["complete"] or worker["stale"]:
            return set()
        return {each for holder in ask_json(address, "/dump")["holders"] for each in holder["seq_hashes"]}

    hashes = dict(zip(KEYS, (int.from_bytes(each[:8], "little") for each in Hasher("default").many(KEYS))))

    def both_have(*keys: str) -> None:
        wanted = {hashes[key] for key in keys}
        for number in range(2):
            wait_until(lambda number=number: names(number) == wanted, f"all of the store in {number}", pause_s=0.1)  # type: ignore[misc]
            asked = {"model": "m", "seq_hashes": [hashes[keys[0]]], "tenant_id": "default", "block_size": 1}
            answer = ask_json(f"127.0.0.1:{ports[number]}", "/query_by_hash", asked)
            assert answer["default"]["pool:main"]["longest_matched"] == 1 and not answer["stale"]

    with ExitStack() as stack, Client(cluster.manager, deadline_s=30.0) as client:
        publisher = stack.enter_context(events())
        indexes = [stack.enter_context(index(number)) for number in range(2)]
        assert all(client.put_many(KEYS[:1000], [b"v"] * 1000))
        both_have(*KEYS[:1000])

        indexes[0].kill()
        assert all(client.delete_many(KEYS[:300])) and all(client.put_many(KEYS[1000:1200], [b"v"] * 200))
        wait_until(lambda: names(1) == {hashes[key] for key in KEYS[300:1200]}, "the other one goes on", pause_s=0.1)
        stack.enter_context(index(0))
        both_have(*KEYS[300:1200])

        publisher.kill()
        assert all(client.delete_many(KEYS[300:400])) and all(client.put_many(KEYS[1200:1300], [b"v"] * 100))
        stack.enter_context(events())
        both_have(*KEYS[400:1300])

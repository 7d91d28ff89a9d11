"""Near copies with real servers: two of them, each of which stands for a host, and clients on both."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simm.client import Client
from simm.errors import UsageError
from simm.sdk.near import copies as near_module
from simm.sdk.near.copies import Near
from simm.sdk.near.promotion import Promotion
from simm.sdk.reads import Gets
from simm.sdk.writes import Puts
from tests.support.fleet import Fleet
from tests.support.processes import new_folder
from tests.support.several_hosts import HostClient, separate
from tests.support.waiting import WAIT_S, wait_until

VALUE = np.arange(20_000, dtype=np.uint8)


@pytest.fixture(scope="module")
def fleet(nothing_is_left: Path) -> Iterator[Fleet]:
    # A server that is silent for ten seconds has died: its shards, and with them the places of copies, would move.
    with Fleet(new_folder(), 2, memory="64M", heartbeat_ms=2000) as made:
        yield made


Make = Callable[..., HostClient]


@pytest.fixture
def make(fleet: Fleet, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a client on one of both hosts, 0 or 1, with a namespace of the test's own and near copies."""
    separate(monkeypatch)
    namespace = f"n{zlib.crc32(request.node.nodeid.encode()):08x}"
    clients: list[HostClient] = []

    def make(host: int, **named: Any) -> HostClient:
        named = {"near_copies": True, "namespace": namespace, "deadline_s": 30.0, **named}
        client = HostClient(fleet.servers[host].name, fleet.manager.address, **named)
        clients.append(client)
        assert client.wait_ready(60)
        return client

    yield make
    for client in clients:
        client.close()


def keys_at(client: HostClient, host: str, count: int, name: str = "key") -> list[str]:
    """Return keys whose owner is a server."""
    keys = (f"{name} {number}" for number in range(100_000))
    owner = client._routes.target
    found: list[str] = []
    for key in keys:
        target = owner(client.digest(key))
        if target is not None and target.info.node == host:
            found.append(key)
            if len(found) == count:
                return found
    raise AssertionError("no such keys")


def far_keys(client: HostClient, count: int, name: str = "key") -> list[str]:
    """Return keys whose owner is not on the client's host."""
    (node,) = {each.info.node for each in client._routes.route if each is not None} - {client._home}
    return keys_at(client, node, count, name)


def near_of(client: HostClient) -> Near:
    assert client._near is not None
    return client._near


def copied(client: HostClient, count: int) -> None:
    """Wait until so many values have been copied or dropped, and nothing waits."""
    near = near_of(client)

    def done() -> bool:
        made = client.counters["near_copies"] + client.counters["near_dropped"]
        return made >= count and not len(near._promotion)

    wait_until(done, lambda: f"{client.counters}")


def put_far(client: HostClient, count: int = 8) -> list[str]:
    keys = far_keys(client, count)
    assert client.put_many(keys, [VALUE + at for at, _ in enumerate(keys)]) == [True] * count
    return keys


def right(client: Client, keys: list[str]) -> bool:
    return client.get_many(keys) == [(VALUE + at).tobytes() for at, _ in enumerate(keys)]


# -- copies are made, and read ---------------------------------------------------------------------------------


def test_the_second_hit_makes_a_copy_and_the_third_reads_it(make: Make) -> None:
    client = make(0)
    keys = put_far(client)
    assert right(client, keys)
    assert len(near_of(client)._promotion) == 0 and client.counters["near_hits"] == 0
    assert right(client, keys)
    copied(client, len(keys))
    assert client.counters["near_copies"] == len(keys)
    assert right(client, keys) and client.counters["near_hits"] == len(keys)
    for at, key in enumerate(keys):
        buffer = bytearray(len(VALUE))
        assert client.get_into(key, buffer) == len(VALUE) and buffer == (VALUE + at).tobytes()
        assert client.get(key) == (VALUE + at).tobytes()
        with client.view(key) as view:
            assert view.data == (VALUE + at).tobytes()
        with pytest.raises(UsageError, match="does not fit"):
            client.get_into(key, bytearray(5))
        part = bytearray(7)
        assert client.get_ranges(key, [(100, 7, part)]) == len(VALUE) and part == (VALUE + at)[100:107].tobytes()
    assert client.counters["near_hits"] == 5 * len(keys) and client.counters["hits"] == 7 * len(keys)
    assert client.counters["misses"] == 0


def test_the_owner_is_not_asked_for_a_value_that_has_a_copy(make: Make, fleet: Fleet) -> None:
    client = make(0)
    keys = put_far(client)
    assert client.prefetch(keys) == len(keys)
    copied(client, len(keys))
    owner = fleet.servers[1]
    os.kill(owner.pid, signal.SIGSTOP)
    streams = [int(pid) for pid in Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()]
    for pid in streams:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert right(client, keys)
    finally:
        for pid in [*streams, owner.pid]:
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: client.exists(keys[0]), "the owner answers again")


def test_all_processes_of_a_host_share_its_copies_and_others_have_their_own(make: Make) -> None:
    first, second, elsewhere = make(0), make(0), make(1)
    keys = put_far(first)
    assert first.prefetch(keys) == len(keys)
    copied(first, len(keys))
    assert right(second, keys) and second.counters["near_hits"] == len(keys)
    assert right(elsewhere, keys) and elsewhere.counters["near_hits"] == 0
    assert elsewhere.prefetch(keys) == 0, "they are there already"


def test_prefetch_by_every_form_and_of_keys_that_are_not_stored(make: Make) -> None:
    client = make(0, checksum=True)
    keys = put_far(client)
    assert asyncio.run(client.prefetch_async(keys[:4])) == 4
    (missing,) = far_keys(client, 1, "not stored")
    assert client.prefetch([keys[4], keys[4], missing, *keys[5:]]) == 6, "one that waits twice is copied once"
    copied(client, 9)
    assert client.counters["near_copies"] == 8 and client.counters["near_dropped"] == 1
    assert right(client, keys) and client.counters["near_hits"] == len(keys)
    assert client.prefetch([]) == 0 and client.get(missing) is None
    with pytest.raises(UsageError):
        client.prefetch([""])
    client.close()
    with pytest.raises(UsageError, match="closed"):
        client.prefetch(keys)


def test_values_of_all_sizes(make: Make) -> None:
    client = make(0)
    sizes = [1, 4096, 300_000, 2 << 20, 3 << 20, 5]
    keys = far_keys(client, len(sizes))
    values = [np.full(size, at + 1, np.uint8) for at, size in enumerate(sizes)]
    assert client.put_many(keys, values) == [True] * len(keys)
    assert client.prefetch(keys) == len(keys)
    copied(client, len(keys))
    assert client.get_many(keys) == [value.tobytes() for value in values]
    assert client.counters["near_hits"] == client.counters["near_copies"] >= 5
    too_large, *_ = far_keys(client, 1, "larger than the share")
    assert client.put(too_large, np.ones(20 << 20, np.uint8)) and client.prefetch([too_large]) == 1
    dropped = client.counters["near_dropped"]
    wait_until(lambda: client.counters["near_dropped"] > dropped, "it is dropped")
    assert len(client.get(too_large) or b"") == 20 << 20


def test_an_operator_changes_the_share_while_a_server_runs(make: Make, fleet: Fleet) -> None:
    """With 0 nothing is fetched to be copied, and ``prefetch`` says so."""
    server = fleet.servers[0]

    def share(percent: str) -> None:
        runtime_dir = fleet.run_folder_seen_from_here(server)
        command = [sys.executable, "-m", "simm", "ctl", "settings", "set", "near_share", percent]
        where = ["--server", server.name, "--runtime-dir", runtime_dir]
        subprocess.run([*command, *where], check=True, capture_output=True, timeout=WAIT_S)

    client = make(0)
    keys = put_far(client)
    near = near_of(client)
    try:
        share("0")
        wait_until(lambda: near._shards() and near._largest() == 0, "the client sees it")
        for _ in range(3):
            assert right(client, keys)
        assert len(near._promotion) == 0 and client.prefetch(keys) == 0 and not near._plain.counters["hits"]
        assert client.counters["near_dropped"] == len(keys) and client.counters["near_hits"] == 0
        assert server.worker_stats()["kept"]["near_max"] == 0
    finally:
        share("10")
    wait_until(near._largest, "the client sees it")
    assert client.prefetch(keys) == len(keys)
    copied(client, 2 * len(keys))
    assert right(client, keys) and client.counters["near_hits"] == len(keys)


def test_a_value_that_is_too_large_is_fetched_once_for_each_get(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not once more for each second get, to be refused by the worker here."""
    client = make(0)
    small, large = far_keys(client, 2)
    assert client.put(small, VALUE) and client.put(large, np.ones(20 << 20, np.uint8))
    wanted: list[bytes] = []
    add = Promotion.add

    def noted(promotion: Promotion, digest: bytes) -> bool:
        wanted.append(digest)
        return add(promotion, digest)

    monkeypatch.setattr(Promotion, "add", noted)
    for _ in range(4):
        assert len(client.get(large) or b"") == client.get_into(large, bytearray(20 << 20)) == 20 << 20
        assert client.get_ranges(large, [(0, 4, bytearray(4))]) == 20 << 20
        assert client.get(small) == VALUE.tobytes()
    copied(client, 1)
    assert set(wanted) == {client.digest(small)} and client.counters["near_dropped"] == 0


def test_a_client_without_them_has_nothing_of_them(make: Make) -> None:
    client = make(0, near_copies=False)
    assert type(client._gets) is Gets and type(client._puts) is Puts and client._near is None
    assert not [name for name in client.counters if name.startswith("near")]
    keys = put_far(client)
    for _ in range(4):
        assert right(client, keys)
    with pytest.raises(UsageError, match="near_copies=True"):
        client.prefetch(keys)
    with pytest.raises(UsageError, match="one copy"):
        make(0, replicas=2)


def test_a_host_without_a_server_says_so_once(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make(0, path="tcp")
    with caplog.at_level(logging.WARNING, "simm.client"):
        keys = far_keys(client, 4)
        assert client.put_many(keys, [VALUE] * 4) == [True] * 4
        assert [client.prefetch(keys), client.prefetch(keys)] == [0, 0]
    assert caplog.text.count("no data server on this host") == 1
    for _ in range(3):
        assert client.get_many(keys) == [VALUE.tobytes()] * 4
    assert client.counters["near_copies"] == client.counters["near_hits"] == 0
    assert client.counters["near_dropped"] == 0 or client.counters["near_dropped"] == 8


def test_a_full_queue_drops_and_says_how_many(make: Make) -> None:
    client = make(0)
    near, keys = near_of(client), put_far(client)
    with near._lock:
        near._promotion = Promotion(most=2)
        near._closed = True  # so that no thread takes them
    assert client.prefetch(keys) == 2 and client.counters["near_dropped"] == len(keys) - 2
    assert right(client, keys) and right(client, keys)


# -- no old value ------------------------------------------------------------------------------------------------


def test_a_delete_reaches_the_copies_of_all_hosts(make: Make) -> None:
    here, there = make(0), make(1)
    far = {id(client): put_far(client) for client in (here, there)}
    for client in (here, there):
        assert client.prefetch(far[id(client)]) == 8
        copied(client, 8)
    for client, other in ((here, there), (there, here)):
        keys = far[id(client)]
        assert other.delete_many(keys[:4]) == [True] * 4 and client.delete_many(keys[4:]) == [True] * 4
        assert client.get_many(keys) == [None] * 8 and client.counters["near_hits"] == 0


def test_without_that_a_deleted_value_is_found_in_its_copy(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(Near, "delete", lambda *_: None)
    with pytest.raises(AssertionError):
        test_a_delete_reaches_the_copies_of_all_hosts(make)


def deleted_meanwhile(make: Make, monkeypatch: pytest.MonkeyPatch) -> list[bytes | None]:
    """Delete values, and their copies, after they were read and before their copies are stored."""
    client, other = make(0), make(1)
    keys = put_far(client)
    store = Near._store

    def late(near: Near, digest: bytes, value: memoryview) -> bool:
        other.delete_many(keys)
        return store(near, digest, value)

    monkeypatch.setattr(Near, "_store", late)
    assert client.prefetch(keys) == len(keys)
    copied(client, len(keys))
    return client.get_many(keys)


def test_a_delete_while_copies_are_made_drops_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert deleted_meanwhile(make, monkeypatch) == [None] * 8


def test_without_the_second_question_they_stay(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(Gets, "stored_many", lambda _, digests, *__: [True] * len(digests))
    assert deleted_meanwhile(make, monkeypatch) != [None] * 8


def test_no_copy_is_read_after_advance_has_returned(make: Make) -> None:
    """With old digests as with new ones. Its control is in tests/unit/arena/marks/test_near.py."""
    client, other = make(0), make(1)
    client.advance()
    wait_until(lambda: client._epoch.epoch, "the client knows the epoch")
    keys = put_far(client)
    assert client.prefetch(keys) == len(keys)
    copied(client, len(keys))

    def all_near() -> bool:
        before = client.counters["near_hits"]
        got = client.get_many(keys)
        assert all(value in (None, (VALUE + at).tobytes()) for at, value in enumerate(got))
        return None not in got and client.counters["near_hits"] == before + len(keys)

    # A lease lapses while the machine is busy: then values are misses, and are not copied either.
    wait_until(all_near, "a lease lets all copies be read")
    digests = [client.digest(key) for key in keys]
    assert other.advance()
    old = client._gets.read_many(digests, [None] * len(keys))
    assert client.get_many(keys) == [None] * len(keys) and not any(type(got) is bytes for got in old)


def test_what_was_read_before_advance_is_not_stored_after_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    client, other = make(0), make(1)
    for first in (True, False):  # a namespace's first advance is another one
        keys = put_far(client)
        store = Near._store
        statuses: list[bool] = []

        def late(
            near: Near, digest: bytes, value: memoryview, store: Any = store, statuses: list[bool] = statuses
        ) -> bool:
            if not statuses:
                other.advance()
            statuses.append(store(near, digest, value))
            return statuses[-1]

        with monkeypatch.context() as patch:
            patch.setattr(Near, "_store", late)

            def tried(keys: list[str] = keys, statuses: list[bool] = statuses) -> list[bool]:
                done = client.counters["near_copies"] + client.counters["near_dropped"]
                assert client.prefetch(keys) == len(keys)
                copied(client, done + len(keys))
                return statuses

            wait_until(tried, "a lease lets values be read")  # of a namespace that has an epoch
        assert not any(statuses) and (not first or len(statuses) == len(keys)), (first, statuses)
        assert client.get_many(keys) == [None] * len(keys)
        wait_until(lambda: client._epoch.epoch == other._epoch.epoch, "the client knows the epoch")


# -- failures -----------------------------------------------------------------------------------------------------


def test_the_death_of_the_worker_here_costs_misses_of_copies_only(make: Make, fleet: Fleet) -> None:
    client = make(0)
    keys = put_far(client)
    assert client.prefetch(keys[:4]) == 4
    copied(client, 4)
    before = fleet.servers[0].worker_pid()
    os.kill(before, signal.SIGKILL)
    client.prefetch(keys)
    for _ in range(5):
        assert right(client, keys)
    wait_until(lambda: fleet.servers[0].succeeded(before), "a new worker")

    def again() -> bool:
        client.prefetch(keys)
        hits = client.counters["near_hits"]
        return right(client, keys) and client.counters["near_hits"] == hits + len(keys)

    wait_until(again, lambda: f"copies of all of them: {client.counters}", pause_s=0.2)


def test_a_bug_of_the_thread_is_logged_and_costs_the_copies(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make(0)
    keys = put_far(client)
    with monkeypatch.context() as patch:
        patch.setattr(near_module, "_has", lambda *_: 1 // 0)
        client.prefetch(keys)
        copied(client, len(keys))
    assert "making near copies" in caplog.text and client.counters["near_copies"] == 0
    client.prefetch(keys)
    copied(client, 2 * len(keys))
    assert right(client, keys) and client.counters["near_hits"] == len(keys)


def test_the_thread_ends_when_there_is_nothing_to_do(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_module, "LINGER_S", 0.01)
    client = make(0)
    keys = put_far(client)
    client.prefetch(keys[:4])
    wait_until(lambda: near_of(client)._thread is None, "the thread has ended")
    client.prefetch(keys)
    copied(client, 8)
    assert right(client, keys)


def test_a_forked_child_copies_too(make: Make) -> None:
    client = make(0)
    keys = put_far(client)
    client.prefetch(keys[:4])
    copied(client, 4)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            wait_until(lambda: client.exists(keys[0]), "it connects again")
            assert client.wait_ready(60)
            done = client.counters["near_copies"] + client.counters["near_dropped"]
            client.prefetch(keys)
            copied(client, done + len(keys))
            hits = client.counters["near_hits"]
            code = 0 if right(client, keys) and client.counters["near_hits"] == hits + len(keys) else 2
            client.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

"""The life of a connection to an RDMA endpoint, and where its client may write."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from simm.arena.layout import HEADER_WORDS, MAGIC, State, Word
from simm.errors import CorruptionError
from simm.wire import rdma_messages as R
from tests.support.consistency import check
from tests.support.endpoint_checks import (
    OK,
    WHERE,
    commit_of_what_is_not_its_own,
    digest_of,
    granted,
    marks_of_use,
    prefetched_grants,
    queue_pairs_of,
    returned_grants,
    stored,
    two_connections,
    written_only_where_granted,
)
from tests.support.endpoint_thread import EndpointThread, Grant, RawConnection, connection
from tests.support.fake_fabric import FakeNetwork, all_closed
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread

# --- the life of a connection ----------------------------------------------------------------------------


def test_the_whole_life_of_a_connection(worker: WorkerThread, network: FakeNetwork) -> None:
    with EndpointThread(worker.path, network, ("s0", "s1")) as server:
        server.ready()
        with connection(server, ((0, 0), (1, 1), (0, 1))) as mine:
            opened = mine.opened
            assert opened.size == worker.segment.size and opened.incarnation == worker.store.incarnation
            assert opened.flags == R.RDMA_WINDOWS
            assert [(rail.name, rail.mtu, rail.reads) for rail in opened.rails] == [("s0", 4096, 16), ("s1", 4096, 16)]
            for qp in range(3):
                header = mine.read(0, 8 * HEADER_WORDS, qp)
                assert int.from_bytes(header[:8], "little") == MAGIC and header[8 * Word.STATE] == State.OPEN
            first, second = mine.grant(5000, 2)
            assert len(first.keys) == 3 and len({*first.keys, *second.keys}) == 6 and first.chunk >= 5000
            for qp in range(3):
                value = bytes([65 + qp]) * 5000
                mine.write(second if qp == 2 else first, value, qp)
            statuses, fresh = mine.commit((digest_of("a"), first, 5000), (digest_of("b"), second, 4999))
            assert statuses == [OK, OK] and not fresh
            assert stored(worker, "a") == b"B" * 5000 and stored(worker, "b") == b"C" * 4999
            stats = server.stats()
            assert (stats["rdma_connections"], stats["queue_pairs"], stats["commits"], stats["granted_bytes"]) == (
                1,
                3,
                2,
                0,
            )
            assert mine.read(first.offset, 5000, 1) == b"B" * 5000, "from where it lies"
            assert mine.channel.call(R.RdmaDisconnect(1)).items == 1
            assert mine.channel.call(R.RdmaDisconnect(1)).items == 0
            assert mine.channel.call(R.RdmaDisconnect(9)).items == 0
            (third,) = mine.grant(100)
            assert third.keys[1] == 0 and third.keys[0] and third.keys[2]
            assert server.stats()["queue_pairs"] == 2
        stats = server.until(lambda stats: not stats["rdma_connections"], "the connection is closed")
        assert stats["queue_pairs"] == 0 and stats["granted_bytes"] == 0 and stats["connections_opened"] == 1
        assert not queue_pairs_of(server)
        wait_until(lambda: granted(worker) == 0, "the grant that was left goes back")


def test_grants_come_with_the_answer_after_the_one_that_wanted_them(server: EndpointThread) -> None:
    prefetched_grants(server)


def test_two_connections(server: EndpointThread, worker: WorkerThread) -> None:
    two_connections(server, worker)


def test_windows_are_younger_than_the_link_that_they_are_bound_to(server: EndpointThread) -> None:
    """After a kill the kernel destroys the youngest objects first, and a queue pair waits for its windows."""
    network = server.endpoint.devices.registration.rails[0].network  # type: ignore[union-attr, attr-defined]
    for _turn in range(3):  # later turns reuse what earlier connections have left
        with connection(server) as one, connection(server) as two:
            for mine in (one, two):
                for grant in mine.grant(4096, 4)[:2]:
                    assert mine.commit((digest_of("k"), grant, 4096))[0] == [OK]
                mine.grant(4096, 4)
            with network.lock:
                bound = [window for qp in queue_pairs_of(server) for window in qp.rail.windows if window.qp is qp]
                assert len(bound) == 12
                assert all(window.born > window.qp.born for window in bound if window.qp is not None)
        server.until(lambda stats: not stats["rdma_connections"], "the connections are closed")
        assert server.stats()["windows"] == 0, "they go with their queue pair"


def test_a_commit_of_what_is_not_its_own(server: EndpointThread, worker: WorkerThread) -> None:
    commit_of_what_is_not_its_own(server, worker)


def test_returned_grants(server: EndpointThread, worker: WorkerThread) -> None:
    returned_grants(server, worker)


# --- who may write where ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHERE)
def test_bytes_are_written_only_where_they_were_granted(
    where: str, server: EndpointThread, worker: WorkerThread
) -> None:
    written_only_where_granted(where, server, worker)


def test_marks_of_use_are_written_by_the_regions_own_key(server: EndpointThread, worker: WorkerThread) -> None:
    marks_of_use(server, worker)


# --- by chance -------------------------------------------------------------------------------------


def test_by_chance_against_a_reference_model(worker: WorkerThread) -> None:
    """Connections open, take grants, write, commit, return and vanish; exactly what the model says is stored."""
    network = FakeNetwork(7, background=True)
    chance = random.Random(8)
    reference: dict[str, bytes] = {}
    with EndpointThread(worker.path, network, ("s0", "s1"), piece_bytes=1 << 20) as server:
        server.ready()
        connections: list[RawConnection] = []
        grants: dict[RawConnection, list[Grant]] = {}
        for turn in range(400):
            what = chance.random()
            if len(connections) < 2 or (what < 0.04 and len(connections) < 4):
                mine = RawConnection(server, chance.choice((((0, 0),), ((0, 0), (0, 1)))))
                connections.append(mine)
                grants[mine] = []
                continue
            mine = chance.choice(connections)
            leased = grants[mine]
            if what < 0.08:
                connections.remove(mine)
                mine.close()
            elif what < 0.3 or not leased:
                leased += mine.grant(chance.choice((64, 1000, 4096, 30_000)), chance.randrange(1, 4))
            elif what < 0.4:
                back = [leased.pop(chance.randrange(len(leased))) for _ in range(chance.randrange(1, len(leased) + 1))]
                assert mine.return_grants(*back) == len(back)
            else:
                entries = []
                for _ in range(chance.randrange(1, min(4, len(leased)) + 1)):
                    grant = leased.pop(chance.randrange(len(leased)))
                    length = chance.randrange(1, grant.chunk + 1)
                    value = chance.randbytes(8) * (length // 8 + 1)
                    mine.write(grant, value[:length], chance.choice([n for n, key in enumerate(grant.keys) if key]))
                    entries.append((f"key{chance.randrange(40)}", grant, value[:length]))
                statuses, fresh = mine.commit(
                    *((digest_of(key), grant, len(value)) for key, grant, value in entries),
                    wants=[(chance.choice((64, 4096)), chance.randrange(3))],
                )
                leased += fresh
                assert statuses == [OK] * len(entries)
                reference.update({key: value for key, _, value in entries})
            server.stats()
            if turn % 40 == 0:
                for key in [f"key{number}" for number in range(40)]:
                    assert stored(worker, key) == reference.get(key)
        for mine in connections:
            mine.close()
        server.until(lambda stats: not stats["rdma_connections"], "all are closed")
    assert granted(worker) == 0
    all_closed(network)


def test_checks_find_what_is_wrong(server: EndpointThread) -> None:
    with connection(server) as mine, connection(server) as other:
        mine.grant(64, 2)
        other.grant(64)
        one, two = server.do(lambda: [peer.context for peer in server.endpoint.leases])
        server.stats()

        def wrong(change: Callable[[], None], undo: Callable[[], None]) -> None:
            def call() -> None:
                change()
                try:
                    with pytest.raises(CorruptionError):
                        check(server.endpoint)
                finally:
                    undo()
                check(server.endpoint)

            server.do(call)

        def add(where: Any, name: str, by: int) -> Callable[[], None]:
            return lambda: setattr(where, name, getattr(where, name) + by)

        wrong(add(one, "granted_bytes", 64), add(one, "granted_bytes", -64))
        wrong(add(server.endpoint, "granted_bytes", 64), add(server.endpoint, "granted_bytes", -64))
        leased = next(iter(one.grants.values()))
        wrong(add(leased, "offset", 64), add(leased, "offset", -64))
        theirs = next(iter(two.grants.values()))
        wrong(lambda: two.grants.update({7: leased}), lambda: two.grants.__delitem__(7))
        wrong(leased.session.begin_copy, leased.session.end_copy)
        bound_window = leased.bound_windows[0]
        wrong(lambda: leased.bound_windows.clear(), lambda: leased.bound_windows.update({0: bound_window}))
        qp = one.queue_pairs[0]
        wrong(lambda: one.queue_pairs.__setitem__(0, None), lambda: one.queue_pairs.__setitem__(0, qp))
        assert theirs.offset != leased.offset

"""What the tests of an RDMA endpoint share: helpers, and the checks that run on a fake network and on real verbs.

A check takes a running endpoint with its worker. ``tests/unit/server/rdma_endpoint`` runs it on a network in software,
``tests/rdma_vm/test_connections.py`` on a kernel's driver.
"""

from __future__ import annotations

import time

import pytest

from simm.arena.hashing import Hasher
from simm.arena.layout import MAGIC, Word
from simm.errors import TransportError
from simm.rdma.api import READ, WRITE, FabricError, Op
from simm.wire import messages as M
from simm.wire import rdma_messages as R
from simm.wire.messages import Status
from tests.support.endpoint_thread import WAIT_S, EndpointThread, Grant, RawConnection, connection
from tests.support.fake_fabric import FakeNetwork, FakeQueuePair
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread

digest_of = Hasher("default")
OK, STALE = Status.OK, Status.STALE_GRANT

#: Where :func:`written_only_where_granted` writes and must be refused.
WHERE = ("a byte more", "no grant", "slots", "header", "ledger", "after commit", "returned", "another connection's")


def stored(worker: WorkerThread, key: str) -> bytes | None:
    """Return a value as any process on the server's host reads it; None for a miss."""
    session = worker.session(ring=False)
    try:
        found = session.reader.locate(digest_of(key))
        return bytes(session.reader.value(found)) if found is not None else None
    finally:
        session.close()


def granted(worker: WorkerThread) -> int:
    """Return the bytes that the worker's sessions hold."""
    with worker.frozen() as store:
        return store.sessions.granted_bytes


def gone(connection: RawConnection) -> None:
    """Wait until the server has closed a control connection; close it if the server's device reports nothing."""
    if not getattr(connection.server.network, "tells", True):
        connection.hang_up()
        return
    end = time.monotonic() + WAIT_S
    with pytest.raises(TransportError):
        while time.monotonic() < end:
            connection.channel.call(M.Ping(1))
            time.sleep(0.005)


def queue_pairs_of(server: EndpointThread) -> list[FakeQueuePair]:
    """Return the server's queue pairs."""
    return [qp for fabric in server.fabrics for rail in getattr(fabric, "fakes", ()) for qp in rail.queue_pairs]


def refused(connection: RawConnection, op: Op) -> None:
    """Check that the device refuses an operation, and that the server's end breaks."""
    with pytest.raises(FabricError) as caught:
        connection.run(0, op)
    assert caught.value.status == "REM_ACCESS_ERR"


def hold_writes(network: FakeNetwork) -> None:
    network.hold(lambda _link, op: op[0] == WRITE)


# -- checks ----------------------------------------------------------------------------------------


def two_connections(server: EndpointThread, worker: WorkerThread) -> None:
    with connection(server) as one, connection(server) as two:
        mine, (theirs,) = one.grant(64, 4), two.grant(64)
        assert not {grant.offset for grant in mine} & {theirs.offset}
        two.write(theirs, b"2" * 64)
        for number, grant in enumerate(mine):
            one.write(grant, bytes([number]) * 64)
        one.close()
        server.until(lambda stats: stats["rdma_connections"] == 1, "one is closed")
        assert two.commit((digest_of("two"), theirs, 64))[0] == [OK] and stored(worker, "two") == b"2" * 64


def commit_of_what_is_not_its_own(server: EndpointThread, worker: WorkerThread) -> None:
    with connection(server) as one, connection(server) as two:
        (mine,), (theirs,) = one.grant(64), two.grant(64)
        two.write(theirs, b"t" * 64)
        unknown = Grant(mine.number + 999, 0, 64, [])
        digest = digest_of("x")
        assert one.commit((digest, theirs, 64), (digest, unknown, 64))[0] == [STALE, STALE], "not of this connection"
        assert one.return_grants(theirs, unknown) == 0
        one.write(mine, b"m" * 64)
        assert one.commit((digest, mine, 64), (digest_of("y"), mine, 64))[0] == [OK, STALE], "spent by the first"
        assert one.commit((digest, mine, 64))[0] == [STALE], "spent"
        assert one.return_grants(mine) == 0
        assert two.commit((digest_of("z"), theirs, 64))[0] == [OK], "and nobody else has spent it"
        assert stored(worker, "x") == b"m" * 64 and stored(worker, "y") is None and stored(worker, "z") == b"t" * 64
        (long,) = one.grant(64)
        assert one.commit((digest, long, 65))[0] == [Status.BAD_REQUEST], "longer than its chunk"
        assert server.stats()["granted_bytes"] == 0
        #: A grant that is prepared and has not been told.
        (spent,) = one.grant(64)
        assert one.commit((digest, spent, 64), wants=[(64, 1)])[1] == []
        (number,) = server.do(
            lambda: [leased.number for peer in server.endpoint.leases for leased in peer.context.prepared]
        )
        assert one.commit((digest, Grant(number, 0, 64, []), 64))[0] == [STALE], "guessed"


def returned_grants(server: EndpointThread, worker: WorkerThread) -> None:
    with connection(server) as mine:
        one, two = mine.grant(1000, 2)
        before = granted(worker)
        assert mine.return_grants(one, one, one) == 1
        assert granted(worker) == before - one.chunk and server.stats()["granted_bytes"] == two.chunk
        mine.write(two, b"2" * 1000)
        assert mine.commit((digest_of("2"), two, 1000))[0] == [OK]


def prefetched_grants(server: EndpointThread) -> None:
    with connection(server) as mine:
        (one,) = mine.grant(4096)
        mine.write(one, b"x" * 4096)
        assert mine.commit((digest_of("k"), one, 4096), wants=[(4096, 2)]) == ([OK], [])
        statuses, fresh = mine.commit()
        assert statuses == [] and len(fresh) == 2
        for grant in fresh:
            mine.write(grant, b"y" * 4096)
        assert mine.commit(*((digest_of(f"k{grant.number}"), grant, 4096) for grant in fresh))[0] == [OK, OK]
        assert len(mine.grant(4096)) == 1, "none is left over"


def written_only_where_granted(where: str, server: EndpointThread, worker: WorkerThread) -> None:
    with connection(server) as mine, connection(server) as other:
        geometry = worker.store.geometry
        (grant,), (theirs,) = mine.grant(4096), other.grant(4096)
        mine.write(grant, b"1" * 4096)
        before = bytes(worker.segment.mm)
        length, key = 8, grant.keys[0]
        offset = {
            "slots": geometry.slots_offset, "header": 8 * Word.HEARTBEAT, "ledger": geometry.slots_offset,
            "another connection's": theirs.offset,
        }.get(where, grant.offset)  # fmt: skip
        region = mine.region(0, offset)
        op = mine.op(WRITE, 0, offset, length, key)
        if where == "a byte more":
            op = mine.op(WRITE, 0, grant.offset + grant.chunk - 7, 8, key)
        elif where == "another connection's":
            op = mine.op(WRITE, 0, offset, length, theirs.keys[0])
        elif where in ("slots", "header", "no grant"):
            op = mine.op(WRITE, 0, offset, length, region.rkey)
        elif where == "ledger":  # next to what is writable, and not registered
            op = (*op[:4], region.address + geometry.ledger_offset - region.start, region.rkey)
        elif where == "after commit":
            assert mine.commit((digest_of("k"), grant, 4096))[0] == [OK]
            before = bytes(worker.segment.mm)
        elif where == "returned":
            assert mine.return_grants(grant) == 1
            before = bytes(worker.segment.mm)
        refused(mine, op)
        gone(mine)
        after = bytes(worker.segment.mm)
        for start, stop in (geometry.slots_offset, geometry.ledger_offset), (geometry.data_offset, geometry.data_end):
            assert after[start:stop] == before[start:stop]
        stats = server.until(lambda stats: stats["rdma_connections"] == 1, "its connection is closed")
        assert stats["connections_broken"] == getattr(server.network, "tells", True)
        other.write(theirs, b"fine" * 1024)
        assert other.commit((digest_of("other"), theirs, 4096))[0] == [OK], "nobody else has suffered"


def marks_of_use(server: EndpointThread, worker: WorkerThread) -> None:
    with connection(server) as mine:
        (grant,) = mine.grant(64)
        mine.write(grant, b"v" * 64)
        assert mine.commit((digest_of("v"), grant, 64))[0] == [OK]
        slot = worker.store.table.lookup(digest_of("v"))
        visited = worker.store.geometry.visited_offset + slot
        worker.segment.mm[visited] = 0
        mine.buffer[0] = b"\x01"
        assert mine.region(0, visited).flags == R.REGION_WRITABLE
        mine.run(0, mine.op(WRITE, 0, visited, 1), mine.op(READ, 0, grant.offset, 8, at=64))
        assert worker.segment.mm[visited] == 1


def worker_dies(worker: WorkerThread, network: FakeNetwork) -> None:
    """Hold grants with a connection over the worker's death, and write into them after it."""
    with EndpointThread(worker.path, network) as server, connection(server.ready()) as mine:
        kept, spent, back = mine.grant(50_000, 3)
        leased = {grant.offset for grant in (kept, spent, back)}
        mine.write(kept, b"k" * 100)
        worker.die()
        assert mine.read(0, 8) == MAGIC.to_bytes(8, "little"), "reads go on"
        mine.write(kept, b"m" * 100)
        refused_by = mine.channel.call(M.Commit([(digest_of("s"), spent.number, 100, 0, 0, 0)], []))
        assert refused_by.statuses in ([STALE], [Status.UNAVAILABLE])
        worker.start()
        wait_until(lambda: server.do(server.endpoint.keeper.worker) is not None, "a session with the new worker")
        server.do(server.endpoint.keeper.maintain)
        endpoint = server.endpoint
        assert server.do(lambda: endpoint.devices.registration.arena is endpoint.keeper.reader), "it is mapped once"
        session = worker.session(ring=False)
        taken = []
        while True:  # all that the new worker has to give
            session.ask([(50_000, 1)])
            grant = session.pool.take(50_000)
            if grant is None:
                break
            taken.append(grant)
            start = grant[1] - session.reader.data_offset
            session.reader.data[start : start + 100] = b"n" * 100
            assert session.commit_one(digest_of(f"n{len(taken)}"), grant[0], 50_000, 0, 0, 50_000, 0) == OK
            if len(taken) > 200:
                break
        assert taken
        mine.write(kept, b"o" * 100)
        assert not {grant[1] for grant in taken} & leased, "the new worker gave away what a connection may write into"
        assert mine.commit((digest_of("k"), kept, 100))[0] == [STALE], "not the new worker's"
        assert mine.return_grants(back) == 1
        server.stats()
        wait_until(lambda: granted(worker) == 0, "the old session is released")
        (fresh,) = mine.grant(100)
        mine.write(fresh, b"f" * 100)
        assert mine.commit((digest_of("f"), fresh, 100))[0] == [OK] and stored(worker, "f") == b"f" * 100
        session.close()

"""An old value that its client gives up, and a newer one that somebody else puts in its place meanwhile."""

from __future__ import annotations

from simm.arena.hashing import Hasher
from simm.ipc.answer_wait import collect
from simm.ipc.grant_pool import GrantTuple, obtain
from simm.ipc.session import WorkerSession
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.worker_thread import WorkerThread

digest_of = Hasher("default")
KEY, OTHER = digest_of("key"), digest_of("other")
OLD, NEW = b"old value.", b"new value."


def filled(session: WorkerSession, value: bytes) -> GrantTuple:
    """A granted chunk with the value."""
    grant = session.pool.take(len(value)) or obtain(session, len(value), 64)
    assert grant is not None
    start = grant[1] - session.reader.data_offset
    session.reader.data[start : start + len(value)] = value
    return grant


def commit(digest: bytes, grant: GrantTuple, value: bytes) -> M.Commit:
    return M.Commit([(digest, grant[0], len(value), 0, 0, 0)], [])


def stored(session: WorkerSession) -> bytes | None:
    """What the key has."""
    found = session.reader.locate(KEY)
    return None if found is None else bytes(session.reader.value(found))


class Newer:
    """Another client, whose doorbell has rung before: its ring is served first when the worker goes on."""

    def __init__(self, worker: WorkerThread) -> None:
        self.session = worker.session()
        grants = [filled(self.session, NEW) for _ in range(3)]
        self.requests = [commit(digest, grant, NEW) for digest, grant in zip((OTHER, KEY), grants)]
        self.tickets: list[int] = []

    def ring(self) -> None:
        self.tickets.append(self.session.submit(self.requests[0]))
        self.session.kick(always=True)

    def put(self) -> None:
        """The newer value."""
        self.tickets.append(self.session.submit(self.requests[1]))

    def check(self) -> None:
        """It is stored, and stays so when all that the rings and sockets had is done."""
        statuses = [int(Status.UNAVAILABLE)] * len(self.tickets)
        collect(self.session, [(ticket, [at]) for at, ticket in enumerate(self.tickets)], statuses)
        assert statuses == [Status.OK] * len(self.tickets)
        self.tickets = []
        for _ in range(3):
            assert self.session.exchange(M.Locate(0, [KEY])).entries[0][0] == Status.OK
        assert stored(self.session) == NEW

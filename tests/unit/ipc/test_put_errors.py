"""What a batch of puts says that it has not sent when an exchange fails: never a value that may have been sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from simm.arena.hashing import Hasher
from simm.errors import TransportError
from simm.host.buffers import Copier
from simm.ipc import put
from simm.ipc import session as session_module
from simm.ipc.put import NOT_SENT, ShmPut
from simm.ipc.session import WorkerSession
from simm.ipc.steps import finish
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.worker_thread import WorkerThread

COUNT = 150
DIGESTS = [*map(Hasher("default"), map(str, range(COUNT)))]
SIZES = {"small": [4096] * COUNT, "large": [256 << 10] * COUNT, "mixed": [100, 4096, 70_000] * (COUNT // 3)}
#: In the place of a status that the batch has not touched.
OPEN = 99


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    session_module.RETIRED.clear()
    with WorkerThread(128 << 20) as running:
        yield running
    session_module.RETIRED.clear()


def unsent_at_each_failure(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, sizes: list[int], together: bool, sends: bool
) -> list[int]:
    """Put a batch again and again, and let the session break at the first request, the second and so on.

    ``sends``: that request is sent. Return how many values were said not to be sent at each. Raises AssertionError
    if one of them was in a COMMIT.
    """
    path = ShmPut(Copier(1), checksum=False)
    values = [memoryview(bytes([number]) * size) for number, size in enumerate(sizes)]
    submit = WorkerSession.submit
    committed: set[bytes] = set()
    calls, fails_at = 0, 10**9

    def failing(self: WorkerSession, msg: Any) -> int:
        nonlocal calls
        calls += 1
        if isinstance(msg, M.Commit):
            committed.update(entry[0] for entry in msg.entries)
        ticket = submit(self, msg) if sends or calls != fails_at else 0
        if calls == fails_at:
            self.give_up("by the test")
            raise TransportError("by the test")
        return ticket

    monkeypatch.setattr(WorkerSession, "submit", failing)
    found: list[int] = []
    for at in range(1, 1000):
        session = worker.session()
        calls, fails_at = 0, 10**9
        finish(path.put_steps(session, DIGESTS, values, range(COUNT), [OPEN] * COUNT, together=together))
        committed.clear()
        calls, fails_at = 0, at
        statuses = [OPEN] * COUNT
        try:
            finish(path.put_steps(session, DIGESTS, values, range(COUNT), statuses, together=together))
        except TransportError:
            unsent = {digest for digest, status in zip(DIGESTS, statuses) if status == NOT_SENT}
            assert not unsent & committed
            assert {*statuses} <= {Status.OK, Status.NO_SPACE, NOT_SENT, OPEN}
            found.append(len(unsent))
        else:
            assert statuses == [Status.OK] * COUNT and len(committed) == COUNT
            session.close()
            return found
        session.close(clean=False)
    raise AssertionError("the batch does not end")


@pytest.mark.parametrize("sends", [False, True], ids=["before it is sent", "afterwards"])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_session_breaks_at_each_request(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, sizes: str, together: bool, sends: bool
) -> None:
    found = unsent_at_each_failure(worker, monkeypatch, SIZES[sizes], together, sends)
    assert len(found) > 2 and max(found) >= COUNT // 2, "most of it, at the first requests"
    assert found[-1] == 0, "nothing, at the last"


@pytest.mark.parametrize(("sizes", "together"), [("small", False), ("large", True)])
def test_control_all_is_said_to_be_unsent(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, sizes: str, together: bool
) -> None:
    """As it would be if what has been committed was not left out."""

    def blind(positions: Any, statuses: list[int]) -> None:
        statuses[:] = [NOT_SENT] * len(statuses)

    monkeypatch.setattr(put, "_not_sent", blind)
    with pytest.raises(AssertionError):
        unsent_at_each_failure(worker, monkeypatch, SIZES[sizes], together, True)

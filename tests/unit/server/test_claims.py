"""What a worker tells of its clients, and whom."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from simm.ipc.counts import Word
from simm.ipc.session import WorkerSession
from simm.net.channel import Channel
from simm.wire import messages as M
from tests.support.worker_thread import WorkerThread


def told(worker: WorkerThread, detail: int, uid: int | None = None) -> dict[str, Any]:
    """Return a worker's answer to STATS, as a process of this user gets it or one of ``uid``."""
    with contextlib.closing(Channel.unix(worker.path, 30.0)) as channel:
        channel.call(M.Ping(1))
        if uid is not None:
            with worker.frozen():
                for peer in worker.worker.loop.peers:
                    if peer.context.session is None and peer.context.role == -1:
                        peer.context.uid, peer.context.role = uid, M.Role.CLIENT
        found: dict[str, Any] = json.loads(channel.call(M.Stats(detail)).json)
        return found


def test_a_worker_tells_its_own_user_of_its_clients() -> None:
    with WorkerThread() as worker:
        session = WorkerSession(worker.path, "some", 30.0)
        try:
            session.counts[Word.HITS] = 7
            with worker.frozen():
                worker.worker.tally.maintain()
            (client,) = told(worker, 1)["clients"]
            assert (client["namespace"], client["kind"], client["believed"]) == ("some", "client", True)
            assert client["counts"]["hits"] == 7 and client["idle_s"] >= 0
            assert "clients" not in told(worker, 0)
        finally:
            session.close()


def test_another_user_is_not_told() -> None:
    with WorkerThread() as worker:
        session = WorkerSession(worker.path, "some", 30.0)
        try:
            assert "clients" in told(worker, 1)
            assert "clients" not in told(worker, 1, uid=54321)
        finally:
            session.close()


@pytest.mark.parametrize("ring", [True, False])
def test_a_session_that_ends_is_not_told_any_more(ring: bool) -> None:
    with WorkerThread() as worker:
        session = WorkerSession(worker.path, "some", 30.0, ring=ring)
        (client,) = told(worker, 1)["clients"]
        assert ("counts" in client) is ring
        session.close()
        with worker.frozen():
            assert not worker.worker.tally.sessions

"""What an RDMA endpoint answers to malformed, early and unwelcome messages."""

from __future__ import annotations

from typing import Any

import pytest

from simm.arena.layout import MAGIC
from simm.arena.marks.near import COMMIT_NEAR
from simm.constants import BATCH_KEYS_MAX, VALUE_BYTES_MAX
from simm.errors import TransportError
from simm.net.channel import Refused
from simm.wire import messages as M
from simm.wire import rdma_messages as R
from simm.wire.messages import Status
from tests.support.endpoint_checks import (
    STALE,
    digest_of,
    gone,
    queue_pairs_of,
    stored,
)
from tests.support.endpoint_thread import EndpointThread, connection, refusal
from tests.support.fake_fabric import FakeNetwork
from tests.support.tokens import old_tokens
from tests.support.worker_thread import StreamThread, WorkerThread

# --- what it is told -------------------------------------------------------------------------------


MALFORMED: dict[str, Any] = {
    "a rail that is not there": R.RdmaConnect(1, 0, bytes(16), 1, 1, 4096, 1),
    "an MTU that is none": R.RdmaConnect(0, 0, bytes(16), 1, 1, 1500, 1),
    "a grant of nothing": M.Grant([(0, 1)]),
    "a grant too large": M.Grant([(VALUE_BYTES_MAX + 1, 1)]),
    "too many grants": M.Grant([(64, BATCH_KEYS_MAX), (64, 1)]),
    "too many wants": M.Commit([], [(64, BATCH_KEYS_MAX + 1)]),
    "a mover's option": M.Commit([(bytes(16), 1, 1, 0, 0, M.ABSENT)], []),
    "a second HELLO": M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, 0, 0, 0, "default", "", []),
    "a FETCH": M.Fetch([]),
    "a DELETE": M.Delete([]),
    "a SHARDS": M.Shards(1, b"", b""),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed(what: str, server: EndpointThread) -> None:
    with connection(server) as mine:
        mine.grant(64)
        with pytest.raises(TransportError):
            mine.channel.call(MALFORMED[what])
        gone(mine)
        stats = server.until(lambda stats: not stats["rdma_connections"], "the connection is closed")
        assert stats["protocol_errors"] == 1 and stats["handler_errors"] == 0 and stats["granted_bytes"] == 0
    with connection(server) as another:
        assert len(another.grant(64)) == 1


EARLY = (M.Grant([(64, 1)]), M.Commit([], []), M.ReturnGrants([1]), R.RdmaConnect(0, 0, bytes(16), 1, 1, 4096, 1))


@pytest.mark.parametrize("msg", EARLY, ids=lambda msg: type(msg).__name__)
def test_too_early(msg: Any, server: EndpointThread) -> None:
    for hello, text in ((False, "HELLO"), (True, "RDMA_OPEN")):
        channel = server.channel(hello=hello)
        assert channel.call(M.Ping(7)).cookie == 7
        with pytest.raises(TransportError, match=text):
            channel.call(msg)
        channel.close()


def test_the_token(worker: WorkerThread, network: FakeNetwork) -> None:
    with EndpointThread(worker.path, network, tokens=old_tokens("one", "two")) as server:
        server.ready()
        server.channel("one").close()
        server.channel("two").close()
        for wrong in ("", "three", "on"):
            assert refusal(lambda wrong=wrong: server.channel(wrong)).status == Status.UNAUTHORIZED  # type: ignore[misc]


def test_an_end_that_no_device_can_reach(server: EndpointThread) -> None:
    with connection(server) as mine:
        refused_with = refusal(lambda: mine.channel.call(R.RdmaConnect(0, 0, b"\xff" * 16, 1, 1, 4096, 1)))
        assert refused_with.status == Status.UNAVAILABLE
        assert server.stats()["queue_pairs"] == 1 == len(queue_pairs_of(server)), "nothing is left of it"
        assert mine.read(0, 8) == MAGIC.to_bytes(8, "little"), "and the connection goes on"


def test_a_worker_that_does_not_answer(
    server: EndpointThread, worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connection(server) as mine:
        one, two = mine.grant(64, 2)
        mine.write(one, b"1" * 64)
        with worker.frozen():
            assert mine.commit((digest_of("1"), one, 64))[0] == [Status.UNAVAILABLE], "an unknown outcome"
            assert mine.read(0, 8) == MAGIC.to_bytes(8, "little")
        assert mine.commit((digest_of("2"), two, 64))[0] == [STALE], "of a session that has ended"
        server.stats()


def test_streams_say_where_the_endpoint_is(worker: WorkerThread) -> None:
    with StreamThread(worker.path) as stream:
        hello = M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, M.Role.CLIENT, 0, 0, "default", "", [])
        channel = stream.channel(hello=False)
        assert channel.call(hello)[2:4] == (M.PathBit.TCP | M.PathBit.TRACE, 0)
        channel.close()
        stream.stream.rdma_port = 4711
        for role, paths, port in (
            (M.Role.CLIENT, M.PathBit.TCP | M.PathBit.RDMA, 4711), (M.Role.MOVER, M.PathBit.TCP, 0),
        ):  # fmt: skip
            channel = stream.channel(hello=False)
            answer = channel.call(hello._replace(role=role))
            assert (answer[2] & ~M.PathBit.TRACE, answer[3]) == (paths, port)
            channel.close()


@pytest.mark.parametrize("status", [Status.NO_SPACE, Status.BAD_REQUEST, Status.UNAVAILABLE])
def test_issue_no_other_namespace_gets_what_a_worker_refuses(
    server: EndpointThread, worker: WorkerThread, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker without room for another name may refuse, and one that is late. They went to "default"."""

    def refusing(name: str, *, bound: bool) -> int:
        raise Refused(status, "no room for another namespace")

    with connection(server) as mine:
        grant, kept = mine.grant(64, 2)
        mine.write(grant, b"v" * 64)
        monkeypatch.setattr(server.endpoint.keeper, "options_of", refusing)
        statuses, _ = mine.commit((digest_of("v"), grant, 64))
        assert statuses == [status] and stored(worker, "v") is None
        monkeypatch.undo()
        mine.write(kept, b"w" * 64)
        assert mine.commit((digest_of("w"), kept, 64))[0] == [Status.OK] and stored(worker, "w") == b"w" * 64


def test_values_are_stored_in_the_namespace_of_their_client(server: EndpointThread, worker: WorkerThread) -> None:
    with connection(server) as mine:
        for namespace in ("default", "another"):
            server.do(lambda name=namespace: setattr(next(iter(server.endpoint.leases)).context, "namespace", name))  # type: ignore[misc]
            (grant,) = mine.grant(64)
            mine.write(grant, bytes(64))
            assert mine.commit((digest_of(namespace), grant, 64))[0] == [Status.OK]
        with worker.frozen() as store:
            entries = [store.table.entry(store.table.lookup(digest_of(name))) for name in ("default", "another")]
            assert [store.ledger.names[entry.namespace] for entry in entries] == ["default", "another"]


def test_what_comes_by_rdma_is_no_near_copy(server: EndpointThread, worker: WorkerThread) -> None:
    with connection(server) as mine:
        (grant,) = mine.grant(64)
        mine.write(grant, bytes(64))
        commit = M.Commit([(digest_of("value"), grant.number, 64, 0, COMMIT_NEAR, 0)], [])
        assert mine.channel.call(commit).statuses == [Status.OK]
        with worker.frozen() as store:
            store.apply_pending()
            assert store.table.lookup(digest_of("value")) >= 0 and not store.near.counts["made"]

"""Calls with more keys than a message may have: clients split them, by each path and for each message with a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from simm.client import Client
from simm.config.tokens import TokenRole
from simm.constants import BATCH_KEYS_MAX
from simm.errors import TransportError
from simm.ipc import session as session_module
from simm.ipc.grant_pool import return_idle
from simm.rpc import CODECS, Codec
from simm.wire.access import LEAST
from tests.support.dose import dosed
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.waiting import wait_until
from tests.support.wire_samples import lists_of

#: Of three parts, in the quick run of two. A client that splits no call sends all at once.
COUNT = dosed(2, quick=1) * BATCH_KEYS_MAX + 100
KEYS = [f"key {number}" for number in range(COUNT)]
VALUES = [number.to_bytes(4, "little") for number in range(COUNT)]
#: What a client sends by shared memory, and by TCP.
SENT_BY = {
    "shm": {"Commit", "Grant", "ReturnGrants", "Delete", "Group", "Keep", "Locate", "Unpin", "ReleaseSessions"},
    "tcp": {"Delete", "Group", "Keep", "Fetch", "FetchRanges", "Pin", "FetchPinned", "Unpin", "Store", "Exists"},
}
#: Only tools, streams, and reads of moved shards send these.
ELSEWHERE = {"Hello", "DeleteSized", "FetchPrevious"}


class Sent:
    """The longest list of each message that was packed, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest: Counter[str] = Counter()
        real = Codec.write

        def write(made: Codec, message: Any) -> bytes:
            for field in lists_of(made):
                name = made.cls.__name__
                self.longest[name] = max(self.longest[name], len(getattr(message, field)))
            return real(made, message)

        monkeypatch.setattr(Codec, "write", write)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    session_module.RETIRED.clear()
    with FakeCluster(1, size=128 << 20) as running:
        running.settled({0: ALL})
        yield running


def test_all_requests_with_lists_are_in_these_tests() -> None:
    names = {
        CODECS[opcode].cls.__name__
        for opcode, role in LEAST.items()
        if role == TokenRole.CLIENT and lists_of(CODECS[opcode])
    }
    assert names == SENT_BY["shm"] | SENT_BY["tcp"] | ELSEWHERE


def use_everything(client: Client, views_at_once: int) -> None:
    assert client.put_many(KEYS, VALUES) == [True] * COUNT
    assert client.get_many(KEYS) == VALUES
    assert client.exists_many(KEYS) == [True] * COUNT
    assert client.keep(KEYS, ttl=60) == [True] * COUNT
    groups = [[f"{{{number}}}a", f"{{{number}}}b"] for number in range(BATCH_KEYS_MAX)]
    assert client.put_groups(groups, [(b"a", b"b")] * len(groups)) == [True] * len(groups)
    buffers = [bytearray(2) for _ in KEYS]
    ranges = [[(1, 2, buffer)] for buffer in buffers]
    assert client.get_ranges_many(KEYS, ranges) == [4] * COUNT
    with client.pin(KEYS) as pins:
        pins.read([(0, 1, [bytearray(1) for _ in KEYS])])
    views = [client.view(key) for key in KEYS[:views_at_once]]
    assert all(views)
    for view in views:
        view.close()
    assert client.delete_many(KEYS) == [True] * COUNT


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_calls_are_split(cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)
    client = cluster.client(path)
    # By shared memory all their pins end in one message. By TCP each view is a fetch of its own.
    use_everything(client, BATCH_KEYS_MAX + 10 if path == "shm" else 10)
    if path == "shm":
        target = client._routes.target(client.digest(KEYS[0]))
        session = target.session if target is not None else None
        assert session is not None
        for _ in range(2):
            session.ask([(64, BATCH_KEYS_MAX)])
        assert return_idle(session) > 0
        session_module.RETIRED.extend(
            session_module.RetiredSession(session.welcome.segment, 1 << 60 | number, [], type(session.unpins)())
            for number in range(COUNT)
        )
        session.release_retired()
        assert not session_module.RETIRED
    wait_until(lambda: sent.longest.keys() >= SENT_BY[path], "all has been sent")
    assert max(sent.longest[name] for name in SENT_BY[path]) <= BATCH_KEYS_MAX


@pytest.mark.parametrize("most", [session_module.RING_GRANTS, 1 << 32], ids=["bound", "control"])
def test_an_answer_that_does_not_fit_the_ring_is_asked_for_by_socket(
    cluster: FakeCluster, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GRANT of 36 bytes fits it, and its answer of 80 KiB ended the session; for an endpoint, that of all clients."""
    monkeypatch.setattr(session_module, "RING_GRANTS", most)
    client = cluster.client("shm")
    assert client.put("k", b"v")
    target = client._routes.target(client.digest("k"))
    session = target.session if target is not None else None
    assert session is not None and session.ring is not None
    if most == 1 << 32:
        with pytest.raises(TransportError):
            session.ask([(64, BATCH_KEYS_MAX)])
        return
    session.ask([(64, BATCH_KEYS_MAX)])
    assert not session.broken and session.pool.count(64) >= BATCH_KEYS_MAX

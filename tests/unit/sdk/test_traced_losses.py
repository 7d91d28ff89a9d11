"""A path that another thread loses while a call looks at it: the call fails by its status, traced or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.client import Client
from simm.ipc.steps import finish
from simm.sdk.tracing.transfers import RdmaTarget, TimedPath
from simm.tracing.spans import Operation
from tests.support.fake_cluster import ALL, FakeCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(1) as running:
        running.settled({0: ALL})
        yield running


@pytest.fixture
def client(cluster: FakeCluster, tmp_path: Path) -> Client:
    made = cluster.client("shm", trace_dir=str(tmp_path))
    assert made.put("k", b"v")
    return made


class Losing:
    """A worker whose paths are there for the first look only."""

    tcp = None

    def __init__(self, path: Any) -> None:
        self._looks: Iterator[Any] = iter([path])

    @property
    def session(self) -> Any:
        return next(self._looks, None)

    rdma = session


def test_issue_a_traced_mutation_whose_session_is_lost_fails(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raised AttributeError into the engine. A traced delete, keep and group are one function."""
    target: Any = client._routes.target(client.digest("k"))
    real = Operation.by

    def lost(operation: Operation, path: str) -> None:
        real(operation, path)
        if (session := target.session) is not None:
            session.give_up("lost")
            target.session = None

    client.trace(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Operation, "by", lost)
        assert not client.delete("k")
    client.trace(None)


def test_a_delete_counts_where_its_session_was(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    puts, statuses = client._puts, [0]
    target: Any = client._routes.target(client.digest("k"))
    losing: Any = Losing(target.session)
    monkeypatch.setattr(puts, "_is_ready", lambda *_: True)
    finish(puts._delete_at([client.digest("k")], None, statuses, set(), losing, (0,), False))
    assert client.exists("k"), "nobody was asked"


def test_a_traced_put_by_rdma_has_the_path_that_it_saw() -> None:
    path, operation = object(), Operation.__new__(Operation)
    seen = RdmaTarget(Losing(path), operation).rdma
    assert type(seen) is TimedPath and seen.real is path

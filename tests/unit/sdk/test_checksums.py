"""Clients with checksums check the bytes that they deliver, not those that they have copied them from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from simm.arena.reader import ArenaReader, Unsettled
from simm.ipc import session as session_module
from simm.ipc.get import ShmGet
from simm.sdk.reads import Gets
from tests.support.fake_cluster import ALL, FakeCluster

VALUE = bytes(range(256)) * 16


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    session_module.RETIRED.clear()
    with FakeCluster(1) as running:
        running.settled({0: ALL})
        yield running


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("checked", ["the copy", "control"])
def test_a_pinned_value_is_checked_once_it_is_copied(
    cluster: FakeCluster, into: bool, checked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process overwrites the arena between the check and the copy. A client got its bytes as a hit.

    The control: a check of the value in place.
    """
    client = cluster.client("shm", checksum=True)
    assert client.put("k", VALUE)
    segment: Any = cluster.nodes[0].worker.segment
    check, locate = ShmGet.check, ArenaReader.locate
    done: list[bool] = []

    def unsettled(reader: ArenaReader, digest: bytes) -> Any:
        locate(reader, digest)
        raise Unsettled

    def then_spoil(gets: ShmGet, flags: int, crc: int, data: Any) -> bool:
        done.append(check(gets, flags, crc, data))
        at = segment.mm.find(VALUE)
        segment.mm[at : at + len(VALUE)] = bytes(len(VALUE))
        return done[-1]

    monkeypatch.setattr(ArenaReader, "locate", unsettled)
    monkeypatch.setattr(ShmGet, "check", then_spoil)
    if checked == "control":
        pinned = Gets._pinned
        monkeypatch.setattr(Gets, "_pinned", lambda gets, target, digest, **_: pinned(gets, target, digest))
    buffer = bytearray(len(VALUE))
    got = (bytes(buffer) if client.get_into("k", buffer) else None) if into else client.get("k")
    assert done == [True] and client.counters["fallbacks"] == 1
    assert got == (bytes(len(VALUE)) if checked == "control" else VALUE)

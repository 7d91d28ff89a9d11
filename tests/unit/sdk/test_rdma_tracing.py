"""Traces of puts by RDMA: what the endpoint says of itself, and that nothing of it stays behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.client import Client
from simm.errors import TransportError
from simm.net.channel import Channel
from simm.rdma.api import FabricError
from simm.rpc import OPCODES
from simm.sdk import rdma_connection
from simm.tracing import spool
from simm.tracing.perfetto import fault_of
from simm.wire import messages as M
from simm.wire import rdma_messages as R
from simm.wire.trace_messages import Timed, Traced, answer_in, traced
from tests.support.fake_rdma_cluster import FakeRdmaCluster, leave_alone, path_of

KEYS = [f"k{number}" for number in range(40)]
TRACE = bytes(range(16))
VALUE = bytes(range(256)) * 64


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRdmaCluster]:
    with FakeRdmaCluster(monkeypatch) as running:
        yield running


def recorded(client: Client) -> list[Any]:
    folder = Path(client._options.trace_dir)
    client.trace(None)
    events, bad, refused, _ = spool.collect(folder)
    assert (bad, refused) == (0, 0) and not [event for event in events if fault_of(event)]
    return events


def names(events: list[Any], of: str, *, server: bool) -> set[str]:
    return {
        event["name"] for event in events
        if event["args"].get("of") == of and bool(event["args"].get("server")) is server
    }  # fmt: skip


def channels(client: Client) -> list[Any]:
    path = path_of(client, 0)
    leave_alone(path)
    return [connection.channel for connection in path._idle]


def test_a_put_has_the_segments_of_its_endpoint(cluster: FakeRdmaCluster, tmp_path: Path) -> None:
    client = cluster.rdma(trace_dir=str(tmp_path / "trace"))
    client.trace(1.0)
    assert client.put_many(KEYS, [VALUE] * len(KEYS)) == [True] * len(KEYS)
    assert all(type(channel) is Channel for channel in channels(client)), "between two calls the connections are plain"
    assert client.get_many(KEYS) == [VALUE] * len(KEYS)
    assert client.put("one", VALUE) and client.get("one") == VALUE
    assert client.exists("one") and client.delete("one") and not client.exists("one")
    assert not client.counters["rdma_fallbacks"], "all of it by RDMA"
    events = recorded(client)
    assert names(events, "put", server=False) == {"rdma", "grant", "write", "commit"}
    assert names(events, "put", server=True) == {"decode", "place", "publish"}
    assert names(events, "get", server=False) == {"rdma", "lookup", "fetch"}
    assert not names(events, "get", server=True), "it asks nobody"
    assert names(events, "delete", server=True) == {"decode", "delete"}, "by TCP"
    assert names(events, "exists", server=False) == {"rdma", "lookup"}
    paths = {event["name"]: event["args"].get("path") for event in events if event["args"].get("op")}
    assert paths == {"put": "rdma", "get": "rdma", "exists": "rdma", "delete": "tcp"}
    by_id = {event["args"]["span_id"]: event for event in events}
    for event in events:
        if not event["args"].get("op"):
            parent = by_id[event["args"]["parent_id"]]
            assert parent["ts"] <= event["ts"] and event["ts"] + event["dur"] <= parent["ts"] + parent["dur"] + 1e-6
    assert len(channels(client)) and all(type(channel) is Channel for channel in channels(client))


def links(client: Client) -> list[Any]:
    path = path_of(client, 0)
    leave_alone(path)
    return [link for connection in path._idle for link in connection.links]


def test_each_transfer_of_a_batch_is_a_segment_in_a_lane_of_its_own(cluster: FakeRdmaCluster, tmp_path: Path) -> None:
    client = cluster.rdma(trace_dir=str(tmp_path / "trace"))
    client.trace(1.0)
    large = bytes(1 << 20)
    keys = [f"large {number}" for number in range(6)]
    assert client.put_many(keys, [large] * len(keys)) == [True] * len(keys)
    assert all(type(link) is rdma_connection.PairedLink for link in links(client)), "plain between two calls"
    assert client.get_many(keys) == [large] * len(keys) and not client.counters["rdma_fallbacks"]
    events = recorded(client)
    for of, name in (("put", "write"), ("get", "fetch")):
        transfers = [event for event in events if event["args"].get("of") == of and event["name"] == name]
        assert len(transfers) > 1 and sum(event["args"]["bytes"] for event in transfers) >= len(keys) << 20
        assert all(event["args"]["lane"] > 0 for event in transfers)
    # Spans of one track either enclose each other or are apart, else Perfetto cannot show them.
    tracks: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        if "lane" in event["args"]:
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert tracks
    for spans in tracks.values():
        spans.sort()
        assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(spans))


def test_large_values_and_ranges_are_read_and_written_as_without_a_trace(
    cluster: FakeRdmaCluster, tmp_path: Path
) -> None:
    client = cluster.rdma(trace_dir=str(tmp_path / "trace"))
    client.trace(1.0)
    large = bytes(range(256)) * (5 << 12)  # more than a staging block
    assert client.put("large", large) and client.get("large") == large
    half = bytearray(1 << 20)
    assert client.get_ranges("large", [(256, len(half), half)]) and half == large[256 : 256 + len(half)]
    assert client.get("nowhere") is None and not client.counters["rdma_fallbacks"]
    events = recorded(client)
    assert {"write", "commit"} <= names(events, "put", server=False)
    assert {"lookup", "fetch"} <= names(events, "get", server=False)
    assert all(type(link) is rdma_connection.PairedLink for link in links(client))


def test_what_is_in_flight_when_a_link_breaks_is_noted(
    cluster: FakeRdmaCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = cluster.rdma(trace_dir=str(tmp_path / "trace"))
    assert client.put("k", VALUE) and client.get("k") == VALUE
    client.trace(1.0)
    for link in links(client):

        def fail(*_: Any) -> None:
            raise FabricError("the cable is out")

        monkeypatch.setattr(link.qp, "wait", fail)
    assert client.get("k") == VALUE, "by TCP"
    assert client.counters["rdma_fallbacks"]
    assert {"fetch", "rdma", "receive"} <= names(recorded(client), "get", server=False)


def test_an_endpoint_of_an_older_version_is_not_asked(
    cluster: FakeRdmaCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greet = rdma_connection.greet
    monkeypatch.setattr(
        rdma_connection, "greet", lambda *arguments: greet(*arguments)._replace(paths=int(M.PathBit.RDMA))
    )
    client = cluster.rdma(trace_dir=str(tmp_path / "trace"))
    client.trace(1.0)
    assert client.put_many(KEYS, [VALUE] * len(KEYS)) == [True] * len(KEYS)
    assert not client.counters["rdma_fallbacks"]
    events = recorded(client)
    assert names(events, "put", server=False) == {"rdma", "grant", "write", "commit"}
    assert not names(events, "put", server=True)


def test_a_connection_that_is_lost_in_a_traced_put_is_closed(cluster: FakeRdmaCluster, tmp_path: Path) -> None:
    client = cluster.rdma(trace_dir=str(tmp_path / "trace"))
    assert client.put("k", VALUE)
    client.trace(1.0)
    for channel in channels(client):
        channel.sock.shutdown(2)
    assert client.put_many(KEYS, [VALUE] * len(KEYS)) == [True] * len(KEYS), "by TCP"
    assert client.counters["rdma_fallbacks"] and client.get_many(KEYS) == [VALUE] * len(KEYS)
    recorded(client)


@pytest.mark.parametrize("msg", [
    traced(TRACE, M.Ping(1)), traced(TRACE, M.Fetch([])), traced(TRACE, R.RdmaDisconnect(0)),
    Traced(TRACE, OPCODES[Traced], b""), Traced(TRACE, OPCODES[M.Commit], b"\xff" * 9), Traced(TRACE, 0xFFFF, b"x"),
], ids=range(6))  # fmt: skip
def test_an_endpoint_takes_commits_and_grants_in_a_trace_and_nothing_else(cluster: FakeRdmaCluster, msg: Any) -> None:
    client = cluster.rdma()
    assert client.put("k", VALUE)
    channel = channels(client)[0]
    answer = channel.call(traced(TRACE, M.Grant([(4096, 1)])))
    assert type(answer) is Timed and isinstance(answer_in(answer), R.RdmaGranted), "control"
    with pytest.raises(TransportError):
        channel.call(msg)
    assert channel.broken and client.put("other", VALUE), "it costs its sender the connection, and nobody else"

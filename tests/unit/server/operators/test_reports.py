"""What a data server reports to its manager: when, how much, and whose names."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.config.tokens import Token, TokenRole
from simm.constants import OTHERS_NAMESPACE
from simm.control.activity import fault
from simm.ipc.counts import BUCKETS, Word
from simm.ipc.tally import Totals, counters_summary
from simm.rpc import encode
from simm.server.operators import reports
from simm.server.operators.reports import DETAIL, Reporter
from simm.wire import report_messages as R


class FakeLoop:
    """Timers that a test lets go off."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Any]] = []

    def call_later(self, seconds: float, callback: Any) -> None:
        self.timers.append((seconds, callback))

    def go(self) -> float:
        seconds, callback = self.timers.pop(0)
        callback()
        return seconds


class World:
    """A reporter, and what it sees and sends."""

    def __init__(self, *, tokens: tuple[Token, ...] = ()) -> None:
        self.loop = FakeLoop()
        self.shm, self.tcp = Totals(None), Totals(None)
        self.sent: list[R.Report] = []
        self.membership = SimpleNamespace(
            peer=object(), joined=True, on_report_every=None, request=lambda msg, _callback: self.sent.append(msg)
        )
        self.stats: dict[str, Any] = {"sessions_quarantined": 1, "clients_in_all": 0, "clients": [], "quotas": {}}
        slot = SimpleNamespace(number=4, stats=self.stats, counts=lambda _endpoint: {"shm": self.shm, "tcp": self.tcp})
        endpoints = SimpleNamespace(counted=lambda _number: None)
        parts: list[Any] = [
            self.loop, [slot], SimpleNamespace(name="a", instance=9), self.membership, endpoints, tokens
        ]
        self.reporter = Reporter(*parts)

    def client(self, namespace: str, idle_s: float | None) -> None:
        self.stats["clients"].append(
            {"pid": 1 << 30, "namespace": namespace, "idle_s": idle_s, "counts": counters_summary([3] * 32)}
        )
        self.stats["clients_in_all"] += 1


@pytest.fixture
def world() -> Iterator[World]:
    yield World()


def test_reports_come_while_the_manager_that_asked_is_connected(world: World) -> None:
    assert world.reporter.detail == 0, "workers are asked for no clients"
    world.reporter.ask(2000)
    world.reporter.ask(2000)
    assert world.reporter.detail == DETAIL and len(world.loop.timers) == 1
    assert world.loop.go() == 2.0 and len(world.sent) == 1
    world.membership.joined = False
    world.loop.go()
    assert len(world.sent) == 1, "nothing before it has joined again"
    world.membership.joined, world.membership.peer = True, object()
    world.loop.go()
    assert len(world.sent) == 1 and not world.loop.timers, "another manager has not asked, and may be an older one"
    world.reporter.ask(1)
    assert world.loop.go() == reports.LEAST_S and len(world.sent) == 2
    world.reporter.ask(0)
    world.loop.go()
    assert len(world.sent) == 2 and not world.loop.timers and world.reporter.detail == 0


def test_mutation_without_the_check_of_the_connection(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager of an older version would close a connection that brings it a message it does not know."""
    monkeypatch.setattr(Reporter, "_wanted", lambda self: bool(self._interval_s))
    world.reporter.ask(2000)
    world.membership.peer = object()
    world.loop.go()
    assert len(world.sent) == 1, "the harm"


def test_all_paths_are_added_up(world: World) -> None:
    world.shm.counters("n")[Word.HITS] = 5
    world.shm.counters("m")[Word.ABSENT] = 2
    world.tcp.counters("n")[Word.BATCH_PUTS] = 7
    world.shm.observe(0, 5000)
    world.tcp.observe(2, 5000)
    report = world.reporter.report()
    (worker,) = report.workers
    assert dict(zip(R.COUNTS, worker.counts))["hits"] == 5 and worker.counts[1:3] == [2, 7]
    assert [sum(worker.latencies[at : at + BUCKETS]) for at in range(0, 4 * BUCKETS, BUCKETS)] == [1, 0, 1, 0]
    assert [(each.name, each.counts[0], each.counts[2]) for each in report.namespaces] == [("n", 5, 7), ("m", 0, 0)]
    assert (report.name, report.instance, worker.worker, worker.quarantined) == ("a", 9, 4, 1) and not fault(report)


def test_a_report_is_bounded(world: World) -> None:
    for number in range(100):
        world.shm.counters(f"{number:03}" + "n" * 61)[Word.HITS] = number
        world.client("n", float(number) if number else None)
    world.shm.counters("huge")[Word.HIT_BYTES] = 1 << 70
    report = world.reporter.report()
    assert len(report.namespaces) == R.NAMESPACES_MAX and report.namespaces_left == 101 - R.NAMESPACES_MAX
    assert report.namespaces[0].name.startswith("099"), "those that did most"
    assert len(report.clients) == R.CLIENTS_MAX and report.clients_left == 100 - R.CLIENTS_MAX
    assert report.clients[0].idle_ms == 1000 and max(each.idle_ms for each in report.clients) < 1 << 31
    assert not fault(report) and len(encode(report, 1)) < 16 << 10


@pytest.mark.parametrize(("number", "told"), [(1 << 100, (1 << 64) - 1), (-1, 0)])
def test_no_number_is_too_large_for_its_field(world: World, number: int, told: int) -> None:
    """A timer packs a report. A number that does not fit its field would end the server."""
    world.client("n", float(number))
    (client,) = world.stats["clients"]
    client["pid"] = number
    client["counts"] = {**client["counts"], "hits": number}
    world.stats["clients_in_all"] = world.stats["sessions_quarantined"] = number
    world.stats["quotas"] = {"mine": {"used_bytes": number, "quota_bytes": number}}
    world.reporter.ask(1)
    world.loop.go()
    (report,) = world.sent
    assert encode(report, 1) and not fault(report)
    (namespace,) = [each for each in report.namespaces if each.name == "mine"]
    assert (namespace.used_bytes, namespace.quota_bytes) == (told, told)
    assert report.clients[0].counts[0] == told and report.clients[0].pid == told & 0xFFFFFFFF


def test_issue_a_client_that_has_done_nothing_yet_is_told_with_its_namespace(world: World) -> None:
    """It has just connected, perhaps by a wrong name: only namespaces with counts were named."""
    world.client("mistyped", None)
    assert [each.namespace for each in world.reporter.report().clients] == ["mistyped"]


@pytest.mark.parametrize("bound", [True, False])
def test_tenants_names_are_not_told(bound: bool) -> None:
    """The page is read by tenants. Where tokens are bound to namespaces, only those with a quota have names."""
    token = Token("s" * 20, TokenRole.CLIENT, "label", namespaces={"mine": 0} if bound else None)
    world = World(tokens=(token,))
    world.shm.counters("secret")[Word.HITS] = 5
    world.shm.counters("other")[Word.HITS] = 6
    world.stats["quotas"] = {"mine": {"used_bytes": 10, "quota_bytes": 20}}
    world.client("secret", 1.0)
    report = world.reporter.report()
    names = {each.name: (each.counts[0], each.quota_bytes) for each in report.namespaces}
    if bound:
        assert names == {OTHERS_NAMESPACE: (11, 0), "mine": (0, 20)} and report.clients[0].namespace == OTHERS_NAMESPACE
    else:
        assert names == {"secret": (5, 0), "other": (6, 0), "mine": (0, 20)}
        assert report.clients[0].namespace == "secret", "control"

"""When a data server is ready, and the line that a service manager shows of it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from simm.ipc.counts import Word
from simm.ipc.tally import Totals
from simm.net.loop import Loop
from simm.net.process import end_children
from simm.server.children import (
    BEATLESS_S,
    FRUITLESS_MAX,
    RESTARTS_MAX,
    SILENT_S,
    Children,
    StreamProcess,
    Supervised,
    WorkerSlot,
)
from simm.server.operators.pages import DataServerPages, Row, metrics
from simm.server.operators.usage import COUNT_S, COUNTING_SHARE, Counts, descriptors_of, usage_of
from simm.server.slots.failures import Failures
from tests.support.waiting import wait_until


class FakeServer:
    """What the pages read of a data server with one worker."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.trouble = ""
        self.comes_up = True
        self.worker = SimpleNamespace(last_seen=self.loop.clock())
        self.stats: dict[str, Any] = {"free_bytes": 1 << 29, "entries": 1234}
        self.slot = SimpleNamespace(
            number=0, ready=True, worker=self.worker, streams=[], stats=self.stats, data_bytes=1 << 30,
            words=lambda: b"", comes_up=lambda _: self.comes_up, fruitless=0, ready_at=0.0,
        )  # fmt: skip
        self.member = SimpleNamespace(
            name="a", fenced=False, epoch=3, workers=(0,), owned=lambda _: 16384, moving=lambda *_: []
        )
        self.membership = SimpleNamespace(joined=True)
        parts: list[Any] = [self.loop, [self.slot], self.member, self.membership, None, lambda: self.trouble]
        self.pages = DataServerPages(*parts)


@pytest.fixture
def server() -> Any:
    made = FakeServer()
    yield made
    made.loop.close()


def test_a_server_is_ready_when_it_takes_part(server: FakeServer) -> None:
    assert server.pages.readyz()[:3] == ("ready\n", server.pages.readyz().content_type, 200)
    server.trouble = "starting: READY has not been said"
    assert server.pages.readyz().status == 503 and server.pages.readyz().body == f"{server.trouble}\n"
    server.trouble, server.slot.ready = "", False
    assert server.pages.readyz().status == 503 and "restarting" in server.pages.readyz().body
    server.slot.ready, server.member.fenced = True, True
    assert server.pages.readyz().status == 503 and "no puts" in server.pages.readyz().body
    assert server.pages.healthz().status == 200, "a restart would not help"


def test_a_server_stays_ready_without_a_manager(server: FakeServer) -> None:
    server.membership.joined = False
    assert server.pages.readyz().status == 200


def test_the_line_for_a_service_manager(server: FakeServer) -> None:
    assert server.pages.status() == "serving 1,234 values in 0.50 of 1.00 GiB, 16,384 shards, workers: 1"
    server.member.moving = lambda *_: [1, 2]
    assert server.pages.status().endswith(", 2 shards still moving in")
    server.membership.joined = False
    assert server.pages.status() == "serving, no manager"
    server.member.fenced = True
    assert server.pages.status() == "serving, the manager does not know us: no puts until it does"
    server.slot.ready = False
    assert server.pages.status() == "serving, workers [0] are restarting: they recover their arenas"
    server.comes_up = False
    assert server.pages.status().startswith("workers [0] do not come up")


def test_issue_a_server_whose_worker_recovers_its_arena_is_well_and_not_ready(server: FakeServer) -> None:
    """A kubelet ended it after three probes, with all values. A large arena takes minutes."""
    stream: Any = SimpleNamespace(is_silent=lambda: False, is_cut_off=lambda _: True, child=object())
    server.slot.ready, server.slot.streams = False, [stream]
    server.stats["unreachable"] = "it was, before"
    health, ready = server.pages.healthz(), server.pages.readyz()
    assert health.status == 200 and health.body == "ok, but workers [0] are restarting: they recover their arenas\n"
    assert ready.status == 503 and ready.body == "workers [0] are restarting: they recover their arenas\n"
    server.slot.fruitless = 7
    assert server.pages.healthz().status == 200 and "died 7 times in a row" in server.pages.healthz().body
    server.slot.fruitless = 0
    stream.is_silent = lambda: True
    assert server.pages.healthz().status == 503, "a stream that hangs is its own fault"
    stream.is_silent, server.comes_up = lambda: False, False
    assert server.pages.healthz().status == server.pages.readyz().status == 503
    server.slot.ready = True
    assert server.pages.healthz().status == 503, "now it must reach its worker"


def test_issue_who_recovers_is_told_from_who_hangs() -> None:
    """By the arena's heartbeat, however seldom somebody looks."""
    beat, child = [0], SimpleNamespace(pid=7)
    segment: Any = SimpleNamespace(heartbeat=lambda: beat[0])
    slot = WorkerSlot(0, 0, segment)
    worker: Any = SimpleNamespace(child=child)
    slot.worker = worker
    now = 1000.0
    for gap in (0.0, 1.0, 10.0, 10 * BEATLESS_S):
        now, beat[0] = now + gap, beat[0] + 1
        assert slot.comes_up(now), "it beats"
    assert slot.comes_up(now + BEATLESS_S) and not slot.comes_up(now + BEATLESS_S + 1), "it has stopped"
    child.pid = 8
    assert slot.comes_up(now + BEATLESS_S + 2), "its successor has only begun"
    worker.child = None
    assert not slot.comes_up(now + BEATLESS_S + 2), "there is none"


@pytest.mark.parametrize(("served", "most"), [(False, FRUITLESS_MAX), (True, RESTARTS_MAX)])
def test_who_ends_again_and_again_before_it_serves_is_not_well(served: bool, most: int) -> None:
    """Its arena may be at fault: then only a server that starts anew helps. One that serves between is another case.

    One that has served is tried for as long as memory or threads may be scarce. A restart of all costs all values.
    """
    slot = WorkerSlot(0, 0, SimpleNamespace(heartbeat=lambda: 0))  # type: ignore[arg-type]
    slot.worker = SimpleNamespace(child=SimpleNamespace(pid=7))  # type: ignore[assignment]
    for serves in (True, False) if served else (False,):
        for at in range(FRUITLESS_MAX if serves else most):
            assert slot.comes_up(1000.0), at
            slot.ready = serves
            slot.worker_died(-9, 1000.0)
    assert not slot.comes_up(1000.0) and bool(slot.hopeless()) == served
    slot.ready = True
    slot.worker_died(-9, 1000.0)
    assert slot.comes_up(1000.0)


def test_issue_a_server_whose_worker_is_tried_again_is_well(server: Any) -> None:
    """After the fifth of 60 tries a kubelet ended it, with the values of all workers."""
    slot = WorkerSlot(0, 0, SimpleNamespace(heartbeat=lambda: 1))  # type: ignore[arg-type]
    slot.worker = SimpleNamespace(child=SimpleNamespace(pid=7))  # type: ignore[assignment]
    slot.ready = True
    server.pages._slots[:] = [slot]
    for _ in range(FRUITLESS_MAX + 2):
        slot.worker_died(-9, server.loop.clock())
    assert server.pages.healthz().status == 200 and "restarting" in server.pages.healthz().body


def test_issue_a_stream_that_is_to_be_started_again_does_not_hang(server: FakeServer) -> None:
    """Its pause was as long as a stream may be silent."""
    stream = StreamProcess(Children(server.loop, lambda: ()), "a stream", lambda _: None, [])
    stream._worker_down_s = SILENT_S + 1  # it had said so
    server.slot.streams, stream.last_seen = [stream], server.loop.clock() - SILENT_S - 1
    assert not stream.is_silent() and not stream.is_cut_off(0.0)
    health = server.pages.healthz()
    assert health.status == 200 and health.body == "ok, but a stream process of workers [0] is being restarted\n"
    stream.child = SimpleNamespace(pid=7)  # type: ignore[assignment]
    assert stream.is_silent() and server.pages.healthz().status == 503, "the positive control"


def test_issue_a_stream_is_not_cut_off_by_what_it_said_before_its_worker_was_back(server: Any) -> None:
    """For a moment after each long recovery the page said 503."""
    now = server.loop.clock()
    server.loop.clock = lambda: now
    slot = WorkerSlot(0, 0, SimpleNamespace())  # type: ignore[arg-type]
    slot.worker = SimpleNamespace(last_seen=now, child=None)  # type: ignore[assignment]
    stream = StreamProcess(Children(server.loop, lambda: ()), "a stream", lambda _: None, [])
    stream.child, stream.last_seen = SimpleNamespace(pid=7), now  # type: ignore[assignment]
    slot.streams, server.pages._slots[:] = [stream], [slot]
    stream._spoke, stream._worker_down_s = True, 60.0
    slot.take_stats({"pid": 3, "data_bytes": 1, "incarnation": 1, "counted": {}})
    slot.ready = True
    assert server.pages.healthz().status == 200
    now += SILENT_S + 1.0
    stream.last_seen = slot.worker.last_seen = now
    slot.take_stats({"pid": 3, "data_bytes": 1, "incarnation": 1, "counted": {}})
    assert server.pages.healthz().status == 503, "it should have reached it by now"
    stream._spoke = False
    assert server.pages.healthz().status == 200, "its successor has said nothing yet"


@pytest.mark.parametrize("bound", [False, True])
def test_a_page_names_no_namespace_to_tenants(server: Any, bound: bool) -> None:
    """A tenant that knows another one's namespace can ask for its keys. Counts of quotas name theirs."""
    totals = Totals()
    for name, count in (("open", 1), ("secret-a", 2), ("secret-b", 3)):
        totals.counters(name)[Word.HITS] += count
    row = Row(0, 0, {"quotas": {"open": dict.fromkeys(("used_bytes", "quota_bytes"), 0)}}, counted={"tcp": totals})
    row.names_all = not bound
    text = metrics("a", [row], joined=True, fenced=False, epoch=1).text()
    hits = {line.split('namespace="')[1].split('"')[0]: line.split()[-1] for line in text.splitlines()
            if line.startswith("simm_hits_total{")}  # fmt: skip
    assert hits == ({"open": "1", "(others)": "5"} if bound else {"open": "1", "secret-a": "2", "secret-b": "3"})
    assert ("secret" in text) == (not bound), "the control"


def test_issue_no_two_samples_of_kept_values_have_the_same_labels() -> None:
    """A name that cannot be printed looks like the one that has its escapes. Prometheus refused the whole page."""
    sizes = {"a\x01": {"hard": 1}, "a\\x01": {"hard": 2}, "\u202e": {"hard": 4}}
    row = Row(0, 0, {"kept": {"bytes": sizes, "slots": sizes}})
    text = metrics("a", [row], joined=True, fenced=False, epoch=1).text()
    for metric in ("simm_kept_bytes", "simm_kept_slots"):
        found = [line.split('namespace="')[1] for line in text.splitlines() if line.startswith(f"{metric}{{")]
        assert sorted(found) == ['(others)",class="hard"} 5', 'a\\\\x01",class="hard"} 2']


def test_what_streams_and_endpoints_refuse_is_in_the_workers_metrics() -> None:
    streams = [SimpleNamespace(failures=Failures()) for _ in range(2)]
    first, second = (stream.failures for stream in streams)
    first.take({"pid": 1, "protocol_errors": 3, "unauthorized": 5})
    first.take({"pid": 1, "protocol_errors": 4, "unauthorized": 5})
    first.take({"pid": 2, "protocol_errors": 1})  # its successor: what was counted stays
    second.take({"pid": 3, "handler_errors": 7, "unauthorized": 1})
    slot: Any = SimpleNamespace(streams=streams, refused=Failures())
    slot.refused.take({"pid": 4, "unauthorized": 100})
    found = WorkerSlot.failures(slot, {"unauthorized": 10})
    assert found == {"protocol_errors": 5, "handler_errors": 7, "unauthorized": 116}
    row = Row(0, 0, {"unauthorized": 100, "protocol_errors": 0}, failures=found)
    text = metrics("a", [row], joined=True, fenced=False, epoch=1).text()
    for name, count in (("unauthorized", 116), ("protocol_errors", 5), ("handler_errors", 7)):
        assert f'simm_{name}_total{{server="a",worker="0",numa="0"}} {count}\n' in text


def test_issue_a_workers_restart_takes_no_count_of_its_streams_back() -> None:
    """What it had refused went, and what they had refused stayed: to who sums up it looked like so many new ones."""
    slot = WorkerSlot(0, 0, SimpleNamespace())  # type: ignore[arg-type]
    stream: Any = SimpleNamespace(failures=Failures())
    slot.streams, slot.ready = [stream], True
    stream.failures.take({"pid": 1, "protocol_errors": 1000})
    seen = []
    for pid, count in ((2, 5), (2, 7), (3, 0), (3, 1)):
        slot.take_stats({"pid": pid, "protocol_errors": count, "data_bytes": 1, "incarnation": 1, "counted": {}})
        row = Row(0, 0, slot.stats, failures=slot.failures({}))
        text = metrics("a", [row], joined=True, fenced=False, epoch=1).text()
        (line,) = [line for line in text.splitlines() if line.startswith("simm_protocol_errors_total{")]
        seen.append(int(line.split()[-1]))
    assert seen == [1005, 1007, 1007, 1008]


def burn() -> None:
    """Use a tenth of a second of processor time."""
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass


def test_issue_the_processor_time_of_a_process_stays_when_it_has_ended() -> None:
    """Of two streams one is restarted: the sum of both went down. Also as long as it has ended and is not reaped."""
    loop = Loop()
    children = Children(loop, lambda: ())
    streams = [Supervised(children, "a stream", lambda sock: (burn(), sock.recv(1)), []) for _ in range(2)]

    def used() -> float:
        alive = [("stream", each.child) for each in streams if each.child is not None]
        return usage_of(alive, [("stream", each.cpu_s) for each in streams])["stream"].cpu_s

    try:
        for each in streams:
            each.start()
        wait_until(lambda: used() >= 0.18, "both have done something")  # the kernel counts in ticks
        first = streams[0].child
        assert first is not None
        before = used()
        streams[0].kill()
        wait_until(lambda: psutil.Process(first.pid).status() == psutil.STATUS_ZOMBIE, "it has ended")
        assert used() >= before
        wait_until(lambda: streams[0].ended() is not None, "it is reaped")
        assert used() >= before
        streams[0].start()
        assert used() >= before
    finally:
        for each in streams:
            if each.child is not None:
                end_children([each.child], 0.0)
                assert each.ended() is not None
        loop.close()
    assert used() >= before, "also of those that were ended"


def test_what_processes_of_one_kind_use_is_added() -> None:
    """As psutil has it, and without what has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    own: Any = SimpleNamespace(pid=os.getpid())
    gone: Any = SimpleNamespace(pid=ended.pid)
    before = psutil.Process().cpu_times()
    found = usage_of([("worker", own), ("stream", own), ("stream", own), ("endpoint", gone)])
    assert sorted(found) == ["stream", "worker"]
    (one, resident, private, *_), (two, twice, *_) = found["worker"], found["stream"]
    assert one >= before.user + before.system > 0 and two >= 2 * one - 0.001, "sums of floats"
    assert 0 < private < resident and twice > 1.5 * resident, "this process has shared memory: its libraries"


def test_issue_descriptors_are_told_of_the_processes_that_clients_use() -> None:
    """Only the supervisor's were, which takes none for a client. Of several processes the one with the least left."""
    program = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)); "
    program += "kept = [os.dup(0) for _ in range(40)]; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as full:
        assert full.stdin is not None and full.stdout is not None
        full.stdout.readline()
        own, other = (SimpleNamespace(pid=pid) for pid in (os.getpid(), full.pid))
        found: Any = usage_of([("worker", own), ("stream", own), ("stream", other), ("stream", own)])  # type: ignore[list-item]
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert 0 < found["worker"].descriptors < found["worker"].descriptors_max == most
        assert 43 <= found["stream"].descriptors < 100 == found["stream"].descriptors_max
        row = Row(0, 0, {}, usage=found)
        text = metrics("a", [row], joined=True, fenced=False, epoch=1).text()
        labels = '{server="a",worker="0",numa="0",process="stream"}'
        assert f"simm_process_open_fds{labels} {found['stream'].descriptors}\n" in text
        assert f"simm_process_max_fds{labels} 100\n" in text
        full.stdin.close()
    assert descriptors_of(full.pid) == (0, 0), "it has ended, and the page has no sample"


def test_issue_counting_descriptors_takes_little_of_the_loop() -> None:
    """Before Linux 6.2 they are listed, at 8 us each in the supervisor's loop, and pages are asked for by many."""
    now, listed, costs = 0.0, 0, 0.0

    def names(folder: str) -> list[str]:
        nonlocal now, listed
        if folder == "/proc/9/fd":
            raise FileNotFoundError(folder)
        listed += 1
        now += costs
        return ["0"] * (listed * 10)

    counts = Counts(names, lambda: now)
    assert counts.of(7) == 10 and counts.of(8) == 20 and counts.of(7) == 10
    now = COUNT_S - 1
    assert counts.of(7) == 10 and listed == 2
    now, costs = COUNT_S, 2 * COUNT_S * COUNTING_SHARE
    assert counts.of(7) == 30
    now = COUNT_S + costs + 1.5 * COUNT_S
    assert counts.of(7) == 30, "it took long, and is not done again so soon"
    now += COUNT_S
    assert counts.of(7) == 40
    with pytest.raises(FileNotFoundError):
        counts.of(9)
    now = 10_000.0
    counts.of(8)
    assert list(counts._known) == [8], "nothing is kept of processes that nobody asks about"

"""A cluster over five hosts whose network breaks: manager on host 0, data servers on 1 to 3, clients on 1 and 4.

The client on host 1 reads its own host's server by shared memory and the others by TCP; the one on host 4 has only TCP.
Both verify every byte. In the bounded dose heartbeats are shorter, and a dead server is one after 3 s. On a busy
machine a living one may be silent for a second.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.dose import dosed
from tests.support.fleet import PATIENT_SERVERS, Fleet
from tests.support.load import FAILED, GET, OK, OUTAGE, PATIENT_S, PUT, Clients, Records, load
from tests.support.measures import measured
from tests.support.pace import Pace
from tests.support.waiting import wait_until
from tests.support.watch import Watch
from tests.system.partitions.hosts import Hosts

MANAGER, FIRST, SECOND, THIRD, FAR = range(5)
#: Full service is due so long after healing on a quiet machine, seconds. Reported, not asserted.
BACK_S = 10.0
#: For tests in which calls must fail, seconds.
DEADLINE_S = 1.0
#: The service is back when each client has made so many calls in a row without a failure.
STREAK = 40
WAIT_S = 60.0


class Seen(NamedTuple):
    """One partition under load."""

    #: Of the clients on host 1 and on host 4.
    near: Records
    far: Records
    began: float
    #: When it began to heal, and had healed.
    healing: float
    healed: float
    #: When the cluster was whole again for its manager.
    settled: float


@pytest.fixture(scope="module")
def fleet(hosts: Hosts, nothing_is_left: Path) -> Iterator[Fleet]:
    """The cluster of the bounded dose."""
    with start(hosts, nothing_is_left, 300) as running:
        yield running


@pytest.fixture(scope="module")
def real_fleet(hosts: Hosts, nothing_is_left: Path) -> Iterator[Fleet]:
    """The cluster with its default heartbeats, for the long dose."""
    with start(hosts, nothing_is_left, None) as running:
        yield running


def start(hosts: Hosts, scratch: Path, heartbeat_ms: int | None) -> Fleet:
    servers = range(FIRST, THIRD + 1)
    return Fleet(
        Path(tempfile.mkdtemp(prefix="f", dir=scratch)), 3, heartbeat_ms=heartbeat_ms,
        manager_arguments=() if heartbeat_ms is None else ("--dead-after", "10"),
        places=[hosts[position] for position in range(4)], run_folder=hosts.run_folder,
        run_folders=[f"{Path(hosts.run_folder).parent}/host{position}" for position in servers],
        patches=PATIENT_SERVERS,
    )  # fmt: skip


class Calls:
    """Has one of the clients made so many more calls, since this was asked first?"""

    def __init__(self, client: int, least: int) -> None:
        self._client = client
        self._least = least
        self._before: int | None = None

    def __call__(self, clients: Clients) -> bool:
        calls, _ = clients.clients[self._client].progress()
        if self._before is None:
            self._before = calls
        return calls >= self._before + self._least


def broken(
    hosts: Hosts, fleet: Fleet, what: str, breaks: Callable[[], object], seconds: float,
    deadlines_s: tuple[float, float] = (PATIENT_S, PATIENT_S), *,
    until: Callable[[Clients], bool] = lambda _: True,
) -> Seen:  # fmt: skip
    """Break the network for so long under load, and assert everything that must hold in any case.

    ``deadlines_s``: of the clients on host 1 and on host 4. ``until``: what must have come about before it is healed.
    """
    with Watch(fleet, lambda position, name: hosts[FIRST + position].root(f"/dev/shm/{name}")) as watch:
        with load(
            fleet.manager.address, fleet.folder, 2, paths=("auto", "tcp"), places=[hosts[FIRST], hosts[FAR]],
            deadlines_s=deadlines_s, keys=30,
        ) as clients:  # fmt: skip
            time.sleep(0.5)
            try:
                breaks()
                began = time.monotonic()
                time.sleep(seconds)
                wait_until(lambda: until(clients), f"what is waited for: {what}", WAIT_S, 0.05)
            finally:
                healing = time.monotonic()
                hosts.heal()
            healed = time.monotonic()
            fleet.wait_settled(f"the cluster is whole after: {what}", WAIT_S)
            settled = time.monotonic()
            for client in clients.clients:
                client.wait_streak(STREAK, f"full service after: {what}", WAIT_S)
            far_rows, far_report = clients.clients[1].end_now()
            near_rows, near_report = clients.clients[0].end_now()
    watch.assert_right()
    near, far = Records(near_rows, near_report["said"]), Records(far_rows, far_report["said"])
    for name, records, deadline_s in zip(("near", "far"), (near, far), deadlines_s):
        records.assert_right()
        print(f"{what}: {name}: {records.between(began, healed).summary()}")
        late = records.quantile(0.999)
        measured(f"{what}: p99.9 of a call ({name} client)", late, "s", f"{deadline_s + 0.05} s")
        bad = records.between(healed, float("inf")).of(FAILED, OUTAGE)
        whole = max(bad.last_end(healed), settled) - healed
        measured(f"{what}: full service after healing ({name} client)", whole, "s", f"{BACK_S:.0f} s",
                 broken=f"{healed - began:.1f} s", failed=len(bad))  # fmt: skip
        after = records.between(settled, float("inf"))
        assert after.count(OK, kind=GET) and after.count(OK, kind=PUT)
    fleet.assert_no_traceback()
    return Seen(near, far, began, healing, healed, settled)


def nobody_failed(seen: Seen) -> None:
    """All that clients use was reachable all the time."""
    for records in (seen.near, seen.far):
        during = records.between(seen.began, float("inf"))
        assert during.count(FAILED, OUTAGE) == 0, during.summary()


def server_from_manager(hosts: Hosts, fleet: Fleet, seconds: float) -> None:
    """It is declared dead, its shards go to the others, and clients, who reach everybody, fail in nothing."""
    second = fleet.servers[SECOND - FIRST]
    before = second.log.read_text().count("joined the cluster")
    seen = broken(
        hosts, fleet, "server cut off from the manager", lambda: hosts.cut(SECOND, MANAGER), seconds,
        until=lambda _: fleet.node(second).get("state") == "dead",
    )  # fmt: skip
    nobody_failed(seen)
    assert f"node {second.name}: " in fleet.manager.log.read_text()
    assert second.log.read_text().count("joined the cluster") > before, "it had to join again"


def client_from_server(hosts: Hosts, fleet: Fleet, seconds: float) -> None:
    """That client's calls to that server fail, once slowly and then at once; nobody else's do."""
    epoch = fleet.manager_epoch()
    seen = broken(
        hosts, fleet, "client cut off from a server", lambda: hosts.cut(FAR, SECOND), seconds, (PATIENT_S, DEADLINE_S),
        until=Calls(1, 100),
    )  # fmt: skip
    assert seen.near.between(seen.began, float("inf")).count(FAILED, OUTAGE) == 0
    during = seen.far.between(seen.began, seen.healed)
    assert during.count(FAILED, OUTAGE) and during.count(OK) > 20, "it reaches the others"
    waited = int((during.rows["took"] > DEADLINE_S / 2).sum())
    measured("client cut off from a server: keys of calls that waited for it", waited, "", "one call a client")
    assert fleet.manager_epoch() == epoch, "no reason for a new map"


def everything(hosts: Hosts, fleet: Fleet, seconds: float) -> None:
    """No host reaches any other. The client on host 1 goes on with that host's server."""
    seen = broken(
        hosts, fleet, "everything cut", lambda: hosts.cut_off(*range(5)), seconds, (DEADLINE_S, DEADLINE_S),
        until=Calls(0, 300),
    )  # fmt: skip
    assert seen.near.between(seen.began, seen.healed).count(OK, kind=GET) > 20, "its own host is whole"
    # What was sent before the cut may have been answered, and what waited when it ended. In between nothing is.
    assert seen.far.within(seen.began + 0.2, seen.healing).count(OK) == 0


def one_way(hosts: Hosts, fleet: Fleet, seconds: float) -> None:
    """The server's heartbeats arrive and it never hears an answer."""
    nobody_failed(
        broken(hosts, fleet, "manager to server lost", lambda: hosts.cut(MANAGER, THIRD, one_way=True), seconds)
    )


def the_other_way(hosts: Hosts, fleet: Fleet, seconds: float) -> None:
    """It hears the manager, which never hears it."""
    nobody_failed(
        broken(hosts, fleet, "server to manager lost", lambda: hosts.cut(THIRD, MANAGER, one_way=True), seconds)
    )


@pytest.mark.fault("F08", ci="1 of 4 s")
def test_server_cut_off_from_the_manager(hosts: Hosts, fleet: Fleet) -> None:
    server_from_manager(hosts, fleet, 4.0)


@pytest.mark.fault("F08", ci="1 of 3 s")
def test_client_cut_off_from_a_server(hosts: Hosts, fleet: Fleet) -> None:
    client_from_server(hosts, fleet, 3.0)


@pytest.mark.fault("F08", ci="1 of 5 s")
@pytest.mark.quick
def test_everything_cut(hosts: Hosts, fleet: Fleet) -> None:
    everything(hosts, fleet, dosed(5.0, quick=3.0))


@pytest.mark.fault("F08", ci="1 of 3 s")
def test_one_way(hosts: Hosts, fleet: Fleet) -> None:
    one_way(hosts, fleet, 3.0)


@pytest.mark.fault("F08", ci=1, whole=20)
def test_connections_reset(wire: Hosts, fleet: Fleet, amount: int) -> None:
    """A firewall that was restarted, say: each packet between server and manager is answered with a reset."""
    for _ in range(amount):
        resets = partial(wire.line, MANAGER, SECOND, reset=True)
        nobody_failed(broken(wire, fleet, "manager and server reset", resets, 2.5))


@pytest.mark.fault("F08", ci=1, whole=20)
def test_a_client_and_a_server_reset(wire: Hosts, fleet: Fleet, amount: int) -> None:
    """Each packet between the two is answered with a reset: calls to that server fail at once, and no others do."""
    epoch = fleet.manager_epoch()
    for _ in range(amount):
        seen = broken(
            wire, fleet, "client and server reset", lambda: wire.line(FAR, SECOND, reset=True), 2.5,
            (PATIENT_S, DEADLINE_S), until=Calls(1, 100),
        )  # fmt: skip
        assert seen.near.between(seen.began, float("inf")).count(FAILED, OUTAGE) == 0
        during = seen.far.between(seen.began, seen.healed)
        assert during.count(FAILED, OUTAGE) and during.count(OK) > 20, "it reaches the others"
        slowest = during.of(FAILED, OUTAGE).quantile(1.0)
        measured("client and server reset: slowest call that failed", slowest, "s", f"{DEADLINE_S} s")
    assert fleet.manager_epoch() == epoch, "no reason for a new map"


#: Delay there and back, ms, and the share of packets that are lost.
LINES = [
    pytest.param(40.0, 0.01, id="40 ms, 1 %"), pytest.param(0.0, 0.1, id="10 %"), pytest.param(200.0, 0.0, id="200 ms"),
]  # fmt: skip


@pytest.mark.fault("F08", ci=1, whole=20)
@pytest.mark.parametrize(("delay_ms", "loss"), LINES)
def test_a_client_behind_a_bad_line(wire: Hosts, fleet: Fleet, amount: int, delay_ms: float, loss: float) -> None:
    """Its calls are slower, and nothing worse. Others notice nothing."""
    what = f"far client {delay_ms:g} ms away, {loss:.0%} lost"
    for number in range(amount):
        played: list[str] = []
        line = partial(wire.slow, FAR, delay_ms=delay_ms, jitter_ms=delay_ms / 4, loss=loss, seed=number)
        # A packet that comes late, behind its successors, can hold up a call for two seconds: time for many calls.
        seconds = 3.0 + 40 * delay_ms / 1e3
        breaks = lambda line=line, played=played: played.append(line())  # type: ignore[misc]  # noqa: E731
        seen = broken(wire, fleet, what, breaks, seconds, until=Calls(1, 20))
        during = seen.far.between(seen.began + 0.5, seen.healing)
        # Calls that fail at once, as the server has just been silent for a whole deadline, tell nothing of the line.
        median = during.of(OK).quantile(0.5)
        measured(f"{what} ({played[0]}): median call", median * 1e3, "ms")
        assert during.count(OK, kind=GET) and median >= 0.7 * delay_ms / 1e3
        assert seen.near.between(seen.began, float("inf")).count(FAILED, OUTAGE) == 0


@pytest.mark.fault("F08", ci=1, whole=20)
@pytest.mark.parametrize(("delay_ms", "loss"), LINES[1:])
def test_a_server_behind_a_bad_line(wire: Hosts, fleet: Fleet, amount: int, delay_ms: float, loss: float) -> None:
    """Late heartbeats are heartbeats: a delay alone takes no shard from it."""
    what = f"server {delay_ms:g} ms away, {loss:.0%} lost"
    epoch = fleet.manager_epoch()
    for number in range(amount):
        line = partial(wire.slow, SECOND, delay_ms=delay_ms, jitter_ms=delay_ms / 4, loss=loss, seed=number)
        with Pace() as pace:
            seen = broken(wire, fleet, what, line, 2.5, until=Calls(1, 20))
        assert seen.far.between(seen.began, seen.healed).count(OK, kind=GET)
        if not loss:
            nobody_failed(seen)
            # A machine that stands still for a while delays heartbeats by more than the line does.
            if pace.limit(0.0) < 1.0:
                assert fleet.manager_epoch() == epoch, "no reason for a new map"
            epoch = fleet.manager_epoch()


@pytest.mark.fault("F08", whole="5 scenes of 20 s")
@pytest.mark.slow
@pytest.mark.parametrize("scene", [server_from_manager, client_from_server, everything, one_way, the_other_way])
def test_for_20_seconds(hosts: Hosts, real_fleet: Fleet, scene: Callable[[Hosts, Fleet, float], None]) -> None:
    scene(hosts, real_fleet, 20.0)

"""The client while servers are away, and clusters of its own; ``test_conformance.py`` has more outages."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from simm.client import Client
from simm.errors import SimmError, TransportError
from simm.sdk.worker_path import Target
from tests.support.client_values import forked
from tests.support.ports import reserve_port
from tests.support.waiting import wait_until

#: From 3.12 on CPython warns of every fork beside threads. Ours are the point of the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


# --- outages ----------------------------------------------------------------------------------


def test_no_manager_is_a_transport_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simm.sdk.routing.MAP_TIMEOUT_S", 0.0)
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(TransportError, match=r"no manager answers .* start one with"):
            Client(f"127.0.0.1:{taken.getsockname()[1]}")


def test_without_the_manager_everything_goes_on(make_cluster: Any, path: str) -> None:
    cluster = make_cluster(memory="64M")
    with Client(cluster.manager, path=path, deadline_s=30.0) as client:
        assert client.put("before", b"v")
        cluster.kill("manager")
        wait_until(lambda: client.stats()["manager"] != "connected", "the client notices")
        assert client.get("before") == b"v"
        assert client.put("after", b"v")
        assert client.exists_many(["before", "after", "never"]) == [True, True, False]
        assert client.delete("before")
        cluster.start_manager()
        wait_until(lambda: client.stats()["manager"] == "connected", "the client finds the manager again")
        assert client.wait_ready(60.0)
        assert client.get("after") == b"v"
        assert client.stats()["outages"] == 0


@pytest.mark.quick
def test_a_killed_worker_comes_back_with_all_values(make_cluster: Any, path: str) -> None:
    cluster = make_cluster(memory="64M")
    keys = [f"k{number}" for number in range(200)]
    with Client(cluster.manager, path=path, deadline_s=30.0) as client:
        assert all(client.put_many(keys, [key.encode() for key in keys]))
        os.kill(cluster.worker_stats()["pid"], signal.SIGKILL)
        wait_until(lambda: client.put("after", b"v"), "puts are stored again")
        wait_until(lambda: client.get_many(keys) == [key.encode() for key in keys], "all values are there")
        assert client.get("after") == b"v"
        with client.view("k7") as view:
            assert view.data == b"k7"


def test_a_stopped_worker_costs_a_deadline_and_then_nothing(make_cluster: Any) -> None:
    """The breaker: the first put waits for its deadline, those after it fail without waiting."""
    cluster = make_cluster(memory="64M")
    with Client(cluster.manager, path="shm", deadline_s=0.5) as client:
        wait_until(lambda: client.put("k", b"v"), "it is stored, although the deadline is short")
        worker = cluster.worker_stats()["pid"]
        os.kill(worker, signal.SIGSTOP)
        try:
            assert client.put("k", b"w") is False
            failures = client.stats()["outages"]
            assert [client.put("k", b"w") for _ in range(1000)] == [False] * 1000
            # A thousand waits would have taken 500 s, and each would have counted as a failure.
            assert client.stats()["outages"] - failures < 50
            assert client.get("k") in (b"v", b"w", None)
        finally:
            os.kill(worker, signal.SIGCONT)
        wait_until(lambda: client.put("k", b"x"), "puts are stored again")
        assert client.get("k") == b"x"


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """Return the warnings of the client with this text."""
    found = [each for each in caplog.records if each.name == "simm.client" and each.levelno >= logging.WARNING]
    return [each.getMessage() for each in found if text in each.getMessage()]


@pytest.mark.parametrize("killed", [False, True])
def test_an_outage_is_one_warning_and_its_end_another(
    make_cluster: Any, path: str, killed: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage was INFO, which no engine shows; a line for each call, or each attempt, would be no better."""
    met: list[str] = []
    out = Target._out

    def counted(target: Target, reason: str) -> None:
        out(target, reason)
        met.append(reason)

    monkeypatch.setattr(Target, "_out", counted)
    cluster = make_cluster(memory="64M")
    with Client(cluster.manager, path=path, deadline_s=0.5) as client:


        def both_said() -> bool:
            return len(warnings_of(caplog, "is down")) == len(warnings_of(caplog, ", after "))

        # On a busy machine the first attempts may take longer than this deadline: those are outages, too.
        wait_until(lambda: client.put("k", b"v") and both_said(), "it is stored")
        before = len(warnings_of(caplog, "is down"))
        supervisor, worker = cluster.processes["dataserver"].pid, cluster.worker_stats()["pid"]
        stopped = [supervisor, worker, *(child.pid for child in psutil.Process(supervisor).children(recursive=True))]
        for pid in stopped:  # the supervisor first: it would start another worker
            os.kill(pid, signal.SIGSTOP)
        try:
            if killed:
                os.kill(worker, signal.SIGKILL)
            wait_until(lambda: not client.put("k", b"w"), "puts fail")
            for _ in range(100):
                client.put("k", b"w")
                client.get("k")
            wait_until(lambda: len(warnings_of(caplog, "is down")) > before, "a warning")
            met.clear()
            assert client.stats()["last_put_failure"]
            wait_until(lambda: len(met) >= 3, "further attempts to connect fail")
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        wait_until(lambda: client.put("k", b"x"), "puts are stored again")
        # On a busy machine a worker that has just come back may miss a deadline once more: that is another outage. With
        # a line for each call or attempt there were more of them than ends.
        wait_until(both_said, lambda: f"its end is said: {caplog.text}")


def test_a_manager_that_goes_is_one_warning_and_its_return_another(
    make_cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = make_cluster(memory="64M")
    with Client(cluster.manager, deadline_s=30.0) as client:
        assert client.put("k", b"v") and not warnings_of(caplog, "")
        for outage in (1, 2):
            cluster.kill("manager")
            wait_until(lambda: "refused" in client.stats()["manager"], "the client has tried to connect again")
            assert len(warnings_of(caplog, "the link to the manager broke")) == outage
            cluster.start_manager()
            wait_until(lambda: client.stats()["manager"] == "connected", "the client finds the manager again")
            wait_until(lambda: len(warnings_of(caplog, "following the manager at")) == outage, "the end is said")  # noqa: B023
            assert len(warnings_of(caplog, "manager")) == 2 * outage, caplog.text


def test_a_lazy_client_warns_once_that_it_has_no_manager(caplog: pytest.LogCaptureFixture) -> None:
    with Client(f"127.0.0.1:{reserve_port()}", lazy=True) as client:
        wait_until(lambda: warnings_of(caplog, "no manager answers"), "a warning")
        subscription = client._router.subscription  # type: ignore[union-attr]
        rounds = []
        connect = subscription._connect_any

        def counted() -> bool:
            rounds.append(1)
            return connect()

        subscription._connect_any = counted  # type: ignore[method-assign]
        wait_until(lambda: len(rounds) >= 3, "further attempts")
        assert len(warnings_of(caplog, "")) == 1
        assert not client.put("k", b"v")
        assert "no manager has answered" in client.stats()["last_put_failure"]


def test_a_put_that_fails_says_why(make_cluster: Any, path: str) -> None:
    cluster = make_cluster(memory="16M")
    with Client(cluster.manager, path=path, deadline_s=30.0) as client:
        assert client.wait_ready(60.0)
        assert client.stats()["last_put_failure"] == ""
        assert client.put("large", bytes(40 << 20)) is False
        assert f"no room at {cluster.name}/0" in client.stats()["last_put_failure"]
        assert client.put_many(["a", "large"], [b"v", bytes(40 << 20)]) == [True, False]
        assert client.stats()["put_failures"] == 2


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Open so many descriptors, as engines do, that new ones have numbers above 1,024, which select() cannot take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"no more than {hard} descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while (fd := os.open(os.devnull, os.O_RDONLY)) < 1100:
            stack.callback(os.close, fd)
        os.close(fd)
        yield


def test_issue_with_many_descriptors_the_manager_was_never_found_again(
    make_cluster: Any, many_descriptors: None
) -> None:
    """The manager's thread waited with select(), and the ValueError ended it."""
    cluster = make_cluster(memory="64M")
    with Client(cluster.manager, deadline_s=30.0) as client:
        assert client.put("k", b"v")
        cluster.kill("manager")
        wait_until(lambda: client.stats()["manager"] != "connected", "the client notices")
        cluster.start_manager()
        wait_until(lambda: client.stats()["manager"] == "connected", "the client finds the manager again")
        assert client.get("k") == b"v"


def test_issue_with_many_descriptors_a_local_cluster_did_not_start(many_descriptors: None) -> None:
    """The wait for its READY lines used select() too."""
    with Client.local(memory="64M") as client:
        assert client.put("k", b"v")
        assert client.get("k") == b"v"


# --- local clusters ---------------------------------------------------------------------------


@pytest.mark.quick
def test_a_local_cluster_ends_with_its_client() -> None:
    with Client.local(memory="64M") as client:
        assert client.put("k", b"v")
        assert client.get("k") == b"v"
        pids = client._owned.pids
        folder = client._owned.folder

        def child() -> bool:
            found = client.get("k") == b"v"
            client.close()  # does not close what the parent has
            return found

        assert forked(child) == 0
        assert client.get("k") == b"v"
    assert len(pids) == 2
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not os.path.exists(folder)


def test_a_local_cluster_that_cannot_start_says_why() -> None:
    with pytest.raises(SimmError, match="dataserver did not start"):
        Client.local(memory="60T")

"""What clients and servers count, at /metrics of a live server: of clients that live, that lie, and that are killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from simm.client import Client
from simm.ipc.counts import SAMPLE, Word
from simm.ipc.tally import RESTS_MAX
from simm.net.channel import Channel
from simm.wire import messages as M
from simm.wire.hello import client_hello
from tests.support.http_page import page
from tests.support.processes import Cluster, new_folder
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("patient")
Value = Callable[..., float]
names = map("counts-{}".format, itertools.count())


@pytest.fixture(scope="module")
def cluster(nothing_is_left: Path) -> Iterator[Cluster]:
    with Cluster(new_folder(), memory="16M", server_arguments=("--http", "127.0.0.1:0")) as running:
        yield running


@pytest.fixture
def value(cluster: Cluster) -> Value:
    """Returns the sum of a metric's samples with these labels."""

    def found(name: str, **labels: str) -> float:
        text = page(cluster.processes["dataserver"].http, "/metrics")[1]
        return sum(
            sample.value for family in text_string_to_metric_families(text) for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )  # fmt: skip

    return found


def work(client: Client) -> None:
    """Three puts, a hit by each kind of get, misses, and the rest."""
    assert client.put("a", b"x" * 1000) and client.put_many(["b", "c"], [b"y" * 10] * 2) == [True, True]
    assert client.get("a") and client.get("b")
    into = [bytearray(1000) for _ in range(20)]
    assert client.get_into_many(["a"] * 20, into) == [1000] * 20
    with client.view("c") as view:
        assert len(view) == 10
    assert client.get("absent") is None and client.get_many(["absent", "too"]) == [None, None]
    assert client.exists("a") and not client.exists("absent") and client.exists_many(["b"] * 30) == [True] * 30
    assert client.delete("c") and not client.delete("c")


@pytest.mark.parametrize("path", [pytest.param("shm", marks=pytest.mark.quick), "tcp"])
def test_a_page_shows_what_a_client_did(cluster: Cluster, value: Value, path: str) -> None:
    name = next(names)
    with Client(cluster.manager, namespace=name, path=path) as client:
        work(client)
        assert client.counters["hits"] == 23 and client.counters["misses"] == 3 and client.counters["puts"] == 3
        own = client.stats()["paths"][path]
        assert own["puts"] == 3 and own["misses"]["absent"] == 3 and own["bytes_put"] == 1020
        if path == "shm":
            assert (own["hits"], own["bytes_read"]) == (23, 21_020)
            assert (own["exists_found"], own["exists_absent"]) == (31, 1)
        assert (own["deletes"], own["deletes_absent"]) == (1, 1)
        who = {"namespace": name, "path": path}
        # What the server counts comes in parts, by TCP of several processes.
        wanted: list[tuple[float, str, dict[str, str]]] = [
            (2, "simm_operations_total", {"op": "delete"}), (26, "simm_operations_total", {"op": "get"}),
            (3, "simm_operations_total", {"op": "put"}), (32, "simm_operations_total", {"op": "exists"}),
            (23, "simm_hits_total", {}), (3, "simm_misses_total", {}), (3, "simm_misses_total", {"reason": "absent"}),
            (21_020, "simm_op_bytes_total", {"op": "get"}), (1020, "simm_op_bytes_total", {"op": "put"}),
        ]  # fmt: skip

        def shown() -> list[tuple[float, str, dict[str, str]]]:
            return [(value(metric, **who, **labels), metric, labels) for _, metric, labels in wanted]

        wait_until(lambda: shown() == wanted, lambda: f"the page has all of it: {shown()}")
    wait_until(lambda: value("simm_op_seconds_count", path=path, op="put_many") >= 1, "a batch is timed")
    assert value("simm_op_seconds_bucket", path=path, op="put_many", le="+Inf") >= 1
    assert 0 < value("simm_op_seconds_sum", path=path, op="delete") < 60
    assert value("simm_sessions_disbelieved_total") == 0


@pytest.mark.quick
def test_nothing_is_lost_when_a_client_is_killed(cluster: Cluster, value: Value) -> None:
    name = next(names)
    count = 3 * SAMPLE
    script = f"""
        from simm.client import Client
        client = Client({cluster.manager!r}, namespace={name!r})
        for number in range({count}):
            assert client.put(str(number), b"z" * 100)
        for number in range({count}):
            assert client.get(str(number))
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    who = {"namespace": name, "path": "shm"}
    wait_until(lambda: value("simm_hits_total", **who) == count, "its last get is counted")
    assert value("simm_operations_total", op="put", **who) == count
    assert value("simm_op_seconds_count", path="shm", op="get") >= 2, "one in so many is timed"


def test_a_page_tells_evicted_keys_from_those_that_were_never_there(cluster: Cluster, value: Value) -> None:
    name = next(names)
    with Client(cluster.manager, namespace=name) as client:
        assert all(client.put(str(number), b"e" * 100_000) for number in range(600)), "16 MiB hold a quarter of them"
        for _ in range(20):  # one of 16 misses is shown, and of two evicted keys one is noted
            assert not any(client.get(str(number)) for number in range(200))
        who = {"namespace": name, "path": "shm"}
        wait_until(lambda: value("simm_misses_total", **who) == 4000, "they are counted")
        evicted = value("simm_misses_total", reason="evicted", **who)
        assert evicted > 1200, "the worker remembers most of them, not all"
        assert client.get_many([f"never {number}" for number in range(3000)]) == [None] * 3000
        wait_until(lambda: value("simm_misses_total", **who) == 7000, "these too")
        more = value("simm_misses_total", reason="evicted", **who) - evicted
        assert more <= RESTS_MAX + 1, "but for what the sample had given too many"


def test_a_client_that_claims_nonsense_spoils_nothing_but_its_own(cluster: Cluster, value: Value) -> None:
    mine, theirs = next(names), next(names)
    disbelieved = value("simm_sessions_disbelieved_total")
    with Client(cluster.manager, namespace=mine) as liar, Client(cluster.manager, namespace=theirs) as honest:
        assert liar.put("a", b"x") and honest.put("a", b"x")
        router = liar._router
        assert router is not None
        (target,) = router.targets.values()
        session = target.session
        assert session is not None
        for word in range(len(session.counts)):
            session.counts[word] = (1 << 64) - 1 - word
        assert honest.get("a") == b"x"
        wait_until(lambda: value("simm_sessions_disbelieved_total") == disbelieved + 1, "the worker has noticed")
        wait_until(lambda: value("simm_hits_total", namespace=theirs) == 1, "the other is counted on")
        session.counts[Word.HITS] = 0
        assert honest.put("b", b"x")
        wait_until(lambda: value("simm_operations_total", namespace=theirs, op="put") == 2, "and the server serves")
        assert liar.put("b", b"y"), "the liar is served too"
    assert value("simm_hits_total", namespace=mine) == 0
    assert value("simm_op_seconds_sum", path="shm") < 3600


def test_a_workers_restart_takes_nothing_back(cluster: Cluster, value: Value) -> None:
    name = next(names)
    with Client(cluster.manager, namespace=name) as client:
        assert client.put("a", b"x") and client.get("a") == b"x"
        wait_until(lambda: value("simm_hits_total", namespace=name) == 1, "it is counted")
        restarts = value("simm_process_restarts_total", process="worker")
        os.kill(cluster.worker_stats()["pid"], signal.SIGKILL)
        wait_until(lambda: value("simm_process_restarts_total", process="worker") > restarts, "it is replaced")
        wait_until(lambda: client.put("b", b"y"), "the client is connected again")
        assert client.get("b") == b"y"
        wait_until(lambda: value("simm_operations_total", namespace=name, op="put") >= 2, "the sums go on")
        wait_until(lambda: value("simm_hits_total", namespace=name) == 2, "none is lost, none is counted twice")


@pytest.mark.quick
def test_a_client_from_afar_is_not_told_who_else_there_is(cluster: Cluster) -> None:
    """Nor what they do: it may be bound to namespaces of its own."""
    with Client(cluster.manager, namespace=next(names), path="tcp") as client:
        assert client.put("a", b"x")
        (target,) = client._router.targets.values()  # type: ignore[union-attr]
        with contextlib.closing(Channel.tcp(target.info.host, target.info.port, 30.0)) as channel:
            channel.call(client_hello(M.Role.CLIENT, namespace="another"))
            told = json.loads(channel.call(M.Stats(0)).json)
        assert told["fetched_bytes"] >= 0 and "counted" not in told


def test_a_forked_child_begins_anew(cluster: Cluster, value: Value) -> None:
    name = next(names)
    with Client(cluster.manager, namespace=name) as client:
        assert client.put("a", b"x") and client.get("a") == b"x"
        pid = os.fork()
        if not pid:
            code = 1
            try:
                fresh = client.stats()["paths"]["shm"]["hits"] == 0
                code = 0 if fresh and client.get("a") == b"x" and client.stats()["paths"]["shm"]["hits"] == 1 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.get("a") == b"x"
        wait_until(lambda: value("simm_hits_total", namespace=name) == 3, "both are counted")

"""A data server's pages: what /healthz says of workers that are gone, and of those that hang."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from simm.client import Client
from simm.server.operators.pages import Row, healthz, metrics
from tests.support.child import forked_by, stopped
from tests.support.fleet import Fleet
from tests.support.http_page import page
from tests.support.load import PATIENT_S
from tests.support.patched_children import SLOW
from tests.support.processes import HERE, Cluster
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

SLOWLY = "call=tests.support.patched_children:slow"


def test_healthz() -> None:
    for arguments, status, word in (
        (([], [], True, False), 200, "ok"),
        (([], [], False, False), 200, "no manager"),
        (([], [], True, True), 200, "no puts"),
        (([0], [], True, False), 503, "do not come up"),
        (([], [0, 2], True, False), 503, "[0, 2] do not answer"),
    ):
        made = healthz(*arguments)
        assert made.status == status and word in str(made.body), arguments


def test_metrics_name_the_silent_worker() -> None:
    text = metrics("a", [Row(0, 1, {}, silent_s=7.5)], joined=True, fenced=False, epoch=3).text()
    assert 'simm_worker_silent_seconds{server="a",worker="0",numa="1"} 7.5' in text


def test_a_stopped_worker_is_seen_and_a_woken_one_too(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = make_cluster(memory="64M")
    server = ServerProcess(
        "dataserver", cluster.folder, "--numa", "0", "--memory", "64M", "--listen", "127.0.0.1:0", "--http",
        "127.0.0.1:0", "--manager", cluster.manager, "--runtime-dir", str(tmp_path), name=f"{HERE}pages",
    )  # fmt: skip
    server.arguments += ["--name", server.name]
    with server:
        assert server.http, "the READY line names the port that was found"
        address = server.http
        assert page(address, "/healthz") == (200, "ok\n") and page(address, "/readyz") == (200, "ready\n")
        found = {family.name: family for family in text_string_to_metric_families(page(address, "/metrics")[1])}
        assert {"simm_worker_silent_seconds", "simm_build_info", "process_cpu_seconds"} <= set(found)
        used = found["simm_process_cpu_seconds"].samples
        assert {sample.labels["process"] for sample in used} >= {"worker", "stream"}
        private = [sample.value for sample in found["simm_process_private_memory_bytes"].samples]
        assert all(0 < size < 64 << 20 for size in private), "the arena is no private memory"
        children = psutil.Process(server.pid).children()
        for child in children:  # worker, stream, and a mover, which ends when all shards are here, or is ended
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGSTOP)
        wait_until(lambda: "[0] do not answer" in page(address, "/healthz")[1], "a worker that hangs is no good health")
        assert page(address, "/healthz")[0] == page(address, "/readyz")[0] == 503
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGCONT)
        wait_until(lambda: page(address, "/healthz")[0] == page(address, "/readyz")[0] == 200, "it is well again")
        cluster.processes["manager"].kill()
        wait_until(lambda: "no manager" in page(address, "/healthz")[1], "the manager is missed")
        assert page(address, "/readyz") == (200, "ready\n"), "the data path needs no manager"


def test_issue_a_recovery_is_no_bad_health(nothing_is_left: Path) -> None:
    """A kubelet ended a data server whose worker took more than half a minute for its arena, with all values."""
    folder = Path(tempfile.mkdtemp(prefix="f", dir=nothing_is_left))  # the fleet removes it
    fleet = Fleet(folder, 1, memory="32M", patches=(SLOWLY,), server_arguments=("--http", "127.0.0.1:0"))
    with fleet, Client(fleet.manager.address, deadline_s=PATIENT_S) as client:
        (server,) = fleet.servers
        http, slow = server.http, server.folder / SLOW
        assert client.put("k", b"v")
        slow.touch()
        before = {each.pid for each in forked_by(server.pid)}
        os.kill(server.worker_pid(), signal.SIGKILL)
        cut_off = f'simm_streams_cut_off{{server="{server.name}",worker="0",numa="0"}} 1'
        wait_until(lambda: cut_off in page(http, "/metrics")[1], "a stream may not miss one that serves so long", 60)
        assert page(http, "/healthz") == (200, "ok, but workers [0] are restarting: they recover their arenas\n")
        assert page(http, "/readyz")[0] == 503
        (successor,) = [each for each in forked_by(server.pid) if each.pid not in before]
        with stopped(successor):
            wait_until(lambda: page(http, "/healthz")[0] == 503, "it hangs", 120)
        wait_until(lambda: page(http, "/healthz")[0] == 200, "it goes on", 60)
        slow.unlink()
        wait_until(lambda: page(http, "/readyz")[0] == page(http, "/healthz")[0] == 200, "it serves", 60)
        assert server.worker_pid() == successor.pid
        wait_until(lambda: client.get("k") == b"v", "the value is still there", 60)

"""A data server's pages: what /healthz says of workers that are gone, and of those that hang."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from simm.server.operators.pages import Row, healthz, metrics
from tests.support.http_page import page
from tests.support.processes import HERE, Cluster
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until


def test_healthz() -> None:
    for arguments, status, word in (
        (([], [], True, False), 200, "ok"),
        (([], [], False, False), 200, "no manager"),
        (([], [], True, True), 200, "no puts"),
        (([0], [], True, False), 503, "restarting"),
        (([], [0, 2], True, False), 503, "[0, 2] do not answer"),
    ):
        made = healthz(*arguments)
        assert made.status == status and word in str(made.body), arguments


def test_metrics_name_the_silent_worker() -> None:
    text = metrics("a", [Row(0, 1, {}, silent_s=7.5)], joined=True, fenced=False, epoch=3).text()
    assert 'simm_worker_silent_seconds{server="a",worker="0",numa="1"} 7.5' in text


@pytest.mark.quick
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

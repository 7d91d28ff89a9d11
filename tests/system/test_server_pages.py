"""A data server's pages: what /healthz says of workers that are gone, and of those that hang."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from simm.server.pages import Row, healthz, metrics
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
    text = str(metrics([Row(0, 1, {}, 0, {}, 7.5)], joined=True, fenced=False, epoch=3).body)
    assert 'simm_worker_silent_seconds{worker="0",node="1"} 7.5' in text


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
        assert page(address, "/healthz") == (200, "ok\n")
        text = page(address, "/metrics")[1]
        assert "simm_worker_silent_seconds" in text
        children = psutil.Process(server.pid).children()
        for child in children:  # worker and stream
            child.send_signal(signal.SIGSTOP)
        wait_until(lambda: "[0] do not answer" in page(address, "/healthz")[1], "a worker that hangs is no good health")
        assert page(address, "/healthz")[0] == 503
        for child in children:
            child.send_signal(signal.SIGCONT)
        wait_until(lambda: page(address, "/healthz")[0] == 200, "it is well again")

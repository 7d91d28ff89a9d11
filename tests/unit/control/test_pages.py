"""When a manager is ready, and the line that a service manager shows of it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from simm.cluster.machine import Cluster
from simm.control.activity import Activity
from simm.control.events import EventLog
from simm.control.pages import ManagerPages, Standing
from simm.manager import Manager
from simm.net.loop import Loop


def pages(*, leading: bool = True, leader: str = "", rebuilding: bool = False, trouble: str = "") -> ManagerPages:
    status: dict[str, Any] = {
        "manager": {"leading": leading}, "epoch": 7, "states": {"running": 2, "suspect": 1}, "shards_without_owner": 0,
    }  # fmt: skip
    standing = Standing(leading, leader, rebuilding)
    return ManagerPages(
        lambda: status, lambda: standing, lambda: trouble, Activity(), EventLog(lambda: 0), lambda: 0.0
    )


@pytest.mark.parametrize(
    ("made", "status", "text"),
    [
        (pages(), 200, "ready, leads\n"),
        (pages(trouble="the state cannot be stored"), 200, "ready, leads\n"),
        (pages(rebuilding=True, trouble="collecting the map from the servers"), 503, "collecting the map"),
        (pages(leading=False, leader="a:1", trouble="standing by, a:1 leads"), 200, "ready, standing by, a:1 leads\n"),
        (pages(leading=False, trouble="standing by, no manager leads yet"), 503, "standing by, no manager leads yet\n"),
    ],
)  # fmt: skip
def test_a_manager_is_ready_where_peers_get_an_answer(made: ManagerPages, status: int, text: str) -> None:
    page = made.readyz()
    assert page.status == status and page.body.startswith(text)
    assert made.healthz().status == 200, "a restart would not help"


def test_the_line_for_a_service_manager() -> None:
    assert pages().line() == "epoch 7; data servers: 2 running, 1 suspect"
    assert pages(trouble="the state cannot be stored").line().endswith("suspect; the state cannot be stored")
    assert pages(leading=False, trouble="standing by, a:1 leads").line() == "standing by, a:1 leads"


def test_issue_nobody_without_a_token_has_the_cluster_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of servers that have gone each answer took 160 ms of the manager's loop."""
    described: list[float] = []
    status = Cluster.status

    def counted(cluster: Cluster, now: float) -> dict[str, Any]:
        described.append(now)
        return status(cluster, now)

    monkeypatch.setattr(Cluster, "status", counted)
    with contextlib.closing(Loop()) as loop:
        made = Manager(loop).pages
        assert [made.healthz().body, made.readyz().body, made.leader().body] == ["ok\n", "ready, leads\n", "leads\n"]
        assert not described
        made.metrics()
        assert described, "control"


def test_issue_metrics_of_servers_that_are_gone_were_memory_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of them were several times what there is after servers were replaced. Shards still wait for them."""
    loads = {"moving_in": 0, "moving_out": 0, "moved_bytes": 0, "capacity_bytes": 64, "used_bytes": 60, "entries": 7}
    nodes = [
        {"name": state, "state": state, "drained": False, "workers": [{"worker": 0, "shards": 5, **loads}]}
        for state in ("running", "suspect", "dead", "left")
    ]
    status = Cluster.status
    monkeypatch.setattr(Cluster, "status", lambda cluster, now: {**status(cluster, now), "nodes": nodes})
    with contextlib.closing(Loop()) as loop:
        lines = Manager(loop).pages.metrics().text().splitlines()
    for name, servers in (
        ("shards", ["running", "suspect", "dead", "left"]), ("capacity_bytes", ["running", "suspect"]),
        ("used_bytes", ["running", "suspect"]), ("entries", ["running", "suspect"]),
        ("moved_bytes", ["running", "suspect"]),
    ):  # fmt: skip
        found = [line.split('"')[1] for line in lines if line.startswith(f"simm_worker_{name}{{")]
        assert found == servers, name

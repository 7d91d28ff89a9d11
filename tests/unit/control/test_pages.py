"""When a manager is ready, and the line that a service manager shows of it."""

from __future__ import annotations

from typing import Any

import pytest

from simm.control.activity import Activity
from simm.control.events import EventLog
from simm.control.pages import ManagerPages


def pages(*, leading: bool = True, leader: str = "", rebuilding: bool = False, trouble: str = "") -> ManagerPages:
    nodes = [{"state": "running"}, {"state": "suspect"}, {"state": "running"}]
    status: dict[str, Any] = {
        "manager": {"leading": leading, "leader": leader}, "rebuilding": rebuilding, "epoch": 7, "nodes": nodes,
        "shards_without_owner": 0,
    }  # fmt: skip
    return ManagerPages(lambda: status, lambda: trouble, Activity(), EventLog(lambda: 0), lambda: 0.0)


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

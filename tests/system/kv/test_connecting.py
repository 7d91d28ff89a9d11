"""``Store()`` before its manager, at a wrong port, in an image with variables of its own; and what it logs."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from simm.config import settings
from simm.kv import Block, Store
from simm.net.channel import Refused
from simm.sdk import routing
from simm.sdk.manager_link import ManagerClient
from tests.support.client_values import forked
from tests.support.kv_values import content, filled, point_at
from tests.support.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def said(caplog: pytest.LogCaptureFixture, level: int, part: str) -> list[str]:
    """Return what was logged at this level or above and has this part."""
    lines = [record.getMessage() for record in caplog.records if record.levelno >= level]
    return [line for line in lines if part in line]


def test_an_engine_may_start_before_its_manager(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "simm")
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setenv("SIMM_HOME", "/opt/simm")
    monkeypatch.setenv("SIMM_MEMORY", "a word of the image's")
    monkeypatch.setenv("SIMM_DEADLINE_MS", "30000")
    cluster = make_cluster(memory="64M")
    cluster.kill("manager")
    point_at(cluster.manager)
    view, back = filled(b"value"), Block(5)
    with Store() as store:
        for _ in range(20):
            assert store.put("k", view) < 0
            assert store.get("k", back.view()) < 0
            assert not store.exists("k")
        assert len(said(caplog, logging.WARNING, "no manager answers")) == 1
        assert len(said(caplog, logging.WARNING, "SIMM_HOME")) == 1
        with Store() as second:
            assert second._client is store._client, "the client that is still connecting is shared"
        cluster.start_manager()
        wait_until(lambda: store.put("k", view) == 0, "the store finds its cluster")
        assert store.get("k", back.view()) == 5 and content(back) == b"value"
        wait_until(lambda: said(caplog, logging.WARNING, "following the manager"), "it says so")
        assert len(said(caplog, logging.WARNING, "following the manager")) == 1

        def child() -> bool:
            return store.get("k", Block(5).view()) == 5

        assert forked(child) == 0, "a child waits for the first answer: no needless miss"


def test_a_data_servers_port_is_no_managers(
    cluster: Any, namespace: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client is told once, and does not ask again."""
    point_at(cluster.manager)
    with Store() as store:
        assert store._client is not None and store._client.wait_ready(60.0) and store._client._router is not None
        (target,) = store._client._router.targets.values()
        info = target.info
    before = cluster.log("dataserver").read_text()
    point_at(f"{info.host}:{info.port}")
    with pytest.raises(RuntimeError, match=r"no manager at this address .*a data server listens here.*SIMM_MANAGER"):
        Store()
    with ManagerClient([(info.host, info.port)]) as commands, pytest.raises(Refused, match="a data server listens"):
        commands.status()
    assert cluster.log("dataserver").read_text() == before
    assert not caplog.records


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_one_line_says_what_it_is_connected_to(
    cluster: Any, namespace: str, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "simm")
    monkeypatch.setattr(routing, "ANNOUNCE_S", 60.0)
    monkeypatch.setenv("SIMM_PATH", path)
    point_at(cluster.manager)
    with Store() as store:
        wait_until(lambda: said(caplog, logging.INFO, "cluster "), "the line is logged before any operation")
        assert store.put("k", filled(b"v")) == 0
        assert store.get("k", Block(1).view()) == 1
    (line,) = said(caplog, logging.INFO, "")
    namespace_text = rf"namespace '{namespace}' \(SIMM_NAMESPACE; one for each model\)"
    reason = r" \(path=tcp was asked for\)" if path == "tcp" else ""
    wanted = rf"cluster [0-9a-f]{{16}} at {cluster.manager}, {namespace_text}, map of epoch \d+: \S+/0 {path}{reason}"
    assert re.fullmatch(wanted, line), line

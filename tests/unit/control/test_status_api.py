"""/api/v1/status: docs/status-api.md has every key of it, and the page asks for nothing else."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.cluster.nodes import Answer, MapChanged, Node, NodeChanged, NodeState
from simm.cluster.snapshot import GONE_SHOWN
from simm.config.tokens import Token, TokenRole
from simm.control import status_page
from simm.control.events import EVENTS_MAX, TEXT_MAX, EventLog
from simm.manager import Manager
from simm.net.loop import Loop
from simm.tools.nodes import state_text
from simm.wire.messages import Join, Status, WorkerInfo, WorkerLoad
from tests.support.reports import report

DOCS = (Path(__file__).parents[3] / "docs" / "status-api.md").read_text()


@pytest.fixture
def manager() -> Iterator[Manager]:
    made = Manager(Loop(lambda: 1000.0))  # reports grow no older, nor does an answer that is kept
    yield made
    made.loop.close()


def status(manager: Manager) -> Any:
    manager.pages._made = None
    page = manager.pages.api()
    assert page.status == 200 and page.content_type.startswith("application/json")
    return json.loads(page.body)


def with_a_server(manager: Manager) -> Any:
    """Let a server join and report twice, and return the status."""
    now = manager.loop.clock()
    info = WorkerInfo(0, 1, 1, 5, 1 << 30, "a", "/run/w", "10.0.0.1", 4000)
    manager._apply(manager.cluster.join(now, Join(5, 0, "a", [info])))
    actions = manager.cluster.heartbeat(now, "a", 5, 0, [WorkerLoad(1 << 20, 7, 8, 9)])
    assert isinstance(actions[0], Answer) and actions[0].status == Status.OK
    manager.activity.take(report(counts=[10, 10, 0, 0, 0, 0, 0], instance=5), now - 1.0)
    manager.activity.take(report(counts=[40, 20, 5, 1, 4096, 100, 2], instance=5), now)
    manager.activity.look(manager.cluster.nodes, now)
    return status(manager)


def documented() -> dict[str, set[str]]:
    """Return the keys of each object that the page lists, by the object's name."""
    found: dict[str, set[str]] = {}
    for part in DOCS.split("\n| key")[1:]:
        head, _, rows = part.partition("\n")
        name = re.search(r"`(\w+)`", head)
        keys = found.setdefault(name[1] if name else "", set())
        for row in rows.splitlines():
            if row.startswith("| `"):
                keys.update(re.findall(r"`(\w+)`", row.split("|")[1]))
    return found


def test_every_key_is_documented_and_every_documented_key_is_there(manager: Manager) -> None:
    found, listed = with_a_server(manager), documented()
    node = found["nodes"][0]
    objects: dict[str, dict[str, Any]] = {
        "": found, "manager": found["manager"], "cluster": found["cluster"], "rates": found["rates"],
        "latency": found["latency"]["get"], "since_start": found["since_start"], "nodes": node,
        "workers": node["workers"][0], "namespaces": found["namespaces"][0], "clients": found["clients"][0],
        "events": found["events"][0], "history": found["history"],
    }  # fmt: skip
    assert {name: set(each) for name, each in objects.items()} == listed
    assert set(found["latency"]) == {"get", "get_many", "put", "put_many"} and set(node["rates"]) == listed["rates"]
    assert "gets_per_s" in listed["rates"] and len(listed) == 12, "the page was read"


def test_what_it_says_of_a_cluster(manager: Manager) -> None:
    empty = status(manager)
    assert empty["nodes"] == [] == empty["clients"] and empty["rates"]["hit_ratio"] is None
    assert empty["cluster"]["shards_without_owner"] == empty["cluster"]["shards"] and empty["version"] == 1
    found = with_a_server(manager)
    (node,) = found["nodes"]
    assert (node["name"], node["entries"], node["used_bytes"], node["clients"]) == ("a", 7, 1 << 20, 3)
    assert node["rates"]["hits_per_s"] == 30 and found["rates"]["hit_ratio"] == 0.75
    assert found["since_start"] == {
        "gets": 60, "hit_ratio": 40 / 60, "hits": 40, "misses": 20, "puts": 5, "put_failures": 1, "bytes_read": 4096,
        "bytes_put": 100, "exists": 2,
    }  # fmt: skip
    assert found["clients"][0]["pid"] == 77 and found["clients_left_out"] == 2
    assert found["history"]["gets_per_s"] == [40.0] and found["history"]["used_bytes"] == [1 << 20]
    assert any("joining" in event["text"] for event in found["events"])
    manager.activity.forget()
    assert status(manager)["nodes"][0]["rates"] is None, "without reports the heartbeats' numbers remain"


@pytest.mark.parametrize("bound", [True, False])
def test_issue_a_reader_of_the_page_learns_no_namespace_of_others(bound: bool) -> None:
    """Each tenant reads it, and a namespace's name keeps others from asking which of its keys are stored."""
    tokens = [Token("the-token-of-somebody", TokenRole.CLIENT, "free")]
    if bound:
        tokens.append(Token("the-token-of-a-team", TokenRole.CLIENT, "team", {"theirs": 1 << 30}))
    manager = Manager(Loop(lambda: 1000.0), tokens=tokens)
    with contextlib.closing(manager.loop):
        with_a_server(manager)  # which names "n" to the manager, as it does if that has a quota
        for name in ("n", "secret-4711"):
            manager._apply(manager.cluster.advance(1000.0, name))
        epochs = dict(manager.cluster.namespaces.table())
        shown = {each["name"]: each["epoch"] for each in status(manager)["namespaces"]}
        assert shown == ({"n": epochs["n"]} if bound else epochs)


def test_servers_that_went_long_ago_are_a_number(manager: Manager) -> None:
    with_a_server(manager)
    for number in range(GONE_SHOWN + 44):
        name = f"gone-{number}"
        info = WorkerInfo(0, 0, 1, 5, 1, name, "/w", "h", 4)
        node = manager.cluster.nodes[name] = Node(name, 5, [info], NodeState.LEFT, float(number))
        node.released = node.cold = True
    manager.cluster.nodes["gone-7"].draining = True
    found = status(manager)
    names = {node["name"] for node in found["nodes"]}
    assert len(names) == 1 + GONE_SHOWN and found["nodes_left_out"] == 44
    assert names >= {"a", "gone-7", f"gone-{GONE_SHOWN + 43}"}, "the last to go, and those with an operator's order"
    assert "gone-44" not in names
    metrics = manager.pages.metrics().text()
    for state, count in (("left", GONE_SHOWN + 44), ("running", 1), ("dead", 0)):
        assert f'simm_manager_nodes{{state="{state}"}} {count}\n' in metrics


@pytest.mark.parametrize("dies", [False, True])
def test_issue_a_drained_server_that_was_stopped_is_none_to_be_stopped(manager: Manager, dies: bool) -> None:
    """The order to drain it stays for its return, and it was counted as empty for a day."""
    with_a_server(manager)
    cluster, now = manager.cluster, manager.loop.clock()
    cluster.join(now, Join(5, 0, "b", [WorkerInfo(0, 0, 1, 5, 1, "b", "/w", "h", 4)]))
    cluster.heartbeat(now, "b", 5)
    cluster.drain(now, "b", True)
    assert "\nsimm_manager_nodes_drained 1\n" in manager.pages.metrics().text(), "the control"
    if dies:
        cluster.nodes["b"].state = NodeState.DEAD
    else:
        cluster.leave(now, "b", 5)
    assert "\nsimm_manager_nodes_drained 0\n" in manager.pages.metrics().text()
    assert status(manager)["nodes"][1]["drained"], "it was emptied before it went"


def test_many_who_ask_get_one_answer(manager: Manager) -> None:
    first = manager.pages.api()
    manager.cluster.join(manager.loop.clock(), Join(5, 0, "late", [WorkerInfo(0, 0, 1, 5, 1, "late", "/w", "h", 4)]))
    assert manager.pages.api().body is first.body


def test_events_are_bounded_text() -> None:
    log = EventLog(lambda: 3, lambda: 12.5)
    assert log.note(MapChanged(7)) and not log.note(Answer(None, Status.OK))
    assert log.note(NodeChanged("a", NodeState.RUNNING, NodeState.DEAD, "silent\x1b[0m" * 1000))
    newest, oldest = log.newest()
    assert oldest == {"time": 12.5, "warning": False, "text": "epoch 7: 3 workers"}
    assert newest["warning"] and newest["text"].isprintable() and "running -> dead" in newest["text"]
    assert len(newest["text"]) < 6 * TEXT_MAX
    for number in range(3 * EVENTS_MAX):
        log.add(str(number))
    assert len(log.newest()) == EVENTS_MAX and log.newest()[0]["text"] == str(3 * EVENTS_MAX - 1)


# -- the file ----------------------------------------------------------------------------------------


def test_the_policy_names_the_very_style_and_script() -> None:
    page = status_page.page()
    headers = dict(page.headers)
    policy = headers["Content-Security-Policy"]
    for element in ("script", "style"):
        (inner,) = re.findall(f"<{element}>(.*?)</{element}>", page.body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    assert headers["X-Frame-Options"] == "DENY" and headers["Referrer-Policy"] == "no-referrer"
    assert status_page.policy(page.body.replace("const EVERY_MS", "const  EVERY_MS")) != policy, "control"


def test_the_page_loads_nothing_and_makes_no_markup_of_text() -> None:
    body = status_page.page().body
    allowed = "http://www.w3.org/2000/svg"  # a name, which nobody loads
    assert re.findall(r"https?://[^\"'\s]+", body) == [allowed]
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", body) == ["data:,", "api/v1/status", "metrics"]
    for sink in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", " style=", " onc"):
        assert sink not in body


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js to run the page's script")
def test_issue_the_page_says_of_a_drained_server_that_it_is_gone() -> None:
    """A server that died while it was to be drained was shown as drained, as one that may be stopped without a loss."""
    body = status_page.page().body
    (function,) = re.findall(r"^function stateText\(.*?^}$", body, re.DOTALL | re.MULTILINE)
    assert body.count("stateText(node)") == 2, "what the table shows"
    nodes = [
        {"state": state.value, "draining": draining, "drained": drained}
        for state in NodeState for draining, drained in ((False, False), (True, False), (True, True))
    ]  # fmt: skip
    script = f"{function}\nconsole.log(JSON.stringify({json.dumps(nodes)}.map(stateText)))"
    ran = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    shown = dict(zip([json.dumps(node) for node in nodes], json.loads(ran.stdout), strict=True))
    assert shown == {json.dumps(node): state_text(node) for node in nodes}, "as the commands say"

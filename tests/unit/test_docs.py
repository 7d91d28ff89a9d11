"""The operator's page names every setting and metric that there is, and each of them is connected to something."""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import simm
from simm.config.settings import SETTINGS, Settings
from simm.control import pages
from simm.manager import Manager
from simm.net.loop import Loop
from simm.server.pages import _RDMA, _WORKER, Row, metrics
from tests.support.endpoint_thread import EndpointThread
from tests.support.fake_fabric import FakeNetwork
from tests.support.worker_thread import WorkerThread

OPERATIONS = (Path(simm.__file__).parents[1] / "docs" / "operations.md").read_text()


# --- settings ---------------------------------------------------------------------------------


def settings_read(sources: Iterable[str]) -> set[str]:
    """Settings that some source takes as an attribute of ``settings``, ``self.settings`` or ``self._settings``."""
    found = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Attribute) and node.attr in SETTINGS:
            holder = node.value
            name = holder.id if isinstance(holder, ast.Name) else getattr(holder, "attr", "")
            if name.strip("_") == "settings":
                found.add(node.attr)
    return found


def test_every_setting_is_read_somewhere() -> None:
    """A setting that parses, shows up in ``simm config show`` and changes nothing would help nobody."""
    declared = sys.modules[Settings.__module__].__file__
    sources = [path.read_text() for path in Path(simm.__file__).parent.rglob("*.py") if str(path) != declared]
    assert set(SETTINGS) - settings_read(sources) == set(), "declared, and read by no module"


def test_mutation_a_setting_that_nobody_reads() -> None:
    assert settings_read(["settings.warm; self.settings.memory; self._settings.slots"]) == {"warm", "memory", "slots"}
    assert settings_read(["import warm\nwarm = options.warm\nprint('settings.warm', settings, warm.settings)"]) == set()


def test_every_setting_is_in_the_operators_page() -> None:
    missing = [setting.flag for setting in SETTINGS.values() if not re.search(rf"`{setting.flag}[` ]", OPERATIONS)]
    assert not missing, f"docs/operations.md does not name {missing}"


# --- metrics ----------------------------------------------------------------------------------


def names_in(page: str) -> set[str]:
    """Metrics that a page names: ``simm_a_b`` in full, and later in that line ``_c`` for simm_c or simm_a_c."""
    found = set()
    for line in page.splitlines():
        whole: list[str] = []
        for name in re.findall(r"`(\w+)(?:\{[^`]*\})?(?: \d)?`", line):
            if name.startswith(("simm_", "process_")):
                whole.append(name)
            elif name.startswith("_"):
                found |= {first[: cut.start()] + name for first in whole for cut in re.finditer("_", first)}
        found.update(whole)
    return found


def shown(text: Any) -> set[str]:
    """Metrics in Prometheus text."""
    return set(re.findall(r"^# TYPE (\w+) ", str(text), re.MULTILINE))


def test_every_metric_is_in_the_operators_page() -> None:
    rdma = dict.fromkeys((key for _, _, _, key in _RDMA), 0) | {"ready": True, "why": ""}
    row = Row(0, 0, {"evictions": {"own": 1}}, 0, rdma=rdma)
    made = shown(metrics([row], joined=True, fenced=False, epoch=1).body)
    manager = Manager(Loop())
    try:
        made |= shown(manager.pages.metrics().body)
    finally:
        manager.loop.close()
    made |= {f"simm_worker_{name}" for _, name, _ in pages._WORKER}
    assert {"simm_entries", "simm_rdma_ready", "simm_evictions_total", "simm_manager_epoch"} <= made
    assert "process_resident_memory_bytes" in made
    missing = sorted(made - names_in(OPERATIONS))
    assert not missing, f"docs/operations.md does not name {missing}"


def test_mutation_a_metric_that_the_page_does_not_name() -> None:
    names = names_in("| `simm_a_b`, `_c_total{x}`, `_d` | `simm_e 1` |\n| `_f`, simm_g |")
    assert {"simm_a_b", "simm_c_total", "simm_a_c_total", "simm_d", "simm_e"} <= names
    assert not {"simm_f", "simm_a_f", "simm_g", "simm_x"} & names


@pytest.fixture(scope="module")
def reported() -> Any:
    """What a worker and its endpoint say of themselves."""
    network = FakeNetwork(random.randrange(1 << 30), background=True)
    with WorkerThread() as worker, EndpointThread(worker.path, network) as endpoint:
        with worker.frozen():
            own = worker.worker.stats()
        yield {"worker": own, "endpoint": endpoint.ready().stats()}


@pytest.mark.parametrize("key", [key for _, _, _, key in _WORKER])
def test_every_metric_of_a_worker_is_reported_by_it(reported: Any, key: str) -> None:
    """The page shows 0 for a number that a worker does not report, so a misspelled key would go unnoticed."""
    assert key in reported["worker"]


@pytest.mark.parametrize("key", [key for _, _, _, key in _RDMA if key != "restarts"])
def test_every_metric_of_an_endpoint_is_reported_by_it(reported: Any, key: str) -> None:
    assert key in reported["endpoint"]

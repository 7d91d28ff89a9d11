"""The operators' pages name every setting and metric that there is, and each of them is connected to something."""

from __future__ import annotations

import ast
import itertools
import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import simm
from simm.arena.events.victims import Victims
from simm.cli import COMMANDS
from simm.config.settings import SETTINGS, Settings
from simm.control import pages
from simm.index import figures
from simm.index.publish import figures as publisher
from simm.ipc.counts import GET, Word
from simm.ipc.tally import Totals
from simm.manager import Manager
from simm.net.loop import Loop
from simm.net.metrics import CERTIFICATE
from simm.server.operators.pages import _RDMA, _WORKER, METRICS, Row, metrics
from simm.server.operators.usage import Usage
from simm.tools.ctl.command import _SUBJECTS
from simm.tools.engine import ENGINES
from tests.support import metrics_page
from tests.support.endpoint_thread import EndpointThread
from tests.support.fake_fabric import FakeNetwork
from tests.support.worker_thread import WorkerThread

DOCS = Path(simm.__file__).parents[1] / "docs"
OPERATIONS = (DOCS / "operations.md").read_text()
README = (DOCS.parent / "README.md").read_text()


# --- questions --------------------------------------------------------------------------------


def rows_of(page: str, head: str) -> list[list[str]]:
    """Return the cells of the table whose first line is ``head``, without that and the rule below it."""
    lines = page.partition(f"{head}\n")[2].splitlines()[1:]
    table = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_each_question_of_an_operator_has_an_answer() -> None:
    """A metric, a command and a page here, beside what other systems have; and what is named is there."""
    ours = rows_of(OPERATIONS, "| question | metric | command | page |")
    others = rows_of((DOCS / "questions.md").read_text(), "| question | Redis | memcached | etcd | Mooncake |")
    assert len(ours) > 15 and [row[0] for row in ours] == [row[0] for row in others]
    assert [row for row in ours if len(row) != 4 or not all(row)] == []
    assert [row for row in others if len(row) != 5 or not all(row)] == []
    metrics_page_text = (DOCS / "metrics.md").read_text()
    for question, metric, command, _ in ours:
        named = re.findall(r"`(simm_[a-z_]+)`", metric)
        assert named and all(f"| `{name}` |" in metrics_page_text for name in named), question
        for words in re.findall(r"`simm ([a-z -]+)", command):
            assert words.split()[0] in COMMANDS, f"{question} simm {words}"
            if words.startswith("ctl ") and words.split()[1] != "why":
                assert words.split()[1] in _SUBJECTS, f"{question} simm {words}"


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
    sources = [source for source in sources if "settings" in source]
    assert set(SETTINGS) - settings_read(sources) == set(), "declared, and read by no module"


def test_mutation_a_setting_that_nobody_reads() -> None:
    assert settings_read(["settings.warm; self.settings.memory; self._settings.slots"]) == {"warm", "memory", "slots"}
    assert settings_read(["import warm\nwarm = options.warm\nprint('settings.warm', settings, warm.settings)"]) == set()


def test_every_setting_is_in_the_operators_page() -> None:
    missing = [setting.flag for setting in SETTINGS.values() if not re.search(rf"`{setting.flag}[` ]", OPERATIONS)]
    assert not missing, f"docs/operations.md does not name {missing}"


def test_the_readme_says_what_keeps_models_apart() -> None:
    """SGLang's own backend names no model in its keys: without namespaces it reads another model's pages as hits."""
    sglang = README.partition("\n- **SGLang**")[2].partition("\n- **vLLM**")[0]
    assert "`SIMM_NAMESPACE`" in sglang


def test_the_readme_has_three_lines_for_each_engine() -> None:
    rows = rows_of(README, "| SGLang | vLLM | LMCache |")
    assert len(rows) == 3 and all(re.fullmatch("`[^`]+`", cell) for row in rows for cell in row)
    printed = [cell.strip("`").removeprefix("simm engine ") for cell in rows[1]]
    assert len(printed) == 3 and set(printed) <= set(ENGINES)


# --- metrics ----------------------------------------------------------------------------------


def names_in(page: str) -> set[str]:
    """Metrics that a page names, in full: `simm_a_b`, `simm_a_b{label="x"}`, `simm_a_b 1`."""
    return set(re.findall(r"`((?:simm|process)_[a-z0-9_]+)(?:\{[^`]*\})?(?: \d+)?`", page))


def test_the_page_of_metrics_is_made_of_their_declarations() -> None:
    """HELP, type and labels of what a server shows stand there word for word; and nothing else does."""
    made = metrics_page.page()
    assert (DOCS / "metrics.md").read_text() == made, "python -m tests.support.metrics_page > docs/metrics.md"


def test_issue_the_commands_of_the_readme_find_the_servers_that_it_starts() -> None:
    """They had no manager, and no token for the servers, which have one."""
    block = README.partition("## Deployment")[2].split("```")[1]
    words = {line.split()[1]: line.split() for line in block.splitlines() if line.startswith(("simm ", "export "))}
    lines = list(words)
    (exported,) = [line for line in block.splitlines() if line.startswith("export ")]
    given = dict(word.split("=", 1) for word in exported.partition("  #")[0].split()[1:])
    for server in ("manager", "dataserver"):
        assert words[server][words[server].index("--token-file") + 1] == given["SIMM_TOKEN_FILE"]
    assert words["manager"][words["manager"].index("--listen") + 1] == given["SIMM_MANAGER"]
    at = next(number for number, line in enumerate(lines) if line.startswith("SIMM_"))
    assert {"status", "top", "ctl", "node"} == set(lines[at + 1 :]) and "manager" in lines[:at]


@pytest.mark.parametrize("path", [*DOCS.glob("*.md"), DOCS.parent / "README.md"], ids=lambda path: path.name)
def test_pages_name_only_metrics_that_there_are(path: Path) -> None:
    known = {metric.name for metric in (*pages.METRICS, *METRICS, *figures.METRICS, *publisher.METRICS)}
    assert {name for name in names_in(path.read_text()) if name.startswith("simm_")} - known == set()


def test_mutation_a_metric_that_is_not_there() -> None:
    text = '| `simm_a_b`, `simm_c_total{x="y"}` | `process_e 1` |\n| `_f`, simm_g `simm status` |'
    assert names_in(text) == {"simm_a_b", "simm_c_total", "process_e"}


def test_a_manager_shows_what_it_declares() -> None:
    manager = Manager(Loop())
    try:
        plain = manager.pages.metrics().text()
        manager.pages.tls = SimpleNamespace(certificate_ends=lambda: 7.0)  # type: ignore[assignment]
        text = manager.pages.metrics().text()
    finally:
        manager.loop.close()
    assert f"\n{CERTIFICATE.name} 7" in text and f"\n{CERTIFICATE.name}" not in plain
    declared = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert declared == [metric.name for metric in pages.METRICS]
    empty = {metric.name for metric in pages._WORKER.values()}  # it has no data server
    assert {name for name in declared if f"\n{name}" not in text} == empty


def test_a_data_server_shows_what_it_declares() -> None:
    quotas = {"a": {"used_bytes": 1, "quota_bytes": 2}}
    kept = {"bytes": {"a": {"hard": 1}}, "slots": {"a": {"hard": 1}}, "failures": {"over_quota": 1}}
    stats = {
        **Victims().stats(), "evictions_by_chunk": {"4096": 1}, "put_failures": {"no_room": 1}, "quotas": quotas,
        "kept": kept, "near": {"made": 1},
    }  # fmt: skip
    rdma = dict.fromkeys(_RDMA, 0) | {"ready": True, "reason": ""}
    totals = Totals()
    totals.counters("a")[Word.HITS] += 1
    totals.observe(GET, 5000)
    used = {"worker": Usage(1.0, 2, 3, 4, 5)}
    row = Row(0, 1, stats, rdma=rdma, restarts={"worker": 1}, usage=used, counted={"shm": totals})
    text = metrics("host-21", [row], joined=True, fenced=False, epoch=1, certificate_ends=7.0).text()
    declared = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert declared == [metric.name for metric in METRICS]
    assert {name for name in declared if f"\n{name}" not in text} == set()
    assert 'simm_entries{server="host-21",worker="0",numa="1"} 0' in text


@pytest.fixture(scope="module")
def reported() -> Any:
    """What a worker and its endpoint say of themselves."""
    network = FakeNetwork(random.randrange(1 << 30), background=True)
    with WorkerThread() as worker, EndpointThread(worker.path, network) as endpoint:
        with worker.frozen():
            own = worker.worker.stats()
        yield {"worker": own, "endpoint": endpoint.ready().stats()}


@pytest.mark.parametrize("key", list(_WORKER))
def test_every_metric_of_a_worker_is_reported_by_it(reported: Any, key: str) -> None:
    """The page shows 0 for a number that a worker does not report, so a misspelled key would go unnoticed."""
    assert key in reported["worker"]


@pytest.mark.parametrize("key", list(_RDMA))
def test_every_metric_of_an_endpoint_is_reported_by_it(reported: Any, key: str) -> None:
    assert key in reported["endpoint"]


def test_nobody_is_told_to_install_a_name_that_is_on_no_index() -> None:
    """Until SiMM is published: whoever takes the name ``simm-store`` first would run code at all who are told so."""
    root = DOCS.parent
    files = [*root.glob("simm/**/*.py"), *root.glob("docs/*.md"), *root.glob("examples/*.*"), root / "README.md"]
    told = re.compile(r"pip3? install [^\n`]*\bsimm-store\b")
    assert not [f"{path}: {found.group()}" for path in files if (found := told.search(path.read_text()))]

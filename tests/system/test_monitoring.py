"""deploy/monitoring on a live cluster: what rules and panels ask for is there, and Prometheus takes all of it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from simm.client import Client
from simm.index import figures as index
from simm.index.publish import figures as publisher
from simm.ipc.counts import SAMPLE
from tests.support.http_page import page
from tests.support.metric_rules import faults
from tests.support.monitoring import ADDED_METRICS, MISSING, expressions, filled_in, metrics_in, panels
from tests.support.processes import Cluster, new_folder
from tests.support.prometheus_server import PROGRAM, PrometheusServer
from tests.support.waiting import wait_until

#: Panels that show nothing here: nobody has a quota, and this host no RDMA.
EMPTY = {"Quotas in use", "RDMA connections", "Values that came by RDMA"}


@pytest.fixture(scope="module")
def watched(nothing_is_left: Path) -> Iterator[Cluster]:
    """A cluster with pages, at work."""
    http = ("--http", "127.0.0.1:0")
    with Cluster(new_folder(), memory="16M", manager_arguments=http, server_arguments=http) as cluster:
        with Client(cluster.manager, namespace="monitoring", deadline_s=30.0) as client:
            assert all(client.put(f"key {number}", b"x" * 100_000) for number in range(100))
            assert all(client.get("key 90") for _ in range(2 * SAMPLE)), "some of them are timed"
            assert client.delete("key 99")
        yield cluster


def declared(text: str) -> dict[str, tuple[str, str, set[str]]]:
    """Return the metrics of a page: type, HELP and labels."""
    found = {}
    for family in read_text(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        kind = "info" if name.endswith("_info") else family.type
        labels = {label for sample in family.samples for label in sample.labels}
        found[name] = kind, family.documentation, labels - {"le"} if kind == "histogram" else labels
    return found


@pytest.mark.quick
def test_rules_and_panels_name_what_a_live_cluster_shows(watched: Cluster) -> None:
    # Those of commands that this cluster does not run.
    shown: dict[str, object] = {metric.name: metric for metric in (*index.METRICS, *publisher.METRICS)}
    for server in watched.processes.values():
        text = page(server.http, "/metrics")[1]
        found = declared(text)
        assert [fault for name, about in found.items() for fault in faults(name, *about)] == []
        assert sum(line.startswith("# TYPE") for line in text.splitlines()) == len(found), "each is declared once"
        shown.update(found)
    for name, expression in expressions():
        assert metrics_in(expression) <= set(shown) | ADDED_METRICS, name


@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
def test_prometheus_evaluates_all_rules_and_panels(watched: Cluster, tmp_path: Path) -> None:
    addresses = {f"simm-{module}": [process.http] for module, process in watched.processes.items()}
    with PrometheusServer(tmp_path / "p", addresses) as prometheus:
        wait_until(lambda: prometheus.query("sum(rate(simm_puts_total[1m])) >= 0"), "both jobs were scraped twice")
        wait_until(lambda: prometheus.query("rate(process_cpu_seconds_total{job='simm-manager'}[1m])"), "the other too")

        def up() -> bool:  # a scrape has a second, which a busy machine may not keep
            return {sample["value"][1] for sample in prometheus.query("up")} == {"1"}

        wait_until(up, "both are up")
        empty = set()
        for panel in panels():
            found = [prometheus.query(filled_in(target["expr"])) for target in panel["targets"]]
            if not any(found):
                empty.add(panel["title"])
        assert empty == EMPTY
        assert prometheus.query("sum(simm_entries)")[0]["value"][1] != "0"

        def evaluated() -> bool:
            return all(rule["health"] != "unknown" for rule in prometheus.rules().values())

        wait_until(evaluated, "all rules were evaluated")
        assert {name: rule["lastError"] for name, rule in prometheus.rules().items() if rule["health"] != "ok"} == {}

        def alerting() -> list[str]:
            return [name for name, rule in prometheus.rules().items() if rule["state"] != "inactive"]

        wait_until(lambda: not alerting(), lambda: f"no alert: {alerting()}")  # after a scrape that failed
        watched.kill("dataserver")
        wait_until(lambda: prometheus.rules()["SimmDataServerDown"]["state"] == "pending", "an alert begins to fire")


@pytest.mark.quick
def test_a_scraper_that_asks_for_openmetrics_gets_it(watched: Cluster) -> None:
    address = watched.processes["manager"].http
    request = urllib.request.Request(
        f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        families = {family.name for family in read_openmetrics(answer.read().decode())}
    assert {"simm_manager_epoch", "simm_manager_joins", "simm_build", "process_cpu_seconds"} <= families

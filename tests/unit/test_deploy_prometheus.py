"""deploy/helm: what a Prometheus operator makes of the chart finds servers, and tells releases and tenants apart."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from simm.control import pages as manager_page
from simm.index import figures as index_page
from simm.index.publish import figures as publisher_page
from simm.server.operators import pages as server_page
from tests.support import chart
from tests.support.chart import CHART, HELM, one, rendered
from tests.support.child import ROOT
from tests.support.monitoring import PROMTOOL, alerts, labels_in, metrics_in

needs_helm = pytest.mark.skipif(HELM is None, reason=chart.MISSING)
WATCHED: Final = {"serviceMonitor.enabled": True, "prometheusRule.enabled": True}
EVERYTHING: Final = {
    "events.enabled": True,
    "dataserver.settings": {"events": "4M"},
    "index.enabled": True,
    "index.existingSecret": "routers",
}


def selectors_without(expression: str, wanted: Mapping[str, str]) -> set[str]:
    """Return the metrics of an expression that lack one of the matchers, or have none."""
    found = {name for name, labels in labels_in(expression) if name and not set(wanted) <= labels}
    for metric in metrics_in(expression):
        uses = len(re.findall(rf"\b{metric}\b", re.sub(r'"[^"]*"', "", expression)))
        matchers = ",".join(f'{k}="{v}"' for k, v in wanted.items())
        right = len(re.findall(rf"\b{metric}{re.escape('{' + matchers)}", expression))
        if uses != right:
            found.add(metric)
    return found


@needs_helm
def test_the_alerts_are_those_of_the_servers_of_the_release(tmp_path: Path) -> None:
    documents = rendered(WATCHED, release="west", namespace="team")
    groups = one(documents, "PrometheusRule")["spec"]["groups"]
    rules = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    wanted = {"kubernetes_namespace": "team", "release": "west"}
    ours = 'kubernetes_namespace="team",release="west"'
    assert list(rules) == list(alerts())
    for name, rule in alerts().items():
        assert selectors_without(rule["expr"], wanted), "positive control: these are of any release"
        assert selectors_without(rules[name]["expr"], wanted) == set(), name
        back = rules[name]["expr"].replace("{" + ours + "}", "").replace(ours + ",", "")
        assert {**rules[name], "expr": back} == rule
    for component in ("manager", "dataserver"):
        (endpoint,) = one(documents, "ServiceMonitor", component)["spec"]["endpoints"]
        added = {each["targetLabel"]: each.get("replacement") for each in endpoint["relabelings"]}
        assert added == {"job": f"simm-{component}", "release": "west", "kubernetes_namespace": None}
        assert endpoint["port"] == "http" and endpoint["authorization"]["credentials"]["name"] == "west-simm-token"
    if PROMTOOL is not None:
        (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": groups}))
        subprocess.run([PROMTOOL, "check", "rules", str(tmp_path / "rules.yml")], check=True, capture_output=True)


def relabelled(endpoint: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, str]:
    """Return what an endpoint's rules make of a sample's labels, as Prometheus does."""
    found = dict(labels)
    for rule in endpoint["metricRelabelings"]:
        if rule.get("action") == "labeldrop":
            found = {name: value for name, value in found.items() if not re.fullmatch(rule["regex"], name)}
        elif match := re.fullmatch(rule["regex"], ";".join(found.get(name, "") for name in rule["sourceLabels"])):
            found[rule["targetLabel"]] = match[1]
    return found


@needs_helm
def test_issue_no_label_of_the_operator_takes_the_place_of_a_metrics_own() -> None:
    """The operator gives each target the labels ``namespace`` and ``endpoint``, which are labels of SiMM's metrics too.

    Prometheus would then rename SiMM's, and alerts by namespace would add up all tenants.
    """
    own = {label for page in (manager_page, server_page, index_page, publisher_page) for metric in page.METRICS
           for label in metric.labels}  # fmt: skip
    assert {"namespace", "endpoint"} <= own, "positive control"
    documents = rendered({**WATCHED, **EVERYTHING}, release="west", namespace="team")
    endpoints = [
        endpoint for each in documents if each["kind"] == "ServiceMonitor" for endpoint in each["spec"]["endpoints"]
    ]
    assert len(endpoints) == 4
    for endpoint in endpoints:
        assert "honorLabels" not in endpoint, "a page could forge the labels by which releases are told apart"
        assert relabelled(endpoint, {"exported_namespace": "tenant", "namespace": "team", "release": "west"}) == {
            "namespace": "tenant", "release": "west",
        }  # fmt: skip
        assert relabelled(endpoint, {"exported_endpoint": "tcp://a:1", "endpoint": "http"}) == {"endpoint": "tcp://a:1"}
        plain = {"namespace": "team", "endpoint": "http"}
        assert relabelled(endpoint, plain) == plain, "of a metric without such labels"
        added = {each["targetLabel"] for each in endpoint["relabelings"]}
        assert {"job", "release", "kubernetes_namespace"} == added and not added & own
    for group in one(documents, "PrometheusRule")["spec"]["groups"]:
        for rule in group["rules"]:
            chosen = set(re.findall(r'(\w+)="(?:team|west)"', rule["expr"]))
            assert chosen == {"kubernetes_namespace", "release"} and not chosen & own, rule["alert"]


def test_the_chart_has_the_alerts_and_no_copy_of_them() -> None:
    assert (CHART / "files" / "alerts.yml").resolve() == ROOT / "deploy" / "monitoring" / "alerts.yml"
